"""TraceRL: rows against the trace, losses and values against the released code."""

from functools import partial

import pytest
import torch
from oracles import (
    MASK,
    PROMPTS,
    TINY_LLADA,
    TINY_SDAR,
    changed,
    made_batch,
    tilted,
    tiny_model,
    updated,
)

from algos import tracerl
from models import add_lora, load_weights, meta_model
from models.value import load_value_model
from rollout import Trace, make_engine
from rollout.rows import Batch

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("shrink", [1, 2])
@pytest.mark.parametrize("remasking", ["low_confidence_dynamic", "low_confidence_static"])
@pytest.mark.parametrize("family", ["sdar", "llada2", "llada", "dream"])
def test_rows_are_states_of_the_rollout(family, remasking, shrink):
    """Every token up to the EOS is scored in one draw of one update, in the state before the first
    of the steps that its round merges, of those that revealed something; unmerged, with the
    log-probability that the sampler drew it with. A group that is left out is not, one with an
    advantage is as a whole, as released.
    """
    how = {"num_iterations": 3, "shrink": shrink, "num_generations": 4}
    model, args = tiny_model(family), tracerl.Args(**how)
    how = {"num_samples": 4, "gen_length": 12, "seed": 5, "temperature": 0.8, "records": "steps"}
    how |= {"remasking": remasking, "confidence_threshold": 0.3, "block_length": 4}
    trace = make_engine(model).generate([*map(list, PROMPTS)], **how)
    batch, states, total = Batch(trace, model), [*trace.states(MASK)], 0
    batch.rewards = batch.advantages = torch.tensor([1.0, 0, -1, 0, 0, 0, 0, 0, 0, 2, -1, -1])
    trained = (torch.arange(12) // 4 != 1)[:, None]
    for iteration in range(3):
        rows = tracerl.sample_masks(batch, iteration, args)
        scored, mine = rows.weights != 0, torch.arange(12) % 3 == iteration
        with torch.no_grad():
            logps = tracerl.draw_logps(model, changed(rows, temperature=0.8))
        assert rows.total == scored.any(2).sum() and not scored[~mine].any()
        kept = rows.for_update(99, False, keep_all=False)
        assert kept.total == (kept.weights != 0).any(2).sum()
        assert shrink > 1 or (logps - trace.logps[:, None]).abs()[scored].max() < 2e-6
        seen = torch.where(rows.masked, MASK, rows.input_ids[:, None])[..., batch.P :]
        for b, k, j in scored.nonzero().tolist():
            block = batch.block_ids[b] == batch.block_ids[b, j]
            steps = sorted({*trace.replay_map[b, block].tolist()} - {-1})
            first = steps[steps.index(trace.replay_map[b, j]) // shrink * shrink]
            assert torch.equal(seen[b, k, block], states[first][b, block])
        total = total + scored.sum(1)
    assert torch.equal(total, (trace.completion_mask & trained).long())


# --- the released code: Gen-Verse/dLLM-RL 10b4fd1 ------------------------------------------------

# prompts of 8 tokens, 12 and 8 tokens of a completion, the steps that revealed these
TEXT = torch.tensor([[*b"jkldiiapmahudsusdkvp"], [*b"phuteprffiomjeqllqbr"]]) - 91
CASES = {  # model, steps of a rollout, those of the tokens
    "sdar": (TINY_SDAR, 4, ["201101230000", "01013210////"]),
    "llada": (TINY_LLADA, 12, ["100142325567", "01012325////"]),
}


def released(family, **settings):
    """-> a batch, arguments"""
    config, replays, steps = CASES[family]
    replay = torch.tensor([[*row.encode()] for row in steps]) - ord("0")
    block_ids = (torch.arange(12) // 4 * (family == "sdar")).expand(2, -1)
    batch = made_batch(TEXT, replay >= 0, block_ids, mask=257)
    batch.trace.replay_map, batch.trace.num_replays = replay, replays
    batch.trace.replayed = partial(Trace.replayed, None)
    batch.trace.reveal_map = Trace.reveal_map.fget(batch.trace)
    batch.rewards = batch.advantages = torch.tensor([1.5, -0.5])
    how = {"num_iterations": 1, "micro_batch_size": 99, "row_mean": family == "llada"}
    how["num_generations"] = 2
    return batch, tracerl.Args(gen_length=12, **how | settings)


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
    batch, args = released(family, shrink=shrink, kl_to_old=0.01 * (family == "sdar"))
    prepared, config = tracerl.sample_masks(batch, 0, args), CASES[family][0]
    with torch.no_grad():
        prepared.old = tracerl.draw_logps(tilted(0.05, config), prepared)
    prepared.has_gradient = True
    metrics, grads = updated(tracerl, tilted(0, config), prepared, args)
    assert prepared.total == rows
    assert metrics["loss/total"] == pytest.approx(loss, abs=1e-5)
    assert grads.double().norm().item() == pytest.approx(length, rel=1e-5)


@pytest.mark.parametrize("n", [0, 1])
def test_values_of_the_released_code(monkeypatch, n):
    """compute_returns_and_advantages_from_fragments and forward_process of train_sdar_value.py;
    between the two updates all weights below the head grow by a tenth, so that the clip acts.
    Updates that take one round give every token the same advantage.
    """
    how = {"num_iterations": 2, "minibatches": False, "micro_batch_size": 3, "epsilon": 0.02}
    how["train_steps"] = n
    batch, args = released("sdar", shrink=2, gamma=0.9, lam=0.8, **how)
    model, found, update = tilted(0, TINY_SDAR), [], tracerl.update
    model.value_head = torch.nn.Linear(96, 1, bias=False).requires_grad_(False)
    model.value_head.weight[:] = torch.linspace(-0.1, 0.1, 96)
    model.lm_head.requires_grad_(False)

    def step(model, optimizer, rows, step, args):
        with monkeypatch.context() as original:
            original.setattr(tracerl, "update", update)
            metrics, grads = updated(tracerl, model, rows, args)
        found.extend([metrics["loss/total"], grads.double().norm().item()])
        with torch.no_grad():
            for p in model.model.parameters():
                p.mul_(1.1)
        return metrics | {"optim/grad_norm": 0}

    monkeypatch.setattr(tracerl, "update", step)
    tracerl.update_values(model, None, batch, 0, args)
    want = [
        [-0.17148374, -0.10655542, 0.25894094, 0.79479831],
        [-0.77687281, -0.85471588, -1.2207897, 0],
    ]
    got = batch.token_advantages[:, ::3]
    torch.testing.assert_close(got, torch.tensor(want), atol=1e-5, rtol=0)
    assert n or found == pytest.approx([0.19179104, 9.8811535, 0.21356988, 11.113428], rel=1e-5)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_value_model_is_like_its_policy(rank):
    """The same start; trained are the same layers and the head."""
    built = (meta_model("tiny-sdar") for _ in range(2))
    model, policy = (add_lora(one, 4, 8, ["q_proj"], 3) if rank else one for one in built)
    policy = load_weights(policy, "cpu")
    unchanged = lambda model: model
    model, optimized = load_value_model(model, "cpu", unchanged, unchanged)
    assert optimized is model  # not the policy
    same = model.state_dict()
    assert not same.pop("value_head.weight").any()
    torch.testing.assert_close(same, policy.state_dict(), rtol=0, atol=0)
    names = lambda model: {name for name, p in model.named_parameters() if p.requires_grad}
    assert names(model) - {"value_head.weight"} == names(policy) - {"lm_head.weight"}
