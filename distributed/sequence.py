"""Sequence parallelism (Ulysses, arXiv 2309.14509): N ranks hold the same rows and share their
tokens.

Ranks 0 to N - 1 are a group, N to 2 N - 1 the next. Token c of a row is on rank c % N of its
group, so that every rank has its part of clean and noisy tokens, of scored tokens and of padding.
All layers but attention work on a rank's own tokens. Before attention an all-to-all gives the rank
all tokens of 1 / N of the heads, and after it another gives back its own tokens with all heads.

Gradients need nothing else: a rank has the gradient of its own tokens, and FSDP2 adds up those of
all ranks, as it does with different rows.
"""

import io
import math

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F

GROUP = None  # process group of the ranks that share rows with this one; None: N = 1


def form_groups(N, in_node, timeout=None):
    """Make the groups of `--sequence-parallel N`. in_node: ranks of a node, where groups must lie.
    Collective. SystemExit names the numbers that would do.
    """
    global GROUP
    require(N, "the ranks of a node", in_node)
    GROUP = dist.new_subgroups(N, timeout=timeout)[0] if N > 1 else None


def require(N, what, number):
    if number % N:
        able = [str(n) for n in range(1, number + 1) if number % n == 0]
        raise SystemExit(
            f"--sequence-parallel {N} must divide {what}, {number}: use {', '.join(able)}"
        )


def sequence_rank():
    """-> number of this rank in its group, N"""
    return (dist.get_rank(GROUP), dist.get_world_size(GROUP)) if GROUP else (0, 1)


def data_rank():
    """-> number of this rank's group, number of groups: what keys and deals rows"""
    N = sequence_rank()[1]
    return dist.get_rank() // N, dist.get_world_size() // N


def check_heads(config):
    """SystemExit if N does not divide the query heads. Fewer key heads are repeated."""
    require(sequence_rank()[1], "the query heads of the model", config.num_attention_heads)


def own_tokens(x):
    """x [B, S] -> this rank's tokens [B, ceil(S / N)], the last filled up with 0"""
    rank, N = sequence_rank()
    return F.pad(x, (0, -x.shape[1] % N))[:, rank::N]


class AllToAll(torch.autograd.Function):
    """x [N, ...]: part j goes to rank j; part j of the result comes from rank j. Its own inverse,
    and therefore its own gradient.
    """

    @staticmethod
    def forward(ctx, x):
        return exchange(x)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad)


def exchange(x):
    # torch.compile traces this one, and does not recompute it in the backward pass
    return collectives.wait_tensor(collectives.all_to_all_single(x.contiguous(), None, None, GROUP))


def over_heads(attend, S):
    """attend over S tokens of a row -> attend(layer, q, k, v) over those of this rank: q [B, H, s,
    h], k and v [B, K, s, h] -> [B, H, s, h], s = ceil(S / N)

    Inside, each rank has H / N query heads and their key heads, which are repeated if N does not
    divide K. Tokens that fill up the last place are no keys.
    """
    if sequence_rank()[1] == 1:
        return attend

    def over_tokens(layer, q, k, v):
        N = sequence_rank()[1]  # from outside it would vary, for compiled blocks
        repeats = math.lcm(k.shape[1], N) // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        parts = [x.unflatten(1, (N, -1)).movedim(1, 0) for x in (q, k, v)]
        x = AllToAll.apply(torch.cat(parts, 2))  # [N, B, heads, s, h], from the rank of each token
        x = x.permute(1, 2, 3, 0, 4).flatten(2, 3)[:, :, :S]
        y = attend(layer, *x.split([part.shape[2] for part in parts], 1))  # [B, H / N, S, h]
        y = F.pad(y, (0, 0, 0, -S % N)).unflatten(2, (-1, N))
        y = AllToAll.apply(y.permute(3, 0, 1, 2, 4))  # [N, B, H / N, s, h], from that of each head
        return y.movedim(0, 1).flatten(1, 2)

    return over_tokens


def total(x):
    """x: values of this rank's tokens, 0 at those of others -> values of all tokens of the group.

    Every rank computes the same loss from them, so the gradient is that of its own.
    """
    if GROUP is None:
        return x
    others = x.detach().clone()
    dist.all_reduce(others, group=GROUP)
    return x + (others - x.detach())


def gather_objects(value, device):
    """-> list of the values of all ranks of the group, in order, their tensors on `device`"""
    if not GROUP:
        return [value]
    file, parts = io.BytesIO(), [None] * sequence_rank()[1]
    torch.save(value, file)
    dist.all_gather_object(parts, file.getvalue(), group=GROUP)
    return [torch.load(io.BytesIO(part), device, weights_only=False) for part in parts]
