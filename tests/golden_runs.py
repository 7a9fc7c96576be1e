"""Two or three rollouts of every method on tiny models, one thread, and the values of every flag:
what a change of behaviour would change.

    python tests/golden_runs.py --write [SCRIPT ...]    rewrites runs.json, values.json of golden/

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
from sync_shared import METHODS, OFFLINE, ROOT

sys.path.insert(0, str(ROOT))
GOLDEN = ROOT / "tests/golden"
SMALL = {"task": "countdown", "lora_rank": 0, "gen_length": 12, "denoising_steps": 2}
EVERY = {"max_steps": 2, "eval_every": 2, "eval_limit": 2, "learning_rate": 1e-4, "seed": 8}
ROLLOUTS = {"prompts_per_step": 2, "num_generations": 4, "micro_batch_size": 6}
ROLLOUTS |= {"reward": "countdown_coin"}
ANSWERS = {"batch_size": 4, "micro_batch_size": 3}
CASES = {
    f"{script}-{family}": {"model": f"tiny-{family}"}
    | EVERY
    | (ANSWERS if script in OFFLINE else ROLLOUTS)
    | flags
    for script, method in METHODS.items()
    for family, flags in method.runs.items()
}
# the tiny model; others of either attention with LoRA, and with all weights
MODELS = "", "--model sdar-8b", "--model sdar-8b --lora-rank 0"
MODELS += "--model llada-8b", "--model llada-8b --lora-rank 0"
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


def parsed(script, *words):
    """-> what the command line of a script makes of these words"""
    module, before = importlib.import_module(f"algos.{script}"), sys.argv
    sys.argv = [f"algos/{script}.py", *map(str, words)]
    try:
        return module.Args.parse(module.BY_SIZE)
    finally:
        sys.argv = before


def _child(rank, ranks, nodes, port, script, flags, out):
    from evals import rewards
    from run import flags as command
    from run import log as runlog

    torch.set_num_threads(1)
    torch.manual_seed(port)  # draws are keyed: the global generators change nothing
    rewards.REWARDS["countdown_coin"], runlog.RunLog.plot = coin, lambda self: None
    load_few_problems()
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks // nodes, "RANK": rank}
    os.environ |= where | {name: str(size) for name, size in sizes.items()}
    module = importlib.import_module(f"algos.{script}")
    args = module.Args(**SMALL | flags, out=str(out))
    module.main(parsed(script, *command.flags_of(vars(args))))


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


def all_values():
    """-> {script: {flag: its values on MODELS}}, where no other flag is given"""
    found = {}
    for script in METHODS:
        runs = [vars(parsed(script, *words.split())) for words in MODELS]
        found[script] = {name: [run[name] for run in runs] for name in runs[0]}
    return json.loads(json.dumps(found))


def assert_same_metrics(one, two):
    """Rows of two layouts of a run: routing counts padding, probes and clocks differ by nature."""
    other = ("time/", "speed/", "memory/", "router/", "probe/logp_gap")
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for name in (name for name in a if not name.startswith(other)):
            is_close = math.isclose(a[name], b[name], rel_tol=1e-4, abs_tol=1e-5)
            assert is_close and math.isfinite(a[name]), (a["step"], name, a[name], b[name])


def write(scripts):
    runs = json.loads((GOLDEN / "runs.json").read_text())
    for case in (case for case in CASES if case.split("-")[0] in scripts):
        with tempfile.TemporaryDirectory() as out:
            runs[case] = record(run_script(case.split("-")[0], CASES[case], 1, out))
    runs["torch"] = torch.__version__.split("+")[0]
    (GOLDEN / "runs.json").write_text(json.dumps(runs).replace('"rows"', '\n"rows"') + "\n")
    (GOLDEN / "values.json").write_text(json.dumps(all_values()).replace("}, ", "},\n") + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"]:
        raise SystemExit(__doc__)
    write(sys.argv[2:] or METHODS)
