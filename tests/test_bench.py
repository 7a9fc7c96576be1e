"""The accounting of bench/rollout.py, against what the models really compute."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.experts import routing
from bench.fast_dllm import edited
from bench.rollout import (
    Args,
    Roofline,
    denoising_forwards,
    facts_of,
    forwards_of,
    main,
    measure_engine,
    measure_peer,
    products,
    prompts_of,
)
from models import load_model
from models.experts import Experts
from rollout import make_engine

ROOT = Path(__file__).parents[1]
FAMILIES = ("tiny-sdar", "tiny-llada", "tiny-dream", "tiny-sdar-moe", "tiny-llada2")


def engine_without_end(name, rows=64):
    """A sampler whose completions take their whole length."""
    engine = make_engine(name, max_batch_size=rows)
    engine.model.eos_token_ids = []
    return engine


class Watch:
    """Counts the forwards of a model, and the rows that go through its blocks and its head."""

    def __init__(self, model):
        self.forwards = self.rows = self.head_rows = 0
        hidden, head = model.hidden, model.head

        def watched_hidden(input_ids, *args):
            self.forwards, self.rows = self.forwards + 1, self.rows + input_ids.numel()
            return hidden(input_ids, *args)

        def watched_head(x):
            self.head_rows += x.shape[:-1].numel()
            return head(x)

        model.hidden, model.head = watched_hidden, watched_head


@pytest.mark.parametrize("name", FAMILIES)
def test_products_hold_every_number_of_the_blocks_once(name):
    model = load_model(name)
    shapes, experts = products(model)
    matrices = sum(value.numel() for value in model.layers.parameters() if value.dim() > 1)
    counted = sum(count * outputs * inputs for (outputs, inputs), count in shapes.items())
    assert counted + sum(number * size for number, size in experts) == matrices
    assert bool(experts) == ("moe" in name or "llada2" in name)


@pytest.mark.parametrize(
    "name, cache",
    [("tiny-llada", kind) for kind in ("none", "prefix", "dual")] + [("tiny-sdar", "none")],
)
def test_forwards_of_a_trace_are_those_that_were_made(name, cache):
    """Rows through the blocks and the head, summed over the forwards, equal the sampler's own; so does their number."""
    engine = engine_without_end(name)
    watch = Watch(engine.model)
    prompts = torch.randint(0, 250, (3, 8), generator=torch.Generator().manual_seed(0)).tolist()
    settings = {
        "gen_length": 16,
        "block_length": 4 if name == "tiny-sdar" else 8,
        "denoising_steps": 4,
        "cache": cache,
    }
    trace = engine.generate(prompts, num_samples=2, remasking="low_confidence_static", **settings)
    work, steps = forwards_of(trace, 64)
    assert sum(number for number, *_ in work) == watch.forwards
    assert sum(number * rows for number, rows, *_ in work) == watch.rows
    assert steps == watch.forwards - (trace.settings["attention"] == "block-causal")  # its prefill
    needed = sum(number * head_rows for number, _, head_rows, *_ in work)
    # The head of the block sampler sees whole blocks and commits as well: a roofline counts only what is needed.
    assert needed == watch.head_rows if name == "tiny-llada" else needed < watch.head_rows


@pytest.mark.parametrize("remasking", ["low_confidence_static", "low_confidence_dynamic"])
def test_forwards_with_joined_commits_are_of_two_blocks(remasking):
    """Where the block sampler joins commits with steps, as on CUDA: at the first step of a block, or at all of them."""
    engine = engine_without_end("tiny-sdar")
    engine.joins, engine.ridge, watch = True, 10**6, Watch(engine.model)
    trace = engine.generate(
        [[1] * 8, [2] * 8],
        gen_length=16,
        denoising_steps=4,
        remasking=remasking,
        confidence_threshold=1.0,
    )
    (_, prefill, *_), *work = forwards_of(trace, 64)[0]
    assert prefill == 16 and prefill + sum(number * rows for number, rows, *_ in work) == watch.rows


def test_denoising_forwards_leave_the_commits_out():
    engine = engine_without_end("tiny-sdar")
    prompts = [[1] * length for length in (3, 4, 6, 8)]
    trace = engine.generate(
        prompts, gen_length=8, denoising_steps=2, remasking="low_confidence_static"
    )
    blocks = [
        len({(len(p) + i) // 4 for i in range(int(length))})
        for p, length in zip(prompts, trace.canvas_length, strict=True)
    ]
    assert (trace.num_forwards - denoising_forwards(trace)).tolist() == [
        number - 1 for number in blocks
    ]


def test_roofline_adds_products_experts_and_cache(monkeypatch):
    import bench.rollout as bench

    monkeypatch.setattr(
        bench,
        "product_s",
        lambda rows, outputs, inputs, device, dtype: rows * outputs * inputs * 1e-15,
    )
    dense, sparse = (Roofline(load_model(name)) for name in ("tiny-sdar", "tiny-sdar-moe"))
    matrices = sum(value.numel() for value in dense.model.layers.parameters() if value.dim() > 1)
    assert dense.seconds(8, 0, 0, 0) == pytest.approx(8 * matrices * 1e-15)
    assert dense.seconds(8, 3, 0, 0) - dense.seconds(8, 0, 0, 0) == pytest.approx(
        3 * 264 * 96 * 1e-15
    )
    cache = (
        1000 * 4 * 2 * 2 * 32 * 4 / bench.BYTES_PER_S
    )  # layers, keys and values, heads, head size, bytes
    assert dense.seconds(8, 0, 1000, 0) - dense.seconds(8, 0, 0, 0) == pytest.approx(cache)
    sparse.hit = {1: 2.0, 10**9: 4.0}
    one, many = (sparse.seconds(rows, 0, 0, 0) for rows in (1, 10**9))
    plain = (
        sum(count * outputs * inputs for (outputs, inputs), count in sparse.products.items())
        * 1e-15
    )
    read = sum(
        2 * size * 4 / bench.BYTES_PER_S for _, size in sparse.experts
    )  # one row hits its two experts
    assert one - plain == pytest.approx(read)
    work = sum(2 * 10**9 * 2 * size / bench.FLOP_PER_S for _, size in sparse.experts)
    assert many - 10**9 * plain == pytest.approx(work)
    sparse.hit = {1: 2.0, 64: 4.0}  # numbers that were not counted take the nearest ratio's
    assert [sparse.seconds(rows, 0, 0, 0) - rows * plain for rows in (2, 10)] == [
        pytest.approx(read),
        pytest.approx(2 * read),
    ]


def test_roofline_counts_the_experts_that_are_hit(monkeypatch):
    engine, args = (
        make_engine("tiny-sdar-moe", max_batch_size=4),
        Args("tiny-sdar-moe", samples_per_prompt=2),
    )
    roofline, given, forward = Roofline(engine.model), [], Experts.forward
    settings = {"gen_length": 16, "block_length": 4, "denoising_steps": 2, "temperature": 1.0}
    settings |= {"remasking": "low_confidence_static", "confidence_threshold": 0.9}
    note = lambda layer, x, index, *rest: given.append(index) or forward(layer, x, index, *rest)
    monkeypatch.setattr(Experts, "forward", note)
    engine.use_graphs = True  # a graph would hide the routing, and the CPU has none
    roofline.count_hits(
        engine,
        lambda: engine.generate([[5, 6, 7, 8], [9, 10, 11, 12]], num_samples=2, seed=0, **settings),
    )
    assert engine.use_graphs
    engine.use_graphs = False
    assert {8, 16} <= set(roofline.hit) and not any(
        module._forward_pre_hooks for module in engine.model.modules()
    )
    for (
        rows,
        number,
    ) in (
        roofline.hit.items()
    ):  # the prefill of two prompts, four rows of blocks and, at the end, fewer
        hit = [
            len(set(index.flatten().tolist())) for index in given if index[..., 0].numel() == rows
        ]
        assert number == pytest.approx(sum(hit) / len(hit)) and 2 <= number <= 8
    facts = measure_engine(engine, 4, args, settings, 4, engine.model.mask_token_id, roofline)
    assert 16 in facts["experts_hit"] and 0 < facts["roofline_share"]


@pytest.mark.parametrize("tokens, hit", [(4, 10), (64, 24), (512, 100), (512, None)])
def test_routing_hits_as_many_experts_as_asked(tokens, hit):
    index = routing(tokens, 128, 8, hit)
    number, load = len(index.unique()), index.flatten().bincount()
    assert index.shape == (tokens, 8) and all(len(row) == 8 for row in map(set, index.tolist()))
    assert number == 128 if hit is None else abs(number - hit) <= 1 + hit // 20
    assert load.max() < 2 * load.float().mean() if hit is None else load.max() > tokens * 0.9


def test_rate_is_tokens_up_to_the_stop_over_the_fastest_rollout():
    facts = facts_of([2.0, 1.0, 4.0], 10, 40)
    assert (
        facts["tokens_per_s"] == 10
        and facts["tokens_per_forward"] == 0.25
        and facts["seconds"] == 1.0
    )


def test_tokens_behind_the_stop_and_prompts_are_not_counted():
    """Ours and a peer: tokens up to and with the first EOS of each row; a token a forward is that of one sequence."""
    engine, eos = make_engine("tiny-llada", max_batch_size=8), list(range(0, 250, 3))
    engine.model.eos_token_ids = eos
    settings = {"gen_length": 16, "block_length": 8, "denoising_steps": 2, "temperature": 1.0}
    settings |= {"remasking": "low_confidence_static", "confidence_threshold": 0.9}
    args = Args("tiny-llada", samples_per_prompt=2)
    prompts, samples = prompts_of(args, engine.model.mask_token_id, 8, 5)
    assert prompts.shape == (4, 5) and samples == 2
    trace = engine.generate(prompts.tolist(), num_samples=2, seed=1, **settings)

    def counted(rows):
        lengths = [
            next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
            for row in rows.tolist()
        ]
        assert min(lengths) < 16
        return sum(lengths)

    facts = measure_engine(engine, 8, args, settings, 5, engine.model.mask_token_id)
    assert facts["tokens"] == counted(trace.completion_ids) < trace.canvas_length.sum()
    assert facts["tokens_per_forward"] == facts["tokens"] / int(trace.num_forwards.sum())
    assert facts["tokens_per_s"] == facts["tokens"] / facts["seconds"]

    completions = torch.randint(0, 250, (8, 16), generator=torch.Generator().manual_seed(0))
    peer = SimpleNamespace(generate=lambda prompts, kind, *options: (completions, 4))
    facts = measure_peer(peer, 8, "dual", args, settings, 5, engine.model)
    assert facts["tokens"] == counted(completions) and facts["tokens_per_forward"] == facts[
        "tokens"
    ] / (8 * 4)
    assert facts["steps"] == 4 and facts["ms_per_step"] == 1e3 * facts["seconds"] / 4


def test_peer_of_another_version_is_refused(tmp_path):
    file = tmp_path / "generate.py"
    file.write_text("x = 1\n")
    assert edited(file, {"x = 1": "x = 2"}).x == 2
    with pytest.raises(RuntimeError, match="another version"):
        edited(file, {"x = 3": "x = 2"})


def test_a_folder_that_is_no_peer_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match="^--peer .* has no folder `model`: give llada/ or dream/"):
        main(Args("tiny-llada", peer=str(tmp_path)))


def test_bench_runs_on_tiny_models(tmp_path):
    """The command line: a line for the machine and for every measurement; lmdeploy without a GPU is one line of error."""
    for model, flags in (
        ("tiny-sdar", ["--samplers", "ours", "lmdeploy"]),
        ("tiny-llada", ["--cache", "none", "dual"]),
    ):
        out = tmp_path / f"{model}.jsonl"
        command = f"bench/rollout.py --model {model} --rows 1 2 --gen-length 8 --block-length 4 --prompt-length 5 --out {out}"
        done = subprocess.run(
            [sys.executable, *command.split(), *flags],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        ours = [line for line in lines if line.get("sampler") == "ours"]
        assert len(ours) == (2 if model == "tiny-sdar" else 4), done.stderr[-2000:]
        for line in ours:
            assert line["tokens"] > 0 and line["tokens_per_s"] > 0 and 0 < line["roofline_share"], (
                line
            )
        failed = [line for line in lines if "error" in line]
        assert [line["sampler"] for line in failed] == ["lmdeploy"] * (
            model == "tiny-sdar"
        ) and bool(failed) == bool(done.returncode)
