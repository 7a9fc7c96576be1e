"""Time the hand-over of weights to a sampler, as the scripts do it after every optimizer step.

    python bench/update.py --model /dev/shm/sdar                                      # one GPU
    torchrun --standalone --nproc-per-node 2 bench/update.py --model /dev/shm/sdar    # a sharded learner, a sampler a rank
    python bench/update.py --model /dev/shm/sdar --backend lmdeploy

One JSON line a kind of learner: bf16 (a copy of the model), fp32 (the masters of full fine-tuning), lora-merged (bf16 base and
fp32 adapters, added up for the sampler), lora-adapters (the sampler has adapters of its own, which are all that it gets).
seconds: median of five hand-overs after the first, until every rank's device is done; gb: what the sampler gets.
"""

import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algos.sft import parallelize, setup_distributed
from models import add_lora, export_adapter, export_weights, load_weights, meta_model
from rollout import make_engine

Kind = Literal["bf16", "fp32", "lora-merged", "lora-adapters"]


@dataclass
class Args:
    model: str
    """directory in HF layout, or a key of models.MODELS"""
    backend: str = "auto"
    """of rollout.make_engine"""
    kinds: tuple[Kind, ...] = ("bf16", "fp32", "lora-merged", "lora-adapters")
    """in this order: adapters stay in the sampler, so lora-adapters must be the last"""
    lora_rank: int = 128
    out: str = ""
    """file to append the JSON lines to"""


def learner(kind, args, device):
    """A sharded model as a script has it while it trains."""
    model = meta_model(args.model, torch.float32 if kind == "fp32" else torch.bfloat16)
    if kind.startswith("lora"):
        add_lora(model, args.lora_rank, args.lora_rank // 2)
    setting = SimpleNamespace(activation_checkpointing=False, attention="auto", compile=False)
    return load_weights(parallelize(model, setting), device)


def measure(kind, engine, args, device):
    """-> facts of the hand-over from a learner of this kind"""
    model = learner(kind, args, device)
    if kind == "lora-adapters":
        add_lora(engine.model, args.lora_rank, args.lora_rank // 2, dtype=engine.dtype)
    export, nbytes, seconds = export_adapter if kind == "lora-adapters" else export_weights, 0, []

    def counted():
        nonlocal nbytes
        for name, value in export(model):
            nbytes += value.numel() * (
                engine.dtype.itemsize if value.is_floating_point() else value.element_size()
            )
            yield name, value

    for _ in range(6):
        nbytes = 0
        dist.barrier()
        start = time.perf_counter()
        engine.load_weights(counted())
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds[1:]), "first_s": seconds[0], "gb": nbytes / 1e9}


def main(args):
    rank, world_size, device = setup_distributed()
    engine = make_engine(args.model, args.backend, device)
    for kind in args.kinds:
        gc.collect()
        facts = measure(kind, engine, args, device)
        line = {
            "model": Path(args.model).name,
            "backend": args.backend,
            "ranks": world_size,
            "learner": kind,
        } | facts
        text = json.dumps(
            {
                key: round(value, 4) if isinstance(value, float) else value
                for key, value in line.items()
            }
        )
        if rank == 0:
            print(text, flush=True)
            if args.out:
                with open(args.out, "a", encoding="utf-8") as file:
                    file.write(text + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
