"""models/attention.py: visibility against loops, every backend against plain softmax, the table's
refusals.
"""

import sys
import types
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
import torch.nn.attention.flex_attention as flex_module

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from oracles import tiny_model

from models import add_lora, attention
from models.attention import (
    PATTERNS,
    Visibility,
    bidirectional,
    block_causal,
    make_attend,
    positions,
)
from models.layers import compile_blocks

# --- who sees whom -------------------------------------------------------------------------------


def valid_rows(T, padding):
    """[3, T] bool: rows of different lengths, padded on a side, in the middle, or not at all."""
    valid = torch.ones(3, T, dtype=torch.bool)
    for row, pads in enumerate([0, T // 3, T - 1] if padding else [0, 0, 0]):
        first = {"left": 0, "right": T - pads, "middle": (T - pads) // 2, None: 0}[padding]
        valid[row, first : first + pads] = False
    return valid


def documents_of(valid, pattern):
    """[3, T] int64: rows of documents of 5, 4 and 3 columns where the pattern has any, else None"""
    columns = torch.arange(valid.shape[1])
    return torch.stack([columns // n for n in (5, 4, 3)]) if "packed" in pattern else None


def columns_of(pattern, T, start):
    """The tokens of a pass: (0, t) clean, (k, t) of noisy copy k, whose first ones 1 leaves out."""
    noisy = [(k, t) for k in (1, 2) for t in range(start if k == 1 else 0, T)]
    return [(0, t) for t in range(T)] + noisy * ("copies" in pattern)


def visibility_of(pattern, valid, N=4, start=0):
    """pattern: one of PATTERNS; "packed" before those of blocks: rows of several documents."""
    document = documents_of(valid, pattern)
    position = positions(valid, document)
    opens = valid & (position % N == 0)  # as models number their blocks
    block = (opens.cumsum(1) - 1).clamp(min=0)
    if "copies" in pattern:
        copy, at = torch.tensor(columns_of(pattern, valid.shape[1], start)).T
        document = document if document is None else document[:, at]
        return Visibility(
            "copies", block[:, at], valid[:, at], document, copy.repeat(len(valid), 1)
        )
    return (
        block_causal(block, valid, document)
        if "block-causal" in pattern
        else bidirectional(valid, document)
    )


def dense_by_loops(pattern, valid, N, start):
    """The definition, pair by pair: padding sees itself and is seen by nothing else."""
    B, T = valid.shape
    columns = columns_of(pattern, T, start)
    document = documents_of(valid, pattern)
    mask = torch.zeros(B, len(columns), len(columns), dtype=torch.bool)
    for b in range(B):
        of = [0] * T if document is None else document[b].tolist()
        ordinal = {
            t: sum(bool(valid[b, s]) and of[s] == of[t] for s in range(t)) for t in range(T)
        }  # among those of its own
        for i, (q_copy, q) in enumerate(columns):
            for j, (k_copy, k) in enumerate(columns):
                if not (valid[b, q] and valid[b, k]):
                    mask[b, i, j] = i == j
                    continue
                q_block, k_block = ordinal[q] // N, ordinal[k] // N
                if of[q] != of[k]:
                    sees = False
                elif pattern in ("full", "padded", "packed"):
                    sees = True
                elif k_copy == q_copy:
                    sees = k_block <= q_block if k_copy == 0 else k_block == q_block
                else:
                    sees = k_copy == 0 and k_block < q_block
                mask[b, i, j] = sees
    return mask


MASKED = (*PATTERNS[1:], "packed block-causal", "packed copies")
SHAPES = ((12, 4), (11, 4), (3, 4), (7, 1))
PADDINGS = (None, "left", "right", "middle")
GRIDS = [
    (pattern, padding, *shape) for pattern in MASKED for padding in PADDINGS for shape in SHAPES
]
GRIDS = [grid for grid in GRIDS if grid[:2] != ("padded", None)]


@pytest.mark.parametrize("pattern, padding, T, N", GRIDS)
def test_dense_is_the_definition(pattern, padding, T, N):
    valid = valid_rows(T, padding)
    for start in (0, 1, T - 1) if "copies" in pattern else (0,):
        visibility = visibility_of(pattern, valid, N, start)
        want = dense_by_loops(pattern, valid, N, start)
        assert visibility.pattern == pattern.removeprefix("packed ")
        assert torch.equal(visibility.dense().expand_as(want), want)
        # rows do differ: a mask shared by the batch would fail
        assert (valid == valid[:1]).all() or not (want == want[:1]).all()


# what a noisy token may not see, by the copies of query and key and the blocks in between
FAULTS = {
    "another copy": lambda q, k, ahead: (k > 0) & (k != q) & (ahead == 0),
    "its own clean block": lambda q, k, ahead: (k == 0) & (ahead == 0),
    "later clean blocks": lambda q, k, ahead: (k == 0) & (ahead > 0),
    "earlier noisy blocks": lambda q, k, ahead: (k == q) & (ahead < 0),
}


def plant(monkeypatch, fault):
    """Let noisy tokens see what they may not."""
    rule = Visibility.rule

    def faulty(self):
        sees, copy, block = rule(self), self.copy, self.block
        also = lambda *of: (of[0] > 0) & FAULTS[fault](*of)
        return lambda b, h, q, k: (
            sees(b, h, q, k)
            | also(copy[b, q], copy[b, k], block[b, k] - block[b, q]) & self.valid[b, k]
        )

    monkeypatch.setattr(Visibility, "rule", faulty)


# --- backends ------------------------------------------------------------------------------------


def tensors(visibility, valid, H=4, K=2, h=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    S = visibility.block.shape[1]
    random = lambda heads: torch.randn(
        len(valid), S, heads, h, generator=generator, dtype=dtype
    ).transpose(1, 2)
    return [random(heads).requires_grad_() for heads in (H, K, K)]


def softmax_attention(dense, q, k, v):
    """The formula."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores if dense is None else scores.masked_fill(~dense[:, None], float("-inf"))
    return scores.softmax(-1) @ v


def by_rows(q, k, v, cu_q, cu_k, max_q, max_k):
    """What varlen_attn and flash_attn_varlen_func do, one row after the other: [N, H, h], bounds [B
    + 1] int32.
    """
    assert cu_q.dtype == cu_k.dtype == torch.int32 and cu_q.tolist() == cu_k.tolist()
    assert cu_q[0] == 0 and cu_q[-1] == len(q) == len(k) == len(v)
    assert max_q == max_k == cu_q.diff().max()
    out = []
    for first, last in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        row = (x[first:last].transpose(0, 1)[None] for x in (q, k, v))
        out.append(softmax_attention(None, *row)[0].transpose(0, 1))
    return torch.cat(out)


@pytest.fixture
def on_cpu(monkeypatch):
    """Backends that need a GPU, with a loop in place of their kernel."""
    package = types.ModuleType("flash_attn")
    package.flash_attn_varlen_func = by_rows
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_rows)
    monkeypatch.setattr(attention, "refusal", lambda *_: None)


CASES = [("full", None), ("packed", None), ("block-causal", None), ("copies", None)]
CASES += [(pattern, side) for pattern in MASKED for side in PADDINGS[1:]]


RUNS = [(name, *case) for name in ("sdpa", "auto") for case in CASES]
RUNS += [
    (name, *case)
    for name in ("varlen", "flash-attn")
    for case in CASES
    if case[0].removeprefix("packed ") in attention.RAGGED
]


@pytest.mark.parametrize("backend, pattern, padding", RUNS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (7, 1)])
def test_output_and_gradients_are_those_of_plain_softmax(on_cpu, backend, pattern, padding, heads):
    valid = valid_rows(9, padding)
    visibility = visibility_of(pattern, valid, 4, 2)
    q, k, v = tensors(visibility, valid, *heads)
    seen = visibility.valid[:, None, :, None]
    grad = torch.randn_like(q) * seen
    got = make_attend(visibility, backend)(0, q, k, v)
    want = softmax_attention(visibility.dense(), q, k, v)
    assert got.shape == q.shape and got.isfinite().all()
    torch.testing.assert_close(got * seen, want * seen, atol=1e-12, rtol=0)
    for a, b in zip(
        torch.autograd.grad(got, (q, k, v), grad),
        torch.autograd.grad(want, (q, k, v), grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize("takes_gqa", [False, True])
def test_varlen_names_gqa_where_torch_asks_for_it(monkeypatch, takes_gqa):
    """torch 2.13 refuses fewer key heads without enable_gqa, 2.11 does not know the argument."""
    calls = []

    def old(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k):
        return by_rows(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)

    def new(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, enable_gqa=False):
        calls.append(enable_gqa)
        return old(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", new if takes_gqa else old)
    valid = valid_rows(6, "left")
    attention.varlen(bidirectional(valid))(*tensors(bidirectional(valid), valid))
    assert calls == [True] * takes_gqa


# --- under torch.compile -------------------------------------------------------------------------


def check_flex(pattern, B, T):
    valid = valid_rows(T, "left").repeat(-(-B // 3), 1)[:B]
    visibility = visibility_of(pattern, valid, start=T // 3)
    q, k, v = (x.detach() for x in tensors(visibility, valid, H=4, K=2, h=16, dtype=torch.float32))
    got, want = attention.flex(visibility)(q, k, v), softmax_attention(visibility.dense(), q, k, v)
    assert got.isfinite().all()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert (
        softmax_attention(None, q, k, v) - want
    ).abs().max() > 0.1  # the control: the mask matters


def test_flex_is_one_graph_for_all_lengths_and_patterns(monkeypatch):
    torch._dynamo.reset()
    parts = []
    for function in (attention.flex_attention, attention.create_block_mask):
        graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(function, dynamic=True, fullgraph=True, backend=graphs)
        parts.append((graphs, compiled))
    monkeypatch.setattr(attention, "compiled_flex", lambda: [compiled for _, compiled in parts])
    for shape in [
        ("copies", 7, 200),  # batch and number of blocks of 128 differ
        ("copies", 6, 211),
        ("block-causal", 5, 390),
        ("padded", 8, 260),
        ("copies", 3, 150),
    ]:
        check_flex(*shape)
    assert [graphs.frame_count for graphs, _ in parts] == [1, 1]
    torch._dynamo.reset()


@pytest.fixture
def compiler():
    """Undoes what compile_blocks sets."""
    from torch._inductor import config

    torch._dynamo.reset()
    settings = [
        torch._functorch.config.patch(activation_memory_budget=1.0),
        torch.compiler.config.patch(dynamic_sources=""),
        torch._dynamo.config.patch(recompile_limit=8),
        config.patch(unroll_reductions_threshold=8),
    ]
    with ExitStack() as stack:
        for setting in settings:
            stack.enter_context(setting)
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_blocks_compile_once_for_all_sizes(monkeypatch, compiler, backend):
    """Adapters on a frozen base: a graph without gradient, one with. The values stay right."""
    compile_block, seen = torch.nn.Module.compile, []
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    eager, compiled = (add_lora(tiny_model(), 4, 8, dtype=torch.float64) for _ in range(2))
    compiled.attention_backend = backend
    with monkeypatch.context() as on_cuda:  # compile_blocks does nothing on a CPU
        on_cuda.setattr(torch.cuda, "is_available", lambda: True)
        on_cuda.setattr(
            torch.nn.Module, "compile", lambda self: compile_block(self, backend=graphs)
        )
        compile_blocks(compiled)
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)  # gradients on a CPU
    monkeypatch.setattr(attention, "refusal", lambda *_: None)
    kernel = partial(torch.compile, dynamic=True, backend="aot_eager")
    parts = kernel(attention.flex_attention), kernel(attention.create_block_mask)
    monkeypatch.setattr(attention, "compiled_flex", lambda: parts)
    for R, K, T in [(3, 2, 72), (2, 4, 100), (4, 3, 160)]:
        ids = torch.randint(0, eager.mask_token_id, (R, T))
        scored = (torch.rand(R, K, T) < 0.4) & (torch.arange(T) > 8)
        noisy = torch.where(scored, eager.mask_token_id, ids[:, None])
        for model in (eager, compiled):
            model.zero_grad()
            with torch.no_grad():
                frozen = model.logps(ids, noisy, scored)
            values = model.logps(ids, noisy, scored)
            values.sum().backward()
            gradients = [p.grad for p in model.parameters() if p.requires_grad]
            assert any(gradient.abs().max() > 0.1 for gradient in gradients)
            seen.append([frozen, values, *gradients])
        torch.testing.assert_close(*seen[-2:])
    assert graphs.frame_count == 2
    tiles = [node for node in graphs.graphs[-1].graph.nodes if "block_size" in node.name]
    assert not tiles  # constants


# --- the table -----------------------------------------------------------------------------------


def refused(*words):
    return pytest.raises(
        SystemExit, match="^--attention " + "".join(f"(?=.*{word})" for word in words) + ".*$"
    )


@pytest.mark.parametrize(
    "backend, kind, device, words",
    [
        ("flex", "block-causal", "cpu", "not run on cpu; .* block-causal .*: sdpa$"),
        ("varlen", "bidirectional", "cpu", "not run on cpu; .*: sdpa$"),
        ("varlen", "block-causal", "cuda", "no block-causal pattern; .*: sdpa, flex$"),
        ("varlen", "block-causal", "cpu", "no block-causal pattern; .*: sdpa$"),
        ("flash-attn", "bidirectional", "cuda", "not installed; .*: sdpa, flex, varlen$"),
    ],
)
def test_the_check_at_start_up(monkeypatch, backend, kind, device, words):
    """It names what works on that device and is installed, nothing else."""
    monkeypatch.setattr(attention, "HAS_FLASH_ATTN", False)
    with refused(backend, words):
        attention.check_backend(backend, kind, device)


def test_auto_falls_back_to_sdpa():
    """What `auto` would take cannot do this here (a CPU, as fp32 on CUDA): sdpa, silently and
    exactly.
    """
    for pattern, padding in CASES:
        valid = valid_rows(9, padding)
        visibility = visibility_of(pattern, valid)
        q, k, v = tensors(visibility, valid, h=16)
        want = softmax_attention(visibility.dense(), q, k, v)
        torch.testing.assert_close(make_attend(visibility)(0, q, k, v), want, atol=1e-12, rtol=0)
