"""Log-probabilities of given tokens straight from hidden states and head weight, without ever holding all logits."""

import torch
from torch.autograd.function import once_differentiable


def chunk_logits(hidden, weight, temperature, banned_id):
    """[n, D] x [V, D] -> logits [n, V] / temperature, in which the banned token has probability 0

    At temperature 1 they stay in the dtype of the model, as in the samplers: softmax reads them in fp32 itself.
    """
    logits = hidden @ weight.T
    if temperature != 1:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)
    if banned_id is not None:
        logits[:, banned_id] = float("-inf")
    return logits


def logps_and_slope_(logits, targets, slope=True):
    """log softmax(logits)[targets] [n] in at least fp32, and its derivative by the logits [n, V] in their dtype.

    logits [n, V] are overwritten. slope=False: None in place of the derivative.
    """
    log_p = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    logps = log_p.gather(-1, targets[:, None])
    if not slope:
        return logps[:, 0], None
    p = log_p.exp_()
    at_target = 1 - p.gather(-1, targets[:, None])  # d log p_y / d z = onehot(y) - p
    slope = torch.neg(p, out=logits) if p.dtype == logits.dtype else logits.copy_(p).neg_()
    return logps[:, 0], slope.scatter_(-1, targets[:, None], at_target.to(slope.dtype))


def entropy_and_slope(logits):
    """Entropies of softmax(logits) [n] in nats, at least fp32, and their derivative by the logits [n, V] in that dtype."""
    log_p = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    p = log_p.exp_()
    p_log_p = torch.xlogy(p, p)  # 0 log 0 = 0 for the banned token
    entropies = -p_log_p.sum(-1)
    return entropies, p_log_p.addcmul_(p, entropies[:, None]).neg_()  # d H / d z = -p (log p + H)


class LinearLogps(torch.autograd.Function):
    """Each output depends on its own row alone, so its gradient by that row of hidden states is known before the loss is.

    The forward pass keeps this gradient [N, D]; only a trained head computes its logits a second time.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, *settings):
        temperature, banned_id, entropy, chunk_rows, logps_and_slope = settings
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        accumulate = torch.promote_types(hidden.dtype, torch.float32)
        outputs = [hidden.new_zeros(len(hidden), dtype=accumulate) for _ in range(2)]
        slopes = [
            torch.empty_like(hidden) if need_hidden and wanted else None
            for wanted in (True, entropy)
        ]
        for i in range(0, len(hidden), chunk_rows):
            rows = slice(i, i + chunk_rows)
            logits = chunk_logits(hidden[rows], weight, temperature, banned_id)
            if entropy:
                outputs[1][rows], slope = entropy_and_slope(logits)
                if need_hidden:
                    slopes[1][rows] = (slope / temperature).to(weight.dtype) @ weight
            outputs[0][rows], slope = logps_and_slope(logits, targets[rows], need_hidden)
            if need_hidden:
                slopes[0][rows] = slope.div_(temperature).to(weight.dtype) @ weight
        ctx.save_for_backward(*slopes, *((hidden, weight, targets) if need_weight else ()))
        ctx.settings = settings
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        slopes, grad_hidden, grad_weight = ctx.saved_tensors[:2], None, None
        temperature, banned_id, entropy, chunk_rows, logps_and_slope = ctx.settings
        if ctx.needs_input_grad[0]:
            pairs = [(slope, grad) for slope, grad in zip(slopes, grads) if slope is not None]  # noqa: B905
            grad_hidden = sum(slope * grad[:, None] for slope, grad in pairs).to(slopes[0].dtype)
        if ctx.needs_input_grad[1]:
            hidden, weight, targets = ctx.saved_tensors[2:]
            grad_weight = torch.zeros_like(weight, dtype=grads[0].dtype)
            for i in range(0, len(hidden), chunk_rows):
                rows = slice(i, i + chunk_rows)
                logits = chunk_logits(hidden[rows], weight, temperature, banned_id)
                scaled = [
                    ((grad[rows, None] / temperature) * hidden[rows]).to(weight.dtype)
                    for grad in grads
                ]
                if entropy:
                    grad_weight += entropy_and_slope(logits)[1].to(weight.dtype).T @ scaled[1]
                slope = logps_and_slope(logits, targets[rows], True)[1]
                grad_weight += slope.to(weight.dtype).T @ scaled[0]
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *[None] * 6


def linear_logps(
    hidden, weight, targets, *, temperature=1.0, banned_id=None, entropy=False, chunk_rows=1024, logps_and_slope=logps_and_slope_
):  # fmt: skip
    """log softmax(hidden @ weight.T / temperature)[targets], `chunk_rows` rows of logits in memory at a time.

    hidden [N, D] and weight [V, D] of one floating dtype; targets [N] int64 in [0, V), none equal to banned_id.
    banned_id: a token with probability 0 (the mask token, which no sampler may draw). logps_and_slope: the function above, or
    a faster one that does the same.
    -> logps [N] (fp32; fp64 for fp64 inputs), and with entropy=True also the entropy [N] of each row in nats.
    Gradients with respect to hidden and weight are exact. Memory is chunk_rows x V, and one more copy of hidden for its
    gradient, whatever N is. N = 0 keeps the graph, for ranks without scored rows.
    """
    settings = temperature, banned_id, entropy, chunk_rows, logps_and_slope
    logps, entropies = LinearLogps.apply(hidden, weight, targets, *settings)
    return (logps, entropies) if entropy else logps
