"""The sampler of bidirectional models (rollout/masked.py) against a naive one and official outputs.

The naive sampler is written from the papers and from the official generate functions. It shares
with the engine only the model's own layers and the keys of the draws: one row, one full forward a
step, loops over positions. What holds for every sampler is in tests/test_samplers.py.

tests/golden/dream_sampler.json was written by DreamGenerationMixin._sample (Dream-v0-Instruct-7B)
at temperature 0 with the golden weights of tests/test_models.py and the mask token's logit at -inf.
"<alg> <steps> <new tokens>": tokens, and the step at which each was revealed.
"""

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from test_models import CONFIGS
from test_models import model_of as golden_model
from test_samplers import (
    PAD,
    SIZES,
    M,
    assert_row,
    model_of,
    naive_draw,
    naive_rule,
    naive_score,
    prompts_of,
    same_draws,
    uniform,
)

from rollout import make_engine
from rollout.masked import MaskedEngine
from rollout.schedules import block_quotas, eoser_weight, reveal_quota, reveal_shares

FAMILIES = ["llada", "dream"]
MANY = (1, 2, 3, 5, 8, 13)  # ends of text, of a model that likes to end


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request):
    model = model_of(SIZES[request.param], scale=12, seed=1, eos=MANY)
    with torch.no_grad():  # many masks do not drown the context
        model.get_submodule(model.embedding).weight[M] /= 10
    return make_engine(model)


# --- the naive sampler ----------------------------------------------------------------------------


def naive_logits(model, ids, fresh, stored):
    """[T] ids -> [T, V]: one full forward in which only `fresh` positions have keys of their own.

    stored: {layer: [k, v]} of all positions, from which the others come; what is fresh is written.
    """

    def attend(layer, q, k, v):
        old = stored.get(layer, [k, v])
        stored[layer] = []
        for new, kept in zip((k, v), old, strict=True):
            rows = [(new if p in fresh else kept)[:, :, p] for p in range(len(ids))]
            stored[layer].append(torch.stack(rows, 2))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in stored[layer])
        return (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1) @ v

    hidden = model.hidden(torch.tensor([ids]), torch.arange(len(ids))[None], attend)[0]
    if hasattr(model, "align"):  # Dream: token i is predicted where token i - 1 is
        hidden = torch.stack([hidden[max(i - 1, 0)] for i in range(len(ids))])
    return model.head(hidden)


def naive_blocks(L, n, steps, schedule):
    """-> for each block the tokens to reveal at each step"""
    if schedule == "uniform":
        return [[n // steps + (step < n % steps) for step in range(steps)]] * math.ceil(L / n)
    if schedule == "timesteps":
        quota, time, left = [], torch.linspace(1, 1e-3, steps + 1), n
        for step in range(steps - 1):
            quota.append(int(torch.tensor(float(left)) * (1 - time[step + 1] / time[step])))
            left -= quota[-1]
        return [[*quota, left]] * math.ceil(L / n)
    # ASS as in the released code (yjyddq/EOSER-ASS-RL 5affb4e, eval/generate.py): from the right
    S = int(math.log2(L))
    number, power, left, sizes = S - steps + 1, S - 1, L, []
    for block in range(number - 1, -1, -1):
        size = 2**power + 1 + L - 2**S if block == number - 1 else 2**power
        size = left if block == 0 else size
        sizes.insert(0, size)
        left, power = left - size, power - 1
    first = [2**step for step in range(steps)]
    first[-1] += sizes[0] - sum(first)
    return [first, *([size] for size in sizes[1:])]


@torch.no_grad()
def naive_sample(
    model, prompt, number, *, gen_length, denoising_steps, remasking, block_length=None,
    temperature=1.0, confidence_threshold=0.9, factor=1.0, eb_threshold=0.35, schedule="uniform",
    cache="none", eos_policy="none", seed=0, stop_at_eos=True, records=None, top_k=0, top_p=1.0,
):  # fmt: skip
    """One completion -> tokens, steps, logps, forwards, replays, events, states"""
    P, plan = len(prompt), naive_blocks(gen_length, block_length, denoising_steps, schedule)
    L, total, ends = sum(map(sum, plan)), sum(map(len, plan)), model.eos_token_ids
    ids, masked, forwards = prompt + [M] * L, [p >= P for p in range(P + L)], 0
    steps, logps, replays, events, states = [-1] * L, [0.0] * L, [-1] * L, [], {}
    for b, quotas in enumerate(plan):
        start, n, before = P + sum(map(sum, plan[:b])), sum(quotas), sum(map(len, plan[:b]))
        end = start + n
        first = start - 1 if hasattr(model, "align") else start
        fresh, stored, run = range(first, end if cache == "dual" else P + L), {}, {}
        for step, quota in enumerate(quotas):
            now, places = before + step, [p for p in range(start, end) if masked[p]]
            if not places:
                break
            if not quota and remasking not in MaskedEngine.adaptive:
                continue
            forwards += 1
            if cache == "none":
                logits = model.logits(torch.tensor([ids]))[0]
            else:
                logits = naive_logits(model, ids, fresh if stored else range(P + L), stored)
            token, logp, score, guess = {}, {}, {}, {}
            for p in places + list(range(end, P + L) if records == "states" else []):
                key = (step, "token") if p < end else (now, "guess")
                u, z = uniform(seed, number, p - P, *key), logits[p]
                if eos_policy == "suppress":
                    z = z.index_fill(0, torch.tensor(ends), -math.inf)
                v, lp, q = naive_draw(z, u, temperature, top_k, top_p)
                guess[p - P] = v, math.exp(lp)
                if p >= end:
                    continue
                order = uniform(seed, number, p - P, step, "order")
                token[p], logp[p], score[p] = v, lp, naive_score(remasking, q, lp, order)
                if v in ends and eos_policy == "demote":
                    score[p] = -1e9
                if v in ends and eos_policy == "eoser":
                    ascending = 0.01 + 0.99 * (2 * 2**now - 1) / 2**total
                    linear = 0.4 + 0.6 * now / (total - 1)
                    score[p] *= ascending if schedule == "ascending" else linear
                if remasking == "origin":
                    share = 1 - (time := torch.linspace(1, 1e-3, len(quotas) + 1))[1:] / time[:-1]
                    score[p] = order < share[step] or step + 1 == len(quotas)
            states[now] = masked[P:], guess
            shown, old = [p for p in places if score[p]], list(ids)
            if remasking != "origin":
                limits = confidence_threshold, factor, eb_threshold
                shown = naive_rule(score, places, quota, remasking, *limits)
            if remasking == "rcr":
                run.update(score)
                keep = sorted(run, key=lambda p: (-run[p], p))[: sum(quotas[: step + 1])]  # noqa: B023
                shown = [p for p in places if p in keep]
                for p in set(run) - set(places) - set(keep):
                    ids[p], masked[p] = M, True
            for p in shown:
                ids[p], logps[p - P], masked[p] = token[p], logp[p], False
                steps[p - P], replays[p - P] = step, now
            changed = [p for p in range(start, end) if ids[p] != old[p]]
            events += [
                (number, now, p - P, ids[p], 0 if masked[p] else logps[p - P]) for p in changed
            ]
        if stop_at_eos and set(ids[start:end]) & set(ends):
            break
    tokens = [PAD if masked[p] else ids[p] for p in range(P, P + L)]
    return tokens, steps, logps, forwards, replays, events, states


def assert_is_naive(trace, i, model, number, **options):
    tokens, *others, states = naive_sample(model, trace.prompt_ids[i], number, **options)
    drawn = {(now, j, v) for now, (_, g) in states.items() for j, (v, _) in g.items()}
    assert_row(trace, i, model, number, tokens, *others, drawn)
    records = trace.records or {}
    if "masked" in records:
        for now in range(trace.num_replays):
            masked, guess = states.get(now, ([False] * len(tokens), {}))
            assert records["masked"][i, now].tolist() == masked
            p = [guess.get(j, (0, 0.0))[1] for j in range(len(tokens))]
            assert records["confidences"][i, now].tolist() == pytest.approx(p, abs=1e-6)
            got = records["predictions"][i, now].tolist()
            assert all(got[j] == v for j, (v, _) in guess.items())
            assert now in states or got == [PAD] * len(tokens)


SHAPES = [(12, 4, 4), (9, 5, 7), (5, 1, 1)]  # gen_length, block_length, denoising_steps
CASES = [
    {"remasking": rule, "temperature": 0.8, "records": "draws"}
    for rule in MaskedEngine.choices["remasking"][:8]
]
CASES += [{"remasking": "rcr", "temperature": 0}]
CASES += [{"remasking": "random", "top_k": 4, "top_p": 0.8, "seed": -43}]
CASES += [
    {"remasking": rule, "cache": cache, "temperature": temperature}
    for rule, cache in itertools.product(("low_confidence_dynamic", "rcr"), ("prefix", "dual"))
    for temperature in (0, 0.8)
]
CASES += [
    {"remasking": rule, "schedule": "timesteps"} for rule in ("origin", "rcr", "entropy", "random")
]
CASES += [
    {"remasking": rule, "eos_policy": policy, "temperature": 1.5}
    for policy, rules in {"demote": "entropy rcr", "eoser": "low_confidence_static rcr"}.items()
    for rule in (*rules.split(), "low_confidence_dynamic", "random")
]
CASES += [{"remasking": "low_confidence_static", "eos_policy": "suppress"}]
CASES += [
    {"remasking": rule, "records": kind, "cache": cache, "temperature": 1.3}
    for rule in ("low_confidence_dynamic", "rcr")
    for kind, cache in (("states", "none"), ("states", "prefix"), ("events", "none"))
]
CASES = [("llada", case) for case in CASES] + [("dream", case) for case in CASES[::3]]
# 19 tokens in blocks of 1, 2, 4, 12, or 3, 4, 12, or in one
ASCENDING = {"schedule": "ascending", "gen_length": 19, "block_length": None}
ASCENDING |= {"remasking": "low_confidence_static"}
CASES += [
    (family, ASCENDING | {"denoising_steps": steps, "eos_policy": policy, "cache": cache})
    for family, steps, policy, cache in itertools.product(
        FAMILIES, (1, 2, 4), ("none", "eoser", "demote"), ("none", "dual")
    )
]
# experts see the tokens of a batch together
CASES += [
    ("llada-moe", {"remasking": "low_confidence_dynamic", "cache": cache, "temperature": 0.8})
    for cache in ("none", "prefix", "dual")
]


@pytest.mark.parametrize("engine, case", CASES, indirect=["engine"], ids=str)
def test_decoding_equals_the_naive_sampler(engine, case):
    """Ragged prompts in batches of five, with and without the stop at an end of text."""
    stopped = 0
    for k, (L, n, steps) in enumerate(SHAPES):
        options = dict(gen_length=L, block_length=n, denoising_steps=steps, stop_at_eos=k != 1)
        options |= dict(confidence_threshold=0.5, factor=1.5, eb_threshold=0.8, seed=k) | case
        prompts = prompts_of([1, 4, 7], seed=k)
        trace = make_engine(engine.model, max_batch_size=5).generate(
            prompts, num_samples=2, sample_offset=30, **options
        )
        assert trace.prompt_ids == [prompt for prompt in prompts for _ in range(2)]
        for i in range(k, 6, 3):
            assert_is_naive(trace, i, engine.model, 30 + i, **options)
        stopped += int((trace.step_map < 0).any(1).sum())
    assert stopped > 0 or "eos_policy" in case or case.get("temperature") == 0


# --- schedules and orders -------------------------------------------------------------------------


def test_schedules():
    """Dream's floors make the first steps short; ASS: 128 tokens in 7 steps are 1, 2, ..., 65."""
    plan = lambda L, steps, schedule: block_quotas(
        gen_length=L, block_length=L, denoising_steps=steps, schedule=schedule
    )
    assert reveal_quota(32, 8, "timesteps") == [3, 4, 4, 4, 4, 4, 4, 5]
    assert plan(128, 4, "ascending") == [[1, 2, 4, 8], [16], [32], [65]]
    assert plan(1, 1, "ascending") == [[1]]
    for n, steps in itertools.product(range(1, 40, 3), range(1, 45, 2)):
        for schedule in ("uniform", "timesteps"):
            assert plan(n, steps, schedule) == naive_blocks(n, n, steps, schedule)
    assert reveal_shares([2, 1], "uniform") == pytest.approx([2 / 3, 1])
    weights = [eoser_weight(i, 4, "uniform") for i in range(4)]
    assert weights == pytest.approx([0.4, 0.6, 0.8, 1.0]) and eoser_weight(0, 1, "uniform") == 0.4
    weights = [eoser_weight(i, 3, "ascending") for i in range(3)]
    assert weights == pytest.approx([0.01 + 0.99 * x / 8 for x in (1, 3, 7)])


GOLDEN = json.loads((Path(__file__).parent / "golden" / "dream_sampler.json").read_text())
NAMES = {
    "maskgit_plus": "low_confidence_static",
    "topk_margin": "topk_margin",
    "entropy": "entropy",
}


@pytest.mark.parametrize("run", GOLDEN["runs"])
def test_greedy_orders_are_those_of_dreams_official_sampler(run):
    alg, steps, new = run.split()
    options = dict(gen_length=int(new), block_length=int(new), denoising_steps=int(steps))
    trace = make_engine(golden_model(CONFIGS["dream"], rule="dream")).generate(
        [GOLDEN["prompt"]], temperature=0, remasking=NAMES[alg], schedule="timesteps",
        stop_at_eos=False, **options,
    )  # fmt: skip
    got = {"tokens": trace.completion_ids[0].tolist(), "steps": trace.step_map[0].tolist()}
    assert got == {name: GOLDEN["runs"][run][name] for name in got}


@pytest.mark.parametrize("remasking", ["low_confidence_static", "entropy", "topk_margin"])
def test_drawn_orders_follow_the_softmax_of_the_confidence(engine, remasking):
    """alg_temp: the first step takes 2 of 3 tokens without replacement."""
    p = engine.model.logits(torch.tensor([[3, 4, 5, M, M, M]]))[0, 3:].index_fill(
        1, torch.tensor([M]), -math.inf
    )
    p = p.softmax(-1).tolist()
    confidence = torch.tensor([naive_score(remasking, q, math.log(max(q)), 0) for q in p])
    draws = 1200
    for alg_temp in (0.2, 1.0):
        trace = engine.generate(
            [[3, 4, 5]], num_samples=draws, gen_length=3, block_length=3, denoising_steps=2, seed=5,
            temperature=0, stop_at_eos=False, remasking=remasking, alg_temp=alg_temp,
        )  # fmt: skip
        got, want = Counter(map(tuple, trace.step_map.tolist())), Counter()
        w = (confidence / alg_temp).softmax(0).tolist()
        for a, b in itertools.permutations(range(3), 2):
            want[tuple(int(j not in (a, b)) for j in range(3))] += w[a] * w[b] / (1 - w[a])
        assert sum(abs(got[key] / draws - want[key]) for key in {*got, *want}) / 2 < 0.06


@pytest.mark.cuda
@pytest.mark.parametrize("family", [*FAMILIES, "llada-moe"])
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_cuda_graphs_draw_what_eager_forwards_draw(family, cache):
    """bf16: the same tokens, run after run, with other weights too."""
    model = model_of(SIZES[family], scale=1, seed=1, dtype=torch.bfloat16).cuda()
    graphs = make_engine(model)
    eager = type(graphs)(model, 256)
    eager.use_graphs = False
    for prompts in ([5, 31, 17], [40, 40], [5, 31, 17]):
        options = dict(gen_length=32, block_length=8, denoising_steps=4, num_samples=2, cache=cache)
        draw = lambda e: e.generate(prompts_of(prompts), **options)  # noqa: B023
        got = draw(graphs)
        assert same_draws(got, draw(eager), 0) and same_draws(got, draw(graphs), 0)
        assert len(graphs.memory.graphs.graphs) > 0
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        assert not same_draws(draw(graphs), got, 0) and same_draws(draw(graphs), draw(eager), 0)
