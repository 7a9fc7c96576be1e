"""The real commands: every script as a user starts it, with one process and with torchrun on two ranks."""

import csv
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import tyro
from test_resume import Run, warm  # noqa: F401

from runlog import check_numbers

ROOT = Path(__file__).parents[1]
SMALL = "--max-steps 3 --eval-every 2 --eval-limit 16 --save-every 2 --seed 8".split()
COMMANDS = {
    "sft": ["--batch-size", "8", "--micro-batch-size", "4", "--learning-rate", "1e-3"],
    "vrpo": "--batch-size 8 --mc-num 2 --learning-rate 1e-3 --micro-batch-size 8".split(),
    "d1": "--prompts-per-step 4 --num-generations 4 --num-iterations 2 --learning-rate 1e-4 --micro-batch-size 8".split(),
    "bgpo": "--prompts-per-step 4 --num-generations 4 --mc-num 2 --learning-rate 1e-4 --micro-batch-size 8".split(),
    "spg": "--prompts-per-step 4 --num-generations 4 --num-iterations 2 --learning-rate 1e-4 --micro-batch-size 8".split(),
    "coupled_grpo": "--prompts-per-step 4 --num-generations 4 --learning-rate 1e-4 --micro-batch-size 8".split(),
    "cj_grpo": (
        "--prompts-per-step 4 --num-generations 4 --num-iterations 2 --learning-rate 1e-4 --denoising-steps 4 "
        "--remasking low_confidence_dynamic --confidence-threshold 0.6 --micro-batch-size 8"
    ).split(),
    "mdpo": "--prompts-per-step 4 --num-generations 4 --learning-rate 1e-4 --train-steps 3 --micro-batch-size 8".split(),
}
QUICK = (
    "sft",
    "d1",
    "bgpo",
)  # the others run from end to end in tests/test_families.py; here with --all
EXEMPT = ("time/", "speed/", "memory/")


def run(command, cwd=ROOT, **env):
    threads = {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **threads, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done


def run_script(script, out, *flags, ranks=1, cwd=ROOT):
    launch = (
        [sys.executable]
        if ranks == 1
        else [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
    )
    done = run([*launch, f"algos/{script}.py", *flags, "--out", str(out)], cwd)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    (directory,) = Path(out).iterdir()
    return directory, done


def rows_of(directory, name="metrics.jsonl"):
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def each(scripts):
    return [
        pytest.param(script, marks=[] if script in QUICK else pytest.mark.full)
        for script in scripts
    ]


@pytest.fixture(scope="module", params=each(COMMANDS))
def runs(request, tmp_path_factory):
    """-> script, run directory and output of one process, run directory of torchrun with two ranks"""
    script, out = request.param, tmp_path_factory.mktemp(request.param)
    one, done = run_script(script, out / "one", *SMALL, *COMMANDS[script])
    two, _ = run_script(script, out / "two", *SMALL, *COMMANDS[script], ranks=2)
    return script, one, done, two


def test_a_run_leaves_its_record(runs):
    script, directory, done, _ = runs
    assert {"config.json", "metrics.jsonl", "metrics.csv", "curves.png", "checkpoints"} <= {
        p.name for p in directory.iterdir()
    }
    assert (directory / "curves.png").read_bytes().startswith(b"\x89PNG")
    rows = rows_of(directory)
    assert [row["step"] for row in rows if "loss/total" in row] == [1, 2, 3]
    assert any("eval/countdown" in row for row in rows) and "test/countdown" in rows[-1]
    assert len(list(csv.DictReader((directory / "metrics.csv").open()))) == len(rows)
    assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == [
        "best",
        "step-000002",
        "step-000003",
    ]
    config = json.loads((directory / "config.json").read_text())
    assert config["args"]["seed"] == 8 and config["args"]["learning_rate"] > 0
    if script not in ("sft", "vrpo"):
        samples = rows_of(directory, "samples.jsonl")
        assert {
            "prompt",
            "completion",
            "completion_ids",
            "step_map",
            "logps",
            "reward",
            "step",
        } <= samples[0].keys()
        assert "before" in done.stdout and "tokens" in done.stdout and "curves.png" in done.stdout


def test_two_ranks_are_one_rank(runs):
    """Loss and gradient norm to 1e-5, every score exactly, the tokens of the first rollout exactly."""
    script, one, _, two = runs
    for a, b in zip(rows_of(one), rows_of(two), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if not name.startswith(EXEMPT):
                assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-5), (
                    a["step"],
                    name,
                    a[name],
                    b[name],
                )
    if (
        script == "bgpo"
    ):  # one group of four is dead at the first step, so one rank has fewer micro-batches, but not none
        assert next(row["reward/zero_std_frac"] for row in rows_of(one) if row["step"] == 1) == 0.25
    if script not in ("sft", "vrpo"):
        first = [
            [row["completion_ids"] for row in rows_of(d, "samples.jsonl") if row["step"] == 1]
            for d in (one, two)
        ]
        assert first[0] == first[1]


def test_the_saved_checkpoint_is_a_model(runs, tmp_path):
    """--model takes the directory that a run saved."""
    _, directory, _, _ = runs
    checkpoint = directory / "checkpoints" / "step-000003"
    done = run(
        [
            sys.executable,
            "evals/countdown.py",
            "--model",
            str(checkpoint),
            "--limit",
            "8",
            "--out",
            str(tmp_path / "eval"),
        ]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["n"] == 8 and 0 <= result["accuracy"] <= 1


@pytest.mark.parametrize("script", each([script for script in COMMANDS if script != "sft"]))
def test_micro_batches_do_not_change_the_run(script, tmp_path):
    """Micro-batches of 3 (not a divisor) and of everything: the same losses and gradient norms."""
    flags = [*SMALL[:2], "--eval-limit", "0", "--seed", "7", *COMMANDS[script][:-1]]
    a, _ = run_script(script, tmp_path / "a", *flags, "3")
    b, _ = run_script(script, tmp_path / "b", *flags, "1000")
    steps = [[row for row in rows_of(directory) if "loss/total" in row] for directory in (a, b)]
    assert len(steps[0]) == 3
    for x, y in zip(*steps, strict=True):
        assert x["loss/total"] == pytest.approx(y["loss/total"], abs=1e-6)
        assert x["optim/grad_norm"] == pytest.approx(y["optim/grad_norm"], rel=1e-5)


def test_a_copied_script_with_another_loss_runs_and_owes_nothing(tmp_path):
    """cp d1.py mine.py, change policy_loss, run: no registration, and the tests of the shared blocks stay green."""
    clone = tmp_path / "clone"
    shutil.copytree(
        ROOT,
        clone,
        ignore=shutil.ignore_patterns(
            ".git", ".venv", "runs", "__pycache__", ".pytest_cache", "wandb"
        ),
    )
    text = (ROOT / "algos/d1.py").read_text()
    line = "    policy = (-torch.minimum(ratio * A, clipped * A) * c).sum()\n"
    assert line in text
    (clone / "algos/mine.py").write_text(
        text.replace(line, "    policy = (-estimates * A * c).sum()  # plain REINFORCE\n")
    )
    directory, _ = run_script("mine", tmp_path / "runs", *SMALL, *COMMANDS["d1"], cwd=clone)
    assert directory.name.startswith("mine-tiny-sdar-countdown-s8-")
    assert [row["step"] for row in rows_of(directory) if "loss/total" in row] == [1, 2, 3]
    done = run([sys.executable, "-m", "pytest", "-q", "tests/test_shared.py"], clone)
    assert done.returncode == 0, done.stdout[-3000:]


BAD = {
    "unknown model": (["--model", "sdar-9b"], "unknown model 'sdar-9b': use one of tiny-sdar"),
    "unknown task": (["--task", "countdwn"], "unknown task 'countdwn': use one of "),
    "unknown preset": (["--data", "smal"], "smal"),
    "unknown reward": (["--reward", "nope"], "nope"),
    "lonely group": (
        ["--prompts-per-step", "3", "--num-generations", "1"],
        "at least 2 completions",
    ),
    "greedy group": (
        ["--temperature", "0"],
        "--temperature 0.0 must be above 0: greedy completions of a group are all alike",
    ),
    "no reference": (["--beta", "0.1"], "no KL"),
    "long prompts": (["--max-prompt-length", "3"], "the shortest train prompt has 16 tokens"),
    "block length": (["--block-length", "8", "--eval-limit", "0"], "blocks of 4"),
    "gen length": (
        ["--gen-length", "13", "--eval-limit", "0"],
        "--gen-length 13 is no multiple of the block length 4",
    ),
    "threshold": (
        ["--confidence-threshold", "90", "--eval-limit", "0"],
        "--confidence-threshold 90.0 is no probability",
    ),
    "attention": (["--attention", "flex"], "--attention flex does only the forward pass on cpu"),
}


@pytest.mark.parametrize("flags, message", BAD.values(), ids=list(BAD))
def test_bad_input_gets_one_line_that_names_the_fix(flags, message, tmp_path):
    script = Run(
        ["algos/bgpo.py", *flags, "--out", str(tmp_path)], tmp_path / "output"
    )  # a fork: nothing is imported anew
    script.wait_until(lambda: False)
    assert set(script.codes.values()) == {1} and "Traceback" not in script.output(), script.output()
    assert message in script.output().strip().splitlines()[-1]


def test_a_reward_for_another_prompt_is_refused_before_weights_are_read(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"question": "1 + 1?", "answer": "Two.\n#### 2"}) + "\n"
    )
    flags = [
        "--task",
        "gsm8k",
        "--data",
        str(tmp_path / "rows.jsonl"),
        "--reward",
        "gsm8k_d1",
        "--eval-limit",
        "0",
    ]
    done = run([sys.executable, "algos/d1.py", *flags, "--out", str(tmp_path / "runs")])
    assert (
        done.returncode == 1 and "Traceback" not in done.stderr and not (tmp_path / "runs").exists()
    )
    assert (
        "gsm8k_d1 pays for a layout that only the prompt of --data d1"
        in done.stderr.strip().splitlines()[-1]
    )


def test_sft_evaluates_with_the_asked_block_length(tmp_path):
    """The plan says it before training; a block model refuses another length than its own there, not at an evaluation."""
    command = [
        sys.executable,
        "algos/sft.py",
        "--max-steps",
        "1",
        "--eval-limit",
        "2",
        "--batch-size",
        "2",
        "--block-length",
    ]
    done = run([*command, "6", "--model", "tiny-llada", "--out", str(tmp_path)])
    assert done.returncode == 0 and "2 blocks of 6 tokens, 2 steps each" in done.stdout, (
        done.stderr[-2000:]
    )
    done = run([*command, "8", "--out", str(tmp_path)])
    assert done.returncode == 1 and "step" not in done.stdout and "Traceback" not in done.stderr
    assert (
        "--block-length 8: this model was trained with blocks of 4"
        in done.stderr.strip().splitlines()[-1]
    )


METHOD_BAD = {
    "one draw": ("spg", ["--mc-num", "1"], "--mc-num 1: with one draw"),
    "mixture": ("spg", ["--omega", "1.5"], "--omega 1.5"),
    "order of the bound": ("spg", ["--eubo-beta", "0.5"], "--eubo-beta 0.5"),
    "scale of the margin": ("vrpo", ["--beta", "0"], "--beta 0.0"),
    "t range": ("coupled_grpo", ["--t-range", "0.0", "0.8"], "--t-range 0.0 0.8"),
}


@pytest.mark.parametrize("script, flags, message", METHOD_BAD.values(), ids=list(METHOD_BAD))
def test_settings_that_break_an_estimate_are_refused_before_anything_is_loaded(
    script, flags, message, tmp_path
):
    module = importlib.import_module(f"algos.{script}")
    args = tyro.cli(module.Args, args=[*flags, "--model", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit, match=re.escape(message)) as refused:
        module.main(args)
    assert "\n" not in str(refused.value) and not torch.distributed.is_initialized()


@pytest.mark.parametrize("script", [script for script in COMMANDS if script not in ("sft", "vrpo")])
def test_greedy_groups_are_refused_by_every_method(script):
    """Equal completions have equal rewards: advantages of 0 from the first step to the last."""
    args = importlib.import_module(f"algos.{script}").Args
    assert check_numbers(args()) == args()
    with pytest.raises(SystemExit, match="^--temperature 0.0 must be above 0"):
        check_numbers(args(temperature=0.0))


COUNTS = {
    "d1": dict(num_iterations=0, lora_alpha=0, betas=(0.9, 1.0)),
    "mdpo": dict(train_steps=0),
    "bgpo": dict(mc_num=0, micro_batch_size=0),
    "sft": dict(batch_size=0, max_length=0, betas=(-0.1, 0.9), cart_p=-0.1),
    "vrpo": dict(mc_num=0, masks_per_timestep=0, sft_coef=float("nan")),
}


@pytest.mark.parametrize("script", list(COUNTS))
def test_numbers_without_which_nothing_is_learned_are_refused(script):
    args = importlib.import_module(f"algos.{script}").Args
    for name, value in COUNTS[script].items():
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        with pytest.raises(
            SystemExit,
            match=f"^--{name.replace('_', '-')} {re.escape(shown)} must be at least [01]",
        ):
            check_numbers(args(**{name: value}))


def test_a_loss_that_is_not_finite_stops_before_the_step(tmp_path):
    """An infinite learning rate spoils the weights at step 1; the run stops, names the step and keeps its record."""
    flags = "--learning-rate 1e30 --max-steps 4 --eval-limit 0 --prompts-per-step 8 --mc-num 2 --save-every 1".split()
    done = run([sys.executable, "algos/bgpo.py", *flags, "--out", str(tmp_path)])
    assert done.returncode == 1
    assert "not finite" in done.stderr.strip().splitlines()[-1] and "Traceback" not in done.stderr
    (directory,) = tmp_path.iterdir()
    assert rows_of(directory) and (directory / "curves.png").exists()


def test_wandb_offline(tmp_path):
    pytest.importorskip("wandb")
    flags = "--track --max-steps 1 --eval-limit 0 --prompts-per-step 2 --mc-num 1".split()
    done = run(
        [sys.executable, "algos/bgpo.py", *flags, "--out", str(tmp_path)],
        WANDB_MODE="offline",
        WANDB_SILENT="true",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (directory,) = tmp_path.iterdir()
    assert list(directory.glob("wandb/offline-run-*"))
