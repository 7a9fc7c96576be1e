"""The start-up check: verify that the sampler samples, and that its log-probabilities match the
learner's. Scripts repeat it at every evaluation.
"""

import sys

import torch

from distributed.disk import is_first_rank
from distributed.sequence import gather_objects

SAMPLES = 8  # of one prompt, at temperature 100 and at the run's own
GREEDY_BLOCKS = 8
# lowest and highest value without a warning, and the warning
GOOD = {
    "completion/distinct_frac": (
        0.25,
        1,
        "only {:.0%} of completions of a prompt are distinct",
    ),
    "probe/logp_gap_mean": (0, 0.05, "sampler and learner differ by {:.1e} nats a token"),
    "problems/test": (
        100,
        1e9,
        "only {:.0f} distinct held-out problems: 10 points are noise",
    ),
    "probe/greedy_agreement": (0.9, 1, "only {:.0%} of greedy tokens are also the learner's"),
}


@torch.no_grad()
def replay_logps(model, trace):
    """Log-probabilities of a trace by the learner, each token at the denoising state at which it
    was revealed. -> [N, L] fp32

    trace.num_replays forwards: equally many on every rank that holds a trace of the same settings.
    """
    input_ids, valid_mask = trace.sequences(model.pad_token_id)
    noisy, temperature = input_ids.clone(), trace.settings["temperature"] or 1.0
    P, replay_map, logps = input_ids.shape[1] - trace.completion_ids.shape[1], trace.replay_map, 0
    for step, state in enumerate(trace.states(model.mask_token_id)):
        noisy[:, P:] = state
        scored = torch.nn.functional.pad(replay_map == step, (P, 0))
        copies = noisy[:, None], scored[:, None]
        logps += model.logps(input_ids, *copies, valid_mask, temperature=temperature)
    return logps[:, 0, P:].float()


def shared_trace(trace):
    """Ranks that share rows must score the same ones, even if one of them drew another token."""
    return gather_objects(trace, trace.completion_ids.device)[0]


def greedy_agreement(engine, model, prompt_ids, **settings):
    """Share of greedy tokens that are the learner's own argmax, for a block-causal model whose
    engine records no step map: one denoising step per block needs none. -> float
    """
    one_step = {
        "gen_length": GREEDY_BLOCKS * model.block_length,
        "denoising_steps": 1,
        "remasking": "low_confidence_static",
        "stop_at_eos": False,
    }
    trace = shared_trace(engine.generate([prompt_ids], temperature=0.0, **settings | one_step))
    trace.step_map = torch.zeros_like(trace.completion_ids)
    trace.settings["temperature"] = 1e-6  # of the learner: its argmax has all the probability
    # 0.1: bf16 logits may tie
    return (replay_logps(model, trace).exp() > 0.1).float().mean().item()


def probe(engine, model, prompt_ids, *, temperature=1.0, **settings):
    """Sample one prompt (list of ids) on every rank alike and compare with the learner. -> metrics

    SystemExit if samples at temperature 100 repeat: the engine then ignores the temperature, or
    several rows share a seed. probe/distinct_frac: different samples at the run's temperature, over
    SAMPLES. probe/logp_gap_mean and _max: |engine - learner| log-probability over the tokens of
    those samples, in nats. An engine that reports no log-probabilities is compared by its greedy
    tokens instead: probe/greedy_agreement, in bf16 below 1 where two tokens are about as likely.
    """
    draw = lambda **how: engine.generate([prompt_ids], num_samples=SAMPLES, **settings | how)
    n = min(engine.block_length(settings.get("block_length")), settings["gen_length"])
    hot = draw(temperature=100.0, stop_at_eos=False, gen_length=n)  # a block tells enough
    distinct = len(hot.completion_ids.unique(dim=0))
    if distinct < SAMPLES:
        raise SystemExit(
            f"the engine drew {distinct} different completions of {SAMPLES} at temperature 100: it "
            "does not sample"
        )
    trace = shared_trace(draw(temperature=temperature))
    different = set(map(tuple, trace.completions()))
    metrics = {"probe/distinct_frac": len(different) / SAMPLES}
    if trace.logps is None:
        agreement = greedy_agreement(engine, model, prompt_ids, **settings)
        return metrics | {"probe/greedy_agreement": agreement}
    revealed = trace.step_map >= 0
    gap = (replay_logps(model, trace) - trace.logps.float())[revealed].abs()
    gaps = {"probe/logp_gap_mean": gap.mean().item(), "probe/logp_gap_max": gap.max().item()}
    return metrics | gaps


def warn(metrics):
    """A line on stderr for each of the metrics that is not good. One prompt tells nothing about
    the policy: distinct are the completions of a rollout, not those of the probe.
    """
    for name, (low, high, words) in GOOD.items():
        if not low <= metrics.get(name, low) <= high and is_first_rank():
            print(f"warning: {words.format(metrics[name])}", file=sys.stderr)
