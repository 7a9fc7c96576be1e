"""rollout/block.py as it runs on a GPU: batches in buckets, lasting slots, and steps that a CUDA graph can hold and replay.

Without a GPU a graph is emulated: the operations of a step are recorded with the very tensors they read and wrote, and a replay
runs them again on these tensors. What the host put in as a number stays what it was, as in a CUDA graph.
"""

import copy
import dataclasses
import itertools
import math
import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from test_rollout import SMALL, M, model_of, prompts_of, same_draws, softmax, uniform

import rollout.block
from models import add_lora, export_weights
from models.lora import adapter_tensors, export_adapter
from models.tiny import TINY_LLADA2, TINY_SDAR_MOE, random_model
from rollout import make_engine
from rollout.block import BlockEngine
from rollout.engine import REMASKING, RULES
from rollout.probe import replay_logps
from rollout.schedules import reveal_quota
from rollout.slots import Slots

OPTIONS = dict(num_samples=3, gen_length=13, denoising_steps=3, confidence_threshold=0.5, seed=4)
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
RUNS = bool(find_spec("triton") and (ON_GPU or os.environ.get("TRITON_INTERPRET") == "1"))
needs_triton = (lambda test: test) if RUNS and not ON_GPU else pytest.mark.cuda
MIXTURES = {"SDAR-MoE": TINY_SDAR_MOE, "LLaDA2": TINY_LLADA2}
READS_BACK = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "equal",
    "is_nonzero",
}


class Recorded:
    """Stands for rollout.graphs.Graphs on CPU."""

    def __init__(self, device):
        self.graphs, self.replays = {}, 0

    def run(self, key, function):
        if key not in self.graphs:
            with Recorder() as recorder:
                function()
            self.graphs[key] = recorder.calls
            return
        self.replays += 1
        for op, args, kwargs, out in self.graphs[key]:
            inputs = {
                x.untyped_storage().data_ptr()
                for x in tree_leaves((args, kwargs))
                if isinstance(x, torch.Tensor)
            }
            for old, new in zip(tree_leaves(out), tree_leaves(op(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() not in inputs:
                    old.copy_(new)


class Recorder(TorchDispatchMode):
    """Records every operation; refuses those that would make the host wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name, kwargs = op.__name__.split(".")[0], kwargs or {}
        masks = [
            x for x in tree_leaves(args) if isinstance(x, torch.Tensor) and x.dtype == torch.bool
        ]
        if (
            name in READS_BACK
            or name in ("index", "index_put", "index_put_")
            and any(x is y for x in masks for y in args[1])
        ):
            raise RuntimeError(f"{name} reads back")
        out = op(*args, **kwargs)
        self.calls.append((op, args, kwargs, out))
        return out


def bucketed(model, monkeypatch, graphs=False, cls=BlockEngine, max_batch_size=256):
    """The engine as on a GPU: looks that are one step behind, rows and widths in buckets, small ones so that several occur."""
    monkeypatch.setattr(rollout.block, "WIDTHS", 8)
    monkeypatch.setattr(rollout.block, "ROWS", (1, 2, 3, 5, 8, 12, 16, 24, 40, 64))
    monkeypatch.setattr(rollout.block, "Graphs", Recorded)
    engine = cls(model, max_batch_size)
    engine.in_buckets, engine.use_graphs = True, graphs
    return engine


@pytest.mark.parametrize("remasking", REMASKING)
@pytest.mark.parametrize("stop_at_eos", [True, False])
@pytest.mark.parametrize("graphs", [False, True])
def test_buckets_and_replays_do_not_change_the_draws(monkeypatch, remasking, stop_at_eos, graphs):
    """Ended and filling rows, wider cache, no look between steps, one graph for many seeds and prompts: the same traces."""
    engine, plain = bucketed(model_of(), monkeypatch, graphs), make_engine(model_of())
    options = OPTIONS | dict(remasking=remasking, stop_at_eos=stop_at_eos)
    for i, lengths in enumerate(
        [range(1, 8), [5], [9, 2, 4], range(1, 12)]
    ):  # the slots grow, stay, stay, grow
        slots = engine.slots
        for seed in (-i, 2**63 + i):
            prompts, changes = (
                prompts_of(lengths, seed=i),
                dict(temperature=i % 3 / 2, sample_offset=7 * i, seed=seed),
            )
            assert same_draws(
                engine.generate(prompts, **options | changes),
                plain.generate(prompts, **options | changes),
            )
        assert (engine.slots is slots) == (i in (1, 2))
        if graphs:
            assert engine.graphs.replays > len(engine.graphs.graphs) > 0


def test_a_number_in_the_graph_is_seen(monkeypatch):
    """Negative control of the emulation: a step that takes its seed from the host draws with the first seed for ever."""

    class Stale(BlockEngine):
        def _step(self, slots, *rest):
            was = slots.seed
            slots.seed = int(self.host_seed)
            super()._step(slots, *rest)
            slots.seed = was

    engine, plain = bucketed(model_of(), monkeypatch, True, Stale), make_engine(model_of())
    for seed, same in ((1, True), (2, False)):
        engine.host_seed = seed
        traces = [
            one.generate(prompts_of([3, 6]), **OPTIONS | {"seed": seed}) for one in (engine, plain)
        ]
        assert same_draws(*traces) == same


@pytest.mark.parametrize("look", ["any", "mask"])
def test_reading_back_is_seen(monkeypatch, look):
    """Negative control: a step that asks whether any token is masked, or indexes by a mask."""

    class Waits(BlockEngine):
        def _forward(self, block, at, cache):
            is_mask = block == self.model.mask_token_id
            _ = is_mask.any() and 1 if look == "any" else block[is_mask]
            return super()._forward(block, at, cache)

    with pytest.raises(RuntimeError, match="reads back"):
        bucketed(model_of(), monkeypatch, True, Waits).generate([[3, 4]], **OPTIONS)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts(monkeypatch, name):
    """fp64: buckets draw what the exact shapes draw. bf16, where experts are grouped: a replay is the step, bit for bit."""
    build = lambda dtype: random_model(MIXTURES[name], dtype=dtype)
    prompts = prompts_of([3, 9, 5])
    traces = [
        one.generate(prompts, **OPTIONS)
        for one in (bucketed(build(torch.float64), monkeypatch), make_engine(build(torch.float64)))
    ]
    assert same_draws(*traces)
    traces = [
        bucketed(build(torch.bfloat16), monkeypatch, graphs).generate(prompts, **OPTIONS)
        for graphs in (False, True)
    ]
    assert same_draws(*traces, 0)


def test_old_keys_and_values_are_not_seen(monkeypatch):
    """What an earlier batch left in the slots is never attended to."""
    engine = bucketed(model_of(), monkeypatch)
    want = engine.generate(prompts_of([6, 3]), **OPTIONS)
    for k, v in engine.slots.cache:
        k.fill_(1e6), v.fill_(1e6)
    assert same_draws(engine.generate(prompts_of([6, 3]), **OPTIONS), want, 0)


def test_other_options_get_their_own_graphs(monkeypatch):
    """Steps, temperature, filters, rule, its limit, stop and end tokens are in the graph: another one is another graph."""
    engine, plain = bucketed(model_of(), monkeypatch, True), make_engine(model_of())
    changes = [
        {},
        {"denoising_steps": 4},
        {"temperature": 0},
        {"remasking": "random"},
        {"confidence_threshold": 0.1},
    ]
    changes += [{"remasking": rule} for rule in RULES if rule not in REMASKING] + [
        {"top_k": 3},
        {"top_p": 0.5},
    ]
    changes += [
        {"remasking": "low_confidence_factor", "factor": 3.0},
        {"remasking": "entropy_bounded", "eb_threshold": 2.0},
    ]
    for change in [*changes, {"stop_at_eos": False}, {}]:
        traces = [
            one.generate(prompts_of([3, 6, 4]), **OPTIONS | change) for one in (engine, plain)
        ]
        assert same_draws(*traces)
    engine.model.eos_token_ids = plain.model.eos_token_ids = [3, 4, 5]
    assert same_draws(*(one.generate(prompts_of([3, 6, 4]), **OPTIONS) for one in (engine, plain)))


def test_weights_and_adapters_change_under_the_graphs(monkeypatch):
    """load_weights copies in place: replays draw from the new weights, and peft's layers are in the graph."""
    engine = bucketed(model_of(), monkeypatch, True)
    engine.generate(prompts_of([5, 2]), **OPTIONS)
    graphs, other = engine.graphs, model_of(seed=7)
    engine.load_weights(export_weights(other))
    want = make_engine(other).generate(prompts_of([5, 2]), **OPTIONS)
    assert (
        same_draws(engine.generate(prompts_of([5, 2]), **OPTIONS), want) and engine.graphs is graphs
    )

    learner = add_lora(model_of(), 4, 8, dtype=torch.float64)
    engine = bucketed(add_lora(model_of(), 4, 8, dtype=torch.float64), monkeypatch, True)
    before = engine.generate(prompts_of([5, 2]), **OPTIONS)
    with torch.no_grad():
        for value in adapter_tensors(learner).values():
            value.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    engine.load_weights(export_adapter(learner))
    after = engine.generate(prompts_of([5, 2]), **OPTIONS)
    assert same_draws(
        after, make_engine(learner).generate(prompts_of([5, 2]), **OPTIONS)
    ) and not same_draws(after, before)


def test_broken_weights_stop_the_rollout_and_leave_nothing(monkeypatch):
    """NaN in the slots would reach the next rollout."""
    engine = bucketed(model_of(), monkeypatch)
    good = dict(export_weights(model_of()))
    with torch.no_grad():
        engine.model.layers[0].mlp.up_proj.weight.fill_(float("nan"))
    with pytest.raises(SystemExit, match=r"not finite at samples \[10, 11, 12"):
        engine.generate(prompts_of([5, 2]), sample_offset=10, **OPTIONS)
    engine.load_weights(good.items())
    want = make_engine(model_of()).generate(prompts_of([5, 2]), **OPTIONS)
    assert same_draws(engine.generate(prompts_of([5, 2]), **OPTIONS), want)


def test_the_quota_of_a_step_is_that_of_the_schedule(monkeypatch):
    """The step computes quotas from the number of the step: low_confidence_static reveals reveal_quota of them."""
    for n, steps in ((8, 3), (8, 5), (3, 2), (4, 6)):
        engine = bucketed(model_of(SMALL | {"block_size": n}), monkeypatch)
        trace = engine.generate(
            [[3] * n],
            gen_length=n,
            denoising_steps=steps,
            remasking="low_confidence_static",
            stop_at_eos=False,
        )
        assert torch.bincount(trace.step_map[0], minlength=steps).tolist() == reveal_quota(n, steps)


# --- waiting samples ---------------------------------------------------------------------------------------------------------

ROLLOUT = OPTIONS | {"num_samples": 4, "denoising_steps": 4}


class Spy(BlockEngine):
    """Notes what is done in order: the prompts of a prefill, the rows of a step, how many of them were live."""

    def __init__(self, *args):
        super().__init__(*args)
        self.done = []

    def _prefill(self, prompts, *rest):
        self.done.append(("prefill", prompts))
        return super()._prefill(prompts, *rest)

    def _step(self, slots, R, width, rule, joined, most):
        row = slots.sample[:R]
        assert len(set(row.tolist())) == R  # two places with one sample would write it twice
        self.done.append(("step", R, int((slots.start[row] < slots.end[row]).sum())))
        return super()._step(slots, R, width, rule, joined, most)


class Counting(BlockEngine):
    """Notes of each step what the host allows for, and the masks that the busiest row has in it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.done = []

    def _step(self, slots, R, width, rule, joined, most):
        n, row, heads, sample = self.model.block_length, slots.sample[:R], [], super()._sample
        at = slots.start[row].clamp(max=width - n)[:, None] + torch.arange(n)
        masks = (slots.masked[row[:, None], at] & (slots.start[row] < slots.end[row])[:, None]).sum(
            1
        )
        masks[(masks == 0) & (slots.start[row] + n < slots.end[row])] = n if joined else 0
        self._sample = lambda hidden, *rest: heads.append(len(hidden)) or sample(hidden, *rest)
        super()._step(slots, R, width, rule, joined, most)
        assert heads == [R * most]
        self.done.append((most, int(masks.max())))


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6])
def test_the_head_sees_masked_tokens_alone(monkeypatch, steps, joins):
    """Ragged prompts, refills and stops, seen one step late: never less than there are, and no more where all are in step."""
    model, draws = (
        model_of(eos=(2, 9, 16)),
        OPTIONS | {"remasking": "low_confidence_static", "denoising_steps": steps},
    )
    draws |= {"gen_length": 24, "stop_at_eos": True}
    for prompts, options in (
        (prompts_of([3, 9, 1, 6, 8, 12, 2]), draws),
        (prompts_of([4, 8]), draws | {"stop_at_eos": False}),
    ):
        engine = bucketed(model, monkeypatch, cls=Counting, max_batch_size=3)
        engine.joins = joins
        trace = engine.generate(prompts, **options)
        assert same_draws_but_forwards(trace, make_engine(model).generate(prompts, **options))
        assert all(1 <= there <= most or there == 0 for most, there in engine.done) and engine.done
    n = model.block_length
    if steps in (1, 2, 4):
        assert {most for most, there in engine.done if there} == {
            n - step * n // steps for step in range(steps)
        }
        assert all(most == there for most, there in engine.done if there)
    if steps < 4:
        monkeypatch.setattr(
            engine, "_most_masks", lambda *_: n - 1
        )  # negative control: fewer than there are
        with pytest.raises(RuntimeError, match="more masks than its step was launched for"):
            engine.generate(prompts, **options)


@pytest.mark.parametrize(
    "name, kind",
    [("SDAR", "graphs"), *itertools.product(["SDAR", *MIXTURES], ["plain", "buckets"])],
)
def test_waiting_samples_take_the_places_of_ended_ones(monkeypatch, name, kind):
    """Whatever the number of places: the same tokens, orders, logps and forwards, for ragged prompts in groups of 4."""
    build = lambda: (
        model_of() if name == "SDAR" else random_model(MIXTURES[name], dtype=torch.float64)
    )
    prompts = prompts_of([3, 9, 1, 6, 8, 12, 2])
    model = build()
    model.eos_token_ids = list(range(0, model.config.vocab_size, 7))  # rows end early
    want = make_engine(model, max_batch_size=64).generate(prompts, **ROLLOUT)
    assert len(want.canvas_length.unique()) > 3
    for size in (3, 8, 27) if name == "SDAR" else (5,):
        engine = make_engine(model, max_batch_size=size) if kind == "plain" else None
        engine = engine or bucketed(model, monkeypatch, kind == "graphs", max_batch_size=size)
        for seed in (4, 5):  # the second time in slots that hold the first
            options = ROLLOUT | {"seed": seed}
            again = (
                want
                if seed == 4
                else make_engine(model, max_batch_size=64).generate(prompts, **options)
            )
            assert same_draws(engine.generate(prompts, **options), again)


def test_places_stay_full_while_samples_wait(monkeypatch):
    """No more than max_batch_size rows; a free place is filled before the next step, one later where the host is behind."""
    for engine, late in (
        (Spy(model_of(), 5), False),
        (bucketed(model_of(), monkeypatch, cls=Spy, max_batch_size=5), True),
    ):
        trace = engine.generate(prompts_of([3, 9, 1, 6, 8, 12, 2]), **ROLLOUT)
        steps = [what[1:] for what in engine.done if what[0] == "step"]
        last = max(i for i, what in enumerate(engine.done) if what[0] == "prefill")
        while_waiting = [what[1:] for what in engine.done[:last] if what[0] == "step"]
        assert {R for R, _ in while_waiting} == {5} and len(while_waiting) > 20
        idle = sum(R - live for R, live in while_waiting)
        ended = sum(int(n) for n in (trace.canvas_length > 0)) - 5
        assert (0 < idle <= ended) if late else idle == 0
        rows = [R for R, _ in steps]
        assert rows == sorted(rows, reverse=True) and rows[-1] == 1  # it narrows at the end
        assert sum(live for _, live in steps) == trace.num_forwards.sum()


def test_a_prompt_is_prefilled_once_for_its_group(monkeypatch):
    """Whole blocks of each prompt, once, though its samples enter at different times: later ones copy."""
    prompts = prompts_of([9, 12, 6, 17])
    for size in (1, 3, 6):
        for engine in (
            Spy(model_of(), size),
            bucketed(model_of(), monkeypatch, cls=Spy, max_batch_size=size),
        ):
            engine.generate(prompts, **ROLLOUT)
            prefilled = [ids for what in engine.done if what[0] == "prefill" for ids in what[1]]
            assert prefilled == [ids[: len(ids) // 4 * 4] for ids in prompts]


@pytest.mark.parametrize("n, widths", [(3, 8), (5, 8), (3, 128), (4, 8)])
@pytest.mark.parametrize("joins", [True, False])
def test_rows_that_have_ended_write_nothing_that_is_read(monkeypatch, n, widths, joins):
    """They are carried along in a whole block: elsewhere they would change the prompt that the next sample copies. Also where
    blocks do not divide the width.
    """
    model = model_of(SMALL | {"block_size": n}, eos=())
    options = OPTIONS | dict(
        num_samples=2,
        gen_length=2,
        denoising_steps=n,
        remasking="low_confidence_static",
        stop_at_eos=False,
    )
    want = make_engine(model).generate(prompts_of([2, 12]), **options)
    engine = bucketed(model, monkeypatch, max_batch_size=3)
    monkeypatch.setattr(rollout.block, "WIDTHS", widths)
    engine.joins, engine.ridge = joins, 0
    assert same_draws(engine.generate(prompts_of([2, 12]), **options), want)


@pytest.mark.parametrize("fault", ["no copy", "other sibling"])
def test_a_wrong_copy_of_the_prompt_is_seen(monkeypatch, fault):
    """Negative control: samples that enter later and get no cache, or that of another place."""
    want = make_engine(model_of()).generate(prompts_of([9, 12, 6, 17]), **ROLLOUT)
    copy = Slots.copy
    shift = lambda self, source, target, width: copy(
        self, [(r + 1) % 3 for r in source], target, width
    )
    monkeypatch.setattr(Slots, "copy", (lambda *args: None) if fault == "no copy" else shift)
    got = make_engine(model_of(), max_batch_size=3).generate(prompts_of([9, 12, 6, 17]), **ROLLOUT)
    assert not same_draws(got, want)


@pytest.mark.parametrize(
    "remasking, denoising_steps",
    [("low_confidence_static", 3), ("low_confidence_static", 6), ("random", 2)],
)
def test_no_step_is_launched_that_nobody_needs(monkeypatch, remasking, denoising_steps):
    """Where all rows will have ended the host, a step behind, waits for the step under way instead of launching another."""
    options = ROLLOUT | dict(
        remasking=remasking, denoising_steps=denoising_steps, stop_at_eos=False, num_samples=4
    )
    for size in (4, 64):  # one prompt after the other, all at once
        idle = []
        for counts in (True, False):
            engine = bucketed(model_of(), monkeypatch, cls=Spy, max_batch_size=size)
            if not counts:  # negative control
                monkeypatch.setattr(engine, "_is_done", lambda *_: False)
            trace = engine.generate(prompts_of([9, 9, 9]), **options)
            steps = [what[1:] for what in engine.done if what[0] == "step"]
            assert sum(live for _, live in steps) == trace.num_forwards.sum()
            idle.append(sum(live == 0 for _, live in steps))
        assert idle == (
            [0, 3 if size == 4 else 1] if denoising_steps < 6 else [idle[1]] * 2
        )  # 6 of 4 tokens: some reveal none


def test_the_host_looks_back_while_a_step_is_under_way(monkeypatch):
    """On a GPU the progress after step k is read when step k + 1 has been launched, so that the device has work meanwhile."""
    engine, order, look = (
        bucketed(model_of(), monkeypatch, cls=Spy, max_batch_size=4),
        [],
        Slots.look,
    )

    def noted(slots):
        read, number = look(slots), len([what for what in engine.done if what[0] == "step"])
        return lambda: (
            order.append((number, len([w for w in engine.done if w[0] == "step"]))) or read()
        )

    monkeypatch.setattr(Slots, "look", noted)
    engine.generate(prompts_of([3, 9, 1, 6]), **ROLLOUT)
    assert (
        order[0] == (0, 0)
        and order[1:] == [(k, k + 1) for k in range(1, len(order))]
        and len(order) > 30
    )


def test_large_prompts_are_prefilled_in_parts(monkeypatch):
    """No forward of prompts is larger than PREFILL tokens, or one prompt; the draws stay."""
    want = make_engine(model_of()).generate(prompts_of([9, 12, 6, 17, 3]), **OPTIONS)
    monkeypatch.setattr(rollout.block, "PREFILL", 24)
    engine = Spy(model_of(), 256)
    assert same_draws(engine.generate(prompts_of([9, 12, 6, 17, 3]), **OPTIONS), want)
    assert [len(what[1]) for what in engine.done if what[0] == "prefill"] == [1] * 5


def test_a_rule_that_never_ends_is_stopped(monkeypatch):
    """A rule that leaves masks after the last step, or reveals what is not masked, ends in an exception, not in a hang."""
    select = rollout.engine.select
    turned = lambda confidence, masked, quota, *rest: select(confidence, ~masked, quota, *rest)
    for wrong in (turned, lambda confidence, masked, *rest: torch.zeros_like(masked)):
        for engine in (Spy(model_of(), 256), bucketed(model_of(), monkeypatch, cls=Spy)):
            with monkeypatch.context() as patch:
                patch.setattr(rollout.engine, "select", wrong)
                with pytest.raises(
                    RuntimeError, match="low_confidence_dynamic left tokens masked after 3 steps"
                ):
                    engine.generate([[3, 4]], **OPTIONS)
            assert len(engine.done) < 8


# --- joined commits ----------------------------------------------------------------------------------------------------------


def blocks_of(trace, n=4):
    P = torch.tensor([len(ids) for ids in trace.prompt_ids])
    return (P + trace.canvas_length) // n - P // n


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("remasking", ["low_confidence_dynamic", "entropy_bounded"])
def test_joined_commits_draw_the_same(monkeypatch, remasking, graphs):
    """Forwards of two blocks, of all rows or of the few at the end: the same draws; blocks but the last save a forward each."""
    prompts, options = (
        prompts_of([3, 9, 1, 6, 8, 4]),
        OPTIONS | {"remasking": remasking, "eb_threshold": 0.8},
    )
    model, options = model_of(eos=(2, 9, 16)), options | {"gen_length": 24}
    want = make_engine(model).generate(prompts, **options)
    blocks = blocks_of(want)
    for ridge, places in ((1000, 256), (1000, 5), (130, 256)):
        engine = bucketed(model, monkeypatch, graphs, max_batch_size=places)
        engine.joins, engine.ridge = True, ridge
        got = engine.generate(prompts, **options)
        saved = want.num_forwards - got.num_forwards
        assert (
            (saved == blocks - 1).all()
            if ridge == 1000
            else ((0 <= saved) & (saved < blocks)).all() and saved.any()
        )
        assert same_draws_but_forwards(got, want)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("remasking", ["low_confidence_static", "random", "sequential"])
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_rows_fall_into_step_with_the_joined_steps(monkeypatch, remasking, steps, graphs):
    """Every `steps`-th step is joined: the same draws; a row out of step commits by itself, steps - 1 times at most. Rows that
    begin together with whole blocks commit nothing by themselves, and nothing is joined in between."""
    model, options = (
        model_of(eos=(2, 9, 16)),
        OPTIONS | {"gen_length": 24, "denoising_steps": steps, "remasking": remasking},
    )
    for lengths, places in (([3, 9, 1, 6, 8, 4], 256), ([3, 9, 1, 6, 8, 4], 5), ([8, 4, 12], 256)):
        prompts = prompts_of(lengths)
        want = make_engine(model).generate(prompts, **options)
        engine, widths = bucketed(model, monkeypatch, graphs, max_batch_size=places), []
        engine.joins, forward = True, engine._forward
        engine._forward = lambda block, at, cache: (
            widths.append(block.shape[1]) or forward(block, at, cache)
        )  # noqa: B023
        got = engine.generate(prompts, **options)
        saved, blocks = want.num_forwards - got.num_forwards, blocks_of(want)
        assert (
            (saved < blocks).all()
            and (saved >= (blocks - steps).clamp(min=0)).all()
            and saved.any()
        )
        assert same_draws_but_forwards(got, want)
        if lengths == [8, 4, 12]:
            assert torch.equal(saved, blocks - 1)
            assert graphs or widths == [
                8 if clock and clock % steps == 0 else 4 for clock in range(len(widths))
            ]


@pytest.mark.parametrize("remasking", ["low_confidence_static", "low_confidence_dynamic"])
@pytest.mark.parametrize("fault", ["stale", "all seen", "other keys"])
def test_a_wrong_joined_commit_is_seen(monkeypatch, fault, remasking):
    """Negative controls: the block before goes in with a mask, sees the block in work, or its keys lie elsewhere."""

    class Wrong(BlockEngine):
        def _forward(self, block, at, cache):
            if block.shape[1] == 4:
                return super()._forward(block, at, cache)
            if fault == "stale":
                block = torch.where(torch.arange(8) == 3, M, block)
            if fault == "other keys":
                cache = [(k.roll(1, 2), v) for k, v in cache]
            if fault == "all seen":
                self.model.block_length = 8
            try:
                return super()._forward(block, at, cache)
            finally:
                self.model.block_length = 4

    engine = bucketed(model_of(), monkeypatch, cls=Wrong)
    engine.joins, engine.ridge = True, 1000
    prompts, options = prompts_of([3, 9, 1, 6]), OPTIONS | {"remasking": remasking}
    want = make_engine(model_of()).generate(prompts, **options)
    assert not same_draws_but_forwards(engine.generate(prompts, **options), want)


def same_draws_but_forwards(a, b, tolerance=1e-12):
    return same_draws(dataclasses.replace(a, num_forwards=b.num_forwards), b, tolerance)


# --- bookkeeping in two kernels ----------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("remasking", BlockEngine.choices["remasking"])
def test_the_kernels_around_a_forward_do_what_the_plain_step_does(monkeypatch, remasking, joins):
    """Ragged prompts, ended rows, refills, EOS, steps alone and joined: equal tokens, steps, forwards; blocks of 4 and 6."""
    for block, steps, stop_at_eos in ((4, 3, True), (4, 4, False), (6, 2, True)):
        model = model_of(eos=(2, 9, 16)).to(DEVICE)
        model.block_length = block
        options = OPTIONS | {
            "gen_length": 24,
            "denoising_steps": steps,
            "remasking": remasking,
            "stop_at_eos": stop_at_eos,
        }
        options |= {"eb_threshold": 0.8, "factor": 0.9}
        prompts = prompts_of([3, 9, 1, 6, 8, 4])
        want, got = (
            bucketed(model, monkeypatch, max_batch_size=5),
            bucketed(model, monkeypatch, max_batch_size=5),
        )
        want.joins = got.joins = joins
        want.fuses, got.fuses = False, True
        assert same_draws(got.generate(prompts, **options), want.generate(prompts, **options))
        greedy = options | {"temperature": 0.0, "seed": 2**63 + 5, "sample_offset": 7}
        assert same_draws(got.generate(prompts, **greedy), want.generate(prompts, **greedy))


@needs_triton
def test_the_kernels_around_a_forward_see_what_is_wrong(monkeypatch):
    """Logits that are not finite, and a rule that never ends."""
    model = model_of().to(DEVICE)
    engine = bucketed(model, monkeypatch)
    engine.fuses = True
    sample = engine._sample
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_sample", lambda hidden, *rest: sample(hidden * torch.nan, *rest))
        with pytest.raises(SystemExit, match="logits are not finite at samples"):
            engine.generate([[3, 4]], **OPTIONS)
    from kernels import block_triton

    begin = block_triton.begin

    def begin_late(*args, **kwargs):
        *rest, (start, step) = begin(*args, **kwargs)
        return *rest, (start, step + 100)

    with monkeypatch.context() as patch:
        patch.setattr(block_triton, "begin", begin_late)
        with pytest.raises(
            RuntimeError, match="low_confidence_dynamic left tokens masked after 3 steps"
        ):
            engine.generate([[3, 4]], **OPTIONS)


# --- token editing -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def naive_edit(
    model,
    prompt,
    number,
    *,
    gen_length,
    threshold,
    editing_threshold,
    max_post_steps,
    temperature,
    seed,
):
    """LLaDA2.1's generate without a cache, by loops -> tokens, steps of the last changes, their logps, events, forwards"""
    n, P, forwards, events = model.block_length, len(prompt), 0, []
    total = -(-(P + gen_length) // n) * n
    ids, steps, logps = prompt + [model.mask_token_id] * (total - P), [-1] * total, [0.0] * total
    masked = [p >= P for p in range(total)]
    for start in range(P // n * n, total, n):
        post = step = 0
        while True:
            places = [p for p in range(start, start + n) if masked[p]]
            post += not places
            forwards += 1
            if post > max_post_steps:
                break  # the commit
            logits = model.logits(torch.tensor([ids[: start + n]]))[0]
            old, changed, draws = list(ids), [], {}
            for p in range(max(start, P), start + n):
                z = [value / (temperature or 1) for value in logits[p].tolist()]
                z[model.mask_token_id] = -math.inf
                probs, target, reached = (
                    softmax(z),
                    uniform(seed, number, p - P, step, "token"),
                    0.0,
                )
                best = z.index(max(z))
                for v in range(len(z)) if temperature else [best]:
                    reached += probs[v]
                    if reached > target:
                        break
                draws[p] = v, probs[v]
            for p, (v, q) in draws.items():
                if (
                    masked[p]
                    and q > threshold
                    or not masked[p]
                    and q > editing_threshold
                    and v != old[p]
                ):
                    changed.append(p)
            if places and not [p for p in changed if masked[p]]:
                changed.append(max(places, key=lambda p: (draws[p][1], -p)))  # noqa: B023
            for p in sorted(changed):
                ids[p], steps[p], logps[p], masked[p] = (
                    draws[p][0],
                    step,
                    math.log(draws[p][1]),
                    False,
                )
                events.append((number, step, p - P, ids[p]))
            step += 1
            if not places and not changed:
                break
        if any(ids[p] in model.eos_token_ids for p in range(max(start, P), start + n)):
            break
    return ids[P : start + n], steps[P : start + n], logps[P : start + n], events, forwards


def editor(name="SDAR"):
    model = (
        model_of(scale=8) if name == "SDAR" else random_model(MIXTURES[name], dtype=torch.float64)
    )
    if name == "LLaDA2":
        with torch.no_grad():
            model.lm_head.weight.mul_(8)
    model.is_edited = True
    return model


EDITING = dict(gen_length=16, remasking="low_confidence_dynamic", seed=3)


@pytest.mark.parametrize("name", ["SDAR", "LLaDA2"])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_token_editing_equals_the_naive_sampler(name, temperature):
    """Tokens, steps and logps of the last changes, every event, forwards; blocks that settle and blocks that are cut off."""
    model, edits, cut = editor(name), 0, 0
    prompts, n = prompts_of([2, 5, 8, 3], seed=1), model.block_length
    settings = ((0.2, 0.05, 1), (0.5, 0.0, 16), (0.6, 0.4, 0), (0.3, 0.2, 2))
    for threshold, editing_threshold, post in settings if name == "SDAR" else settings[:1]:
        options = EDITING | dict(
            max_post_steps=post, editing_threshold=editing_threshold, temperature=temperature
        )
        trace = make_engine(model, max_batch_size=3).generate(
            prompts, denoising_steps=n, confidence_threshold=threshold, sample_offset=9, **options
        )
        options = {key: value for key, value in options.items() if key != "remasking"}
        for i, prompt in enumerate(prompts):
            tokens, steps, logps, events, forwards = naive_edit(
                model, prompt, 9 + i, threshold=threshold, **options
            )
            L = len(tokens)
            assert trace.canvas_length[i] == L and trace.completion_ids[i, :L].tolist() == tokens
            assert trace.step_map[i, :L].tolist() == steps and trace.num_forwards[i] == forwards
            assert (
                trace.logps[i, :L] - torch.tensor(logps, dtype=torch.float64)
            ).abs().max() < 1e-10
            own = trace.records["events"][trace.records["events"][:, 0] == 9 + i].tolist()
            assert sorted(own) == sorted(map(list, events))
            edits += len(events) - L
            cut += any(step >= n for step in steps)
    assert edits > 10 and cut > 0  # tokens were replaced, after the last mask too


def test_events_of_edits_replay(monkeypatch):
    """'a method must replay trace.states': there the learner's logps are the engine's; with the step map alone they are not."""
    model = editor()
    options = EDITING | dict(num_samples=4, denoising_steps=4, confidence_threshold=0.4)
    options |= dict(editing_threshold=0.1, max_post_steps=3)
    trace = make_engine(model).generate(prompts_of([2, 5, 8]), **options)
    assert trace.num_replays == 7 and len(list(trace.states(M))) == 7
    revealed = trace.step_map >= 0
    gap = lambda: (replay_logps(model, trace).double() - trace.logps)[revealed].abs().max()
    assert gap() < 1e-5
    last = trace.records["events"].tolist()
    final = {(s, p): token for s, _, p, token in last}  # in order: the last one stays
    assert all(trace.completion_ids[s, p] == token for (s, p), token in final.items()) and len(
        last
    ) > len(final)
    for engine in (
        make_engine(model, max_batch_size=5),
        bucketed(model, monkeypatch, True, max_batch_size=5),
    ):
        other = engine.generate(prompts_of([2, 5, 8]), **options)
        assert same_draws(other, trace) and torch.equal(
            other.records["events"], trace.records["events"]
        )
    trace.records = None
    assert gap() > 1e-3


def test_an_unreachable_editing_threshold_edits_nothing():
    """Probabilities never exceed 1: tokens of plain decoding, whose events are its reveals; the last block is committed too."""
    options = EDITING | dict(
        denoising_steps=4, confidence_threshold=0.5, num_samples=3, records="events"
    )
    a, b = (
        make_engine(editor()).generate(prompts_of([2, 5]), editing_threshold=one, **options)
        for one in (None, 1)
    )
    assert torch.equal(a.completion_ids, b.completion_ids) and torch.equal(a.step_map, b.step_map)
    assert torch.equal(a.num_forwards + 1, b.num_forwards)
    for key in ("events", "logps"):
        assert torch.equal(a.records[key], b.records[key])
    sample, step, position, token = a.records["events"].unbind(1)
    assert torch.equal(a.completion_ids[sample, position], token) and torch.equal(
        a.step_map[sample, position], step
    )
    assert (
        torch.equal(a.logps[sample, position], a.records["logps"])
        and len(token) == a.canvas_length.sum()
    )


def test_editing_is_refused_where_a_model_was_not_trained_for_it():
    with pytest.raises(
        SystemExit, match="^--editing-threshold 0.5: SDAR was not trained to edit tokens$"
    ):
        make_engine(model_of()).generate([[3]], editing_threshold=0.5)
    editor_engine = make_engine(editor())
    for ask in (editor_engine.plan, partial(editor_engine.generate, [[3]])):
        with pytest.raises(
            SystemExit,
            match="^--editing-threshold 0.5 revises tokens, .* not for a method that reads step maps$",
        ):
            ask(
                records="steps",
                gen_length=8,
                denoising_steps=4,
                remasking="random",
                editing_threshold=0.5,
            )
        ask(records="steps", gen_length=8, denoising_steps=4, remasking="random")
    for wrong in ({"editing_threshold": 1.5}, {"editing_threshold": 0.5, "max_post_steps": -1}):
        with pytest.raises(SystemExit, match="must lie in 0 to 1"):
            editor_engine.generate([[3]], **wrong)


# --- memory ------------------------------------------------------------------------------------------------------------------


def test_slots_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    """One line that says the largest number of rows that fits; that number does fit, one more does not."""
    model, made = model_of(dtype=torch.float32), []
    each = (
        2 * 2 * 2 * 16 * 4 * (12 + 12)
    )  # layers, keys and values, heads, head_dim, bytes, positions
    monkeypatch.setattr(rollout.block, "other_bytes", lambda *_: 1000)
    monkeypatch.setattr(rollout.block, "free_bytes", lambda device: 1000 + each * 5 + each // 2)
    monkeypatch.setattr(rollout.block, "Slots", lambda *args: made.append(args) or Slots(*args))
    prompts, options = [[3] * 12] * 2, {"gen_length": 12, "num_samples": 3, "stop_at_eos": False}
    with pytest.raises(
        SystemExit,
        match="^6 rows of 24 tokens need .* GiB for keys and values, .* GiB are left: 5 rows fit; lower",
    ):
        make_engine(model, max_batch_size=6).generate(prompts, **options)
    assert not made
    want = make_engine(model, max_batch_size=5).generate(prompts, **options)
    assert len(made) == 1 and len(want.completion_ids) == 6


def test_a_full_device_is_one_line(monkeypatch):
    """torch.OutOfMemoryError in a step: the slots are freed, the line says what to lower, and smaller rollouts run."""
    engine = bucketed(model_of(), monkeypatch)
    want = make_engine(model_of()).generate(prompts_of([5]), **OPTIONS)
    with monkeypatch.context() as patch:

        def full(*args):
            raise torch.OutOfMemoryError("CUDA out of memory")

        patch.setattr(BlockEngine, "_forward", full)
        with pytest.raises(
            SystemExit, match="^a rollout of 3 rows ran out of memory: try 1; lower --batch-size"
        ):
            engine.generate(prompts_of([5]), **OPTIONS)
    assert engine.slots is None and same_draws(engine.generate(prompts_of([5]), **OPTIONS), want)


def test_batches_of_two_kinds_share_their_slots(monkeypatch):
    """Short rollouts of many rows and long ones of few in turn: slots and graphs are made twice, not every time."""
    engine, plain, made = bucketed(model_of(), monkeypatch, True), make_engine(model_of()), []
    monkeypatch.setattr(rollout.block, "Slots", lambda *args: made.append(args) or Slots(*args))
    for i in range(6):
        changes = (
            {"num_samples": 6, "gen_length": 5} if i % 2 else {"num_samples": 2, "gen_length": 30}
        )
        options = OPTIONS | changes
        assert same_draws(
            engine.generate(prompts_of([5]), **options), plain.generate(prompts_of([5]), **options)
        )
    assert len([args for args in made if args[0] is engine.model]) == 2
    engine.release()
    assert engine.slots is None and engine.graphs is None


needs_cuda = pytest.mark.cuda


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graphs_equal_the_same_steps_launched_one_by_one(dtype):
    """And in bf16 their bookkeeping in two kernels equals the plain one."""
    build = lambda seed=0: model_of(seed=seed, dtype=dtype).cuda()
    fast, slow = make_engine(build()), make_engine(build())
    slow.use_graphs = slow.fuses = False
    for places in (256, 20):  # 99 samples: all at once, or most of them wait
        fast.max_batch_size = slow.max_batch_size = places
        for remasking, seed in itertools.product(RULES, range(2)):
            options = OPTIONS | {
                "remasking": remasking,
                "seed": seed,
                "num_samples": 9,
                "top_k": 7 * seed,
                "top_p": 1 - seed / 9,
            }
            traces = [
                one.generate(prompts_of(range(1, 12), seed=seed), **options) for one in (fast, slow)
            ]
            assert same_draws(*traces, 0)
    assert fast.graphs.graphs and not slow.graphs
    fast.load_weights(export_weights(build(7)))
    slow.load_weights(export_weights(build(7)))
    assert same_draws(*(one.generate(prompts_of([3, 8]), **OPTIONS) for one in (fast, slow)), 0)


@needs_cuda
def test_cuda_refills_and_edits_as_the_cpu_does():
    """fp64, angles fp32: the tokens of the plain path on CPU, whatever the number of places; editing and its events too."""
    model = editor()
    options = OPTIONS | {"num_samples": 5, "records": "events", "denoising_steps": 4}
    for more in ({}, {"editing_threshold": 0.1, "max_post_steps": 3}):
        want = make_engine(model).generate(prompts_of(range(1, 12)), **options | more)
        for places in (4, 17, 64):
            got = make_engine(copy.deepcopy(model).cuda(), max_batch_size=places).generate(
                prompts_of(range(1, 12)), **options | more
            )
            for f in dataclasses.fields(got):
                if isinstance(value := getattr(got, f.name), torch.Tensor):
                    setattr(got, f.name, value.cpu())
            assert same_draws_but_forwards(got, want, 1e-4) and torch.equal(
                got.records["events"].cpu(), want.records["events"]
            )


@needs_cuda
def test_cuda_memory_that_is_not_there_is_one_line():
    """Asked for before it is taken: 65536 rows of 16384 positions at 256 bytes are 256 GiB."""
    engine, free = (
        make_engine(model_of(dtype=torch.bfloat16).cuda(), max_batch_size=1 << 16),
        torch.cuda.mem_get_info()[0],
    )
    with pytest.raises(
        SystemExit, match=r"need 256.0 GiB .* GiB are left: \d+ rows fit; lower --batch-size"
    ) as line:
        engine.generate([[3]], num_samples=1 << 16, gen_length=(1 << 14) - 4)
    assert 0 < int(str(line.value).split(" rows fit")[0].split()[-1]) * (1 << 22) < free
    assert torch.cuda.mem_get_info()[0] > free - 2**30 and engine.slots is None


@needs_cuda
def test_cuda_graphs_hold_adapters():
    build = lambda: add_lora(model_of(dtype=torch.bfloat16), 4, 8, dtype=torch.bfloat16).cuda()
    fast, slow, learner = make_engine(build()), make_engine(build()), build()
    slow.use_graphs = False
    for std in (0.3, 1.0):
        with torch.no_grad():
            for value in adapter_tensors(learner).values():
                value.normal_(std=std)
        for one in (fast, slow):
            one.load_weights(export_adapter(learner))
        assert same_draws(*(one.generate(prompts_of([3, 8]), **OPTIONS) for one in (fast, slow)), 0)


@needs_cuda
@pytest.mark.parametrize("name", ["SDAR-MoE", "LLaDA2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graphs_of_mixtures_of_experts(capsys, name, dtype):
    """bf16 experts are in the graph; fp32 ones are computed by a loop that reads back: no graphs, and one line says so."""
    build = lambda: random_model(MIXTURES[name], dtype=dtype).cuda()
    fast, slow = make_engine(build()), make_engine(build())
    slow.use_graphs = False
    traces = [one.generate(prompts_of([3, 8, 5]), **OPTIONS) for one in (fast, slow)]
    assert same_draws(*traces, 0)
    assert (
        bool(fast.graphs)
        == (dtype == torch.bfloat16)
        == ("without CUDA graphs" not in capsys.readouterr().out)
    )
