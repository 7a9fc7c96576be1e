"""The training loop's functions against hand-made steps: which rows train, on which old and
reference values, how far.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from oracles import changed, rollout_batch, tiny_model

from algos import bgpo, cj_grpo, coupled_grpo, d1, spg, wd1
from models import add_lora
from run.schedule import share_at

ARGS = {"num_generations": 4, "num_iterations": 2, "micro_batch_size": 5}
SCHEDULES = [  # schedule, steps of warm-up, of the schedule; shares of the rate in steps 0, 1, ...
    ("constant", 0, 100, [1, 1, 1]),
    ("constant", 4, 100, [0.25, 0.5, 0.75, 1, 1]),
    ("linear", 0, 4, [1, 0.75, 0.5, 0.25, 0, 0]),
    ("linear", 2, 6, [0.5, 1, 1, 0.75, 0.5]),
    ("cosine", 3, 5, [1 / 3, 2 / 3, 1, 1, 0.5, 0]),
]


@pytest.mark.parametrize("schedule, warmup, steps, want", SCHEDULES)
def test_learning_rate_schedules(schedule, warmup, steps, want):
    found = [share_at(step, schedule, warmup, steps) for step in range(len(want))]
    assert found == pytest.approx(want)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rollout_deals_prompts_and_draws_over_ranks(monkeypatch, ranks):
    """Step s takes prompts 4 s, ..., 4 s + 3; each completion is the sample of its number, each
    step has its seed.
    """
    asked, seen = [], []
    generate = lambda prompts, **settings: asked.append((prompts, settings)) or "trace"
    args = d1.Args(prompts_per_step=4, num_generations=3, seed=7)
    stream = [(f"example {i}", [i]) for i in range(40)]
    monkeypatch.setattr(d1.dist, "get_world_size", lambda: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(d1.dist, "get_rank", lambda: rank)  # noqa: B023
        engine = SimpleNamespace(generate=generate, make_room=lambda: None)
        trace, examples = d1.roll_out(
            engine, stream, {"gen_length": 12, "temperature": 0.9}, 5, args
        )
        (prompts, settings), share = asked.pop(), 4 // ranks
        assert trace == "trace" and settings.pop("sample_offset") == rank * share * 3
        assert settings.pop("seed") == (7 << 32) + 5 and settings.pop("records") is None
        assert settings == {"num_samples": 3, "temperature": 0.9, "gen_length": 12}
        seen += [i for (i,) in prompts]
        assert examples == [f"example {i}" for (i,) in prompts for _ in range(3)]
    assert seen == [20, 21, 22, 23]


def gap(a, b):
    return (a - b).abs().max().item()


def draws_of(rows):
    ids = rows.input_ids[:, None].expand_as(rows.masked)
    return sorted(torch.cat([ids, rows.masked, rows.weights], 2).flatten(0, 1).tolist())


@pytest.mark.parametrize("module", [d1, bgpo, coupled_grpo, spg, wd1])
def test_rows_are_prepared_before_the_first_update(run_ranks, module):
    """Short sequences first, at most a micro-batch of draws in a row. Without KL dead rows go, one
    stays if all are dead, and counts stay; old and reference values are of their models.
    """

    def body(rank, world_size):
        model, other = tiny_model(), tiny_model(seed=1)
        args = module.Args(**ARGS, beta=0.0)
        batch = rollout_batch(module, model, args)
        prepared = module.prepare_rows(model, None, batch, args)
        assert len(prepared) == 2 and not torch.equal(prepared[0].input_ids, prepared[1].masked)
        for iteration, rows in enumerate(prepared):
            everything = module.sample_masks(batch, iteration, args)
            assert draws_of(rows) == draws_of(everything.select(everything.advantages != 0))
            assert (rows.valid_mask.sum(1).diff() >= 0).all() and rows.masked.shape[1] <= 5
            assert (rows.advantages != 0).all() and rows.batch.num_sequences == 12
            assert rows.ref is None
            if module.USES_OLD:
                assert gap(rows.old, module.frozen_estimates(model, rows, args)) == 0
        dead = changed(batch, advantages=torch.zeros_like(batch.advantages))
        assert len(module.prepare_rows(model, None, dead, args)[0].masked) == 1
        args.num_iterations = 1
        assert module.prepare_rows(model, None, batch, args)[0].old is None
        if module.USES_REF:
            args.beta, args.num_iterations = 0.1, 2
            rows = module.prepare_rows(model, other, batch, args)[0]
            assert len(rows.masked) == len(module.sample_masks(batch, 0, args).masked)
            assert gap(rows.ref, module.frozen_estimates(other, rows, args)) == 0
            add_lora(model, 4, 16)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.add_(0.1 * ("lora_B" in name))
            lora = module.prepare_rows(model, None, batch, args)[0]
            assert gap(lora.ref, rows.old) < 1e-5 and gap(lora.old, rows.old) > 1e-3

    run_ranks(1, body)


def sharded_model(module, seed=0):
    model = tiny_model(seed=seed)
    return module.parallelize(model, module.Args())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("module", [d1, bgpo])
def test_an_update_is_the_step_of_adamw_on_the_clipped_gradient(run_ranks, module, ranks):
    """Two inner updates on one and two ranks, the second of which has fewer live rows, against a
    model without FSDP.
    """

    def body(rank, world_size):
        settings = ARGS | {"learning_rate": 1e-2, "max_grad_norm": 0.05}
        settings |= {"lr_schedule": "linear", "schedule_steps": 2}
        args = module.Args(**settings, **{"beta": 0.0} if module is d1 else {"mc_num": 2})
        plain, model = tiny_model(), sharded_model(module)
        adamw = lambda m: torch.optim.AdamW(m.parameters(), betas=(0.8, 0.9), weight_decay=0.1)
        optimizer, reference = adamw(model), adamw(plain)
        prompts = ((1, 2, 3), (4, 1, 2, 3, 0, 1), (3, 3), (2, 2))
        batch = rollout_batch(module, plain, args, prompts)
        share = slice(16 * rank // world_size, 16 * (rank + 1) // world_size)
        names = ("input_ids", "valid_mask", "completion_mask", "block_ids", "advantages")
        part = changed(batch, **{name: getattr(batch, name)[share] for name in names})
        part.trace = changed(batch.trace, sample_index=batch.trace.sample_index[share])
        metrics = module.update(model, None, optimizer, part, 1, args)
        # the same by hand, on all rows
        draws = [module.sample_masks(batch, i, args) for i in range(2)]
        draws = [rows.select(rows.advantages != 0) for rows in draws]
        for rows in draws:
            # collective: every rank takes its micro-batches alike
            rows.old = module.frozen_estimates(plain, rows, args)
        for rows in draws:
            got = module.backward(plain, rows, 1.0, args)
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item()
            reference.param_groups[0]["lr"] = 0.5e-2  # step 1 of 2
            reference.step()
            reference.zero_grad()
        assert norm > 0.05
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q, atol=1e-6, rtol=1e-5, msg=name)
        assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert metrics["optim/lr"] == 0.5e-2
        for name in got.keys() & metrics.keys():  # policy/*, mismatch/*: means over rows that train
            share = got.get(f"{name.split('/')[0]}/weight", 1.0)
            assert metrics[name] == pytest.approx(float(got[name] / share), rel=1e-5, abs=1e-9)

    run_ranks(ranks, body)


@pytest.mark.parametrize("module", [d1, bgpo, spg, coupled_grpo, cj_grpo, wd1])
def test_a_dead_step_moves_weights_by_weight_decay_alone(run_ranks, module):
    def body(rank, world_size):
        args = module.Args(**ARGS, beta=0.0, learning_rate=1e-2)
        model = sharded_model(module)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        batch = rollout_batch(module, tiny_model(), args, records=module.RECORDS)
        batch.advantages = torch.zeros_like(batch.advantages)
        metrics = module.update(model, None, optimizer, batch, 0, args)
        assert metrics["optim/grad_norm"] == 0
        assert not any(name.startswith("policy/") for name in metrics)
        for p, q in zip(model.parameters(), tiny_model().parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q * (1 - 1e-3) ** 2, atol=1e-9, rtol=1e-9)

    run_ranks(1, body)


SPOILED = {
    "loss nan": lambda loss, values: loss * math.nan,
    "loss inf": lambda loss, values: loss * 0 + math.inf,
    "gradient norm ": lambda loss, values: loss + (values - values.detach()).abs().sqrt().sum(),
}


@pytest.mark.parametrize("words", SPOILED)
def test_what_is_not_finite_on_one_rank_stops_all_before_the_step(run_ranks, monkeypatch, words):
    def body(rank, world_size):
        args, policy_loss = bgpo.Args(**ARGS, mc_num=2), bgpo.policy_loss
        model = sharded_model(bgpo)

        def spoiled(estimates, *others):
            loss, metrics = policy_loss(estimates, *others)
            return (SPOILED[words](loss, estimates) if rank else loss), metrics

        monkeypatch.setattr(bgpo, "policy_loss", spoiled)
        optimizer = torch.optim.AdamW(model.parameters())
        batch = rollout_batch(bgpo, tiny_model(), args)
        with pytest.raises(SystemExit, match=f"not finite at step 3: .* on rank {rank}, ") as stop:
            bgpo.update(model, None, optimizer, batch, 2, args)
        assert not rank or words in str(stop.value)
        for p, q in zip(model.parameters(), tiny_model().parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q)

    run_ranks(2, body)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_reference_of_coupled_grpo_moves(run_ranks, monkeypatch, ranks):
    monkeypatch.setattr("distributed.sharding.cuda_bytes", lambda: 1 << 40)

    def body(rank, world_size):
        model, frozen = sharded_model(coupled_grpo, seed=1), tiny_model().requires_grad_(False)
        reference = coupled_grpo.parallelize(frozen, coupled_grpo.Args())
        assert hasattr(reference.lm_head.weight, "full_tensor") == (ranks > 1)
        coupled_grpo.move_reference(reference, model, coupled_grpo.Args(ref_mixup=0.6))
        pairs = zip(tiny_model().parameters(), model.parameters(), strict=True)
        for got, (old, new) in zip(reference.parameters(), pairs, strict=True):
            got = got.full_tensor() if hasattr(got, "full_tensor") else got
            torch.testing.assert_close(got, 0.4 * old + 0.6 * new.full_tensor())

    run_ranks(ranks, body)
