"""rollout/masked.py on LLaDA and Dream: a naive sampler, exact distributions, replay, padding, keys, EOS, traces.

The naive sampler shares nothing with the engine but the model's own logits: one row, one full forward a step, loops over
positions, Python integers for the random numbers.
"""

import itertools
import json
import math
from functools import partial

import pytest
import torch
from test_models import exits_with_one_line
from test_rollout import (
    EOS,
    PAD,
    M,
    V,
    prompts_of,
    reveals,
    rows_of,
    same_draws,
    scripted,
    trace_of,
    uniform,
)
from test_rollout import model_of as block_model_of

import rollout.engine
from models import add_lora, export_adapter, export_weights, save_model
from models.lora import adapter_tensors
from models.tiny import TINY_DREAM, TINY_LLADA, byte_tokenizer, random_model
from rollout import make_engine, rollout_means, rollout_sums
from rollout.canvas import Canvas
from rollout.engine import REMASKING
from rollout.masked import MaskedEngine
from rollout.sampling import keyed_uniform
from rollout.schedules import reveal_quota

SMALL = {
    "llada": TINY_LLADA
    | {
        "vocab_size": V,
        "embedding_size": V,
        "d_model": 32,
        "mlp_hidden_size": 48,
        "n_layers": 2,
        "mask_token_id": M,
    },
    "dream": TINY_DREAM
    | {
        "vocab_size": V,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "mask_token_id": M,
    },
}
FAMILIES = list(SMALL)
STATIC = {"gen_length": 12, "remasking": "low_confidence_static", "stop_at_eos": False}


@torch.no_grad()
def model_of(family, scale=30, seed=1, eos=EOS, dtype=torch.float64, **config):
    """Random weights, scaled so that distributions are peaked and masked tokens depend on their context, not on themselves."""
    model = random_model(SMALL[family] | config, seed=seed, dtype=dtype)
    for name, value in model.state_dict().items():
        kind, head = name.split(".")[-2], value.data_ptr() == model.lm_head.weight.data_ptr()
        factor = {
            "q_proj": 3,
            "k_proj": 3,
            "attn_out": 4,
            "o_proj": 4,
            "wte": 50,
            "embed_tokens": 50,
        }.get(kind, 1)
        value.mul_(scale if head else factor)
        if factor == 50:
            value[model.mask_token_id] /= 10
    model.eos_token_ids, model.pad_token_id = list(eos), PAD
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request):
    return make_engine(model_of(request.param))


# --- the naive sampler -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def naive_sample(
    model, prompt, number, *, gen_length=10, block_length=4, denoising_steps=4, temperature=1.0,
    remasking="low_confidence_dynamic", confidence_threshold=0.9, seed=0, stop_at_eos=True, logits_of=None,
):  # fmt: skip
    """One completion -> (tokens, None where never revealed; steps; logps; number of forwards)."""
    logits_of = logits_of or (lambda ids, end: model.logits(torch.tensor([ids]))[0])
    n, P = block_length, len(prompt)
    L = math.ceil(gen_length / n) * n
    ids, hidden = prompt + [M] * L, [p >= P for p in range(P + L)]
    steps, logps, forwards = [-1] * L, [0.0] * L, 0
    for start in range(P, P + L, n):
        for step in range(denoising_steps):
            places = [p for p in range(start, start + n) if hidden[p]]
            if not places:
                break
            forwards += 1
            logits = logits_of(ids, start + n)
            token, logp, score = {}, {}, {}
            for p in places:
                z = logits[p].tolist()
                z[M] = -math.inf
                z = [value / temperature for value in z] if temperature > 0 else z
                lse = max(z) + math.log(math.fsum(math.exp(value - max(z)) for value in z))
                v, reached, target = (
                    z.index(max(z)),
                    0.0,
                    uniform(seed, number, p - P, step, "token"),
                )
                if temperature > 0:
                    for v in range(V):
                        reached += math.exp(z[v] - lse)
                        if reached > target:
                            break
                token[p], logp[p] = v, z[v] - lse
                score[p] = (
                    uniform(seed, number, p - P, step, "order")
                    if remasking == "random"
                    else math.exp(logp[p])
                )
            quota = min(n // denoising_steps + (step < n % denoising_steps), len(places))
            revealed = sorted(places, key=lambda p: (-score[p], p))[:quota]  # noqa: B023
            above = [p for p in places if score[p] > confidence_threshold]
            if remasking == "low_confidence_dynamic" and len(above) >= quota:
                revealed = above
            for p in revealed:
                ids[p], steps[p - P], logps[p - P], hidden[p] = token[p], step, logp[p], False
        if stop_at_eos and any(ids[p] in model.eos_token_ids for p in range(start, start + n)):
            break
    return [None if hidden[p] else ids[p] for p in range(P, P + L)], steps, logps, forwards


def assert_naive(trace, i, model, prompt, number, **options):
    """Row i of a trace is the naive sampler's completion of the prompt."""
    tokens, steps, logps, forwards = naive_sample(model, prompt, number, **options)
    assert trace.completion_ids[i].tolist() == [PAD if v is None else v for v in tokens]
    assert trace.step_map[i].tolist() == steps and trace.num_forwards[i] == forwards
    assert trace.canvas_length[i] == trace.completion_ids.shape[1] == len(tokens)
    assert (trace.logps[i] - torch.tensor(logps, dtype=torch.float64)).abs().max() < 1e-9
    n, per_block = options.get("block_length", 4), options.get("denoising_steps", 4)
    assert trace.replay_map[i].tolist() == [
        -1 if s < 0 else j // n * per_block + s for j, s in enumerate(steps)
    ]
    end = next((j for j, v in enumerate(tokens) if v in model.eos_token_ids), len(tokens) - 1)
    assert trace.completion_mask[i].tolist() == [j <= end for j in range(len(tokens))]


# --- (a) decoding equals the naive sampler -----------------------------------------------------------------------------------


@pytest.mark.parametrize("remasking", REMASKING)
@pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
def test_decoding_equals_the_naive_sampler(engine, remasking, temperature):
    """Ragged prompts in one batch, blocks of 1 to 8, fewer and more steps than tokens in a block, with and without EOS stop."""
    prompts, stopped = prompts_of([1, 3, 4, 7], seed=3), 0
    for n, steps, gen_length in ((4, 4, 12), (4, 3, 9), (8, 2, 10), (3, 5, 7), (1, 1, 5)):
        for stop_at_eos in (True, False):
            options = dict(
                gen_length=gen_length, block_length=n, denoising_steps=steps, temperature=temperature, remasking=remasking,
                confidence_threshold=0.6, seed=steps, stop_at_eos=stop_at_eos,
            )  # fmt: skip
            trace = engine.generate(prompts, sample_offset=100, **options)
            for i, prompt in enumerate(prompts):
                assert_naive(trace, i, engine.model, prompt, 100 + i, **options)
            assert trace.prompt_ids == prompts
            assert stop_at_eos or (trace.step_map >= 0).all()
            stopped += int((trace.step_map < 0).any(1).sum())
    assert stopped > 0 or temperature == 0  # rows that end early did occur


def test_the_block_length_defaults_to_the_models(engine):
    """block_length 0 or None: model.block_length, from the config."""
    want = engine.generate(prompts_of([5]), block_length=engine.model.block_length, **STATIC)
    for asked in (None, 0):
        assert same_draws(engine.generate(prompts_of([5]), block_length=asked, **STATIC), want, 0)
    assert want.settings["block_length"] == engine.model.block_length == 4
    assert not same_draws(engine.generate(prompts_of([5]), block_length=6, **STATIC), want)


def test_length_rounds_up_to_whole_blocks(engine):
    """'gen_length tokens each, rounded up so that the last block is whole'; the grid starts at the completion."""
    for gen_length, n in itertools.product((1, 4, 5, 9), (1, 4, 6)):
        trace = engine.generate(
            prompts_of([1, 6]), gen_length=gen_length, block_length=n, stop_at_eos=False
        )
        canvas = math.ceil(gen_length / n) * n
        assert (
            trace.completion_ids.shape == (2, canvas)
            and trace.canvas_length.tolist() == [canvas] * 2
        )
        blocks = trace.replay_map // 4 == torch.arange(canvas) // n
        assert blocks.all() and trace.num_replays == canvas // n * 4


def test_greedy_decoding_repeats_and_ties_go_to_the_left(engine):
    """temperature 0: no draw is read, but for the order of random; equal confidences are revealed from left to right."""
    greedy = lambda **options: engine.generate(
        prompts_of([5, 2]), num_samples=3, temperature=0, **STATIC | options
    )
    first, again = greedy(seed=1), greedy(seed=2, sample_offset=9)
    for row in (again.completion_ids[0], again.completion_ids[2], first.completion_ids[1]):
        assert torch.equal(row, first.completion_ids[0])
    even = model_of("llada")
    with torch.no_grad():
        even.lm_head.weight.zero_()
    trace = make_engine(even).generate([[3]], denoising_steps=2, block_length=6, **STATIC)
    assert trace.step_map[0].tolist() == [0, 0, 0, 1, 1, 1] * 2


def test_the_head_sees_masked_rows_of_the_block_alone(monkeypatch, engine):
    """Rows of the head: 2 prompts x 3 blocks x (4 + 3 + 2 + 1) masked positions, of 12 + prompt."""
    rows, head = [], engine.model.head
    monkeypatch.setattr(
        engine.model, "head", lambda hidden: rows.append(hidden.shape) or head(hidden)
    )
    engine.generate(prompts_of([5, 2]), **STATIC)
    assert rows == [(2 * k, 32) for k in (4, 3, 2, 1)] * 3


# --- (b) negative controls ---------------------------------------------------------------------------------------------------


class FaultyCanvas(Canvas):
    """A canvas whose forward is given the wrong input, or hands out the wrong rows."""

    def lay(self, tokens, valid, is_padded):
        if self.fault == "padding attended":
            valid, is_padded = torch.ones_like(valid), False
        super().lay(tokens, valid, is_padded)
        if self.fault == "padding seen":  # at the right positions
            self.bias = None

    def _forward(self, width, window):
        tokens, bias, behind = self.tokens, self.bias, torch.arange(self.S) >= self.start + width
        if self.fault == "no masks behind the block":
            bias = torch.zeros(self.R, 1, 1, self.S, dtype=self.dtype) if bias is None else bias
            self.bias = bias.masked_fill(behind, -math.inf)
        if self.fault == "stale block":
            here = (torch.arange(self.S) >= self.start) & ~behind
            self.tokens = tokens.masked_fill(here, self.model.mask_token_id)
        hidden = super()._forward(width, window)
        self.tokens, self.bias = tokens, bias
        return hidden.roll(1, 1) if self.fault == "rows shifted" else hidden


class Faulty(MaskedEngine):
    def __init__(self, model, fault):
        super().__init__(model, 256)
        self.fault = fault

    def _canvas(self, *sizes):
        canvas = super()._canvas(*sizes)
        canvas.__class__, canvas.fault = FaultyCanvas, self.fault
        return canvas


@pytest.mark.parametrize(
    "fault", ["no masks behind the block", "padding attended", "stale block", "rows shifted"]
)
def test_faults_show(engine, fault):
    """The comparisons of this file fail on an engine that attends to the wrong tokens or reads the wrong rows."""
    prompts = prompts_of([1, 3, 7, 6])
    trace, good = (e.generate(prompts, **STATIC) for e in (Faulty(engine.model, fault), engine))
    differ = (trace.logps - good.logps).abs().amax(1) > 1e-3
    assert differ.tolist() == [len(ids) < 7 or fault != "padding attended" for ids in prompts]
    assert not Faulty(engine.model, "").generate(prompts, **STATIC).logps.ne(good.logps).any()
    if (
        fault == "no masks behind the block"
    ):  # the naive sampler that cuts them off agrees with that fault
        cut = lambda ids, end: engine.model.logits(torch.tensor([ids[:end]]))[0]
        assert_naive(trace, 0, engine.model, prompts[0], 0, logits_of=cut, **STATIC)


def test_the_canvas_is_part_of_the_input(engine):
    """Another gen_length changes the first block already: the masks behind it are seen."""
    short, long = (
        engine.generate(prompts_of([5]), block_length=4, **STATIC | {"gen_length": g})
        for g in (8, 24)
    )
    assert (short.logps[:, :4] - long.logps[:, :4]).abs().max() > 1e-3


# --- (c) replay --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remasking", REMASKING)
@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_logps_of_the_model_replay_every_state(engine, remasking, temperature, side):
    """'equal numbers were revealed together and one forward of this family replays them', wherever the padding stands."""
    model = engine.model
    trace = engine.generate(
        prompts_of([1, 6, 9, 3, 5, 2], seed=5), num_samples=2, gen_length=13, temperature=temperature, remasking=remasking,
        confidence_threshold=0.4, denoising_steps=3,
    )  # fmt: skip
    L = trace.completion_ids.shape[1]
    assert (
        trace.step_map < 0
    ).any() and L == 16  # some ended early, and all rows have the whole canvas
    T = max(map(len, trace.prompt_ids)) + L + 2
    clean, valid = torch.full((12, T), 7), torch.zeros(12, T, dtype=torch.bool)
    replay, want = torch.full((12, T), -1), torch.zeros(12, T, dtype=torch.float64)
    for i, prompt in enumerate(trace.prompt_ids):
        first = T - len(prompt) - L if side == "left" else 0
        row, canvas = (
            slice(first, first + len(prompt) + L),
            slice(first + len(prompt), first + len(prompt) + L),
        )
        clean[i, row], valid[i, row] = torch.tensor(prompt + trace.completion_ids[i].tolist()), True
        replay[i, canvas], want[i, canvas] = trace.replay_map[i], trace.logps[i]
    prompt = torch.stack(
        [valid[i] & ((valid[i].cumsum(0) - 1) < len(ids)) for i, ids in enumerate(trace.prompt_ids)]
    )
    seen = torch.zeros_like(valid)

    def gap(step, masked):
        now = replay == step
        logps = model.logps(
            clean, clean.masked_fill(masked & valid & ~prompt, M), now, valid, temperature or 1.0
        )
        return (logps - want)[now].abs().max().item() if now.any() else 0.0

    for step in range(trace.num_replays):
        assert gap(step, (replay >= step) | (replay < 0)) < 1e-9
        seen |= replay == step
    assert seen.sum() == (trace.step_map >= 0).sum() and replay.max() < trace.num_replays
    faults = [
        [
            gap(step, replay >= step) for step in range(12)
        ],  # what was never revealed, shown as padding ids
        [
            gap(step, (replay > step) | (replay < 0)) for step in range(11)
        ],  # the state after the step
        [
            gap(step, replay % 3 >= step % 3) for step in range(12)
        ],  # all blocks at once, as block models replay
    ]
    assert all(max(fault) > 1e-3 for fault in faults), faults


def test_sequences_hold_the_whole_canvas(engine):
    """valid_mask: False on padding of the prompt alone, for the masks behind the terminal block were attended to."""
    trace = engine.generate(prompts_of([2, 7]), num_samples=6, gen_length=12, seed=1)
    assert (trace.step_map < 0).any()
    input_ids, valid = trace.sequences(PAD)
    assert input_ids.shape == valid.shape == (12, 7 + 12) and valid[:, 7:].all()
    assert valid[:, :7].sum(1).tolist() == [2] * 6 + [7] * 6
    assert (
        torch.equal(input_ids[:, 7:], trace.completion_ids)
        and not (trace.completion_ids == M).any()
    )


# --- (d) keys ----------------------------------------------------------------------------------------------------------------

OPTIONS = dict(gen_length=11, remasking="low_confidence_static", seed=4)


def test_batches_neighbours_and_ranks_change_no_draw(engine):
    """max_batch_size, other prompts, their order and the rank that holds them: a sample depends on its number alone."""
    prompts = prompts_of([3, 9, 1, 6])
    whole = engine.generate(prompts, num_samples=2, **OPTIONS)
    assert whole.sample_index.tolist() == list(range(8))
    for size in (1, 3, 5):
        part = make_engine(engine.model, max_batch_size=size).generate(
            prompts, num_samples=2, **OPTIONS
        )
        assert same_draws(part, whole, 1e-9)
    for p in (2, 0, 3, 1):
        alone = engine.generate([prompts[p]], num_samples=2, sample_offset=2 * p, **OPTIONS)
        beside = engine.generate(
            [prompts[p], *prompts_of([8], seed=p)], num_samples=2, sample_offset=2 * p, **OPTIONS
        )
        for trace in (alone, beside):
            assert rows_of(trace, [0, 1]) == rows_of(whole, [2 * p, 2 * p + 1])
    ranks = [
        engine.generate(prompts[2 * r : 2 * r + 2], num_samples=2, sample_offset=4 * r, **OPTIONS)
        for r in (0, 1)
    ]
    assert rows_of(ranks[0], range(4)) + rows_of(ranks[1], range(4)) == rows_of(
        whole, range(4)
    ) + rows_of(whole, range(4, 8))
    other = engine.generate([prompts[2]], num_samples=2, sample_offset=0, **OPTIONS)
    assert rows_of(other, [0, 1]) != rows_of(whole, [4, 5])  # control: another number, other draws


def test_no_more_than_max_batch_size_rows_are_decoded_together(engine):
    rows = []

    class Spy(MaskedEngine):
        def _denoise(self, work, *rest):
            rows.append(len(work.sample_index))
            return super()._denoise(work, *rest)

    Spy(engine.model, 5).generate(prompts_of([3, 9, 1, 6]), num_samples=3, gen_length=4)
    assert max(rows) == 5 and sum(rows) >= 12


@pytest.mark.parametrize("seed", [(42 << 32) + 7, -43, 2**63 + 5])
def test_every_bit_of_a_seed_counts(engine, seed):
    """Those of training are (--seed << 32) + step, those of evaluations negative."""
    (prompt,), options = prompts_of([3]), dict(gen_length=8, temperature=1.5, stop_at_eos=False)
    trace = engine.generate([prompt], seed=seed, **options)
    assert_naive(trace, 0, engine.model, prompt, 0, seed=seed, **options)
    for other in (seed % 2**31, seed % 2**32, seed >> 32, seed + 2**32):
        assert not same_draws(engine.generate([prompt], seed=other, **options), trace)


def test_a_group_is_diverse_and_seeds_differ(engine):
    """16 identical prompts at T=1 give at least 15 completions; another seed gives others."""
    engine = make_engine(
        model_of("llada" if engine.model.turn_end == "<|eot_id|>" else "dream", scale=5)
    )
    draw = lambda **options: engine.generate(prompts_of([5]), num_samples=16, **STATIC | options)
    texts = lambda trace: {tuple(row) for row in trace.completion_ids.tolist()}
    a, b = texts(draw(seed=0)), texts(draw(seed=1))
    assert len(a) >= 15 and len(b) >= 15 and len(a & b) <= 1 and texts(draw(seed=0)) == a


# --- (e) EOS -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eos", EOS)
def test_a_row_stops_behind_the_block_that_holds_an_end(monkeypatch, engine, eos):
    """EOS mid-block waits for the block; what follows is never revealed, but stays on the canvas."""
    for P, at in itertools.product((4, 5), range(12)):
        script = [7] * at + [eos] + [8] * 20
        trace = scripted(monkeypatch, engine, script, prompts_of([P], seed=9)[0])
        done = (at // 4 + 1) * 4  # whatever the prompt's length
        assert trace.canvas_length.tolist() == [12] and trace.num_forwards.tolist() == [done]
        assert trace.completion_ids[0].tolist() == script[:done] + [PAD] * (12 - done)
        assert (
            (trace.step_map[0] >= 0).tolist()
            == (trace.replay_map[0] >= 0).tolist()
            == [j < done for j in range(12)]
        )
        assert (trace.logps[0] == -0.5).tolist() == [
            j < done for j in range(12)
        ] and not trace.logps[0, done:].any()
        assert trace.completion_mask[0].tolist() == [
            j <= at for j in range(12)
        ] and trace.truncated.tolist() == [False]
        whole = scripted(monkeypatch, engine, script, prompts_of([P], seed=9)[0], stop_at_eos=False)
        assert whole.completion_ids[0].tolist() == script[:12] and whole.completion(
            0
        ) == trace.completion(0)
        assert (
            torch.equal(whole.completion_mask, trace.completion_mask)
            and (whole.step_map >= 0).all()
        )


def test_an_end_token_inside_the_prompt_is_ignored(monkeypatch, engine):
    for prompt in ([5, EOS[0]], [EOS[1], 5, 6]):
        trace = scripted(monkeypatch, engine, [7] * 20, prompt)
        assert trace.completion_ids.tolist() == [[7] * 12] and trace.truncated.tolist() == [True]


@pytest.mark.parametrize("eos", [EOS, (PAD,)])
@pytest.mark.parametrize("family", FAMILIES)
def test_stopping_early_gives_the_same_text(family, eos):
    """'exact for the text'; where pad = EOS too, as in LLaDA and Dream."""
    engine = make_engine(model_of(family, scale=10, eos=eos))
    options = dict(num_samples=6, gen_length=16, seed=2)
    early, full = (
        engine.generate(prompts_of([2, 4, 7]), stop_at_eos=stop, **options)
        for stop in (True, False)
    )
    ended = (early.step_map < 0).any(1)
    assert 0 < ended.sum() < len(ended) and (full.step_map >= 0).all()
    assert [early.completion(i) for i in range(18)] == [full.completion(i) for i in range(18)]
    assert torch.equal(early.truncated, full.truncated) and not early.truncated[ended].any()
    revealed = early.step_map >= 0
    for name in ("completion_ids", "step_map", "replay_map", "completion_mask"):
        assert torch.equal(getattr(early, name)[revealed], getattr(full, name)[revealed])
    assert (early.logps - full.logps)[revealed].abs().max() < 1e-9
    assert (
        early.completion_ids[~revealed].eq(PAD).all() and not early.completion_mask[~revealed].any()
    )
    assert (
        early.num_forwards <= full.num_forwards
    ).all() and early.num_forwards.sum() < full.num_forwards.sum()


# --- (f) the mask token, broken logits, every rule ends ----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("remasking", REMASKING)
def test_the_mask_token_is_never_sampled(monkeypatch, engine, temperature, remasking):
    """Even where its logit is huge; log-probs are over the other tokens."""
    options = dict(num_samples=4, gen_length=8, temperature=temperature, remasking=remasking)
    usual, head = engine.generate(prompts_of([3, 4]), **options), engine.model.head

    def tempting(hidden):
        logits = head(hidden)
        logits[..., M] = 1e6
        return logits

    monkeypatch.setattr(engine.model, "head", tempting)
    trace = engine.generate(prompts_of([3, 4]), **options)
    assert not (trace.completion_ids == M).any() and same_draws(trace, usual)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("remasking", MaskedEngine.choices["remasking"])
def test_broken_logits_stop_the_rollout(temperature, remasking):
    """Wherever they stand: in the weights, or in one row of one forward."""
    engine = make_engine(model_of("llada"))
    options = dict(temperature=temperature, remasking=remasking, sample_offset=7, gen_length=8)
    head = engine.model.head
    for at in (0, -1):
        engine.model.head = lambda hidden: head(hidden).index_fill(
            0, torch.tensor([at % len(hidden)]), math.nan
        )  # noqa: B023
        with exits_with_one_line("not finite at samples .7"):
            engine.generate(prompts_of([3]), **options)
    engine.model.head = head
    engine.generate(prompts_of([3]), **options)
    with torch.no_grad():
        engine.model.lm_head.weight[5, 0] = float("nan")
    with exits_with_one_line("not finite at samples .7."):
        engine.generate(prompts_of([3]), **options)


def test_every_rule_ends(engine):
    """Any threshold, any number of steps; at most one forward a mask, at least one a block, and nothing stays masked."""
    generator = torch.Generator().manual_seed(1)
    for i in range(20):
        threshold, steps = float(torch.rand((), generator=generator) * 1.2 - 0.1), 1 + i % 7
        threshold = min(max(threshold, 0.0), 1.0)  # the ends of the range too
        trace = engine.generate(
            prompts_of([1 + i % 7]), num_samples=4, denoising_steps=steps, seed=i, confidence_threshold=threshold,
            **STATIC | {"remasking": REMASKING[i % 3]},
        )  # fmt: skip
        assert (trace.step_map >= 0).all() and trace.step_map.max() < min(steps, 4)
        assert (trace.num_forwards >= 3).all() and (trace.num_forwards <= 3 * min(steps, 4)).all()
        if REMASKING[i % 3] != "low_confidence_dynamic":
            for block in trace.step_map.view(-1, 4):
                assert block.bincount(minlength=steps).tolist() == reveal_quota(4, steps)


# --- (g) exact distributions -------------------------------------------------------------------------------------------------

TOKENS, CANVAS, BLOCK = 5, 4, 2  # usable tokens, the sixth is the mask; two blocks of two
TOY = {
    "llada": {
        "embedding_size": TOKENS + 1,
        "d_model": 16,
        "mlp_hidden_size": 16,
        "n_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
    },
    "dream": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    | {"num_key_value_heads": 1},
}
TOY_PROMPT = [3, 1, 4]


@pytest.fixture(scope="module", params=FAMILIES)
def toy(request):
    """One layer whose tokens depend strongly on their neighbours: the order of reveals matters."""
    config = TOY[request.param] | {"vocab_size": TOKENS + 1, "mask_token_id": TOKENS}
    model = model_of(
        request.param, scale=20, seed=4 if request.param == "llada" else 3, eos=(0,), **config
    )
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith(
                ("attn_out.weight", "o_proj.weight", "down_proj.weight", "0.ff_out.weight")
            ):
                value.mul_(3)
    return make_engine(model, max_batch_size=10000)


@torch.no_grad()
def exact_distribution(model, denoising_steps, remasking, threshold, temperature):
    """{completion: probability}, by enumerating every draw of every masked token and every order, from every state."""
    states = list(itertools.product(range(TOKENS + 1), repeat=CANVAS))
    logits = model.logits(torch.tensor([[*TOY_PROMPT, *state] for state in states]))[
        :, -CANVAS:, :TOKENS
    ]
    p_of = dict(zip(states, (logits / temperature).softmax(-1).tolist(), strict=True))
    now = {(TOKENS,) * CANVAS: 1.0}
    for start, quota in itertools.product(
        range(0, CANVAS, BLOCK), reveal_quota(BLOCK, denoising_steps)
    ):
        later = {}
        for state, probability in now.items():
            masked = [j for j in range(start, start + BLOCK) if state[j] == TOKENS]
            q, p = min(quota, len(masked)), p_of[state]
            for draw in itertools.product(range(TOKENS), repeat=len(masked)):
                token = dict(zip(masked, draw, strict=True))
                chance = probability * math.prod(p[j][v] for j, v in token.items())
                choices = reveals(
                    masked, {j: p[j][v] for j, v in token.items()}, q, remasking, threshold
                )
                for chosen in choices:
                    new = tuple(token[j] if j in chosen else state[j] for j in range(CANVAS))
                    later[new] = later.get(new, 0.0) + chance / len(choices)
        now = later
    return now


def misfit(engine, remasking, temperature=1.0, denoising_steps=2, n=6000):
    """(standardised chi-square of n sampled completions against the exact distribution, largest error of a frequency)"""
    want = exact_distribution(engine.model, denoising_steps, remasking, 0.4, temperature)
    assert abs(sum(want.values()) - 1) < 1e-12 and len(want) == TOKENS**CANVAS
    trace = engine.generate(
        [TOY_PROMPT], num_samples=n, gen_length=CANVAS, block_length=BLOCK, denoising_steps=denoising_steps,
        remasking=remasking, confidence_threshold=0.4, temperature=temperature, stop_at_eos=False,
    )  # fmt: skip
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


@pytest.mark.parametrize(
    "remasking, temperature, denoising_steps",
    [
        ("random", 1.0, 2),
        ("random", 0.7, 3),
        ("low_confidence_static", 1.0, 2),
        ("low_confidence_static", 1.5, 1),
        ("low_confidence_dynamic", 1.0, 2),
    ],
)
def test_samples_follow_the_exact_distribution_over_trajectories(
    toy, remasking, temperature, denoising_steps
):
    """Frequencies of 6000 completions of 5^4 in two blocks: chi-square within 4.5 deviations, none off by 0.025."""
    z, error = misfit(toy, remasking, temperature, denoising_steps)
    assert abs(z) < 4.5 and error < 0.025


@pytest.mark.parametrize(
    "fault",
    [
        "shared draws",
        "shared order",
        "wrong temperature",
        "stale block",
        "no masks behind the block",
    ],
)
def test_the_exact_distribution_sees_faults(monkeypatch, toy, fault):
    """Negative controls: a uniform number shared by positions, a fixed order, another temperature, a wrong context."""
    engine = Faulty(toy.model, fault)
    engine.max_batch_size = 10000
    if fault == "shared draws":
        monkeypatch.setattr(
            rollout.engine,
            "keyed_uniform",
            lambda *key: keyed_uniform(*key[:2], key[2] * 0, *key[3:]),
        )
    elif fault == "shared order":  # left to right
        order = lambda *key: keyed_uniform(*key) if key[-1] == "token" else 1 / (2.0 + key[2])
        monkeypatch.setattr(rollout.engine, "keyed_uniform", order)
    elif fault == "wrong temperature":
        sample = rollout.engine.sample_categorical
        monkeypatch.setattr(
            rollout.engine, "sample_categorical", lambda z, u, T: sample(z, u, T * 1.3)
        )
    assert abs(misfit(engine, "random")[0]) > 8


# --- (h) weights, adapters, options ------------------------------------------------------------------------------------------


def test_load_weights_copies(engine):
    """The draws are the other model's, and the first ones again when its weights come back."""
    family = "llada" if engine.model.turn_end == "<|eot_id|>" else "dream"
    own = make_engine(model_of(family))
    before = own.generate(prompts_of([5]), **OPTIONS)
    own.load_weights(export_weights(model_of(family, seed=7)))
    after = own.generate(prompts_of([5]), **OPTIONS)
    assert same_draws(
        after, make_engine(model_of(family, seed=7)).generate(prompts_of([5]), **OPTIONS), 0
    )
    own.load_weights(export_weights(model_of(family)))
    assert same_draws(own.generate(prompts_of([5]), **OPTIONS), before, 0) and not same_draws(
        after, before
    )
    weights = dict(export_weights(model_of(family)))
    name = next(iter(weights))
    with pytest.raises(ValueError, match=name):
        own.load_weights((key, value) for key, value in weights.items() if key != name)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_with_adapters_of_its_own(family):
    """LoRA beside the engine's weights: export_adapter alone is handed over, and the draws follow the trained model."""
    model, engine = (add_lora(model_of(family), 4, 10, dtype=torch.float64) for _ in range(2))
    engine = make_engine(engine)
    plain = make_engine(model_of(family)).generate(prompts_of([5, 2]), **OPTIONS)
    assert same_draws(engine.generate(prompts_of([5, 2]), **OPTIONS), plain, 1e-9)  # B is 0
    with torch.no_grad():
        for name, value in adapter_tensors(model).items():
            if ".lora_B." in name:
                value.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    assert sum(len(value) for _, value in export_adapter(model)) > 0
    engine.load_weights(export_adapter(model))
    adapted = engine.generate(prompts_of([5, 2]), **OPTIONS)
    merged = make_engine(model_of(family))
    merged.load_weights(export_weights(model, merge_lora=True))
    assert (adapted.logps - plain.logps).abs().max() > 1e-2
    assert same_draws(adapted, merged.generate(prompts_of([5, 2]), **OPTIONS), 1e-5)


def test_make_engine_takes_the_engine_of_the_attention_pattern(tmp_path, engine):
    """'auto' and the right name serve; another family's name is refused, with the one to use."""
    assert isinstance(engine, MaskedEngine) and isinstance(
        make_engine(engine.model, backend="masked"), MaskedEngine
    )
    for backend in ("block", "nonsense"):  # lmdeploy: tests/test_lmdeploy.py
        for model in (engine.model, "tiny-llada"):
            with exits_with_one_line(
                f"--rollout-backend {backend} cannot serve a bidirectional model",
                "use masked or auto",
            ):
                make_engine(model, backend=backend)
    with exits_with_one_line(
        "--rollout-backend masked cannot serve a block-causal model", "use block or auto"
    ):
        make_engine(block_model_of(), backend="masked")


@pytest.mark.parametrize("name", ["tiny-dream", "directory"])
def test_make_engine_loads_names_and_directories(tmp_path, name):
    """A key of MODELS with random weights, and what save_model writes."""
    if name == "directory":
        source = random_model(
            TINY_LLADA | {"d_model": 16, "n_heads": 2, "n_kv_heads": 2, "n_layers": 1}
        )
        source.eos_token_ids, source.pad_token_id = [256], 256
        save_model(source, tmp_path / "a", byte_tokenizer())
        name = str(tmp_path / "a")
    engine = make_engine(name)
    trace = engine.generate([[3, 4]], gen_length=6)
    assert (
        engine.model.lm_head.weight.dtype == torch.float32 == trace.logps.dtype
        and trace.completion_ids.shape == (1, 8)
    )
    half = make_engine(name, dtype=torch.bfloat16).generate([[3, 4], [5]], gen_length=6)
    assert half.logps.dtype == torch.float32 and half.logps.isfinite().all()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"block_length": -4}, "block_length=-4.*at least 1"),
        (
            {"remasking": "low_confidence"},
            "--remasking low_confidence.*low_confidence_static.*low_confidence_dynamic.*random",
        ),
        ({"denoising_steps": 0}, "denoising_steps=0.*at least 1"),
        ({"gen_length": 0}, "gen_length=0.*at least 1"),
        ({"num_samples": 0}, "num_samples=0.*at least 1"),
        ({"temperature": -1.0}, "--temperature -1.0 must be at least 0"),
        ({"temperature": math.nan}, "--temperature nan must be at least 0 and finite"),
        ({"cache": "block"}, "--cache block.*none, prefix, dual"),
        ({"confidence_threshold": 1.01}, "--confidence-threshold 1.01.*0 to 1"),
        ({"confidence_threshold": -0.01}, "--confidence-threshold -0.01.*0 to 1"),
        ({"confidence_threshold": math.nan}, "--confidence-threshold nan.*0 to 1"),
        ({"factor": 0.0}, "--factor 0.0.*above 0"),
        (
            {"eos_policy": "demote", "remasking": "origin"},
            "--eos-policy demote .*--remasking origin does not look at",
        ),
        (
            {"eos_policy": "eoser", "remasking": "origin"},
            "--eos-policy eoser .*--remasking origin does not look at",
        ),
        ({"records": "logits"}, "no records of kind 'logits'"),
        (
            {"records": "states", "cache": "dual"},
            "--cache dual forwards the block alone: records of kind 'states'",
        ),
        ({"alg_temp": -0.5, "remasking": "entropy"}, "--alg-temp -0.5 must be at least 0"),
        (
            {"alg_temp": math.nan, "remasking": "entropy"},
            "--alg-temp nan must be at least 0 and finite",
        ),
        (
            {"alg_temp": 0.5, "remasking": "random"},
            "--alg-temp 0.5.* 0 unless --remasking is low_confidence_static, entropy",
        ),
    ],
)
def test_generate_refuses_what_it_cannot_do(engine, options, words):
    with exits_with_one_line(words):
        engine.generate([[3, 4]], **options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"temperature": math.nan}, "--temperature nan"),
        ({"confidence_threshold": 1.01}, "--confidence-threshold 1.01"),
        ({"top_p": 0.0}, "--top-p 0.0"),
        ({"factor": 0.0}, "--factor 0.0"),
        ({"eb_threshold": -1.0}, "--eb-threshold -1.0"),
        ({"editing_threshold": 0.5}, "--editing-threshold 0.5"),
        ({"eos_policy": "demote", "remasking": "origin"}, "--eos-policy demote"),
        ({"alg_temp": math.nan, "remasking": "entropy"}, "--alg-temp nan"),
    ],
)
def test_the_plan_refuses_what_generate_would(engine, options, words):
    """So that a command ends before it has written or sampled anything."""
    for ask in (engine.plan, partial(engine.generate, [[3, 4]])):
        with exits_with_one_line(words):
            ask(
                **{"gen_length": 8, "denoising_steps": 2, "remasking": "low_confidence_static"}
                | options
            )


def test_generate_refuses_unusable_prompts(engine):
    for prompts in ([], [[3], []]):
        with exits_with_one_line("no prompts, or one has no tokens"):
            engine.generate(prompts)
    with exits_with_one_line(f"prompt 1 holds the mask token .id {M}."):
        engine.generate([[3], [4, M, 5]])
    for value in (0, 1):  # the ends of the range are in it
        engine.generate([[3]], confidence_threshold=value, gen_length=4)


def test_the_plan_follows_the_block_length(engine):
    plan = lambda **settings: engine.plan(
        **{"gen_length": 20, "denoising_steps": 2, "remasking": "random"} | settings
    )
    assert (
        plan(block_length=0, seed=3)
        == plan()
        == "5 blocks of 4 tokens, 2 steps each: 10 steps, 2 tokens a step"
    )
    assert (
        plan(block_length=8, gen_length=24)
        == "3 blocks of 8 tokens, 2 steps each: 6 steps, 4 tokens a step"
    )
    with exits_with_one_line("--gen-length 20 is no multiple of the block length 8: give 16 or 24"):
        plan(block_length=8)
    with exits_with_one_line("--gen-length 3 .*: give 4$"):
        plan(gen_length=3)
    with exits_with_one_line("--denoising-steps 0 must be at least 1"):
        plan(denoising_steps=0)
    assert plan(cache="dual") == plan()  # where nothing is replayed
    for records, cache in [("steps", "dual"), ("states", "prefix")]:
        assert plan(records=records) == plan()
        with exits_with_one_line(f"--cache {cache} is approximate"):
            plan(records=records, cache=cache)
    for name, value in {
        "cache": "paged",
        "schedule": "falling",
        "eos_policy": "pad",
        "remasking": "best",
    }.items():
        with exits_with_one_line(
            f"--{name.replace('_', '-')} {value}: the sampler of a bidirectional model has "
        ):
            plan(**{name: value})
    with exits_with_one_line("--schedule ascending reveals 20 tokens in 4 steps"):
        plan(schedule="ascending", denoising_steps=5)
    with exits_with_one_line("--schedule ascending makes its own blocks"):
        plan(schedule="ascending", block_length=4)
    assert plan(schedule="ascending").startswith("blocks of 3, 4, 13 tokens: 4 steps")
    trace = engine.generate(
        prompts_of([3]),
        gen_length=24,
        denoising_steps=2,
        block_length=8,
        remasking="random",
        stop_at_eos=False,
    )
    assert trace.num_forwards.tolist() == [6]


# --- (i) traces --------------------------------------------------------------------------------------------------------------


def test_draw_parts_blocks_from_the_start_of_the_completion():
    """Blocks do not begin inside the prompt, and what was never revealed is not drawn."""
    settings = {
        "eos_token_ids": [256],
        "attention": "bidirectional",
        "block_length": 4,
        "gen_length": 12,
        "denoising_steps": 2,
    }
    trace = trace_of(
        [[97, 98, 99, 100, 101, 256, 102, 103, 256, 256, 256, 256]], [6], prompts=[[258, 104, 259]], settings=settings,
        steps=[[0, 1, 0, 1, 1, 0, 0, 1, -1, -1, -1, -1]],
    )  # fmt: skip
    assert [line.rstrip() for line in trace.draw(0, byte_tokenizer()).splitlines()] == [
        "prompt   <|user|>h<|assistant|>",
        "tokens   a b c d | e <|endoftext|> f g",
        "step     1 2 1 2   2 1             1 2",
    ]
    settings["attention"] = "block-causal"  # control: a grid that starts with the prompt
    assert "a | b c d e | <" in trace.draw(0, byte_tokenizer())


def test_metrics_of_a_masked_rollout(engine):
    """describe, truncated and rollout_sums read scored tokens alone; forwards are those of each row."""
    trace = engine.generate(prompts_of([2, 7]), num_samples=6, gen_length=12, seed=1)
    ids = [trace.completion(i) for i in range(12)]
    assert trace.truncated.tolist() == [not set(row) & set(EOS) for row in ids] and {
        len(row) for row in ids
    } != {12}
    means = rollout_means(
        {
            k: float(v)
            for k, v in rollout_sums(trace, torch.ones(12), [{"score": 1.0}] * 12, 6).items()
        },
        12,
    )
    assert means["completion/length"] == sum(map(len, ids)) / 12
    speed = [
        len(row) / forwards for row, forwards in zip(ids, trace.num_forwards.tolist(), strict=True)
    ]
    assert means["speed/tokens_per_forward"] == pytest.approx(sum(speed) / 12, rel=1e-6)
    row = json.loads(json.dumps(trace.describe(0, byte_tokenizer(), 0.5)))
    assert row["completion_ids"] == ids[0] and len(row["step_map"]) == len(row["logps"]) == len(
        ids[0]
    )
    assert min(row["step_map"]) >= 0 and json.loads(json.dumps(trace.settings)) == trace.settings
