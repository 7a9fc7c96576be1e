"""All samplers: the plain ones against the definition of decoding, the fast ones against the plain.

The naive sampler below is written from the papers and the official generate functions. It shares
nothing with the engines but the model's own layers: one row, one full forward a step, loops over
positions, Python integers for the keys.

tests/golden/dream_sampler.json was written by DreamGenerationMixin._sample (Dream-v0-Instruct-7B)
at temperature 0 with the golden weights of tests/test_models.py and the mask token's logit at -inf.
"<alg> <steps> <new tokens>": tokens, and the step at which each was revealed.
"""

import itertools
import json
import math
from collections import Counter
from copy import deepcopy
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from oracles import CONFIGS as SMALL_CONFIGS
from oracles import (
    TINY_DREAM,
    TINY_LLADA,
    TINY_LLADA2,
    TINY_LLADA_MOE,
    TINY_SDAR,
    TINY_SDAR_MOE,
    few_tokens,
    tiny_model,
)
from test_models import CONFIGS
from test_models import model_of as golden_model

from models import add_lora, export_adapter, export_weights
from models.tiny import random_model
from rollout import make_engine
from rollout.engine import REMASKING, RULES, select, truncate
from rollout.masked import ORDERED, MaskedEngine
from rollout.probe import replay_logps
from rollout.schedules import block_quotas, eoser_weight, reveal_quota, reveal_shares

V, M, EOS, PAD = 20, 19, (1, 2), 0
IDS = {"vocab_size": V, "mask_token_id": M, "eos_token_id": 1, "pad_token_id": PAD}
SIZES = {family: config | IDS for family, config in SMALL_CONFIGS.items()}
SIZES["llada"] |= {"embedding_size": V}
SIZES["llada-moe"] = TINY_LLADA_MOE | IDS | {"hidden_size": 32, "expert_intermediate_size": 16}
for family in "sdar", "dream":
    SIZES[family] |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = SIZES["sdar"]
for name, n in ("ones", 1), ("threes", 3), ("eights", 8):
    SIZES[f"sdar in {name}"] = SMALL | {"block_size": n}
OPTIONS = dict(num_samples=3, gen_length=13, denoising_steps=3, confidence_threshold=0.5, seed=4)
NAMES = ("completion_ids", "completion_mask", "canvas_length", "step_map", "replay_map")


def model_of(config=SMALL, scale=30, seed=0, eos=EOS, dtype=torch.float64):
    """Random weights, scaled so that distributions are peaked and depend on the context."""
    model = random_model(config, seed=seed, dtype=dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
        embedding = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding))
        if embedding.weight is not model.lm_head.weight:
            embedding.weight.mul_(50)
        for name, weight in model.named_parameters():
            if "o_proj" in name or "attn_out" in name:
                weight.mul_(4)
    model.eos_token_ids, model.pad_token_id = list(eos), PAD
    return model


@cache
def shared(family):
    """A model that no test changes."""
    if family == "sdar padded with its end":  # what follows a row's canvas is no end
        return model_of(scale=5, eos=(PAD,))
    if family not in ("llada", "dream", "llada-moe"):
        return model_of(SIZES[family])
    model = model_of(SIZES[family], scale=12, seed=1, eos=(1, 2, 3, 5, 8, 13))
    with torch.no_grad():  # many masks do not drown the context
        model.get_submodule(model.embedding).weight[M] /= 10
    return model


def engine_of(family="sdar", **how):
    return make_engine(shared(family), **how)


def fast_of(model, max_batch_size=256, joins=True):
    """The fast engine of a model, on CPU."""
    if model.attention == "bidirectional":
        return import_module("kernels.masked").FastMaskedEngine(model, max_batch_size)
    engine = import_module("kernels.block").FastBlockEngine(model, max_batch_size)
    if not joins:
        engine._is_joined = lambda *step: False
    return engine


@pytest.fixture
def small_buckets(monkeypatch):
    """Several numbers of slots and widths within tiny rollouts."""
    block = import_module("kernels.block")
    monkeypatch.setattr(block, "WIDTHS", 8)
    monkeypatch.setattr(import_module("kernels.masked"), "WIDTHS", 8)
    monkeypatch.setattr(block, "SLOTS", (1, 2, 3, 5, 8, 12, 16, 24, 40, 64))
    return block


def prompts_of(lengths, seed=0):
    """Random prompts; they contain end tokens too."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, M, (length,), generator=generator).tolist() for length in lengths]


def same_draws(a, b, tolerance=1e-12, forwards=True):
    """Whether two traces hold the same tokens, maps, log-probabilities and records."""
    names = (*NAMES, "sample_index", *["num_forwards"] * forwards, "logps")
    x, y = (
        [*(getattr(trace, name) for name in names), *(trace.records or {}).values()]
        for trace in (a, b)
    )
    near = lambda x, y: x.shape == y.shape and torch.allclose(x, y, atol=tolerance, rtol=0)
    alike = len(x) == len(y) and a.prompt_ids == b.prompt_ids
    return alike and all(near(v.cpu(), w.cpu()) for v, w in zip(x, y, strict=True))


# --- the naive sampler ----------------------------------------------------------------------------

BITS = (1 << 64) - 1


def uniform(*key):
    """SplitMix64 over the parts of the key, with Python's integers."""
    x = 0
    for part in key:
        part = int.from_bytes(part.encode(), "little") if isinstance(part, str) else part
        x = ((x ^ (part & BITS)) + 0x9E3779B97F4A7C15) & BITS
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS
        x ^= x >> 31
    return (x >> 11) / 2**53


def kept(p, top_k, top_p):
    """Tokens left of probabilities p: the k best, then the fewest that reach top_p; ties stay."""
    levels = sorted(set(p), reverse=True)
    able = [level for level in levels if len([q for q in p if q > level]) < (top_k or len(p))]
    mass = math.fsum(q for q in p if q >= able[-1])
    fits = lambda level: top_p == 1 or math.fsum(q for q in p if q > level) < top_p * mass
    able = [level for level in able if fits(level)]
    return {v for v, q in enumerate(p) if q >= able[-1]}


def naive_rule(c, places, quota, remasking, threshold, factor, eb_threshold):
    """Which of the places to reveal, c: {place: confidence}."""
    best = sorted(places) if remasking == "sequential" else sorted(places, key=lambda p: (-c[p], p))
    number = min(quota, len(places))
    for k in range(number + 1, len(places) + 1):
        able = {
            "low_confidence_dynamic": c[best[k - 1]] > threshold,
            "low_confidence_factor": (k + 1) * (1 - c[best[k - 1]]) < factor,
            "entropy_bounded": math.fsum(-c[p] for p in best[:k]) <= eb_threshold,
        }
        number = k if able.get(remasking) else number
    return best[:number]


def naive_draw(z, u, temperature, top_k, top_p):
    """-> token, log-probability, all probabilities before the filters"""
    softmax = lambda z: (z - z.logsumexp(0)).exp()
    z = torch.where(torch.arange(len(z)) == M, -math.inf, z.double()) / (temperature or 1)
    whole = softmax(z).tolist()
    if temperature == 0:
        token, p = whole.index(max(whole)), whole
    else:
        left = kept(whole, top_k, top_p)
        p = softmax(torch.tensor([x if v in left else -math.inf for v, x in enumerate(z)])).tolist()
        sums = itertools.accumulate(p)
        token = next(v for v, total in enumerate(sums) if total > u)
    return token, math.log(p[token]), whole


def naive_score(remasking, p, logp, order):
    """Confidence of a draw. p: all probabilities; order: the uniform number of random orders"""
    negative_entropy = math.fsum(x * math.log(x) for x in p if x > 0)
    return {
        "random": order,
        "entropy": negative_entropy,
        "entropy_bounded": negative_entropy,
        "topk_margin": sorted(p)[-1] - sorted(p)[-2],
    }.get(remasking, math.exp(logp))


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
    if getattr(model, "shift", False):  # Dream: token i is predicted where token i - 1 is
        hidden = torch.stack([hidden[max(i - 1, 0)] for i in range(len(ids))])
    return model.lm_head(hidden)


def naive_shares(steps):
    """Dream's share of the masks to reveal at each step but the last"""
    time = torch.linspace(1, 1e-3, steps + 1)
    return (1 - time[1:] / time[:-1])[:-1]


def naive_blocks(L, n, steps, schedule):
    """-> for each block the tokens to reveal at each step"""
    if schedule == "uniform":
        return [[n // steps + (step < n % steps) for step in range(steps)]] * math.ceil(L / n)
    if schedule == "timesteps":
        quota, left = [], n
        for share in naive_shares(steps):
            quota.append(int(torch.tensor(float(left)) * share))
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
    temperature=1.0, confidence_threshold=0.9, factor=1.0, eb_threshold=0.35, top_k=0, top_p=1.0,
    schedule="uniform", cache="none", eos_policy="none", editing_threshold=None, max_post_steps=16,
    alg_temp=0, seed=0, stop_at_eos=True, records=None,
):  # fmt: skip
    """One completion, of a block-causal model without a cache.

    -> tokens, steps, logps, number of forwards, replays, record: {(replay, place): (token, logp)}
    """
    P, is_block, ends = len(prompt), model.attention == "block-causal", model.eos_token_ids
    edits, origin = editing_threshold is not None, P // model.block_length * model.block_length
    origin, n = (origin, model.block_length) if is_block else (P, block_length)
    plan = naive_blocks(P + gen_length - origin, n, denoising_steps, schedule)
    total = origin + sum(map(sum, plan))
    ids, masked, forwards = prompt + [M] * (total - P), [p >= P for p in range(total)], 0
    steps, logps, replays, record = [-1] * total, [0.0] * total, [-1] * total, {}
    for b, quotas in enumerate(plan):
        start, before = origin + sum(map(sum, plan[:b])), sum(map(len, plan[:b])) * (not is_block)
        end = start + sum(quotas)
        inside, behind = range(max(start, P), end), range(end, total)
        first = start - 1 if getattr(model, "shift", False) else start
        fresh, stored, run, post = range(first, end if cache == "dual" else total), {}, {}, 0
        for step in range(len(quotas) + (max_post_steps + 1) * edits):
            now, places = before + step, [p for p in inside if masked[p]]
            quota = quotas[step] if step < len(quotas) else 0
            if not places and not edits:
                break
            if places and not quota and remasking not in MaskedEngine.adaptive:
                continue
            forwards += 1
            if is_block:
                logits = model.logits(torch.tensor([ids[:end]]))[0]
            else:
                is_whole = cache == "none" or not stored
                logits = naive_logits(model, ids, range(total) if is_whole else fresh, stored)
            draw, score, old = {}, {}, list(ids)
            for p in (*inside, *behind) if records == "states" else inside:
                key = (step, "token") if p < end else (now, "guess")
                z = logits[p]
                if eos_policy == "suppress":
                    z = z.index_fill(0, torch.tensor(ends), -math.inf)
                u = uniform(seed, number, p - P, *key)
                draw[p] = naive_draw(z, u, temperature, top_k, top_p)
                order = uniform(seed, number, p - P, step, "order")
                v, logp, probabilities = draw[p]
                score[p] = naive_score(remasking, probabilities, logp, order)
                if v in ends and eos_policy == "eoser":
                    S = sum(map(len, plan))
                    ascending = 0.01 + 0.99 * (2 * 2**now - 1) / 2**S
                    score[p] *= ascending if schedule == "ascending" else 0.4 + 0.6 * now / (S - 1)
                if alg_temp:  # the largest of these are drawn from softmax(score / alg_temp)
                    score[p] = score[p] / alg_temp - math.log(-math.log(order))
                if v in ends and eos_policy == "demote":
                    score[p] = -1e9
                if remasking == "origin":
                    is_last = step + 1 == len(quotas)
                    score[p] = is_last or order < naive_shares(len(quotas))[step]
            shown = [p for p in places if score[p]]
            if remasking != "origin":
                limits = confidence_threshold, factor, eb_threshold
                shown = naive_rule(score, places, quota, remasking, *limits)
            if remasking == "rcr":
                run |= {p: score[p] for p in places}
                keep = sorted(run, key=lambda p: (-run[p], p))[: sum(quotas[: step + 1])]  # noqa: B023
                shown = [p for p in places if p in keep]
                for p in set(run) - set(places) - set(keep):
                    ids[p], masked[p] = M, True
            if edits and (places or post < max_post_steps):
                sure = lambda p, draw=draw: math.exp(draw[p][1]) > editing_threshold
                shown += [p for p in inside if not masked[p] and draw[p][0] != ids[p] and sure(p)]
            if records in ("draws", "states"):
                record |= {(now, p): draw[p][:2] for p in draw if old[p] == M and places}
            for p in shown:
                (ids[p], logps[p], _), masked[p], steps[p], replays[p] = draw[p], False, step, now
            changed = [p for p in inside if ids[p] != old[p]]
            if records not in ("draws", "states"):
                record |= {(now, p): (ids[p], 0 if masked[p] else logps[p]) for p in changed}
            post += not places
            if edits and not changed:  # the commit
                break
        if b + 1 == len(plan) or stop_at_eos and any(ids[p] in ends for p in inside):
            break
        forwards += is_block and not edits  # the commit
    end = end if is_block else total
    tokens = [PAD if masked[p] else ids[p] for p in range(P, end)]
    record = {(now, p - P): drawn for (now, p), drawn in record.items()}
    return tokens, steps[P:end], logps[P:end], forwards, replays[P:end], record


def assert_is_naive(trace, i, model, number, **options):
    """Row i of a trace is the naive sampler's completion, with its records."""
    naive = naive_sample(model, trace.prompt_ids[i], number, **options)
    tokens, steps, logps, forwards, replays, record = naive
    width, rest = len(tokens), trace.completion_ids.shape[1] - len(tokens)
    assert trace.completion_ids[i].tolist() == tokens + [PAD] * rest
    assert trace.step_map[i].tolist() == steps + [-1] * rest
    assert trace.replay_map[i].tolist() == replays + [-1] * rest
    assert trace.logps[i].tolist() == pytest.approx(logps + [0.0] * rest, abs=1e-9)
    assert trace.num_forwards[i] == forwards and trace.canvas_length[i] == width
    ends = [j for j in range(width) if steps[j] >= 0 and tokens[j] in model.eos_token_ids]
    scored = [j <= (ends or [width])[0] for j in range(width)] + [False] * rest
    assert trace.completion_mask[i].tolist() == scored
    assert trace.truncated[i] == (not ends) and trace.sample_index[i] == number
    if trace.records:
        got, p = (trace.records[name][i] for name in ("tokens", "logps"))
        assert len(got) == trace.num_replays and not p[got < 0].any()
        at = [tuple(when) for when in (got >= 0).nonzero().tolist()]
        assert {when: int(got[when]) for when in at} == {k: v for k, (v, _) in record.items()}
        assert [float(p[k]) for k in record] == pytest.approx([x for _, x in record.values()])


SHAPES = [(12, 4, 3), (9, 5, 7), (5, 1, 1)]  # gen_length, block_length, denoising_steps
SEEDS = [(42 << 32) + 7, -43, 2**63 + 5]  # training: (--seed << 32) + step; evaluations: < 0
LIMITS = dict(confidence_threshold=0.5, factor=1.5, eb_threshold=0.8)
DRAWS = {"temperature": 0.7, "records": "draws"}
BLOCK = [DRAWS, {"temperature": 0, "records": "events"}, dict(temperature=1.2, top_k=4, top_p=0.8)]
CASES = [("sdar", {"remasking": rule} | how) for how in BLOCK for rule in RULES]
CASES += [
    (family, {"remasking": "low_confidence_static"})
    for family in ("sdar in ones", "sdar in threes", "sdar in eights", "sdar padded with its end")
]
# blocks that settle, and blocks that max_post_steps cuts off
CASES += [
    ("llada2", {"remasking": rule, "editing_threshold": 0.05, "max_post_steps": post} | how)
    for rule, post, how in itertools.product(REMASKING, (0, 3, 16), [{"temperature": 1.5}])
]
MASKED = [{"remasking": rule} | DRAWS for rule in MaskedEngine.choices["remasking"][:8]]
MASKED += [{"remasking": "rcr", "temperature": 0}]
MASKED += [{"remasking": "random", "top_k": 4, "top_p": 0.8}]
MASKED += [
    {"remasking": rule, "cache": cache, "temperature": temperature}
    for rule, cache in itertools.product(("low_confidence_dynamic", "rcr"), ("prefix", "dual"))
    for temperature in (0, 0.8)
]
MASKED += [
    {"remasking": rule, "schedule": "timesteps"} for rule in ("origin", "rcr", "entropy", "random")
]
MASKED += [
    {"remasking": rule, "eos_policy": policy, "temperature": 1.5}
    for policy, rules in {"demote": "entropy rcr", "eoser": "low_confidence_static rcr"}.items()
    for rule in (*rules.split(), "low_confidence_dynamic", "random")
]
MASKED += [{"remasking": "low_confidence_static", "eos_policy": "suppress"}]
MASKED += [{"remasking": rule, "alg_temp": 0.3} for rule in ORDERED]
MASKED += [
    {"remasking": rule, "records": kind, "cache": cache, "temperature": 1.3}
    for rule in ("low_confidence_dynamic", "rcr")
    for kind, cache in (("states", "none"), ("states", "prefix"), ("events", "none"))
]
CASES += [("llada", case) for case in MASKED] + [("dream", case) for case in MASKED[::3]]
# 19 tokens in blocks of 1, 2, 4, 12, or 3, 4, 12, or in one
ASCENDING = {"schedule": "ascending", "gen_length": 19, "block_length": None}
ASCENDING |= {"remasking": "low_confidence_static"}
CASES += [
    ("llada", ASCENDING | {"denoising_steps": steps, "eos_policy": policy, "cache": cache})
    for steps, policy in itertools.product((1, 2, 4), ("none", "eoser"))
    for cache in ("none", "dual")
]
# experts see the tokens of a batch together
CASES += [
    ("llada-moe", {"remasking": "low_confidence_dynamic", "cache": cache, "temperature": 0.8})
    for cache in ("none", "prefix", "dual")
]


@pytest.mark.parametrize("family, case", CASES, ids=str)
def test_decoding_equals_the_naive_sampler(family, case):
    """Ragged prompts in batches of five, with and without the stop at an end of text."""
    model, ended = shared(family), 0
    for k, (L, n, steps) in enumerate(SHAPES):
        options = dict(gen_length=L, denoising_steps=steps, stop_at_eos=k != 1, seed=SEEDS[k])
        options |= {"block_length": 0 if model.attention == "block-causal" else n} | LIMITS | case
        prompts = prompts_of([1, 4, 7, 6], seed=k)
        trace = make_engine(model, max_batch_size=5).generate(
            prompts, num_samples=2, sample_offset=30, **options
        )
        assert trace.prompt_ids == [prompt for prompt in prompts for _ in range(2)]
        for i in range(k, 8, 3):
            assert_is_naive(trace, i, model, 30 + i, **options)
        ended += int((~trace.truncated).sum())
    assert ended > 0 or {"eos_policy", "editing_threshold"} & case.keys()


# --- schedules and orders -------------------------------------------------------------------------


def test_schedules():
    """Dream's floors make the first steps short; ASS: 128 tokens in 7 steps are 1, 2, ..., 65."""
    plan = lambda L, steps: block_quotas(
        gen_length=L, block_length=L, denoising_steps=steps, schedule="ascending"
    )
    assert reveal_quota(32, 8, "timesteps") == [3, 4, 4, 4, 4, 4, 4, 5]
    assert plan(128, 4) == [[1, 2, 4, 8], [16], [32], [65]] and plan(1, 1) == [[1]]
    assert reveal_shares([2, 1], "uniform") == pytest.approx([2 / 3, 1])
    for schedule, weights in {
        "uniform": [0.4, 0.7, 1.0],
        "ascending": [0.13375, 0.38125, 0.87625],
    }.items():
        assert [eoser_weight(i, 3, schedule) for i in range(3)] == pytest.approx(weights)
    assert eoser_weight(0, 1, "uniform") == 0.4


GOLDEN = json.loads((Path(__file__).parent / "golden" / "dream_sampler.json").read_text())
ALGS = {"maskgit_plus": "low_confidence_static"}  # others have our names


@pytest.mark.parametrize("run", GOLDEN["runs"])
def test_greedy_orders_are_those_of_dreams_official_sampler(run):
    alg, steps, new = run.split()
    options = dict(gen_length=int(new), block_length=int(new), denoising_steps=int(steps))
    trace = make_engine(golden_model(CONFIGS["dream"], rule="dream")).generate(
        [GOLDEN["prompt"]], temperature=0, remasking=ALGS.get(alg, alg), schedule="timesteps",
        stop_at_eos=False, **options,
    )  # fmt: skip
    got = {"tokens": trace.completion_ids[0].tolist(), "steps": trace.step_map[0].tolist()}
    assert got == {name: GOLDEN["runs"][run][name] for name in got}


# --- the fast samplers give the same tokens -------------------------------------------------------

# one case of each rule with each cache, kind of record and limit of edits
ONCE = ("remasking", "cache", "records", "max_post_steps")
EACH = {(family, *map(case.get, ONCE)): (family, case) for family, case in CASES}


@pytest.mark.fast
@pytest.mark.parametrize("family, case", EACH.values(), ids=str)
def test_fast_samplers_equal_the_plain_ones(small_buckets, family, case):
    """Ragged prompts, rows that end early, more samples than rows: tokens, orders, logps. Other
    sizes in the same memory, and back.
    """
    model = shared(family)
    options = OPTIONS | {"block_length": 0 if model.attention == "block-causal" else 4} | LIMITS
    fast, separate = fast_of(model), fast_of(model, 4, joins=False)
    for lengths, steps, places in ([3, 9, 1, 6, 8], 2, 256), ([16, 2], 3, 4), ([3, 9, 1, 6], 3, 4):
        options |= case | {"denoising_steps": steps, "seed": steps - 2}
        prompts, fast.max_batch_size = prompts_of(lengths), places
        want = make_engine(model).generate(prompts, **options)
        assert same_draws(fast.generate(prompts, **options), want, forwards=False), places
        assert same_draws(separate.generate(prompts, **options), want)


@pytest.mark.fast
@pytest.mark.parametrize("family", ["sdar", "llada", "dream"])
def test_parts_make_the_whole_rollout(small_buckets, family):
    """Bit for bit, cut within blocks and between them, rows that end early, several batches. The
    fast engine commits no block again.
    """
    model, prompts = shared(family), prompts_of([3, 9, 4])
    how = OPTIONS | {"remasking": "low_confidence_dynamic", "seed": 6}
    whole, forked = make_engine(model).generate(prompts, **how), []
    for engine in make_engine(model, max_batch_size=4), fast_of(model, 2):
        first = part = engine.generate(prompts, until=2, **how)
        for until in (3, 4, 5, 9, None):
            part = engine.generate(prompts, canvas=part, until=until, **how)
        assert same_draws(part, whole, forwards=False)
        new = how | {"canvas": first, "seed": 9, "num_samples": 9}
        forked.append(engine.generate(prompts, **new))
    assert same_draws(*forked, forwards=False)
    assert (part.num_forwards <= whole.num_forwards).all()


@pytest.mark.fast
def test_joined_commits_save_forwards(small_buckets):
    """Rows in phase: every block but the last saves the forward of its commit."""
    options = {"gen_length": 16, "denoising_steps": 4, "stop_at_eos": False}
    options |= {"remasking": "low_confidence_static"}
    both = [fast_of(shared("sdar"), joins=joins) for joins in (False, True)]
    separate, joined = (engine.generate(prompts_of([4, 8]), **options) for engine in both)
    assert (separate.num_forwards - joined.num_forwards).tolist() == [3, 3]


@pytest.mark.fast
def test_the_batch_does_not_change_what_speed_is_paid(small_buckets):
    """Small batches save commits, so these are not counted."""
    how = OPTIONS | {"remasking": "low_confidence_dynamic", "num_samples": 9}
    small, large = (
        fast_of(shared("sdar"), places).generate(prompts_of([3, 9, 4]), **how)
        for places in (2, 256)
    )
    assert (small.num_forwards < large.num_forwards).any()
    no_text = SimpleNamespace(batch_decode=lambda ids, **how: [""] * len(ids))
    paid, again = ([text.forwards for text in one.texts(no_text)] for one in (small, large))
    assert paid == again and all(map(int.__le__, paid, small.num_forwards.tolist()))


@pytest.mark.fast
def test_slots_are_refilled_and_prompts_prefilled_once(small_buckets, monkeypatch):
    engine, live, prefilled = fast_of(shared("sdar"), 4), [], []
    step, prefill = engine._step, engine._write_prompts

    def watched(slots, R, *rest):
        row = slots.sample[:R]
        assert len(set(row.tolist())) == R <= 5  # two slots with one sample would write it twice
        live.append(int((slots.state[0, row] < slots.state[1, row]).sum()))
        step(slots, R, *rest)

    fill = lambda prompts, *rest: (
        prefilled.extend(ids[ids != M].tolist() for ids in prompts) or prefill(prompts, *rest)
    )
    monkeypatch.setattr(engine, "_step", watched)
    monkeypatch.setattr(engine, "_write_prompts", fill)
    prompts = prompts_of([9, 4, 12, 8])
    engine.generate(prompts, **OPTIONS | {"num_samples": 6})
    assert prefilled == [prompt[: len(prompt) // 4 * 4] for prompt in prompts]
    half = len(live) // 2
    assert sum(live[:half]) > 3.5 * half  # a free slot is filled a step later


@pytest.mark.fast
def test_old_keys_and_broken_weights_leave_no_trace(small_buckets):
    """What an earlier rollout left in the slots is never attended to, NaN included; other seeds,
    options and weights in the same slots.
    """
    engine, good = fast_of(model_of()), dict(export_weights(model_of()))
    want = engine.generate(prompts_of([6, 3]), **OPTIONS)
    for k, v in engine.slots.cache:
        k.fill_(1e6), v.fill_(1e6)
    other = OPTIONS | {"seed": 2**63 + 1, "temperature": 0.5, "records": "draws"}
    pair = [one.generate(prompts_of([5, 2]), **other) for one in (engine, engine_of())]
    assert same_draws(*pair, forwards=False)
    assert same_draws(engine.generate(prompts_of([6, 3]), **OPTIONS), want, 0)
    with torch.no_grad():
        engine.model.layers[0].mlp.up_proj.weight.fill_(float("nan"))
    with pytest.raises(SystemExit, match=r"not finite at samples \[10, 11, 12"):
        engine.generate(prompts_of([5, 2]), sample_offset=10, **OPTIONS)
    engine.load_weights(good.items())
    assert same_draws(engine.generate(prompts_of([6, 3]), **OPTIONS), want)


# --- what every sampler keeps ---------------------------------------------------------------------


@pytest.mark.parametrize("remasking", RULES)
def test_select_against_loops(remasking):
    """Ties, fewer masks than the quota, thresholds met exactly, blocks without masks."""
    generator, sign = torch.Generator().manual_seed(0), -1 if "entropy" in remasking else 1
    for n, limit, quota in itertools.product((1, 4, 9), (0.0, 0.5, 0.75, 1.0), (0, 1, 3, 10)):
        confidence = sign * torch.randint(0, 5, (100, n), generator=generator) / 4
        masked = torch.rand(100, n, generator=generator) < torch.rand(100, 1, generator=generator)
        limits = remasking, limit, 2 * limit, limit
        got = select(confidence, masked, quota, *limits)
        for c, places, row in zip(confidence.tolist(), masked, got, strict=True):
            want = naive_rule(c, places.nonzero()[:, 0].tolist(), quota, *limits)
            assert row.nonzero()[:, 0].tolist() == sorted(want)


@pytest.mark.parametrize("temperature", [0.7, 3.0])
def test_top_p_of_bf16_logits_is_that_of_their_exact_probabilities(temperature):
    """Sums of bf16 probabilities would leave too few tokens, or all of a long tail."""
    logits = (2.5 * torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0))).bfloat16()
    p = (logits.double() / temperature).softmax(-1)
    left = truncate(logits, temperature, top_p=0.95).isfinite()
    weakest = torch.where(left, p, 1.0).amin(-1, keepdim=True)
    assert ((p * left).sum(-1) >= 0.95 - 1e-5).all()
    assert ((p * (p > weakest)).sum(-1) < 0.95 + 1e-5).all()


def test_broken_logits_stop_the_rollout():
    engine = make_engine(model_of())
    with torch.no_grad():
        engine.model.lm_head.weight[6] = math.nan
    with pytest.raises(SystemExit, match=r"not finite at samples \[7"):
        engine.generate([[3, 4]], gen_length=8, sample_offset=7)


# --- exact distributions --------------------------------------------------------------------------


def exact_distribution(model, prompt, steps, rule, threshold, temperature):
    """{completion: probability} with its graph, by every draw of every masked token and every order
    of reveals. steps: [(places of the block in work, how many to reveal)]; the mask is the last id.
    """
    V, L = model.mask_token_id, steps[-1][0].stop
    states = list(itertools.product(range(V + 1), repeat=L))
    logits = model.logits(torch.tensor([[*prompt, *state] for state in states]))[:, -L:, :V]
    p = (logits / temperature).softmax(-1)
    floats = p.tolist()
    number_of = {state: i for i, state in enumerate(states)}
    chances = p if p.requires_grad else floats
    score = cache(lambda i, j, v: naive_score(rule, floats[i][j], math.log(floats[i][j][v]), 0))
    now = {states[-1]: 1.0}
    for places, quota in steps:
        later = {}
        for state, chance in now.items():
            i, masked = number_of[state], [j for j in places if state[j] == V]
            for draw in itertools.product(range(V), repeat=len(masked)):
                token = dict(zip(masked, draw, strict=True))
                scores = {j: score(i, j, v) for j, v in token.items()}
                choices = [naive_rule(scores, masked, quota, rule, threshold, 0, 0)]
                if rule == "random":
                    choices = list(itertools.combinations(masked, min(quota, len(masked))))
                share = chance * math.prod(chances[i][j][v] for j, v in token.items())
                for chosen in choices:
                    new = tuple(token[j] if j in chosen else state[j] for j in range(L))
                    later[new] = later.get(new, 0.0) + share / len(choices)
        now = later
    return now


@pytest.mark.parametrize(
    "family, L, remasking, temperature, steps",
    [
        ("sdar", 3, "random", 0.7, 2),
        ("sdar", 3, "low_confidence_static", 1.5, 3),
        ("llada", 3, "low_confidence_static", 1.5, 3),
        ("sdar", 4, "low_confidence_dynamic", 0.7, 4),
        ("llada", 4, "low_confidence_dynamic", 0.7, 4),
    ],
)
@torch.no_grad()
def test_samples_follow_the_exact_distribution(family, L, remasking, temperature, steps):
    """Frequencies of 6000 completions of 5^L: chi-square within 4.5 deviations."""
    model, n, block = (
        tiny_model(family, **few_tokens(family, 6)),
        6000,
        4 if family == "sdar" else L,
    )
    prompt = [3, 1, 4, 2, 0][: 5 if L == 3 else 4]
    quotas = [(range(L), quota) for quota in reveal_quota(block, steps)]
    want = exact_distribution(model, prompt, quotas, remasking, 0.3, temperature)
    assert abs(sum(want.values()) - 1) < 1e-12 and len(want) == 5**L
    trace = make_engine(model, max_batch_size=n).generate(
        [prompt], num_samples=n, gen_length=L, denoising_steps=steps, confidence_threshold=0.3,
        stop_at_eos=False, remasking=remasking, temperature=temperature, block_length=block,
    )  # fmt: skip
    counts = Counter(map(tuple, trace.completion_ids.tolist()))
    cells = [(counts[key], n * p) for key, p in want.items() if n * p >= 5]
    chi = sum((count - expected) ** 2 / expected for count, expected in cells)
    assert abs(chi - len(cells)) / math.sqrt(2 * len(cells)) < 4.5
    assert max(abs(counts[key] / n - want[key]) for key in want) < 0.025


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("config", [SMALL, TINY_SDAR_MOE, TINY_LLADA2], ids=["sdar", "moe", "2"])
@pytest.mark.parametrize("adapters", [False, True])
def test_cuda_graphs_equal_the_same_steps_launched_one_by_one(config, adapters):
    """bf16; seeds, prompts, options and weights change under the graphs."""
    adapt = lambda model: add_lora(model, 4, 8, dtype=torch.bfloat16) if adapters else model
    build = lambda seed=0: adapt(random_model(config, seed, dtype=torch.bfloat16)).cuda()
    fast, slow = make_engine(build()), make_engine(build())
    slow.use_graphs = False
    changes = [{"remasking": rule} for rule in RULES] + [{"temperature": 0, "top_k": 3}]
    changes += [{"records": "events", "stop_at_eos": False}, {"top_p": 0.5, "denoising_steps": 4}]
    for weights, places in itertools.product((0, 7), (256, 20)):
        for number, change in enumerate([*changes, {}]):
            fast.max_batch_size = slow.max_batch_size = places
            options = OPTIONS | change | {"num_samples": 9, "seed": number}
            pair = [one.generate(prompts_of(range(1, 12)), **options) for one in (fast, slow)]
            assert same_draws(*pair, 0) and fast.graphs and not slow.graphs
        exported = export_adapter if adapters else export_weights
        for one in (fast, slow):
            one.load_weights(exported(build(7 - weights)))


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["sdar", "llada2", "llada", "llada-moe", "dream"])
def test_cuda_samples_as_the_cpu_does(family):
    """fp64: the tokens of the plain engine on CPU, with refills, edits and events."""
    options = OPTIONS | {"num_samples": 5, "records": "events", "denoising_steps": 4}
    options |= {"editing_threshold": 0.1, "max_post_steps": 3} if family == "llada2" else {}
    options |= {"gen_length": 12}
    want = engine_of(family).generate(prompts_of(range(1, 12)), **options)
    for places in (4, 64):
        engine = make_engine(deepcopy(shared(family)).cuda(), max_batch_size=places)
        got = engine.generate(prompts_of(range(1, 12)), **options)
        assert all(torch.equal(getattr(got, name).cpu(), getattr(want, name)) for name in NAMES)


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["llada", "dream", "llada-moe"])
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_graphs_of_masked_decoding_draw_what_eager_forwards_draw(family, cache):
    """bf16: the same tokens, run after run, with other weights too."""
    model = model_of(SIZES[family], scale=1, seed=1, dtype=torch.bfloat16).cuda()
    graphs = make_engine(model)
    eager = make_engine(model)
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


MID = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64}
MID |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096}
MID |= {"mask_token_id": 4095, "eos_token_id": 1, "pad_token_id": 0}


@pytest.mark.cuda
@pytest.mark.parametrize("config", [TINY_SDAR, TINY_LLADA, TINY_DREAM, TINY_SDAR | MID])
def test_fast_engines_agree_with_plain_layers_in_bf16(config):
    """Log-probabilities of what they draw, within 0.1 nats. Control: another model."""
    build = lambda seed=0: random_model(config, seed, dtype=torch.bfloat16).cuda()
    engine, n = make_engine(build()), build().block_length
    prompts = [[5 + i % 200 for i in range(length)] for length in (4, 8, 36, 64)]
    options = {"gen_length": 8 * n, "denoising_steps": n, "num_samples": 8, "stop_at_eos": False}
    trace = engine.generate(prompts, remasking="random", **options)
    gap = lambda model: (replay_logps(model, trace) - trace.logps.float()).abs().max()
    assert gap(build()) < 0.1 < gap(build(1))
