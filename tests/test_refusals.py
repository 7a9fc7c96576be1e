"""Commands that cannot work end before their work begins: one line that names the fix, no
traceback.
"""

import json
import math
import runpy
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
import torch.distributed as dist
from golden_runs import load_few_problems
from sync_shared import ONLINE

from algos import bgpo
from evals import sandbox
from evals.rewards import REWARDS

ROOT = Path(__file__).parents[1]
ALGO = "--max-steps 1 --eval-limit 0"
# command line (TMP: an empty folder, ROWS: a file of GSM8K problems, WIDE: a large model without
# weights), words of its last line
REFUSALS = [
    ("algos/bgpo.py --model nothing", "nothing"),
    ("algos/bgpo.py --task nothing", "unknown task 'nothing': use one of"),
    ("algos/bgpo.py --reward nothing --eval-limit 0", "--reward nothing: no such reward"),
    ("algos/bgpo.py --data none.jsonl --eval-limit 0", "none.jsonl: no such"),
    (
        "algos/d1.py --task gsm8k --data ROWS",
        "no problems in it for validation: name some with --eval",
    ),
    ("algos/bgpo.py --model WIDE --task countdown --data small", "words, for tiny models (train)"),
    ("algos/d1.py --task qa", "the task has no rows of its own: name a file"),
    ("algos/d1.py --task none.py", "none.py: no such file"),
    ("algos/d1.py --task run/log.py", "log.py: needs a function load of 3 arguments"),
    ("algos/d1.py --reward none.py:pay", "none.py: no such file"),
    ("algos/d1.py --reward evals/qa.py:pay", "evals/qa.py: needs a function pay of 2 arguments"),
    ("algos/d1.py --reward evals/qa.py:prompt", "prompt of 2 arguments (too many positional"),
    (
        f"algos/d1.py --task gsm8k --data ROWS --reward gsm8k_d1 {ALGO}",
        "gsm8k_d1 pays for a layout",
    ),
    (
        "algos/bgpo.py --max-prompt-length 3",
        "--max-prompt-length (or --max-length) 3: the shortest",
    ),
    ("algos/bgpo.py --num-generations 1", "--num-generations 1 must be at least 2"),
    ("algos/d1.py --task gsm8k --reward countdown_d1", "countdown_d1: does not fit gsm8k"),
    ("algos/bgpo.py --beta 0.1", "--beta 0.1: this method has no KL to a reference"),
    ("algos/justgrpo.py --denoising-steps 2", "left to right, a block of 4 takes 4"),
    ("algos/justgrpo.py --model tiny-llada --cache dual --eval-limit 0", "--cache dual is approx"),
    ("algos/wd1.py --beta 0.1", "--beta 0.1: this method has no KL to a reference"),
    (
        "algos/bgpo.py --gen-length 13 --eval-limit 0",
        "--gen-length 13 is no multiple of the block length 4",
    ),
    (
        "algos/bgpo.py --confidence-threshold 90 --eval-limit 0",
        "--confidence-threshold 90.0 is no probability",
    ),
    (
        f"algos/bgpo.py --attention flex {ALGO} --out TMP",
        "--attention flex does not run on cpu",
    ),
    ("algos/bgpo.py --rollout-backend masked --eval-limit 0", "cannot serve a block-causal model"),
    ("algos/d1.py --rollout-backend lmdeploy --lora-rank 4", "add --lora-merged-rollout"),
    (
        "algos/d1.py --eval-data none.jsonl",
        "validation problems: --eval-data none.jsonl: no such preset or file; ",
    ),
    ("algos/bgpo.py --resume TMP", "is no run directory: it has no config.json"),
    ("algos/spg.py --mc-num 1", "--mc-num 1: with one draw"),
    (
        f"algos/spg.py --mc-num 4 --micro-batch-size 3 --prompts-per-step 1 {ALGO} --out TMP",
        "--micro-batch-size 3 does not hold the 4 draws",
    ),
    (
        f"algos/vrpo.py --batch-size 8 --micro-batch-size 15 {ALGO} --out TMP",
        "--micro-batch-size 15 does not hold the 16 draws",
    ),
    ("algos/spg.py --omega 1.5", "--omega 1.5"),
    ("algos/spg.py --eubo-beta 0.5", "--eubo-beta 0.5"),
    ("algos/coupled_grpo.py --t-range 0.0 0.8", "--t-range 0.0 0.8"),
    ("algos/mdpo.py --model tiny-sdar", "mdpo needs a bidirectional model; a block-causal one"),
    ("algos/ebpo.py --model tiny-llada", "ebpo needs a block model; a bidirectional one"),
    ("algos/ebpo.py --epsilon 1", "--epsilon 1.0 must be below 1"),
    (
        "algos/dtreerpo.py --model WIDE --branches 3 3",
        "--branches 3 3 makes trees of 9 leaves: give --num-generations 9",
    ),
    (
        "algos/dtreerpo.py --model WIDE --branches 4 2 2 --gen-length 4 --denoising-steps 2",
        "--branches 4 2 2 needs 3 denoising steps, a rollout has 2: give at most 2 numbers",
    ),
    ("algos/dtreerpo.py --gamma 0", "--gamma 0.0 must be above 0"),
    ("algos/dtreerpo.py --branches 8 1", "--branches 8 1 must be at least 2"),
    ("algos/tracerl.py --accuracy-range 0.8 0.2", "--accuracy-range 0.8 0.2: the lower end comes"),
    ("algos/vrpo.py --beta 0", "--beta 0.0"),
    (
        "algos/sft.py --pack-length 63 --max-length 64",
        "--pack-length 63 is shorter than an example may be",
    ),
    ("algos/sft.py --pack-length 65 --max-length 65", "--max-length gives 68"),
    ("algos/sft.py --cart-p 0.1", "--cart-p 0.1: a number between 0 and 1, for Dream alone"),
    ("algos/sft.py --cart-p 1.5 --model tiny-dream", "--cart-p 1.5"),
    ("algos/sft.py --batch-size 2 --block-length 8 --eval-limit 2 --out TMP", "blocks of 4"),
    ("algos/sft.py --data README.md", "--data README.md: a file must end in .jsonl, .csv"),
    ("algos/sft.py --batch-size 100000", "fewer than --batch-size 100000"),
    ("algos/sft.py --max-length 4 --eval-limit 0", "--data holds no rows to train on"),
    ("algos/sft.py --max-grad-norm 0", "--max-grad-norm 0.0 must be above 0: "),
    ("algos/vrpo.py --data docs", "the folder has no train.jsonl and no train.parquet"),
    ("data/preferences.py --samples none.jsonl --out x.jsonl", "none.jsonl: no such file"),
    (f"data/preferences.py --samples {'x' * 256} --out x.jsonl", "no such file"),
    ("data/preferences.py --samples x --out x --per-prompt 0", "--per-prompt 0 must be at least 1"),
    ("algos/tpg.py --model tiny-llada --cache dual", "what a method replays would not be what was"),
    ("algos/mdpo.py --train-steps 0", "--train-steps 0 must be at least 1"),
    ("algos/tracerl.py --shrink 0", "--shrink 0 must be at least 1"),
    ("algos/d1.py --betas 0.9 1.0", "--betas 0.9 1.0 must be at least 0 and below 1"),
    ("algos/d1.py --sequence-parallel 2", "must divide the ranks of a node, 1: use 1"),
    ("algos/sft.py --sequence-parallel 0", "--sequence-parallel 0 must be at least 1"),
    ("algos/vrpo.py --sft-coef nan", "--sft-coef nan must be at least 0"),
    ("algos/sft.py --learning-rate inf", "--learning-rate inf must be at least 0 and finite"),
    ("algos/d1.py --p-mask-prompt 1.5", "--p-mask-prompt 1.5 must be at least 0 and at most 1"),
    ("algos/d1.py --seed 2147483648", "--seed 2147483648 must be below 2,147,483,648"),
    ("algos/dtreerpo.py --resume OLD", "branches = 4, lost = 1, which this version does not take"),
    (f"algos/vrpo.py --data {'x' * 256}", "no name has more than 255 bytes"),
    ("evals/countdown.py --model tiny-sdar --factor inf", "--factor inf must be at least 0 and"),
    (f"evals/show.py --prompt x --gen-length {2**40}", "must be below 2,147,483,648"),
    *(
        (f"algos/{script}.py --temperature 0", "--temperature 0.0 must be above 0")
        for script in ONLINE
    ),
]


@pytest.mark.parametrize("command, words", REFUSALS, ids=[command for command, _ in REFUSALS])
def test_refusal(run_ranks, tmp_path, monkeypatch, command, words):
    row = {"question": "1 + 1?", "answer": "Two.\n#### 2"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "TMP").mkdir()
    wide = tmp_path / "wide"
    copytree(ROOT / "models/tiny-sdar", wide, ignore=ignore_patterns("*.safetensors"))
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"hidden_size": 1024}))
    old = {"script": "dtreerpo", "args": {"branches": 4, "lost": 1}}  # of an earlier version
    (tmp_path / "old").mkdir()
    (tmp_path / "old/config.json").write_text(json.dumps(old))
    places = {"TMP": tmp_path / "TMP", "ROWS": tmp_path / "rows.jsonl", "WIDE": wide}
    places["OLD"] = tmp_path / "old"
    script, *flags = (str(places.get(word, word)) for word in command.split())

    def body(rank, world_size):
        dist.destroy_process_group()  # the script makes its own
        load_few_problems()
        monkeypatch.setattr(sys, "argv", [script, *flags])
        monkeypatch.chdir(ROOT)
        said = ""
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as error:
            said = str(error)
        (tmp_path / "said").write_text(said)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    run_ranks(1, body)
    said = (tmp_path / "said").read_text()
    assert words in said and "\n" not in said.strip(), said


@pytest.mark.parametrize("broken", ["", "sandbox", "reward", "rollout"])
def test_rewards_that_cannot_be_given_stop_a_run(run_ranks, tmp_path, monkeypatch, broken):
    """A broken sandbox or a reward that is not finite: before a model is built. A reward of a
    rollout that is not finite: before its update.
    """
    row = {"text": "Double it.", "code": "def f(x): return x", "test_list": ["assert f(2) == 4"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    calls = []

    def odd(completion, example):
        calls.append(completion)
        is_trial = len(calls) == 1
        return {"a": 1.0, "b": math.nan if broken == "reward" or not is_trial else 0.0}

    def next_step(*_):
        raise SystemExit("the next step")

    def body(rank, world_size):
        dist.destroy_process_group()  # the script makes its own
        monkeypatch.setitem(REWARDS, "countdown_odd", odd)
        monkeypatch.setattr(bgpo, "update" if broken == "rollout" else "load_models", next_step)
        if broken == "sandbox":
            monkeypatch.setattr(sandbox, "CHILD", tmp_path / "no_such_file.py")
        programs = {"task": "mbpp", "data": str(tmp_path / "rows.jsonl")}
        chosen = {"reward": "countdown_odd"} if broken in ("reward", "rollout") else programs
        small = {"prompts_per_step": 2, "eval_limit": 0, "max_prompt_length": 9999}
        try:
            bgpo.main(bgpo.Args(**small, **chosen, out=str(tmp_path)))
        except SystemExit as error:
            (tmp_path / "said").write_text(str(error))
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    run_ranks(1, body)
    assert (tmp_path / "said").read_text().startswith(STOPPED[broken])


STOPPED = {
    "": "the next step",
    "sandbox": "sandbox: no answer from its supervisor",
    "reward": "--task countdown: b of completion 0 of 1 is nan, not a finite number; --reward",
    "rollout": "--task countdown: b of completion 0 of 16 is nan, not a finite number; --reward",
}
