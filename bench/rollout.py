"""Time samplers on a model directory, in one run: ours, lmdeploy, and Fast-dLLM's code from a copy of it, beside a roofline.

    python models/random_init.py --config DIR --tokenizer DIR --out /dev/shm/sdar --device cuda
    python bench/rollout.py --model /dev/shm/sdar --rows 1 16 128 --samplers ours lmdeploy
    python bench/rollout.py --model /dev/shm/llada --rows 1 16 64 --cache none prefix dual --peer FAST_DLLM/llada

One JSON line a measurement and one for each ratio. All samplers get the same weights and prompts. A rate is the tokens of whole
rollouts up to and with the first EOS, prompts not counted, over their seconds, prefill included, after a first rollout that
captures graphs and fills caches of kernels (Fast-dLLM: of one block). Tokens per forward: of one sequence, commits counted.
ms per step: seconds over the forwards that all rows at work share. Peak: what torch allocated at most, weights included.

Roofline of a rollout: least seconds for the forwards that it made, as the sum over them of
    matrices   every distinct product of the model, measured on this device at this number of rows, weights not in cache (q, k
               and v are one product, so are gate and up); the head at the tokens that were still masked
    experts    the greater of the bytes of those that forwards of so many rows hit, counted in a rollout of 16 blocks or less
               without graphs, over the bandwidth and their FLOPs over the peak
    attention  the greater of the bytes of the cache that is read over the bandwidth and 4 H h FLOPs a pair over the peak
with the 4.8 TB/s and 790 TFLOP/s of an H200. Norms, rotation, sampling and launches count nothing. The matrices are cuBLAS's: a
sampler whose own products of few tokens are faster may pass 1.
"""

import gc
import json
import math
import sys
import time
import traceback
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.fast_dllm import FastDLLM
from models.experts import Experts
from rollout import make_engine
from rollout.block import ADAPTIVE

BYTES_PER_S, FLOP_PER_S = 4.8e12, 790e12
# Matrices that multiply the same rows: one product.
TOGETHER = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "up",
    "up_proj": "up",
    "ff_proj": "up",
}


@dataclass
class Args:
    model: str
    """directory in HF layout, or a key of models.MODELS"""
    rows: tuple[int, ...] = (1, 16, 128)
    """sequences decoded together"""
    samplers: tuple[Literal["ours", "lmdeploy"], ...] = ("ours",)
    """in this order; lmdeploy serves SDAR alone"""
    peer: str = ""
    """Fast-dLLM's llada/ or dream/ folder: measured as well, on the weights of ours"""
    cache: tuple[Literal["none", "prefix", "dual"], ...] = ("none",)
    """of bidirectional models"""
    prompt_length: int | None = None
    """tokens; None: 217 for a block-causal model, 256 for a bidirectional one"""
    gen_length: int | None = None
    """tokens; None: 512 and 256"""
    block_length: int | None = None
    """tokens; None: the model's own, 32 for a bidirectional one"""
    denoising_steps: int | None = None
    """per block; None: 16, or as many as a block has tokens"""
    remasking: str = "low_confidence_static"
    """rule of our samplers and of lmdeploy; Fast-dLLM runs its own of as many steps"""
    confidence_threshold: float = 0.9
    samples_per_prompt: int = 8
    temperature: float = 1.0
    graphs: bool = True
    """CUDA graphs of ours (--no-graphs: launch every kernel)"""
    repeats: int = 1
    """timed rollouts of each size; the fastest counts"""
    out: str = ""
    """file to append the JSON lines to"""


class Report:
    """JSON lines; a measurement that fails becomes a line of its own, and the others go on."""

    def __init__(self, args):
        self.args, self.lines = args, []

    def measure(self, function, *args, **facts):
        """function(*args) -> dict of results, which join the facts of the line"""
        free_memory()
        try:
            result = function(*args)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
        self.write(facts | result)
        return result

    def write(self, line):
        line = {"model": Path(self.args.model).name} | line
        self.lines.append(line)
        text = json.dumps(
            {
                key: round(value, 4) if isinstance(value, float) else value
                for key, value in line.items()
            }
        )
        print(text, flush=True)
        if self.args.out:
            with open(self.args.out, "a", encoding="utf-8") as file:
                file.write(text + "\n")


def free_memory():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed(function):
    """-> seconds, value of a function that waits for the device"""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    value = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, value


@cache
def product_s(rows, outputs, inputs, device, dtype):
    """Seconds of x [rows, inputs] times W [outputs, inputs], with as many W in turn as the device's cache cannot hold."""
    copies = (
        max(2, -(-(256 * 2**20) // (outputs * inputs * dtype.itemsize)))
        if device.type == "cuda"
        else 1
    )
    x = torch.randn(rows, inputs, device=device, dtype=dtype)
    weights = [torch.randn(outputs, inputs, device=device, dtype=dtype) for _ in range(copies)]
    run = lambda: [F.linear(x, weight) for weight in weights] and None
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        run = graph.replay
    return min(timed(run)[0] for _ in range(5)) / copies


def products(model):
    """-> {(outputs, inputs) of every product of the blocks: how many}, [(E, numbers of one expert) of each expert layer]"""
    outputs, inputs, experts = Counter(), {}, []
    for name, weight in model.layers.named_parameters():
        stem, _, leaf = name.removesuffix(".weight").rpartition(".")
        if weight.dim() == 2:
            key = stem, TOGETHER.get(leaf, leaf)
            outputs[key] += weight.shape[0]
            inputs[key] = weight.shape[1]
        elif weight.dim() == 3:
            experts.append((len(weight), weight[0].numel()))
    return Counter((outputs[key], inputs[key]) for key in outputs), experts


def denoising_forwards(trace):
    """[N] forwards that revealed tokens; what a block model made beside them are commits."""
    n, starts = trace.settings["block_length"], trace.settings["attention"] == "block-causal"
    first = torch.tensor(
        [len(ids) % n if starts else 0 for ids in trace.prompt_ids], device=trace.step_map.device
    )
    block = (first[:, None] + torch.arange(trace.step_map.shape[1], device=first.device)) // n
    last = torch.full((len(first), int(block.max()) + 1), -1, device=first.device)
    return (last.scatter_reduce(1, block, trace.step_map, "amax") + 1).sum(1)


def forwards_of(trace, slots):
    """Forwards behind a trace of ours, decoded `slots` rows at a time, as means over its rows and blocks.

    -> [(number of such forwards, rows through the blocks, through the head, cached tokens read, pairs of query and key)] and
    the number of forwards without the prefill
    """
    settings, N = trace.settings, len(trace.canvas_length)
    P, n, L = (
        sum(map(len, trace.prompt_ids)) / N,
        settings["block_length"],
        trace.completion_ids.shape[1],
    )
    R = min(slots, N)
    steps, denoising = (
        trace.num_forwards.sum().item() / R,
        denoising_forwards(trace).sum().item() / R,
    )  # that R rows share
    masked = max(
        round((trace.step_map + 1).sum().item() / denoising), 1
    )  # what the head sees at once
    if settings["attention"] == "block-causal":
        canvas = trace.canvas_length.float().mean().item()
        separate, context = steps - denoising, P + canvas / 2
        # The other commits are part of steps of two blocks: one a block, or all steps where the model decides their number.
        blocks = ((P + canvas) // n - P // n) * N / R
        joined = (
            denoising
            if settings["remasking"] in ADAPTIVE and not separate
            else max(blocks - 1 - separate, 0)
        )
        prompts, sizes = (
            sum(map(len, {tuple(ids) for ids in trace.prompt_ids})),
            lambda rows: (R * context, rows * context),
        )
        prefill = (1, prompts, 0, 0, prompts * P / 2)
        step, two = (R * n, masked, *sizes(R * n)), (2 * R * n, masked, *sizes(2 * R * n))
        return [
            prefill,
            (denoising - joined, *step),
            (joined, *two),
            (separate, R * n, 0, *sizes(R * n)),
        ], steps
    blocks, S = L // n, P + L
    whole = round(R * S), masked, R * S, R * S * S
    if settings["cache"] == "none":
        return [(steps, *whole)], steps
    widths = [n if settings["cache"] == "dual" else L - start for start in range(0, L, n)]
    later = [(steps / blocks - 1, R * width, masked, R * S, R * width * S) for width in widths]
    return [(blocks, *whole), *later], steps


class Roofline:
    """Least seconds of forwards of one model, by the formula at the top of this file."""

    def __init__(self, model):
        self.model, weight = model, model.lm_head.weight
        self.head, self.where = tuple(weight.shape), (weight.device, weight.dtype)
        self.products, self.experts = products(model)
        self.hit = {}  # rows of a forward -> distinct experts that a layer sent them to, in the mean
        config = model.config
        heads = getattr(config, "num_attention_heads", None) or config.n_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.n_kv_heads
        head_dim = getattr(config, "head_dim", None) or weight.shape[1] // heads
        layers = len(model.layers)
        self.token_bytes = 2 * layers * kv_heads * head_dim * weight.element_size()
        self.pair_flops = 4 * layers * heads * head_dim

    def count_hits(self, engine, roll):
        """Fill `hit` from roll(), a rollout of the engine, whose graphs are off meanwhile: they would hide the routing."""
        seen = defaultdict(list)

        def count(module, inputs):
            index = inputs[1]
            seen[index.numel() // index.shape[-1]].append(len(index.unique()))

        layers = [module for module in self.model.modules() if isinstance(module, Experts)]
        hooks, graphs = (
            [layer.register_forward_pre_hook(count) for layer in layers],
            engine.use_graphs,
        )
        engine.use_graphs = False
        try:
            roll()
        finally:
            engine.use_graphs = graphs
            for hook in hooks:
                hook.remove()
        self.hit = {rows: sum(numbers) / len(numbers) for rows, numbers in seen.items()}

    def seconds(self, rows, head_rows, cached, pairs):
        """One forward: rows through the blocks, head_rows through the head, cached tokens read, pairs of query and key."""
        total = sum(
            count * product_s(rows, *shape, *self.where) for shape, count in self.products.items()
        )
        total += product_s(head_rows, *self.head, *self.where) if head_rows else 0
        for _, size in self.experts:
            k = self.model.config.num_experts_per_tok
            hit = self.hit[
                min(self.hit, key=lambda other: abs(math.log(other / rows)))
            ]  # batches are filled up to buckets
            total += max(
                hit * size * self.where[1].itemsize / BYTES_PER_S, 2 * rows * k * size / FLOP_PER_S
            )
        return total + max(
            cached * self.token_bytes / BYTES_PER_S, pairs * self.pair_flops / FLOP_PER_S
        )

    def rollout(self, trace, slots):
        """-> least seconds of the forwards that a trace of ours tells of, and how many of them `slots` rows share"""
        work, steps = forwards_of(trace, slots)
        return sum(count * self.seconds(*sizes) for count, *sizes in work), steps


def settings_of(args, model):
    """-> what a rollout of this model takes, and the length of its prompts"""
    is_block_model = model.attention == "block-causal"
    n = args.block_length or (model.block_length if is_block_model else 32)
    settings = {
        "gen_length": args.gen_length or (512 if is_block_model else 256),
        "block_length": n,
        "denoising_steps": args.denoising_steps or min(16, n),
        "remasking": args.remasking,
        "confidence_threshold": args.confidence_threshold,
        "temperature": args.temperature,
    }
    return settings, args.prompt_length or (217 if is_block_model else 256)


def prompts_of(args, mask_token_id, rows, length):
    """-> token ids of the prompts, samples of each"""
    samples = next(
        number for number in range(min(args.samples_per_prompt, rows), 0, -1) if rows % number == 0
    )
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, mask_token_id, (rows // samples, length), generator=generator), samples


def facts_of(seconds, tokens, forwards, first_s=None):
    """seconds: of the timed rollouts; forwards: summed over the sequences, None where the sampler does not say."""
    facts = {"tokens_per_s": tokens / min(seconds), "tokens": tokens, "seconds": min(seconds)}
    facts["tokens_per_forward"] = tokens / forwards if forwards else None
    if first_s:
        facts["first_s"] = first_s
    if torch.cuda.is_available():
        facts["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return facts


def measure_engine(engine, rows, args, settings, prompt_length, mask_token_id, roofline=None):
    """An engine of make_engine -> facts of a rollout of so many rows"""
    prompts, samples = prompts_of(args, mask_token_id, rows, prompt_length)
    roll = lambda seed, **other: engine.generate(
        prompts.tolist(), num_samples=samples, seed=seed, **settings | other
    )
    if roofline and roofline.experts:
        roofline.count_hits(
            engine,
            lambda: roll(0, gen_length=min(settings["gen_length"], 16 * settings["block_length"])),
        )
    first_s, _ = timed(lambda: roll(0))
    seconds, traces = zip(*(timed(lambda: roll(1 + i)) for i in range(args.repeats)), strict=True)  # noqa: B023
    trace = traces[seconds.index(min(seconds))]
    tokens, forwards = int(trace.completion_mask.sum()), trace.num_forwards
    forwards = None if forwards is None or int(forwards.sum()) <= 0 else int(forwards.sum())
    facts = facts_of(seconds, tokens, forwards, first_s)
    if roofline:
        floor, steps = roofline.rollout(trace, rows)
        facts |= {
            "steps": steps,
            "ms_per_step": 1e3 * min(seconds) / steps,
            "roofline_ms_per_step": 1e3 * floor / steps,
        }
        facts |= {"roofline_share": floor / min(seconds)}
        if roofline.hit:
            facts["experts_hit"] = {
                rows: round(number, 1) for rows, number in sorted(roofline.hit.items())
            }
    return facts


def measure_peer(peer, rows, kind, args, settings, prompt_length, model):
    """Fast-dLLM's code -> facts of a rollout of so many rows"""
    prompts, samples = prompts_of(args, model.mask_token_id, rows, prompt_length)
    prompts = prompts.repeat_interleave(samples, 0).to(model.lm_head.weight.device)
    options = [
        settings[name] for name in ("gen_length", "block_length", "denoising_steps", "temperature")
    ]
    torch.manual_seed(0)
    peer.generate(prompts, kind, options[1], *options[1:])
    seconds, results = zip(
        *(timed(lambda: peer.generate(prompts, kind, *options)) for _ in range(args.repeats)),
        strict=True,
    )
    completions, forwards = results[seconds.index(min(seconds))]
    is_eos = torch.isin(
        completions, torch.tensor(model.eos_token_ids, device=completions.device)
    ).long()
    tokens = int((is_eos.cumsum(1) - is_eos == 0).sum())
    return facts_of(seconds, tokens, rows * forwards) | {
        "steps": forwards,
        "ms_per_step": 1e3 * min(seconds) / forwards,
    }


def main(args):
    if args.peer and not (Path(args.peer) / "model").is_dir():
        raise SystemExit(
            f"--peer {args.peer} has no folder `model`: give llada/ or dream/ of a copy of Fast-dLLM"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report, rates, setting = Report(args), {}, None
    report.write(
        {
            "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None,
            "torch": torch.__version__,
        }
    )

    def run(sampler, kind, rows, function, *rest):
        result = report.measure(
            function, *rest, sampler=sampler, rows=rows, **setting | {"cache": kind}
        )
        rates[sampler, kind, rows] = result.get("tokens_per_s")

    if "ours" in args.samplers or args.peer:
        engine = make_engine(args.model, device=device, max_batch_size=max(args.rows))
        model, is_block_model = engine.model, engine.model.attention == "block-causal"
        settings, prompt_length = settings_of(args, model)
        setting, roofline = settings | {"prompt_length": prompt_length}, Roofline(model)
        kinds = ("none",) if is_block_model else args.cache
        engine.use_graphs &= args.graphs
        for kind in kinds:
            for rows in args.rows if "ours" in args.samplers else ():
                if hasattr(engine, "release"):
                    engine.release()
                options = settings | {"cache": kind}
                run(
                    "ours",
                    kind,
                    rows,
                    measure_engine,
                    engine,
                    rows,
                    args,
                    options,
                    prompt_length,
                    model.mask_token_id,
                    roofline,
                )
        if hasattr(engine, "release"):
            engine.release()
        del engine, roofline
        if args.peer:
            peer = FastDLLM(args.peer, model)
            for kind in kinds:
                for rows in args.rows:
                    run(
                        "Fast-dLLM",
                        kind,
                        rows,
                        measure_peer,
                        peer,
                        rows,
                        kind,
                        args,
                        settings,
                        prompt_length,
                        model,
                    )
            del peer
        del model
    if "lmdeploy" in args.samplers:
        from models import meta_model

        model = meta_model(args.model)  # without weights: lmdeploy's are the only ones
        settings, prompt_length = settings_of(args, model)
        setting, mask = settings | {"prompt_length": prompt_length}, model.mask_token_id
        free_memory()
        try:
            engine = make_engine(args.model, "lmdeploy", device, max_batch_size=max(args.rows))
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            report.write({"sampler": "lmdeploy", "error": f"{type(error).__name__}: {error}"[:300]})
        else:
            for rows in args.rows:
                run(
                    "lmdeploy",
                    "none",
                    rows,
                    measure_engine,
                    engine,
                    rows,
                    args,
                    settings,
                    prompt_length,
                    mask,
                )
    for (sampler, kind, rows), rate in rates.items():
        if sampler != "ours" and rate and (ours := rates.get(("ours", kind, rows))):
            report.write(
                {
                    "ratio": f"ours / {sampler}",
                    "cache": kind,
                    "rows": rows,
                    "tokens_per_s": ours / rate,
                }
            )
    if any("error" in line for line in report.lines):
        raise SystemExit("a measurement failed, see above")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
