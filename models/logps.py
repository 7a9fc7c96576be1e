"""Log-probabilities of given tokens straight from hidden states and head weight, without ever
holding all logits.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

ROWS = 1024  # of logits that are made at once
# logits of a small vocabulary that are made at once; smaller parts would be many small kernels
PART = 1 << 20


def at_least_fp32(x):
    """The dtype of a tensor, but at least fp32"""
    return torch.promote_types(x.dtype, torch.float32)


def chunks(hidden, weight, temperature, banned_id):
    """Yield (rows, their log softmax [n, V] in at least fp32) of one chunk after the other, at
    least once.

    At temperature 1 logits stay in the dtype of the model, as in the samplers: softmax reads them
    in fp32 itself. The banned token has probability 0.
    """
    rows = max(ROWS, 2 * PART // len(weight))
    for i in range(0, len(hidden) or 1, rows):
        here = slice(i, i + rows)
        logits = hidden[here] @ weight.T
        if temperature != 1:
            logits = logits.to(at_least_fp32(logits)).div_(temperature)
        logits[:, banned_id] = float("-inf")
        yield here, logits.log_softmax(-1, dtype=at_least_fp32(logits))


def slope(p, targets, grad):
    """Gradient by the logits of the sum of grad log p[y]: grad at y, less p times its sum. p [n,
    V], overwritten; targets y, grad [n, k]
    """
    return p.mul_(-grad.sum(-1, keepdim=True)).scatter_add_(-1, targets, grad)


class LinearLogps(torch.autograd.Function):
    """Each row of outputs depends on its own row alone. Where it is one output and the head is
    frozen, its gradient by that row of hidden states is known before the loss is, and the forward
    pass keeps it, [N, D]. Others compute their logits a second time.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, entropy, *settings):
        logps = torch.empty_like(targets, dtype=at_least_fp32(hidden))
        entropies, ctx.settings = logps.new_zeros(len(hidden)), settings
        knows_slopes = ctx.needs_input_grad[:2] == (True, False) and targets.shape[1] == 1
        slopes, one = torch.empty_like(hidden), torch.ones_like(logps)
        for rows, log_p in chunks(hidden, weight, *settings):
            logps[rows] = log_p.gather(-1, targets[rows])
            p = log_p.exp_()
            if entropy:  # a few rows at a time: p log p needs memory
                entropies[rows] = torch.cat(
                    [torch.special.entr(x).sum(-1) for x in p.split(max(64, PART // p.shape[1]))]
                )
            if knows_slopes:
                p = slope(p, targets[rows], one[rows] / settings[0]).to(weight.dtype)
                slopes[rows] = p @ weight
            del log_p, p  # before the next logits are made; no view of them is left
        ctx.save_for_backward(*([slopes] if knows_slopes else [hidden, weight, targets]))
        ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        hidden, *others = ctx.saved_tensors
        if not others:
            return (hidden * grad).to(hidden.dtype), *[None] * 5
        weight, targets = others
        by_hidden, by_weight = torch.empty_like(hidden), None
        if ctx.needs_input_grad[1]:
            by_weight = torch.zeros_like(weight, dtype=grad.dtype)
        for rows, log_p in chunks(hidden, weight, *ctx.settings):
            d_logits = slope(log_p.exp_(), targets[rows], grad[rows] / ctx.settings[0])
            d_logits = d_logits.to(weight.dtype)
            by_hidden[rows] = d_logits @ weight
            if by_weight is not None:
                by_weight += d_logits.T @ hidden[rows]
            del log_p, d_logits
        return by_hidden, by_weight, *[None] * 4


def linear_logps(hidden, weight, targets, temperature, banned_id, entropy=False):
    """log softmax(hidden @ weight.T / temperature)[targets], a chunk of logits in memory at a time.

    hidden [N, D] and weight [V, D] of one floating dtype; targets int64 in [0, V), one a row, [N],
    or k, [N, k]; none equal to banned_id: a token with probability 0 (the mask token, which no
    sampler may draw).
    -> logps of the shape of targets (fp32; fp64 for fp64 inputs), and with entropy=True also the
    entropy [N] of each row in nats, which has no gradient. Those of logps by hidden and weight are
    exact. Memory is ROWS x V, and one more copy of hidden for its gradient, whatever N is.
    N = 0 keeps the graph, for ranks without scored rows.

    targets a number k: the k likeliest tokens of each row, the first the most -> logps and ids
    [N, k], without gradient
    """
    settings = temperature, banned_id
    if isinstance(targets, int):
        with torch.no_grad():
            parts = [log_p.topk(targets) for _, log_p in chunks(hidden, weight, *settings)]
        return tuple(map(torch.cat, zip(*parts, strict=True)))
    columns = targets[:, None] if targets.dim() == 1 else targets
    logps, entropies = LinearLogps.apply(hidden, weight, columns, entropy, *settings)
    logps = logps.view_as(targets)
    return (logps, entropies) if entropy else logps


def linear_certainty(hidden, weight, targets, temperature, banned_id, entropy):
    """How sure the model is, with the arguments of linear_logps: log p of the targets (at
    temperature 1), the entropy at `temperature`, and 1 where the target is the most probable token.

    Three [N] in at least fp32, with exact gradients of the first two. A chunk of logits is in
    memory at a time, and is made again in the backward pass.
    """

    def certainty(hidden, targets):
        logits = (hidden @ weight.T).to(at_least_fp32(hidden))
        logits[:, banned_id] = -1e30
        log_q = (logits / temperature).log_softmax(-1)
        nats = F.cross_entropy(logits, targets, reduction="none")
        return torch.stack([-nats, -(log_q.exp() * log_q).sum(-1), logits.argmax(-1) == targets])

    chunked = zip(hidden.split(ROWS // 2), targets.split(ROWS // 2), strict=True)
    parts = [checkpoint(certainty, *chunk, use_reentrant=False) for chunk in chunked]
    return torch.cat(parts, 1).unbind()
