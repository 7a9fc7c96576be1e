"""TPG: the gradient of the expected reward by enumeration."""

import itertools
import math

import pytest
import torch
from oracles import changed, few_tokens, gradient, relative, tiny_model
from test_samplers import exact_distribution

from algos import tpg
from rollout import make_engine
from rollout.engine import REMASKING
from rollout.rows import Batch

EOS, MASK, T = 2, 3, 0.6  # tokens 0, 1 and EOS; a low temperature
PROMPT, SIZE = [1, 0, 0, 1], {"sdar": {"block_size": 2}}


pytestmark = pytest.mark.usefixtures("one_rank")


def reward(completion):
    """Any function of the tokens up to the EOS."""
    ids = itertools.takewhile(lambda token: token != EOS, completion)
    return math.sin(sum(4**k * (token + 1) for k, token in enumerate(ids)))


def every_path(model, rule):
    """A rollout in which sample i draws the digits of i: each path of the sampler, some of them
    more than once.
    """
    digits = torch.tensor(list(itertools.product(*[range(2)] * 2, *[range(3)] * 6)))
    samples = len(digits) if rule == "random" else 3**6  # those of one order

    def digit(step, use, state):
        sample, offset = state // 8, state % 8 - 4
        block = offset.clamp(min=0) // 2
        if use == "order":
            return (digits[sample, block] == offset % 2).double()
        # a block's second step has one mask at most
        return digits[sample, 2 + 3 * block + (offset % 2 if step == 0 else 2)].double()

    def draw(logits, digit, temperature):
        logps, tokens = (logits / temperature).log_softmax(-1), digit.long()
        entropies = torch.special.entr(logps.exp()).sum(-1)
        return tokens, logps.gather(1, tokens[:, None])[:, 0], entropies

    engine = make_engine(model, max_batch_size=samples)
    engine.sample_categorical = draw
    with pytest.MonkeyPatch.context() as patch:
        state = lambda seed, sample, offset: 8 * sample + offset + 4
        patch.setattr("rollout.engine.keyed_state", state)
        patch.setattr("rollout.engine.keyed_uniform", digit)
        return engine.generate(
            [PROMPT], num_samples=samples, gen_length=4, block_length=2, denoising_steps=2,
            temperature=T, remasking=rule, confidence_threshold=0.5, records="draws",
        )  # fmt: skip


CASES = [("sdar", rule) for rule in REMASKING]
CASES += [("llada", rule) for rule in (*REMASKING[:2], "entropy")] + [("dream", REMASKING[0])]


@pytest.mark.parametrize("family, rule", CASES)
def test_the_expected_gradient_is_that_of_the_expected_reward(family, rule):
    """Without the draws that were not revealed, as in CJ-GRPO, it is another where confidences
    decide.
    """
    model = tiny_model(family, 1, **few_tokens(family, 4) | SIZE.get(family, {}))
    trace = every_path(model, rule)
    args, batch = tpg.Args(temperature=T, remasking=rule), Batch(trace, model)
    rewards = [reward(trace.completion(i)) for i in range(len(trace.prompt_ids))]
    batch.advantages = torch.tensor(rewards).double()
    rows = tpg.sample_masks(batch, 0, args)
    logps, scored = tpg.draw_logps(model, rows), rows.weights != 0
    # sample i stands for a share 3^-draws of the paths
    rows.advantages *= ((logps + math.log(3)) * scored).sum((1, 2)).exp().detach()
    steps = [(range(2), 1)] * 2 + [(range(2, 4), 1)] * 2  # a token each, of two blocks
    chances = exact_distribution(model, PROMPT, steps, rule, 0.5, T)
    want = gradient(model, sum(chance * reward(ids) for ids, chance in chances.items()))

    def error(rows):
        loss, _ = tpg.policy_loss(logps, logps.detach(), None, rows, args)
        return relative(-gradient(model, loss, True), want)

    assert error(rows) < 1e-6
    draws = trace.records["tokens"]
    shown = trace.replay_map[:, None] == torch.arange(draws.shape[1])[:, None]
    trace.records["tokens"] = draws.where(shown, -1)
    few = changed(rows, weights=tpg.sample_masks(batch, 0, args).weights)
    assert (error(few) > 0.05) if rule.startswith("low") else (error(few) < 1e-6)
