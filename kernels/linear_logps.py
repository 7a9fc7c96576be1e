"""Log-probabilities of given tokens straight from hidden states and head weight, without ever holding all logits."""

import torch
from torch.autograd.function import once_differentiable


def _chunk_logits(hidden, weight, temperature, banned_id):
    """[n, D] x [V, D] -> logits [n, V] / temperature in at least fp32; the banned token has probability 0."""
    logits = hidden @ weight.T  # in the dtype of the model, as the engines compute it
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1:
        logits /= temperature  # in place, as below: a chunk is the largest thing in memory
    if banned_id is not None:
        logits[:, banned_id] = float("-inf")
    return logits


class _LinearLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, banned_id, entropy, chunk_rows):
        accumulate = torch.promote_types(hidden.dtype, torch.float32)
        logps, lse, entropies = (torch.zeros(len(hidden), dtype=accumulate, device=hidden.device) for _ in range(3))
        for i in range(0, len(hidden), chunk_rows):
            rows = slice(i, i + chunk_rows)
            logits = _chunk_logits(hidden[rows], weight, temperature, banned_id)
            lse[rows] = logits.logsumexp(-1)
            logps[rows] = logits.gather(-1, targets[rows, None])[:, 0] - lse[rows]
            if entropy:
                log_p = logits - lse[rows, None]
                entropies[rows] = -torch.xlogy(log_p.exp(), log_p.exp()).sum(-1)  # 0 log 0 = 0 for the banned token
        ctx.save_for_backward(hidden, weight, targets, lse, entropies)
        ctx.settings = temperature, banned_id, entropy, chunk_rows
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logps, grad_entropies):
        hidden, weight, targets, lse, entropies = ctx.saved_tensors
        temperature, banned_id, entropy, chunk_rows = ctx.settings
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=lse.dtype, device=weight.device) if need_weight else None
        for i in range(0, len(hidden), chunk_rows):
            rows = slice(i, i + chunk_rows)
            p = _chunk_logits(hidden[rows], weight, temperature, banned_id).sub_(lse[rows, None]).exp_()
            by_entropy = grad_entropies[rows, None] * (torch.xlogy(p, p) + p * entropies[rows, None]) if entropy else None
            slope = p.mul_(-grad_logps[rows, None])  # d logp_y / d z = onehot(y) - p
            slope[torch.arange(len(p), device=p.device), targets[rows]] += grad_logps[rows]
            if entropy:  # d H / d z = -p (log p + H)
                slope -= by_entropy
            slope = (slope if temperature == 1 else slope.div_(temperature)).to(weight.dtype)
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
