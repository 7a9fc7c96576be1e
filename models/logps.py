"""Log-probabilities of given tokens straight from hidden states and head weight, without ever
holding all logits.
"""

import torch
from torch.autograd.function import once_differentiable


def wide(x):
    """The dtype of a tensor, but at least fp32"""
    return torch.promote_types(x.dtype, torch.float32)


def chunks(hidden, weight, targets, slope, temperature, banned_id, entropy, rows):
    """Yield (rows, output, values [n], their slope by the logits [n, V]) of one chunk after the
    other

    output: 0 for log-probabilities, 1 for entropies. slope=False: leave out the slope of the
    former. At temperature 1 logits stay in the dtype of the model, as in the samplers: softmax
    reads them in fp32 itself. The banned token has probability 0.
    """
    for i in range(0, len(hidden), rows):
        here = slice(i, i + rows)
        logits = hidden[here] @ weight.T
        if temperature != 1:
            logits = logits.to(wide(logits)).div_(temperature)
        if banned_id is not None:
            logits[:, banned_id] = float("-inf")
        if entropy:
            yield here, 1, *entropy_and_slope(logits)
        yield here, 0, *logps_and_slope(logits, targets[here, None], slope)


def logps_and_slope(logits, targets, slope):
    """logits [n, V], targets [n, 1] -> log softmax(logits)[targets] [n] in at least fp32, and its
    derivative by the logits [n, V] in that dtype
    """
    log_p = logits.log_softmax(-1, dtype=wide(logits))
    logps = log_p.gather(-1, targets)
    if slope:  # d log p_y / d z = onehot(y) - p
        slope = log_p.exp_().neg_().scatter_add_(-1, targets, torch.ones_like(logps))
    return logps[:, 0], slope


def entropy_and_slope(logits):
    """Entropies of softmax(logits) [n] in nats, at least fp32, and their derivative by the logits
    [n, V] in that dtype.
    """
    log_p = logits.log_softmax(-1, dtype=wide(logits))
    p = log_p.exp_()
    p_log_p = torch.xlogy(p, p)  # 0 log 0 = 0 for the banned token
    entropies = -p_log_p.sum(-1)
    return entropies, p_log_p.addcmul_(p, entropies[:, None]).neg_()  # d H / d z = -p (log p + H)


class LinearLogps(torch.autograd.Function):
    """Each output depends on its own row alone, so its gradient by that row of hidden states is
    known before the loss is.

    The forward pass keeps this gradient [N, D]; only a trained head computes its logits a second
    time.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, *settings):
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        outputs = [hidden.new_zeros(len(hidden), dtype=wide(hidden)) for _ in range(2)]
        wanted = need_hidden, need_hidden and settings[2]  # of log-probability, of entropy
        slopes = [torch.empty_like(hidden) if want else None for want in wanted]
        for rows, i, values, slope in chunks(hidden, weight, targets, need_hidden, *settings):
            outputs[i][rows] = values
            if need_hidden:
                slopes[i][rows] = slope.div_(settings[0]).to(weight.dtype) @ weight
            del slope  # before the next logits are made
        ctx.save_for_backward(*slopes, *((hidden, weight, targets) if need_weight else ()))
        ctx.settings = settings
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        slopes, grad_hidden, grad_weight = ctx.saved_tensors[:2], None, None
        if ctx.needs_input_grad[0]:
            pairs = [pair for pair in zip(slopes, grads, strict=True) if pair[0] is not None]
            grad_hidden = sum(slope * grad[:, None] for slope, grad in pairs).to(slopes[0].dtype)
        if ctx.needs_input_grad[1]:
            hidden, weight, targets = ctx.saved_tensors[2:]
            grad_weight = torch.zeros_like(weight, dtype=grads[0].dtype)
            for rows, i, _, slope in chunks(hidden, weight, targets, True, *ctx.settings):
                scaled = (grads[i][rows, None] / ctx.settings[0]) * hidden[rows]
                grad_weight += slope.to(weight.dtype).T @ scaled.to(weight.dtype)
                del slope
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *[None] * 5


def linear_logps(
    hidden, weight, targets, *, temperature=1.0, banned_id=None, entropy=False, chunk_rows=1024
):
    """log softmax(hidden @ weight.T / temperature)[targets], `chunk_rows` rows of logits in memory
    at a time.

    hidden [N, D] and weight [V, D] of one floating dtype; targets [N] int64 in [0, V), none equal
    to banned_id. banned_id: a token with probability 0 (the mask token, which no sampler may draw).
    -> logps [N] (fp32; fp64 for fp64 inputs), and with entropy=True also the entropy [N] of each
    row in nats. Gradients with respect to hidden and weight are exact. Memory is chunk_rows x V,
    and one more copy of hidden for its gradient, whatever N is. N = 0 keeps the graph, for ranks
    without scored rows.
    """
    settings = temperature, banned_id, entropy, chunk_rows
    logps, entropies = LinearLogps.apply(hidden, weight, targets, *settings)
    return (logps, entropies) if entropy else logps
