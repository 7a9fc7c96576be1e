"""Chains of small operations of a decoder layer as one Triton kernel each, and products of one input as one, for samplers.

A step of few tokens spends as long on its thirty small kernels a layer as on half of its weights. The plain code stands in the
model files, which ask `is_fused(x)`: True only inside `fused_kernels()`, on CUDA in bf16 or fp16. Training never enters it, so
that a forward without gradient is that of the one with it, bit for bit. The kernels round where the plain code rounds; sums of
squares in another order move the last bit of a few values in a thousand, scores of experts (kernels/moe_triton.py) are within
1.5e-6 of exact ones where those of the plain code are within 2e-7.
"""

from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import nn

DTYPES = (torch.bfloat16, torch.float16)
FEW = 64  # tokens, of which products are those of products_gluon.py, on Hopper, and not cuBLAS's;
FEW_OF_MLP = range(
    97, 129
)  # an MLP's are of so many too: at 128 they gain 3 % of a layer of SDAR-8B, at 96 they lose as much
_entered = 0


@contextmanager
def fused_kernels():
    """with fused_kernels(): forwards without gradient, of an engine"""
    global _entered
    _entered += 1
    try:
        yield
    finally:
        _entered -= 1


def has_kernels(x):
    """Whether Triton kernels can compute on tensors like x."""
    return x.is_cuda and x.dtype in DTYPES and find_spec("triton") is not None


def is_fused(x):
    return _entered > 0 and has_kernels(x)


def rms_norm(x, norm, round_first=False):
    """norm(x), norm: RMSNorm of a model file. round_first: x / rms is rounded before it is multiplied with the weight."""
    from kernels import fused_triton  # here and below: machines without a GPU have no Triton

    return fused_triton.add_rms_norm(x, None, norm.weight, norm.eps, round_first)[1]


def add_rms_norm(x, delta, norm, round_first=False):
    """x, delta [..., D] -> x + delta, norm(x + delta)"""
    from kernels import fused_triton

    return fused_triton.add_rms_norm(x, delta, norm.weight, norm.eps, round_first)


def norm_rotate(q, k, q_norm, k_norm, cos, sin, round_first=False):
    """Queries [B, H, T, h] and keys [B, K, T, h], normed head by head, then rotated: pairs (j, j + r / 2) of the first r
    dimensions, where cos, sin [B, 1, T, r] are those of the model file. -> the same shapes
    """
    from kernels import fused_triton

    return fused_triton.norm_rotate(
        q, k, q_norm.weight, k_norm.weight, q_norm.eps, cos, sin, round_first
    )


@cache
def _kept(function, *args):
    return function(*args)


def fused_tables(frequencies, position_ids, size, theta, dtype=torch.float32):
    """The tables of a model file: cos, sin [B, 1, T, size] of position_ids [B, T] times frequencies(size, theta, device)."""
    from kernels import fused_triton

    return fused_triton.rope_tables(
        position_ids, _kept(frequencies, size, theta, position_ids.device), dtype
    )


def rotate_heads(q, k, cos, sin):
    """Queries [B, H, T, h] and keys [B, K, T, h] rotated: pairs (j, j + h / 2); cos, sin [B, 1, T, h] are those of the model
    file. Tables in fp32: the result alone is rounded; in the dtype of q: each product too. -> the same shapes
    """
    from kernels import fused_triton

    return fused_triton.rotate(q, k, cos, sin)


# --- layers that read the same input -----------------------------------------------------------------------------------------


@torch.no_grad()
def lay_together(model):
    """Move the weights of linear layers that read the same input behind one another in memory, for `project`; their names,
    shapes and values stay, and copies in place reach both views. In place, without a second copy of the model.

    Which ones: `together` of the model, tuples of names inside one module. Layers with adapters or a bias stay apart.
    """
    for module in model.modules():
        for names in model.together:
            layers = [getattr(module, name, None) for name in names]
            if all(type(layer) is nn.Linear and layer.bias is None for layer in layers):
                joined = torch.cat([layer.weight for layer in layers])
                for layer, part in zip(
                    layers, joined.split([len(layer.weight) for layer in layers]), strict=True
                ):
                    layer.weight.data = part


def joined_weight(layers):
    """-> one tensor [sum of outputs, D] over the weights of linear layers that lie behind one another, or None"""
    if any(type(layer) is not nn.Linear or layer.bias is not None for layer in layers):
        return None
    weights = [layer.weight for layer in layers]
    end = weights[0].data_ptr()
    for weight in weights:
        if not weight.is_contiguous() or weight.data_ptr() != end:
            return None
        end += weight.nbytes
    first, rows = weights[0], sum(len(weight) for weight in weights)
    if (
        first.storage_offset() * first.element_size() + rows * first[0].nbytes
        > first.untyped_storage().nbytes()
    ):
        return None  # neighbours by chance, in storages of their own
    return first.as_strided((rows, first.shape[1]), first.stride())


def project(x, *layers):
    """[layer(x) for layer in layers], as one product where `lay_together` was called."""
    weight = joined_weight(layers) if is_fused(x) else None
    if weight is None:
        return [layer(x) for layer in layers]
    return product(x, weight).split([len(layer.weight) for layer in layers], -1)


def add_product(onto, x, layer):
    """onto + layer(x)"""
    weight = joined_weight([layer]) if is_fused(x) and is_few(x, of_mlp=True) else None
    if weight is None:
        return onto + layer(x)
    from kernels import products_gluon

    return products_gluon.linear(x, weight, onto)


def gated(x, gate, up):
    """silu(gate(x)) * up(x) of two layers"""
    if not is_fused(x):
        return F.silu(gate(x)) * up(x)
    weight = joined_weight([gate, up])
    if weight is not None and is_few(x, of_mlp=True):
        from kernels import products_gluon

        return products_gluon.gated(x, weight)
    from kernels import fused_triton

    return fused_triton.silu_mul(*project(x, gate, up))


def product(x, weight):
    if not is_few(x):
        return F.linear(x, weight)
    from kernels import products_gluon

    return products_gluon.linear(x, weight)


def is_few(x, of_mlp=False):
    """Whether a product of x [..., K] is ours: on Hopper, of few tokens, with rows that TMA can read."""
    tokens = x.numel() // x.shape[-1]
    few = 0 < tokens <= FEW or of_mlp and tokens in FEW_OF_MLP
    return (
        few
        and x.is_cuda
        and x.shape[-1] % 8 == 0
        and x.data_ptr() % 16 == 0
        and _has_products(x.device, x.dtype)
    )


@cache
def _has_products(device, dtype):
    """Whether products_gluon.py is for this GPU, and right with this Triton: Gluon is experimental, and what it generates for a
    version that nobody ran would change samples without a word.
    """
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    import triton

    generator = torch.Generator(device).manual_seed(0)
    new = lambda *shape: torch.randn(shape, generator=generator, device=device).to(dtype) / 16
    x, weight, onto = new(5, 1000), new(200, 1000), new(5, 200)
    gate, up = F.linear(x, weight).split(100, -1)
    try:
        from kernels import products_gluon

        pairs = (
            (products_gluon.linear(x, weight), F.linear(x, weight)),
            (products_gluon.linear(x, weight, onto, splits=2), onto + F.linear(x, weight)),
            (products_gluon.gated(x, weight), F.silu(gate) * up),
        )
        off = [
            ((got.float() - want.float()).norm() / want.float().norm()).item()
            for got, want in pairs
        ]
        fault = (
            ""
            if all(value < 0.02 for value in off)
            else f"is off by {', '.join(f'{value:.2g}' for value in off)}"
        )
    except Exception as error:  # of an interface that has changed
        fault = f"does not run ({type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''})"
    if fault:
        print(
            f"kernels/products_gluon.py {fault} with Triton {triton.__version__}: cuBLAS multiplies",
            flush=True,
        )
    return not fault
