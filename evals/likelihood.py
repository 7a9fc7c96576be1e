"""Likelihoods of given text, without sampling: for --likelihood and --text of evals/run.py.
docs/evals.md compares with published procedures.
"""

from math import isfinite
from os.path import commonprefix

import torch

from evals.examples import user
from rollout.rows import choose_in_blocks
from rollout.sampling import keyed_uniform


@torch.no_grad()
def elbo(model, P, ids, mc_num, batch_size, *key):
    """Unbiased estimate of a lower bound of log p(other ids | the first P), in nats. Of a single
    token one draw is enough, and exact.

    A draw masks m of the k other tokens of each likelihood block, m uniform on 1..k, and sums their
    log-probabilities times k / m. A block is given those before it, so the bounds of blocks add up;
    a bidirectional model has one block. Behind the ids the last block stays masked, as in sampling.
    The mc_num draws are keyed by `key`, and stratified in m. batch_size: of them in a forward.
    """
    n = model.block_length if model.attention == "block-causal" else 1
    device, mask, end = model.lm_head.weight.device, model.mask_token_id, len(ids)
    ids = torch.tensor([ids + [mask] * (-end % n)], device=device)
    column = torch.arange(ids.shape[1], device=device)[None]
    scored, block = (column >= P) & (column < end), model.grid(ids >= 0)[1]
    draws, level, total = mc_num if end > P + 1 else 1, keyed_uniform(*key, "level", block), 0
    for draw in torch.arange(draws, device=device)[:, None].split(batch_size):
        u, noise = (level + draw / draws) % 1, keyed_uniform(*key, "noise", draw, column)
        chosen, k, m = choose_in_blocks(scored.expand_as(u), block.expand_as(u), u, noise)
        logps = model.logps(ids, torch.where(chosen, mask, ids)[None], chosen[None])[0]
        total += (logps * k / m).sum().item() / draws
    if not isfinite(total):
        raise SystemExit("a likelihood is not finite: damaged weights, or the mask token as text")
    return total


def readable(engine):
    """-> its model. SystemExit if the engine has no log-probabilities."""
    if engine.records == (None,):
        raise SystemExit("likelihoods are not for autoregressive models, nor lmdeploy's engine")
    return engine.model


def encode(model, tokenizer, text):
    """-> ids. A model with the shift, which predicts no first token, gets the BOS in front of them,
    as Dream's authors give it."""
    bos = model.shift and tokenizer.bos_token
    return tokenizer((bos or "") + text)["input_ids"]


def likeliest(model, tokenizer, task, mc_num, batch_size, seed, i, example):
    """The row of example i, without a score. Its completion is the one of task.choices(example) ->
    text, {completion: what follows the text}, that is most likely per character: lm-eval's
    acc_norm; letters have one character each."""
    (text, choices), nats = task.choices(example), {}
    given = encode(model, tokenizer, text)
    for name, more in choices.items():
        ids = encode(model, tokenizer, text + more)  # a token may span both
        P = len(commonprefix([given, ids]))
        value = elbo(model, P, ids, mc_num, batch_size, seed, "choice", i)
        nats[name] = value / (len(more.strip()) or 1)
    best = max(nats, key=nats.get)
    return {"index": i, "sample": 0, "prompt": user(text), "completion": best, "nats": nats}
