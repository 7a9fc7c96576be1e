"""rollout/masked.py beyond plain decoding: rules of reveal, caches, the end of a text, schedules.

Each is compared with a naive sampler of one row, with loops over positions, which shares nothing with the engine but the
model's own layers and the key of the draws.
"""

import itertools
import math

import pytest
import torch
from test_masked import EOS, FAMILIES, PAD, STATIC, Faulty, M, V, model_of, prompts_of, uniform
from test_rollout import model_of as block_model_of
from test_rollout import naive_rule, rows_of, same_draws, scripted

import rollout.engine
from rollout import make_engine, probe
from rollout.engine import RULES, confidence_of, select
from rollout.probe import replay_logps
from rollout.schedules import block_quotas, eoser_weight


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request):
    return make_engine(model_of(request.param, scale=12))


# --- the naive sampler -------------------------------------------------------------------------------------------------------


def naive_logits(model, ids, fresh, stored):
    """[T] ids -> [T, V]: one full forward in which only `fresh` positions have keys and values of their own.

    stored: {layer: [k, v]} of all positions, from which the others come; what is fresh is written into it. Empty: all are.
    """

    def attend(layer, q, k, v):
        if layer in stored:
            for new, old in zip((k, v), stored[layer], strict=True):
                for p in range(len(ids)):
                    if p not in fresh:
                        new[:, :, p] = old[:, :, p]
        stored[layer] = [k.clone(), v.clone()]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return torch.einsum(
            "bhqk,bhkd->bhqd", (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1), v
        )

    hidden = model.hidden(torch.tensor([ids]), torch.arange(len(ids))[None], attend)[0]
    if hasattr(model, "align"):  # Dream: token i is predicted where token i - 1 stands
        hidden = torch.stack([hidden[max(i - 1, 0)] for i in range(len(ids))])
    return model.head(hidden)


def naive_blocks(gen_length, block_length, denoising_steps, schedule):
    """-> for each block the tokens to reveal at each step"""
    if schedule == "uniform":
        n, s = block_length, denoising_steps
        return [[n // s + (step < n % s) for step in range(s)]] * math.ceil(gen_length / n)
    # ASS as in the released code (yjyddq/EOSER-ASS-RL 5affb4e, eval/generate.py): blocks are peeled off from the right.
    S = int(math.log2(gen_length))
    number, power, left, sizes = S - denoising_steps + 1, S - 1, gen_length, []
    for block in range(number - 1, -1, -1):
        size = 2**power + 1 + gen_length - 2**S if block == number - 1 else 2**power
        size = left if block == 0 else size
        sizes.insert(0, size)
        left, power = left - size, power - 1
    first = [2**step for step in range(denoising_steps)]
    first[-1] += sizes[0] - sum(first)
    return [first, *([size] for size in sizes[1:])]


@torch.no_grad()
def naive_sample(
    model, prompt, number, *, gen_length=10, block_length=4, denoising_steps=4, temperature=1.0, remasking="entropy",
    confidence_threshold=0.9, factor=1.0, eb_threshold=0.35, schedule="uniform", cache="none", eos_policy="none", seed=0,
    stop_at_eos=True, records=None,
):  # fmt: skip
    """One completion -> {"tokens", "steps", "logps": lists, None, -1 and 0 where never revealed; "forwards": int; "events";
    "states": for each forward its number, what is masked, and the token and probability drawn for each masked position}"""
    P, plan = len(prompt), naive_blocks(gen_length, block_length, denoising_steps, schedule)
    L, total = sum(map(sum, plan)), sum(map(len, plan))
    ids, masked = prompt + [M] * L, [p >= P for p in range(P + L)]
    steps, logps, forwards, events, states = [-1] * L, [0.0] * L, 0, [], []
    for b, quotas in enumerate(plan):
        start, n, before_block = P + sum(map(sum, plan[:b])), sum(quotas), sum(map(len, plan[:b]))
        first = start - 1 if hasattr(model, "align") else start
        fresh, stored = range(first, {"dual": start + n}.get(cache, P + L)), {}
        run, owed = {}, 0
        for step, quota in enumerate(quotas):
            now = before_block + step
            places = [p for p in range(start, start + n) if masked[p]]
            if not places:
                break
            forwards += 1
            logits = (
                model.logits(torch.tensor([ids]))[0]
                if cache == "none"
                else naive_logits(model, ids, fresh, stored)
            )
            token, logp, score, guess = {}, {}, {}, {}
            for p in places + [p for p in range(start + n, P + L) if records]:
                banned = {M, *model.eos_token_ids} if eos_policy == "suppress" else {M}
                z = [
                    -math.inf if v in banned else value / (temperature or 1)
                    for v, value in enumerate(logits[p].tolist())
                ]
                lse = max(z) + math.log(math.fsum(math.exp(value - max(z)) for value in z))
                probs = [math.exp(value - lse) for value in z]
                key = (step, "token") if p < start + n else (now, "guess")
                v, reached, target = z.index(max(z)), 0.0, uniform(seed, number, p - P, *key)
                if temperature > 0:
                    for v in range(V):
                        reached += probs[v]
                        if reached > target:
                            break
                guess[p] = v, probs[v]
                if p >= start + n:
                    continue
                token[p], logp[p] = v, z[v] - lse
                score[p] = {
                    "random": uniform(seed, number, p - P, step, "order"),
                    "entropy": math.fsum(q * math.log(q) for q in probs if q > 0),
                    "entropy_bounded": math.fsum(q * math.log(q) for q in probs if q > 0),
                    "topk_margin": sorted(probs)[-1] - sorted(probs)[-2],
                }.get(remasking, probs[v])
                if v in model.eos_token_ids and eos_policy == "demote":
                    score[p] = -1e9
                if v in model.eos_token_ids and eos_policy == "eoser":
                    score[p] *= 0.4 + 0.6 * now / (total - 1) if schedule != "ascending" else (
                        0.01 + 0.99 * (2 * 2**now - 1) / 2**total
                    )  # fmt: skip
            states.append((now, [masked[p] for p in range(P, P + L)], guess))
            reveal, owed, before = (
                naive_rule(
                    score, places, quota, remasking, confidence_threshold, factor, eb_threshold
                ),
                owed + quota,
                list(ids),
            )
            if remasking == "rcr":
                run.update(score)
                keep = sorted(run, key=lambda p: (-run[p], p))[:owed]
                reveal = [p for p in places if p in keep]
                for p in run:
                    if p not in places and p not in keep:
                        ids[p], masked[p] = M, True
            for p in reveal:
                ids[p], steps[p - P], logps[p - P], masked[p] = token[p], step, logp[p], False
            for p in range(P, P + L):
                if ids[p] != before[p]:
                    events.append((number, now, p - P, ids[p], 0.0 if masked[p] else logps[p - P]))
        if stop_at_eos and any(ids[p] in model.eos_token_ids for p in range(start, start + n)):
            break
    tokens = [None if masked[p] else ids[p] for p in range(P, P + L)]
    return {
        "tokens": tokens,
        "steps": steps,
        "logps": logps,
        "forwards": forwards,
        "events": events,
        "states": states,
    }


def matches(trace, i, model, prompt, number, **options):
    """Whether row i of a trace is the naive sampler's completion."""
    want = naive_sample(model, prompt, number, **options)
    tokens = [
        None if step < 0 else v
        for v, step in zip(
            trace.completion_ids[i].tolist(), trace.step_map[i].tolist(), strict=True
        )
    ]
    same = (
        tokens == want["tokens"]
        and trace.step_map[i].tolist() == want["steps"]
        and trace.num_forwards[i] == want["forwards"]
    )
    return (
        same
        and (trace.logps[i] - torch.tensor(want["logps"], dtype=torch.float64)).abs().max().item()
        < 1e-9
    )


# --- (a) rules of reveal -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "remasking",
    ["low_confidence_factor", "entropy", "entropy_bounded", "topk_margin", "sequential"],
)
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_rules_equal_the_naive_sampler(engine, remasking, temperature):
    """Ragged prompts in one batch, more and fewer steps than tokens in a block, with and without the end at an EOS."""
    prompts, others = prompts_of([1, 4, 7], seed=3), 0
    for n, steps, gen_length, factor in ((4, 4, 12, 1.5), (8, 3, 10, 0.5), (5, 7, 9, 3.0)):
        options = dict(
            gen_length=gen_length, block_length=n, denoising_steps=steps, temperature=temperature, remasking=remasking,
            factor=factor, seed=steps, stop_at_eos=n != 4,
        )  # fmt: skip
        trace = engine.generate(prompts, sample_offset=50, **options)
        for i, prompt in enumerate(prompts):
            assert matches(trace, i, engine.model, prompt, 50 + i, **options)
        assert trace.settings["remasking"] == remasking and trace.settings["factor"] == factor
        control = options | {"remasking": "low_confidence_static"}
        others += sum(
            not matches(trace, i, engine.model, prompt, 50 + i, **control)
            for i, prompt in enumerate(prompts)
        )
    assert others > 0


@pytest.mark.parametrize("remasking", RULES)
def test_select_against_the_definition(remasking):
    """Ties, confidences of 0 and 1, negative ones (entropies), fewer masks than the quota, no masks at all."""
    generator = torch.Generator().manual_seed(0)
    for n in (1, 4, 7, 32):
        confidence = torch.randint(-1, 5, (120, n), generator=generator) / 4
        confidence[:60] = torch.rand(60, n, generator=generator) ** 0.1
        confidence = -confidence.abs() if remasking == "entropy_bounded" else confidence
        masked = torch.rand(120, n, generator=generator) < torch.rand(120, 1, generator=generator)
        for quota, threshold, factor in itertools.product(
            (0, 1, n // 2 + 1), (-2.0, 0.5, 0.9), (0.1, 1.0, 3.0)
        ):
            got = select(confidence, masked, quota, remasking, threshold, factor, 0.75)
            for row in range(120):
                places = masked[row].nonzero().flatten().tolist()
                c = confidence[row].tolist()
                want = naive_rule(c, places, quota, remasking, threshold, factor, 0.75)
                assert got[row].nonzero().flatten().tolist() == sorted(want)


def test_factor_decoding_bounds_the_joint_error():
    """Fast-dLLM's rule by hand: confidences .99 .95 .8 .3 and factor 1: 2(.01), 3(.05), 4(.2) < 1 but 5(.7) is not."""
    confidence, masked = torch.tensor([[0.3, 0.99, 0.8, 0.95]]), torch.ones(1, 4, dtype=torch.bool)
    reveal = lambda factor: select(confidence, masked, 1, "low_confidence_factor", 0.9, factor)[
        0
    ].tolist()
    assert reveal(1.0) == [False, True, True, True] and reveal(0.5) == [False, True, False, True]
    assert reveal(1e-6) == [False, True, False, False] and reveal(4.0) == [True] * 4


def test_parallel_rules_reveal_at_least_one_and_then_all_above(engine):
    """denoising_steps = block_length: an unreachable threshold or factor gives one token a step, an easy one a whole block."""
    for remasking, hard, easy in (
        ("low_confidence_dynamic", {"confidence_threshold": 1.0}, {"confidence_threshold": 0.0}),
        ("low_confidence_factor", {"factor": 1e-9}, {"factor": 1e9}),
    ):
        options = dict(block_length=6, denoising_steps=6, **STATIC | {"remasking": remasking})
        slow, fast = (
            engine.generate(prompts_of([3, 5]), **options, **limit) for limit in (hard, easy)
        )
        static = engine.generate(prompts_of([3, 5]), block_length=6, denoising_steps=6, **STATIC)
        assert torch.equal(slow.step_map, static.step_map) and slow.num_forwards.tolist() == [
            12,
            12,
        ]
        assert not fast.step_map.any() and fast.num_forwards.tolist() == [2, 2]


@pytest.mark.parametrize("temperature", [0, 0.5, 2.0])
def test_confidence_is_of_the_sampled_distribution(temperature):
    """Banned tokens have no part in it; a distribution of one token is sure, a flat one is not."""
    logits = torch.randn(50, V, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, M], logits[0, 1:] = -math.inf, -math.inf
    logits[1, :M] = 0
    p = (logits.double() / (temperature or 1)).softmax(-1)
    logps = p.max(-1).values.log()
    best = p.sort(-1, descending=True).values
    want = {
        "entropy": torch.stack([sum(x * x.log() for x in row if x > 0) for row in p]),
        "topk_margin": best[:, 0] - best[:, 1],
        "random": best[:, 0],
    }
    for remasking, value in want.items():
        assert torch.allclose(
            confidence_of(logits, logps, temperature, remasking), value, atol=1e-12
        )
    assert want["entropy"][:2].tolist() == pytest.approx([0, -math.log(M)])


@pytest.mark.parametrize("remasking", ["entropy", "topk_margin"])
def test_logps_of_draw_independent_rules_are_the_likelihood_of_the_trajectory(engine, remasking):
    """The order does not depend on the draws, so that every state has one set of places to reveal at the next step."""
    trace = engine.generate(
        prompts_of([4]),
        num_samples=40,
        block_length=4,
        denoising_steps=4,
        temperature=3.0,
        **STATIC | {"remasking": remasking},
    )
    first = (trace.step_map[:, :4] == 0).long().argmax(1)
    assert (
        len(first.unique()) == 1 and len(trace.completion_ids[torch.arange(40), first].unique()) > 3
    )
    sampled = engine.generate(
        prompts_of([4]),
        num_samples=40,
        block_length=4,
        denoising_steps=4,
        temperature=3.0,
        **STATIC,
    )
    assert (
        len((sampled.step_map[:, :4] == 0).long().argmax(1).unique()) > 1
    )  # control: by the drawn token's probability


def test_the_block_engine_refuses_rules_it_has_not():
    for remasking in ("rcr", "maskgit"):
        with pytest.raises(
            SystemExit,
            match=f"^--remasking {remasking}: .*block-causal model has low_confidence_static.*sequential$",
        ):
            make_engine(block_model_of()).generate([[3]], remasking=remasking)


# --- (b) caches --------------------------------------------------------------------------------------------------------------

CACHED = dict(
    gen_length=12,
    block_length=4,
    denoising_steps=3,
    stop_at_eos=False,
    remasking="low_confidence_static",
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_caches_are_exact_for_one_layer(family, cache):
    """Keys and values of one layer depend on their own token alone: no step of any row differs from decoding without cache."""
    engine = make_engine(
        model_of(
            family, scale=12, **{{"llada": "n_layers", "dream": "num_hidden_layers"}[family]: 1}
        )
    )
    for remasking in ("low_confidence_dynamic", "entropy", "random"):
        options = dict(
            num_samples=3, seed=2, **CACHED | {"remasking": remasking, "stop_at_eos": True}
        )
        plain, cached = (
            engine.generate(prompts_of([1, 4, 9, 6]), cache=kind, **options)
            for kind in ("none", cache)
        )
        assert same_draws(plain, cached, 1e-9) and cached.settings == plain.settings | {
            "cache": cache
        }
        assert (cached.step_map < 0).any() and cached.step_map.max() > 0


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_caches_equal_the_naive_cached_sampler(engine, cache, temperature):
    """Two layers, ragged prompts in one batch: tokens, order and logps are those of stale keys and values, and no others."""
    prompts = prompts_of([1, 4, 9], seed=3)
    for n, steps, gen_length in ((4, 4, 12), (6, 3, 10), (1, 1, 4)):
        options = dict(
            gen_length=gen_length, block_length=n, denoising_steps=steps, temperature=temperature, cache=cache, seed=steps,
            remasking="low_confidence_dynamic", confidence_threshold=0.6, stop_at_eos=n != 4,
        )  # fmt: skip
        trace = engine.generate(prompts, sample_offset=20, **options)
        for i, prompt in enumerate(prompts):
            assert matches(trace, i, engine.model, prompt, 20 + i, **options)
            for other in {"none", "prefix", "dual"} - {cache} if n == 4 else ():
                assert not matches(
                    trace, i, engine.model, prompt, 20 + i, **options | {"cache": other}
                )


def test_the_first_step_of_a_block_is_exact(engine):
    """'first step after a refresh exact, later ones approximate': by the model's own replay of the recorded states."""
    for cache in ("none", "prefix", "dual"):
        trace = engine.generate(prompts_of([1, 4, 9]), num_samples=2, cache=cache, **CACHED)
        gap = (replay_logps(engine.model, trace) - trace.logps).abs()
        assert gap[trace.step_map == 0].max() < 2e-6
        assert (gap[trace.step_map > 0].max() > 1e-3) == (cache != "none")
    one_step = dict(CACHED, denoising_steps=1)
    plain = engine.generate(prompts_of([1, 4, 9]), **one_step)
    assert same_draws(
        engine.generate(prompts_of([1, 4, 9]), cache="dual", **one_step), plain, 1e-12
    )


def test_the_refresh_serves_step_0_and_windows_are_small(monkeypatch, engine):
    """Widths of the forwards: the whole once a block, then block and suffix, or the block; Dream's has the token before."""
    widths, hidden, before = [], engine.model.hidden, int(hasattr(engine.model, "align"))
    monkeypatch.setattr(
        engine.model, "hidden", lambda ids, *rest: widths.append(ids.shape[1]) or hidden(ids, *rest)
    )
    for cache, later in (("none", [17, 17, 17]), ("prefix", [12, 8, 4]), ("dual", [4, 4, 4])):
        widths.clear()
        trace = engine.generate(prompts_of([2, 5]), cache=cache, **CACHED)
        extra = before if cache != "none" else 0
        assert widths == [w for width in later for w in (17, width + extra, width + extra)]
        assert trace.num_forwards.tolist() == [9, 9]


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_batches_and_padding_change_no_cached_draw(engine, cache):
    """A row beside longer and shorter prompts, in batches of 1, 3 and all, is the row alone."""
    prompts, options = (
        prompts_of([3, 9, 1, 6]),
        dict(CACHED, cache=cache, num_samples=2, stop_at_eos=True),
    )
    whole = engine.generate(prompts, **options)
    for size in (1, 3):
        assert same_draws(
            make_engine(engine.model, max_batch_size=size).generate(prompts, **options), whole, 1e-9
        )
    for p in range(4):
        alone = engine.generate([prompts[p]], sample_offset=2 * p, **options)
        assert rows_of(alone, [0, 1]) == rows_of(whole, [2 * p, 2 * p + 1])


@pytest.mark.parametrize("fault", ["", "padding seen", "rows shifted", "stale block"])
def test_faults_of_a_cache_show(engine, fault):
    """Negative controls of the comparison with the naive cached sampler. Dream's shift is one of them."""
    prompts, options = prompts_of([2, 8]), dict(CACHED, cache="dual")
    trace = Faulty(engine.model, fault).generate(prompts, **options)
    assert matches(trace, 0, engine.model, prompts[0], 0, **options) == (not fault)


def test_the_probe_reports_the_gap_of_a_cache(engine):
    """Neither hidden nor refused: without a cache it is rounding, with one it is not."""
    metrics = {
        cache: probe(engine, engine.model, [3, 4, 5], num_samples=4, cache=cache, **CACHED)
        for cache in ("none", "prefix", "dual")
    }
    gaps = {cache: values["probe/logp_gap_mean"] for cache, values in metrics.items()}
    assert gaps["none"] < 1e-6 and min(gaps["prefix"], gaps["dual"]) > 1e-3


def test_caches_are_refused_where_there_are_none(engine):
    with pytest.raises(
        SystemExit, match="^--cache dual: the sampler of a block-causal model has none$"
    ):
        make_engine(block_model_of()).generate([[3]], cache="dual")
    with pytest.raises(
        SystemExit,
        match="^--cache full: the sampler of a bidirectional model has none, prefix, dual$",
    ):
        engine.generate([[3]], cache="full")


# --- (c) the end of a text, (d) schedules ------------------------------------------------------------------------------------

ENDS = dict(gen_length=12, block_length=6, denoising_steps=4, stop_at_eos=False)


@pytest.fixture(scope="module", params=FAMILIES)
def ender(request):
    """Of a model that likes to end: many tokens of the vocabulary are EOS."""
    return make_engine(model_of(request.param, scale=12, eos=(1, 2, 3, 5, 8, 13)))


@pytest.mark.parametrize("eos_policy", ["suppress", "demote", "eoser"])
@pytest.mark.parametrize("remasking", RULES)
def test_eos_policies_equal_the_naive_sampler(ender, eos_policy, remasking):
    if (
        eos_policy == "eoser"
        and "entropy" in remasking
        or eos_policy != "suppress"
        and remasking == "sequential"
    ):
        words = "does not look at" if remasking == "sequential" else "are negative"
        with pytest.raises(
            SystemExit, match=f"^--eos-policy {eos_policy} .*--remasking {remasking} .*{words}"
        ):
            ender.generate([[3]], eos_policy=eos_policy, remasking=remasking)
        return
    prompts, others = prompts_of([1, 4, 7, 2], seed=3), 0
    for stop_at_eos, temperature in ((False, 1.5), (True, 1.0), (False, 0)):
        options = dict(
            ENDS, temperature=temperature, remasking=remasking, confidence_threshold=0.5, factor=1.5, stop_at_eos=stop_at_eos,
            eos_policy=eos_policy,
        )  # fmt: skip
        trace = ender.generate(prompts, sample_offset=30, **options)
        assert trace.settings["eos_policy"] == eos_policy
        for i, prompt in enumerate(prompts):
            assert matches(trace, i, ender.model, prompt, 30 + i, **options)
            others += not matches(
                trace, i, ender.model, prompt, 30 + i, **options | {"eos_policy": "none"}
            )
    assert others > 0


def test_suppressed_ends_never_come_and_the_trace_says_so(ender):
    eos = torch.tensor(ender.model.eos_token_ids)
    plain, banned = (
        ender.generate(prompts_of([3, 5]), num_samples=8, eos_policy=p, **ENDS)
        for p in ("none", "suppress")
    )
    assert (
        torch.isin(plain.completion_ids, eos).any()
        and not torch.isin(banned.completion_ids, eos).any()
    )
    assert banned.truncated.all() and banned.completion_mask.all()
    assert plain.settings["logps"] == "softmax(logits / temperature)"
    assert banned.settings["logps"] == "softmax(logits / temperature), EOS banned"


def test_demoted_ends_come_last_in_their_block(monkeypatch, engine):
    """A script of tokens: the two ends of each block are revealed behind all others, from left to right; nothing is stuck."""
    script = [EOS[0], 7, 8, EOS[1], 9, 10] * 2
    steps = dict(block_length=6, denoising_steps=6, stop_at_eos=False)
    trace = scripted(monkeypatch, engine, script, [3, 4], eos_policy="demote", **steps)
    assert (
        trace.completion_ids[0].tolist() == script
        and trace.step_map[0].tolist() == [4, 0, 1, 5, 2, 3] * 2
    )
    assert (
        scripted(monkeypatch, engine, script, [3, 4], **steps).step_map[0].tolist()
        == [0, 1, 2, 3, 4, 5] * 2
    )
    only = scripted(monkeypatch, engine, [EOS[0]] * 12, [3, 4], eos_policy="demote", **steps)
    assert only.completion_ids[0].tolist() == [EOS[0]] * 12 and only.num_forwards.tolist() == [12]


def test_eoser_weights():
    """0.4 to 1 over all steps of a completion, also with many blocks; with ASS the share of 2^steps, from 0.01."""
    assert [eoser_weight(i, 4, "uniform") for i in range(4)] == pytest.approx([0.4, 0.6, 0.8, 1.0])
    assert [eoser_weight(i, 128, "uniform") for i in (0, 127)] == [0.4, 1.0] and eoser_weight(
        0, 1, "uniform"
    ) == 0.4
    assert [eoser_weight(i, 3, "ascending") for i in range(3)] == pytest.approx(
        [0.01 + 0.99 * x / 8 for x in (1, 3, 7)]
    )


def test_ascending_blocks():
    """specs of ASS: 256 tokens in 8 steps are 1, 2, 4, ..., 64, 129; 128 in 7 steps and 4 blocks are 15, 16, 32, 65."""
    plan = lambda gen_length, steps: block_quotas(
        gen_length=gen_length, block_length=None, denoising_steps=steps, schedule="ascending"
    )
    assert (
        plan(256, 8) == [[1, 2, 4, 8, 16, 32, 64, 129]]
        and plan(2, 1) == [[2]]
        and plan(1, 1) == [[1]]
    )
    assert plan(128, 4) == [[1, 2, 4, 8], [16], [32], [65]]
    for gen_length in range(2, 300):
        for steps in range(1, int(math.log2(gen_length)) + 1):
            quotas = plan(gen_length, steps)
            assert (
                quotas == naive_blocks(gen_length, None, steps, "ascending")
                and sum(map(sum, quotas)) == gen_length
            )
            assert sum(map(len, quotas)) == int(math.log2(gen_length)) and len(quotas[0]) == steps


@pytest.mark.parametrize("eos_policy", ["none", "eoser"])
@pytest.mark.parametrize("denoising_steps", [1, 2, 4])
def test_the_ascending_schedule_equals_the_naive_sampler(ender, eos_policy, denoising_steps):
    """19 tokens in 4 steps, in blocks of 1, 2, 4, 12, or 3, 4, 12, or in one; replayed by the model."""
    options = dict(
        gen_length=19,
        denoising_steps=denoising_steps,
        schedule="ascending",
        remasking="low_confidence_static",
    )
    prompts, eosers = prompts_of([1, 4, 7]), 0
    for stop_at_eos, cache in ((True, "none"), (False, "none"), (False, "dual")):
        options |= {"stop_at_eos": stop_at_eos, "cache": cache}
        trace = ender.generate(prompts, eos_policy=eos_policy, **options)
        for i, prompt in enumerate(prompts):
            assert matches(
                trace,
                i,
                ender.model,
                prompt,
                i,
                eos_policy=eos_policy,
                block_length=None,
                **options,
            )
            other = {"none": "eoser", "eoser": "none"}[eos_policy]
            eosers += not matches(
                trace, i, ender.model, prompt, i, eos_policy=other, block_length=None, **options
            )
            if not stop_at_eos:
                assert trace.replay_map[i].bincount().tolist() == [1, 2, 4, 12]
        if cache == "none":
            gap = (replay_logps(ender.model, trace) - trace.logps).abs()
            assert trace.num_replays == 4 and gap[trace.step_map >= 0].max() < 2e-6
    assert eosers > 0 or denoising_steps < 4  # short blocks have little choice
    assert trace.settings["block_length"] == 2**denoising_steps - 1 or denoising_steps == 4
    assert trace.blocks(0) == [
        b
        for b, quota in enumerate(naive_blocks(19, None, denoising_steps, "ascending"))
        for _ in range(sum(quota))
    ]
    for wrong, words in (
        (
            {"block_length": 5},
            "--schedule ascending makes its own blocks: leave --block-length 5 out",
        ),
        (
            {"denoising_steps": 5},
            "--schedule ascending reveals 19 tokens in 4 steps, not --gen-length 19 --denoising-steps 5",
        ),
    ):
        with pytest.raises(SystemExit, match=f"^{words}$"):
            ender.generate(prompts, **options | wrong)


def test_the_block_engine_refuses_policies_and_schedules():
    for options in ({"eos_policy": "demote"}, {"schedule": "ascending"}):
        ((name, value),) = options.items()
        with pytest.raises(
            SystemExit,
            match=f"^--{name.replace('_', '-')} {value}: the sampler of a block-causal model has",
        ):
            make_engine(block_model_of()).generate([[3]], **options)


# --- (e) running confidence remasking ----------------------------------------------------------------------------------------

RCR = dict(gen_length=12, block_length=6, denoising_steps=4, remasking="rcr")


@pytest.mark.parametrize("cache", ["none", "dual"])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_rcr_equals_the_naive_sampler_event_by_event(ender, cache, temperature):
    """Tokens, last steps, logps, and every reveal and remasking in order; rows that end early among others."""
    prompts, remasked, others = prompts_of([1, 4, 7, 2], seed=3), 0, 0
    for stop_at_eos, eos_policy in ((False, "none"), (True, "demote")):
        options = dict(
            RCR,
            temperature=temperature,
            cache=cache,
            stop_at_eos=stop_at_eos,
            eos_policy=eos_policy,
        )
        trace = ender.generate(prompts, sample_offset=30, **options)
        for i, prompt in enumerate(prompts):
            assert matches(trace, i, ender.model, prompt, 30 + i, **options)
            want = naive_sample(ender.model, prompt, 30 + i, **options)["events"]
            mine = trace.records["events"][:, 0] == 30 + i
            assert trace.records["events"][mine].tolist() == [list(event[:4]) for event in want]
            assert trace.records["logps"][mine].tolist() == pytest.approx(
                [event[4] for event in want], abs=1e-9
            )
            remasked += sum(event[3] == M for event in want)
            others += not matches(
                trace,
                i,
                ender.model,
                prompt,
                30 + i,
                **options | {"remasking": "low_confidence_static"},
            )
    assert remasked > 0 and others > 0


def test_rcr_by_hand(monkeypatch):
    """Quotas 2, 1, 1; by the confidence of each writing: {0, 1}, then 0 is masked again: {1, 2, 3}, then all."""
    engine = make_engine(model_of("llada"))
    table = torch.tensor([[0.45, 0.60, 0.30, 0.20], [0, 0, 0.90, 0.80], [0.50, 0, 0, 0]])
    place = lambda *key: key[2] + 4 * key[3] + 0.0

    def draw(logits, at, temperature):
        return at.long() // 4 + 5, table.flatten()[at.long()].log().to(logits.dtype)

    monkeypatch.setattr(rollout.engine, "keyed_uniform", place)
    monkeypatch.setattr(rollout.engine, "sample_categorical", draw)
    trace = engine.generate(
        [[3]], **RCR | {"gen_length": 4, "block_length": 4, "denoising_steps": 3}
    )
    assert trace.completion_ids.tolist() == [[7, 5, 6, 6]] and trace.step_map.tolist() == [
        [2, 0, 1, 1]
    ]
    assert trace.logps.exp().tolist()[0] == pytest.approx([0.5, 0.6, 0.9, 0.8])
    assert trace.num_forwards.tolist() == [3] and trace.records["events"][:, 1:].tolist() == [
        [0, 0, 5], [0, 1, 5], [1, 0, M], [1, 2, 6], [1, 3, 6], [2, 0, 7],
    ]  # fmt: skip
    states = [state[0].tolist() for state in trace.states(M)]
    assert states == [[M] * 4, [5, 5, M, M], [M, 5, 6, 6]]


@pytest.mark.parametrize("max_batch_size", [256, 3])
def test_the_event_log_replays_rcr(engine, max_batch_size):
    """The learner's logps in the states of the log are the engine's, for final tokens and for those masked again."""
    trace = make_engine(engine.model, max_batch_size=max_batch_size).generate(
        prompts_of([1, 4, 7]), num_samples=4, temperature=1.5, sample_offset=7, **RCR
    )
    events, L = trace.records["events"], 12
    assert (events[:, 3] == M).sum() > 3 and trace.records["logps"].shape == events[:, 0].shape
    assert (replay_logps(engine.model, trace) - trace.logps)[trace.step_map >= 0].abs().max() < 2e-6
    input_ids, valid = trace.sequences(PAD)
    for replay, state in enumerate(trace.states(M)):
        now = (events[:, 1] == replay) & (events[:, 3] != M)
        row, at, token = (events[now, 0] - 7), events[now, 2], events[now, 3]
        clean, score = torch.cat([input_ids[:, :-L], state], 1), torch.zeros_like(valid)
        noisy = clean.clone()
        clean[row, at - L], score[row, at - L] = token, True
        assert (state[row, at] == M).all()
        logps = engine.model.logps(clean, noisy, score, valid, 1.5)[row, at - L]
        assert (logps - trace.records["logps"][now]).abs().max() < 2e-6 if now.any() else True
    last = {(s, p): v for s, _, p, v in events.tolist()}
    for i in range(12):
        assert [last.get((7 + i, p), PAD) for p in range(L)] == trace.completion_ids[i].tolist()
    trace.records = None  # control: a step map cannot represent rcr
    assert (replay_logps(engine.model, trace) - trace.logps)[trace.step_map >= 0].abs().max() > 1e-3


def test_events_of_other_rules_are_their_step_map(engine):
    """Nothing is masked again; without records="events" nothing is kept; the tokens are the same."""
    options = dict(gen_length=9, block_length=3, num_samples=2, seed=4)
    plain, kept = (
        engine.generate(prompts_of([2, 5]), records=records, **options)
        for records in (None, "events")
    )
    assert plain.records is None and same_draws(plain, kept, 0)
    sample, replay, position, token = kept.records["events"].unbind(1)
    assert len(sample) == (kept.step_map >= 0).sum()
    assert torch.equal(kept.replay_map[sample, position], replay) and torch.equal(
        kept.completion_ids[sample, position], token
    )
    assert torch.equal(kept.logps[sample, position], kept.records["logps"])


def test_the_probe_of_rcr_has_no_gap(engine):
    assert probe(engine, engine.model, [3, 4, 5], num_samples=4, **RCR)["probe/logp_gap_max"] < 2e-5


def test_records_are_refused_where_there_are_none(engine):
    with pytest.raises(
        SystemExit, match="^the sampler of a block-causal model keeps no records of kind 'states'$"
    ):
        make_engine(block_model_of()).generate([[3]], records="states")
    with pytest.raises(
        SystemExit, match="^the sampler of a bidirectional model keeps no records of kind 'logits'$"
    ):
        engine.generate([[3]], records="logits")
