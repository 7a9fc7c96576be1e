"""rollout/block.py as it runs on a GPU: batches in buckets, lasting slots, and steps that a CUDA graph can hold and replay.

Without a GPU a graph is emulated: the operations of a step are recorded with the very tensors they read and wrote, and a replay
runs them again on these tensors. What the host put in as a number stays what it was, as in a CUDA graph.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from test_rollout import SMALL, model_of, prompts_of, same_draws

import rollout.block
from models import add_lora, export_weights
from models.lora import adapter_tensors, export_adapter
from models.random_init import TINY_LLADA2, TINY_SDAR_MOE, random_model
from rollout import make_engine
from rollout.block import BlockEngine
from rollout.engine import REMASKING, reveal_quota

OPTIONS = dict(num_samples=3, gen_length=13, denoising_steps=3, confidence_threshold=0.5, seed=4)
MIXTURES = {"SDAR-MoE": TINY_SDAR_MOE, "LLaDA2": TINY_LLADA2}
READS_BACK = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}


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
            inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
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
        masks = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
        if name in READS_BACK or name in ("index", "index_put", "index_put_") and any(x is y for x in masks for y in args[1]):
            raise RuntimeError(f"{name} reads back")
        out = op(*args, **kwargs)
        self.calls.append((op, args, kwargs, out))
        return out


def bucketed(model, monkeypatch, graphs=False, cls=BlockEngine, max_batch_size=256):
    """The engine as on a GPU: 8 steps between two looks, rows and widths in buckets, small ones so that several occur."""
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
    for i, lengths in enumerate([range(1, 8), [5], [9, 2, 4], range(1, 12)]):  # the slots grow, stay, stay, grow
        slots = engine.slots
        for seed in (-i, 2**63 + i):
            prompts, changes = prompts_of(lengths, seed=i), dict(temperature=i % 3 / 2, sample_offset=7 * i, seed=seed)
            assert same_draws(engine.generate(prompts, **options | changes), plain.generate(prompts, **options | changes))
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
        traces = [one.generate(prompts_of([3, 6]), **OPTIONS | {"seed": seed}) for one in (engine, plain)]
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
    traces = [bucketed(build(torch.bfloat16), monkeypatch, graphs).generate(prompts, **OPTIONS) for graphs in (False, True)]
    assert same_draws(*traces, 0)


def test_old_keys_and_values_are_not_seen(monkeypatch):
    """What an earlier batch left in the slots is never attended to."""
    engine = bucketed(model_of(), monkeypatch)
    want = engine.generate(prompts_of([6, 3]), **OPTIONS)
    for k, v in engine.slots.cache:
        k.fill_(1e6), v.fill_(1e6)
    assert same_draws(engine.generate(prompts_of([6, 3]), **OPTIONS), want, 0)


def test_other_options_get_their_own_graphs(monkeypatch):
    """Steps, temperature, rule, threshold, stop and end tokens are in the graph: changing one must not replay the old."""
    engine, plain = bucketed(model_of(), monkeypatch, True), make_engine(model_of())
    changes = [{}, {"denoising_steps": 4}, {"temperature": 0}, {"remasking": "random"}, {"confidence_threshold": 0.1}]
    for change in [*changes, {"stop_at_eos": False}, {}]:
        traces = [one.generate(prompts_of([3, 6, 4]), **OPTIONS | change) for one in (engine, plain)]
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
    assert same_draws(engine.generate(prompts_of([5, 2]), **OPTIONS), want) and engine.graphs is graphs

    learner = add_lora(model_of(), 4, 8, dtype=torch.float64)
    engine = bucketed(add_lora(model_of(), 4, 8, dtype=torch.float64), monkeypatch, True)
    before = engine.generate(prompts_of([5, 2]), **OPTIONS)
    with torch.no_grad():
        for value in adapter_tensors(learner).values():
            value.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    engine.load_weights(export_adapter(learner))
    after = engine.generate(prompts_of([5, 2]), **OPTIONS)
    assert same_draws(after, make_engine(learner).generate(prompts_of([5, 2]), **OPTIONS)) and not same_draws(after, before)


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
            [[3] * n], gen_length=n, denoising_steps=steps, remasking="low_confidence_static", stop_at_eos=False
        )
        assert torch.bincount(trace.step_map[0], minlength=steps).tolist() == reveal_quota(n, steps)


needs_cuda = pytest.mark.cuda


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graphs_equal_the_same_steps_launched_one_by_one(dtype):
    build = lambda seed=0: model_of(seed=seed, dtype=dtype).cuda()
    fast, slow = make_engine(build()), make_engine(build())
    slow.use_graphs = False
    for remasking in REMASKING:
        for seed in range(4):
            options = OPTIONS | {"remasking": remasking, "seed": seed, "num_samples": 9}
            traces = [one.generate(prompts_of(range(1, 12), seed=seed), **options) for one in (fast, slow)]
            assert same_draws(*traces, 0)
    assert fast.graphs.graphs and not slow.graphs
    fast.load_weights(export_weights(build(7)))
    slow.load_weights(export_weights(build(7)))
    assert same_draws(*(one.generate(prompts_of([3, 8]), **OPTIONS) for one in (fast, slow)), 0)


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
    assert bool(fast.graphs) == (dtype == torch.bfloat16) == ("without CUDA graphs" not in capsys.readouterr().out)
