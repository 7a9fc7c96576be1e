"""Log-probabilities of given tokens straight from hidden states and head weight, without ever
holding all logits.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

# logits of a small vocabulary that are made at once; smaller parts would be many small kernels
PART = 1 << 20


def at_least_fp32(x):
    """The dtype of a tensor, but at least fp32"""
    return torch.promote_types(x.dtype, torch.float32)


def chunks(hidden, weight, temperature, banned_id, rows):
    """Yield (rows, their log softmax [n, V] in at least fp32) of one chunk after the other.

    At temperature 1 logits stay in the dtype of the model, as in the samplers: softmax reads them
    in fp32 itself. The banned token has probability 0.
    """
    for i in range(0, len(hidden), rows):
        here = slice(i, i + rows)
        logits = hidden[here] @ weight.T
        if temperature != 1:
            logits = logits.to(at_least_fp32(logits)).div_(temperature)
        if banned_id is not None:
            logits[:, banned_id] = float("-inf")
        yield here, logits.log_softmax(-1, dtype=at_least_fp32(logits))


def slope(p, targets):
    """Probabilities p [n, V], overwritten -> d log p_y / d logits = onehot(y) - p"""
    return p.neg_().scatter_add_(-1, targets[:, None], torch.ones_like(p[:, :1]))


class LinearLogps(torch.autograd.Function):
    """Each output depends on its own row alone, so its gradient by that row of hidden states is
    known before the loss is.

    The forward pass keeps this gradient [N, D]; only a trained head computes its logits a second
    time.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, entropy, *settings):
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        logps, entropies = (
            hidden.new_zeros(len(hidden), dtype=at_least_fp32(hidden)) for _ in range(2)
        )
        slopes = torch.empty_like(hidden) if need_hidden else None
        for rows, log_p in chunks(hidden, weight, *settings):
            logps[rows] = log_p.gather(-1, targets[rows, None])[:, 0]
            p = log_p.exp_()
            if entropy:  # a few rows at a time: p log p needs memory
                parts = p.split(max(64, PART // p.shape[1]))
                entropies[rows] = torch.cat([torch.special.entr(x).sum(-1) for x in parts])
            if need_hidden:
                slopes[rows] = slope(p, targets[rows]).div_(settings[0]).to(weight.dtype) @ weight
            del log_p, p  # before the next logits are made
        ctx.save_for_backward(slopes, *((hidden, weight, targets) if need_weight else ()))
        ctx.settings = settings
        ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        slopes, grad_hidden, grad_weight = ctx.saved_tensors[0], None, None
        if ctx.needs_input_grad[0]:
            grad_hidden = (slopes * grad[:, None]).to(slopes.dtype)
        if ctx.needs_input_grad[1]:
            hidden, weight, targets = ctx.saved_tensors[1:]
            grad_weight = torch.zeros_like(weight, dtype=grad.dtype)
            for rows, log_p in chunks(hidden, weight, *ctx.settings):
                scaled = (grad[rows, None] / ctx.settings[0]) * hidden[rows]
                d_logits = slope(log_p.exp_(), targets[rows]).to(weight.dtype)
                grad_weight += d_logits.T @ scaled.to(weight.dtype)
                del log_p, d_logits
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *[None] * 5


def linear_logps(
    hidden, weight, targets, *, temperature=1.0, banned_id=None, entropy=False, chunk_rows=None
):
    """log softmax(hidden @ weight.T / temperature)[targets], `chunk_rows` rows of logits in memory
    at a time: 1024, more where the vocabulary is small.

    hidden [N, D] and weight [V, D] of one floating dtype; targets [N] int64 in [0, V), none equal
    to banned_id. banned_id: a token with probability 0 (the mask token, which no sampler may draw).
    -> logps [N] (fp32; fp64 for fp64 inputs), and with entropy=True also the entropy [N] of each
    row in nats, which has no gradient. Those of logps by hidden and weight are exact. Memory is
    chunk_rows x V, and one more copy of hidden for its gradient, whatever N is. N = 0 keeps the
    graph, for ranks without scored rows.
    """
    settings = temperature, banned_id, chunk_rows or max(1024, 2 * PART // len(weight))
    logps, entropies = LinearLogps.apply(hidden, weight, targets, entropy, *settings)
    return (logps, entropies) if entropy else logps


def linear_certainty(hidden, weight, targets, *, temperature, banned_id, entropy, rows=512):
    """How sure the model is, with the arguments of linear_logps: log p of the targets (at
    temperature 1), the entropy at `temperature`, and 1 where the target is the most probable token.

    Three [N] in at least fp32, with exact gradients of the first two. `rows` rows of logits are in
    memory at a time, and are made again in the backward pass.
    """

    def certainty(hidden, targets):
        logits = (hidden @ weight.T).to(at_least_fp32(hidden))
        logits[:, banned_id] = -1e30
        log_q = (logits / temperature).log_softmax(-1)
        right = (logits.argmax(-1) == targets).to(logits)
        logps = -F.cross_entropy(logits, targets, reduction="none")
        return logps, -(log_q.exp() * log_q).sum(-1), right

    chunked = zip(hidden.split(rows), targets.split(rows), strict=True)
    parts = [checkpoint(certainty, *chunk, use_reentrant=False) for chunk in chunked]
    return tuple(map(torch.cat, zip(*parts, strict=True)))
