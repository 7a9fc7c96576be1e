"""Log-probabilities of given tokens straight from hidden states and head weight, without ever holding all logits."""

import torch
from torch.autograd.function import once_differentiable


def _chunk_logits(hidden, weight, temperature, banned_id):
    """[n, D] x [V, D] -> logits [n, V] / temperature; the banned token has probability 0.

    At temperature 1 they stay in the dtype of the model, as the engines compute them: softmax reads them in fp32 itself.
    """
    logits = hidden @ weight.T
    if temperature != 1:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)
    if banned_id is not None:
        logits[:, banned_id] = float("-inf")
    return logits


class _LinearLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, banned_id, entropy, chunk_rows):
        accumulate = torch.promote_types(hidden.dtype, torch.float32)
        logps, entropies = (torch.zeros(len(hidden), dtype=accumulate, device=hidden.device) for _ in range(2))
        for i in range(0, len(hidden), chunk_rows):
            rows = slice(i, i + chunk_rows)
            log_p = _chunk_logits(hidden[rows], weight, temperature, banned_id).log_softmax(-1, dtype=accumulate)
            logps[rows] = log_p.gather(-1, targets[rows, None])[:, 0]
            if entropy:
                p = log_p.exp_()
                entropies[rows] = -torch.xlogy(p, p).sum(-1)  # 0 log 0 = 0 for the banned token
        ctx.save_for_backward(hidden, weight, targets, entropies)
        ctx.settings = temperature, banned_id, entropy, chunk_rows, accumulate
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logps, grad_entropies):
        hidden, weight, targets, entropies = ctx.saved_tensors
        temperature, banned_id, entropy, chunk_rows, accumulate = ctx.settings
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=accumulate, device=weight.device) if need_weight else None
        for i in range(0, len(hidden), chunk_rows):
            rows = slice(i, i + chunk_rows)
            grad, target = grad_logps[rows, None] / temperature, targets[rows, None]
            p = _chunk_logits(hidden[rows], weight, temperature, banned_id).softmax(-1, dtype=accumulate)
            at_target = (1 - p.gather(-1, target)) * grad  # d logp_y / d z = onehot(y) - p
            if entropy:  # d H / d z = -p (log p + H)
                slope = torch.xlogy(p, p).addcmul_(p, entropies[rows, None]).mul_(-grad_entropies[rows, None] / temperature)
                at_target += slope.gather(-1, target)
                slope = slope.addcmul_(p, grad, value=-1).to(weight.dtype)
            else:
                slope = torch.mul(p, -grad, out=torch.empty_like(p, dtype=weight.dtype))  # rounded once, without a copy
            slope.scatter_(-1, target, at_target.to(weight.dtype))
            if need_hidden:
                grad_hidden[rows] = slope @ weight
            if need_weight:
                grad_weight += slope.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype) if need_weight else None, None, None, None, None, None


def linear_logps(hidden, weight, targets, *, temperature=1.0, banned_id=None, entropy=False, chunk_rows=1024):
    """log softmax(hidden @ weight.T / temperature)[targets], `chunk_rows` rows of logits in memory at a time.

    hidden [N, D] and weight [V, D] of one floating dtype; targets [N] int64 in [0, V), none equal to banned_id.
    banned_id: a token that gets probability 0 before normalising (the mask token, which no sampler may draw).
    -> logps [N] (fp32; fp64 for fp64 inputs), and with entropy=True also the entropy [N] of each row in nats.
    Gradients with respect to hidden and weight are exact; the logits are computed again in the backward pass, so that memory
    is chunk_rows x V whatever N is. N = 0 keeps the graph, for ranks without scored rows.
    """
    logps, entropies = _LinearLogps.apply(hidden, weight, targets, temperature, banned_id, entropy, chunk_rows)
    return (logps, entropies) if entropy else logps
