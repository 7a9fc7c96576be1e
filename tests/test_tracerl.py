"""TraceRL: rows against the trace, losses and values against the released code and full graphs."""

import pytest
import torch
from oracles import (
    changed,
    full_graph_loss,
    made_batch,
    relative,
    rollout_batch,
    tiny_model,
)
from test_samplers import SIZES, M, model_of
from test_trajectories import RAGGED, STATIC, batch_of

from algos import tracerl
from models import add_lora, load_weights, meta_model
from models.tiny import TINY_LLADA, TINY_SDAR, random_model
from models.value import load_value_model
from rollout import Trace

ROWS = [
    (family, how) for family in ("sdar", "llada2", "llada", "dream") for how in (RAGGED, STATIC)
]


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("shrink", [1, 2])
@pytest.mark.parametrize("family, how", ROWS, ids=str)
def test_rows_are_states_of_the_rollout(family, how, shrink):
    """Every token up to the EOS is scored in one draw of one update, in the state before the first
    of the steps that its round merges; unmerged, with the sampler's log-probability.
    """
    model, args = model_of(SIZES[family], scale=9), tracerl.Args(num_iterations=3, shrink=shrink)
    batch = batch_of(tracerl, model, how)
    trace, c = batch.trace, batch.completion_mask
    states, found = [*trace.states(M)], torch.zeros(c.shape)
    for iteration in range(3):
        rows = changed(tracerl.sample_masks(batch, iteration, args), temperature=0.8)
        seen = torch.where(rows.masked, M, rows.input_ids[:, None])[..., batch.P :]
        with torch.no_grad():
            logps = tracerl.draw_logps(model, rows)
        for b, k, j in (rows.weights != 0).nonzero().tolist():
            found[b, j] += b % 3 == iteration
            block = batch.block_ids[b] == batch.block_ids[b, j]
            steps = sorted(set(trace.replay_map[b, block].tolist()) - {-1})
            first = steps[steps.index(trace.replay_map[b, j]) // shrink * shrink]
            assert torch.equal(seen[b, k, block], states[first][b, block])
            assert shrink > 1 or abs(logps[b, k, j] - trace.logps[b, j]) < 2e-6
        assert rows.total == (rows.weights != 0).any(2).sum()
    assert torch.equal(found, c.float())


def test_advantages():
    """Biased standard deviation; 0 outside of the range of accuracies, whose ends count."""
    for right, want in {0: 0, 1: 2.0, 4: 0.5, 5: 0}.items():
        rewards = torch.tensor([1.0] * right + [0.0] * (5 - right))
        got = tracerl.compute_advantages(rewards, tracerl.Args(num_generations=5))
        assert got[0].item() == pytest.approx(want) and abs(got.sum()) < 1e-6
    few = tracerl.Args(num_generations=5, accuracy_range=(0.3, 0.8))
    assert not tracerl.compute_advantages(torch.tensor([1.0, 0, 0, 0, 0]), few).any()


# --- the released code: Gen-Verse/dLLM-RL 10b4fd1 ------------------------------------------------

# prompts of 8 tokens, 12 and 8 tokens of a completion, the steps that revealed these
TEXT = torch.tensor([[*b"jkldiiapmahudsusdkvp"], [*b"phuteprffiomjeqllqbr"]]) - 91
CASES = {  # model, steps of a rollout, those of the tokens
    "sdar": (TINY_SDAR, 4, ["201101230000", "01013210----"]),
    "llada": (TINY_LLADA, 12, ["100142325567", "01012325----"]),
}


def released(family, **settings):
    """-> the model with its head scaled by 10 and tilted, a batch, arguments"""
    config, replays, steps = CASES[family]

    def model(tilt=0.0):
        model = random_model(config)
        with torch.no_grad():
            ramp = torch.linspace(-1, 1, model.lm_head.in_features)
            model.lm_head.weight.mul_(10 * (1 + tilt * ramp))
        return model

    replay = torch.tensor([[-1 if s == "-" else int(s) for s in row] for row in steps])
    block_ids = (torch.arange(12) // 4 * (family == "sdar")).expand(2, -1)
    batch = made_batch(tracerl, TEXT, replay >= 0, block_ids, mask=config["mask_token_id"])
    batch.trace.replay_map, batch.trace.num_replays = replay, replays
    batch.trace.reveal_map = Trace.reveal_map.fget(batch.trace)
    batch.advantages = torch.tensor([1.5, -0.5])
    shared = {"num_iterations": 1, "gen_length": 12, "row_mean": family == "llada"}
    return model, batch, tracerl.Args(**shared | settings)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


LOSSES = [  # family, shrink, rows, loss, gradient norm
    ("sdar", 1, 8, -0.14818154, 12.083512),
    ("sdar", 2, 4, -0.29701644, 23.423059),
    ("llada", 1, 13, -0.73299348, 72.542413),
    ("llada", 3, 5, -0.69594640, 66.439324),
]


@pytest.mark.parametrize("family, shrink, rows, loss, length", LOSSES)
def test_losses_of_the_released_code(family, shrink, rows, loss, length):
    """collect_training_data and forward_process of rl_sdar.py; those of rl_llada.py without its KL,
    which is a sum. Both on these models' logits without the mask token.
    """
    make, batch, args = released(family, shrink=shrink, kl_to_old=0.01 * (family == "sdar"))
    model, prepared = make(), tracerl.sample_masks(batch, 0, args)
    with torch.no_grad():
        prepared.old = tracerl.draw_logps(make(0.05), prepared)
    metrics = tracerl.backward(model, prepared, 1.0, args)
    assert prepared.total == rows
    assert metrics["loss/total"].item() == pytest.approx(loss, abs=1e-5)
    assert gradient(model).norm().item() == pytest.approx(length, rel=1e-5)


def test_values_of_the_released_code(monkeypatch):
    """compute_returns_and_advantages_from_fragments and forward_process of train_sdar_value.py;
    between the two updates all weights below the head grow by a tenth, so that the clip acts.
    """
    how = {"num_iterations": 2, "minibatches": False, "micro_batch_size": 3, "epsilon": 0.02}
    make, batch, args = released("sdar", shrink=2, gamma=0.9, lam=0.8, **how)
    model, found = make(), []
    model.value_head = torch.nn.Linear(96, 1, bias=False).requires_grad_(False)
    model.value_head.weight[:] = torch.linspace(-0.1, 0.1, 96)

    @torch.no_grad()
    def step(optimizer, sums, *_):
        found.extend([sums["loss/total"].item(), gradient(model).norm().item()])
        for p in model.model.parameters():
            p.mul_(1.1)
        model.zero_grad()
        return {"loss/total": 0, "optim/grad_norm": 0}

    monkeypatch.setattr(tracerl, "optimizer_step", step)
    tracerl.update_values(model, None, batch, 0, args)
    want = [
        [-0.17148374, -0.10655542, 0.25894094, 0.79479831],
        [-0.77687281, -0.85471588, -1.2207897, 0],
    ]
    torch.testing.assert_close(
        batch.token_advantages[:, ::3], torch.tensor(want), atol=1e-5, rtol=0
    )
    assert found == pytest.approx([0.19179104, 9.8811535, 0.21356988, 11.113428], rel=1e-5)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_value_model_is_like_its_policy(rank):
    """The same start, adapters of the same shape, seed and scale, an optimizer of its own."""
    policy = meta_model("tiny-sdar")
    policy = load_weights(add_lora(policy, 4, 8, ["q_proj"], 3) if rank else policy, "cpu")
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), 0.1, (0.5, 0.6), weight_decay=0.3)
    model, own = load_value_model("tiny-sdar", policy, optimizer, lambda model: model)
    learns = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learns - {"value_head.weight"} == trained.keys() - {"lm_head.weight"}
    same = model.state_dict()
    assert not same.pop("value_head.weight").any()
    assert same.keys() == policy.state_dict().keys()
    assert all(torch.equal(same[name], value) for name, value in policy.state_dict().items())
    assert not rank or model.lora_config.lora_alpha == 8
    groups = [{**one.param_groups[0], "params": None} for one in (own, optimizer)]
    assert groups[0] == groups[1] and len(own.param_groups[0]["params"]) == len(learns)


# --- identities and full graphs ------------------------------------------------------------------


def test_gae_identities():
    """Without values, lambda 1 gives returns; gamma = lambda = 1 gives outcome minus value."""
    values, outcome = torch.rand(2, 9), torch.tensor([1.5, -0.5])
    steps = torch.tensor([[5, 0, 0, 2, 2, 7, 9, 9, -1], [3] * 9])
    R = tracerl.gae(outcome, torch.zeros(2, 9), steps, 0.5, 1)
    assert R[0].tolist() == [0.375, 0.09375, 0.09375, 0.1875, 0.1875, 0.75, 1.5, 1.5, 0]
    A = tracerl.gae(outcome, values, steps, 1, 1)
    torch.testing.assert_close(A, (outcome[:, None] - values) * (steps >= 0))


@pytest.mark.parametrize("family", ["sdar", "llada", "dream"])
def test_gradients_are_those_of_the_full_graph(family):
    """To 1e-10 in fp64, clip and KL active, an advantage for each token, micro-batches of any size;
    so are those of values, whose numbers stand above.
    """
    model, before = tiny_model(family), tiny_model(family, shift=0.02)
    clips = {"epsilon": 0.1, "kl_to_old": 0.3, "row_mean": family == "dream"}
    args = tracerl.Args(num_generations=4, num_iterations=1, **clips)
    batch = rollout_batch(tracerl, model, args, length=8, records="steps")
    generator, shape = torch.Generator().manual_seed(0), (2, *batch.completion_mask.shape)
    batch.token_advantages, returns = torch.randn(shape, generator=generator).double()
    rows = tracerl.sample_masks(batch, 0, args)
    rows.weights = rows.weights.double()

    def valued(rows):
        with torch.no_grad():
            return changed(rows, old=tracerl.draw_logps(before, rows))

    def inner(size=100, **fields):
        model.zero_grad()
        args.micro_batch_size = size
        for micro, _ in tracerl.micro_batches(valued(changed(rows, **fields).split(size)), args):
            tracerl.backward(model, micro, 1, args)
        return gradient(model)

    # CJ-GRPO's loss has the same terms, with a mean over sequences and a KL to a reference
    r, k, j = rows.weights.nonzero(as_tuple=True)
    terms = changed(valued(rows).select(r), advantages=batch.token_advantages[rows.sequence[r], j])
    terms.weights = torch.zeros_like(terms.weights)
    terms.weights[range(len(r)), k, j] = rows.weights[r, k, j]
    terms.ref, terms.batch = terms.old, changed(batch, num_sequences=rows.total)
    full_graph_loss("cj_grpo", model, terms, changed(args, beta=args.kl_to_old)).backward()
    want = gradient(model)
    for _ in range(2):
        assert all(relative(inner(size), want) < 1e-10 for size in (1, 3))
        assert relative(inner(masked=rows.masked.roll(1, -1)), want) > 0.01
        # the value model's
        model.value_head = before.value_head = torch.nn.Linear(32, 1, bias=False).double()
        rows.batch = changed(batch, returns=returns)
        want = inner()
