"""Truths that tests compare with: tiny models in fp64, likelihoods by enumeration, losses written
out with the full graph.
"""

import copy
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from models.tiny import TINY_CONFIGS, random_model
from rollout import make_engine
from rollout.rows import Batch, Rows

TINY_SDAR, TINY_LLADA, TINY_DREAM, TINY_LLADA_MOE, TINY_SDAR_MOE, TINY_LLADA2 = (
    TINY_CONFIGS[f"tiny-{name}"] for name in "sdar llada dream llada-moe sdar-moe llada2".split()
)
MASK, EOS = 6, 5
TOKENS = {"vocab_size": 8, "mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": EOS}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
LLADA = {"embedding_size": 8, "d_model": 32, "mlp_hidden_size": 48, "n_layers": 2}
CONFIGS = {
    "sdar": TINY_SDAR | TOKENS | SIZES | HEADS | {"head_dim": 16},
    "llada2": TINY_LLADA2 | TOKENS | SIZES | HEADS | {"head_dim": 16, "rotary_dim": 8},
    "llada": TINY_LLADA | TOKENS | LLADA | {"n_heads": 2, "n_kv_heads": 2},
    "dream": TINY_DREAM | TOKENS | SIZES | HEADS,
}

# of models that have no directory: biases and a tied head; the shift and norms of heads
A2D = {
    "a2d-block": TINY_SDAR | {"model_type": "a2d-qwen2", "tie_word_embeddings": True},
    "a2d-masked": TINY_DREAM | {"model_type": "a2d-qwen3", "block_size": 0, "shift": True},
}


class Group:
    """Stands in a model's `groups` for FSDP2, and keeps which backward passes reduce gradients."""

    def __init__(self):
        self.synced = []

    def set_requires_gradient_sync(self, value, recurse):
        self.synced.append(value)

    set_requires_all_reduce = set_reshard_after_backward = lambda self, value, recurse: None


def updated(module, model, *given):
    """One `update` of a script, the gradient not clipped, whose model is not sharded and takes no
    step. given: rows (of SFT: batch), args. -> metrics, gradient
    """
    *rows, args = given
    found, group = [], {"params": list(model.parameters())}
    optimizer = SimpleNamespace(param_groups=[group], zero_grad=model.zero_grad)
    optimizer.step = lambda: found.append(gradient(model))
    norm = SimpleNamespace(full_tensor=lambda: gradient(model).norm())
    model.zero_grad()
    with mock.patch("torch.nn.utils.clip_grad_norm_", lambda *_: norm):
        return module.update(model, optimizer, *rows, 0, args), *found


def tiny_model(family="sdar", seed=0, shift=0.0, **config):
    """A peaked random model in fp64 with 8 tokens; shift: moves every weight a little."""
    config = CONFIGS[family] | config
    model, eos = random_model(config, seed).double(), config["eos_token_id"]
    model.eos_token_ids, model.pad_token_id = [eos], eos
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            is_head = value.data_ptr() == model.lm_head.weight.data_ptr()
            value.mul_(8 if is_head else 30 if "wte" in name or "embed" in name else 1)
        model.lm_head.weight[eos] = 0  # an EOS that is not too frequent
        for p in model.parameters():
            p.add_(shift * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def few_tokens(family, n):
    """Settings of a model with n tokens, the EOS and the mask the last of them."""
    ids = {"vocab_size": n, "mask_token_id": n - 1, "eos_token_id": n - 2, "pad_token_id": n - 2}
    return ids | ({"embedding_size": n} if family == "llada" else {})


def changed(thing, **fields):
    """A copy with other attributes."""
    thing = copy.copy(thing)
    for name, value in fields.items():
        setattr(thing, name, value)
    return thing


def small_args(module, **fields):
    """Args of a script for tiny rollouts; fields that its method does not have are left out."""
    small = {"num_generations": 4, "gen_length": 8, "denoising_steps": 2, "branches": (2, 2)}
    small |= {"num_iterations": 2, "micro_batch_size": 5, "temperature": 1.0, "mc_num": 2}
    small |= {"teacher_top_k": 3} | fields
    known = module.Args.__dataclass_fields__
    return module.Args(**{name: value for name, value in small.items() if name in known})


PROMPTS = (4, 1, 2, 3, 0, 1), (1, 2, 3), (2, 2)


def rollout_batch(module, model, args, prompts=PROMPTS, sample_offset=0, rewards=None):
    """A rollout of ragged prompts: advantages of both signs, and the last group dead, unless the
    rewards of each group are given.
    """
    G, engine = args.num_generations, make_engine(model)
    names = ("gen_length", "denoising_steps", "temperature", "remasking")
    how = {name: getattr(args, name) for name in names} | {"records": module.RECORDS, "seed": 6}
    generate = lambda prompts, **how: engine.generate(prompts, **how)
    if hasattr(module, "sample_trees"):
        generate = lambda prompts, **how: module.sample_trees(engine, args, prompts, **how)
    trace = generate([list(p) for p in prompts], num_samples=G, sample_offset=sample_offset, **how)
    batch = Batch(trace, model)
    given = rewards or [[1.0, 0.0, 0.0, 1.0]] * (len(prompts) - 1) + [[1.0] * 4]
    rewards = torch.tensor(given).double()[:, :G].flatten()
    batch.rewards = rewards.clamp(min=0.5)  # not wrong, yet not right
    if module.RECORDS == "states":  # one for every step
        rewards = rewards[:, None] * torch.arange(1, trace.num_replays + 1)
    batch.advantages, batch.progress = module.compute_advantages(rewards, args), 0.4
    return batch


def made_batch(input_ids, completion_mask, block_ids=None, block_length=4, mask=MASK):
    """A batch without a rollout. input_ids [B, T], completion_mask [B, L]"""
    B, L = completion_mask.shape
    settings = {"block_length": block_length, "seed": 3}
    return changed(
        Batch.__new__(Batch),
        trace=SimpleNamespace(settings=settings, sample_index=torch.arange(B)),
        input_ids=input_ids,
        valid_mask=torch.ones_like(input_ids, dtype=torch.bool),
        completion_mask=completion_mask,
        block_ids=torch.zeros(B, L, dtype=torch.long)
        if block_ids is None
        else block_ids.contiguous(),
        P=input_ids.shape[1] - L,
        mask_token_id=mask,
        num_tokens=float(completion_mask.sum()),
        num_sequences=float(B),
        advantages=torch.ones(B),
    )


def made_rows(weights, advantages):
    """Rows for a loss or an estimate alone. weights [R, K, L]"""
    weights = torch.as_tensor(weights, dtype=torch.float64)
    R, K, L = weights.shape
    c = (weights != 0).any(1)
    batch = made_batch(torch.zeros(R, L, dtype=torch.long), c)
    batch.advantages = torch.as_tensor(advantages, dtype=torch.float64)
    return changed(Rows(batch, weights != 0, weights), weights=weights)


def log_probs(model, ids):
    """[B, T] -> [B, T, V], the mask token never predicted"""
    with torch.no_grad():
        logits = model.logits(ids)
    logits[..., model.mask_token_id] = -math.inf
    return logits.log_softmax(-1)


def exact_elbo(model, prompt, completion):
    """Mean over all orders of sum_k log p(y_order[k] | prompt, y_order[<k]) inside each block,
    blocks left to right.

    Independent of masks, counts and weights: what every unbiased estimator must give on average.
    """
    n, ids, total = model.block_length, [*prompt, *completion], 0.0
    for start in range(len(prompt) // n * n, len(ids), n):
        where = [i for i in range(start, min(start + n, len(ids))) if i >= len(prompt)]
        subsets = [s for size in range(len(where)) for s in itertools.combinations(where, size)]
        padded, mask = ids + [model.mask_token_id] * n, model.mask_token_id
        shown = lambda i, known: padded[i] if i < where[0] or i in known else mask  # noqa: B023
        states = [[shown(i, known) for i in range(start + n)] for known in subsets]
        logps = dict(zip(subsets, log_probs(model, torch.tensor(states)), strict=True))
        orders = list(itertools.permutations(where))
        for order in orders:
            for k, i in enumerate(order):
                total += logps[tuple(sorted(order[:k]))][i, ids[i]].item() / len(orders)
    return total


class OneBlock:
    """All completions of one block of 4 over 5 usable tokens: 625, 24 orders, 15 masks."""

    prompt, mask = [1, 2, 0, 3], 5
    completions = torch.tensor(list(itertools.product(range(5), repeat=4)))
    patterns = torch.tensor([p for p in itertools.product([False, True], repeat=4) if any(p)])
    # probability of each mask: m uniform on 1..4, then a subset of that size; 48 times it is whole
    chances = torch.tensor([1 / (4 * math.comb(4, int(p.sum()))) for p in patterns]).double()
    times = (48 * chances).round().long()

    def __init__(self, family="sdar"):
        self.model = tiny_model(family, **few_tokens(family, 6))
        self.ids = torch.cat([torch.tensor([self.prompt] * 625), self.completions], 1)

    def by_order(self):
        """-> [24, 625] log-probability of each completion revealed in that order"""
        states = torch.tensor(list(itertools.product(range(6), repeat=4)))
        prompts = torch.tensor([self.prompt] * len(states))
        logps = log_probs(self.model, torch.cat([prompts, states], 1))[:, 4:]  # [1296, 4, V]
        y, base, values = self.completions, torch.tensor([216, 36, 6, 1]), []
        for order in itertools.permutations(range(4)):
            shown, value = torch.full_like(y, 5), 0
            for i in order:
                value = value + logps[(shown * base).sum(1), i, y[:, i]]
                shown[:, i] = y[:, i]
            values.append(value)
        return torch.stack(values)

    def by_mask(self):
        """-> [15, 625, 4] log-probabilities of the tokens that each mask hides, 0 elsewhere"""
        found = []
        for pattern in self.patterns:
            masked = torch.cat([torch.zeros(4, dtype=torch.bool), pattern]).expand(625, -1)
            logps = log_probs(self.model, torch.where(masked, 5, self.ids))
            found.append(logps.gather(2, self.ids[..., None])[:, 4:, 0] * pattern)
        return torch.stack(found)


def row_logps(model, clean, noisy, temperature=1.0):
    """Log-probabilities of every token at every place of one row, [T] ids -> [T, V], by passes over
    [clean blocks before, noisy block]; for bidirectional models over the noisy row.
    """
    size = model.block_length if model.attention == "block-causal" else len(clean)
    rows = [
        torch.cat([clean[:start], noisy[start : start + size]])
        for start in range(0, len(clean), size)
    ]
    logits = torch.cat([model.logits(ids[None])[0, i * size :] for i, ids in enumerate(rows)])
    is_mask = torch.arange(logits.shape[-1]) == model.mask_token_id
    return (logits / temperature).masked_fill(is_mask, -math.inf).log_softmax(-1)


def log_p_of(model, clean, noisy, valid, temperature=1.0):
    """`row_logps` of every row of every copy alone, [R, T], [R, K, T], [R, T] -> [R, K, T, V], 0 at
    padding.
    """
    found = torch.zeros(*noisy.shape, model.lm_head.out_features, dtype=torch.float64)
    for r, k in itertools.product(*map(range, noisy.shape[:2])):
        at = valid[r]
        found[r, k, at] = row_logps(model, clean[r, at], noisy[r, k, at], temperature)
    return found


def naive_logps(model, rows):
    """draw_logps with a forward and a graph for every block of every draw. -> [R, K, L]"""
    clean, w, valid = rows.input_ids[:, None], rows.weights, rows.valid_mask
    noisy, L = torch.where(rows.masked, MASK, clean), w.shape[2]
    log_p = log_p_of(model, rows.input_ids, noisy, valid, rows.temperature)[:, :, -L:]
    targets = clean[..., -L:].expand_as(w) if rows.targets is None else rows.targets
    return torch.where(w != 0, log_p.gather(3, targets[..., None])[..., 0], 0.0)


def distillation(model, teacher, rows, args):
    """d-OPSD's loss from its paper, of rows as the teacher sees them."""
    loss, prompts = 0.0, rows.batch.num_sequences / args.num_generations
    given, L = (rows.input_ids, rows.valid_mask), rows.weights.shape[2]
    p, q = (
        log_p_of(one, given[0], torch.where(masked, MASK, given[0][:, None]), given[1])[:, :, -L:]
        for one, masked in ((model, rows.student), (teacher, rows.masked))
    )
    for r, k in itertools.product(*map(range, rows.masked.shape[:2])):
        here = rows.weights[r, k] * rows.advantages[r]
        places = sorted(here.nonzero()[:, 0].tolist(), key=lambda i: -q[r, k, i].max())  # noqa: B023
        for i in places[: int(rows.revealed[r, k])]:
            top = q[r, k, i].topk(args.teacher_top_k).indices
            a, b = (x[r, k, i, top] - x[r, k, i, top].logsumexp(0) for x in (p, q))
            loss += here[i] * (a.exp() * (a - b)).clamp(max=args.kl_clip).sum() / prompts
    return loss


def full_graph_loss(module, model, rows, args):
    """An online method's loss written a second time, from its paper, on one graph of all rows."""
    if module.__name__ == "algos.opsd":
        return distillation(model, rows.ref, rows, args)
    lp, w, c = naive_logps(model, rows), rows.weights, rows.completion_mask.double()
    old, name, tokens = rows.old, module.__name__.split(".")[-1], rows.batch.num_tokens
    sequences, A = rows.batch.num_sequences, rows.advantages.view(-1, *[1] * (old.dim() - 1))

    def clipped(score, share, A=A, ref=rows.ref, beta=args.beta, scale=1):
        ratio, delta = (score - old).exp(), ref - score
        kl = delta**2 / 2 if name == "mdpo" else delta.exp() - delta - 1
        limited = ratio.clamp(1 - args.epsilon, 1 + args.epsilon)
        return (share * (beta * kl - scale * torch.minimum(ratio * A, limited * A))).sum()

    if name in ("d1", "coupled_grpo"):
        return clipped((w * lp).sum(1), c / tokens)
    if name == "justgrpo":
        return clipped(lp, w / tokens)
    if name in ("cj_grpo", "tpg"):
        return clipped(lp, w / sequences)
    if name == "mdpo":
        return clipped(
            lp[:, 0], w[:, 0] / sequences, scale=c.shape[1] / rows.masked.sum(2).double()
        )
    if name == "tracerl":  # an advantage for each token
        A = rows.batch.token_advantages[rows.sequence, None]
        right = w * (rows.batch.rewards == 1)[rows.sequence, None, None]
        nll = -(right * lp).sum() / right.sum()  # row_mean: of rows
        to_old = clipped(lp, w / rows.total, 0, old, args.kl_to_old)
        return clipped(lp, w / rows.total, A) + to_old + args.nll_weight * nll
    if name == "dtreerpo":
        return clipped(lp[:, 0], w[:, 0]) - (rows.sibling_weights * lp[:, 0]).sum()
    if name == "bgpo":
        d = (w * lp).sum(2) - old
        return -torch.where(A >= 0, A * (1 + d), A * d.exp()).sum() / sequences / args.mc_num
    if name == "wd1":
        return -(A * lp[:, 0]).sum() * args.num_generations / sequences
    elbo = (w * lp).sum(2).mean(1)
    if name in ("espo", "gdpo", "ebpo"):  # ratio and KL per token; EBPO's of the whole
        n, elbo = 1 if name == "ebpo" else c.sum(1), elbo * (args.mc_num if name == "gdpo" else 1)
        ratio = ((elbo - old) / n).exp()
        limited = ratio.clamp(1 - args.epsilon, 1 + args.epsilon)
        kl = args.beta * (elbo - rows.ref) ** 2 / (2 * n)
        return (kl - torch.minimum(ratio * A, limited * A)).sum() / sequences
    assert name in ("spg", "stabledrl"), f"write the loss of {name} from its paper here"
    powers = (w * lp.exp() ** args.eubo_beta).mean(1)  # [R, L], 0 where no draw masks
    logs = torch.where(powers > 0, powers, 1).log().sum(1) / args.eubo_beta
    mixed = args.omega * logs / (powers > 0).sum(1) * c.sum(1) + (1 - args.omega) * elbo
    gain = rows.advantages * torch.where(rows.advantages > 0, elbo, mixed)
    if name == "spg":
        return -gain.sum() / tokens
    ratio = (elbo / c.sum(1) - old[:, 0]).detach().exp().clamp(max=args.clip_ratio).view(-1, 4)
    shares = 4 * ratio / ratio.sum(1, keepdim=True)
    return -(shares.flatten() * gain / c.sum(1)).sum() / sequences


def gradient(model, loss=None, again=False):
    """All gradients as one vector: of a loss, whose graph stays if it is used again, or those that
    the parameters hold.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    of = lambda loss: torch.autograd.grad(loss, parameters, retain_graph=again)
    grads = [p.grad for p in parameters] if loss is None else of(loss)
    return torch.cat([grad.flatten() for grad in grads]).clone()


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def peak_of_graphs(action):
    """Most bytes that autograd held for backward passes at one time."""
    held = {"now": 0, "peak": 0}

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor
            held["now"] += tensor.nbytes
            held["peak"] = max(held["peak"], held["now"])

        def __del__(self):
            held["now"] -= self.tensor.nbytes

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        action()
    return held["peak"]


# --- released code: its values on a tiny LLaDA with these prompts of 6 and completions of 12 tokens

RELEASED = json.loads((Path(__file__).parent / "golden/released.json").read_text())
TEXT = torch.tensor(RELEASED["text"])


def codes_of(masks):
    """A digit for each token of the draws of rows -> [R, K, T]"""
    return torch.tensor([[[*map(int, draw)] for draw in rows] for rows in masks])


def tilted(tilt=0.0, config=TINY_LLADA):
    """A tiny model; tilt: how far it is from the first."""
    model = random_model(config)
    with torch.no_grad():
        ramp = torch.linspace(-1, 1, model.lm_head.weight.shape[1])
        model.lm_head.weight.mul_(10 * (1 + tilt * ramp))
    return model


def estimates_of(module, model, rows, args):
    with torch.no_grad():
        return module.estimate_logps(module.draw_logps(model, rows), rows, args)


def assert_released(loss, norm, module, rows, args):
    """An update on the rows has the loss, and the norm of the gradient, of the released code."""
    metrics, grads = updated(module, tilted(), rows, args)
    assert metrics["loss/total"] == pytest.approx(loss, abs=1e-5)
    assert grads.norm().item() == pytest.approx(norm, rel=1e-5)
