"""TPG: the gradient of the expected reward by enumeration, its random steps, its inner loop."""

import itertools
import math

import pytest
import torch
from oracles import changed, full_graph_loss, gradient, relative, rollout_batch, tiny_model
from test_samplers import naive_rule, naive_score

from algos import tpg
from rollout import make_engine
from rollout.engine import REMASKING

EOS, MASK, T = 2, 3, 0.6  # tokens 0, 1 and EOS; a low temperature
IDS = {"vocab_size": 4, "mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": EOS}
OWN = {"sdar": {"block_size": 2}, "llada": {"embedding_size": 4}, "dream": {}}
PROMPT = [1, 0, 0, 1]


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    as_floats = lambda values: {name: float(value) for name, value in values.items()}
    monkeypatch.setattr(tpg, "all_reduce", as_floats)
    monkeypatch.setattr(tpg, "maximum", int)


def reward(completion):
    """Any function of the tokens up to the EOS."""
    ids = list(itertools.takewhile(lambda token: token != EOS, completion))
    return math.sin(7 * len(ids) + sum(3**k * token for k, token in enumerate(ids)))


def expected_reward(model, rule, threshold):
    """With its graph: every draw at every mask of two blocks of two tokens, a step for each."""
    states = list(itertools.product(range(4), repeat=4))
    logits = model.logits(torch.tensor([PROMPT + list(state) for state in states]))[:, 4:, :MASK]
    p_of = dict(zip(states, (logits / T).softmax(-1), strict=True))
    now = {(MASK,) * 4: torch.ones((), dtype=torch.float64)}
    for step in range(4):
        later = {}
        for state, chance in now.items():
            masked = [j for j in (step // 2 * 2, step // 2 * 2 + 1) if state[j] == MASK]
            for draw in itertools.product(range(3), repeat=len(masked)):
                p, token = p_of[state], dict(zip(masked, draw, strict=True))
                scores = {
                    j: naive_score(rule, p[j].tolist(), p[j, v].log().item(), 0)
                    for j, v in token.items()
                }
                choices = [naive_rule(scores, masked, 1, rule, threshold, 0, 0)]
                if rule == "random" and masked:
                    choices = [[j] for j in masked]
                share = math.prod((p[j, v] for j, v in token.items()), start=chance) / len(choices)
                for chosen in choices:
                    new = tuple(token[j] if j in chosen else state[j] for j in range(4))
                    later[new] = later.get(new, 0.0) + share
        now = later
    return sum(chance * reward(state) for state, chance in now.items())


def every_path(model, rule, threshold):
    """A rollout in which sample i draws the digits of i: each path of the sampler, some of them
    more than once.
    """
    digits = torch.tensor(list(itertools.product(*[range(2)] * 2, *[range(3)] * 6)))
    samples = len(digits) if rule == "random" else 3**6  # those of one order

    def digit(seed, sample, offset, step, use):
        block = offset.clamp(min=0) // 2
        if use == "order":
            return (digits[sample, block] == offset % 2).double()
        # a block's second step has one mask at most
        return digits[sample, 2 + 3 * block + (offset % 2 if step == 0 else 2)].double()

    def draw(logits, digit, temperature, entropy):
        logps, tokens = (logits / temperature).log_softmax(-1), digit.long()
        more = [torch.special.entr(logps.exp()).sum(-1)] if entropy else []
        return tokens, logps.gather(1, tokens[:, None])[:, 0], *more

    engine = make_engine(model, max_batch_size=samples)
    engine.keyed_uniform, engine.sample_categorical = digit, draw
    return engine.generate(
        [PROMPT], num_samples=samples, gen_length=4, block_length=2, denoising_steps=2,
        temperature=T, remasking=rule, confidence_threshold=threshold, records="draws",
    )  # fmt: skip


CASES = [(family, rule) for family in ("sdar", "llada") for rule in (*REMASKING, "entropy")]


@pytest.mark.parametrize("family, rule", [*CASES, ("dream", "low_confidence_static")])
def test_the_expected_gradient_is_that_of_the_expected_reward(family, rule):
    """Also by differences of the reward itself, which see whether reveals move. Without the draws
    that were not revealed, as in CJ-GRPO, it is another where confidences decide.
    """
    model = tiny_model(family, 1, **IDS | OWN[family])
    trace = every_path(model, rule, threshold := 0.5)
    args = tpg.Args(temperature=T, remasking=rule, micro_batch_size=4)
    batch = tpg.Batch(trace, model)
    texts = [trace.completion(i) for i in range(len(trace.prompt_ids))]
    batch.advantages = torch.tensor(list(map(reward, texts)), dtype=torch.float64)
    rows = tpg.sample_masks(batch, 0, args)
    rows.weights = rows.weights.double()
    logps, scored = tpg.draw_logps(model, rows), rows.weights != 0
    # sample i stands for a share 3^-draws of the paths
    rows.advantages *= ((logps + math.log(3)) * scored).sum((1, 2)).exp().detach()

    def estimated(rows):
        return -gradient(model, tpg.policy_loss(logps, logps.detach(), None, rows, args)[0], True)

    want, got = gradient(model, expected_reward(model, rule, threshold)), estimated(rows)
    assert relative(got, want) < 1e-10
    draws = trace.records["draws"]
    shown = trace.replay_map[:, None] == torch.arange(draws.shape[1])[:, None]
    trace.records["draws"] = draws.where(shown, -1)
    few = changed(rows, weights=tpg.sample_masks(batch, 0, args).weights.double())
    error = relative(estimated(few), want)
    assert error > 0.05 if rule.startswith("low") else error < 1e-10
    with torch.no_grad():
        values, h = [], 1e-6 / want.norm()
        for sign in (1, -2):
            step = (sign * h * want).split([p.numel() for p in model.parameters()])
            for p, change in zip(model.parameters(), step, strict=True):
                p += change.view_as(p)
            values.append(expected_reward(model, rule, threshold))
    assert relative((values[0] - values[1]) / (2 * h), want.norm() ** 2) < 1e-6


@pytest.mark.parametrize("family, n", [("llada", 1), ("llada", 3), ("sdar", 1)])
def test_a_few_random_steps_weigh_what_all_do(family, n):
    """Mean over all orders of the steps: 1 for every draw, also of sequences that end early."""
    args = tpg.Args(num_generations=4, train_steps=n)
    batch = rollout_batch(tpg, tiny_model(family), args, length=8, records="draws")
    batch.trace.records["draws"][:4, -1] = -1  # a step less
    draws, mean = batch.trace.records["draws"], 0.0
    S = draws.shape[1]
    orders = list(itertools.permutations(range(S)))
    for order in orders:
        ids = torch.ones_like(batch.input_ids).double()
        rows = tpg.sample_masks(changed(batch, uniform=lambda i, s: order[s] / S * ids), 0, args)  # noqa: B023
        assert rows.masked.shape[1] == n
        taken = (torch.tensor(order) + S * (draws < 0).all(2)).argsort(1)[:, :n, None]
        mean = mean + torch.zeros(draws.shape).scatter(
            1, taken.expand_as(rows.weights), rows.weights
        )
    torch.testing.assert_close(mean / len(orders), (draws >= 0).float())


@pytest.mark.parametrize("family", ["sdar", "llada", "dream"])
def test_the_gradient_is_that_of_the_full_graph(family):
    """To 1e-10 in fp64 for micro-batches of some rows and some steps, clip and KL active."""
    model, grads = tiny_model(family), []
    before, reference = tiny_model(family, shift=0.02), tiny_model(family, 1)
    args = tpg.Args(num_generations=4, beta=0.3, epsilon=0.1, temperature=T, train_steps=2)
    batch = rollout_batch(tpg, model, args, length=8, records="draws")
    for size in (1000, 6, 3):
        args.micro_batch_size = size
        rows = tpg.sample_masks(batch, 0, args).split(size)
        rows.weights = rows.weights.double()
        with torch.no_grad():
            rows.old, rows.ref = (tpg.draw_logps(m, rows) for m in (before, reference))
        if size == 1000:
            assert tuple(rows.masked.shape[:2]) == (len(batch.input_ids), 2)
            want = gradient(model, full_graph_loss("tpg", model, rows, args))
        model.zero_grad()
        micros = [micro for micro, _ in tpg.micro_batches(rows, args)]
        clipped = [tpg.backward(model, micro, 1, args)["policy/clip_frac"] for micro in micros]
        grads.append(gradient(model))
    assert max(clipped) > 0 and max(relative(grad, want) for grad in grads) < 1e-10
