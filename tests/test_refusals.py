"""Commands that cannot work end before weights are read: with one line that names the fix, and no
traceback. And the command line itself: its help, and what a start costs.
"""

import json
import math
import re
import runpy
import shlex
import sys
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
import torch.distributed as dist
import tyro
from golden_runs import load_few_problems
from sync_shared import METHODS, ONLINE

from algos import bgpo
from evals import sandbox
from evals.rewards import REWARDS
from models import checkpoint

ROOT = Path(__file__).parents[1]
ALGO = "--max-steps 1 --eval-limit 0"
# command line (TMP: an empty folder, ROWS: a file of GSM8K problems, WIDE: a large model without
# weights, OLD: a run of an earlier version) -> words of its last line
REFUSALS = {
    # names and files
    "algos/bgpo.py --model nothing": "nothing",
    "algos/bgpo.py --task nothing": "unknown task 'nothing': use one of",
    "algos/bgpo.py --reward nothing --eval-limit 0": "--reward nothing: no such reward",
    "algos/bgpo.py --data none.jsonl --eval-limit 0": "none.jsonl: no such",
    "algos/d1.py --task gsm8k --data ROWS": "no problems in it for validation: name some with --ev",
    "algos/bgpo.py --model WIDE --task countdown --data small": "words, for tiny models (train)",
    "algos/d1.py --task qa": "the task has no rows of its own: name a file",
    "algos/d1.py --task none.py": "none.py: no such file",
    "algos/d1.py --task run/log.py": "log.py: needs a function load of 3 arguments",
    "algos/d1.py --reward none.py:pay": "none.py: no such file",
    "algos/d1.py --reward evals/qa.py:pay": "evals/qa.py: needs a function pay of 2 arguments",
    "algos/d1.py --reward evals/qa.py:prompt": "prompt of 2 arguments (too many positional",
    f"algos/d1.py --task gsm8k --data ROWS --reward gsm8k_d1 {ALGO}": "gsm8k_d1 pays for a layout",
    f"algos/d1.py --task gsm8k --data ROWS --reward countdown_d1 {ALGO}": "countdown_d1: does not fit gsm8k",
    "algos/d1.py --eval-data none.jsonl": "--eval-data none.jsonl: no such preset or file; ",
    "algos/sft.py --data README.md": "--data README.md: a file must end in .jsonl, .csv",
    "algos/vrpo.py --data docs": "the folder has no train.jsonl and no train.parquet",
    f"algos/vrpo.py --data {'x' * 256}": "no name has more than 255 bytes",
    "data/preferences.py --samples none.jsonl --out x.jsonl": "none.jsonl: no such file",
    f"data/preferences.py --samples {'x' * 256} --out x.jsonl": "no such file",
    "algos/bgpo.py --resume TMP": "is no run directory: it has no config.json",
    "algos/dtreerpo.py --resume OLD": "branches = 4, lost = 1, which this version does not take",
    # numbers
    **{f"algos/{name}.py --temperature 0": "--temperature 0.0 must be from" for name in ONLINE},
    "algos/bgpo.py --num-generations 1": "--num-generations 1 must be from 2 to 2147483648",
    "algos/bgpo.py --beta 0.1": "--beta 0.1 must be from 0 to 0",
    "algos/wd1.py --beta 0.1": "--beta 0.1 must be from 0 to 0",
    "algos/bgpo.py --confidence-threshold 90": "--confidence-threshold 90.0 must be from 0 to 1",
    "algos/spg.py --mc-num 1": "--mc-num 1 must be from 2",
    "algos/spg.py --omega 1.5": "--omega 1.5 must be from 0 to 1",
    "algos/spg.py --eubo-beta 0.5": "--eubo-beta 0.5 must be from 1",
    "algos/coupled_grpo.py --t-range 0.0 0.8": "--t-range 0.0 0.8 must be from 1e-06 to 0.999999",
    "algos/ebpo.py --epsilon 1": "--epsilon 1.0 must be from 0 to 0.999",
    "algos/dtreerpo.py --gamma 0": "--gamma 0.0 must be from",
    "algos/dtreerpo.py --branches 8 1": "--branches 8 1 must be from 2",
    "algos/tracerl.py --accuracy-range 0.8 0.2": "--accuracy-range 0.8 0.2: the lower end comes",
    "algos/tracerl.py --shrink 0": "--shrink 0 must be from 1",
    "algos/mdpo.py --train-steps 0": "--train-steps 0 must be from 1",
    "algos/vrpo.py --beta 0": "--beta 0.0 must be from",
    "algos/vrpo.py --sft-coef nan": "--sft-coef nan must be from 0",
    "algos/sft.py --max-grad-norm 0": "--max-grad-norm 0.0 must be from ",
    "algos/sft.py --sequence-parallel 0": "--sequence-parallel 0 must be from 1",
    "algos/sft.py --learning-rate inf": "--learning-rate inf must be from 0",
    "algos/d1.py --betas 0.9 1.0": "--betas 0.9 1.0 must be from 0",
    "algos/d1.py --p-mask-prompt 1.5": "--p-mask-prompt 1.5 must be from 0 to 1",
    "algos/d1.py --seed 2147483648": "--seed 2147483648 must be from 0 to 2147483648",
    "data/preferences.py --samples x --out x --per-prompt 0": "--per-prompt 0 must be",
    "evals/countdown.py --model tiny-sdar --factor inf": "--factor inf must be from 0",
    f"evals/show.py --prompt x --gen-length {2**40}": f"--gen-length {2**40} must be from",
    # what does not fit together
    "algos/bgpo.py --max-prompt-length 3": "--max-prompt-length (or --max-length) 3: the shortest",
    "algos/justgrpo.py --denoising-steps 2": "left to right, a block of 4 takes 4",
    "algos/justgrpo.py --model tiny-llada --cache dual --eval-limit 0": "--cache dual is approx",
    "algos/tpg.py --model tiny-llada --cache dual": "what a method replays would not be what was",
    "algos/bgpo.py --gen-length 13 --eval-limit 0": "13 is no multiple of the block length 4",
    f"algos/bgpo.py --attention flex {ALGO}": "--attention flex does not run on cpu",
    "algos/bgpo.py --rollout-backend masked --eval-limit 0": "cannot serve a block-causal model",
    "algos/d1.py --rollout-backend lmdeploy --lora-rank 4": "add --lora-merged-rollout",
    f"algos/spg.py --mc-num 4 --micro-batch-size 3 --prompts-per-step 1 {ALGO}": "hold the 4 draws",
    f"algos/vrpo.py --batch-size 8 --micro-batch-size 15 {ALGO}": "hold the 16 draws",
    "algos/mdpo.py --model tiny-sdar": "mdpo needs a bidirectional model; a block-causal one",
    "algos/ebpo.py --model tiny-llada": "ebpo needs a block model; a bidirectional one",
    "algos/dtreerpo.py --branches 3 3": "of 9 leaves: give --num-generations 9",
    "algos/dtreerpo.py --branches 4 2 2 --gen-length 4 --denoising-steps 2": "most 2",
    "algos/sft.py --pack-length 63 --max-length 64": "is shorter than an example may be",
    "algos/sft.py --pack-length 65 --max-length 65": "--max-length gives 68",
    "algos/sft.py --cart-p 0.1": "--cart-p 0.1: a number between 0 and 1, for Dream alone",
    "algos/sft.py --cart-p 1.5 --model tiny-dream": "--cart-p 1.5",
    "algos/sft.py --batch-size 2 --block-length 8 --eval-limit 2": "blocks of 4",
    "algos/sft.py --batch-size 100000": "fewer than --batch-size 100000",
    "algos/sft.py --max-length 4 --eval-limit 0": "--data holds no rows to train on",
    "algos/d1.py --sequence-parallel 2": "must divide the ranks of a node, 1: use 1",
}


def collect(places, out):
    """Run the commands one after the other -> in the file `out` what each says on its way out"""

    def no_weights(*_, **__):
        raise AssertionError("weights are read")

    checkpoint.materialize, found = no_weights, {}
    load_few_problems()
    for command in REFUSALS:
        sys.argv = [str(places.get(word, word)) for word in command.split()]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except BaseException as error:
            found[command] = str(error) if type(error) is SystemExit else repr(error)
        if dist.is_initialized():
            dist.destroy_process_group()
    out.write_text(json.dumps(found))


@pytest.fixture(scope="module")
def said(warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    places = {name: folder / name for name in ("TMP", "ROWS", "WIDE", "OLD")}
    places["ROWS"] = folder / "rows.jsonl"
    row = {"question": "1 + 1?", "answer": "Two.\n#### 2"}
    places["ROWS"].write_text(json.dumps(row) + "\n")
    copytree(ROOT / "models/tiny-sdar", places["WIDE"], ignore=ignore_patterns("*.safetensors"))
    config = places["WIDE"] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 1024}))
    for name, config in {"TMP": None, "OLD": {"args": {"branches": 4, "lost": 1}}}.items():
        places[name].mkdir()
        if config:
            (places[name] / "config.json").write_text(json.dumps(config))
    fork = get_context("fork").Process(target=collect, args=(places, folder / "said"))
    fork.start()
    fork.join()
    return json.loads((folder / "said").read_text())


@pytest.mark.parametrize("command", REFUSALS)
def test_refusal(said, command):
    line = said.get(command, "not refused")
    assert REFUSALS[command] in line and "\n" not in line.strip()


STOPPED = {
    "": "the next step",
    "sandbox": "sandbox: no answer from its supervisor",
    "reward": "--reward countdown_odd of countdown: completion '```python",
    "rollout": "--reward countdown_odd of countdown: completion '2+",
}


@pytest.mark.parametrize("broken", STOPPED)
def test_rewards_that_cannot_be_given_stop_a_run(run_ranks, tmp_path, monkeypatch, broken):
    """A broken sandbox or a reward that is not finite: before a model is built. A reward of a
    rollout that is not finite: before its update.
    """
    row = {"text": "Double it.", "code": "def f(x): return x", "test_list": ["assert f(2) == 4"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    flags = f"--prompts-per-step 2 --eval-limit 0 --max-prompt-length 9999 --out {tmp_path} "
    if broken in ("reward", "rollout"):
        flags += "--reward countdown_odd"
    else:
        flags += f"--task mbpp --data {tmp_path}/rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["algos/bgpo.py", *flags.split()])
    args, calls = bgpo.Args.parse(bgpo.BY_SIZE), []

    def odd(completion, example):
        calls.append(completion)
        is_trial = len(calls) == 1
        return {"a": 1.0, "b": math.nan if broken == "reward" or not is_trial else 0.0}

    def next_step(*_):
        raise SystemExit("the next step")

    def body(*_):
        dist.destroy_process_group()  # the script makes its own
        monkeypatch.setitem(REWARDS, "countdown_odd", odd)
        monkeypatch.setattr(bgpo, "update" if broken == "rollout" else "load_models", next_step)
        if broken == "sandbox":
            monkeypatch.setattr(sandbox, "CHILD", tmp_path / "no_such_file.py")
        with pytest.raises(SystemExit, match=re.escape(STOPPED[broken])):
            bgpo.main(args)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    run_ranks(1, body)


@pytest.mark.parametrize("script", METHODS)
def test_the_command_line(monkeypatch, capsys, script):
    """--help has every flag once, with the value that a run with that model takes; the line of
    settings is a command for the same run; flags are parsed once.
    """
    module, path, calls = import_module(f"algos.{script}"), f"algos/{script}.py", []
    monkeypatch.setattr(tyro, "cli", lambda *a, cli=tyro.cli, **k: calls.append(1) or cli(*a, **k))

    def parse(*flags):
        monkeypatch.setattr(sys, "argv", [path, *flags])
        return module.Args.parse(module.BY_SIZE)

    args = parse("--model", "tiny-llada2")
    said = capsys.readouterr().err
    assert len(calls) == 1 and said.startswith(f"settings: {path} --model tiny-llada2 ")
    assert parse(*shlex.split(said)[2:]) == args
    with pytest.raises(SystemExit, match="^0$"):
        parse("--model", "tiny-llada2", "--help")
    text = capsys.readouterr().out
    flags = [name.replace("-", "_") for name in re.findall("^│ --([a-z0-9-]+)", text, re.M)]
    assert sorted(flags) == sorted(vars(args))
    assert f"(default: {args.learning_rate})" in text and "--gen-length 12: models" in text
