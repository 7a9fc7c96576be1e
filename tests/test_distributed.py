"""FSDP2 on gloo: two ranks equal one, and the traps that cost a day each (specs: stale root, sync, saving)."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from test_methods import MASK, TINY, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from algos import d1
from evals import mean_score
from models import export_weights, load_model, save_model
from models.tiny import random_model

ARGS = SimpleNamespace(activation_checkpointing=False, attention="auto", compile=False)


def batch_of(rows=8, length=12):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5, (rows, length), generator=generator)
    valid = torch.arange(length) >= torch.arange(rows)[:, None] % 4  # left padding
    score = (torch.rand(rows, length, generator=generator) < 0.4) & valid
    return ids, torch.where(score, MASK, ids), score, valid


def step_of(model, ids, noisy, score, valid, num_tokens, scale=1.0, micro=3, every=False):
    """One accumulated gradient of the mean log-probability, as the scripts make it."""
    parts = range(0, len(ids), micro)
    loss = 0.0
    for i in parts:
        rows = slice(i, i + micro)
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(every or i == parts[-1])
        part = -model.logps(ids[rows], noisy[rows], score[rows], valid[rows]).sum() / num_tokens
        (part * scale).backward()
        loss += part.item()
    return loss


@pytest.mark.parametrize("every, checkpointing", [(False, False), (True, False), (False, True)])
def test_two_ranks_give_the_gradient_of_one(run_ranks, every, checkpointing):
    """Ragged masks, a rank with no scored token at all in a micro-batch, sums over a global count: 1e-10 in fp64."""

    def body(rank, world_size):
        whole, batch = tiny_model(), batch_of()
        batch[2][4:7] = False  # rank 1's first micro-batch scores nothing
        num_tokens = batch[2].sum().item()
        want_loss = step_of(whole, *batch, num_tokens)
        sharded = d1.parallelize(
            tiny_model(),
            SimpleNamespace(
                activation_checkpointing=checkpointing, attention="auto", compile=False
            ),
        )
        mine = [tensor[rank * 4 : rank * 4 + 4] for tensor in batch]
        loss = step_of(sharded, *mine, num_tokens, scale=world_size, every=every)
        total = d1.all_reduce({"loss": loss})["loss"]
        assert math.isclose(total, want_loss, rel_tol=1e-10)
        for (name, p), q in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(
                p.grad.full_tensor(), q.grad, atol=1e-10, rtol=1e-8, msg=name
            )

    run_ranks(2, body)


@pytest.mark.parametrize("reshard", [True, False])
def test_stale_root(run_ranks, reshard):
    """A no-grad forward between backward and step must change nothing. With a root that stays gathered it hides the step."""

    def body(rank, world_size):
        def build():
            model, mesh = tiny_model(), init_device_mesh("cpu", (world_size,))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
            for name in ("logps", "logits"):
                register_fsdp_forward_method(model, name)
            return model, torch.optim.SGD(list(model.parameters()), lr=0.1)

        ids, noisy, score, valid = batch_of(4)
        results = []
        for evaluates in (False, True):
            model, optimizer = build()
            step_of(model, ids, noisy, score, valid, 10.0, scale=1.0)
            if evaluates:
                with torch.no_grad():
                    model.logits(ids)
            optimizer.step()
            with torch.no_grad():
                results.append(model.logits(ids))
        difference = (results[0] - results[1]).abs().max().item()
        assert (difference == 0) if reshard else (difference > 1e-4), difference

    run_ranks(2, body)


def test_parallelize_does_not_keep_the_root_gathered(run_ranks):
    """The scripts' own parallelize: parameters are sharded again after a no-grad forward: the optimizer sees live ones."""

    def body(rank, world_size):
        model = d1.parallelize(tiny_model(), ARGS)
        params = list(model.parameters())
        with torch.no_grad():
            model.logits(batch_of(2)[0])
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))

    run_ranks(2, body)


def test_weights_leave_the_shards_exactly(run_ranks, tmp_path):
    def body(rank, world_size):
        whole, sharded = tiny_model(), d1.parallelize(tiny_model(), ARGS)
        want = whole.state_dict()
        for name, value in export_weights(sharded):
            assert torch.equal(value, want.pop(name))
        assert not want
        sharded.checkpoint_config = sharded.checkpoint_config | {"torch_dtype": "float64"}
        save_model(sharded, tmp_path / "saved", None)
        again = load_model(tmp_path / "saved", dtype=torch.float64)
        assert all(
            torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True)
        )

    run_ranks(2, body)


def test_a_failed_save_stops_every_rank(run_ranks, tmp_path):
    """Only rank 0 writes and meets the full disk; the other must not wait for it for ever, and both say why."""
    (tmp_path / "saved").mkdir()

    def body(rank, world_size):
        sharded = d1.parallelize(tiny_model(), ARGS)
        with pytest.raises(SystemExit, match="could not save .*saved: it exists already"):
            save_model(sharded, tmp_path / "saved", None)

    run_ranks(2, body)


def test_micro_batches_are_equally_many_on_all_ranks(run_ranks):
    """A rank that has run out repeats its last one with scale 0: counts and gradients stay those of one rank."""

    def body(rank, world_size):
        args = SimpleNamespace(micro_batch_size=2)
        rows = [list(range(5)), list(range(2))][rank]

        class Rows(list):
            def split(self, size):
                return [self[i : i + size] for i in range(0, len(self), size)]

        micros = d1.micro_batches(Rows(rows), args)
        assert len(micros) == 3
        assert [real for _, real in micros] == [[True] * 3, [True, False, False]][rank]

    run_ranks(2, body)


def test_the_reference_copy_and_the_engine_do_not_move_with_the_policy(run_ranks):
    """A second sharded model and a plain copy keep their weights while the optimizer moves the first."""

    def body(rank, world_size):
        policy, reference = (
            d1.parallelize(tiny_model(), ARGS),
            d1.parallelize(tiny_model().requires_grad_(False), ARGS),
        )
        before = [value.clone() for _, value in export_weights(reference)]
        optimizer = torch.optim.SGD(list(policy.parameters()), lr=0.1)
        step_of(policy, *batch_of(4), 10.0)
        optimizer.step()
        after = [value for _, value in export_weights(reference)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert any(
            not torch.equal(a, b) for a, (_, b) in zip(before, export_weights(policy), strict=True)
        )

    run_ranks(2, body)


def test_all_reduce_sums_and_takes_the_maximum(run_ranks):
    def body(rank, world_size):
        assert d1.all_reduce({"a": rank + 1, "b": torch.tensor(0.5)}) == {"a": 3.0, "b": 1.0}
        assert d1.all_reduce({"a": rank}, dist.ReduceOp.MAX) == {"a": 1.0}

    run_ranks(2, body)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_held_out_problems_are_dealt_out_with_their_own_numbers(run_ranks, world_size):
    """Five problems: each is answered once, as the sample whose number is its place, so that ranks change no draw; of four
    ranks one has nothing to do."""

    class Answers:
        device = "cpu"

        def generate(self, prompts, sample_offset, **settings):
            assert settings == {"temperature": 0.5} and 0 < len(prompts) <= -(-5 // world_size)
            numbers = [(sample_offset + i, *ids) for i, ids in enumerate(prompts)]
            return SimpleNamespace(text=lambda i, tokenizer: numbers[i])

    task = SimpleNamespace(
        score=lambda numbers, example: 2.0**example * (numbers == (example, example))
    )

    def body(rank, ranks):
        assert (
            mean_score(Answers(), task, None, [(i, [i]) for i in range(5)], temperature=0.5)
            == 31 / 5
        )

    run_ranks(world_size, body)


def test_a_deep_copy_is_not_needed_for_engines():
    """make_engine takes a plain model; load_weights fills it from a generator."""
    from rollout import make_engine

    model, other = tiny_model(0), random_model(TINY, 1).double()
    engine = make_engine(copy.deepcopy(model))
    engine.load_weights(export_weights(other))
    assert all(
        torch.equal(a, b)
        for a, b in zip(engine.model.parameters(), other.parameters(), strict=True)
    )
