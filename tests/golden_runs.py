"""Two or three rollouts of every method on tiny models, one thread: what a change of behaviour
would change.

    python tests/golden_runs.py --write    rewrites tests/golden/runs.json

Tokens of the first rollout, its loss and gradient norm hold on every torch version; what follows on
the version that the file names. The learning rate is small, because Adam turns the noise of a
gradient that is almost 0 into a full step, and the noise differs between CPUs.
"""

import importlib
import json
import math
import os
import socket
import sys
import tempfile
import zlib
from pathlib import Path

import torch
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
FILE = ROOT / "tests/golden/runs.json"
EVERY = {"max_steps": 2, "eval_every": 2, "eval_limit": 2, "learning_rate": 1e-4, "seed": 8}
ONLINE = EVERY | {
    "prompts_per_step": 2,
    "num_generations": 4,
    "micro_batch_size": 6,
    "reward": "countdown_coin",
}
OFFLINE = EVERY | {"batch_size": 4, "micro_batch_size": 3}
LORA = {"lora_rank": 4}
MOVES = {"max_steps": 3, "num_iterations": 2, "ref_sync_steps": 3}
TRACES = {"num_iterations": 2, "accuracy_range": (0.0, 9.0)}
CASES = {
    "d1-dream": LORA | {"num_iterations": 2},
    "bgpo-llada2": LORA | {"mc_num": 2, "lora_merged_rollout": True},
    "bgpo-sdar-moe": {"mc_num": 3, "num_iterations": 2, "lr_schedule": "cosine"},
    "spg-llada-moe": {"num_iterations": 1, "block_length": 4},
    # the reference stays after 2 updates and moves after 4
    "coupled_grpo-sdar": MOVES | {"baseline": "loo", "top_p": 0.9},
    "cj_grpo-llada": LORA | {"num_iterations": 2, "eos_policy": "eoser", "schedule": "ascending"},
    "dtreerpo-llada": LORA | {"num_iterations": 2, "branches": (2, 2), "lambda_max": 1.0},
    "dtreerpo-sdar": {"num_iterations": 2, "branches": (2, 2), "lambda_max": 1.0},
    "mdpo-llada": {"train_steps": 3, "remasking": "rcr", "num_iterations": 2},
    "espo-llada": {"num_iterations": 2, "ref_sync_steps": 1, "epsilon": 4e-4},
    "ebpo-sdar": {"num_iterations": 2, "mc_num": 3},
    "wd1-llada": LORA | {"num_iterations": 2, "psi": 0.5},
    "justgrpo-llada": LORA | {"denoising_steps": 4, "num_iterations": 2, "positions": 3},
    "tpg-sdar": {"num_iterations": 2, "denoising_steps": 4, "train_steps": 3, "beta": 0.1},
    "tracerl-dream": TRACES | LORA | {"shrink": 2, "row_mean": True},
    "tracerl-sdar": TRACES | {"value_model": True, "denoising_steps": 3, "gamma": 0.9},
    "sft-dream": LORA | {"cart_p": 0.2},
    "sft-sdar": {"pack_length": 128, "max_length": 100},
    "vrpo-llada": LORA | {"mc_num": 2, "micro_batch_size": 8, "share_masks": False},
    "vrpo-sdar": {"mc_num": 2, "masks_per_timestep": 2, "micro_batch_size": 8},
}
SHOWN = "loss/total optim/grad_norm reward/mean loss/kl router/entropy eval/countdown".split()
SHOWN += ["test/countdown"]


def coin(completion, example):
    """A reward that tells completions and problems apart, in two components."""
    draw = zlib.crc32(f"{completion} {example}".encode())
    return {"a": float(draw % 5), "b": 0.25 * (draw // 5 % 3)}


def load_few_problems():
    from evals import countdown

    load = countdown.load
    countdown.load = lambda split, path=None, limit=None: load(split, path, min(limit or 60, 60))


def _child(rank, ranks, nodes, port, script, flags, out):
    from evals import rewards
    from run import log as runlog

    torch.set_num_threads(1)
    torch.manual_seed(port)  # draws are keyed: the global generators change nothing
    rewards.REWARDS["countdown_coin"], runlog.RunLog.plot = coin, lambda self: None
    load_few_problems()
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks // nodes, "RANK": rank}
    os.environ |= where | {name: str(size) for name, size in sizes.items()}
    module = importlib.import_module(f"algos.{script}")
    module.main(module.Args(**flags, out=str(out)))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_script(script, flags, ranks, out, nodes=1):
    """A script's own main in forked processes, as under torchrun. -> its run directory"""
    arguments = ranks, nodes, free_port(), script, flags, out
    mp.start_processes(_child, args=arguments, nprocs=ranks, start_method="fork")
    (directory,) = Path(out).iterdir()
    return directory


def flags_of(case):
    script, family = case.split("-", 1)
    return (
        (OFFLINE if script in ("sft", "vrpo") else ONLINE)
        | {"model": f"tiny-{family}"}
        | CASES[case]
    )


def rows_of(directory, name="metrics"):
    path = directory / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def record(directory):
    """-> {"rows": metrics of each row, "tokens": of the first group of each rollout}"""
    rows = [{name: row[name] for name in SHOWN if name in row} for row in rows_of(directory)]
    return {
        "rows": rows,
        "tokens": [row["completion_ids"] for row in rows_of(directory, "samples")],
    }


def assert_same_metrics(one, two):
    """Rows of two layouts of a run: routing counts padding, probes and clocks differ by nature."""
    other = ("time/", "speed/", "memory/", "router/", "probe/logp_gap")
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for name in (name for name in a if not name.startswith(other)):
            is_close = math.isclose(a[name], b[name], rel_tol=1e-4, abs_tol=1e-5)
            assert is_close and math.isfinite(a[name]), (a["step"], name, a[name], b[name])


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    found = {"torch": torch.__version__.split("+")[0]}
    for case in CASES:
        with tempfile.TemporaryDirectory() as out:
            found[case] = record(run_script(case.split("-")[0], flags_of(case), 1, out))
    FILE.write_text(json.dumps(found).replace('"rows"', '\n"rows"') + "\n")
