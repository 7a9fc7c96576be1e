"""Time the cached block engine on a model directory: tokens/s, milliseconds a step, against the floor of the machine.

    python models/random_init.py --config DIR --tokenizer DIR --out /dev/shm/sdar --device cuda
    python bench/rollout.py --model /dev/shm/sdar --rows 16 64 128
    python bench/rollout.py --model /dev/shm/sdar --rows 16 64 128 --no-graphs

One JSON line a batch. Rates are over generated tokens of whole rollouts, prefill included, after one rollout that captures the
graphs (first_s); ends of text are ignored, so that the work does not depend on the weights. floor_ms, for dense models: the
bytes of weights and mean cache over the 4.8 TB/s of an H200, or 2 FLOP a weight and token over its 790 TFLOP/s if that is more.

Measured on one H200 (torch 2.11, bf16, prompt 217, 4 static steps), tokens/s and milliseconds a step:
                                              16 rows         64 rows         128 rows
    SDAR-8B    graphs, gen_length 256         1550   8.3      4078  12.6      5026  20.4
               graphs, gen_length 128 *       1456   8.8      3785  13.6      4665  22.1
               --no-graphs, gen_length 16 *    567  23.3      2160  24.5      3799  27.8
    SDAR-1.7B  graphs, gen_length 128 *       2754   4.7      7223   7.1      9631  10.7
               --no-graphs, gen_length 24 *    739  17.7      2866  18.3      6008  17.4
* before the fused sampler of kernels/sampling_triton.py
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rollout import make_engine

BYTES_PER_S, FLOP_PER_S = 4.8e12, 790e12


@dataclass
class Args:
    model: str
    """directory in HF layout, of a block-causal model"""
    rows: tuple[int, ...] = (16, 64, 128)
    """samples decoded together"""
    graphs: bool = True
    """CUDA graphs (--no-graphs: launch every kernel)"""
    prompt_length: int = 217
    gen_length: int = 256
    denoising_steps: int = 4
    remasking: Literal["low_confidence_static", "low_confidence_dynamic", "random"] = "low_confidence_static"
    confidence_threshold: float = 0.9
    samples_per_prompt: int = 8
    temperature: float = 1.0
    repeats: int = 1
    """timed rollouts of each size"""
    out: str = ""
    """file to append the JSON lines to"""


def floor_ms(model, rows, args):
    """-> least milliseconds of a step by the formula above, or None for a mixture of experts"""
    config, weights = model.config, [p for name, p in model.named_parameters() if "embed" not in name]
    if getattr(config, "num_experts", 0):
        return None
    size, count = weights[0].element_size(), sum(weight.numel() for weight in weights)
    seen = args.prompt_length + args.gen_length / 2
    cache = rows * seen * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size
    return 1e3 * max((count * size + cache) / BYTES_PER_S, 2 * count * rows * model.block_length / FLOP_PER_S)


def measure(engine, rows, args):
    """-> facts of rollouts of so many rows"""
    is_cuda, model = engine.device.type == "cuda", engine.model
    generator = torch.Generator().manual_seed(0)
    num_samples = min(args.samples_per_prompt, rows)
    prompts = torch.randint(0, model.mask_token_id, (rows // num_samples, args.prompt_length), generator=generator).tolist()
    options = {
        name: getattr(args, name)
        for name in ("gen_length", "denoising_steps", "remasking", "confidence_threshold", "temperature")
    }
    seconds = []
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    for seed in range(args.repeats + 1):
        start = time.perf_counter()
        trace = engine.generate(prompts, num_samples=num_samples, seed=seed, stop_at_eos=False, **options)
        tokens = int(trace.canvas_length.sum())  # waits for the device
        seconds.append(time.perf_counter() - start)
    warm, forwards = min(seconds[1:]), int(trace.num_forwards.max())
    return {
        "rows": len(trace.canvas_length),
        "tokens_per_s": round(tokens / warm, 1),
        "seconds": round(warm, 3),
        "first_s": round(seconds[0], 2),
        "step_ms": round(1e3 * warm / forwards, 3),
        "floor_ms": (floor := floor_ms(model, rows, args)) and round(floor, 3),
        "steps": forwards,
        "graphs": len(engine.graphs.graphs) if engine.graphs else 0,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if is_cuda else None,
    }


def main(args):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = make_engine(args.model, "block", device, max_batch_size=max(args.rows))
    engine.use_graphs &= args.graphs
    machine = {"gpu": torch.cuda.get_device_name() if device == "cuda" else None, "torch": torch.__version__}
    setting = {name: getattr(args, name) for name in ("prompt_length", "gen_length", "denoising_steps", "remasking")}
    for rows in args.rows:
        engine.release()
        line = json.dumps({"model": Path(args.model).name} | machine | setting | measure(engine, rows, args))
        print(line, flush=True)
        if args.out:
            with open(args.out, "a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
