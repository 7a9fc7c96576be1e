"""kernels/ against the plain layers, and attention over a cache against sums over what is seen.

The Triton kernels need a GPU, or `TRITON_INTERPRET=1 pytest tests/test_fused.py` with Triton
installed.
"""

import math
import os
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from oracles import A2D

from kernels.decode import cached_attention
from models import add_lora, export_adapter
from models.attention import block_causal, make_attend
from models.experts import experts_loop
from models.layers import RMSNorm, rotate
from models.lora import adapter_tensors
from models.tensors import tensor_names
from models.tiny import TINY_CONFIGS, random_model
from rollout import sync_engine

CONFIGS = TINY_CONFIGS | A2D
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
RUNS = bool(find_spec("triton") and (ON_GPU or os.environ.get("TRITON_INTERPRET") == "1"))
if RUNS:
    from kernels import fused_triton, layers, moe_triton

    if not ON_GPU:
        moe_triton.shared_memory = lambda device: 1 << 30
needs_triton = (lambda test: test) if RUNS and not ON_GPU else pytest.mark.cuda
# all of them belong to `make test-gpu`
pytestmark = [pytest.mark.fast, *[pytest.mark.cuda] * ON_GPU]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}


def draw(*shape, dtype=torch.float32, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed + sum(shape))
    return (scale * torch.randn(shape, generator=g)).to(dtype).to(DEVICE)


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def close(got, want):
    """Equal to a step of the dtype, which few values may need: sums in another order."""
    step = torch.finfo(want.dtype).eps
    torch.testing.assert_close(got, want, rtol=4 * step, atol=4 * step)
    assert want.dtype == torch.float32 or (got != want).float().mean() < 0.02
    return True


def norm_of(size, dtype, round_first, seed=3):
    norm = RMSNorm(size, SimpleNamespace(rms_norm_eps=1e-6, round_first=round_first))
    norm.weight.data = 1 + draw(size, seed=seed, scale=0.3)
    return norm.to(DEVICE, dtype)


# --- layers --------------------------------------------------------------------------------------


@needs_triton
@each_dtype
@pytest.mark.parametrize("round_first", [False, True])
@pytest.mark.parametrize("D", [96, 1000])
@torch.no_grad()
def test_norms_and_gates_are_the_plain_ones(dtype, round_first, D):
    norm = norm_of(D, dtype, round_first)
    x, delta = (draw(3, 5, D, dtype=dtype, seed=seed) for seed in (0, 1))
    total, y = fused_triton.add_rms_norm(x, delta, norm)
    assert torch.equal(total, x + delta) and close(y, norm(x + delta))
    gate, up = draw(2, 3, 2 * D, dtype=dtype, scale=3.0).split(D, -1)
    assert close(fused_triton.silu_mul(gate, up), F.silu(gate) * up)


@needs_triton
@each_dtype
@pytest.mark.parametrize("normed, half, wide", [(1, 0, 0), (1, 1, 0), (0, 0, 1), (0, 0, 0)])
@pytest.mark.parametrize("H, K, h", [(6, 3, 24), (28, 4, 128)])
@torch.no_grad()
def test_heads_are_normed_and_rotated_as_in_the_model_files(dtype, normed, half, wide, H, K, h):
    """SDAR; LLaDA2, which rotates half of a head; LLaDA, whose tables are fp32; Dream."""
    position_ids = torch.arange(15, device=DEVICE).view(3, 5) * 37 % 101
    r, tables = h // (1 + half), torch.float32 if wide else dtype
    angle = position_ids[:, None, :, None] / 1e4 ** (torch.arange(0, r, 2, device=DEVICE) / r)
    cos, sin = (torch.cat([x, x], -1).to(tables) for x in (angle.cos(), angle.sin()))
    q, k, _ = draw(3, 5, (H + 2 * K) * h, dtype=dtype).split([H * h, K * h, K * h], -1)
    norms = [norm_of(h, dtype, bool(half), seed) for seed in (3, 4)] * normed
    heads = lambda x: x.unflatten(-1, (-1, h)).transpose(1, 2)
    plain = lambda x, i: rotate(norms[i](heads(x)) if norms else heads(x), cos, sin)
    want = plain(q, 0), plain(k, 1)
    got = fused_triton.norm_rotate(q, k, norms, cos, sin, h)
    assert all(close(a, b) for a, b in zip(got, want, strict=True))


@needs_triton
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("adapters", [None, "before", "after", "some"])
@torch.no_grad()
def test_an_engines_copy_computes_what_the_plain_model_does(family, adapters):
    """Hidden states, with LoRA adapters added before or after, and new weights copied in place. Or
    with adapters on one layer alone, and the weights under them handed over.
    """
    dtype, ids = DTYPES[0], torch.arange(96, device=DEVICE).view(2, 48) * 5 % 256
    at = torch.arange(48, device=DEVICE).expand(2, 48)

    def model_of(seed, is_fast=False):
        model = random_model(CONFIGS[family], seed, DEVICE, dtype)
        if is_fast and adapters in (None, "after"):
            layers.install(model)
        if adapters:
            modules = model.layers.named_modules()
            linear = [n for n, m in modules if isinstance(m, torch.nn.Linear)]
            targets = [linear[0].rsplit(".", 1)[-1]] if adapters == "some" else ()
            add_lora(model, 4, 8, targets, seed, dtype)
            for value in adapter_tensors(model).values():
                value.normal_(0, 0.1, generator=torch.Generator(DEVICE).manual_seed(seed))
        if is_fast and adapters in ("before", "some"):
            layers.install(model)
        return model

    def hidden(model):
        visibility = block_causal(at // 4, torch.ones_like(at, dtype=torch.bool))
        return model.hidden(ids, at, make_attend(visibility))

    plain, other, fast = model_of(0), model_of(1), model_of(0, is_fast=True)
    ties = any("experts" in name for name, _ in plain.named_modules())  # may go either way
    limit = {torch.bfloat16: 0.1 if ties else 0.06, torch.float32: 1e-5}[dtype]
    assert error(hidden(fast), hidden(plain)) < limit
    if adapters == "some":
        sync_engine(SimpleNamespace(model=fast, release=list), other, whole=True)
    else:
        for name, value in tensor_names(other).items():
            tensor_names(fast)[name].copy_(value)
        for name, value in export_adapter(other):
            adapter_tensors(fast)[name].copy_(value)
    assert error(hidden(fast), hidden(other)) < limit < 0.3 < error(hidden(plain), hidden(other))


# --- experts -------------------------------------------------------------------------------------


@needs_triton
@each_dtype
@pytest.mark.parametrize(
    "lead, E, D, f, k, used, tuned",
    [
        ((3, 7), 8, 32, 48, 2, 8, None),
        ((40,), 16, 64, 32, 4, 5, ((16, 16, 16, 16, 4, 2), (16, 32, 32, 32, 4, 2))),
        ((1,), 8, 32, 16, 1, 1, None),
        ((200,), 8, 200, 72, 2, 8, None),
        ((300,), 8, 32, 16, 4, 8, None),  # more than a program of the buckets sees at once
        # more than all lanes of a bucket take at once
        ((150,), 4, 80, 40, 3, 3, ((16, 16, 16, 32, 4, 2), (16, 16, 16, 16, 4, 2))),
    ],
)
def test_experts_are_those_of_the_plain_loop(monkeypatch, dtype, lead, E, D, f, k, used, tuned):
    """Against the loop in fp64, no worse than the loop in the same dtype."""
    if tuned:
        monkeypatch.setattr(moe_triton, "TUNED", {moe_triton.MOST: tuned})
    x = draw(*lead, D, dtype=dtype)
    gate_up, down = (
        draw(E, 2 * f, D, scale=D**-0.5).to(dtype),
        draw(E, D, f, scale=f**-0.5).to(dtype),
    )
    g = torch.Generator().manual_seed(1)
    index = (E - 1 - torch.rand(*lead, used, generator=g).argsort(-1)[..., :k]).to(DEVICE)
    weight = torch.rand(*lead, k, generator=g).to(DEVICE)
    for w in (weight.to(dtype), weight):  # SDAR's and LLaDA2's
        want = experts_loop(x.double(), index, w.double(), gate_up.double(), down.double())
        got = moe_triton.experts_fused(x, index, w, gate_up, down)
        assert got.dtype == dtype
        assert error(got, want) < 1.1 * error(experts_loop(x, index, w, gate_up, down), want) + 1e-6


@needs_triton
@pytest.mark.parametrize("family", ["tiny-sdar-moe", "tiny-llada2", "tiny-llada-moe"])
@torch.no_grad()
def test_routers_are_those_of_the_model_files(family):
    """Experts and weights at many scores, with groups. Control: bias and groups matter."""
    config = TINY_CONFIGS[family] | dict(num_experts=32, num_experts_per_tok=5, hidden_size=384)
    moe = random_model(config, device=DEVICE).layers[-1].mlp
    x = draw(3, 50, 384).bfloat16()
    if family == "tiny-llada2":
        moe.gate.expert_bias.copy_(draw(32, scale=0.1))
    x = x if ON_GPU else x.float()
    index, weight = moe_triton.route_fused(moe, x)
    want_index, want_weight = moe.route(x)
    same = (index == want_index).all(-1)
    assert same.float().mean() > 0.98  # two scores may be nearer than the error
    torch.testing.assert_close(
        weight[same], want_weight[same], rtol=1e-2 if ON_GPU else 1e-5, atol=1e-6
    )
    if family == "tiny-llada2":
        free = moe.gate(x).sigmoid().topk(5).indices
        assert not torch.equal(free.sort().values, index.sort().values)


# --- attention over a cache ----------------------------------------------------------------------


def by_sums(q, k, v, cache, start, seen):
    """fp64; seen [R, T, S]. -> output, keys and values with the new ones"""
    keys, values = (x.double().clone() for x in cache)
    for r, first in enumerate(start.tolist()):
        new = slice(first, first + k.shape[2])
        keys[r, :, new], values[r, :, new] = k[r].double(), v[r].double()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (keys, values))
    scores = q.double() @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~seen[:, None], -math.inf).softmax(-1) @ v, keys, values


WAYS = [(None, torch.float32 if ON_GPU else torch.float64)]
WAYS += [(splits, dtype) for splits in (1, 2, 5) for dtype in DTYPES] if RUNS else []


def attention(splits):
    if splits is None:
        return cached_attention
    return partial(fused_triton.decode_attention, splits=splits)


@pytest.mark.parametrize("splits, dtype", WAYS)
@pytest.mark.parametrize(
    "R, H, K, h, T, S, n, hidden",
    [
        (3, 4, 2, 32, 4, 64, 4, 0),
        (2, 8, 2, 16, 3, 30, 3, 0),
        (4, 4, 4, 32, 8, 48, 4, 0),
        (3, 4, 2, 32, 4, 64, None, 37),  # whole parts of the kernel too
        (2, 7, 1, 16, 9, 90, None, 30),
        (3, 4, 2, 32, 4, 64, None, 0),
    ],
)
def test_attention_over_the_cache(monkeypatch, splits, dtype, R, H, K, h, T, S, n, hidden):
    """Blocks of n, or a window that sees what is behind it too, but for columns that a bias hides.
    Rows at different positions; wider slots around the cache are neither read nor written.
    """
    if splits and not ON_GPU:
        monkeypatch.setattr(fused_triton, "TUNED", dict.fromkeys(fused_triton.TUNED, (16, 1, 1)))
    heads = ((H, 0), (K, 1), (K, 2))
    q, k, v = (draw(R, T, size, h, dtype=dtype, seed=seed).transpose(1, 2) for size, seed in heads)
    slots = [draw(R + 1, K, S + 16, h, dtype=dtype, seed=seed) for seed in (5, 6)]
    before = [slot.clone() for slot in slots]
    start = torch.arange(R, device=DEVICE) * (S - T) // (R - 1) // (n or 1) * (n or 1)
    bias = torch.zeros(R, 1, 1, S, dtype=dtype, device=DEVICE)
    bias[1, ..., :hidden] = bias[0, ..., S - hidden :] = -math.inf
    seen = (bias[:, 0] == 0).expand(R, T, S)
    if n:
        new, columns = (torch.arange(size, device=DEVICE) for size in (T, S))
        seen = columns < start[:, None, None] + (new[:, None] // n + 1) * n
    views = [slot[:R, :, :S] for slot in slots]
    got = attention(splits)(q, k, v, *views, start, n, bias if hidden else None)
    want, keys, values = by_sums(q, k, v, [x[:R, :, :S] for x in before], start, seen)
    assert got.shape == q.shape and error(got, want) < TOLERANCE[dtype]
    assert torch.equal(views[0].double(), keys) and torch.equal(views[1].double(), values)
    for slot, old in zip(slots, before, strict=True):
        assert torch.equal(slot[R], old[R]) and torch.equal(slot[:, :, S:], old[:, :, S:])
