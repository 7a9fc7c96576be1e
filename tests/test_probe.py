"""rollout/probe.py: a sampler passes, an engine that only looks like one is refused, other weights
are seen, and recorded log-probabilities are the learner's."""

import pytest
import torch
from test_models import exits_with_one_line
from test_samplers import SIZES, M, model_of, prompts_of, shared

from models import export_weights
from rollout import make_engine, probe, warn
from rollout.engine import REMASKING
from rollout.probe import greedy_agreement, replay_logps
from rollout.sampling import keyed_state, sample_categorical

PROMPT = [3, 4, 5, 6, 7, 8]
SETTINGS = {"gen_length": 9, "denoising_steps": 2, "remasking": "low_confidence_static"}
SETTINGS |= {"block_length": 0}
GAP = ("probe/logp_gap_mean", "probe/logp_gap_max")
FAMILIES = ["sdar", "llada", "dream"]


def build(family="sdar", seed=0):
    return model_of(SIZES[family], scale=10, seed=seed, dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_weights_pass_and_other_ones_are_seen(family):
    """fp32 rounding alone, then one matrix off by 5 %, then another model, then new weights; over
    every revealed token, the rest of the terminal block too.
    """
    model, engine, settings = build(family), make_engine(build(family)), dict(SETTINGS)
    settings["gen_length"] = 9 if family == "sdar" else 8
    equal = probe(engine, model, PROMPT, temperature=0.7, **settings)
    assert equal.keys() == {"probe/distinct_frac", *GAP} and equal["probe/distinct_frac"] >= 0.5
    assert 0 <= equal[GAP[0]] <= equal[GAP[1]] < 5e-5, equal
    assert probe(engine, model, PROMPT, temperature=0.0, **settings)["probe/distinct_frac"] == 1 / 8
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.mul_(1.05 if "up_proj" in name else 1)
    metrics = probe(engine, model, PROMPT, temperature=0.3, seed=3, **settings)
    trace = engine.generate([PROMPT], num_samples=8, temperature=0.3, seed=3, **settings)
    gap = (replay_logps(model, trace) - trace.logps).abs()[trace.step_map >= 0]
    assert gap.mean().item() == pytest.approx(metrics[GAP[0]]) and metrics[GAP[0]] > 1e-3
    assert gap.max().item() == pytest.approx(metrics[GAP[1]])
    assert metrics["probe/distinct_frac"] == len(set(map(tuple, trace.completions()))) / 8
    engine.load_weights(export_weights(model))
    assert probe(engine, model, PROMPT, **settings)[GAP[1]] < 5e-5


FAULTS = {
    "keyed_state": lambda seed, i, *_: keyed_state(seed, i // 2, *_),  # one key for two rows
    "Engine.sample_categorical": lambda z, u, *_: sample_categorical(z, u, 0.02),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_engine_that_does_not_sample_is_refused(monkeypatch, name):
    engine = make_engine(build())
    monkeypatch.setattr(f"rollout.engine.{name}", staticmethod(FAULTS[name]))
    with exits_with_one_line("different completions of 8 at temperature 100", "does not sample"):
        probe(engine, build(), PROMPT, **SETTINGS)


def test_greedy_tokens_are_compared_with_the_learners_best_ones():
    """For engines without log-probabilities."""
    engine = make_engine(build())
    agreement = lambda model: greedy_agreement(engine, model, PROMPT, **SETTINGS)
    assert agreement(build()) == 1 and agreement(build(seed=1)) < 0.5


REPLAYED = [(family, rule, {}) for family in FAMILIES for rule in REMASKING]
REPLAYED += [("llada2", "random", {"editing_threshold": 0.1, "max_post_steps": 3})]
REPLAYED += [("dream", "rcr", {"records": "events", "stop_at_eos": False})]


@pytest.mark.parametrize("steps, temperature", [(1, 0.0), (3, 1.5)])
@pytest.mark.parametrize("family, remasking, more", REPLAYED, ids=str)
def test_replay_gives_the_engines_log_probabilities(
    monkeypatch, family, remasking, more, steps, temperature
):
    """Each token at the state at which it was revealed, in num_replays forwards whatever happened:
    ragged prompts, ends, and behind the terminal block of a bidirectional model all masked."""
    model = shared(family)
    options = dict(num_samples=3, gen_length=12, denoising_steps=steps, remasking=remasking, seed=5)
    options |= dict(block_length=4, temperature=temperature, confidence_threshold=0.4)
    trace = make_engine(model).generate(prompts_of([1, 4, 6, 7]), **options, **more)
    logps, forwards, revealed = model.logps, [], trace.step_map >= 0
    watch = lambda *args, **how: forwards.append(1) or logps(*args, **how)
    monkeypatch.setattr(model, "logps", watch, raising=False)
    gap = (replay_logps(model, trace) - trace.logps).abs()
    assert gap[revealed].max() < 2e-6 and not gap[~revealed].any()
    per_block = 3 if model.attention == "bidirectional" else 1
    replays = steps * per_block + more.get("max_post_steps", 0)
    assert len(forwards) == trace.num_replays == replays
    if steps > 1 and remasking == "rcr":
        assert (trace.records["tokens"] == M).any()  # tokens were masked again


def test_warnings(capsys):
    """Not of the probe's own prompt, which may be an easy one."""
    warn({"probe/distinct_frac": 1 / 8, "completion/distinct_frac": 0.3, "problems/test": 100})
    warn({"completion/distinct_frac": 0.2, "problems/test": 99})
    assert [line.split()[2] for line in capsys.readouterr().err.splitlines()] == ["20%", "99"]
