"""Engines as scripts use them: weights, refusals, traces and metrics, and the floor without
kernels.
"""

import importlib
import json
import math
import subprocess
import sys
from collections import Counter

import pytest
import torch
from sync_shared import ROOT
from test_samplers import M, V, engine_of, model_of, prompts_of

from evals.rewards import METRICS
from models import export_weights
from models.tiny import byte_tokenizer
from rollout import Trace, make_engine
from rollout.traces import concatenate, pieces, rollout_metrics

OPTIONS = dict(gen_length=11, remasking="low_confidence_static", seed=4)

# --- the law: everything but speed works without the upper floor ----------------------------------

GROUND = """
import pkgutil, sys, importlib
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("kernels", "triton") or name == "rollout.lmdeploy":
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
for folder in ("models", "rollout", "data", "evals", "algos"):
    for module in pkgutil.iter_modules([folder]):
        if f"{folder}.{module.name}" not in ("rollout.lmdeploy", "evals.command"):
            importlib.import_module(f"{folder}.{module.name}")
from rollout import make_engine
from models.tiny import TINY_CONFIGS
for name in TINY_CONFIGS:
    print(make_engine(name).generate([[3, 4, 5]], gen_length=32).completion_ids.shape)
assert not any(name.startswith("kernels") for name in sys.modules)
"""


def test_everything_imports_and_samples_without_kernels():
    done = subprocess.run([sys.executable, "-c", GROUND], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("torch.Size") == 6, done.stderr[-2000:]


def test_only_tests_marked_fast_may_import_the_upper_floor():
    """Every other CPU test runs while `ground` of conftest.py hides these modules."""
    for name in ("kernels", "kernels.block", "rollout.lmdeploy"):
        with pytest.raises(ModuleNotFoundError, match="No module named"):
            importlib.import_module(name)


# --- weights --------------------------------------------------------------------------------------


def test_load_weights_copies_in_place():
    """Later changes of the source do not matter; the dtype of the engine stays."""
    other, engine = model_of(seed=7, dtype=torch.float32), make_engine(model_of())
    weight, want = engine.model.lm_head.weight, {k: v.double() for k, v in export_weights(other)}
    engine.load_weights(export_weights(other))
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert engine.model.lm_head.weight is weight and weight.dtype == torch.float64
    assert all(torch.equal(value, want[name]) for name, value in export_weights(engine.model))


def test_load_weights_names_what_is_missing_unknown_or_of_another_shape():
    """copy_ would broadcast a [1] into every norm weight."""
    engine, weights = make_engine(model_of()), dict(export_weights(model_of(seed=7)))
    for name in "model.layers.9.x", "model.norm.weight":
        with pytest.raises(ValueError, match=f"{name} .1. is no tensor of this model"):
            engine.load_weights((weights | {name: torch.zeros(1)}).items())
    name, _ = weights.popitem()
    with pytest.raises(ValueError, match=f"weights did not come for {name}"):
        engine.load_weights(weights.items())


def test_room_is_made_for_updates_that_need_it(monkeypatch):
    """A simulated GPU of 100: what generate keeps is freed before the first update, and where it
    would not fit beside the largest so far, or beside one of longer rows.
    """
    engine, peak, held, found = engine_of("sdar"), 0, {}, []
    monkeypatch.setattr(engine, "release", lambda: held.update(cache=0))
    monkeypatch.setattr("rollout.engine.cuda_bytes", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held["cache"])
    monkeypatch.setattr("rollout.engine.unused_by_graphs", lambda: 6)
    updates = [(60, 20, 40), (60, 20, 40), (50, 23, 30), (60, 20, 50), (40, 38, 40), (60, 38, 40)]
    for update, held["cache"], row in [*updates, (20, 5, 40)]:
        engine.generate([[3] * (row - 4)], gen_length=4)
        engine.make_room()
        found.append(held["cache"] == 0)
        peak = max(peak, update + held["cache"])
    assert found == [1, 0, 0, 1, 1, 1, 1]


def test_an_engine_in_bf16_reports_fp32():
    half = make_engine("tiny-sdar", dtype=torch.bfloat16)
    trace = half.generate(prompts_of([5, 2]), **OPTIONS)
    assert half.dtype == torch.bfloat16 and trace.logps.dtype == torch.float32


# --- refusals and plans ---------------------------------------------------------------------------

ASCENDING = {"schedule": "ascending", "gen_length": 20, "denoising_steps": 5}
REFUSED = [
    ("sdar", {"block_length": 8}, "--block-length 8.*blocks of 4"),
    ("sdar", {"remasking": "low_confidence"}, "--remasking low_confidence: .*static.*random"),
    ("sdar", {"alg_temp": 0.5}, "--alg-temp 0.5: the sampler of a block-causal model has 0"),
    ("sdar", {"records": "states"}, "keeps no records of kind 'states'"),
    ("sdar", {"cache": "dual"}, "--cache dual.*block-causal.*none"),
    ("sdar", {"editing_threshold": 0.5}, "--editing-threshold 0.5: SDAR was not trained to edit"),
    ("llada2", {"editing_threshold": 0.5, "records": "steps"}, "threshold 0.5 revises tokens"),
    ("llada", {"remasking": "rcr", "records": "steps"}, "--remasking rcr revises tokens"),
    ("llada", {"remasking": "entropy", "eos_policy": "eoser"}, "eoser needs confidences"),
    ("llada", {"remasking": "sequential", "eos_policy": "demote"}, "demote needs confidences"),
    ("llada", {"alg_temp": 0.5}, "--alg-temp 0.5 needs --remasking low_confidence_static or"),
    (
        "llada",
        ASCENDING,
        "ascending reveals 20 tokens in 4 steps .*at most as many --denoising-steps",
    ),
    ("llada", ASCENDING | {"denoising_steps": 4, "block_length": 3}, "give --block-length 0"),
]
WRONG = dict(denoising_steps=0, top_k=-1, top_p=0.0, factor=-0.1, temperature=math.inf)
WRONG |= dict(confidence_threshold=1.01, block_length=-4)
REFUSED += [
    ("llada", {k: v}, f"--{k.replace('_', '-')} {v} must be from") for k, v in WRONG.items()
]


@pytest.mark.parametrize("family, options, words", REFUSED, ids=str)
def test_a_rollout_and_its_plan_refuse_what_they_cannot_do(family, options, words):
    engine = engine_of(family)
    for ask in (engine.validate, lambda **how: engine.generate([[3, 4]], **how)):
        with pytest.raises(SystemExit, match=words):
            ask(**{"gen_length": 8, "block_length": 0} | options)


def test_prompts_are_checked():
    engine = engine_of()
    with pytest.raises(SystemExit, match="at least one token"):
        engine.generate([[3], []])
    for token in (M, -1, V):  # on a GPU it would be an assertion of the device
        with pytest.raises(SystemExit, match="prompt 1 holds the mask token .id 19. or an id outs"):
            engine.generate([[3], [4, token]])


# --- traces ---------------------------------------------------------------------------------------


def trace_of(completions, masks, prompts=None, steps=None, eos=(256,), **changes):
    """A trace by hand: lists of ids, and how many of each are scored."""
    L = max(map(len, completions))
    pad = lambda rows, fill: torch.tensor([list(row) + [fill] * (L - len(row)) for row in rows])
    steps = pad(steps or [[j % 4 for j in range(len(row))] for row in completions], -1)
    lengths = torch.tensor([len(row) for row in completions])
    values = dict(
        prompt_ids=prompts or [[258, 104, 105, 259] for _ in completions],
        completion_ids=pad(completions, 256),
        completion_mask=torch.arange(L) < torch.tensor(masks)[:, None],
        canvas_length=lengths,
        step_map=steps,
        logps=pad([[-0.123456 * (j + 1) for j in range(len(row))] for row in completions], 0.0),
        sample_index=torch.arange(len(completions)),
        num_forwards=2 * lengths,
        settings={"eos_token_ids": list(eos), "attention": "block-causal", "block_length": 4},
    )
    return Trace(**values | changes)


def test_text_and_describe():
    """Text is what is scored, without special tokens; describe: a dict that JSON can hold."""
    trace, tokenizer = (
        trace_of([[97, 98, 256, 99], [97, 10, 195, 188, 98, 98]], [3, 6]),
        byte_tokenizer(),
    )
    assert [trace.text(i, tokenizer) for i in range(2)] == ["ab", "a\nübb"]
    assert vars(trace.texts(tokenizer)[1]) == {"tokens": 6, "truncated": True, "forwards": 6}
    assert trace.completion(0) == [97, 98, 256] and trace.truncated.tolist() == [False, True]
    row = {"prompt": "<|user|>hi<|assistant|>", "completion": "ab", "gold": "4", "reward": 0.5}
    row |= {"completion_ids": [97, 98, 256], "pieces": ["a", "b", "<|endoftext|>"]}
    row |= {"blocks": [0, 0, 0], "step_map": [0, 1, 2], "logps": [-0.1235, -0.2469, -0.3704]}
    assert json.loads(json.dumps(trace.describe(0, tokenizer, 0.5, {"target": 4}))) == row
    assert trace.unmasking(1, tokenizer)["pieces"] == ["a", "\n", "", "ü", "b", "b"]
    # bytes that are no characters
    assert pieces([240] * 5, tokenizer) == ["", "", "", "\ufffd" * 4, "\ufffd"]


def test_draw():
    """Each scored token over the step that revealed it; the grid starts with the prompt."""
    tokenizer, steps = byte_tokenizer(), [[11, 0, 3, 1, 2]]
    trace = trace_of([[97, 98, 10, 256, 100]], [4], prompts=[[258, 104, 259]], steps=steps)
    assert [line.rstrip() for line in trace.draw(0, tokenizer).splitlines()] == [
        "prompt   <|user|>h<|assistant|>",
        r"tokens   a  | b \n <|endoftext|>",
        "step     12   1 4  2",
    ]


def test_concatenate_pads_to_the_widest():
    a = trace_of([[97, 98, 256, 99]], [3])
    b = trace_of([[1, 2, 3, 4, 5, 6], [4, 5, 6, 256]], [6, 4], prompts=[[7], [8, 9]])
    both = concatenate([a, b], 255)
    assert both.prompt_ids == [*a.prompt_ids, [7], [8, 9]]
    assert both.completion_ids[0].tolist() == [97, 98, 256, 99, 255, 255]
    assert both.completion_mask[0].tolist() == [True] * 3 + [False] * 3
    assert both.step_map[0].tolist() == [0, 1, 2, 3, -1, -1] and both.logps[0, 4:].tolist() == [
        0,
        0,
    ]
    assert torch.equal(both.completion_ids[1:], b.completion_ids)
    assert both.num_forwards.tolist() == [8, 12, 8]


def test_rollout_metrics(monkeypatch):
    """Means over the sequences of all ranks, here two of two sequences each."""
    sums = Counter()

    def all_reduce(values):
        sums.update({name: float(value) for name, value in values.items()})
        return dict(sums)

    monkeypatch.setattr("rollout.traces.all_reduce", all_reduce)
    rows = [[256, 9, 9, 9], [97, 98, 256, 9], [97, 98, 99, 100], [97, 98, 99, 100]]
    scored, rewards = [1, 3, 4, 4], torch.tensor([0.0, 1.0, 0.5, 0.5])
    exact, form = [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]
    parts = [{"exact": x, "format": y} for x, y in zip(exact, form, strict=True)]
    for half in (slice(2), slice(2, 4)):
        trace = trace_of(rows[half], scored[half])
        metrics = rollout_metrics(trace, rewards[half], parts[half], 2)
    assert metrics == {
        "reward/mean": 0.5,
        "reward/std": pytest.approx(rewards.std(correction=0).item()),
        "reward/zero_std_frac": 0.5,  # the second group
        "completion/length": 3.0,
        "completion/truncated_frac": 0.5,
        "completion/empty_frac": 0.25,  # an EOS alone
        "completion/distinct_frac": 0.75,
        "speed/tokens_per_forward": 12 / 8 / 4,
        "reward/exact": 0.25,
        "reward/format": 0.25,
    }
    # a lone component is the reward
    own = {name[7:] for name in metrics if name.startswith("reward/")} - parts[0].keys()
    assert own == {*METRICS} - {"square", "error_frac"}  # parts of a reward may not have these
    assert "reward/score" not in rollout_metrics(trace, rewards[:2], [{"score": 1.0}] * 2, 2)
