"""rollout/probe.py: a sampler passes, an engine that only looks like one is refused, and other weights are seen."""

import math
from types import SimpleNamespace

import pytest
import torch
from test_masked import FAMILIES
from test_masked import model_of as masked_model_of
from test_models import exits_with_one_line
from test_rollout import EOS, PAD, SMALL, model_of, prompts_of

import rollout.engine
from algos import d1
from models import export_weights
from rollout import make_engine, probe
from rollout.engine import REMASKING
from rollout.probe import replay_logps

ARGS = SimpleNamespace(activation_checkpointing=False, attention="auto", compile=False)
PROMPT = [3, 4, 5, 6, 7, 8]
SETTINGS = {
    "gen_length": 9,
    "block_length": 0,
    "denoising_steps": 2,
    "remasking": "low_confidence_static",
}
GAP = ("probe/logp_gap_mean", "probe/logp_gap_max")


def build(seed=0, dtype=torch.float32):
    return model_of(scale=10, seed=seed, dtype=dtype)


class Spy:
    """An engine that keeps what it was asked and what it gave."""

    def __init__(self, engine):
        self.engine, self.calls, self.traces = engine, [], []

    def generate(self, prompt_ids, **settings):
        self.calls.append((prompt_ids, settings))
        self.traces.append(self.engine.generate(prompt_ids, **settings))
        return self.traces[-1]


def test_a_good_engine_passes():
    """'8 samples of one prompt at temperature 100 without EOS stop', then 8 at the run's temperature; fp32 gap about 1e-6."""
    engine = Spy(make_engine(build()))
    metrics = probe(engine, build(), PROMPT, temperature=0.7, seed=3, **SETTINGS)
    assert metrics.keys() == {"probe/distinct_frac", *GAP}
    assert 0 < metrics[GAP[0]] <= metrics[GAP[1]] < 2e-5, metrics
    (hot, hot_settings), (run, run_settings) = engine.calls
    assert hot == run == [PROMPT]
    assert (
        hot_settings["temperature"],
        hot_settings["stop_at_eos"],
        hot_settings["num_samples"],
    ) == (100.0, False, 8)
    assert run_settings == SETTINGS | {"temperature": 0.7, "num_samples": 8, "seed": 3}
    assert engine.traces[0].canvas_length.eq(engine.traces[0].completion_ids.shape[1]).all()


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_the_gap_is_the_difference_of_two_log_probabilities(temperature):
    """Mean and maximum of |engine - learner| over every token that was revealed, the rest of the terminal block included."""
    engine, model = Spy(make_engine(build(dtype=torch.float64))), build(seed=1, dtype=torch.float64)
    metrics = probe(engine, model, PROMPT, temperature=temperature, **SETTINGS)
    trace = engine.traces[1]
    gap = (replay_logps(model, trace) - trace.logps).abs()[trace.step_map >= 0].tolist()
    assert len(gap) == trace.canvas_length.sum()
    assert math.isclose(metrics[GAP[0]], math.fsum(gap) / len(gap), rel_tol=1e-6)
    assert math.isclose(metrics[GAP[1]], max(gap), rel_tol=1e-6)


def test_distinct_frac_counts_completions():
    """Greedy: all alike, 1 of 8. A peaked model in between, counted by hand. Tokens behind the EOS do not make a difference."""
    model = build()
    assert (
        probe(make_engine(model), model, PROMPT, temperature=0.0, **SETTINGS)["probe/distinct_frac"]
        == 1 / 8
    )
    peaked = model_of(scale=20, dtype=torch.float32)
    counts = []
    for temperature in (0.15, 0.3, 0.6, 1.0):
        engine = Spy(make_engine(peaked))
        metrics = probe(engine, peaked, PROMPT, temperature=temperature, **SETTINGS)
        ids, completions = engine.traces[1].completion_ids.tolist(), set()
        for row in ids:
            end = next((i for i, token in enumerate(row) if token in EOS), len(row) - 1)
            completions.add(tuple(row[: end + 1]))
        counts.append(len(completions))
        assert metrics["probe/distinct_frac"] == len(completions) / 8
    assert any(1 < count < 8 for count in counts), counts


def greedy(logits, uniform, temperature):
    return sample(logits, uniform, 0.0)


sample = rollout.engine.sample_categorical


def test_a_greedy_engine_is_refused(monkeypatch):
    monkeypatch.setattr(rollout.engine, "sample_categorical", greedy)
    with exits_with_one_line("1 different completions of 8 at temperature 100", "does not sample"):
        probe(make_engine(build()), build(), PROMPT, **SETTINGS)


def test_rows_with_each_others_seeds_are_refused(monkeypatch):
    """lmdeploy 0.18: 16 samples of one prompt, 4 distinct. Here every two rows get one key."""
    keyed = rollout.engine.keyed_uniform
    monkeypatch.setattr(
        rollout.engine,
        "keyed_uniform",
        lambda seed, sample, *rest: keyed(seed, torch.as_tensor(sample) // 2, *rest),
    )
    with exits_with_one_line("4 different completions of 8"):
        probe(make_engine(build()), build(), PROMPT, **SETTINGS)


def test_an_engine_that_ignores_the_temperature_is_refused(monkeypatch):
    """It samples, but always at 0.05: at temperature 100 all must differ, and here they do not."""
    monkeypatch.setattr(
        rollout.engine,
        "sample_categorical",
        lambda logits, uniform, temperature: sample(logits, uniform, 0.02),
    )
    with exits_with_one_line("of 8 at temperature 100"):
        probe(make_engine(build()), build(), PROMPT, **SETTINGS)


def test_other_weights_are_visible():
    """Negative control: one matrix off by 5 %, and stale weights, are orders above the gap of equal ones."""
    model, engine = build(), make_engine(build())
    equal = probe(engine, model, PROMPT, **SETTINGS)
    with torch.no_grad():
        model.layers[0].mlp.up_proj.weight.mul_(1.05)
    near = probe(engine, model, PROMPT, **SETTINGS)
    far = probe(make_engine(build(seed=1)), model, PROMPT, **SETTINGS)
    assert equal[GAP[1]] < 2e-5 and near[GAP[0]] > 1e-3 and far[GAP[0]] > 0.1, (equal, near, far)
    engine.load_weights(export_weights(model))
    assert probe(engine, model, PROMPT, **SETTINGS)[GAP[1]] < 2e-5


def test_a_bf16_engine_shows_its_rounding():
    metrics = probe(make_engine(build(dtype=torch.bfloat16)), build(), PROMPT, **SETTINGS)
    assert 1e-3 < metrics[GAP[0]] < 0.5, metrics


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("remasking", REMASKING)
def test_replay_gives_the_engines_log_probabilities(remasking, steps, temperature):
    """'each token at the denoising state at which it was revealed': ragged prompts, EOS inside, part-filled blocks."""
    model = build(dtype=torch.float64)
    trace = make_engine(model).generate(
        prompts_of([1, 4, 6, 7]), num_samples=3, gen_length=10, denoising_steps=steps, temperature=temperature,
        remasking=remasking, confidence_threshold=0.4, seed=5,
    )  # fmt: skip
    again = replay_logps(model, trace)
    revealed = trace.step_map >= 0
    assert (
        again.shape == trace.logps.shape and not again.requires_grad and trace.num_replays == steps
    )
    assert (again - trace.logps)[revealed].abs().max() < 2e-6 and not again[~revealed].any()
    if steps > 1:  # negative control: another order of the same tokens
        trace.replay_map = torch.where(revealed, steps - 1 - trace.replay_map, trace.replay_map)
        assert (replay_logps(model, trace) - trace.logps)[revealed].abs().max() > 1e-3


def test_replay_works_without_revealed_tokens_in_a_step():
    """A step in which no row of the batch reveals anything: low_confidence_dynamic with threshold 0 needs the first alone."""
    model = build(dtype=torch.float64)
    trace = make_engine(model).generate(
        [PROMPT],
        gen_length=6,
        denoising_steps=4,
        remasking="low_confidence_dynamic",
        confidence_threshold=0.0,
    )
    assert trace.step_map.max() == 0
    assert (replay_logps(model, trace) - trace.logps).abs().max() < 2e-6


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("remasking", REMASKING)
@pytest.mark.parametrize("family", FAMILIES)
def test_replay_of_bidirectional_models(monkeypatch, family, remasking, steps, temperature):
    """One forward a step of each block, whatever was revealed; behind the terminal block all stays masked."""
    model, forwards = masked_model_of(family), []
    trace = make_engine(model).generate(
        prompts_of([1, 6, 3], seed=5), num_samples=4, gen_length=14, denoising_steps=steps, temperature=temperature,
        remasking=remasking, confidence_threshold=0.4, seed=3,
    )  # fmt: skip
    logps, revealed = model.logps, trace.step_map >= 0
    monkeypatch.setattr(
        model, "logps", lambda *args, **options: forwards.append(1) or logps(*args, **options)
    )
    again = replay_logps(model, trace)
    assert len(forwards) == trace.num_replays == 4 * steps
    assert (again - trace.logps)[revealed].abs().max() < 2e-6 and not again[~revealed].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_of_another_state_shows(family):
    """Negative controls: the order of the blocks turned round, and a canvas that is cut behind the terminal block."""
    model = masked_model_of(family)
    options = dict(num_samples=4, gen_length=14, seed=3, remasking="random")
    gap = lambda trace: (replay_logps(model, trace) - trace.logps)[trace.step_map >= 0].abs().max()
    whole = make_engine(model).generate(prompts_of([1, 6, 3], seed=5), stop_at_eos=False, **options)
    assert gap(whole) < 2e-6
    whole.replay_map = whole.num_replays - 1 - whole.replay_map
    assert gap(whole) > 1e-3
    ended = make_engine(model).generate(prompts_of([1, 6, 3], seed=5), **options)
    assert gap(ended) < 2e-6 and (ended.step_map < 0).any()
    ended.canvas_length = (ended.step_map >= 0).sum(1)
    assert gap(ended) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_of_bidirectional_models(family):
    """Equal weights pass with rounding alone, in any block length; other weights are seen."""
    model = masked_model_of(family, scale=10, dtype=torch.float32)
    engine = make_engine(masked_model_of(family, scale=10, dtype=torch.float32))
    for block_length in (0, 3):
        equal = probe(engine, model, PROMPT, **SETTINGS | {"block_length": block_length})
        assert equal["probe/distinct_frac"] > 0.5 and equal[GAP[1]] < 5e-5, equal
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "up_proj" in name:
                value.mul_(1.05)
    assert probe(engine, model, PROMPT, **SETTINGS)[GAP[0]] > 1e-3


@pytest.mark.parametrize("kind", ["llada", "block"])
def test_the_probe_costs_what_the_pages_say(monkeypatch, kind):
    """Bidirectional: three rollouts of 8 rows. Block: two rollouts and a forward a denoising step."""
    build_model = (
        build
        if kind == "block"
        else lambda: masked_model_of("llada", scale=10, dtype=torch.float32)
    )
    model, engine, counts = (
        build_model(),
        make_engine(build_model()),
        {"sampler": [], "learner": []},
    )
    for name, owner in (("sampler", engine.model), ("learner", model)):
        hidden = owner.hidden
        watched = lambda ids, *rest, name=name, hidden=hidden: (
            counts[name].append(len(ids)) or hidden(ids, *rest)
        )
        monkeypatch.setattr(owner, "hidden", watched)
    probe(
        engine,
        model,
        PROMPT,
        **SETTINGS | {"gen_length": 12, "block_length": 4, "denoising_steps": 2},
    )
    assert counts["learner"] == [8] * (2 if kind == "block" else 3 * 2)
    if kind == "llada":
        assert 3 * 2 < len(counts["sampler"]) <= 2 * 3 * 2 and set(counts["sampler"]) <= set(
            range(1, 9)
        )


def test_replay_on_two_ranks_with_different_traces(run_ranks):
    """A rank whose rows end early makes as many forwards as one whose rows do not: under FSDP2 they wait for each other."""

    def body(rank, world_size):
        build = lambda: masked_model_of("llada", dtype=torch.float32)
        model, engine = d1.parallelize(build(), ARGS), make_engine(build())
        trace = engine.generate(
            prompts_of([3, 5]), num_samples=2, gen_length=12, seed=rank, stop_at_eos=False
        )
        if rank == 0:  # its rows end with the first block
            trace.step_map[:, 4:], trace.replay_map[:, 4:], trace.completion_ids[:, 4:] = (
                -1,
                -1,
                PAD,
            )
        first = (replay_logps(model, trace) - trace.logps)[:, :4].abs().max()
        assert trace.replay_map.max() == (3 if rank == 0 else 11) and first < 5e-5

    run_ranks(2, body)


def test_the_probe_on_two_ranks(run_ranks):
    """Under FSDP2 every rank samples the same prompt and gets the same metrics, equal to those of one process."""

    def body(rank, world_size):
        model, engine = d1.parallelize(build(), ARGS), make_engine(build())
        want = probe(make_engine(build()), build(), PROMPT, **SETTINGS)
        metrics = probe(engine, model, PROMPT, **SETTINGS)
        total = d1.all_reduce(metrics)
        assert all(total[name] == 2 * metrics[name] for name in metrics)
        assert (
            metrics["probe/distinct_frac"] == want["probe/distinct_frac"] and metrics[GAP[1]] < 2e-5
        )
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "up_proj" in name:
                    value.mul_(1.05)
        assert probe(engine, model, PROMPT, **SETTINGS)[GAP[0]] > 1e-3

    run_ranks(2, body)


def test_the_model_of_these_tests_ends_and_pads():
    """EOS and padding occur in what the tests above replay, otherwise they would show little."""
    trace = make_engine(build(dtype=torch.float64)).generate(
        prompts_of([1, 4, 6, 7]), num_samples=3, gen_length=10, seed=5
    )
    assert not trace.truncated.all() and len(set(trace.canvas_length.tolist())) > 1
    assert SMALL["pad_token_id"] == PAD and (trace.completion_ids[trace.step_map < 0] == PAD).all()
