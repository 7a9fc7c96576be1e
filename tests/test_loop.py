"""The contract of every online script of METHODS: rows against the rollout, the gradient of an
update against the full graph, which rows train, on which old and reference values, how far.
"""

import importlib
import itertools
import math

import pytest
import torch
from oracles import (
    PROMPTS,
    Group,
    changed,
    estimates_of,
    full_graph_loss,
    gradient,
    peak_of_graphs,
    relative,
    rollout_batch,
    small_args,
    tiny_model,
    updated,
)
from sync_shared import METHODS, ONLINE

from algos import bgpo, d1, spg
from models import add_lora
from run.flags import RunFlags

FAMILIES = {script: METHODS[script].families for script in ONLINE}
PAIRS = [(s, f) for s in ONLINE for f in ("sdar", "llada", "dream") if f in FAMILIES[s]]
online = pytest.mark.parametrize("script", ONLINE)
alone = pytest.mark.usefixtures("one_rank")


def rolled(script, family=None, **fields):
    """-> module, a model, Args, a batch"""
    module = importlib.import_module(f"algos.{script}")
    model, args = tiny_model(family or FAMILIES[script][0]), small_args(module, **fields)
    batch = rollout_batch(module, model, args)
    assert {*batch.advantages.sign().flatten().tolist()} >= {1.0, 1.0 if script == "opsd" else -1.0}
    return module, model, args, batch


def has_kl(module):
    return "beta" in module.Args.__dataclass_fields__


@pytest.fixture
def in_fp64(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@alone
@pytest.mark.parametrize("script, family", PAIRS)
def test_an_update_is_that_of_the_full_graph(in_fp64, script, family, monkeypatch):
    """Loss and gradient in fp64, for micro-batches of some rows and of some draws of a
    row, which change no metric; clip and KL active. Old and reference values are those of the
    models with which rows were prepared.
    """
    monkeypatch.setattr("rollout.rows.maximum", lambda count: count + 1)  # of a rank with more rows
    chosen = {
        "epsilon": 0.1,
        "clip_ratio": 1.02,
        "mc_num": 3,
        "kl_to_old": 0.3,
        "nll_weight": 0.7,
        "row_mean": True,
        "lambda_max": 2.0,
        "kl_clip": 0.02,
    }
    module, model, args, batch = rolled(script, family, minibatches=False, **chosen)
    args.beta = 0.3 * has_kl(module)
    batch.num_tokens, batch.num_sequences = 50.0, 24.0  # of all ranks
    if script == "tracerl":
        generator = torch.Generator().manual_seed(0)
        batch.token_advantages = torch.randn(batch.completion_mask.shape, generator=generator)
    rows = module.sample_masks(batch, 0, args)
    (R, K, _), draws = rows.masked.shape, args.num_draws(batch.trace.num_replays)
    # what the plan counts; the rows of d-TreeRPO are segments, of d-OPSD few train
    assert R * K <= len(batch.input_ids) * draws or script in ("dtreerpo", "opsd")
    before, reference = models = tiny_model(family, shift=0.02), tiny_model(family, 1)
    is_taught = script == "opsd"  # the reference says what is scored
    old, ref = models if is_taught else (estimates_of(module, one, rows, args) for one in models)

    def check(old, *sizes):
        loss, seen = full_graph_loss(module, model, changed(rows, old=old, ref=ref), args), []
        want = gradient(model, loss)
        for args.micro_batch_size in sizes:
            prepared = module.prepare_rows(before, reference, batch, args)[0]
            metrics, got = updated(module, model, prepared, args)
            seen.append(metrics)
            assert metrics["loss/total"] == pytest.approx(loss.item())
            assert metrics == pytest.approx(seen[0])
            assert relative(got, want) < 1e-10

    check(old, *(size for size in (1, 6, 50) if size >= K or not module.DRAWS_TOGETHER))
    if not is_taught:
        args.num_iterations = 1  # the old values are the current ones: no pass finds them

        def frozen(net, *given, estimates=module.frozen_estimates):
            assert net is reference
            return estimates(net, *given)

        monkeypatch.setattr(module, "frozen_estimates", frozen)
        check(estimates_of(module, model, rows, args), 50)


def draws_of(rows):
    """Those that score something, without padding."""
    parts = zip(rows.input_ids, rows.valid_mask, rows.masked, rows.weights, strict=True)
    return sorted(
        (ids[valid].tolist(), mask[valid].tolist(), weights[valid[rows.batch.P :]].tolist())
        for ids, valid, masked, weighted in parts
        for mask, weights in zip(masked, weighted, strict=True)
        if weights.any()
    )


@alone
@online
def test_rows_depend_on_the_sample_alone(script):
    """Not on the rank that holds it, its padding, or the width of other completions."""
    module, model, args, batch = rolled(script, train_steps=1)
    rows = module.sample_masks(batch, 0, args)
    assert draws_of(module.sample_masks(batch, 0, args)) == draws_of(rows)
    later = rollout_batch(module, model, args, PROMPTS[1:], 4)
    part = module.sample_masks(later, 0, args)
    assert later.P < batch.P
    rows = rows.select(slice(-len(part.masked), None))
    if script != "dtreerpo":  # its weights count segments
        assert draws_of(part) == draws_of(rows)


@alone
@online
def test_rows_are_prepared_before_the_first_update(script):
    """Short sequences first, at most a micro-batch of draws in a row. Without KL dead rows go, one
    stays if all are dead; old values are kept for a second update.
    """
    module, model, args, batch = rolled(script, beta=0.0, train_steps=1)
    prepared = module.prepare_rows(model, None, batch, args)
    assert len(prepared) == 2
    for iteration, rows in enumerate(prepared):
        everything = module.sample_masks(batch, iteration, args)
        everything = everything or module.sample_masks(batch, 0, args)
        if script != "opsd":  # its teacher chooses what is scored
            assert draws_of(rows) == draws_of(everything.select(everything.advantages != 0))
            assert rows.ref is None
        assert (rows.valid_mask.sum(1).diff() >= 0).all() and rows.masked.shape[1] <= 5
        assert (rows.old is not None) == module.USES_OLD
    dead = changed(batch, advantages=torch.zeros_like(batch.advantages))
    (rows, *_) = module.prepare_rows(model, None, dead, args)
    assert len(rows.masked) == 1
    metrics, found = updated(module, model, rows, args)
    assert not found.any() and not any(name.startswith("policy/") for name in metrics)
    if has_kl(module):
        # with LoRA the model without adapters, which are on again for the second update
        args.beta = 0.1
        plain = module.prepare_rows(model, None, batch, args)[1]
        # TraceRL leaves groups out as a whole
        assert len(plain.masked) > len(prepared[1].masked) or script == "tracerl"
        add_lora(model, 4, 16)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(0.1 * ("lora_B" in name))
        adapted = module.prepare_rows(model, None, batch, args)[1]
        gaps = [(x - plain.old).abs().max() for x in (plain.ref, adapted.ref, adapted.old)]
        assert gaps[0] == 0 and gaps[1] < 1e-5 and gaps[2] > 1e-3


@alone
@pytest.mark.parametrize(
    "script, family",
    [p for p in PAIRS if p[0] in ("cj_grpo", "justgrpo", "tracerl", "tpg") and p[1] != "dream"],
)
def test_some_steps_are_all_on_average(in_fp64, script, family):
    """Mean of loss and gradient over all orders of the steps, of which the first two are scored; a
    sequence may have made fewer. Clip and KL active.
    """
    chosen = {"epsilon": 0.1, "kl_to_old": 0.3, "row_mean": True}
    chosen["denoising_steps"] = 2 if family == "llada" else 4
    module, model, args, batch = rolled(script, family, **chosen)
    args.beta, args.micro_batch_size = 0.3 * has_kl(module), 99
    models = tiny_model(family, shift=0.02), tiny_model(family, 1)

    def terms(**fields):
        vars(args).update(fields)
        rows = module.prepare_rows(*models, batch, args)[1]
        loss, _ = module.policy_loss(module.draw_logps(model, rows), rows.old, rows.ref, rows, args)
        return rows.weights.any(2).sum(1), torch.cat([loss[None], gradient(model, loss)])

    (made, want), means = terms(train_steps=0), []
    assert made.min() < made.max() == 4
    for order in itertools.permutations(range(4)):
        batch.uniform = lambda iteration, draw, offset: torch.tensor(order)[draw] / 4.0  # noqa: B023
        scored, got = terms(train_steps=2)
        assert scored.max() == 2 and relative(got, want) > 0.01
        means.append(got)
    assert relative(torch.stack(means).mean(0), want) < 1e-12


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("module", [d1, bgpo])
def test_an_update_is_the_step_of_adamw_on_the_clipped_gradient(run_ranks, module, ranks):
    """Two inner updates under FSDP2, against the whole step without it; the second rank has fewer
    live rows. Metrics are means over the rows that train. What is not finite on one rank stops all
    before the third step.
    """

    def body(rank, ranks):
        args = small_args(module, lr_schedule="linear", schedule_steps=2, beta=0.0)
        args.learning_rate, args.max_grad_norm = 1e-2, 0.05
        plain, model = tiny_model(), module.parallelize(tiny_model(), args)
        adamw = lambda m: torch.optim.AdamW(m.parameters(), betas=(0.8, 0.9), weight_decay=0.1)
        optimizer, reference = adamw(model), adamw(plain)
        prompts = *PROMPTS, (3, 3)
        batch, n = rollout_batch(module, plain, args, prompts), 4 // ranks
        batch.num_tokens /= ranks  # each rank counts this batch
        batch.num_sequences /= ranks
        mine = slice(rank * n, rank * n + n)
        part = rollout_batch(module, plain, args, prompts[mine], rank * n * 4)
        part.advantages = batch.advantages.chunk(ranks)[rank]
        whole = module.prepare_rows(plain, None, batch, args)
        for rows, mine in zip(whole, module.prepare_rows(model, None, part, args), strict=True):
            metrics = module.update(model, optimizer, mine, 1, args)
            estimates = module.estimate_logps(module.draw_logps(plain, rows), rows, args)
            loss, got = module.policy_loss(estimates, rows.old, None, rows, args)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item()
            reference.param_groups[0]["lr"] = 0.5e-2  # step 1 of 2
            reference.step()
            reference.zero_grad()
        if module is bgpo:  # the gradient alone
            for p in model.parameters():
                p.grad = torch.full_like(p, math.nan)
        elif rank + 1 == ranks:
            mine.advantages *= math.nan
        with pytest.raises(SystemExit, match=r"not finite at step 3: loss \["):
            module.update(model, optimizer, mine, 2, args)
        assert norm > 0.05 and metrics["optim/lr"] == 0.5e-2
        assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q, atol=1e-6, rtol=1e-5)
        for name in got.keys() & metrics.keys():
            weight = got.get(f"{name.split('/')[0]}/weight", 1.0)
            assert metrics[name] == pytest.approx((got[name] / weight).item(), rel=1e-5, abs=1e-9)

    run_ranks(ranks, body)


@alone
@pytest.mark.parametrize("module", [bgpo, spg])
def test_memory_is_that_of_a_micro_batch_and_gradients_are_reduced_once(module):
    """Whatever the number of draws, if the loss is a sum over them; else they must fit."""
    model, args = tiny_model(), small_args(module, num_iterations=1, micro_batch_size=4)
    (group,) = model.groups = [Group()]
    batch, peaks = rollout_batch(module, model, args), []

    def step():
        group.synced.clear()
        (rows,) = module.prepare_rows(model, None, batch, args)
        return peak_of_graphs(lambda: updated(module, model, rows, args))

    for args.mc_num in (2, 4, 16)[: 2 if module.DRAWS_TOGETHER else 3]:
        peaks.append(step())
        assert group.synced == [False] * (2 * args.mc_num - 1) + [True]  # 8 live rows
    assert max(peaks) < 1.1 * peaks[0]
    args.mc_num, args.sync_every_backward = 4, True
    step()
    assert len(group.synced) == 8 and all(group.synced)
    args.micro_batch_size = 32
    assert step() > 3 * peaks[0]


SCHEDULES = [  # schedule, steps of warm-up, of the schedule; shares of the rate in steps 0, 1, ...
    ("constant", 4, 100, [0.25, 0.5, 0.75, 1, 1]),
    ("linear", 2, 6, [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
    ("cosine", 3, 5, [1 / 3, 2 / 3, 1, 1, 0.5, 0]),
]


@pytest.mark.parametrize("schedule, warmup, steps, want", SCHEDULES)
def test_learning_rate_schedules(schedule, warmup, steps, want):
    how = {"lr_schedule": schedule, "warmup_steps": warmup}
    for args in (RunFlags(schedule_steps=steps, **how), RunFlags(max_steps=steps, **how)):
        assert [args.lr_share(step) for step in range(len(want))] == pytest.approx(want)
