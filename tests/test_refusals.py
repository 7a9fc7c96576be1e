"""Commands that cannot work end before weights are read: with one line that names the fix, and no
traceback.
"""

import json
import os
import runpy
import sys
from itertools import dropwhile
from multiprocessing import get_context
from shutil import copytree, ignore_patterns
from unittest.mock import patch

import pytest
import torch.distributed as dist
from golden_runs import load_few_problems
from sync_shared import ONLINE, ROOT

import evals
from evals import own, rewards, sandbox
from models import checkpoint

ALGO = "--max-steps 1 --eval-limit 0"
TASK = "algos/d1.py --task TMP/task.py"
MASTER = "MASTER_ADDR=localhost MASTER_PORT=0"
ROWS = "--task gsm8k --data TMP/rows.jsonl"
TINY = "--model tiny-sdar"
EVAL = f"evals/run.py --tasks countdown {TINY}"
# rewards that fail
OWN = {
    "own.py:raises": "own.py line 2; ZeroDivisionError('division by zero'); '```python\\npass\\n",
    "own.py:leaves": "own.py line 3; SystemExit(0); ",
    "own.py:sleeps": "own.py; no value in 0.5 s; ",
    "own.py:spins": "own.py; no value in 0.5 s; ",
    "own.py:large": "not a finite number for each of ['reward']",
    "own.py:longest": "Exceeds the limit",
    "own.py:absent": "own.py: needs a function absent",
    "cut.py:pay": "cut.py; SyntaxError(",
    "leaves.py:pay": "leaves.py line 1; SystemExit(0)",
    "lacks.py:pay": "lacks.py line 1; ModuleNotFoundError",
}
REWARDS = """import sys, time
def raises(completion, example): return 1 / 0
def leaves(completion, example): sys.exit(0)
def sleeps(completion, example): time.sleep(99)
def spins(completion, example):
    end = time.time() + 99
    while time.time() < end: pass
def large(completion, example): return 10**400
def longest(completion, example): return 10**5000
def half(completion, example): return 1 / len(completion)
"""
SCORE = """from data.rows import read_rows
import sys
def load(split, path=None, limit=None):
    return read_rows(path, split, limit=limit)
def prompt(example):
    return [{"role": "user", "content": example["text"]}]
def extract(completion, example):
    return completion
def score(completion, example):
    sys.exit(0)
"""
# a task with one function that fails
FAILING = {
    "load": "def load(*asked, **options): sys.exit(0)",
    "prompt": "def prompt(example): raise ValueError('no word')",
    "score_batch": "def score_batch(completions, examples): return 1 / 0",
}
# command line (TMP: the folder of `said`) -> words of its last line
REFUSALS = {
    # names and files
    "algos/bgpo.py --model nothing": "unknown model 'nothing': use one of ",
    "algos/bgpo.py --task nothing": "unknown task 'nothing': use one of",
    "algos/bgpo.py --reward nothing --eval-limit 0": "--reward nothing: no such reward",
    "algos/bgpo.py --reward score+nothing --eval-limit 0": "--reward nothing: no such reward",
    "algos/bgpo.py --reward score+tokens_per_forward": "needs --remasking low_confidence_dynamic",
    "algos/mdpo.py --reward tokens_per_forward": "this script takes one --reward",
    "algos/opsd.py --reward score+score": "this script takes one --reward",
    "algos/bgpo.py --data none.jsonl --eval-limit 0": "none.jsonl: no such",
    f"algos/d1.py {ROWS}": "no problems in it for validation",
    "algos/bgpo.py --model TMP/wide --task countdown --data small": "words, for tiny models",
    "algos/d1.py --task qa": "the task has no rows of its own: name a file",
    "algos/d1.py --task run/log.py": "log.py: needs a function load",
    "algos/d1.py --reward none.py:pay": "none.py: no such file",
    "algos/d1.py --reward evals/qa.py:pay": "evals/qa.py: needs a function pay",
    f"algos/d1.py {ROWS} --reward gsm8k_d1 {ALGO}": "gsm8k_d1 pays for a layout",
    "algos/d1.py --task gsm8k --reward countdown_d1": "does not fit gsm8k",
    "algos/d1.py --eval-data none.jsonl": "none.jsonl: no such file that ends",
    f"algos/bgpo.py --reward TMP/pay.py:pay {ALGO}": "{'a': 1.0, 'b': nan}: not a finite number",
    f"algos/bgpo.py --task mbpp --data TMP/t.jsonl --max-prompt-length 9999 {ALGO}": "sandbox",
    "algos/sft.py --data README.md": "README.md: no such file that ends in .jsonl, .csv",
    "algos/distill.py": "python evals/run.py --model tiny-sdar --tasks countdown --split train",
    "algos/distill.py --data tests/golden/plans.jsonl": "plans.jsonl row 1 has no column 'score'",
    "algos/vrpo.py --data docs": "docs/train.jsonl: no such file",
    "evals/report.py docs": "docs: no directory with metrics.jsonl or samples.jsonl",
    "evals/run.py --resume TMP/wide": "wide is no evaluation",
    "algos/bgpo.py --resume TMP": "config.json is missing or damaged",
    # files of a user
    **{f"algos/d1.py --reward TMP/{reward} {ALGO}": said for reward, said in OWN.items()},
    "algos/d1.py --task TMP/leaves.py": "leaves.py line 1; SystemExit(0)",
    f"{TASK} --data TMP/rows.jsonl {ALGO}": "rows.jsonl row 1 has no column 'text', only question",
    f"{TASK} --data TMP/text.jsonl {ALGO}": "task.py line 10; SystemExit(0)",
    **{
        f"algos/d1.py --task TMP/{name}.py --data TMP/text.jsonl {ALGO}": f"{name}.py line 12; "
        for name in FAILING
    },
    "RANK=x algos/d1.py": "unset RANK",
    "RANK=0 algos/sft.py": "WORLD_SIZE expected",
    f"RANK=0 WORLD_SIZE=0 {MASTER} evals/run.py --tasks qa --model x": "size cannot be 0",
    f"RANK=0 WORLD_SIZE=-2 {MASTER} algos/d1.py": "rank < size. 0 vs -2",
    # flags
    "algos/d1.py --lr 1": "--lr: no such flag; try --learning-rate or --lr-schedule",
    "algos/d1.py --kl-coef 1": "--kl-coef: no such flag; try --beta",
    "algos/sft.py --mbs=1": "try --micro-batch-size",
    "algos/sft.py --foo": "try --help",
    "algos/bgpo.py --confidence-threshold 0.5": "does nothing with --remasking low_confidence_st",
    "algos/mdpo.py --remasking rcr --confidence-threshold 0.5": "does nothing with --remasking rcr",
    "algos/d1.py --lora-alpha 16": "--lora-alpha does nothing with --lora-rank 0",
    "algos/d1.py --num-iterations 1 --epsilon 0": "--epsilon does nothing with --num-iterations 1",
    "algos/espo.py --beta 0 --ref-mixup 0.5": "--ref-mixup does nothing with --beta 0.0",
    "algos/tracerl.py --lam 0.9": "--lam does nothing with --no-value-model",
    "algos/tracerl.py --gamma 0.9": "--gamma does nothing with --no-value-model",
    "algos/stabledrl.py --num-iterations 1 --clip-ratio 3": "--clip-ratio does nothing with",
    "algos/mdpo.py --model tiny-llada --refill 1": "one --reward, none of speed, and no --refill",
    "algos/d1.py --lora-rank 4 --lora-targets q_proj W_pack": "--lora-targets W_pack match no",
    "algos/sft.py --lora-rank 4 --lora-targets attn.q_proj": "there are down_proj, gate_proj",
    "algos/distill.py --masks random --mask-ratio 0 1": "does nothing with --masks random",
    "algos/sft.py --schedule-steps 9": "--schedule-steps does nothing with --lr-schedule constant",
    "algos/sft.py --plan 1x4090": "--plan 1x4090: use 1x24 to 8x24 (GB), or 1x one of A100-40, A10",
    # evaluations
    "evals/run.py --model m": "give --tasks, such as",
    "evals/run.py --model m --tasks countdown,nothing": "unknown task 'nothing': use one of",
    "evals/run.py --model m --tasks countdown,sudoku --data cd3": "--data cd3: give TASK=SOURCE",
    f"evals/run.py {TINY} --tasks qa,countdown --data qa=no.csv countdown=no.csv": "no.csv: no",
    "evals/run.py --tasks countdown": "either --model (generate and score) or",
    "evals/run.py --tasks countdown --model m --completions c": "either --model",
    f"{EVAL} --reward gsm8k_d1": "does not fit countdown",
    f"{EVAL} --data cd9": "presets: small, cd3, cd4",
    f"{EVAL} --data TMP/empty.jsonl": "empty.jsonl: no problems",
    f"evals/run.py --tasks gsm8k {TINY} --reward gsm8k_d1 --data TMP/rows.jsonl": "--data d1 asks",
    "evals/run.py --tasks countdown --completions none.jsonl": "none.jsonl: no such file",
    f"{EVAL} --likelihood": "countdown has no choices to compare",
    f"{EVAL} --text TMP/rows.jsonl": "give --tasks, such as",
    f"evals/run.py {TINY} --text none.txt": "none.txt --length 512: [Errno 2]",
    f"evals/run.py {TINY} --text TMP/empty.jsonl": "empty.jsonl --length 512: maximum size",
    # numbers
    **{f"algos/{name}.py --temperature 0": "--temperature 0.0 must be from" for name in ONLINE},
    "algos/bgpo.py --num-generations 1": "--num-generations 1 must be from 2 to 2147483647",
    "algos/bgpo.py --confidence-threshold 90": "--confidence-threshold 90.0 must be from 0 to 1",
    "algos/spg.py --mc-num 1": "--mc-num 1 must be from 2",
    "algos/spg.py --omega 1.5": "--omega 1.5 must be from 0 to 1",
    "algos/coupled_grpo.py --t-range 0.0 0.8": "--t-range 0.0 0.8 must be from 1e-06 to 0.999999",
    "algos/ebpo.py --epsilon 1": "--epsilon 1.0 must be from 0 to 0.999",
    "algos/dtreerpo.py --branches 8 1": "--branches 8 1 must be from 2",
    "algos/dtreerpo.py --refill 1": "--refill 1 must be from 0 to 0",
    "algos/vrpo.py --sft-coef nan": "--sft-coef nan must be from 0",
    "algos/sft.py --max-grad-norm 0": "--max-grad-norm 0.0 must be from ",
    "algos/sft.py --learning-rate inf": "--learning-rate inf must be from 0",
    "algos/d1.py --betas 0.9 1.0": "--betas 0.9 1.0 must be from 0",
    "algos/d1.py --seed 2147483648": "--seed 2147483648 must be from 0 to 2147483647",
    "evals/run.py --tasks countdown --model tiny-sdar --samples 0": "--samples must be at least 1",
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
    "algos/dtreerpo.py --schedule-steps 9 --branches 3 3": "of 9 leaves: give --num-generations 9",
    "algos/dtreerpo.py --branches 2 2 2 --gen-length 4 --denoising-steps 2": "at most 2 numbers",
    "algos/sft.py --pack-length 63 --max-length 64": "is shorter than an example may be",
    "algos/sft.py --pack-length 65 --max-length 65": "--max-length gives 68",
    "algos/sft.py --cart-p 0.1": "--cart-p 0.1: a number between 0 and 1, for Dream alone",
    "algos/sft.py --edit-rate 0.1": "--edit-rate 0.1: for LLaDA2 alone, whose sampler edits",
    "algos/sft.py --eos-tail 8": "--eos-tail does nothing with a block model",
    "algos/sft.py --batch-size 2 --block-length 8 --eval-limit 2": "blocks of 4",
    "algos/sft.py --batch-size 100000": "fewer than --batch-size 100000",
    "algos/sft.py --max-length 4 --eval-limit 0": "--data holds 0 rows to train on",
    "algos/d1.py --sequence-parallel 2": "must divide the ranks of a node, 1: use 1",
}


def collect(folder):
    """Run the commands one after the other; the file `said` keeps what each says on its way out."""

    def no_weights(*_, **__):
        raise AssertionError("weights are read")

    checkpoint.materialize, sandbox.CHILD, found = no_weights, folder / "gone.py", {}
    evals.SECONDS = rewards.SECONDS = 0.5
    load_few_problems()
    for command in REFUSALS:
        words = command.replace("TMP", str(folder)).split()
        sys.argv = [*dropwhile(lambda word: "=" in word, words)]
        set_for = dict(word.split("=") for word in words[: -len(sys.argv)])
        try:
            with patch.dict(os.environ, set_for):
                runpy.run_path(sys.argv[0], run_name="__main__")
        except BaseException as error:
            found[command] = str(error) if type(error) is SystemExit else repr(error)
        if dist.is_initialized():
            dist.destroy_process_group()
    (folder / "said").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def said(warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    copytree(ROOT / "models/tiny-sdar", folder / "wide", ignore=ignore_patterns("*.safetensors"))
    config = json.loads((folder / "wide/config.json").read_text()) | {"hidden_size": 4096}
    for name, content in {
        "wide/config.json": json.dumps(config),
        "rows.jsonl": json.dumps({"question": "1 + 1?", "answer": "Two.\n#### 2"}),
        "t.jsonl": json.dumps({"text": "f", "code": "", "test_list": ["assert f(2) == 4"]}),
        "own.py": REWARDS,
        "task.py": SCORE,
        "text.jsonl": '{"text": "a"}',
        "empty.jsonl": "",
        "cut.py": "def pay(",
        "leaves.py": "import sys; sys.exit(0)",
        "lacks.py": "import lacking",
        **{f"{name}.py": f"{SCORE}\n{code}" for name, code in FAILING.items()},
        "pay.py": "pay = lambda completion, example: {'a': 1.0, 'b': float('nan')}",
    }.items():
        (folder / name).write_text(f"{content}\n")
    fork = get_context("fork").Process(target=collect, args=(folder,))
    fork.start()
    fork.join()
    return json.loads((folder / "said").read_text())


@pytest.mark.parametrize("command", REFUSALS)
def test_refusal(said, command):
    line = said.get(command, "not refused")
    assert REFUSALS[command] in line and "\n" not in line.strip()


def test_what_reward_errors_counts(tmp_path, capsys):
    """One line, however many fail; a shaped reward pays the value in its first part."""
    (tmp_path / "own.py").write_text(REWARDS)
    pay = rewards.load_reward(f"{tmp_path}/own.py:half", evals.load_task("countdown"), -2.0)
    own.FAILED.clear()
    paid = pay(["aa", "", "", "a", ""], [{}, {}, {}, {}, {"a": 1}])
    assert [part["reward"] for part in paid] == [0.5, -2, -2, 1, -2] and len(own.FAILED) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"counted as -2: {tmp_path}/own.py line 10; ZeroDivisionError")
