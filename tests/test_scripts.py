"""Whole runs: golden values, many ranks equal one, and the real commands as a user types them."""

import functools
import json
import os
import re
import stat
import subprocess
import sys

import pytest
import torch
from golden_runs import (
    CASES,
    GOLDEN,
    assert_same,
    record,
    rows_of,
    run_case,
    run_script,
)
from safetensors.torch import load_file
from sync_shared import ROOT
from test_resume import Run
from torch.multiprocessing import ProcessExitedException

RUNS = json.loads((GOLDEN / "runs.json").read_text())
# experts, LoRA, a reference that moves, and the scripts that count over ranks themselves
TWO_RANKS = "d1-dream bgpo-sdar-moe coupled_grpo-sdar dtreerpo-llada mdpo-llada tracerl-sdar "
TWO_RANKS += "tracerl-llada2 sft-sdar vrpo-llada stabledrl-llada distill-llada "
TWO_RANKS += "opsd-llada opsd-sdar"
# of these the parameters of a pass are gathered at once, as on a GPU, and not block by block
AT_ONCE = "d1-dream bgpo-sdar-moe coupled_grpo-sdar tracerl-sdar vrpo-llada"


@pytest.fixture(scope="module")
def one_rank(warm, tmp_path_factory):
    out = lambda case: tmp_path_factory.mktemp(case) / "out"
    return functools.cache(lambda case: run_case(case, out(case)))


@pytest.mark.parametrize("case", CASES)
def test_golden_run(one_rank, case):
    """On another torch version the tokens and the row of the first step."""
    got, want = record(one_rank(case)), RUNS[case]
    rows, group = slice(None), len(want["tokens"]) // CASES[case]["max_steps"]
    if RUNS["torch"] != torch.__version__.split("+")[0]:
        first = ["loss/total" in row for row in want["rows"]].index(True)
        want["tokens"], rows = want["tokens"][:group], slice(first, first + 1)
    assert got["tokens"][: len(want["tokens"])] == want["tokens"]
    for row, other in zip(got["rows"][rows], want["rows"][rows], strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("case", TWO_RANKS.split())
def test_ranks_with_other_micro_batches_are_one_rank(one_rank, tmp_path, monkeypatch, case):
    """Metrics to 1e-4, tokens of the first rollout exactly, saved weights; the sampler is the
    policy when it evaluates.
    """
    one, rows = one_rank(case), rows_of(one_rank(case))
    monkeypatch.setattr("distributed.sharding.cuda_bytes", lambda: (case in AT_ONCE.split()) << 40)
    # bgpo: not all draws of a row together; vrpo: two pairs
    size = {"bgpo": 2, "vrpo": 16}.get(case.split("-")[0], 5)
    more = run_case(case, tmp_path / "more", 2, micro_batch_size=size)
    assert any(row.get("optim/grad_norm", 0) > 0 for row in rows)
    gap = max(row.get("probe/logp_gap_max", 0) for row in rows)
    assert gap < 2e-3 or "top_p" in CASES[case]  # the learner's log-probabilities ignore top-p
    assert_same(one, more)
    saved, same = (
        load_file(sorted(run.glob("checkpoints/*/*.safetensors"))[-1]) for run in (one, more)
    )
    assert saved.keys() == same.keys()
    # the mean: Adam makes a whole step, 1e-4, of noise in a gradient that is almost 0
    assert all((saved[name] - same[name]).abs().mean() < 1e-6 for name in saved)


# blocks; replays, bidirectional; trees; two nodes of two ranks, packed rows
SHARED = ("bgpo-llada2", "cj_grpo-llada", "dtreerpo-llada", "sft-sdar")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in SHARED else pytest.mark.full) for c in CASES]
)
def test_ranks_that_share_rows_are_one_rank(one_rank, tmp_path, case):
    """--sequence-parallel 2: rollouts of both ranks, rows and metrics of one."""
    assert_same(one_rank(case), run_case(case, tmp_path / "two", 2, sequence_parallel=2))


def test_a_run_builds_its_model_twice(warm, tmp_path, monkeypatch):
    """For the policy and for the sampler: whatever else asks, the answer is there."""
    from models import checkpoint

    build, built = checkpoint.build_model, tmp_path / "built"

    def counted(*config):
        with built.open("a") as file:
            file.write(".")
        return build(*config)

    monkeypatch.setattr(checkpoint, "build_model", counted)
    run_case("d1-dream", tmp_path / "out", max_steps=1)
    assert built.read_text() == ".."


@pytest.mark.cuda
@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("model", ["tiny-sdar", "tiny-llada"])
def test_two_gpus_train_as_one(tmp_path, model, share):
    """NCCL in bf16, rows dealt out or shared"""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    metrics = []
    for ranks in 1, 2:
        words = f"algos/sft.py --model {model} --max-steps 3 --eval-limit 0 --batch-size 16 --out "
        words += f"{tmp_path}/{ranks} --sequence-parallel {min(ranks, share)}"
        torchrun(ranks, words)
        rows = rows_of(*(tmp_path / str(ranks)).iterdir())
        metrics.append([[row["loss/total"], row["optim/grad_norm"]] for row in rows])
    assert len(rows) == 3
    torch.testing.assert_close(*map(torch.tensor, metrics), rtol=0.02, atol=0)


def torchrun(ranks, words):
    command = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node {ranks} "
    how = {"env": os.environ | {"HF_TOKEN": "hf_secret"}, "umask": 0o022, "cwd": ROOT}
    return subprocess.run((command + words).split(), capture_output=True, text=True, **how)


def test_the_commands_of_a_user(warm, tmp_path):
    """torchrun on two ranks leaves a whole record, whose checkpoint is a --model."""
    flags = "--mc-num 2 --max-steps 2 --eval-every 1 --eval-limit 8 --prompts-per-step 4"
    said = torchrun(2, f"algos/bgpo.py {flags} --out {tmp_path}/runs")
    assert not said.returncode and "UserWarning" not in said.stderr, said
    (directory,) = (tmp_path / "runs").iterdir()
    assert [row["step"] for row in rows_of(directory) if "loss/total" in row] == [1, 2]
    assert {"metrics.csv", "curves.png"} <= {path.name for path in directory.iterdir()}
    config = json.loads((directory / "config.json").read_text())
    assert config["args"]["mc_num"] == 2 and config["world_size"] == 2
    assert rows_of(directory, "samples")[0].keys() >= {"prompt", "completion", "reward", "step_map"}
    assert [row["step"] for row in rows_of(directory, "heldout")] == [0] * 4 + [2] * 4
    assert "warning: only 8 distinct held-out problems" in said.stderr
    # the scores, a completion over its denoising steps, the time and the weights
    end = r"%\) before, .*% \(se .*\) after on 8 distinct held-out problems"
    end += rf"\nprompt   <.*\ntokens .*\nstep .*\n\d+ s; report: {directory}/report.html; "
    assert re.search(f"{end}weights: .*step-000002\n$", said.stdout)
    for path in filter(lambda path: not path.is_symlink(), tmp_path.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path
        assert path.is_dir() or b"hf_secret" not in path.read_bytes(), path
    model = directory / "checkpoints/step-000002"
    flags = "--model", model, "--limit", 4, "--out", tmp_path / "eval"
    assert '"n": 4' in Run(tmp_path / "said", 1, "evals/countdown.py", *flags).finish()


# all wrong at different speeds is dead too
FAST = {"reward": "score+tokens_per_forward", "remasking": "low_confidence_dynamic"}
FAST |= {"confidence_threshold": 0.3}


@pytest.mark.parametrize("more", [{}, FAST])
def test_refill_replaces_dead_groups_alone(warm, tmp_path, more):
    """Nothing is learned, so that rollouts are the same; samples have the first group of each."""
    flags = {"prompts_per_step": 4, "num_generations": 4, "max_steps": 4, "eval_limit": 0}
    flags |= {"learning_rate": 0.0, "num_iterations": 1} | more
    plain, full = (run_script("d1", flags | {"refill": n}, 1, tmp_path / str(n)) for n in (0, 9))
    dead = [[row["reward/zero_std_frac"] for row in rows_of(run)[1:]] for run in (plain, full)]
    assert any(dead[0]) and not any(dead[1])
    was, now = (rows_of(run, "samples") for run in (plain, full))
    lives, groups, refills = [], [], []
    for step in range(1, 5):
        one, other = ([row for row in rows if row["step"] == step] for rows in (was, now))
        lives.append(len({row["reward"] for row in one}) > 1)
        assert (one == other) == lives[-1] == (one[0]["prompt"] == other[0]["prompt"])
        groups.append([row["completion_ids"] for row in one])
        refills += [[row["completion_ids"] for row in other]] * (not lives[-1])
    assert not [group for group in refills if group in groups]  # no other step's rollout
    assert any(lives) and not all(lives)


TASK = """
from data.rows import read_rows
from evals.qa import extract, prompt, score
def load(split, path=None, limit=None):
    return [row | {"answers": ["x"]} for row in read_rows(path, split, limit=limit)]
def pay(completion, example):
    return {"a": 0.5, "b": 0.0}
"""


def test_a_task_and_a_reward_of_a_user_on_two_ranks(warm, tmp_path, capfd):
    """One file gives the rows of all splits. No reward differs: the run says so, saves and ends."""
    (tmp_path / "mine.py").write_text(TASK)
    rows = "".join(json.dumps({"question": f"{i}?"}) + "\n" for i in range(60))
    (tmp_path / "rows.jsonl").write_text(rows)
    flags = {"task": f"{tmp_path}/mine.py", "data": f"{tmp_path}/rows.jsonl", "dead_steps": 2}
    flags |= {"reward": f"{tmp_path}/mine.py:pay", "max_steps": 9, "eval_limit": 2, "mc_num": 1}
    small = {"prompts_per_step": 2, "num_generations": 2, "gen_length": 4}
    with pytest.raises(ProcessExitedException, match="exit code 3"):
        run_script("bgpo", flags | small, 2, tmp_path / "out")
    (directory,) = (tmp_path / "out").iterdir()
    assert directory.name.startswith("bgpo-tiny-sdar-mine-s42-")
    rows, said = rows_of(directory), capfd.readouterr()
    assert [row["step"] for row in rows] == [0, 0, 1, 2] and "test/mine" in rows[1]
    assert "step 2: stopped: for 2 steps no completion had an advantage; go on" in said.out
    assert (directory / "checkpoints/step-000002").is_dir()
