"""What every sampler keeps, whatever its rule: recorded states, likelihoods by enumeration, ends, Dream's shift, two ranks."""

import itertools
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_masked import SMALL as MASKED_SMALL
from test_masked import model_of as masked_model_of
from test_rollout import SMALL as BLOCK_SMALL
from test_rollout import M, prompts_of
from test_rollout import model_of as block_model_of

from algos import d1
from models import export_weights
from models.tiny import random_model
from rollout import make_engine
from rollout.block import BlockEngine
from rollout.masked import MaskedEngine
from rollout.probe import replay_logps
from rollout.sampling import keyed_uniform, sample_categorical

MODELS = {
    "block": block_model_of,
    "llada": lambda **how: masked_model_of("llada", **how),
    "dream": lambda: masked_model_of("dream"),
}
RULES = [("block", rule) for rule in BlockEngine.choices["remasking"]] + [
    ("llada", rule) for rule in MaskedEngine.choices["remasking"]
]


@pytest.fixture(scope="module")
def engines():
    return {name: make_engine(build()) for name, build in MODELS.items()}


# --- recorded states ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("remasking", ["low_confidence_static", "low_confidence_dynamic", "random"])
def test_states_rebuilt_from_the_map_are_those_that_the_model_saw(
    monkeypatch, engines, name, remasking
):
    """Every forward that revealed a token, in order, against the tokens that replay_map and completion_ids make of it."""
    engine, seen = engines[name], []
    n, hidden = 4, engine.model.hidden
    monkeypatch.setattr(
        engine.model,
        "hidden",
        lambda ids, *rest: seen.append(ids[0].tolist()) or hidden(ids, *rest),
    )
    prompt = prompts_of([6])[0]
    options = dict(
        gen_length=12,
        block_length=n,
        denoising_steps=3,
        confidence_threshold=0.5,
        stop_at_eos=False,
    )
    trace = engine.generate([prompt], remasking=remasking, **options)
    denoised = [ids for ids in seen if M in ids]  # neither the prefill nor a commit
    completion, step = trace.completion_ids[0].tolist(), trace.replay_map[0].tolist()
    assert min(step) >= 0, "every response token has exactly one step"
    if name == "block":  # the block in work alone, on the grid that starts with the prompt
        whole, first, want = prompt + completion, [-1] * len(prompt) + step, []
        for start in range(len(prompt) // n * n, len(whole), n):
            block = range(start, start + n)
            for now in sorted({first[p] for p in block} - {-1}):
                want.append([whole[p] if first[p] < now else M for p in block])
        denoised = [ids[-n:] for ids in denoised]
    else:
        states = list(trace.states(M))
        want = [prompt + states[now][0].tolist() for now in sorted(set(step))]
    assert denoised == want
    assert denoised[1:] != want[:-1]  # control: one state too late


# --- likelihoods -------------------------------------------------------------------------------------------------------------


def trajectories(name, remasking, samples=6000):
    """Rollouts of 2 tokens of 3 values, one a step. -> {(tokens, order): (frequency, exp of the sum of recorded logps)}"""
    sizes = {"vocab_size": 4, "mask_token_id": 3, "eos_token_id": 0, "pad_token_id": 0}
    config = (
        BLOCK_SMALL | {"block_size": 2}
        if name == "block"
        else MASKED_SMALL[name] | {"embedding_size": 4}
    )
    model = random_model(config | sizes, dtype=torch.float64)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model.eos_token_ids, model.pad_token_id = [], 0
    trace = make_engine(model, max_batch_size=samples).generate(
        [[1, 2]],
        num_samples=samples,
        gen_length=2,
        block_length=2,
        denoising_steps=2,
        remasking=remasking,
        stop_at_eos=False,
    )
    keys = [
        (*ids, *steps)
        for ids, steps in zip(trace.completion_ids.tolist(), trace.step_map.tolist(), strict=True)
    ]
    chance = dict(zip(keys, trace.logps.sum(1).exp().tolist(), strict=True))
    return {key: (keys.count(key) / samples, chance[key]) for key in chance}


@pytest.mark.parametrize("name", ["block", "llada"])
@pytest.mark.parametrize("remasking", ["entropy", "topk_margin", "sequential"])
def test_recorded_logps_are_the_likelihood_of_the_trajectory(engines, name, remasking):
    """Where the order does not depend on the draws: probabilities of all trajectories sum to 1 and match the frequencies."""
    if remasking not in engines[name].choices["remasking"]:
        with pytest.raises(SystemExit, match=f"--remasking {remasking}"):
            engines[name].generate([[3]], remasking=remasking)
        return
    seen = trajectories(name, remasking)
    assert {key[:2] for key in seen} == set(itertools.product(range(3), repeat=2)) and len(
        seen
    ) == 9
    assert sum(chance for _, chance in seen.values()) == pytest.approx(1, abs=1e-9)
    assert max(abs(frequency - chance) for frequency, chance in seen.values()) < 0.025


@pytest.mark.parametrize("name", ["block", "llada"])
def test_logps_of_rules_that_look_at_the_draw_are_no_likelihood(name):
    """Negative control: by the probability of the drawn token both orders occur, and the products sum to more than 1."""
    seen = trajectories(name, "low_confidence_static")
    assert sum(chance for _, chance in seen.values()) > 1.2
    assert max(abs(frequency - chance) for frequency, chance in seen.values()) > 0.025


# --- every rule ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, remasking", RULES, ids=lambda value: value)
def test_every_rule_ends_on_any_logits(name, remasking):
    """Random, constant and one-hot rows; thresholds and factors from their whole range: a forward reveals a token at least."""
    generator = torch.Generator().manual_seed(2)
    for scale in (0.0, 3.0, 1e4):  # of the head: constant, varied, one token only
        model = MODELS[name](scale=scale)
        engine = make_engine(model)
        for steps in (1, 3, 4, 9):
            threshold, factor = steps % 3 / 2, 0.01 + 4 * float(torch.rand((), generator=generator))
            trace = engine.generate(
                prompts_of([1 + steps, 3]), num_samples=2, gen_length=12, denoising_steps=steps, remasking=remasking,
                seed=steps, confidence_threshold=threshold, factor=factor, stop_at_eos=False, block_length=4,
            )  # fmt: skip
            on_canvas = torch.arange(trace.step_map.shape[1]) < trace.canvas_length[:, None]
            assert ((trace.step_map >= 0) == on_canvas).all() and not (
                trace.completion_ids == M
            ).any()
            blocks = -(-trace.canvas_length // 4) + 1
            assert (trace.num_forwards <= trace.canvas_length + blocks).all()


# --- Dream's shift -----------------------------------------------------------------------------------------------------------


class NextToken(torch.nn.Module):
    """Row i of its hidden states names the token behind position i: an oracle of one sequence, shifted as Dream is."""

    attention, mask_token_id, block_length, eos_token_ids, pad_token_id = (
        "bidirectional",
        31,
        4,
        [],
        0,
    )

    def __init__(self, sequence, own_shift=False):
        super().__init__()
        self.lm_head = torch.nn.Linear(32, 32, bias=False, dtype=torch.float64)
        self.lm_head.weight.data = 50 * torch.eye(32, dtype=torch.float64)
        self.sequence, self.attention_backend = torch.tensor([*sequence, 0]), "auto"
        self.layers = torch.nn.ModuleList(
            [torch.nn.ModuleDict({"k_proj": torch.nn.Linear(2, 2)})]
        )  # memory is counted by them
        self.config = SimpleNamespace(
            num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=2
        )
        if own_shift:  # Fast-dLLM's: whatever rows it gets, the first one keeps its own
            self.hidden = lambda *inputs: self._shift(self.next_tokens(*inputs))

    @staticmethod
    def _shift(hidden):
        return torch.cat([hidden[:, :1], hidden[:, :-1]], 1)

    def next_tokens(self, input_ids, position_ids, attend):
        kv = torch.zeros(len(input_ids), 1, input_ids.shape[1], 2, dtype=torch.float64)
        attend(0, kv, kv, kv)  # a cache may count on it
        return F.one_hot(self.sequence[position_ids + 1], 32).double()

    hidden = next_tokens

    def head(self, hidden):
        return self.lm_head(hidden)

    def grid(self, valid):
        return (valid.long().cumsum(1) - 1).clamp(min=0), torch.zeros_like(valid, dtype=torch.long)


class Shifted(NextToken):
    def align(self, hidden, valid_mask):
        return self._shift(hidden)  # no padding here


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_an_oracle_of_the_next_token_writes_its_sequence(cache):
    """Every block, its first position too; with rows of the block alone the first one is wrong (but in the whole forward)."""
    sequence = torch.randint(0, 31, (17,), generator=torch.Generator().manual_seed(3)).tolist()
    options = dict(gen_length=12, denoising_steps=4, temperature=0, remasking="random", cache=cache)
    write = lambda model: (
        make_engine(model).generate([sequence[:5]], seed=1, **options).completion_ids[0].tolist()
    )
    assert write(Shifted(sequence)) == sequence[5:]
    assert (write(NextToken(sequence, own_shift=True)) == sequence[5:]) == (cache == "none")
    assert write(NextToken(sequence)) != sequence[5:]  # control: no shift at all


# --- draws over a large vocabulary -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_frequencies_over_a_large_vocabulary(temperature):
    """150,000 tokens, a peaked and a flat row: chi-square over 20 parts of equal mass; control: another temperature."""
    generator = torch.Generator().manual_seed(0)
    peaked, flat = (torch.randn(150_000, generator=generator) * scale for scale in (4.0, 0.1))
    for logits in (peaked, flat):
        uniform, drawn = keyed_uniform(5, torch.arange(200), "token"), []
        for rows in uniform.split(50):
            drawn.append(sample_categorical(logits.expand(len(rows), -1), rows, temperature)[0])

        def misfit(T, tokens, logits=logits):
            p = (logits.double() / T).softmax(-1)
            order = logits.argsort()  # parts of rare tokens and of frequent ones
            part = torch.empty_like(order).index_copy(
                0, order, ((p[order].cumsum(0) - p[order] / 2) * 20).long().clamp(max=19)
            )
            expected = torch.zeros(20, dtype=torch.float64).index_add(0, part, p) * len(tokens)
            counts = part[tokens].bincount(minlength=20)
            used = expected >= 5
            chi = ((counts - expected) ** 2 / expected)[used].sum() - used.sum() + 1
            return float(chi / (2 * used.sum()) ** 0.5)

        assert abs(misfit(temperature, torch.cat(drawn))) < 4.5
        if logits is peaked:
            assert abs(misfit(1.5 * temperature, torch.cat(drawn))) > 4.5


# --- two ranks ---------------------------------------------------------------------------------------------------------------


def hundred_rollouts(rank, world_size, rounds, skips=False, limit=120):
    """Ragged prompts, other lengths and ends on each rank; new weights from a sharded learner before every rollout."""
    signal.alarm(limit)  # a rank that waits for ever is killed, and run_ranks raises
    settings = SimpleNamespace(activation_checkpointing=False, attention="auto", compile=False)
    builds = [
        lambda: block_model_of(dtype=torch.float32),
        lambda: masked_model_of("llada", dtype=torch.float32),
    ]
    learners = [d1.parallelize(build(), settings) for build in builds]
    engines = [make_engine(build(), max_batch_size=3) for build in builds]
    lengths, forwards = set(), set()
    for i in range(rounds):
        model, engine = learners[i % 2], engines[i % 2]
        with torch.no_grad():
            for value in model.parameters():
                value.to_local().mul_(1 + 1e-3 * (-1) ** i)
        if not (skips and rank == 1 and i == rounds - 1):
            engine.load_weights(export_weights(model))
        generator = torch.Generator().manual_seed(1000 * rank + i)
        sizes = torch.randint(1, 10, (1 + (i + rank) % 3,), generator=generator).tolist()
        trace = engine.generate(
            prompts_of(sizes, seed=i), num_samples=2, gen_length=8, denoising_steps=2 + i % 2, seed=i, sample_offset=100 * rank,
            remasking=("low_confidence_dynamic", "random")[i // 2 % 2], confidence_threshold=0.5,
        )  # fmt: skip
        lengths.add(tuple(sizes))
        forwards |= set(trace.num_forwards.tolist())
        if i % 10 == 0:  # what training does with it: as many collective forwards on both
            gap = (replay_logps(model, trace) - trace.logps)[trace.step_map >= 0].abs().max()
            assert gap < 1e-3, gap
        total = torch.tensor([float(trace.completion_mask.sum())])
        dist.all_reduce(total)
        assert total > 0
    assert len(lengths) > rounds // 3 and len(forwards) > 3, forwards  # ragged, and ended early
    signal.alarm(0)


def test_a_hundred_ragged_rollouts_on_two_ranks(run_ranks):
    run_ranks(2, hundred_rollouts, 100)


def test_a_rank_that_leaves_a_hand_over_out_is_seen(run_ranks):
    """Negative control: the other rank waits for it, and the test above would end in an error, not hang."""
    began = time.monotonic()
    with pytest.raises(Exception, match="process|terminated|signal|rank|Connection|gloo"):
        run_ranks(2, hundred_rollouts, 4, True, 5)
    assert time.monotonic() - began < 60
