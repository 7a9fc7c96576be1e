"""TraceRL: rows against the trace, losses and values against the released code and full graphs."""

from types import SimpleNamespace

import pytest
import torch
from oracles import changed, full_graph_loss, gradient, made_batch, relative, rollout_batch
from oracles import tiny_model as peaked
from test_samplers import SIZES, M, model_of
from test_trajectories import RAGGED, STATIC, batch_of

from algos import tracerl
from models.tiny import TINY_LLADA, TINY_SDAR, random_model


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    as_floats = lambda values: {name: float(value) for name, value in values.items()}
    monkeypatch.setattr(tracerl, "all_reduce", as_floats)
    monkeypatch.setattr(tracerl, "maximum", int)


@pytest.mark.parametrize("shrink", [1, 2])
@pytest.mark.parametrize("how", [RAGGED, STATIC], ids=["ragged", "static"])
@pytest.mark.parametrize("family", ["sdar", "llada2", "llada", "dream"])
def test_rows_are_states_of_the_rollout(family, how, shrink):
    """Every token up to the EOS is scored in one draw of one update, in the state before the first
    of the steps that its round merges; unmerged, with the sampler's log-probability.
    """
    model, args = model_of(SIZES[family], scale=9), tracerl.Args(num_iterations=3, shrink=shrink)
    batch = batch_of(tracerl, model, how)
    trace, c = batch.trace, batch.completion_mask
    states, found, total = [*trace.states(M)], torch.zeros(c.shape), 0
    for iteration in range(3):
        rows = changed(tracerl.sample_masks(batch, iteration, args), temperature=0.8)
        seen = torch.where(rows.masked, M, rows.input_ids[:, None])[..., batch.P :]
        with torch.no_grad():
            logps = tracerl.draw_logps(model, rows)
        total += (rows.weights != 0).any(2).sum()
        for r, k, j in (rows.weights != 0).nonzero().tolist():
            b = 3 * r + iteration
            found[b, j] += 1
            block = batch.block_ids[b] == batch.block_ids[b, j]
            steps = sorted(set(trace.replay_map[b, block].tolist()) - {-1})
            first = steps[steps.index(trace.replay_map[b, j]) // shrink * shrink]
            assert torch.equal(seen[r, k, block], states[first][b, block])
            assert shrink > 1 or abs(logps[r, k, j] - trace.logps[b, j]) < 2e-6
        assert rows.total == (rows.weights != 0).any(2).sum()
    assert torch.equal(found, c.float())


def test_advantages():
    """Biased standard deviation; nothing outside of the range of accuracies, whose ends count."""
    args = tracerl.Args(num_generations=5)
    for right, want in {0: 0, 1: 2.0, 4: 0.5, 5: 0}.items():
        rewards = torch.tensor([1.0] * right + [0.0] * (5 - right))
        got = tracerl.compute_advantages(rewards, args)
        assert got[0].item() == pytest.approx(want) and abs(got.sum()) < 1e-6
    few = tracerl.Args(num_generations=5, accuracy_range=(0.3, 0.8))
    assert not tracerl.compute_advantages(torch.tensor([1.0, 0, 0, 0, 0]), few).any()


# prompts of 8 tokens, 12 and 8 tokens of a completion, the step that revealed each of these
TEXT = torch.tensor([
    [15, 16, 17, 9, 14, 14, 6, 21, 18, 6, 13, 26, 9, 24, 26, 24, 9, 16, 27, 21],
    [21, 13, 26, 25, 10, 21, 23, 11, 11, 14, 20, 18, 15, 10, 22, 17, 17, 22, 7, 23],
])  # fmt: skip
STEPS = {
    "sdar": [[2, 0, 1, 1, 0, 1, 2, 3, 0, 0, 0, 0], [0, 1, 0, 1, 3, 2, 1, 0] + [-1] * 4],
    "llada": [[1, 0, 0, 1, 4, 2, 3, 2, 5, 5, 6, 7], [0, 1, 0, 1, 2, 3, 2, 5] + [-1] * 4],
}


def released(family, **settings):
    """-> batch and arguments of the numbers below"""
    config = {"sdar": TINY_SDAR, "llada": TINY_LLADA}[family]
    replay = torch.tensor(STEPS[family])
    block_ids = torch.arange(12) // 4 * (family == "sdar") + torch.zeros(2, 1, dtype=torch.long)
    batch = made_batch(tracerl, TEXT, replay >= 0, block_ids, mask=config["mask_token_id"])
    batch.trace.replay_map, batch.trace.num_replays = replay, {"sdar": 4, "llada": 12}[family]
    batch.advantages = torch.tensor([1.5, -0.5])
    shared = {"num_iterations": 1, "gen_length": 12, "row_mean": family == "llada"}
    return config, batch, tracerl.Args(**shared, **settings)


def tilted(config, tilt=0.0):
    model = random_model(config)
    with torch.no_grad():
        width = model.lm_head.weight.shape[1]
        model.lm_head.weight.mul_(10 * (1 + tilt * torch.linspace(-1, 1, width)))
    model.set_requires_gradient_sync = model.set_requires_all_reduce = lambda sync: None
    return model


LOSSES = [  # family, shrink, rows, loss, gradient norm
    ("sdar", 1, 8, -0.14818154, 12.0826406),
    ("sdar", 2, 4, -0.29701644, 23.4214420),
    ("llada", 1, 13, -0.73299348, 72.5378265),
    ("llada", 3, 5, -0.69594640, 66.4351425),
]


@pytest.mark.parametrize("family, shrink, rows, loss, norm", LOSSES)
def test_losses_of_the_released_code(family, shrink, rows, loss, norm):
    """collect_training_data of Gen-Verse/dLLM-RL 10b4fd1, train_sdar_value.py, with forward_process
    of train_sdar_policy.py; prepare_inputs_and_labels_for_text and forward_process of rl_llada.py,
    without its KL, a sum; all on these models' logits without the mask token.
    """
    config, batch, args = released(family, shrink=shrink, kl_to_old=0.01 * (family == "sdar"))
    model, prepared = tilted(config), tracerl.sample_masks(batch, 0, args)
    with torch.no_grad():
        prepared.old = tracerl.draw_logps(tilted(config, 0.05), prepared)
    metrics = tracerl.backward(model, prepared, 1.0, args)
    assert prepared.total == rows
    assert metrics["loss/total"].item() == pytest.approx(loss, abs=1e-5)
    assert gradient(model).norm().item() == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("family", ["sdar", "llada", "dream"])
def test_the_gradient_is_that_of_the_full_graph(family):
    """To 1e-10 in fp64, clip and KL active, in micro-batches of any size."""
    model, args = peaked(family), tracerl.Args(
        num_generations=4, num_iterations=1, epsilon=0.1, kl_to_old=0.3, row_mean=family == "dream"
    )
    batch = rollout_batch(tracerl, model, args, length=8, records="steps")
    rows = tracerl.sample_masks(batch, 0, args)

    def valued(rows):
        rows = changed(rows, weights=rows.weights.double())
        with torch.no_grad():
            return changed(rows, old=tracerl.draw_logps(peaked(family, shift=0.02), rows))

    def inner(rows, size):
        model.zero_grad()
        args.micro_batch_size = size
        for micro, _ in tracerl.micro_batches(valued(rows.split(size)), args):
            tracerl.backward(model, micro, 1, args)
        return gradient(model)

    # CJ-GRPO's loss has the same terms, with a KL to a reference and a mean over sequences
    whole = valued(rows)
    whole.ref, whole.batch = whole.old, changed(batch, num_sequences=rows.total)
    loss = full_graph_loss("cj_grpo", model, whole, changed(args, beta=args.kl_to_old))
    want = gradient(model, loss)
    assert all(relative(inner(rows, size), want) < 1e-10 for size in (1, 3, 100))
    assert relative(inner(changed(rows, masked=rows.masked.roll(1, -1)), 100), want) > 0.01
