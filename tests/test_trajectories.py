"""CJ-GRPO and MDPO: the rows that replay a rollout, against the rollout and likelihoods by hand."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from oracles import changed
from test_samplers import SIZES, M, model_of

from algos import cj_grpo, mdpo
from rollout import Trace, make_engine

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13]]  # 3, 2 and 2 modulo the block of 4
RAGGED = {"remasking": "low_confidence_dynamic", "confidence_threshold": 0.3, "denoising_steps": 4}
STATIC = {"remasking": "low_confidence_static", "denoising_steps": 2}
# EOSER and ASS (arXiv 2509.23924): blocks of 1 + 2 and of 9 tokens
PAPERS = STATIC | {"schedule": "ascending", "eos_policy": "eoser", "block_length": 0}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    """Sums of a single rank are its own numbers: no process group."""
    for module in (cj_grpo, mdpo):
        monkeypatch.setattr(
            module, "all_reduce", lambda values: {k: float(v) for k, v in values.items()}
        )


def batch_of(module, model, how, records=None):
    shape = {"block_length": 4 if model.attention == "bidirectional" else 0, "gen_length": 12} | how
    trace = make_engine(model).generate(
        PROMPTS, num_samples=4, seed=5, temperature=0.8, records=records, **shape
    )
    batch = module.Batch(trace, model)
    batch.advantages = torch.ones(12)
    return batch


REPLAYED = [
    (family, how) for family in ("sdar", "llada2", "llada", "dream") for how in (RAGGED, STATIC)
]
REPLAYED += [("llada", PAPERS), ("dream", PAPERS)]


@pytest.mark.parametrize("family, how", REPLAYED, ids=str)
def test_cj_grpo_scores_every_token_once_where_it_was_revealed(family, how):
    """Log-probabilities of the rows are those of the cached sampler; weights are 1 / (transitions
    of the sequence x tokens of the transition).
    """
    model, args = model_of(SIZES[family], scale=9), cj_grpo.Args(temperature=0.8)
    batch = batch_of(cj_grpo, model, how)
    trace, rows = batch.trace, cj_grpo.sample_masks(batch, 0, args)
    with torch.no_grad():
        logps = cj_grpo.draw_logps(model, rows, 0)
        shifted = changed(rows, masked=rows.masked.roll(1, -1))
        wrong = cj_grpo.draw_logps(model, shifted, 0)
    index = [int((batch.input_ids == ids).all(1).nonzero()[0]) for ids in rows.input_ids]
    revealed, sums = trace.step_map >= 0, {}
    for name, values in (("times", rows.weights[:, 0] != 0), ("logps", logps), ("wrong", wrong)):
        sums[name] = torch.zeros(revealed.shape, dtype=torch.float64)
        sums[name].index_add_(0, torch.tensor(index), values.double())
    assert torch.equal(sums["times"], revealed.double())
    torch.testing.assert_close(sums["logps"], trace.logps, atol=2e-6, rtol=0)
    assert (sums["wrong"] - trace.logps)[revealed].abs().max() > 0.1  # control
    counts = torch.bincount(torch.tensor(index), minlength=12)
    assert (counts <= trace.num_replays).all()
    weights = torch.zeros(revealed.shape).index_add_(0, torch.tensor(index), rows.weights[:, 0])
    for b in range(12):
        steps, blocks = trace.step_map[b].tolist(), trace.blocks(b)
        when = {j: (blocks[j], step) for j, step in enumerate(steps) if step >= 0}
        tokens = Counter(when.values())  # of each transition
        want = torch.zeros(len(steps))
        for j, transition in when.items():
            want[j] = 1 / (len(tokens) * tokens[transition])
        torch.testing.assert_close(weights[b], want)
    assert cj_grpo.sample_masks(batch, 1, args) is None


def toy_batch(step_map, block_ids, num_steps, attention):
    """A batch of one sequence with this step map and no model behind it."""
    step_map, block_ids = torch.tensor([step_map]), torch.tensor([block_ids])
    blocked, L = attention == "block-causal", step_map.shape[1]
    replay = step_map if blocked else block_ids * num_steps + step_map
    settings = {"attention": attention, "gen_length": L, "block_length": 4, "schedule": "uniform"}
    settings |= {"denoising_steps": num_steps, "editing_threshold": None, "max_post_steps": 0}
    ids, on, length = torch.arange(L)[None], torch.ones(1, L, dtype=torch.bool), torch.tensor([L])
    trace = Trace([[]], ids, on, length, step_map, replay, None, length, length, settings)
    return changed(
        cj_grpo.Batch.__new__(cj_grpo.Batch), input_ids=ids, valid_mask=on, completion_mask=on, P=0,
        block_ids=block_ids if blocked else 0 * block_ids, trace=trace, mask_token_id=M,
        advantages=torch.ones(1),
    )  # fmt: skip


TWO = [0] * 4 + [1] * 4
BY_HAND = [
    # steps of 1, 2 and 4 tokens
    ([0, 1, 1, 2, 2, 2, 2], [0] * 7, 3, "block-causal", [1 / 3] * 3),
    # blocks of steps (2, 2) and (1, 3): one forward replays a step of both
    ([0, 0, 1, 1, 0, 1, 1, 1], TWO, 2, "block-causal", [0.5, 0.5]),
    ([0, 0, 1, 1, 0, 1, 1, 1], TWO, 2, "bidirectional", [0.25] * 4),
    # a block that is done early, a step without tokens, a token that was never revealed
    ([0, 0, 0, 0, 0, 1, 3, -1], TWO, 4, "block-causal", [0.5, 0.25, 0.25]),
]


@pytest.mark.parametrize("step_map, blocks, steps, attention, want", BY_HAND)
def test_cj_grpo_weights_by_hand(step_map, blocks, steps, attention, want):
    rows = cj_grpo.sample_masks(toy_batch(step_map, blocks, steps, attention), 0, cj_grpo.Args())
    assert rows.weights.sum(2).flatten().tolist() == pytest.approx(want)
    never = torch.tensor(step_map) < 0
    assert rows.masked[:, 0, never].all() and not rows.weights[..., never].any()


@pytest.mark.parametrize("how", [RAGGED, STATIC, STATIC | {"remasking": "rcr"}, PAPERS], ids=str)
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_mdpo_replays_what_the_sampler_predicted(family, how):
    """exp of the estimates is the recorded confidence of every masked token, those after the
    current block too. The last prediction of a row is its completion, and so is the last reward.
    """
    model, args = model_of(SIZES[family], scale=9), mdpo.Args(num_generations=4, train_steps=100)
    batch, args.temperature = batch_of(mdpo, model, how, records="states"), 0.8
    trace = batch.trace
    made = trace.records["masked"].any(2)
    assert made.shape == (12, trace.num_replays) and made[:, 0].all()
    assert trace.records["masked"][:, 0].all()
    batch.advantages = torch.ones(made.shape)
    rows = mdpo.sample_masks(batch, 0, args)
    assert len(rows.input_ids) == made.sum()
    state = rows.masked[:, 0, -12:]
    q = rows.weights[:, 0].double() * state.sum(1, keepdim=True)
    with torch.no_grad():
        p = mdpo.draw_logps(model, rows, 0).exp().double()
        wrong = mdpo.draw_logps(model, changed(rows, masked=rows.masked.roll(1, 0)), 0).exp()
    torch.testing.assert_close(p[state], q[state], atol=1e-5, rtol=1e-5)
    assert (wrong[state] - q[state]).abs().max() > 0.1  # control
    decode = lambda ids, skip_special_tokens: "".join(chr(65 + token) for token in ids)
    reward = lambda texts, examples: [{"x": float(sum(map(ord, text)))} for text in texts]
    letters = SimpleNamespace(decode=decode)
    texts = [letters.decode(trace.completion(i), True) for i in range(12)]
    final = torch.tensor([parts["x"] for parts in reward(texts, [None] * 12)])
    graded = mdpo.step_rewards(trace, final, reward, letters, [None] * 12)
    assert torch.equal(graded[:, -1], final) and (graded[:, 0] != final).any()


def test_mdpo_chooses_the_steps_with_the_largest_advantages():
    """By group the steps of the largest summed |A|, by sequence each its own; only steps that had a
    forward."""
    A = torch.tensor([[1.0, -4.0, 2.0], [0.5, 1.0, -9.0]])
    masked = torch.ones(2, 3, 4, dtype=torch.bool)
    masked[1, 2] = False  # this row made no third forward
    records = {"masked": masked, "predictions": torch.zeros(2, 3, 4, dtype=torch.int32)}
    records["confidences"] = torch.full((2, 3, 4), 0.5)
    ids = torch.arange(8).view(2, 4)
    batch = changed(
        mdpo.Batch.__new__(mdpo.Batch), trace=SimpleNamespace(records=records), advantages=A, P=0,
        input_ids=ids, valid_mask=ids >= 0, completion_mask=ids >= 0, mask_token_id=M,
    )  # fmt: skip
    for steps_of, k, want in (
        ("group", 1, [-4.0, 1.0]),
        ("group", 2, [-4.0, 2.0, 1.0]),
        ("sequence", 1, [-4.0, 1.0]),
        ("sequence", 2, [-4.0, 2.0, 0.5, 1.0]),
    ):
        args = mdpo.Args(num_generations=2, train_steps=k, steps_of=steps_of)
        rows = mdpo.sample_masks(batch, 0, args)
        assert rows.advantages.tolist() == want, (steps_of, k)
        assert rows.weights.unique().tolist() == [0.125]  # q / M
