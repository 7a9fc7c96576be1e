"""models/attention.py: every backend against sdpa, whose masks test_models.py checks against loops
and official code; the refusals.
"""

import sys
import types
from contextlib import ExitStack, nullcontext
from functools import partial, partialmethod

import pytest
import torch
import torch._dynamo.testing
import torch.nn.attention.flex_attention as flex_module
import torch.nn.functional as F
from oracles import tiny_model
from test_models import ragged, small

from models import add_lora, attention
from models.layers import set_speed, uncompiled


def by_rows(q, k, v, cu_q, cu_k, max_q, max_k, enable_gqa=True):
    """What varlen_attn and flash_attn_varlen_func do, one row after the other: [N, H, h], bounds [B
    + 1] int32.
    """
    assert cu_q.dtype == cu_k.dtype == torch.int32 and cu_q.tolist() == cu_k.tolist()
    assert cu_q[0] == 0 and cu_q[-1] == len(q) == len(k) == len(v)
    assert max_q == max_k == cu_q.diff().max()
    rows = zip(*(x.transpose(0, 1).split(cu_q.diff().tolist(), 1) for x in (q, k, v)), strict=True)
    out = [F.scaled_dot_product_attention(*row, enable_gqa=True) for row in rows]
    return torch.cat(out, 1).transpose(0, 1)


@pytest.mark.parametrize("family", ["llada", "dream"])  # as many key heads as query heads, fewer
@pytest.mark.parametrize("side", [None, "left", "scattered"])
def test_packed_backends_give_the_values_and_gradients_of_sdpa(monkeypatch, family, side):
    """With a loop in place of their kernel; also where a row holds several documents."""
    package = types.ModuleType("flash_attn")
    package.flash_attn_varlen_func = by_rows
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_rows)
    model, rows = small(family), ragged([14, 3, 9] if side else [14] * 3, side or "left")
    for documents in None, torch.arange(14).expand(3, 14) // 5:
        seen = []
        for model.attention_backend in ("sdpa", "varlen", "flash-attn"):
            values = model.logps(*rows, document_ids=documents)
            loss = (values * torch.arange(values.numel()).view(values.shape).cos()).sum()
            seen.append([values, *torch.autograd.grad(loss, list(model.parameters()))])
        for other in seen[1:]:
            torch.testing.assert_close(other, seen[0], atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("S, padding, trusted", [(704, 1, 0), (64, 1, 0), (768, 1, 1), (704, 0, 1)])
def test_where_cudnn_computes(monkeypatch, S, padding, trusted):
    """Not with a mask at lengths of 64 modulo 128."""
    seen, valid = [], torch.ones(1, S).bool()
    valid[:, :padding] = False
    how = lambda kernels, **_: seen.extend(kernels) or ExitStack()
    monkeypatch.setattr(attention, "sdpa_kernel", how)
    visibility = small("llada").visibility(torch.zeros(1, S).long(), valid)
    attention.sdpa(visibility)(*torch.ones(3, 1, 1, S, 1))
    assert (attention.kind.CUDNN_ATTENTION in seen) == trusted and seen[-1] == attention.kind.MATH


@pytest.fixture
def compiler():
    """Undoes what set_speed sets."""
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
    """Adapters on a frozen base: a graph without gradient, one with. The values stay right. None of
    these lengths is one where cuDNN is left out, which have graphs of their own.
    """
    torch.manual_seed(0)
    seen, counts = [], []
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = add_lora(tiny_model(), 4, 8, dtype=torch.float64)
    with monkeypatch.context() as on_cuda:  # nothing is compiled on a CPU
        on_cuda.setattr(torch.cuda, "is_available", lambda: True)
        compile_block = partialmethod(torch.nn.Module.compile, backend=graphs)
        on_cuda.setattr(torch.nn.Module, "compile", compile_block)
        set_speed(model, backend, False, True)
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)  # gradients on a CPU
    kernel = partial(torch.compile, dynamic=True, backend="aot_eager")
    parts = kernel(attention.flex_attention), kernel(attention.create_block_mask)
    monkeypatch.setattr(attention, "compiled_flex", lambda: parts)
    for R, K, T in [(3, 2, 72), (4, 3, 160)]:
        ids = torch.randint(0, model.mask_token_id, (R, T))
        scored = (torch.rand(R, K, T) < 0.4) & (torch.arange(T) > 8)
        noisy = torch.where(scored, model.mask_token_id, ids[:, None])
        for blocks in uncompiled, nullcontext:
            model.zero_grad()
            with blocks(model):
                with torch.no_grad():
                    frozen = model.logps(ids, noisy, scored)
                values = model.logps(ids, noisy, scored)
            values.sum().backward()
            gradients = (p.grad for p in model.parameters() if p.requires_grad)
            seen.append([frozen, values, *gradients])
            counts.append(graphs.frame_count)
        torch.testing.assert_close(*seen[-2:])
    assert counts == [0, 2, 2, 2]
    # tiles are constants
    assert not any("block_size" in node.name for node in graphs.graphs[-1].graph.nodes)


@pytest.mark.parametrize(
    "backend, kind, device, words",
    [
        ("flex", "block-causal", "cpu", "not run on cpu; .* block-causal .*: sdpa$"),
        ("varlen", "block-causal", "cuda", "no block-causal pattern; .*: sdpa, flex$"),
        ("flash-attn", "bidirectional", "cuda", "not installed; .*: sdpa, flex, varlen$"),
    ],
)
def test_the_check_at_start_up(monkeypatch, backend, kind, device, words):
    """It names what works on that device and is installed, nothing else."""
    monkeypatch.setattr(attention, "HAS_FLASH_ATTN", False)
    with pytest.raises(SystemExit, match=f"^--attention {backend} .*{words}"):
        attention.check_backend(backend, kind, device)
