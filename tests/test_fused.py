"""kernels/fused.py and kernels/decode.py against the plain code of the model files and against fp64 sums over what is seen.

The kernels need a GPU, or `TRITON_INTERPRET=1 pytest tests/test_fused.py` where Triton is installed.
"""

import itertools
import math
import os
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kernels import decode, fused
from kernels.decode import decode_attend, window_attention, window_reference
from kernels.fused import fused_kernels, joined_weight, lay_together, project
from models import add_lora, dream, export_weights, llada, llada2, sdar
from models.attention import bidirectional, make_attend
from models.experts import experts_loop
from models.random_init import (
    TINY_DREAM,
    TINY_LLADA,
    TINY_LLADA2,
    TINY_SDAR,
    TINY_SDAR_MOE,
    random_model,
)
from rollout import canvas, make_engine

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]
if RUNS := bool(find_spec("triton") and (ON_GPU or os.environ.get("TRITON_INTERPRET") == "1")):
    from kernels import fused_triton, moe_triton
    from kernels.moe_triton import experts_fused
needs_triton = (lambda test: test) if RUNS and not ON_GPU else pytest.mark.cuda
pytestmark = [pytest.mark.cuda] if ON_GPU else []  # all of them are of `make test-gpu`
FAMILIES = {
    "SDAR": (sdar, False),
    "LLaDA2": (llada2, True),
    "LLaDA": (llada, True),
    "Dream": (dream, True),
}  # round_first
BLOCK = {"SDAR": TINY_SDAR, "SDAR-MoE": TINY_SDAR_MOE, "LLaDA2": TINY_LLADA2}
CONFIGS = BLOCK | {"LLaDA": TINY_LLADA, "Dream": TINY_DREAM}
each_family = pytest.mark.parametrize("family", FAMILIES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def draw(*shape, dtype=torch.float32, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed + sum(shape))
    return (scale * torch.randn(shape, generator=g)).to(dtype).to(DEVICE)


def plain(norm, x):
    """A norm of a model file as the CPU computes it."""
    return type(norm).forward(norm.cpu(), x.cpu()).to(x.device)


def close(got, want, dtype, share=0.02):
    """Equal to a step of the dtype, which few values may need: sums in another order."""
    step = torch.finfo(dtype).eps
    assert got.dtype == want.dtype == dtype and got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=2 * step, atol=2 * step)
    assert dtype == torch.float32 or (got != want).float().mean() < share
    return True


def norm_of(family, size, dtype, seed=3):
    norm = FAMILIES[family][0].RMSNorm(size, 1e-6)
    norm.weight.data = 1 + draw(size, seed=seed, scale=0.3).cpu()
    return norm.to(dtype)


@needs_triton
@each_family
@each_dtype
@pytest.mark.parametrize("D", [96, 128, 1000])
def test_norms_are_those_of_the_model_files(family, dtype, D):
    round_first = FAMILIES[family][1]
    norm, x, delta = (
        norm_of(family, D, dtype),
        draw(3, 5, D, dtype=dtype),
        draw(3, 5, D, dtype=dtype, seed=1, scale=4.0),
    )
    want, want_sum = plain(norm, x), plain(norm, x + delta)
    norm = norm.to(DEVICE)
    close(fused.rms_norm(x, norm, round_first), want, dtype)
    total, y = fused.add_rms_norm(x, delta, norm, round_first)
    assert torch.equal(total, x + delta)
    close(y, want_sum, dtype)
    with pytest.raises(AssertionError):  # negative control
        close(fused.add_rms_norm(x, delta.roll(1, 0), norm, round_first)[1], want_sum, dtype)


@needs_triton
@pytest.mark.parametrize("family", ["SDAR", "LLaDA2"])
@each_dtype
@pytest.mark.parametrize(
    "H, K, h, r", [(4, 2, 32, 32), (6, 3, 64, 64), (4, 1, 64, 32), (16, 4, 128, 64)]
)
def test_heads_are_normed_and_rotated_as_in_the_model_files(family, dtype, H, K, h, r):
    module, round_first = FAMILIES[family]
    B, T = 3, 5
    joined = draw(B, T, H + 2 * K, h, dtype=dtype)  # as project leaves them: parts of wider rows
    q, k = joined[:, :, :H].transpose(1, 2), joined[:, :, H : H + K].transpose(1, 2)
    position_ids = torch.arange(B * T).view(B, T) * 37 % 101
    cos, sin = (x.to(DEVICE) for x in module.rope_tables(position_ids, r, 1e4, dtype))
    q_norm, k_norm = norm_of(family, h, dtype), norm_of(family, h, dtype, seed=4)
    rotate = llada2.rotate if r < h else module.rotate  # SDAR's turns whole heads
    want = [rotate(plain(norm, x.contiguous()), cos, sin) for norm, x in ((q_norm, q), (k_norm, k))]
    q_norm, k_norm = q_norm.to(DEVICE), k_norm.to(DEVICE)
    got = fused.norm_rotate(q, k, q_norm, k_norm, cos, sin, round_first)
    assert all(close(a, b, dtype) for a, b in zip(got, want, strict=True))
    for wrong in [
        (k_norm, q_norm, cos, sin),
        (q_norm, k_norm, cos, -sin),
        (q_norm, k_norm, cos.roll(1, 2), sin),
    ]:
        with pytest.raises(AssertionError):  # negative controls
            [
                close(a, b, dtype)
                for a, b in zip(fused.norm_rotate(q, k, *wrong, round_first), want, strict=True)
            ]


@needs_triton
@pytest.mark.parametrize("family", ["LLaDA", "Dream"])
@each_dtype
@pytest.mark.parametrize("H, K, h", [(4, 2, 32), (6, 3, 24), (28, 4, 128)])
def test_heads_are_rotated_as_in_the_model_files(family, dtype, H, K, h):
    """LLaDA's tables are fp32, Dream's in the dtype of the heads: other roundings."""
    module, B, T = FAMILIES[family][0], 3, 5
    joined = draw(B, T, H + 2 * K, h, dtype=dtype)
    q, k = joined[:, :, :H].transpose(1, 2), joined[:, :, H : H + K].transpose(1, 2)
    position_ids = torch.arange(B * T).view(B, T) * 37 % 101
    tables = module.rope_tables(position_ids, h, 1e4, *([dtype] if family == "Dream" else []))
    cos, sin = (x.to(DEVICE) for x in tables)
    want = [module.rotate(x, cos, sin) for x in (q, k)]
    assert all(
        torch.equal(a, b) for a, b in zip(fused.rotate_heads(q, k, cos, sin), want, strict=True)
    )
    for wrong in [(cos, -sin), (sin, cos), (cos.roll(1, 2), sin)]:  # negative controls
        assert not any(
            torch.equal(a, b) for a, b in zip(fused.rotate_heads(q, k, *wrong), want, strict=True)
        )


@needs_triton
@each_dtype
@pytest.mark.parametrize("f", [40, 1024, 1500])
def test_gates(dtype, f):
    both = draw(2, 3, 2 * f, dtype=dtype, scale=3.0)
    gate, up = both.split(f, -1)
    want = F.silu(gate) * up
    close(fused_triton.silu_mul(gate, up), want, dtype)
    with pytest.raises(AssertionError):
        close(fused_triton.silu_mul(up, gate), want, dtype)


@needs_triton
@each_family
def test_rotary_tables_are_those_of_the_model_files(family):
    module, position_ids = (
        FAMILIES[family][0],
        torch.tensor([[0, 1, 7, 4095], [131071, 2, 40000, 3]], device=DEVICE),
    )
    for size, theta in ((64, 1e4), (24, 1e6)):
        sizes = (size, theta) if family == "LLaDA" else (size, theta, DTYPES[0])
        want = module.rope_tables(position_ids, *sizes)
        got = fused.fused_tables(module.frequencies, position_ids, *sizes)
        step = torch.finfo(want[0].dtype).eps
        for ours, theirs in zip(got, want, strict=True):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape == (2, 1, 4, size)
            torch.testing.assert_close(ours, theirs, rtol=step, atol=step)
        other = fused.fused_tables(module.frequencies, position_ids + 1, *sizes)  # negative control
        assert not any(
            torch.allclose(ours, theirs, atol=0.05)
            for ours, theirs in zip(other, want, strict=True)
        )


HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9
on_hopper = lambda test: pytest.mark.cuda(
    pytest.mark.skipif(not HOPPER, reason="kernels for Hopper")(test)
)
if HOPPER:
    from kernels import products_gluon
TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 4e-4}
BF16, FP16 = torch.bfloat16, torch.float16


@on_hopper
@pytest.mark.parametrize(
    "lead, K, N, splits, dtype",
    [
        ((1, 4), 96, 40, 1, BF16), ((3, 5), 512, 6144, 1, FP16), ((16,), 4096, 512, 8, BF16), ((5, 8), 304, 136, 1, BF16),
        ((64,), 4096, 4096, 1, BF16), ((64,), 9728, 2560, 2, BF16), ((5, 13), 304, 136, 1, FP16), ((128,), 9728, 2560, 2, BF16),
    ],
)  # fmt: skip
def test_products_of_few_tokens(lead, K, N, splits, dtype):
    """Each size of a tile, full and not; inputs that end inside a stage, outputs inside a tile; any number of programs."""
    assert products_gluon._splits(-(-N // 64), K) == splits
    x, weight, exact = (
        draw(*lead, K, dtype=dtype),
        draw(N, K, scale=K**-0.5).to(dtype),
        torch.float64,
    )
    want = x.to(exact) @ weight.to(exact).T
    error = lambda got: ((got.to(exact) - want).norm() / want.norm()).item()
    for some in (None, 3):
        got = products_gluon.linear(x, weight, splits=some)
        assert got.dtype == dtype and got.shape == want.shape and error(got) < TOLERANCE[dtype]
        assert (got.to(exact) - want).abs().amax() < 30 * TOLERANCE[
            dtype
        ]  # nowhere, not only in the norm
        assert torch.equal(products_gluon.linear(x, weight, splits=some), got)
        onto = draw(*got.shape, dtype=dtype, seed=5)
        assert torch.equal(products_gluon.linear(x, weight, onto, some), onto + got)
        assert not fused_triton.arrivals(x.device).any()  # ready for the next one
    with pytest.raises(ValueError, match="1 to 128"):
        products_gluon.linear(draw(129, K, dtype=dtype), weight)
    assert (
        error(products_gluon.linear(x, weight.roll(1, 0))) > 0.5
    )  # negative controls: the next output, the next token
    assert error(products_gluon.linear(x.flatten(0, -2).roll(1, 0).view_as(x), weight)) > 0.5


@on_hopper
@pytest.mark.parametrize(
    "lead, K, N, dtype",
    [
        ((1, 4), 96, 40, BF16), ((16,), 512, 96, FP16), ((5, 8), 304, 1000, BF16), ((64,), 4096, 12288, BF16),
        ((5, 13), 304, 1000, FP16), ((128,), 4096, 1000, BF16),
    ],
)  # fmt: skip
def test_gated_products_of_few_tokens(lead, K, N, dtype):
    x, weight, exact = (
        draw(*lead, K, dtype=dtype),
        draw(2 * N, K, scale=2 * K**-0.5).to(dtype),
        torch.float64,
    )
    both = (x.to(exact) @ weight.to(exact).T).to(dtype)
    want = (F.silu(both[..., :N]) * both[..., N:]).to(exact)
    error = lambda got: ((got.to(exact) - want).norm() / want.norm()).item()
    got = products_gluon.gated(x, weight)
    assert got.dtype == dtype and got.shape == want.shape and error(got) < 2 * TOLERANCE[dtype]
    assert torch.equal(products_gluon.gated(x, weight), got)
    first = (N - 1) // 96 * 96  # of the last tile
    for part in (slice(0, 64), slice(64, 96), slice(first, N))[
        :: 1 if N > 64 else 2
    ]:  # thirds of a tile
        off, whole = ((y[..., part]).norm().item() for y in (got.to(exact) - want, want))
        assert off < 4 * TOLERANCE[dtype] * whole
    for wrong in (
        weight.roll(N, 0),
        weight.roll(1, 0),
    ):  # negative controls: up for gate, the next output
        assert error(products_gluon.gated(x, wrong)) > 0.3


@on_hopper
def test_products_follow_one_another_early():
    """A chain in which each kernel may start while the one before still writes what it reads, as one graph and without."""
    D, f, x = 1024, 2560, draw(16, 1024, dtype=torch.bfloat16)
    new = lambda *shape, seed: draw(*shape, scale=shape[1] ** -0.5, seed=seed).bfloat16()
    layers = [[new(*shape, seed=i) for shape in ((D, D), (2 * f, D), (D, f))] for i in range(4)]
    norm = norm_of("SDAR", D, torch.bfloat16).to(DEVICE)

    def run(linear, gated):
        total = x
        for o, up, down in layers:
            total, y = fused_triton.add_rms_norm(
                total, linear(total, o), norm.weight, norm.eps, False
            )
            total = linear(gated(y, up), down, total)
        return total

    plain = lambda x, w, onto=None: F.linear(x, w) if onto is None else onto + F.linear(x, w)
    silu = lambda x, w: (lambda a, b: F.silu(a) * b)(*F.linear(x, w).chunk(2, -1))
    inputs, wants = (x.clone(), -2 * x), []
    for value in inputs:
        x.copy_(value)
        want = run(plain, silu)
        torch.cuda.synchronize()
        wants.append(run(products_gluon.linear, products_gluon.gated))
        off = (wants[-1] - want).float()
        assert (off.norm(dim=1) / want.float().norm(dim=1)).max().item() < 0.03  # of each token
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(products_gluon.linear, products_gluon.gated)
    for i in range(50):  # other inputs each time: what was left of the replay before would be seen
        x.copy_(inputs[i % 2])
        graph.replay()
        assert torch.equal(got, wants[i % 2])


@pytest.mark.parametrize("wrong", ["", "linear", "gated", "NaN", "missing"])
@pytest.mark.parametrize("capability", [8, 9, 10])
def test_products_are_compared_with_cublas_once(monkeypatch, capsys, wrong, capability):
    """Another GPU asks nothing; a Triton with which a kernel is wrong or does not run is named, and cuBLAS multiplies."""
    calls, gates = [], lambda x, w: (lambda a, b: F.silu(a) * b)(*F.linear(x, w).chunk(2, -1))
    noted = lambda name, y: calls.append(name) or (y.roll(1, -1) if name == wrong else y)
    products = {
        "linear": lambda x, w, onto=0, splits=None: noted("linear", onto + F.linear(x, w)),
        "gated": lambda x, w: noted("gated", gates(x, w) * (math.nan if wrong == "NaN" else 1)),
    }
    if wrong == "missing":
        del products["gated"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="9.9"))
    monkeypatch.setitem(sys.modules, "kernels.products_gluon", SimpleNamespace(**products))
    monkeypatch.setattr(
        "kernels.products_gluon", sys.modules["kernels.products_gluon"], raising=False
    )
    got = fused._has_products.__wrapped__(torch.device(DEVICE), torch.bfloat16)
    asked = ["linear", "linear", "gated"][: 2 if wrong == "missing" else 3] * (capability == 9)
    assert got == (capability == 9 and not wrong) and calls == asked
    said = capsys.readouterr().out
    assert (
        said.endswith("with Triton 9.9: cuBLAS multiplies\n")
        if capability == 9 and wrong
        else not said
    )
    assert ("does not run (AttributeError: " in said) == (capability == 9 and wrong == "missing")


@on_hopper
@pytest.mark.parametrize(
    "tokens, few, of_mlp",
    [(64, 1, 1), (65, 0, 0), (96, 0, 0), (97, 0, 1), (128, 0, 1), (129, 0, 0)],
)
def test_who_multiplies(monkeypatch, tokens, few, of_mlp):
    """Few tokens are our kernels', others and rows of which TMA cannot read the beginning are cuBLAS's."""
    assert fused._has_products(
        torch.empty(0, device=DEVICE).device, torch.bfloat16
    )  # asked before calls are noted
    calls, real = [], (products_gluon.linear, products_gluon.gated)
    monkeypatch.setattr(
        products_gluon, "linear", lambda *args: calls.append("linear") or real[0](*args)
    )
    monkeypatch.setattr(
        products_gluon, "gated", lambda *args: calls.append("gated") or real[1](*args)
    )
    model = random_model(TINY_SDAR, device=DEVICE, dtype=torch.bfloat16)
    lay_together(model)
    mlp, x = model.layers[0].mlp, draw(tokens, TINY_SDAR["hidden_size"], dtype=torch.bfloat16)
    with torch.no_grad():
        want = mlp(x, x), *project(x, mlp.gate_proj, mlp.up_proj)
        assert not calls
        with fused_kernels():
            got = mlp(x, x), *project(x, mlp.gate_proj, mlp.up_proj)
        assert calls == ["gated", "linear"] * of_mlp + ["linear"] * few
        assert all(
            ((a - b).float().norm() / b.float().norm()).item() < 0.01
            for a, b in zip(got, want, strict=True)
        )
        assert not fused.is_few(draw(4, 92, dtype=torch.bfloat16)) and fused.is_few(
            draw(4, 96, dtype=torch.bfloat16)
        )


# --- attention over the cache ------------------------------------------------------------------------------------------------


def attention_case(R, H, K, h, T, width, dtype, seed=0):
    """-> q, k, v as a model makes them, cache [keys, values] of finite numbers"""
    q, k, v = (
        draw(R, T, heads, h, dtype=dtype, seed=seed + i).transpose(1, 2)
        for i, heads in enumerate((H, K, K))
    )
    return q, k, v, [draw(R, K, width, h, dtype=dtype, seed=seed + 5 + i) for i in range(2)]


def by_enumeration(q, k, v, keys, values, start, block_length):
    """fp64, one query after the other -> output, keys and values with the new ones written"""
    keys, values = keys.double().clone(), values.double().clone()
    (R, H, T, h), y = q.shape, torch.zeros_like(q, dtype=torch.float64)
    for r in range(R):
        first = int(start[r])
        keys[r, :, first : first + T], values[r, :, first : first + T] = (
            k[r].double(),
            v[r].double(),
        )
        for t in range(T):
            end = first + (t // block_length + 1) * block_length
            for head in range(H):
                group = head // (H // k.shape[1])
                p = (keys[r, group, :end] @ q[r, head, t].double() / math.sqrt(h)).softmax(0)
                y[r, head, t] = p @ values[r, group, :end]
    return y, keys, values


def portable(q, k, v, keys, values, start, block_length, **_):
    """decode_attend as it is on every device."""
    return decode_attend([(keys, values)], start, block_length)(0, q, k, v)


ATTENTION = {
    "portable": (portable, {}, [torch.float64, torch.float32] if not ON_GPU else [torch.float32])
}
if RUNS:
    for splits in (None, 1, 2, 5):
        options = {"splits": splits} if ON_GPU else {"splits": splits, "tuned": (16, 1, 1)}
        ATTENTION[f"triton-{splits}"] = (fused_triton.decode_attention, options, DTYPES)
SHAPES = [  # R, H, K, h, T, block_length, width
    (3, 4, 2, 32, 4, 4, 64), (2, 8, 2, 16, 3, 3, 30), (2, 4, 1, 64, 32, 32, 160), (4, 4, 4, 32, 8, 4, 48),
    (2, 6, 2, 32, 1, 1, 40),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, dtype", [(name, dtype) for name in ATTENTION for dtype in ATTENTION[name][2]]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_over_the_cache_by_enumeration(name, dtype, shape):
    """Rows at other positions, the first with nothing before it; writes only where the new tokens are; old rest never seen."""
    compute, options, _ = ATTENTION[name]
    *sizes, T, n, width = shape
    q, k, v, cache = attention_case(*sizes, T, width, dtype)
    most = (width - T) // n
    start = torch.tensor(
        [most * r // max(sizes[0] - 1, 1) * n for r in range(sizes[0])], device=DEVICE
    )
    assert start[0] == 0 and start.max() > 0
    view = [x.clone() for x in cache]
    got = compute(q, k, v, *view, start, n, **options)
    want, keys, values = by_enumeration(q, k, v, *cache, start, n)
    tolerance = {
        torch.bfloat16: 1e-2,
        torch.float16: 2e-3,
        torch.float32: 1e-5,
        torch.float64: 1e-12,
    }[dtype]
    error = lambda x: ((x.double() - want).norm() / want.norm()).item()
    assert got.shape == q.shape and error(got) < tolerance
    if compute is not portable:
        assert got.transpose(1, 2).is_contiguous()  # the order of o_proj's inputs: no copy
        assert not fused_triton.arrivals(q.device).any()  # ready for the next one
    assert torch.equal(view[0].double(), keys) and torch.equal(view[1].double(), values)
    for wrong in (
        start + (start + T < width).long(),
        (start - 1).clamp(min=0),
    ):  # negative controls
        assert (
            error(compute(q, k, v, *(x.clone() for x in cache), wrong, n, **options))
            > 2 * tolerance
        )
    if T > n:
        assert (
            error(compute(q, k, v, *(x.clone() for x in cache), start, T, **options))
            > 2 * tolerance
        )


@pytest.mark.parametrize("name", ATTENTION)
def test_a_part_of_the_slots_is_enough(name):
    """The first rows and positions of wider slots, as the engine gives them: the rest is neither read nor written."""
    compute, options, dtypes = ATTENTION[name]
    q, k, v, cache = attention_case(2, 4, 2, 32, 4, 48, dtypes[0])
    start = torch.tensor([8, 40], device=DEVICE)
    want = compute(q, k, v, *(x.clone() for x in cache), start, 4, **options)
    slots = [torch.full((3, 2, 64, 32), 1e4, dtype=dtypes[0], device=DEVICE) for _ in range(2)]
    for slot, part in zip(slots, cache, strict=True):
        slot[:2, :, :48] = part
    got = compute(q, k, v, *(slot[:2, :, :48] for slot in slots), start, 4, **options)
    assert torch.equal(got, want)
    assert all((slot[2] == 1e4).all() and (slot[:, :, 48:] == 1e4).all() for slot in slots)


def of_a_window(q, k, v, keys, values, first, bias):
    """fp64, one query after the other, of all columns but those with a bias -> output, keys and values with the new ones"""
    keys, values = keys.double().clone(), values.double().clone()
    (R, H, T, h), y = q.shape, torch.zeros_like(q, dtype=torch.float64)
    keys[:, :, first : first + T], values[:, :, first : first + T] = k.double(), v.double()
    for r, head, t in itertools.product(range(R), range(H), range(T)):
        group, seen = head // (H // k.shape[1]), bias[r, 0, 0] == 0
        p = (keys[r, group, seen] @ q[r, head, t].double() / math.sqrt(h)).softmax(0)
        y[r, head, t] = p @ values[r, group, seen]
    return y, keys, values


WINDOWS = {"portable": (window_reference, ATTENTION["portable"][2])}
if RUNS:
    for parts in (None, 1, 2, 5):

        def in_triton(q, k, v, keys, values, columns, bias=None, parts=parts):
            options, start = ATTENTION[f"triton-{parts}"][1], columns[:1].expand(len(q))
            return fused_triton.decode_attention(
                q, k, v, keys, values, start, 1, **options, window=True, bias=bias
            )

        WINDOWS[f"triton-{parts}"] = in_triton, DTYPES


@pytest.mark.parametrize(
    "name, dtype", [(name, dtype) for name in WINDOWS for dtype in WINDOWS[name][1]]
)
@pytest.mark.parametrize(
    "R, H, K, h, T, S, first",
    [
        (3, 4, 2, 32, 4, 64, 40),
        (2, 7, 1, 16, 9, 90, 33),
        (2, 2, 2, 64, 32, 160, 0),
        (2, 7, 1, 16, 17, 62, 44),
    ],
)
def test_attention_of_a_window_by_enumeration(name, dtype, R, H, K, h, T, S, first):
    compute = WINDOWS[name][0]
    q, k, v, cache = attention_case(R, H, K, h, T, S, dtype)
    columns = torch.arange(first, first + T, device=DEVICE)
    bias = torch.zeros(R, 1, 1, S, dtype=dtype, device=DEVICE)
    if first:
        bias[1, ..., : first - 3] = float("-inf")  # whole turns and parts of the kernel see nothing
        bias[0, ..., first + T + 2 :] = float("-inf")
        bias[0, ..., first + 1] = float("-inf")  # and one of the new tokens
    tolerance = {
        torch.bfloat16: 1e-2,
        torch.float16: 2e-3,
        torch.float32: 1e-5,
        torch.float64: 1e-12,
    }[dtype]
    wants = (
        of_a_window(q, k, v, *cache, first, bias),
        of_a_window(q, k, v, *cache, first, torch.zeros_like(bias)),
    )
    for some, (want, keys, values), (other, _, _) in zip(
        (bias, None), wants, wants[::-1], strict=True
    ):
        view = [x.clone() for x in cache]
        got = compute(q, k, v, *view, columns, some).double()
        assert got.shape == q.shape and (got - want).norm() < tolerance * want.norm()
        assert torch.equal(view[0].double(), keys) and torch.equal(view[1].double(), values)
        assert (
            not first or (got - other).norm() > 2 * tolerance * want.norm()
        )  # negative controls: the bias, the place
        got = compute(q, k, v, *(x.clone() for x in cache), columns + 1, some).double()
        assert (got - want).norm() > 2 * tolerance * want.norm()


@needs_triton
@each_dtype
@pytest.mark.parametrize("h, T, kernels", [(32, 64, 1), (32, 65, 0), (24, 4, 0)])
def test_windows_that_the_kernel_takes_and_those_it_leaves(monkeypatch, dtype, h, T, kernels):
    """Up to 64 columns and sizes of heads that it knows; the others are SDPA's. Both write and attend alike."""
    monkeypatch.setattr(decode, "has_kernels", lambda x: True)
    calls, real = [], fused_triton.decode_attention
    monkeypatch.setattr(
        fused_triton,
        "decode_attention",
        lambda *args, **more: calls.append(1) or real(*args, **more),
    )
    q, k, v, cache = attention_case(2, 2, 1, h, T, 96, dtype)
    bias, columns = (
        torch.zeros(2, 1, 1, 96, dtype=dtype, device=DEVICE),
        torch.arange(30, 30 + T, device=DEVICE),
    )
    bias[1, ..., :7] = float("-inf")
    views = [[x.clone() for x in cache] for _ in range(2)]
    got, want = (
        f(q, k, v, *view, columns, bias)
        for f, view in zip((window_attention, window_reference), views, strict=True)
    )
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}[dtype]
    assert len(calls) == kernels and ((got - want).norm() / want.norm()).item() < tolerance
    assert all(
        torch.equal(ours, theirs) and not torch.equal(ours, old)
        for ours, theirs, old in zip(*views, cache, strict=True)
    )


@needs_triton
@pytest.mark.parametrize("name", ["LLaDA", "Dream"])
@pytest.mark.parametrize("cache", ["dual", "prefix"])
def test_a_cached_rollout_takes_the_window_kernel(monkeypatch, name, cache):
    """The sampler's own calls: a window of a ragged batch beside its cache, Dream's with one column more, is SDPA's."""
    sizes = (
        {"d_model": 128, "n_layers": 2}
        if name == "LLaDA"
        else {"hidden_size": 128, "num_hidden_layers": 2}
    )
    model = random_model(CONFIGS[name] | sizes, device=DEVICE, dtype=DTYPES[0])
    options = dict(gen_length=8, block_length=4, denoising_steps=2, cache=cache, stop_at_eos=False)
    prompts, widths, gaps, real = [[5, 6, 7], [8]], [], [], decode.window_attention

    def compared(q, k, v, keys, values, columns, bias=None):
        copies = keys.clone(), values.clone()
        monkeypatch.setattr(decode, "has_kernels", lambda x: True)
        got = real(q, k, v, keys, values, columns, bias)
        want = window_reference(q, k, v, *copies, columns, bias)
        assert bias is not None and torch.equal(keys, copies[0]) and torch.equal(values, copies[1])
        free = window_reference(q, k, v, *copies, columns)  # negative control: padding is seen
        gaps.append([((y - want).norm() / want.norm()).item() for y in (got, free)])
        widths.append(q.shape[2])
        return got

    monkeypatch.setattr(canvas, "window_attention", compared)
    engine, before = make_engine(model), int(name == "Dream")
    engine.use_graphs = False  # a comparison reads values back
    engine.generate(prompts, **options)
    assert widths == [
        width + before for width in ((4, 4) if cache == "dual" else (8, 4)) for _ in range(2)
    ]
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-5}[DTYPES[0]]
    assert all(gap < tolerance < free for gap, free in gaps)


# --- experts -----------------------------------------------------------------------------------------------------------------


@needs_triton
@each_dtype
@pytest.mark.parametrize(
    "lead, E, D, f, k, used, tuned",
    [
        ((3, 7), 8, 32, 48, 2, 8, None),
        ((40,), 16, 64, 32, 4, 5, ((16, 16, 16, 16, 4, 2), (16, 32, 32, 32, 4, 2))),
        (
            (64,),
            16,
            64,
            32,
            4,
            16,
            ((16, 32, 16, 16, 4, 2), (16, 16, 32, 32, 4, 2)),
        ),  # some experts have 16, some more
        ((1,), 8, 32, 16, 1, 1, None),
        ((48,), 8, 200, 72, 2, 8, None),  # the tiles of each number of assignments
        ((96,), 8, 200, 72, 2, 8, None),
        ((200,), 8, 200, 72, 2, 8, None),
        (
            (300,),
            8,
            32,
            16,
            4,
            8,
            None,
        ),  # more assignments than a program of the buckets sees at once
        (
            (150,),
            4,
            80,
            40,
            3,
            3,
            ((16, 16, 16, 32, 4, 2), (16, 16, 16, 16, 4, 2)),
        ),  # more than all lanes of a bucket at once
    ],
)
def test_experts_are_those_of_the_plain_loop(dtype, lead, E, D, f, k, used, tuned):
    """Against the loop in fp64, no worse than the loop in the same dtype; every assignment counts, none twice."""
    x, gate_up, down = (
        draw(*lead, D, dtype=dtype),
        draw(E, 2 * f, D, scale=D**-0.5),
        draw(E, D, f, scale=f**-0.5),
    )
    gate_up, down = gate_up.to(dtype), down.to(dtype)
    g = torch.Generator().manual_seed(1)
    index = (E - 1 - torch.rand(*lead, used, generator=g).argsort(-1)[..., :k]).to(DEVICE)
    weight = torch.rand(*lead, k, generator=g).to(DEVICE)
    for w in (weight.to(dtype), weight):  # SDAR's and LLaDA2's
        exact = [value.double() for value in (w, gate_up, down)]
        want = experts_loop(x.double(), index, *exact)
        error = lambda y, want=want: ((y.double() - want).norm() / want.norm()).item()
        got = experts_fused(x, index, w, gate_up, down, (), tuned)
        onto = draw(*lead, D, dtype=dtype, seed=2), draw(*lead, D, dtype=dtype, seed=3)
        assert torch.equal(
            experts_fused(x, index, w, gate_up, down, onto[:1], tuned), onto[0] + got
        )
        assert torch.equal(
            experts_fused(x, index, w, gate_up, down, onto, tuned), onto[1] + (onto[0] + got)
        )
        assert got.shape == x.shape and got.dtype == dtype
        assert error(got) < 1.1 * error(experts_loop(x, index, w, gate_up, down)) + 1e-6
        if k > 1:  # negative controls
            assert error(experts_fused(x, index, w.flip(-1), gate_up, down, (), tuned)) > 0.05
        assert error(experts_fused(x, index, w, gate_up.roll(f, 1), down, (), tuned)) > 0.05


@needs_triton
def test_a_bucket_holds_one_assignment_a_token():
    """NaN scores choose one expert k times: the tensor's end is not passed, nor the next bucket touched."""
    M, k, E = 7, 3, 8
    index = torch.full((M, k), 7, dtype=torch.int64, device=DEVICE)
    counts, buckets = (
        torch.full(shape, -1, dtype=torch.int32, device=DEVICE) for shape in ((E,), (E + 1, M))
    )
    moe_triton._bucket_kernel[(E,)](
        index, counts, buckets, M * k, M, BLOCK=4, **fused_triton.early(index)
    )
    assert (
        counts.tolist() == [0] * 7 + [M]
        and buckets[7].tolist() == [*range(M)]
        and (buckets[8] == -1).all()
    )


@needs_triton
@each_dtype
@pytest.mark.parametrize("M, D, E", [(1, 96, 8), (5, 2048, 128), (70, 1000, 32), (200, 512, 256)])
def test_scores_of_experts_are_products_of_unrounded_weights(dtype, M, D, E):
    """Within the errors of tensor cores, 0.8 to 1.5e-6 on an H200. Negative controls: weights rounded to bf16 and to TF32."""
    x, weight = draw(M, D, dtype=dtype), draw(E, D, scale=D**-0.5)
    want = x.double() @ weight.double().T
    error = lambda weight: (
        (moe_triton.scores(x, weight).sum(0).double() - want).norm() / want.norm()
    ).item()
    got = moe_triton.scores(x, weight)
    assert got.dtype == torch.float32 and got.shape[1:] == (M, E)
    assert error(weight) < 3e-6
    assert error(weight.bfloat16().float()) > 1e-3
    assert error((weight.view(torch.int32) & -8192).view(torch.float32)) > 1e-4


@needs_triton
@pytest.mark.parametrize("name", ["SDAR-MoE", "LLaDA2"])
def test_routers_are_those_of_the_model_files(name, monkeypatch):
    """Experts and their weights, at many scores, with groups; the scores too are the kernels'."""
    config = CONFIGS[name] | {
        "num_experts": 32,
        "num_experts_per_tok": 5,
        "hidden_size": 384,
    }  # scores in three parts
    moe = random_model(config, device=DEVICE).layers[-1].mlp
    x = draw(3, 50, 384).bfloat16().float()  # what the kernels are given: exact in TF32
    assert len(moe_triton.scores(x.flatten(0, 1), moe.gate.weight)) == 3
    if name == "LLaDA2":
        moe.gate.expert_bias.copy_(draw(32, scale=0.1))
        plain = moe.route
    else:
        chosen = []
        moe.experts.forward = lambda x, index, weight, onto: chosen.append((index, weight)) or x
        plain = lambda x: (moe(x, x), chosen.pop())[1]
    with torch.no_grad():
        index, weight = plain(x)
        monkeypatch.setattr(fused, "has_kernels", lambda x: True)
        calls = []
        real = moe_triton.route
        monkeypatch.setattr(moe_triton, "route", lambda *args: calls.append(1) or real(*args))
        with fused_kernels():
            fused_index, fused_weight = plain(x)
        assert calls and torch.equal(fused_index, index)
        torch.testing.assert_close(fused_weight, weight, rtol=1e-5, atol=1e-6)
        if name == "LLaDA2":  # negative control: the groups and the bias count
            free = moe.gate(x).sigmoid().topk(5).indices
            assert not torch.equal(free.sort().values, index.sort().values)


@needs_triton
@pytest.mark.parametrize("name", ["SDAR-MoE", "LLaDA2"])
def test_a_layer_of_experts_is_the_plain_one(name, monkeypatch):
    """What it is added to and a shared expert included. Negative controls: without either."""
    layer = (
        random_model(CONFIGS[name] | {"hidden_size": 384}, device=DEVICE, dtype=DTYPES[0])
        .layers[-1]
        .mlp
    )
    x, onto = (draw(2, 9, 384, dtype=DTYPES[0], seed=seed) for seed in (0, 1))
    monkeypatch.setattr(fused, "has_kernels", lambda x: True)
    with torch.no_grad():
        want = layer(x, onto)
        error = lambda y: ((y - want).double().norm() / want.double().norm()).item()
        with fused_kernels():
            assert error(layer(x, onto)) < {torch.bfloat16: 1e-2, torch.float32: 1e-5}[DTYPES[0]]
            assert error(layer(x, torch.zeros_like(onto))) > 0.1
            if name == "LLaDA2":
                monkeypatch.setattr(layer.shared_experts, "forward", torch.zeros_like)
                assert error(layer(x, onto)) > 0.02


# --- in the model and in the engine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_laid_together_are_the_same_model(name):
    """Names, shapes, values and outputs stay; copies in place reach both views; nothing is stored twice."""
    model, other = (random_model(CONFIGS[name], seed=seed) for seed in (0, 1))
    ids = torch.arange(24).view(2, 12)
    before, names = model.logits(ids), {n: v.clone() for n, v in export_weights(model)}
    bytes_before = sum(
        {
            p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
        }.values()
    )
    lay_together(model)
    groups = [
        (module, layers)
        for module in model.modules()
        for layers in model.together
        if hasattr(module, layers[0])
    ]
    assert groups or name == "SDAR-MoE"
    for module, layers in groups:
        layers = [getattr(module, layer) for layer in layers]
        joined = joined_weight(layers)
        assert torch.equal(joined, torch.cat([layer.weight for layer in layers]))
        assert joined.data_ptr() == layers[0].weight.data_ptr()
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }
    assert sum(storages.values()) == bytes_before
    assert torch.equal(model.logits(ids), before)
    assert all(torch.equal(names[n], v) for n, v in export_weights(model))
    make_engine(model).load_weights(export_weights(other))
    assert torch.equal(model.logits(ids), other.logits(ids)) and not torch.equal(
        model.logits(ids), before
    )
    for module, layers in groups:
        layers = [getattr(module, layer) for layer in layers]
        assert torch.equal(joined_weight(layers), torch.cat([layer.weight for layer in layers]))


def test_one_product_for_layers_that_read_the_same(monkeypatch):
    """Only inside fused_kernels, and never past adapters or over neighbours by chance."""
    monkeypatch.setattr(fused, "has_kernels", lambda x: True)
    model = random_model(TINY_SDAR, dtype=torch.float64)
    assert (
        joined_weight([model.layers[0].self_attn.q_proj, model.layers[0].self_attn.k_proj]) is None
    )  # not laid together
    lay_together(model)
    attention, x = model.layers[1].self_attn, torch.randn(16, 5, 96, dtype=torch.float64)
    layers, calls = [attention.q_proj, attention.k_proj, attention.v_proj], []
    for layer in layers:
        layer.register_forward_hook(lambda *_: calls.append(1))
    want = project(x, *layers)
    assert len(calls) == 3
    with fused_kernels():
        got = project(x, *layers)
    assert len(calls) == 3
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert joined_weight(layers[::-1]) is None and joined_weight(layers[:2]) is not None
    add_lora(model, 2, 4, dtype=torch.float64)
    assert joined_weight([attention.q_proj, attention.k_proj, attention.v_proj]) is None
    with fused_kernels():
        for a, b in zip(
            project(x, attention.q_proj, attention.k_proj, attention.v_proj), want, strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_kernels_are_off_outside_the_engine(monkeypatch):
    """Training's forwards never take them, with gradient or without."""
    monkeypatch.setattr(fused, "has_kernels", lambda x: True)
    x = torch.zeros(1)
    assert not fused.is_fused(x)
    with fused_kernels():
        with fused_kernels():
            pass
        assert fused.is_fused(x)
    with pytest.raises(KeyError), fused_kernels():
        raise KeyError
    assert not fused.is_fused(x)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["LLaDA", "Dream"])
def test_the_fused_forward_of_a_bidirectional_model_is_the_plain_one(name):
    """bf16 on a GPU against fp32: final hidden states, fused and plain; weights laid together."""
    model, model32 = (
        random_model(CONFIGS[name], device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    ids, position_ids = (
        torch.arange(96, device="cuda").view(2, 48),
        torch.arange(48, device="cuda").expand(2, 48),
    )

    def run(model, at=position_ids, is_fused=False):
        attend = make_attend(bidirectional(torch.ones_like(ids, dtype=torch.bool)))
        with torch.no_grad(), fused_kernels() if is_fused else nullcontext():
            return model.hidden(ids, at, attend).float()

    truth, slow = run(model32.float()), run(model)
    lay_together(model)
    fast, other = run(model, is_fused=True), run(model, at=position_ids * 2, is_fused=True)
    error = lambda x: ((x - truth).norm() / truth.norm()).item()
    assert (
        error(fast) < 1.3 * error(slow) + 1e-3 < 0.1 and (fast - slow).norm() < 0.02 * slow.norm()
    )
    assert error(other) > 2 * error(fast)  # negative control


@pytest.mark.cuda
@pytest.mark.parametrize("name", BLOCK)
def test_the_fused_forward_is_the_plain_one(name):
    """bf16 on a GPU: final hidden states of prompts and of blocks over the cache, fused and plain, against fp32."""
    config = CONFIGS[name] | {"num_hidden_layers": 2}
    model, ids = (
        random_model(config, device="cuda", dtype=torch.bfloat16),
        torch.arange(96, device="cuda").view(2, 48),
    )
    position_ids, n = torch.arange(48, device="cuda").expand(2, 48), model.block_length
    at = torch.tensor([[40], [24]], device="cuda") + torch.arange(
        n, device="cuda"
    )  # start of a row: a column, not contiguous

    def run(model, dtype, is_fused, at=at):
        K, h = model.config.num_key_value_heads, model.config.head_dim
        cache = [
            [torch.zeros(2, K, 64, h, dtype=dtype, device="cuda") for _ in range(2)]
            for _ in model.layers
        ]
        block = position_ids[0] // n

        def prefill(layer, q, k, v):
            for slot, new in zip(cache[layer], (k, v), strict=True):
                slot[:, :, :48] = new
            repeated = (x.repeat_interleave(q.shape[1] // K, 1) for x in (k, v))
            return F.scaled_dot_product_attention(q, *repeated, attn_mask=block[:, None] >= block)

        with torch.no_grad(), fused_kernels() if is_fused else nullcontext():
            whole = model.hidden(ids, position_ids, prefill)
            return whole, model.hidden(ids.gather(1, at), at, decode_attend(cache, at[:, 0], n))

    model32 = random_model(config, device="cuda", dtype=torch.bfloat16).float()
    truth, slow = run(model32, torch.float32, False), run(model, torch.bfloat16, False)
    lay_together(model)
    fast, other = run(model, torch.bfloat16, True), run(model, torch.bfloat16, True, at.flip(0))
    error = lambda a, b: ((a.float() - b.float()).norm() / b.float().norm()).item()
    for a, b, c in zip(fast, slow, truth, strict=True):
        assert (
            error(b, c) < 0.3 and error(a, c) < 1.3 * error(b, c) + 1e-3
        )  # an expert chosen otherwise counts as error
    assert error(other[1], truth[1]) > 0.5  # negative control
    assert (
        error(fast[1], truth[0].gather(1, at[..., None].expand_as(truth[1]))) < 0.3
    )  # the block as part of the whole
