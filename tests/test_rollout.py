"""rollout/: the cached block engine against a sampler without cache, replay, selection, keys, EOS, exact distributions, traces.

The naive sampler below is written from the papers and shares nothing with the engine but the model's own logits: one
full forward a step, loops over positions, Python integers for the random numbers.
"""

import copy
import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import rollout.engine
from models import export_weights, save_model
from models.tiny import TINY_SDAR, byte_tokenizer, random_model
from rollout import Trace, make_engine, rollout_sums
from rollout.block import BlockEngine
from rollout.engine import REMASKING, RULES, select, truncate
from rollout.sampling import keyed_uniform
from rollout.schedules import reveal_quota
from rollout.traces import concatenate

V, M, EOS, PAD = 20, 19, (1, 2), 0
SMALL = TINY_SDAR | {
    **{
        "vocab_size": V,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    **{
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mask_token_id": M,
        "eos_token_id": 1,
        "pad_token_id": PAD,
    },
}


def model_of(config=SMALL, scale=30, seed=0, eos=EOS, dtype=torch.float64):
    """Random weights whose head is scaled up, so that distributions are peaked and depend on the context."""
    model = random_model(config, seed=seed, dtype=dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
        model.model.embed_tokens.weight.mul_(50)
        for layer in model.layers:
            layer.self_attn.o_proj.weight.mul_(4)
    model.eos_token_ids, model.pad_token_id = list(eos), PAD
    return model


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture(scope="module")
def engine():
    return make_engine(model_of())


def prompts_of(lengths, seed=0):
    """Random prompts; end tokens stand in them too."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, M, (length,), generator=generator).tolist() for length in lengths]


def same_draws(a, b, tolerance=1e-12):
    """Two traces hold the same tokens, maps and log-probabilities."""
    for name in (
        "completion_ids",
        "completion_mask",
        "canvas_length",
        "step_map",
        "replay_map",
        "sample_index",
        "num_forwards",
    ):
        x, y = getattr(a, name), getattr(b, name)
        same = x.shape == y.shape and torch.equal(x, y)
        if not same:
            return False
    return a.prompt_ids == b.prompt_ids and torch.allclose(a.logps, b.logps, atol=tolerance, rtol=0)


def rows_of(trace, rows):
    """Some rows of a trace, cut to their own width, without the sample index: what may be compared between batches."""
    width = int(trace.canvas_length[rows].max())
    cut = lambda x: x[rows, :width].tolist()
    return [
        cut(trace.completion_ids),
        cut(trace.completion_mask),
        cut(trace.step_map),
        trace.canvas_length[rows].tolist(),
    ]


# --- the naive sampler -------------------------------------------------------------------------------------------------------

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


def naive_logits(model, ids, origin):
    """[T] ids -> [T, V]: model.logits, or the same with the grid of blocks starting elsewhere than at position 0."""
    if origin == 0:
        return model.logits(torch.tensor([ids]))[0]
    block = [(p - origin) // model.block_length for p in range(len(ids))]
    mask = torch.tensor([[[k <= q for k in block] for q in block]])
    position_ids = torch.arange(len(ids))[None]
    return model.head(
        model.hidden(
            torch.tensor([ids]),
            position_ids,
            lambda layer, q, k, v: F.scaled_dot_product_attention(
                q, k, v, mask[:, None], enable_gqa=True
            ),
        )
    )[0]


def softmax(z):
    top = max(z)
    weights = [math.exp(value - top) for value in z]
    return [weight / math.fsum(weights) for weight in weights]


def kept(p, top_k, top_p):
    """Tokens that stay of probabilities p: of equals all or none, the k best, then the fewest that reach top_p."""
    levels = sorted(set(p), reverse=True)  # sets of tokens by their least probability
    able = [level for level in levels if len([q for q in p if q > level]) < (top_k or len(p))]
    mass = math.fsum(q for q in p if q >= able[-1])
    able = [
        level for level in able if top_p == 1 or math.fsum(q for q in p if q > level) < top_p * mass
    ]
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


@torch.no_grad()
def naive_sample(
    model, prompt, number, *, gen_length=10, denoising_steps=4, temperature=1.0, remasking="low_confidence_dynamic",
    confidence_threshold=0.9, factor=1.0, eb_threshold=0.35, top_k=0, top_p=1.0, seed=0, stop_at_eos=True, origin=0,
):  # fmt: skip
    """One completion without a cache -> (tokens, steps, logps, number of forwards)."""
    n, P = model.block_length, len(prompt)
    total = origin + math.ceil((P + gen_length - origin) / n) * n
    ids, masked = prompt + [M] * (total - P), [p >= P for p in range(total)]
    steps, logps, forwards = [-1] * total, [0.0] * total, 0
    start = origin + (P - origin) // n * n
    while start < total:
        if forwards:
            forwards += 1  # the block before this one was committed
        for step in range(denoising_steps):
            places = [p for p in range(start, start + n) if masked[p]]
            if not places:
                break
            forwards += 1
            logits = naive_logits(model, ids[: start + n], origin)
            token, logp, score = {}, {}, {}
            for p in places:
                z = logits[p].tolist()
                z[M] = -math.inf
                z = [value / temperature for value in z] if temperature > 0 else z
                whole = softmax(z)
                if temperature > 0:
                    z = [
                        value if v in kept(whole, top_k, top_p) else -math.inf
                        for v, value in enumerate(z)
                    ]
                top = max(z)
                lse = top + math.log(math.fsum(math.exp(value - top) for value in z))
                if temperature > 0:
                    target, reached = uniform(seed, number, p - P, step, "token"), 0.0
                    for v in range(V):
                        reached += math.exp(z[v] - lse)
                        if reached > target:
                            break
                else:
                    v = z.index(top)
                token[p], logp[p] = v, z[v] - lse
                negative_entropy = math.fsum(q * math.log(q) for q in whole if q > 0)
                score[p] = {
                    "random": uniform(seed, number, p - P, step, "order"),
                    "entropy": negative_entropy,
                    "entropy_bounded": negative_entropy,
                    "topk_margin": sorted(whole)[-1] - sorted(whole)[-2],
                }.get(remasking, math.exp(z[v] - lse))
            quota = n // denoising_steps + (step < n % denoising_steps)
            for p in naive_rule(
                score, places, quota, remasking, confidence_threshold, factor, eb_threshold
            ):
                ids[p], steps[p], logps[p], masked[p] = token[p], step, logp[p], False
        start += n
        if stop_at_eos and any(
            ids[p] in model.eos_token_ids for p in range(max(start - n, P), start)
        ):
            break
    return ids[P:start], steps[P:start], logps[P:start], forwards


def differs(engine, prompt, origin=0, **options):
    """Whether the engine's sample of a prompt is not the naive sampler's."""
    trace = engine.generate([prompt], **options)
    tokens, steps, logps, _ = naive_sample(engine.model, prompt, 0, origin=origin, **options)
    got = trace.completion_ids[0].tolist(), trace.step_map[0].tolist()
    if got != (tokens, steps):
        return True
    return (trace.logps[0] - torch.tensor(logps, dtype=torch.float64)).abs().max().item() > 1e-9


# --- (a) cached decoding equals full recomputation ---------------------------------------------------------------------------


MORE = [rule for rule in RULES if rule not in REMASKING]


@pytest.mark.parametrize(
    "remasking, temperature, stop_at_eos",
    [
        *itertools.product(REMASKING, [0, 0.7, 1.0], [True, False]),
        *itertools.product(MORE, [0.7], [True]),
        *itertools.product(MORE, [0], [False]),
    ],
)
def test_cached_decoding_equals_full_recomputation(engine, remasking, temperature, stop_at_eos):
    """Prompts of length 1..9 (every remainder of the block), 1..5 steps for a block of 4: equal tokens, steps, logps."""
    prompts, stopped = prompts_of(range(1, 10), seed=3), 0
    for denoising_steps in (1, 2, 3, 4, 5):
        options = dict(
            gen_length=7 + denoising_steps % 3, denoising_steps=denoising_steps, temperature=temperature, remasking=remasking,
            confidence_threshold=0.6, factor=1.5, eb_threshold=0.8, seed=denoising_steps, stop_at_eos=stop_at_eos,
        )  # fmt: skip
        trace = engine.generate(prompts, sample_offset=100, **options)
        for i, prompt in enumerate(prompts):
            tokens, steps, logps, forwards = naive_sample(engine.model, prompt, 100 + i, **options)
            width, rest = len(tokens), trace.completion_ids.shape[1] - len(tokens)
            assert trace.completion_ids[i].tolist() == tokens + [PAD] * rest, (denoising_steps, i)
            assert trace.step_map[i].tolist() == steps + [-1] * rest and min(steps) >= 0
            assert trace.canvas_length[i] == width and (len(prompt) + width) % 4 == 0
            assert (
                trace.logps[i, :width] - torch.tensor(logps, dtype=torch.float64)
            ).abs().max() < 1e-12
            assert not trace.logps[i, width:].any() and trace.num_forwards[i] == forwards
            stopped += width < options["gen_length"]
    if temperature:  # rows that end early did occur
        assert (stopped > 0) == stop_at_eos


def test_the_dynamic_rule_reveals_several_at_once_and_falls_back(engine):
    """The comparison above covers both arms of low_confidence_dynamic at its threshold."""
    trace = engine.generate(
        prompts_of(range(1, 10), seed=3), confidence_threshold=0.6, gen_length=8, stop_at_eos=False
    )
    together = [int((row[:8][row[:8] == 0]).numel()) for row in trace.step_map]
    assert min(together) < max(together) and trace.step_map.max() == 3
    fewer = trace.num_forwards.sum()
    static = engine.generate(
        prompts_of(range(1, 10), seed=3),
        remasking="low_confidence_static",
        gen_length=8,
        stop_at_eos=False,
    )
    assert fewer < static.num_forwards.sum()


@pytest.mark.parametrize(
    "options", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.8}, {"top_k": 1}]
)
@pytest.mark.parametrize("remasking", ["low_confidence_dynamic", "entropy_bounded"])
def test_top_k_and_top_p_equal_the_naive_sampler(engine, options, remasking):
    """Tokens, orders and logps under the filtered distribution; entropies are those before the filter."""
    options = options | dict(
        gen_length=9,
        temperature=1.2,
        remasking=remasking,
        confidence_threshold=0.6,
        stop_at_eos=False,
    )
    for seed, prompt in enumerate(prompts_of([3, 4, 6])):
        assert not differs(engine, prompt, seed=seed, **options)
    filters = ("top_k", "top_p")
    changed = [differs(engine, prompt, **options) for prompt in prompts_of([3, 4, 6])]
    free = {name: value for name, value in options.items() if name not in filters}
    traces = [engine.generate(prompts_of([3, 4, 6]), **one) for one in (options, free)]
    assert not any(changed) and not same_draws(*traces)  # the filter does something
    if options.get("top_k") == 1:
        assert not traces[0].logps.any()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_top_p_of_bf16_logits_is_that_of_their_exact_probabilities(temperature):
    """A large vocabulary, as on a GPU: sums of bf16 probabilities leave too few tokens, or all of a long tail."""
    logits = (2.5 * torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0))).bfloat16()
    p = (logits.double() / temperature).softmax(-1)
    left = truncate(logits, temperature, top_p=0.95).isfinite()
    weakest = torch.where(left, p, 1.0).amin(-1, keepdim=True)
    assert ((p * left).sum(-1) >= 0.95 - 1e-5).all() and (
        (p * (p > weakest)).sum(-1) < 0.95 + 1e-5
    ).all()


@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_other_block_lengths(block_size):
    """The block length is the model's: 1 (autoregressive), 3 and 8 decode as the naive sampler does."""
    engine = make_engine(model_of(SMALL | {"block_size": block_size}))
    for P in (1, 2, 3, 8, 10):
        options = dict(gen_length=9, denoising_steps=min(3, block_size), stop_at_eos=False, seed=P)
        assert not differs(engine, prompts_of([P])[0], **options)


def test_length_rounds_up_to_whole_blocks(engine):
    """'gen_length tokens each, rounded up so that the last block is whole': canvas = ceil((P + G) / n) n - P."""
    prompts = prompts_of(range(1, 10))
    for G in range(1, 10):
        trace = engine.generate(prompts, gen_length=G, stop_at_eos=False)
        assert trace.canvas_length.tolist() == [
            math.ceil((P + G) / 4) * 4 - P for P in range(1, 10)
        ]
        assert trace.prompt_ids == prompts


# --- (b) replay --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remasking", REMASKING)
@pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
@torch.no_grad()
def test_the_two_copy_pass_replays_every_recorded_state(engine, remasking, temperature):
    """'equal numbers were revealed together and one forward of this family replays them': trainer logps = engine logps."""
    trace = engine.generate(
        prompts_of([1, 6, 9, 3], seed=5), num_samples=3, gen_length=13, temperature=temperature, remasking=remasking,
        confidence_threshold=0.4, denoising_steps=3,
    )  # fmt: skip
    for side in ("left", "right"):
        rows = [
            prompt + ids[:n].tolist()
            for prompt, ids, n in zip(
                trace.prompt_ids, trace.completion_ids, trace.canvas_length, strict=True
            )
        ]
        T = max(map(len, rows)) + 2
        clean, valid = torch.full((len(rows), T), PAD), torch.zeros(len(rows), T, dtype=torch.bool)
        replay, want = (
            torch.full((len(rows), T), -1),
            torch.zeros(len(rows), T, dtype=torch.float64),
        )
        for i, row in enumerate(rows):
            first, n = (T - len(row) if side == "left" else 0), int(trace.canvas_length[i])
            clean[i, first : first + len(row)], valid[i, first : first + len(row)] = (
                torch.tensor(row),
                True,
            )
            canvas = slice(first + len(row) - n, first + len(row))
            replay[i, canvas], want[i, canvas] = trace.replay_map[i, :n], trace.logps[i, :n]
        scored = torch.zeros_like(valid)
        for step in range(int(replay.max()) + 1):
            now, noisy = replay == step, clean.masked_fill(replay >= step, M)
            logps = engine.model.logps(clean, noisy, now, valid, temperature=temperature or 1.0)
            assert now.any() and not (now & scored).any()
            torch.testing.assert_close(logps[now], want[now], atol=1e-12, rtol=0)
            scored |= now
        assert scored.sum() == trace.canvas_length.sum()  # 'the whole terminal block included'
    late = clean.masked_fill(replay >= 1, M)  # control: the state one step too late
    late = engine.model.logps(clean, late, replay == 0, valid)
    assert (late - want)[replay == 0].abs().max() > 1e-3


# --- (c) negative controls ---------------------------------------------------------------------------------------------------


class WithoutCommit(BlockEngine):
    """Keeps the keys and values made while the block was noisy."""

    def _forward(self, block, at, cache):
        is_commit = not (block == M).any()
        return super()._forward(block, at, copy.deepcopy(cache) if is_commit else cache)


def test_decoding_without_the_commit_forward_differs():
    """'No-commit variant must differ', or the comparison is blind to stale keys."""
    engine, options = WithoutCommit(model_of(), 256), dict(gen_length=12, stop_at_eos=False)
    assert all(differs(engine, prompt, **options) for prompt in prompts_of([1, 4, 6, 8]))
    assert not differs(
        engine, prompts_of([4])[0], gen_length=4, stop_at_eos=False
    )  # one block needs no commit


def test_a_grid_anchored_at_the_response_differs(engine):
    """'block grid origin: absolute position 0'; blocks of the response agree only if n divides P."""
    options = dict(gen_length=12, stop_at_eos=False, remasking="low_confidence_static")
    for P in range(1, 10):
        assert differs(engine, prompts_of([P], seed=P)[0], origin=P, **options) == (P % 4 != 0), P


# --- (d) schedules and selection ---------------------------------------------------------------------------------------------


def test_quotas_sum_to_the_block():
    """'Tokens to reveal at each step: evenly, the remainder in the first steps' (32 in 12 steps: 8 x 3, 4 x 2)."""
    for n in range(1, 40):
        for steps in range(1, 45):
            quota = reveal_quota(n, steps)
            assert sum(quota) == n and len(quota) == steps and max(quota) - min(quota) <= 1
            assert quota == sorted(quota, reverse=True)
    assert reveal_quota(32, 12) == [3] * 8 + [2] * 4 and reveal_quota(4, 5) == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("remasking", REMASKING)
def test_select_against_loops(remasking):
    """Ties to the lower position, fewer masks than the quota, thresholds met exactly, blocks without masks, confidence 0."""
    generator = torch.Generator().manual_seed(0)
    for n in (1, 4, 7, 33):
        count = 300 if n < 10 else 30
        confidence = (
            torch.randint(0, 5, (count, n), generator=generator) / 4
        )  # many ties, zeros and ones
        confidence[: count // 3] = torch.rand(count // 3, n, generator=generator)
        masked = torch.rand(count, n, generator=generator) < torch.rand(
            count, 1, generator=generator
        )
        for quota, threshold in itertools.product(
            range(0, n + 2, 1 + n // 10), (-0.1, 0.0, 0.5, 0.75, 1.0, 1.1)
        ):
            got = select(confidence, masked, quota, remasking, threshold)
            for row in range(count):
                c, places = confidence[row].tolist(), [j for j in range(n) if masked[row, j]]
                want = set()
                while len(want) < min(
                    quota, len(places)
                ):  # the best of the rest, the lowest of equals
                    rest = [j for j in places if j not in want]
                    best = rest[0]
                    for j in rest:
                        best = j if c[j] > c[best] else best
                    want.add(best)
                above = {j for j in places if c[j] > threshold}
                if remasking == "low_confidence_dynamic" and len(above) >= len(want):
                    want = above
                assert {j for j in range(n) if got[row, j]} == want, (c, places, quota, threshold)


def test_every_rule_ends(engine):
    """Any threshold, any number of steps; at most one forward a mask and one commit a block."""
    generator = torch.Generator().manual_seed(1)
    for i in range(10 * len(RULES)):
        threshold, steps = (
            min(
                max(float(torch.rand((), generator=generator) * 1.2 - 0.1), 0.0), 1.0
            ),  # the ends of the range too
            int(torch.randint(1, 9, (), generator=generator)),
        )
        trace = engine.generate(
            prompts_of([1 + i % 7]), num_samples=4, gen_length=9, denoising_steps=steps, seed=i,
            remasking=RULES[i % len(RULES)], confidence_threshold=threshold, factor=0.1 + 3 * threshold, eb_threshold=threshold,
        )  # fmt: skip
        blocks = (trace.canvas_length + 3) // 4
        assert (trace.num_forwards <= trace.canvas_length + blocks - 1).all() and (
            trace.num_forwards >= 2 * blocks - 1
        ).all()
        assert (trace.step_map[trace.completion_mask] < min(steps, 4)).all() and not (
            trace.completion_ids == M
        ).any()


# --- (e) keys ----------------------------------------------------------------------------------------------------------------

OPTIONS = dict(gen_length=11, remasking="low_confidence_static", seed=4)


def test_max_batch_size_does_not_change_the_draws(engine):
    """'max_batch_size: rows decoded together; more are decoded in turn, with the same tokens'."""
    prompts = prompts_of([3, 9, 1, 6, 8, 2, 5])
    whole = engine.generate(prompts, num_samples=2, **OPTIONS)
    for size in (2, 4, 5, 6, 13):
        assert same_draws(
            make_engine(engine.model, max_batch_size=size).generate(
                prompts, num_samples=2, **OPTIONS
            ),
            whole,
        ), size


@pytest.mark.parametrize("num_samples, size", [(1, 3), (2, 5), (6, 4), (5, 1)])
def test_no_more_than_max_batch_size_rows_are_decoded_together(engine, num_samples, size):
    """'max_batch_size: rows decoded together' bounds memory, for large groups too."""
    rows = []

    class Spy(BlockEngine):
        def _forward(self, block, at, cache):
            rows.append(len(block))
            return super()._forward(block, at, cache)

    Spy(engine.model, size).generate(
        prompts_of([3, 9, 1, 6]), num_samples=num_samples, gen_length=4
    )
    assert max(rows) <= size


def test_a_row_does_not_depend_on_its_batch(engine):
    """'other prompts ... do not change it': every prompt alone equals its rows of the ragged batch, by its sample numbers."""
    prompts = prompts_of([3, 9, 1, 6, 8])
    whole = engine.generate(prompts, num_samples=3, sample_offset=50, **OPTIONS)
    assert whole.sample_index.tolist() == list(range(50, 65))
    for p, prompt in enumerate(prompts):
        alone = engine.generate([prompt], num_samples=3, sample_offset=50 + 3 * p, **OPTIONS)
        rows = list(range(3 * p, 3 * p + 3))
        assert rows_of(alone, [0, 1, 2]) == rows_of(whole, rows)
        assert alone.sample_index.tolist() == whole.sample_index[rows].tolist()
        single = engine.generate([prompt], sample_offset=50 + 3 * p + 2, **OPTIONS)
        assert rows_of(single, [0]) == rows_of(whole, rows[2:])


def test_the_order_of_prompts_changes_nothing(engine):
    """Ranks hold different prompts: with its own sample_offset a prompt's samples are the same wherever it stands."""
    prompts = prompts_of([3, 9, 1, 6])
    whole = engine.generate(prompts, num_samples=2, **OPTIONS)
    for p in (2, 0, 3, 1):
        neighbour = prompts_of([7], seed=p)[0]
        trace = engine.generate(
            [prompts[p], neighbour], num_samples=2, sample_offset=2 * p, **OPTIONS
        )
        assert rows_of(trace, [0, 1]) == rows_of(whole, [2 * p, 2 * p + 1])


@pytest.mark.parametrize("seed", [(42 << 32) + 7, -43, 2**63 + 5])
def test_every_bit_of_a_seed_counts(engine, seed):
    """Those of training are (--seed << 32) + step, those of evaluations negative."""
    (prompt,), options = prompts_of([3]), dict(gen_length=9, temperature=1.5, stop_at_eos=False)
    assert not differs(engine, prompt, seed=seed, **options)
    trace = engine.generate([prompt], seed=seed, **options)
    for other in (seed % 2**31, seed % 2**32, seed >> 32, seed + 2**32):
        assert not same_draws(engine.generate([prompt], seed=other, **options), trace)


def test_a_group_is_diverse_and_seeds_differ():
    """16 identical prompts at T=1 'give >= 15 distinct responses'; another seed, others; T=0, one."""
    engine = make_engine(model_of(scale=5))
    draw = lambda **options: engine.generate(
        prompts_of([5]), num_samples=16, gen_length=11, stop_at_eos=False, **options
    )
    texts = lambda trace: {tuple(row) for row in trace.completion_ids.tolist()}
    a, b = texts(draw(seed=0)), texts(draw(seed=1))
    assert len(a) >= 15 and len(b) >= 15 and len(a & b) <= 1
    assert texts(draw(seed=0)) == a and len(texts(draw(sample_offset=16)) & a) <= 1
    assert len(texts(draw(temperature=0))) == 1


# --- (f) EOS -----------------------------------------------------------------------------------------------------------------


def scripted(monkeypatch, engine, script, prompt, **options):
    """One completion whose tokens come from a list (place in the completion -> token) instead of draws."""
    positions = lambda *key: key[2].double() if key[-1] == "token" else keyed_uniform(*key)
    tokens = torch.tensor(script + [9] * 40)

    def draw(logits, at, temperature):
        return tokens[at.long()], torch.full(at.shape, -0.5, dtype=logits.dtype)

    with monkeypatch.context() as patch:
        patch.setattr(rollout.engine, "keyed_uniform", positions)
        patch.setattr(rollout.engine, "sample_categorical", draw)
        return engine.generate(
            [prompt],
            **{"gen_length": 12, "denoising_steps": 4, "remasking": "low_confidence_static"}
            | options,
        )


@pytest.mark.parametrize("eos", EOS)
def test_an_end_token_inside_the_prompt_is_ignored(monkeypatch, engine, eos):
    """An EOS in the prompt's part of the first block, or before it, ends nothing."""
    for prompt in ([5, eos], [eos, 5, 6, 7, 8, eos], [eos]):
        trace = scripted(monkeypatch, engine, [7] * 20, prompt)
        assert trace.canvas_length.item() == 12 + -(
            len(prompt) + 12
        ) % 4 and trace.truncated.tolist() == [True]
        assert trace.completion_mask.all() and trace.completion_ids.tolist() == [
            [7] * trace.canvas_length.item()
        ]


@pytest.mark.parametrize("eos", EOS)
@pytest.mark.parametrize("P", [4, 5, 7])
def test_an_end_token_ends_the_block_that_holds_it(monkeypatch, engine, eos, P):
    """EOS mid-block waits for the block; the terminal block is whole in step_map; the mask ends with the first EOS."""
    for at in range(10):
        script = [7] * at + [eos] + [8] * 20
        trace = scripted(monkeypatch, engine, script, prompts_of([P], seed=9)[0])
        canvas = ((P + at) // 4 + 1) * 4 - P
        assert trace.canvas_length.item() == trace.completion_ids.shape[1] == canvas > at
        assert trace.completion_ids[0].tolist() == script[:canvas]
        assert trace.completion_mask[0].tolist() == [j <= at for j in range(canvas)]
        assert (trace.step_map >= 0).all() and torch.equal(
            trace.replay_map >= 0, trace.step_map >= 0
        )
        assert (trace.logps == -0.5).all()  # the tokens after the EOS keep theirs
        assert trace.truncated.tolist() == [False] and trace.completion(0) == script[: at + 1]
        whole = scripted(monkeypatch, engine, script, prompts_of([P], seed=9)[0], stop_at_eos=False)
        assert whole.canvas_length.item() >= 12 and torch.equal(
            whole.completion_ids[:, :canvas], trace.completion_ids
        )
        assert whole.completion(0) == trace.completion(0) and whole.truncated.tolist() == [False]
        assert whole.settings["num_samples"] == 1


def test_two_end_tokens_in_one_block_and_the_pad_token(monkeypatch, engine):
    """The first of several counts, whichever it is; a pad token drawn by the model ends nothing."""
    trace = scripted(monkeypatch, engine, [7, EOS[1], EOS[0], 8], [3, 4, 5, 6])
    assert trace.completion(0) == [7, EOS[1]] and trace.canvas_length.item() == 4
    trace = scripted(monkeypatch, engine, [7, PAD, 8, 8, EOS[0], 8, 8, 8], [3, 4, 5, 6])
    assert trace.completion(0) == [7, PAD, 8, 8, EOS[0]] and trace.canvas_length.item() == 8


def test_padding_with_the_end_token_is_no_end():
    """Where pad = EOS (the tiny SDAR), what stands behind a row's canvas neither ends nor completes it."""
    engine = make_engine(model_of(scale=5, eos=(PAD,)))
    trace = engine.generate(
        prompts_of([4, 1, 6, 5, 3, 2]), num_samples=4, gen_length=10, temperature=1.0
    )
    canvas = torch.arange(trace.completion_ids.shape[1]) < trace.canvas_length[:, None]
    assert trace.completion_ids[~canvas].eq(PAD).all() and not trace.completion_mask[~canvas].any()
    held = [
        PAD in row[:n]
        for row, n in zip(trace.completion_ids.tolist(), trace.canvas_length.tolist(), strict=True)
    ]
    assert trace.truncated.tolist() == [not one for one in held] and 0 < sum(held) < len(held)
    for ids in (trace.completion(i) for i in range(len(held))):
        assert PAD not in ids[:-1]


def test_stopping_early_equals_a_full_run_cut_off(engine):
    """'early exit == full run truncated'."""
    options = dict(num_samples=6, gen_length=14, seed=2)
    early, full = (
        engine.generate(prompts_of([2, 4, 7]), stop_at_eos=stop, **options)
        for stop in (True, False)
    )
    assert (early.canvas_length < full.canvas_length).any()
    for i, n in enumerate(early.canvas_length.tolist()):
        assert torch.equal(
            early.completion_ids[i, :n], full.completion_ids[i, :n]
        ) and early.completion(i) == full.completion(i)
        assert torch.equal(early.step_map[i, :n], full.step_map[i, :n])


# --- (g) the mask token and broken logits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.7, 1.5])
@pytest.mark.parametrize("remasking", REMASKING)
def test_the_mask_token_is_never_sampled(monkeypatch, temperature, remasking):
    """'The mask token is never sampled', even where its logit is huge; log-probs are over the other tokens."""
    engine = make_engine(model_of())
    options = dict(num_samples=4, gen_length=8, temperature=temperature, remasking=remasking)
    usual, head = engine.generate(prompts_of([3, 4]), **options), engine.model.head

    def tempting(hidden):
        logits = head(hidden)
        logits[..., M] = 1e6
        return logits

    monkeypatch.setattr(engine.model, "head", tempting)
    assert tempting(torch.zeros(1, 32, dtype=torch.float64)).argmax() == M
    trace = engine.generate(prompts_of([3, 4]), **options)
    assert not (trace.completion_ids == M).any() and same_draws(trace, usual)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", ["one weight", "all weights", "infinite logit"])
def test_broken_logits_stop_the_rollout(monkeypatch, temperature, bad):
    """'logits are not finite at samples ...': nothing is swallowed, and the message says where."""
    engine = make_engine(model_of())
    with torch.no_grad():
        if bad == "one weight":
            engine.model.lm_head.weight[5, 0] = float("nan")
        elif bad == "all weights":
            engine.model.layers[0].mlp.up_proj.weight.fill_(float("nan"))
        else:
            head = engine.model.head
            infinite = torch.tensor([math.inf if v == 6 else 0.0 for v in range(V)])
            monkeypatch.setattr(engine.model, "head", lambda hidden: head(hidden) + infinite)
    with pytest.raises(SystemExit, match="not finite"):
        engine.generate(prompts_of([3]), temperature=temperature)


# --- (h) exact distributions -------------------------------------------------------------------------------------------------

TOKENS = 5  # usable ones; the sixth is the mask
TOY = SMALL | {
    "vocab_size": TOKENS + 1,
    "mask_token_id": TOKENS,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
}
TOY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


def reveals(masked, confidence, q, remasking, threshold):
    """Masked positions, the confidence of each one's draw, the quota -> equally likely choices of the positions to reveal."""
    if remasking == "random":
        return list(itertools.combinations(masked, q))
    above = [j for j in masked if confidence[j] > threshold]
    if remasking == "low_confidence_dynamic" and len(above) >= q:
        return [above]
    return [sorted(masked, key=lambda j: (-confidence[j], j))[:q]]


def filtered(p, top_k, top_p):
    weights = [q if v in kept(p, top_k, top_p) else 0.0 for v, q in enumerate(p)]
    return [weight / math.fsum(weights) for weight in weights]


@torch.no_grad()
def exact_distribution(
    model, prompt, L, quotas, remasking, threshold, temperature, top_k=0, top_p=1.0
):
    """{completion: probability}, by enumerating every draw of every masked token and every order, from every state."""
    states = list(itertools.product(range(TOKENS + 1), repeat=L))
    logits = model.logits(torch.tensor([[*prompt, *state] for state in states]))[:, -L:, :TOKENS]
    rows = [
        [filtered(p, top_k, top_p) for p in block]
        for block in (logits / temperature).softmax(-1).tolist()
    ]
    p_of = dict(zip(states, rows, strict=True))
    now = {(TOKENS,) * L: 1.0}
    for quota in quotas:
        later = {}
        for state, probability in now.items():
            masked = [j for j in range(L) if state[j] == TOKENS]
            q, p = min(quota, len(masked)), p_of[state]
            for draw in itertools.product(range(TOKENS), repeat=len(masked)):
                chance = probability * math.prod(p[j][v] for j, v in zip(masked, draw, strict=True))
                token = dict(zip(masked, draw, strict=True))
                choices = reveals(
                    masked, {j: p[j][v] for j, v in token.items()}, q, remasking, threshold
                )
                for chosen in choices:
                    new = tuple(token[j] if j in chosen else state[j] for j in range(L))
                    later[new] = later.get(new, 0.0) + chance / len(choices)
        now = later
    return now


def misfit(
    engine, L, remasking, temperature=1.0, denoising_steps=4, n=6000, expect=None, **filters
):
    """(standardised chi-square of n sampled completions against the exact distribution, largest error of a frequency)

    filters: top_k, top_p of the samples; expect: of the exact distribution, if they are to be others.
    """
    prompt, options = (
        [3, 1, 4, 2, 0][: 5 if L == 3 else 4],
        dict(remasking=remasking, temperature=temperature),
    )
    filtered_by = filters | (expect or {})
    quotas = reveal_quota(4, denoising_steps)
    want = exact_distribution(
        engine.model, prompt, L, quotas, remasking, 0.3, temperature, **filtered_by
    )
    assert abs(sum(want.values()) - 1) < 1e-12 and len(want) == TOKENS**L
    trace = engine.generate(
        [prompt],
        num_samples=n,
        gen_length=L,
        denoising_steps=denoising_steps,
        confidence_threshold=0.3,
        stop_at_eos=False,
        **options | filters,
    )
    counts = dict.fromkeys(want, 0)
    for row in trace.completion_ids.tolist():
        counts[tuple(row)] += 1
    cells = [(counts[key], n * p) for key, p in want.items() if n * p >= 5]
    rest = n - sum(count for count, _ in cells), n - sum(expected for _, expected in cells)
    cells += [rest] if rest[1] >= 5 else []
    chi = sum((count - expected) ** 2 / expected for count, expected in cells)
    return (chi - len(cells) + 1) / math.sqrt(2 * (len(cells) - 1)), max(
        abs(counts[key] / n - want[key]) for key in want
    )


@pytest.fixture(scope="module")
def toy():
    """A model of one layer whose tokens depend strongly on their neighbours: the order of reveals matters."""
    model = model_of(TOY, scale=20, seed=1, eos=(0,))
    with torch.no_grad():
        model.layers[0].self_attn.o_proj.weight.mul_(2)
        model.layers[0].mlp.down_proj.weight.mul_(4)
    return make_engine(model, max_batch_size=10000)


@pytest.mark.parametrize(
    "L, remasking, temperature, denoising_steps",
    [
        (3, "random", 1.0, 4),
        (3, "random", 0.7, 2),
        (3, "low_confidence_static", 1.0, 4),
        (3, "low_confidence_dynamic", 1.0, 4),
        (4, "random", 1.0, 4),
        (4, "low_confidence_static", 1.5, 3),
        (4, "low_confidence_dynamic", 0.7, 4),
    ],
)
def test_samples_follow_the_exact_distribution_over_trajectories(
    toy, L, remasking, temperature, denoising_steps
):
    """Frequencies of 6000 completions of 5^L: chi-square within 4.5 deviations, no frequency off by 0.025."""
    z, error = misfit(toy, L, remasking, temperature, denoising_steps)
    assert abs(z) < 4.5 and error < 0.025


@pytest.mark.parametrize(
    "remasking, filters",
    [("random", {"top_k": 3}), ("low_confidence_static", {"top_k": 4, "top_p": 0.7})],
)
def test_filtered_samples_follow_the_exact_distribution(toy, remasking, filters):
    """top-k and top-p by enumeration; control: a filter a little wider."""
    z, error = misfit(toy, 3, remasking, 1.3, **filters)
    assert abs(z) < 4.5 and error < 0.025
    wider = {"top_k": 4} if remasking == "random" else {"top_p": 0.8}
    assert abs(misfit(toy, 3, remasking, 1.3, expect=wider, **filters)[0]) > 8


@pytest.mark.parametrize(
    "fault", ["shared draws", "shared order", "wrong temperature", "old logits"]
)
def test_the_exact_distribution_sees_faults(monkeypatch, toy, fault):
    """Negative controls: positions that share a uniform number, a fixed order, another temperature, a stale context."""
    with monkeypatch.context() as patch:
        if fault == "shared draws":  # every position of a sample gets the number of position 0
            shared = lambda *key: keyed_uniform(*key[:2], key[2] * 0, *key[3:])
            patch.setattr(rollout.engine, "keyed_uniform", shared)
        elif fault == "shared order":  # left to right
            order = lambda *key: keyed_uniform(*key) if key[-1] == "token" else 1 / (2.0 + key[2])
            patch.setattr(rollout.engine, "keyed_uniform", order)
        elif fault == "wrong temperature":
            sample = rollout.engine.sample_categorical
            patch.setattr(
                rollout.engine, "sample_categorical", lambda z, u, T: sample(z, u, T * 1.15)
            )
        else:
            forward = BlockEngine._forward
            patch.setattr(
                BlockEngine,
                "_forward",
                lambda self, block, *rest: forward(self, torch.full_like(block, TOKENS), *rest),
            )
        z, _ = misfit(toy, 3, "random", denoising_steps=2 if fault == "shared draws" else 4)
    assert abs(z) > 8


# --- (i) weights and options -------------------------------------------------------------------------------------------------


def test_load_weights_copies():
    """'copied in place': the draws are the other model's, storage stays, later changes of the source do not matter."""
    other = model_of(seed=7)
    engine = make_engine(model_of())
    place = engine.model.lm_head.weight.data_ptr()
    before = engine.generate(prompts_of([5]), **OPTIONS)
    engine.load_weights(export_weights(other))
    after, want = (
        engine.generate(prompts_of([5]), **OPTIONS),
        make_engine(model_of(seed=7)).generate(prompts_of([5]), **OPTIONS),
    )
    assert (
        same_draws(after, want, 0)
        and not same_draws(after, before)
        and engine.model.lm_head.weight.data_ptr() == place
    )
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert same_draws(engine.generate(prompts_of([5]), **OPTIONS), want, 0)
    engine.load_weights(export_weights(model_of()))
    assert same_draws(engine.generate(prompts_of([5]), **OPTIONS), before, 0)


def test_load_weights_casts_to_the_dtype_of_the_engine():
    """fp32 masters go into a bf16 engine."""
    engine, source = (
        make_engine(model_of(dtype=torch.bfloat16)),
        model_of(seed=3, dtype=torch.float32),
    )
    engine.load_weights(export_weights(source))
    assert torch.equal(engine.model.lm_head.weight, source.lm_head.weight.bfloat16())


def test_load_weights_says_what_is_missing_or_unknown():
    """'All must come.'"""
    engine, name = make_engine(model_of()), "model.layers.1.mlp.up_proj.weight"
    weights = dict(export_weights(model_of(seed=7)))
    with pytest.raises(ValueError, match=name):
        engine.load_weights((key, value) for key, value in weights.items() if key != name)
    with pytest.raises((KeyError, ValueError), match="model.layers.9.x"):
        engine.load_weights({**weights, "model.layers.9.x": torch.zeros(1)}.items())


def test_load_weights_refuses_a_tensor_of_another_shape():
    """copy_ would broadcast a [1] into every norm weight."""
    engine = make_engine(model_of())
    weights = dict(export_weights(model_of())) | {"model.norm.weight": torch.full((1,), 3.0)}
    with pytest.raises((RuntimeError, ValueError)):
        engine.load_weights(weights.items())


def test_make_engine_loads_directories_and_models(tmp_path):
    """'a directory, loaded in dtype (default ... fp32 on CPU); or a model instance, used as it is'."""
    source = random_model(SMALL | {"vocab_size": 264, "mask_token_id": 257})
    source.eos_token_ids, source.pad_token_id = [256], 256
    save_model(source, tmp_path / "a", byte_tokenizer())
    loaded, given = make_engine(str(tmp_path / "a"), backend="block"), make_engine(source)
    assert loaded.model.lm_head.weight.dtype == torch.float32 and given.model is source
    assert same_draws(
        loaded.generate(prompts_of([5]), **OPTIONS), given.generate(prompts_of([5]), **OPTIONS), 0
    )
    half = make_engine(tmp_path / "a", dtype=torch.bfloat16)
    trace = half.generate(prompts_of([5, 2]), num_samples=2, **OPTIONS)
    assert half.model.lm_head.weight.dtype == torch.bfloat16 and trace.logps.dtype == torch.float32
    assert not trace.logps.requires_grad


@pytest.mark.parametrize("backend", ["masked", "nonsense"])
def test_make_engine_refuses_a_backend_that_cannot_serve(model, backend):
    with pytest.raises(SystemExit, match=f"{backend}.*block"):
        make_engine(model, backend=backend)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"block_length": 8}, "--block-length 8.*4"),
        (
            {"remasking": "low_confidence"},
            "--remasking low_confidence.*low_confidence_static.*low_confidence_dynamic.*random",
        ),
        ({"denoising_steps": 0}, "denoising_steps=0.*at least 1"),
        ({"gen_length": 0}, "gen_length=0.*at least 1"),
        ({"num_samples": 0}, "num_samples=0.*at least 1"),
        ({"temperature": -1.0}, "--temperature -1.0 must be at least 0"),
        ({"temperature": math.nan}, "--temperature nan must be at least 0 and finite"),
        ({"temperature": math.inf}, "--temperature inf must be at least 0 and finite"),
        (
            {"alg_temp": 0.5, "remasking": "entropy"},
            "--alg-temp 0.5: the sampler of a block-causal model draws no orders",
        ),
        ({"records": "states"}, "states"),
        ({"cache": "dual"}, "--cache dual.*block-causal.*none"),
        ({"confidence_threshold": 1.01}, "--confidence-threshold 1.01.*0 to 1"),
        ({"factor": -1.0}, "--factor -1.0.*above 0"),
    ],
)
def test_generate_refuses_what_it_cannot_do(engine, options, words):
    with pytest.raises(SystemExit, match=words):
        engine.generate([[3, 4]], **options)


def test_generate_refuses_an_empty_prompt_and_takes_its_own_block_length(engine):
    with pytest.raises(SystemExit, match="no tokens"):
        engine.generate([[3], []])
    with pytest.raises(SystemExit, match=f"prompt 1 holds the mask token .id {M}."):
        engine.generate([[3], [4, M, 5]])
    for token in (
        -1,
        len(engine.model.lm_head.weight),
    ):  # on a GPU it would be an assertion of the device, not an error
        with pytest.raises(
            SystemExit, match="prompt 1 holds an id outside of the model's 0 to .* tokenizer"
        ):
            engine.generate([[3], [4, token, 5]])
    want = engine.generate([[3]], **OPTIONS)
    for block_length in (4, 0):
        assert same_draws(engine.generate([[3]], block_length=block_length, **OPTIONS), want, 0)


# --- (j) traces --------------------------------------------------------------------------------------------------------------


def trace_of(completions, masks, prompts=None, eos=(256,), block_length=4, steps=None, **changes):
    """A trace by hand: lists of ids and of numbers of scored tokens."""
    L = max(map(len, completions))
    pad = lambda rows, fill: torch.tensor([list(row) + [fill] * (L - len(row)) for row in rows])
    steps = steps or [[j % 4 for j in range(len(row))] for row in completions]
    values = dict(
        prompt_ids=prompts or [[258, 104, 105, 259] for _ in completions],
        completion_ids=pad(completions, 256),
        completion_mask=pad(
            [[j < n for j in range(len(row))] for row, n in zip(completions, masks, strict=True)],
            False,
        ),
        canvas_length=torch.tensor([len(row) for row in completions]),
        step_map=pad(steps, -1),
        replay_map=pad(steps, -1),
        logps=pad([[-0.123456 * (j + 1) for j in range(len(row))] for row in completions], 0.0),
        sample_index=torch.arange(len(completions)),
        num_forwards=torch.tensor([2 * len(row) for row in completions]),
        settings={
            "eos_token_ids": list(eos),
            "attention": "block-causal",
            "block_length": block_length,
            "num_samples": 2,
        },
    )
    return Trace(**values | changes)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def test_text_and_describe(tokenizer):
    """text: what is scored, without special tokens; describe: 'dict that JSON can hold'."""
    trace = trace_of([[97, 98, 256, 99], [97, 10, 195, 188, 98, 98, 98, 98]], [3, 8])
    assert [trace.text(i, tokenizer) for i in range(2)] == ["ab", "a\nübbbb"]
    assert trace.completion(0) == [97, 98, 256] and trace.truncated.tolist() == [False, True]
    row = json.loads(json.dumps(trace.describe(0, tokenizer, 0.5)))
    assert row == {
        "prompt": "<|user|>hi<|assistant|>",
        "completion": "ab",
        "reward": 0.5,
        "completion_ids": [97, 98, 256],
        "step_map": [0, 1, 2],
        "logps": [-0.1235, -0.2469, -0.3704],
    }


def test_draw(tokenizer):
    """'each token of the canvas over the denoising step of its block that revealed it': the grid starts with the prompt."""
    trace = trace_of(
        [[97, 98, 256, 99, 100]], [3], prompts=[[258, 104, 259]], steps=[[11, 0, 3, 1, 2]]
    )
    assert [line.rstrip() for line in trace.draw(0, tokenizer).splitlines()] == [
        "prompt   <|user|>h<|assistant|>",
        "tokens   a  | b <|endoftext|> c d",
        "step     12   1 4             2 3",
    ]


def test_draw_keeps_its_lines_whatever_the_tokens(tokenizer):
    """A line break, a tab or a lone byte inside a completion must not break the drawing."""
    trace = trace_of([[97, 10, 98, 13, 9, 195, 11, 0]], [8])
    lines = trace.draw(0, tokenizer).splitlines()
    assert (
        len(lines) == 3
        and len(lines[1].rstrip()) <= len(lines[2].rstrip()) + 4
        and lines[1].isprintable()
    )


def test_draw_breaks_lines_between_blocks(tokenizer):
    """'Blocks are parted by bars and never broken; max_lines pairs of lines of about width columns.'"""
    trace = trace_of([[97 + j % 26 for j in range(41)]], [41], prompts=[[258, 104, 259]])
    lines = trace.draw(0, tokenizer, width=20, max_lines=3).splitlines()
    pairs = list(zip(lines[1::2], lines[2::2], strict=False))[:3]
    assert len(lines) == 1 + 2 * 3 + 1 and "41 tokens" in lines[-1]
    shown = []
    for number, (top, bottom) in enumerate(pairs):
        assert top.startswith("tokens ") and bottom.startswith("step ") and len(top) < 9 + 20 + 12
        blocks = [block.split() for block in top[9:].split("|")]
        assert [len(block) for block in blocks][number == 0 :] == [4] * (
            len(blocks) - (number == 0)
        )
        shown += [token for block in blocks for token in block]
        columns = [k for k in range(9, len(top)) if top[k] not in " |"]
        assert [bottom[k] for k in columns] == [
            str(j % 4 + 1) for j in range(len(shown) - len(columns), len(shown))
        ]
    assert "".join(shown) == "".join(chr(97 + j % 26) for j in range(len(shown)))
    whole = trace.draw(0, tokenizer, width=1000).splitlines()
    assert len(whole) == 3 and whole[1].count("|") == 10


def test_concatenate_pads_to_the_widest():
    a = trace_of([[97, 98, 256, 99]], [3])
    b = trace_of([[1, 2, 3, 4, 5, 6, 7, 8], [4, 5, 6, 256]], [8, 4], prompts=[[7], [8, 9]])
    both = concatenate([a, b], 255)
    assert both.prompt_ids == [
        [258, 104, 105, 259],
        [7],
        [8, 9],
    ] and both.canvas_length.tolist() == [4, 8, 4]
    assert both.completion_ids[0].tolist() == [97, 98, 256, 99, 255, 255, 255, 255]
    assert (
        both.completion_mask[0].tolist() == [True] * 3 + [False] * 5
        and both.logps[0, 4:].tolist() == [0.0] * 4
    )
    assert both.step_map[0].tolist() == both.replay_map[0].tolist() == [0, 1, 2, 3, -1, -1, -1, -1]
    assert both.completion_ids[
        1:
    ].tolist() == b.completion_ids.tolist() and both.num_forwards.tolist() == [8, 16, 8]
    assert (
        both.settings == a.settings
        and both.records is None
        and both.completion_mask.dtype == torch.bool
    )
    assert [both.completion(i) for i in range(3)] == [
        a.completion(0),
        b.completion(0),
        b.completion(1),
    ]
    alone = concatenate([a], 255)
    assert torch.equal(alone.completion_ids, a.completion_ids)


def test_rollout_sums():
    """'sums over this rank's N sequences, so that sums over ranks divided by all sequences are means'."""
    trace = trace_of(
        [[256, 9, 9, 9], [97, 98, 256, 9], [97, 98, 99, 100], [97, 98, 99, 100]], [1, 3, 4, 4]
    )
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5])
    components = [
        {"exact": 0.0, "format": 0.0},
        {"exact": 1.0, "format": 0.0},
        {"exact": 0.0, "format": 0.5},
        {"exact": 0.0, "format": 0.5},
    ]
    sums = {
        name: float(value) for name, value in rollout_sums(trace, rewards, components, 2).items()
    }
    assert sums == {
        "reward/mean": 2.0,
        "reward/square": 1.5,
        "reward/zero_std_frac": 2.0,  # the second group
        "completion/length": 12.0,
        "completion/truncated_frac": 2.0,
        "completion/empty_frac": 1.0,  # an EOS alone
        "completion/distinct_frac": 3.0,
        "speed/tokens_per_forward": 12 / 8,
        "reward/exact": 1.0,
        "reward/format": 1.0,
    }
    halves = []
    for rows in ([0, 1], [2, 3]):
        pick = lambda value: value[rows] if isinstance(value, torch.Tensor) else value  # noqa: B023
        part = Trace(**{name: pick(value) for name, value in vars(trace).items()})
        halves.append(rollout_sums(part, rewards[rows], [components[i] for i in rows], 2))
    assert {name: float(halves[0][name] + halves[1][name]) for name in sums} == sums
    assert "reward/score" not in rollout_sums(
        trace, rewards, [{"score": 1.0}] * 4, 4
    )  # a lone component is the reward


def test_settings_name_the_distribution_of_the_logps(engine):
    """'logps under the sampling distribution that settings names'."""
    names = {
        T: engine.generate([[3]], gen_length=3, temperature=T).settings["logps"]
        for T in (0, 0.7, 1.0)
    }
    assert names == {
        0: "softmax(logits)",
        0.7: "softmax(logits / temperature)",
        1.0: "softmax(logits / temperature)",
    }
    settings = engine.generate([[3]], gen_length=3).settings
    assert json.loads(json.dumps(settings)) == settings and settings["eos_token_ids"] == [1, 2]


@pytest.mark.parametrize("name", ["tiny-sdar", "tiny-llada", "tiny-dream", "tiny-llada2"])
def test_what_a_run_asks_for_is_refused_before_weights_are_read(monkeypatch, name):
    """As the scripts ask: lengths, steps, caches of an approximate replay."""
    good = {
        "gen_length": 16,
        "block_length": 0,
        "denoising_steps": 2,
        "remasking": "low_confidence_static",
        "cache": "none",
    }
    assert make_engine(name, asked=("steps", good)).plan("steps", **good)
    monkeypatch.setattr(rollout, "load_weights", lambda *_: pytest.fail("read weights"))
    for wrong in (
        {"gen_length": 17},
        {"denoising_steps": 0},
        {"cache": "prefix"},
        {"confidence_threshold": 2.0},
    ):
        with pytest.raises(SystemExit, match="--"):
            make_engine(name, asked=("steps", good | wrong))
    with pytest.raises(pytest.fail.Exception, match="read weights"):  # negative control
        make_engine(name, asked=("steps", good))
