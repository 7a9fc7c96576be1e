"""Dream's own orders against its official sampler, records of states, and the fixed shapes that CUDA graphs need.

tests/golden/dream_sampler.json was written by DreamGenerationMixin._sample (generation_utils.py of Dream-v0-Instruct-7B, as in
yjyddq/DARE 83ae8a3) at temperature 0 on the logits of tests/test_dream.py's golden weights; its generation_logits_hook_func set
the logit of the mask token to -inf, which the official sampler may draw. "<alg> <steps> <new tokens>": tokens, and the step at
which each was revealed. Beside it, 4000 samples of each, by hand: origin, and maskgit_plus and entropy with alg_temp, were
revealed in the same orders equally often within 2 standard deviations; `random` was not.
"""

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from test_masked import EOS, FAMILIES, PAD, M, model_of, prompts_of
from test_masked_fast import naive_sample
from test_models import CONFIGS
from test_models import model_of as golden_model
from test_rollout import same_draws

import rollout.canvas
import rollout.masked
from rollout import make_engine
from rollout.probe import replay_logps
from rollout.schedules import reveal_quota, reveal_shares

GOLDEN = json.loads((Path(__file__).parent / "golden" / "dream_sampler.json").read_text())
NAMES = {
    "maskgit_plus": "low_confidence_static",
    "topk_margin": "topk_margin",
    "entropy": "entropy",
}


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request):
    return make_engine(model_of(request.param, scale=12))


# --- (a) Dream's orders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", GOLDEN["runs"])
def test_greedy_orders_are_those_of_the_official_sampler(run):
    """Equal tokens at equal steps. Controls: LLaDA's schedule, or the order of another name."""
    alg, steps, new = run.split()
    engine, want = make_engine(golden_model(CONFIGS["dream"], rule="dream")), GOLDEN["runs"][run]

    def gap(**changes):
        options = dict(
            gen_length=int(new), block_length=int(new), denoising_steps=int(steps), temperature=0
        )
        trace = engine.generate(
            [GOLDEN["prompt"]],
            **options | {"schedule": "timesteps", "stop_at_eos": False} | changes,
        )
        return (trace.completion_ids[0].tolist() != want["tokens"]) + (
            trace.step_map[0].tolist() != want["steps"]
        )

    assert gap(remasking=NAMES[alg]) == 0
    assert gap(remasking=NAMES[alg], schedule="uniform") > 0
    assert all(gap(remasking=other) for other in NAMES.values() if other != NAMES[alg])


def test_quotas_of_the_timesteps():
    """Floors make the first steps short and the last one long."""
    assert reveal_quota(32, 8, "timesteps") == [3, 4, 4, 4, 4, 4, 4, 5]
    assert reveal_quota(32, 32, "timesteps") == [0, *[1] * 30, 2]
    for n, steps in itertools.product(range(1, 40), range(1, 45)):
        quota, time, left = (
            reveal_quota(n, steps, "timesteps"),
            torch.linspace(1, 1e-3, steps + 1),
            n,
        )
        for step in range(steps - 1):
            assert quota[step] == int(torch.tensor(float(left)) * (1 - time[step + 1] / time[step]))
            left -= quota[step]
        assert quota[-1] == left


def order_of(engine, draws=1200, **options):
    """-> {steps of the tokens of a block of 3, in 2 steps: share of the samples}"""
    options = (
        dict(
            gen_length=3,
            block_length=3,
            denoising_steps=2,
            temperature=0,
            stop_at_eos=False,
            seed=5,
        )
        | options
    )
    trace = engine.generate([[3, 4, 5]], num_samples=draws, **options)
    return {
        steps: count / draws
        for steps, count in Counter(map(tuple, trace.step_map.tolist())).items()
    }


def distance(got, want):
    """Half the sum of differences between two distributions."""
    return sum(abs(got.get(key, 0) - want.get(key, 0)) for key in {*got, *want}) / 2


def test_origin_reveals_each_token_by_itself(engine):
    """With 1 - s / t of the first step, and all of the rest in the last one; random reveals a fixed number."""
    share = 1 - (1 + 1e-3) / 2
    for schedule, p in (("timesteps", share), ("uniform", 2 / 3)):
        assert reveal_shares(reveal_quota(3, 2, schedule), schedule) == pytest.approx(
            [p, 1], abs=1e-7
        )
        want = {
            steps: math.prod(p if step == 0 else 1 - p for step in steps)
            for steps in itertools.product((0, 1), repeat=3)
        }
        got = order_of(engine, remasking="origin", schedule=schedule)
        assert distance(got, want) < 0.06
        assert distance(order_of(engine, remasking="random", schedule=schedule), want) > 0.2


def test_forwards_of_origin_are_those_with_masks_left(engine):
    trace = engine.generate(
        [[3, 4]],
        num_samples=40,
        gen_length=8,
        remasking="origin",
        denoising_steps=4,
        stop_at_eos=False,
    )
    steps = [len(set(row[:4])) + len(set(row[4:])) for row in trace.step_map.tolist()]
    assert (
        all(a <= b <= 8 for a, b in zip(steps, trace.num_forwards.tolist(), strict=True))
        and len(set(steps)) > 2
    )
    assert (replay_logps(engine.model, trace) - trace.logps).abs().max() < 2e-6


@pytest.mark.parametrize("remasking", ["low_confidence_static", "entropy", "topk_margin"])
def test_drawn_orders_follow_the_softmax_of_the_confidence(engine, remasking):
    """alg_temp: the first step takes 2 of 3 tokens without replacement from softmax(confidence / alg_temp)."""
    model = engine.model
    p = (
        model.logits(torch.tensor([[3, 4, 5, M, M, M]]))[0, 3:]
        .index_fill(1, torch.tensor([M]), -math.inf)
        .softmax(-1)
    )
    best = p.sort(-1, descending=True).values
    confidence = {
        "low_confidence_static": best[:, 0],
        "entropy": -torch.special.entr(p).sum(-1),
        "topk_margin": best[:, 0] - best[:, 1],
    }[remasking]
    wanted = {}
    for temperature in (0.2, 1.0):
        w = (confidence / temperature).softmax(0).tolist()
        want = Counter()
        for a, b in itertools.permutations(range(3), 2):
            want[tuple(int(j not in (a, b)) for j in range(3))] += w[a] * w[b] / (1 - w[a])
        wanted[temperature] = want
        assert distance(order_of(engine, remasking=remasking, alg_temp=temperature), want) < 0.06
    greedy = order_of(engine, remasking=remasking)
    assert len(greedy) == 1 and greedy == order_of(engine, remasking=remasking, alg_temp=1e-6)
    assert distance(greedy, wanted[1.0]) > 0.2 and distance(wanted[0.2], wanted[1.0]) > 0.01


def test_demoted_ends_stay_behind_in_drawn_orders(engine):
    """Whatever is drawn for them, and finite, so that they are revealed if nothing else is left."""
    settings = {"remasking": "entropy", "eos_policy": "demote", "alg_temp": 0.01}
    drawn, score, draw = (
        torch.tensor([[7, EOS[0], 8]]),
        torch.tensor([[-3.0, -0.1, -3.0]]),
        torch.tensor([[0.5, 0.99, 0.5]]),
    )
    engine.generate([[3]], gen_length=4)  # sets the ids of the ends
    got = engine._score(score, drawn, draw.double(), 0, settings)
    assert got.isfinite().all() and got.argsort(1)[0, 0] == 1
    assert (
        engine._score(score, drawn, draw.double(), 0, settings | {"eos_policy": "none"}).argmax()
        == 1
    )


# --- (b) records of states ---------------------------------------------------------------------------------------------------

STATES = dict(gen_length=12, block_length=4, denoising_steps=3, temperature=1.3, records="states")


@pytest.mark.parametrize("remasking", ["low_confidence_static", "low_confidence_dynamic", "rcr"])
@pytest.mark.parametrize("cache", ["none", "prefix"])
def test_states_are_those_of_the_naive_sampler(engine, remasking, cache):
    """What every forward saw masked, a token drawn for each of these, and its probability; three batches of ragged prompts."""
    prompts = prompts_of([1, 4, 7, 2, 6], seed=3)
    options = STATES | {"remasking": remasking, "cache": cache, "confidence_threshold": 0.5}
    trace = make_engine(engine.model, max_batch_size=2).generate(
        prompts, sample_offset=30, **options
    )
    records, K = trace.records, 9
    assert {name: (value.shape, value.dtype) for name, value in records.items()} == {
        "masked": ((5, K, 12), torch.bool), "predictions": ((5, K, 12), torch.int32),
        "confidences": ((5, K, 12), torch.float32),
    }  # fmt: skip
    faults = 0
    for i, prompt in enumerate(prompts):
        want = {
            now: rest
            for now, *rest in naive_sample(engine.model, prompt, 30 + i, **options)["states"]
        }
        assert want.keys() == {k for k in range(K) if records["masked"][i, k].any()}
        for k in range(K):
            masked, guess = want.get(k, ([False] * 12, {}))
            assert records["masked"][i, k].tolist() == masked
            for j in range(12):
                token, p = guess.get(len(prompt) + j, (None, 0.0))
                assert records["confidences"][i, k, j].item() == pytest.approx(p, abs=1e-6)
                assert token is None or records["predictions"][i, k, j] == token
            # control: the prediction is not what stands there in the end
            faults += sum(
                token != trace.completion_ids[i, p - len(prompt)]
                for p, (token, _) in guess.items()
                if k < K - 1
            )
    assert faults > 20


def test_states_hold_what_was_revealed_and_change_no_draw(engine):
    """Beside the masks, predictions are the tokens that stand there; the trace is the same without records."""
    options = dict(STATES, num_samples=4, remasking="low_confidence_static")
    trace = engine.generate(prompts_of([3, 5]), **options)
    plain = engine.generate(prompts_of([3, 5]), **options | {"records": None})
    assert same_draws(trace, plain, 1e-12) and plain.records is None
    masked, predictions = trace.records["masked"], trace.records["predictions"].long()
    for k, (state, want) in enumerate(zip(trace.states(M), plain.states(M), strict=True)):
        asked = masked[:, k].any(1)
        assert torch.equal(state[asked], want[asked])
        now = trace.replay_map == k
        assert (
            torch.equal(predictions[:, k][now], trace.completion_ids[now])
            and masked[:, k][now].all()
        )
        logps = trace.records["confidences"][:, k][now].log()
        assert torch.allclose(logps, trace.logps[now].float(), atol=1e-5)
        assert (predictions[:, k][~asked] == PAD).all() and (
            trace.records["confidences"][:, k][~masked[:, k]] == 0
        ).all()
    assert (trace.step_map < 0).any() and not masked[:, -1].any(
        1
    ).all()  # some rows ended before the last forwards


def test_states_replay_rcr(engine):
    """Without an event log: every prediction has its probability under the model in the recorded state."""
    trace = engine.generate(prompts_of([3, 5]), num_samples=3, **STATES | {"remasking": "rcr"})
    input_ids, valid = trace.sequences(PAD)
    assert set(trace.records) == {"masked", "predictions", "confidences"}
    for k, state in enumerate(trace.states(M)):
        masked, predictions = (
            trace.records["masked"][:, k],
            trace.records["predictions"][:, k].long(),
        )
        score = torch.cat([torch.zeros_like(valid[:, :-12]), masked], 1)
        clean, noisy = (torch.cat([input_ids[:, :-12], ids], 1) for ids in (predictions, state))
        p = engine.model.logps(clean, noisy, score, valid, 1.3)[:, -12:].exp()
        assert (
            (p - trace.records["confidences"][:, k])[masked].abs().max() < 1e-5
            if masked.any()
            else True
        )
    assert (replay_logps(engine.model, trace) - trace.logps)[trace.step_map >= 0].abs().max() < 2e-6


# --- (c) fixed shapes --------------------------------------------------------------------------------------------------------


class Recorded:
    """In place of CUDA graphs: runs the function that came first with each key, as a graph would."""

    def __init__(self, device):
        self.graphs, self.calls = {}, 0

    def run(self, key, function):
        self.calls += 1
        if key not in self.graphs:
            function()  # as the engine's graphs do: once for itself, once to capture
            self.graphs[key] = function
        self.graphs[key]()


@pytest.fixture
def fixed(monkeypatch, engine):
    """An engine with the buckets and the graphs of CUDA, on any device."""
    monkeypatch.setattr(rollout.canvas, "Graphs", Recorded)
    fixed = make_engine(engine.model)
    fixed.in_buckets = fixed.use_graphs = True
    return fixed


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("remasking", ["low_confidence_static", "low_confidence_dynamic", "rcr"])
def test_buckets_and_graphs_change_nothing(engine, fixed, cache, remasking):
    """Rows and columns that fill a bucket, one graph for all blocks, batches of other sizes and lengths in the same room."""
    ended = 0
    for prompts, samples in (([1, 9, 4], 3), ([2, 2], 1), ([30], 5), ([1, 9, 4], 3), ([20, 20], 1)):
        options = dict(
            gen_length=12, block_length=4, denoising_steps=3, num_samples=samples, cache=cache, remasking=remasking,
            confidence_threshold=0.6, seed=samples,
        )  # fmt: skip
        want, got = (e.generate(prompts_of(prompts), **options) for e in (engine, fixed))
        assert same_draws(got, want, 1e-9)
        ended += int((want.step_map < 0).any(1).sum())
        room = {value.data_ptr() for name, value in fixed.canvas.room.items() if name != "bias"}
        assert (
            fixed.canvas.R in (1, 2, 4, 8, 16)
            and fixed.canvas.S % rollout.masked.WIDTHS == 0
            and len(room) > 2
        )
    assert ended > 0 and fixed.canvas.graphs.calls > 20 > len(fixed.canvas.graphs.graphs)
    fixed.release()
    assert fixed.canvas is None and same_draws(
        fixed.generate(prompts_of(prompts), **options), got, 1e-9
    )


def test_one_graph_serves_all_blocks_of_a_dual_cache(fixed):
    """Where the block starts is read from the device: a whole forward and a window, whatever the number of blocks."""
    fixed.generate(prompts_of([5]), gen_length=48, block_length=4, cache="dual", stop_at_eos=False)
    assert len(fixed.canvas.graphs.graphs) == 2 and fixed.canvas.graphs.calls == 48


def test_large_forwards_are_launched_one_by_one(monkeypatch, engine, fixed):
    """Above GRAPH_TOKENS tokens no graph, and no rows for a bucket; the same draws."""
    options = dict(gen_length=8, block_length=4, num_samples=3, cache="dual")
    want = engine.generate(prompts_of([5, 3]), **options)
    for limit, graphs in ((30, {4}), (3, set())):
        for module in (rollout.canvas, rollout.masked):
            monkeypatch.setattr(module, "GRAPH_TOKENS", limit)
        fixed.release()
        assert same_draws(fixed.generate(prompts_of([5, 3]), **options), want, 1e-9)
        assert {key[4] for key in fixed.canvas.graphs.graphs} <= graphs


@pytest.mark.parametrize("fault", ["stale start", "stale tokens", "padding seen"])
def test_faults_of_fixed_shapes_show(monkeypatch, engine, fixed, fault):
    """Negative controls: a graph that keeps the first block's start or tokens, or sees the columns that fill a bucket."""
    options = dict(gen_length=12, block_length=4, num_samples=3, cache="dual", stop_at_eos=False)
    want = engine.generate(prompts_of([5, 3]), **options)
    lay, forward = rollout.canvas.Canvas.lay, rollout.canvas.Canvas._forward

    def faulty_lay(canvas, tokens, valid, is_padded):
        lay(canvas, tokens, valid, is_padded and fault != "padding seen")

    def faulty_forward(canvas, width, window):
        if fault == "stale start":
            canvas.start.fill_(int(canvas.S - 12))
        if fault == "stale tokens":
            canvas.tokens[:, -12:] = M
        return forward(canvas, width, window)

    assert same_draws(fixed.generate(prompts_of([5, 3]), **options), want, 1e-9)
    monkeypatch.setattr(rollout.canvas.Canvas, "lay", faulty_lay)
    monkeypatch.setattr(rollout.canvas.Canvas, "_forward", faulty_forward)
    assert not same_draws(fixed.generate(prompts_of([5, 3]), **options), want, 1e-3)


def test_static_rules_wait_for_the_device_once_a_block(monkeypatch, engine):
    """No value is read back inside a block, but under rules that decide how many tokens a step reveals: then one a step."""
    waits = []
    for name in ("item", "tolist", "__int__", "__bool__", "nonzero"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda self, *a, _real=real, _name=name, **k: (
                waits.append(_name) or _real(self, *a, **k)
            ),
        )
    canvas = []
    real = rollout.masked.MaskedEngine._denoise

    def denoise(self, *args):
        before = len(waits)
        result = real(self, *args)
        canvas.append(len(waits) - before)
        return result

    monkeypatch.setattr(rollout.masked.MaskedEngine, "_denoise", denoise)
    options = dict(gen_length=8, block_length=4, denoising_steps=4, stop_at_eos=False, cache="dual")
    for remasking, number in (
        ("low_confidence_static", 0),
        ("random", 0),
        ("entropy", 0),
        ("low_confidence_dynamic", 4),
    ):
        canvas.clear()
        engine.generate([[3, 4, 5]], remasking=remasking, confidence_threshold=1.0, **options)
        assert canvas == [number, number]


# --- (d) memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cache, each", [("none", 32 + 16 + 16 + 32 + 48 + 48 + 32), ("dual", 224 + 2 * 2 * 16)]
)
def test_a_batch_that_does_not_fit_is_refused_before_it_is_made(monkeypatch, cache, each):
    """One line that says the largest number of rows that fits; that number does fit. Dream has 2 layers, 16 key channels."""
    model, options = model_of("dream"), dict(gen_length=8, num_samples=6, cache=cache)
    monkeypatch.setattr(
        rollout.masked, "free_bytes", lambda device: (5 * 12 + 11) * each * 8
    )  # fp64
    with pytest.raises(
        SystemExit,
        match="^6 rows of 12 tokens need about 0.0 GiB, 0.0 GiB are left: 5 rows fit; lower --bat",
    ):
        make_engine(model).generate([[3, 4, 5, 6]], **options)
    assert (
        len(make_engine(model, max_batch_size=5).generate([[3, 4, 5, 6]], **options).completion_ids)
        == 6
    )


def test_a_full_device_is_one_line(monkeypatch, engine):
    """torch.OutOfMemoryError in a forward: the canvas is freed, the line says what to lower, and smaller rollouts run."""
    want = engine.generate(prompts_of([5]), gen_length=8)
    with monkeypatch.context() as patch:

        def full(*args):
            raise torch.OutOfMemoryError("CUDA out of memory")

        patch.setattr(rollout.canvas.Canvas, "_forward", full)
        with pytest.raises(
            SystemExit, match="^a rollout of 3 rows ran out of memory: try 1; lower --batch-size"
        ):
            engine.generate(prompts_of([5]), gen_length=8, num_samples=3)
    assert engine.canvas is None and same_draws(
        engine.generate(prompts_of([5]), gen_length=8), want
    )


@pytest.mark.cuda
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_cuda_graphs_draw_what_eager_forwards_draw(family, cache):
    """bf16: the same tokens, run after run, with other weights too."""
    model = model_of(family, scale=1, dtype=torch.bfloat16).cuda()
    graphs, eager = make_engine(model), make_engine(model)
    eager.use_graphs = False
    for prompts in ([5, 31, 17], [40, 40], [5, 31, 17]):
        options = dict(gen_length=32, block_length=8, denoising_steps=4, num_samples=2, cache=cache)
        got, again, want = (
            e.generate(prompts_of(prompts), **options) for e in (graphs, graphs, eager)
        )
        assert (
            same_draws(got, want, 0)
            and same_draws(got, again, 0)
            and len(graphs.canvas.graphs.graphs) > 0
        )
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
            model.layers[0].state_dict()[
                "attn_out.weight" if family == "llada" else "self_attn.o_proj.weight"
            ].mul_(-1)
        changed = graphs.generate(prompts_of(prompts), **options)
        assert not same_draws(changed, got, 0) and same_draws(
            changed, eager.generate(prompts_of(prompts), **options), 0
        )
