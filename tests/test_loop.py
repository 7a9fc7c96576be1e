"""The contract of every online script of METHODS: rows against the rollout, the gradient of an
update against the full graph, which rows train, on which old and reference values, how far.
"""

import importlib
import math

import pytest
import torch
from oracles import (
    EOS,
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

from algos import bgpo, coupled_grpo, d1, espo, spg
from models import add_lora
from run.flags import RunFlags

FAMILIES = ("sdar", "llada", "dream")
SERVED = {script: [f for f in FAMILIES if f in METHODS[script]["families"]] for script in ONLINE}
PAIRS = [(script, family) for script, families in SERVED.items() for family in families]
online = pytest.mark.parametrize("script", ONLINE)
alone = pytest.mark.usefixtures("one_rank")


def rolled(script, family=None, **fields):
    """-> module, a model, Args, a batch"""
    module = importlib.import_module(f"algos.{script}")
    model, args = tiny_model(family or SERVED[script][0]), small_args(module, **fields)
    return module, model, args, rollout_batch(module, model, args)


@alone
@pytest.mark.parametrize("script, family", PAIRS)
def test_the_gradient_is_that_of_the_full_graph(script, family, monkeypatch):
    """And so is the loss: to 1e-10 in fp64 for micro-batches of some rows and of some draws of a
    row, and for any order of rows and draws, clip and KL active; one shifted mask is seen.
    """
    chosen = {"epsilon": 0.1, "mc_num": 3, "kl_to_old": 0.3, "row_mean": True, "lambda_max": 2.0}
    chosen |= {"beta": 0.3} if script in WITH_KL else {}
    module, model, args, batch = rolled(script, family, minibatches=False, **chosen)
    batch.num_tokens, batch.num_sequences = 50.0, 24.0  # other ranks have more
    monkeypatch.setattr("rollout.rows.maximum", lambda count: count + 1)  # a forward more, too
    generator = torch.Generator().manual_seed(0)
    if script == "tracerl":
        batch.token_advantages = torch.randn(batch.completion_mask.shape, generator=generator)
    rows = module.sample_masks(batch, 0, args)
    before, reference = tiny_model(family, shift=0.02), tiny_model(family, 1)
    K, draws = rows.masked.shape[1], args.num_draws(batch.trace.num_replays)
    if script != "dtreerpo":  # its rows are segments
        assert len(rows.masked) * K <= len(batch.input_ids) * draws  # what the plan counts

    def valued(rows):
        rows = changed(rows, weights=rows.weights.double())
        values = [estimates_of(module, one, rows, args) for one in (before, reference)]
        return changed(rows, old=values[0], ref=values[1])

    def inner(rows, size=1000, **values):
        args.micro_batch_size = size
        rows = rows.for_update(size, module.DRAWS_TOGETHER, True)
        metrics, found = updated(module, model, changed(valued(rows), **values), args)
        return metrics["loss/total"], found

    loss = full_graph_loss(module, model, valued(rows), args)
    want = gradient(model, loss)
    for size in (1, 5, 1000):
        if module.DRAWS_TOGETHER and size < K:
            with pytest.raises(AssertionError):
                inner(rows, size)
        else:
            value, got = inner(rows, size)
            assert relative(got, want) < 1e-10 and value == pytest.approx(loss.item(), rel=1e-10)
    shuffled = rows.select(torch.randperm(len(rows.masked), generator=generator))
    for name in vars(shuffled).keys() & {"masked", "weights", "targets"}:
        setattr(shuffled, name, getattr(shuffled, name).flip(1))
    assert relative(inner(shuffled)[1], want) < 1e-10
    assert relative(inner(changed(rows, masked=rows.masked.roll(1, -1)))[1], want) > 0.01
    # with one update the old values are the current ones
    now = changed(valued(rows), old=estimates_of(module, model, valued(rows), args))
    want = gradient(model, full_graph_loss(module, model, now, args))
    assert relative(inner(rows, old=None)[1], want) < 1e-10


@alone
@online
def test_rows_depend_on_the_sample_alone(script):
    """Not on padding, on the part of the batch that a rank holds, or on the width of other
    completions.
    """
    module, model, args, batch = rolled(script)
    pad = lambda x, value: torch.nn.functional.pad(x, (3, 0), value=value)
    wide = changed(batch, input_ids=pad(batch.input_ids, EOS), P=batch.P + 3)
    wide.valid_mask = pad(batch.valid_mask, False)
    rows, other = module.sample_masks(batch, 0, args), module.sample_masks(wide, 0, args)
    assert torch.equal(rows.masked, other.masked[..., 3:])
    assert torch.equal(rows.weights, other.weights)
    with torch.no_grad():
        a, b = module.draw_logps(model, rows), module.draw_logps(model, other)
    torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    assert torch.equal(module.sample_masks(batch, 0, args).masked, rows.masked)
    if script == "dtreerpo":  # its rows are segments
        return
    part = shared(batch, slice(4, None))  # a rank that holds the later groups alone
    masked = module.sample_masks(part, 0, args).masked
    assert torch.equal(masked, rows.masked[-len(masked) :])
    found, widths = [], set()
    for others in [[2, 2]], [[4, 1, 2, 3, 0], [2, 2]]:
        batch = rollout_batch(module, model, args, [[1, 2, 3, 1], *others])
        rows = module.sample_masks(batch, 0, args)
        widths.add(batch.completion_mask.shape[1])
        found.append((rows.masked[:4, :, batch.P :][..., :8], rows.weights[:4, :, :8]))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert len(widths) == 1 + (model.attention == "block-causal")


def shared(batch, index):
    """A part of the sequences."""

    def some(thing):
        fields = {name: x[index] for name, x in vars(thing).items() if torch.is_tensor(x)}
        if records := getattr(thing, "records", None):
            fields["records"] = {name: value[index] for name, value in records.items()}
        return changed(thing, **fields)

    return changed(some(batch), trace=some(batch.trace))


def gap(a, b):
    return (a - b).abs().max().item()


def draws_of(rows):
    """Those that score something."""
    ids = rows.input_ids[:, None].expand_as(rows.masked)
    draws = torch.cat([ids, rows.masked, rows.weights], 2)[rows.weights.any(2)]
    return sorted(draws.tolist())


WITH_KL = [
    script
    for script in ONLINE
    if "beta" in importlib.import_module(f"algos.{script}").Args.__dataclass_fields__
]


@alone
@online
def test_rows_are_prepared_before_the_first_update(script):
    """Short sequences first, at most a micro-batch of draws in a row. Without KL dead rows go, one
    stays if all are dead, and counts stay; old and reference values are of their models.
    """
    module, model, args, batch = rolled(script, beta=0.0)
    prepared = module.prepare_rows(model, None, batch, args)
    assert len(prepared) == 2
    for iteration, rows in enumerate(prepared):
        everything = module.sample_masks(batch, iteration, args)
        everything = everything or module.sample_masks(batch, 0, args)
        assert draws_of(rows) == draws_of(everything.select(everything.advantages != 0))
        assert (rows.valid_mask.sum(1).diff() >= 0).all() and rows.masked.shape[1] <= 5
        assert (rows.advantages != 0).all() and rows.batch.num_sequences == 12
        assert rows.ref is None and (rows.old is not None) == module.USES_OLD
        if module.USES_OLD:
            assert gap(rows.old, module.frozen_estimates(model, rows, args)) == 0
    dead = changed(batch, advantages=torch.zeros_like(batch.advantages))
    (rows, *_) = module.prepare_rows(model, None, dead, args)
    assert len(rows.masked) == 1
    metrics, found = updated(module, model, rows, args)
    assert not found.any() and not any(name.startswith("policy/") for name in metrics)
    args.num_iterations = 1
    assert module.prepare_rows(model, None, batch, args)[0].old is None
    if script in WITH_KL:
        args.beta, args.num_iterations, other = 0.1, 2, tiny_model(SERVED[script][0], 1)
        rows = module.prepare_rows(model, other, batch, args)[0]
        assert draws_of(rows) == draws_of(module.sample_masks(batch, 0, args))
        assert gap(rows.ref, module.frozen_estimates(other, rows, args)) == 0
        add_lora(model, 4, 16)  # the reference is the model without adapters
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(0.1 * ("lora_B" in name))
        adapted = module.prepare_rows(model, None, batch, args)[0]
        assert gap(adapted.ref, rows.old) < 1e-5 and gap(adapted.old, rows.old) > 1e-3


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("module", [d1, bgpo])
def test_an_update_is_the_step_of_adamw_on_the_clipped_gradient(run_ranks, module, ranks):
    """Two inner updates under FSDP2, against the whole step without it; the second rank has fewer
    live rows. Metrics are means over the rows that train.
    """

    def body(rank, world_size):
        settings = {"learning_rate": 1e-2, "max_grad_norm": 0.05, "beta": 0.0}
        args = small_args(module, lr_schedule="linear", schedule_steps=2, **settings)
        plain, model = tiny_model(), module.parallelize(tiny_model(), args)
        adamw = lambda m: torch.optim.AdamW(m.parameters(), betas=(0.8, 0.9), weight_decay=0.1)
        optimizer, reference = adamw(model), adamw(plain)
        batch = rollout_batch(module, plain, args, ((1, 2, 3), (4, 1, 2, 3, 0, 1), (3, 3), (2, 2)))
        batch.num_tokens /= world_size  # each rank counts this batch
        batch.num_sequences /= world_size
        part = shared(batch, torch.arange(16).chunk(world_size)[rank])
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
        assert norm > 0.05 and metrics["optim/lr"] == 0.5e-2
        assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q, atol=1e-6, rtol=1e-5)
        for name in got.keys() & metrics.keys():
            weight = got.get(f"{name.split('/')[0]}/weight", 1.0)
            assert metrics[name] == pytest.approx((got[name] / weight).item(), rel=1e-5, abs=1e-9)

    run_ranks(ranks, body)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("module", [coupled_grpo, espo])
def test_the_reference_moves(run_ranks, monkeypatch, module, ranks):
    """Whole on one rank, sharded on two."""
    monkeypatch.setattr("distributed.sharding.cuda_bytes", lambda: 1 << 40)

    def body(rank, world_size):
        args, frozen = module.Args(ref_mixup=0.6), tiny_model().requires_grad_(False)
        reference, model = (module.parallelize(m, args) for m in (frozen, tiny_model(seed=1)))
        assert hasattr(reference.lm_head.weight, "full_tensor") == (ranks > 1)
        module.move_reference(reference, model, args)
        pairs = zip(tiny_model().parameters(), tiny_model(seed=1).parameters(), strict=True)
        for got, (old, new) in zip(reference.parameters(), pairs, strict=True):
            got = got.full_tensor() if ranks > 1 else got
            torch.testing.assert_close(got, 0.4 * old + 0.6 * new)

    run_ranks(ranks, body)


SPOILED = {
    "loss nan": lambda loss, values: loss * math.nan,
    "loss inf": lambda loss, values: loss * 0 + math.inf,
    "gradient norm ": lambda loss, values: loss + (values - values.detach()).abs().sqrt().sum(),
}


@pytest.mark.parametrize("words", SPOILED)
def test_what_is_not_finite_on_one_rank_stops_all_before_the_step(run_ranks, monkeypatch, words):
    def body(rank, world_size):
        args, policy_loss = small_args(bgpo), bgpo.policy_loss
        model = bgpo.parallelize(tiny_model(), args)

        def spoiled(estimates, *others):
            loss, metrics = policy_loss(estimates, *others)
            return (SPOILED[words](loss, estimates) if rank else loss), metrics

        monkeypatch.setattr(bgpo, "policy_loss", spoiled)
        optimizer = torch.optim.AdamW(model.parameters())
        batch = rollout_batch(bgpo, tiny_model(), args)
        rows = bgpo.prepare_rows(model, None, batch, args)[0]
        with pytest.raises(SystemExit, match=f"not finite at step 3: .* on rank {rank}, ") as stop:
            bgpo.update(model, optimizer, rows, 2, args)
        assert not rank or words in str(stop.value)
        for p, q in zip(model.parameters(), tiny_model().parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q)

    run_ranks(2, body)


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

    for args.mc_num in (2, 4, 16):
        if module.DRAWS_TOGETHER and args.mc_num > 4:
            with pytest.raises(AssertionError):
                step()
            continue
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
    ("linear", 0, 4, [1, 0.75, 0.5, 0.25, 0, 0]),
    ("linear", 2, 6, [0.5, 1, 1, 0.75, 0.5]),
    ("cosine", 3, 5, [1 / 3, 2 / 3, 1, 1, 0.5, 0]),
]


@pytest.mark.parametrize("schedule, warmup, steps, want", SCHEDULES)
def test_learning_rate_schedules(schedule, warmup, steps, want):
    how = {"lr_schedule": schedule, "warmup_steps": warmup}
    for args in (RunFlags(schedule_steps=steps, **how), RunFlags(max_steps=steps, **how)):
        assert [args.lr_share(step) for step in range(len(want))] == pytest.approx(want)
