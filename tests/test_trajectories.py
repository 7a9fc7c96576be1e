"""CJ-GRPO and MDPO: the rows that replay a rollout, against the rollout and likelihoods by hand."""

from collections import Counter

import pytest
import torch
from oracles import made_batch
from test_samplers import SIZES, M, model_of

from algos import cj_grpo, mdpo
from rollout import make_engine
from rollout.rows import Batch

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13]]  # 3, 2 and 2 modulo the block of 4
RAGGED = {"remasking": "low_confidence_dynamic", "confidence_threshold": 0.3, "denoising_steps": 4}
STATIC = {"remasking": "low_confidence_static", "denoising_steps": 2}
# EOSER and ASS (arXiv 2509.23924): blocks of 1 + 2 and of 9 tokens
PAPERS = STATIC | {"schedule": "ascending", "eos_policy": "eoser", "block_length": 0}


pytestmark = pytest.mark.usefixtures("one_rank")


def batch_of(module, model, how, records=None):
    shape = {"block_length": 4 if model.attention == "bidirectional" else 0, "gen_length": 12} | how
    trace = make_engine(model).generate(
        PROMPTS, num_samples=4, seed=5, temperature=0.8, records=records, **shape
    )
    batch = Batch(trace, model)
    batch.advantages = torch.ones(12)
    return batch


REPLAYED = [("sdar", RAGGED), ("llada", RAGGED), ("dream", RAGGED), ("llada2", STATIC)]
REPLAYED += [("llada-moe", STATIC), ("dream", PAPERS)]


@pytest.mark.parametrize("family, how", REPLAYED, ids=str)
def test_cj_grpo_scores_every_token_once_where_it_was_revealed(family, how):
    """Log-probabilities of the rows are those of the cached sampler; weights are 1 / (transitions
    of the sequence x tokens of the transition).
    """
    model, args = model_of(SIZES[family], scale=9), cj_grpo.Args(temperature=0.8)
    batch = batch_of(cj_grpo, model, how)
    trace, rows = batch.trace, cj_grpo.sample_masks(batch, 0, args)
    with torch.no_grad():
        logps = cj_grpo.draw_logps(model, rows).sum(1)
    revealed, weights = trace.step_map >= 0, rows.weights.sum(1)
    assert torch.equal((rows.weights != 0).sum(1), revealed.long())
    torch.testing.assert_close(logps.double(), trace.logps, atol=2e-6, rtol=0)
    assert rows.masked.shape[:2] == (12, trace.num_replays)
    assert (rows.masked[..., batch.P :] | revealed[:, None]).all()
    # draws that replay nothing are left out
    args.beta, args.num_iterations, args.micro_batch_size = 0.0, 1, 1
    (prepared,) = cj_grpo.prepare_rows(model, None, batch, args)
    assert prepared.masked.shape[:2] == (rows.weights.any(2).sum(), 1)
    for b in range(12):
        when = list(zip(trace.blocks[b].tolist(), trace.step_map[b].tolist(), strict=True))
        tokens = Counter(at for at in when if at[1] >= 0)  # of each transition
        want = [1 / (len(tokens) * tokens[at]) if at in tokens else 0.0 for at in when]
        assert weights[b].tolist() == pytest.approx(want)
    for steps in (0, trace.num_replays):  # all: the rows stay
        args.train_steps = steps
        assert cj_grpo.sample_masks(batch, 1, args) is None


@pytest.mark.parametrize("how", [RAGGED, STATIC | {"remasking": "rcr"}, PAPERS], ids=str)
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_mdpo_replays_what_the_sampler_predicted(family, how):
    """exp of the estimates is the recorded confidence of every masked token, those after the
    current block too.
    """
    model, args = model_of(SIZES[family], scale=9), mdpo.Args(num_generations=4, train_steps=100)
    batch, args.temperature = batch_of(mdpo, model, how, records="states"), 0.8
    trace = batch.trace
    masked = trace.records["tokens"] >= 0
    made = masked.any(2)
    assert made.shape == (12, trace.num_replays) and masked[:, 0].all()
    batch.advantages = torch.ones(made.shape)
    rows = mdpo.sample_masks(batch, 0, args)
    assert len(rows.input_ids) == made.sum()
    state = rows.masked[:, 0, -12:]
    q = rows.weights[:, 0].double() * state.sum(1, keepdim=True)
    with torch.no_grad():
        p = mdpo.draw_logps(model, rows)[:, 0].exp().double()
    torch.testing.assert_close(p[state], q[state], atol=1e-5, rtol=1e-5)


def test_mdpo_chooses_the_steps_with_the_largest_advantages():
    """By group the steps of the largest summed |A|, by sequence each its own; only steps that had a
    forward."""
    A = torch.tensor([[1.0, -4.0, 2.0], [0.5, 1.0, -9.0]])
    records = {"tokens": torch.zeros(2, 3, 4).int(), "logps": torch.full((2, 3, 4), 0.5).log()}
    records["tokens"][1, 2] = -1  # this row made no third forward
    ids = torch.arange(8).view(2, 4)
    batch = made_batch(ids, ids >= 0, mask=M)
    batch.trace.records, batch.advantages = records, A
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
