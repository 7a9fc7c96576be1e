"""Attention of training and scoring: which token sees which, and the backends that compute it."""

from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from inspect import signature

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend as kind
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

# --- which token sees which ----------------------------------------------------------------------

NEVER = torch.iinfo(torch.int32).max
# torch's kernels, the first that can
KERNELS = [kind.CUDNN_ATTENTION, kind.FLASH_ATTENTION, kind.EFFICIENT_ATTENTION, kind.MATH]


@dataclass(frozen=True)
class Visibility:
    """Which of S tokens sees which, for every family. Padding sees itself; nothing else sees it.

    pattern: a key of AUTO. block [B, S] int64: number of each token's block, counted from the
    start of its row; 0 where there are no blocks. valid [B, S] bool: False on padding. document
    [B, S] int64: in a packed row the document of each token, which sees no other document; None: a
    row is one document. copy [B, S] int64: 0 on clean tokens, k on those of noisy copy k in a pass
    over [clean | noisy_1 .. noisy_K]. A noisy token sees its own block of its own copy and the
    clean tokens of earlier blocks; a clean token sees clean ones up to its own block.
    """

    pattern: str
    block: torch.Tensor
    valid: torch.Tensor
    document: torch.Tensor | None = None
    copy: torch.Tensor | None = None

    def rule(self):
        """-> sees(b, h, q, k): whether in row b token q sees token k, as FlexAttention calls it

        A query sees keys whose level is at most its limit or whose group is its own, so that one
        FlexAttention kernel serves all patterns. level: the block of a clean token, out of reach on
        others. limit: the last block whose clean tokens are seen. group: numbers the blocks of all
        noisy copies; unique on other tokens, so each sees itself.
        """
        block, valid, document = self.block.int(), self.valid, self.document
        at = torch.arange(block.shape[1], dtype=torch.int32, device=block.device)
        copy = torch.zeros_like(block) if self.copy is None else self.copy.int()
        noisy = copy > 0
        level = block.masked_fill(noisy | ~valid, NEVER)
        limit = (block - noisy.int()).masked_fill(~valid, -1)
        group = torch.where(noisy & valid, copy * (block.max() + 1) + block, -1 - at)
        sees = lambda b, h, q, k: (level[b, k] <= limit[b, q]) | (group[b, k] == group[b, q])
        if document is None:
            return sees
        return lambda b, h, q, k: sees(b, h, q, k) & (document[b, k] == document[b, q])

    def dense(self):
        """-> [B, S, S] bool, True where the query (dimension 1) sees the key; None: all see all"""
        if self.pattern == "full":
            return None
        row, at = (torch.arange(size, device=self.block.device) for size in self.block.shape)
        return self.rule()(row[:, None, None], 0, at[:, None], at)


# block, valid, document [B, S] -> a block sees itself and the blocks before it
block_causal = partial(Visibility, "block-causal")


def noisy_columns(score, block, valid):
    """The columns of K noisy copies that must be computed: blocks with a scored token.

    score [B, K, T] bool; block, valid [B, T] -> [B, n] int64 of K T columns, n >= 1, in order; rows
    that need fewer are filled up with others.
    """
    K, T = score.shape[1:]
    copy = torch.arange(K, device=block.device)[:, None]
    group = (block[:, None] + copy * T).flatten(1)  # numbers the blocks of all copies
    scored = torch.zeros_like(group).scatter_add_(1, group, score.flatten(1).long())
    needed = (scored.gather(1, group) > 0) & valid.repeat(1, K)
    n = max(int(needed.sum(1).max()), 1)
    return (~needed).byte().argsort(dim=1, stable=True)[:, :n]


def positions(valid, document):
    """valid [B, T] bool, document [B, T] or None -> [B, T] int64: valid tokens of the document
    before each.

    Padding repeats the number of the token before it, 0 at the start. Documents are contiguous.
    """
    count = valid.long().cumsum(1)
    if document is not None:
        is_first = F.pad(document.diff(dim=1) != 0, (1, 0), value=True)
        count = count - torch.where(is_first, count - valid.long(), 0).cummax(1).values
    return (count - 1).clamp(min=0)


# --- backends: Visibility -> attend(q, k, v) -----------------------------------------------------
# Masks are made once per forward, not per layer.


def attention(q, k, v, mask=None):
    """torch's scaled_dot_product_attention, also with fewer key heads than query heads"""
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)


def fast_attention(q, k, v, mask=None, kernels=KERNELS):
    """cuDNN's kernel first"""
    with sdpa_kernel(kernels, set_priority=True):
        return attention(q, k, v, mask)


def sdpa(visibility):
    """torch's attention; a dense mask where one is needed."""
    mask = visibility.dense()
    if mask is None:
        return fast_attention
    # At these lengths cuDNN's backward pass with a mask can make NaN of finite values, on H100 and
    # H200 (pytorch/pytorch#196678). Compiled blocks get another graph for them.
    kernels = KERNELS[1:] if visibility.block.shape[1] % 128 == 64 else KERNELS
    return partial(fast_attention, mask=mask[:, None], kernels=kernels)


@cache
def compiled_flex():
    """-> flex_attention, create_block_mask, compiled for all lengths (dynamic).

    Eager, the first would hold all scores, hence fullgraph; the second takes dozens of kernels.
    """
    attend = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return attend, torch.compile(create_block_mask, dynamic=True)


def flex(visibility):
    """FlexAttention. Its BlockMask tells which tiles of 128 x 128 to skip."""
    mask, (kernel, make_mask), (B, S) = None, compiled_flex(), visibility.block.shape
    if visibility.pattern != "full":
        mask = make_mask(visibility.rule(), B, None, S, S, visibility.block.device)
    return lambda q, k, v: kernel(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def packed(visibility, kernel):
    """kernel(q, k, v, cu_q, cu_k, max_q, max_k) gets the N valid tokens alone, [N, H, h], row by
    row.

    Padding gives 0. Each document of a row is a sequence of its own.
    """
    valid, document = visibility.valid, visibility.document
    sequence = torch.arange(len(valid), device=valid.device)[:, None].expand_as(valid)
    if document is not None:
        sequence = sequence * (document.max() + 2) + document
    lengths = sequence[valid].unique_consecutive(return_counts=True)[1]
    index = valid.flatten().nonzero()[:, 0]
    bounds, longest = F.pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max())

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B S, H, h]
        rows = (x.index_select(0, index) for x in (q, k, v))
        out = kernel(*rows, bounds, bounds, longest, longest)
        out = torch.zeros_like(q).index_copy(0, index, out)
        return out.unflatten(0, valid.shape).transpose(1, 2)

    return attend


def varlen(visibility):
    """torch's own FlashAttention 2 over packed rows."""
    from torch.nn.attention.varlen import varlen_attn  # imports torch._dynamo: 0.7 s

    # torch 2.11 takes fewer key heads without enable_gqa, later versions only with it.
    takes_gqa = "enable_gqa" in signature(varlen_attn).parameters
    return packed(visibility, partial(varlen_attn, enable_gqa=True) if takes_gqa else varlen_attn)


def flash_attn(visibility):
    """The flash-attn package over packed rows."""
    from flash_attn import flash_attn_varlen_func

    return packed(visibility, flash_attn_varlen_func)


# --- the choice ----------------------------------------------------------------------------------

HALF = torch.bfloat16, torch.float16
BACKENDS = {"sdpa": sdpa, "flex": flex, "varlen": varlen, "flash-attn": flash_attn}
HAS_FLASH_ATTN = find_spec("flash_attn") is not None

# "auto" on CUDA: (backend, from so many tokens S a row). Shorter rows, fp32 and CPUs get sdpa.
# Measured on one H200 (torch 2.11, bf16, 32 heads of 128 over 8; full and padded over 32),
# forward + backward in ms a layer. Flex also took 7 to 8 ms a forward to make its BlockMask (11
# to 14 with documents) before that was compiled.
#   full B16 S512           sdpa (cuDNN) 0.70    varlen 1.09   flash-attn 1.01
#   padded B16 S512         sdpa         1.05    varlen 1.98   flash-attn 1.93   flex 1.41
#   block-causal B16        S512: sdpa   1.02    flex   1.21   S1280: sdpa  5.1   flex 4.3
#   copies B16              S1024: sdpa  3.4     flex   2.7    S2560: sdpa 19.8   flex 9.2
# Packed documents of 180 to 192 tokens, 8,192 in all (--packed). varlen computes only pairs within
# a document, sdpa all S x S: between S 1024 and 4096 sdpa's time grows with S and meets varlen's at
# about 1150. A row of 512 tokens and its copy have about 1,000 tokens, because blocks without a
# scored token are left out; hence 960. With such rows a step of SDAR-30B took 0.71 s with sdpa,
# 0.66 s with flex; a layer alone was not measured below S 1024.
#   packed B16 S512         sdpa         1.07    varlen 2.04   flash-attn 2.00   flex 1.36
#   packed B8 S1024         sdpa         1.77    varlen 1.98   flash-attn 1.97   flex 1.66
#   packed B2 S4096         sdpa         6.27    varlen 2.03   flash-attn 1.99   flex 1.68
#   copies of documents     S1024: sdpa  3.34    flex   2.52   S8192: sdpa 24.9   flex 2.63
AUTO = {
    "full": ("sdpa", 0), "padded": ("sdpa", 0), "packed": ("varlen", 1152),
    "block-causal": ("flex", 1280), "copies": ("flex", 960),
}  # fmt: skip


def refusal(name, attention, device):
    """-> why a backend cannot serve a model on a device, or None: sdpa serves every model"""
    if name == "sdpa":
        return None
    if name == "flash-attn" and not HAS_FLASH_ATTN:
        return "is not installed"
    if name != "flex" and attention == "block-causal":
        return "has no block-causal pattern"
    return None if device == "cuda" else f"does not run on {device}"


def check_backend(name, attention, device):
    """Refuse at start-up, in one line, a backend that cannot serve this model on this device, and
    name those that can.

    attention: "bidirectional" or "block-causal", as model files state it.
    """
    if name != "auto" and (why := refusal(name, attention, device)):
        able = ", ".join(other for other in BACKENDS if not refusal(other, attention, device))
        raise SystemExit(f"--attention {name} {why}; able to do {attention} attention here: {able}")


def make_attend(visibility, backend="auto"):
    """-> attend(layer, q, k, v) of a forward: q [B, H, S, h], k and v [B, K, S, h] -> [B, H, S, h]

    q and k are rotated; H is a multiple of K. backend: a key of BACKENDS, or "auto", which takes
    sdpa for other dtypes than HALF. The output of padding is finite and meaningless.
    """
    name = backend
    if backend == "auto":
        name, shortest = AUTO[visibility.pattern]
        if not visibility.block.is_cuda or visibility.block.shape[1] < shortest:
            name = "sdpa"
    compute, serves_all = BACKENDS[name](visibility), name in ("sdpa", backend)

    def attend(layer, q, k, v):
        if serves_all or q.dtype in HALF:
            return compute(q, k, v)
        return sdpa(visibility)(q, k, v)  # fp32 on CUDA: rare, so each layer makes the mask

    return attend
