"""Time one model directory at its real size: loading, a forward pass, one training step, and the official LLaDA code beside it.

    python models/random_init.py --config DIR --out /dev/shm/llada --device cuda
    python bench/step.py --model /dev/shm/llada --lora-rank 128 --rows 16 --micro-batch-size 8 --compile --peer PEER_DIR
    torchrun --nproc-per-node 8 bench/step.py --model DIR --cold --load-only          # host memory of a sharded load

Ours is what algos/sft.py runs: its `parallelize`, add_lora, load_weights, model.logps, clipping and AdamW. Every measurement is
one JSON line. Rates are over input tokens (rows x length), medians of synchronised steps; memory is torch's peak allocation.

FLOPs are those of the mathematics: no recomputation, no masked attention scores. Over the matrices M of blocks and head,
    forward  = sum over M of 2 |M| n + sum over layers of 4 W A
    backward = sum over M of 2 |M| n (1 + t) + sum over layers of 8 W A
n: rows that M multiplies (scored tokens for the head, tokens x k / E for stacked experts; a block model reads [noisy | clean],
two tokens for one); t = 1 where M is trained (adapters), 0 where it is frozen; W: heads x head size; A: pairs that see each
other. A LoRA step is thus close to 4 |base| + 6 |adapters| a token. The share is FLOP/s over that of an 8192^3 bf16 product.
"""

import gc
import json
import os
import statistics
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algos.sft import parallelize, setup_distributed
from models import add_lora, load_weights, meta_model
from models.names import resolve
from models.tensors import read_json, tensor_files

# The projection behind attention, by family: it has heads x head size inputs.
ATTENTION_OUTPUT = ("o_proj", "attn_out", "dense")


@dataclass
class Args:
    model: str
    """key of models.MODELS, or a directory in HF layout"""
    lora_rank: int = 128
    """0: full fine-tuning"""
    lora_alpha: int = 64
    """adapters are scaled by lora_alpha / lora_rank"""
    rows: int = 16
    """sequences per optimizer step and rank"""
    length: int = 512
    """tokens per sequence"""
    micro_batch_size: int = 8
    """sequences per forward"""
    attention: Literal["auto", "sdpa", "flex", "varlen", "flash-attn"] = "auto"
    """backend of models/attention.py"""
    compile: bool = False
    """torch.compile every block"""
    activation_checkpointing: bool = False
    """recompute every block in the backward pass"""
    steps: int = 5
    """timed repetitions, after two to warm up"""
    cold: bool = False
    """load once more before, with the files dropped from the page cache (not on tmpfs)"""
    load_only: bool = False
    """measure loading alone; with torchrun the host memory of every rank"""
    peer: str = ""
    """directory with the official modeling_llada.py and configuration_llada.py, measured on the same weights and batch"""
    peer_micro_batch_size: int = 0
    """sequences per forward of the official code; 0: all rows at once, its fastest"""
    out: str = ""
    """file to append the JSON lines to"""


class Report:
    """JSON lines on rank 0; a measurement that fails becomes a line of its own and the others go on."""

    def __init__(self, args):
        self.args, self.lines = args, []

    def measure(self, what, function, *args, **facts):
        """function(*args) -> dict, which it also returns"""
        reset_memory()
        before = (
            {"allocated_before_gib": gib(torch.cuda.memory_allocated())}
            if torch.cuda.is_available()
            else {}
        )
        try:
            result = function(*args)
        except Exception as error:  # out of memory, mostly: the rest of the run is worth having
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"[:300]}
        self.write({"what": what, "model": Path(self.args.model).name} | facts | before | result)
        return result

    def write(self, line):
        line = {
            key: round(value, 4) if isinstance(value, float) else value
            for key, value in line.items()
        }
        self.lines.append(line)
        if dist.get_rank() == 0:
            print(json.dumps(line), flush=True)
            if self.args.out:
                with open(self.args.out, "a") as file:
                    file.write(json.dumps(line) + "\n")


def gib(nbytes):
    return round(nbytes / 2**30, 2)


def reset_memory():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(function, steps):
    """-> median seconds of `steps` calls after two; {first value, first seconds, range, peak GPU memory of the timed calls}"""
    seconds, values = [], []
    for i in range(steps + 2):
        if i == 2 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        start = time.perf_counter()
        values.append(function())
        synchronize()
        seconds.append(time.perf_counter() - start)
    warm = seconds[2:]
    facts = {
        "first_value": values[0],
        "first_s": round(seconds[0], 2),
        "range_s": [round(min(warm), 4), round(max(warm), 4)],
    }
    if torch.cuda.is_available():
        facts["peak_gib"], facts["reserved_gib"] = (
            gib(torch.cuda.max_memory_allocated()),
            gib(torch.cuda.max_memory_reserved()),
        )
    return statistics.median(warm), facts


def matmul_rate(device):
    """-> {"tflops"} of a bf16 product on random data"""
    n = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds, _ = timed(lambda: [a @ b for _ in range(20)] and None, 3)
    return {"n": n, "tflops": 2 * n**3 * 20 / seconds / 1e12}


def flops(model, tokens, pairs, scored, backward):
    """The formula above for `tokens` that go through the blocks, `scored` of them through the head, and `pairs` that see each
    other. -> FLOPs"""
    head = model.lm_head.weight
    looked_up = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    } - {id(head)}
    total = 0
    for name, weight in model.named_parameters():
        if weight.dim() < 2 or id(weight) in looked_up:
            continue
        share = model.config.num_experts_per_tok / len(weight) if weight.dim() == 3 else 1
        n = scored if weight is head else tokens * share
        total += 2 * weight.numel() * n * (1 + backward * (1 + weight.requires_grad))
        layer = name.removesuffix(".weight").removesuffix(".base_layer").rsplit(".", 1)[-1]
        total += (
            4 * weight.shape[1] * pairs * (1 + 2 * backward) if layer in ATTENTION_OUTPUT else 0
        )
    return total


def full_rows(model, rows, length):
    """-> tokens and pairs of one pass over rows x length tokens; the two copies of a block model: T (T + block) pairs a row"""
    is_block_model = model.attention == "block-causal"
    return rows * length * (1 + is_block_model), rows * length * (
        length + model.block_length * is_block_model
    )


@dataclass
class Batch:
    """Random tokens, about half of them masked and scored."""

    input_ids: torch.Tensor  # [B, T], below the mask token
    noisy_ids: torch.Tensor  # [B, T]
    masked: torch.Tensor  # [B, T] bool
    valid: torch.Tensor  # [B, T] bool, all True: rows of one length, as a script passes them

    @classmethod
    def draw(cls, args, mask_token_id, device):
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = args.rows, args.length
        ids = torch.randint(0, mask_token_id, shape, generator=generator).to(device)
        masked = (torch.rand(shape, generator=generator) < 0.5).to(device)
        return cls(ids, torch.where(masked, mask_token_id, ids), masked, torch.ones_like(masked))


def train_step(micro_loss, params, optimizer, args, micro_batch_size):
    """micro_loss(rows, is_last) -> summed cross-entropy of a slice of rows. -> loss of the step, as a number"""
    loss = 0.0
    for i in range(0, args.rows, micro_batch_size):
        share = micro_loss(slice(i, i + micro_batch_size), i + micro_batch_size >= args.rows)
        share.backward()
        loss += share.detach()
    norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()  # a script looks at both
    return loss.item()


class HostMemory(threading.Thread):
    """Watches this process: peak private memory (RssAnon) while open. File pages that ranks share are not in it."""

    def __init__(self):
        super().__init__(daemon=True)
        self.peak, self.is_open = 0, True

    def run(self):
        while self.is_open:
            self.peak = max(self.peak, self.read()["RssAnon"])
            time.sleep(0.01)

    @staticmethod
    def read():
        fields = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        return {
            name[:-1]: int(rest[0]) * 1024
            for name, *rest in fields
            if name in ("RssAnon:", "RssFile:", "VmHWM:")
        }

    def __enter__(self):
        self.before = self.read()["RssAnon"]
        self.start()
        return self

    def __exit__(self, *_):
        self.is_open = False
        self.join()


def build(args, device):
    """A model for training, as a script makes it: on meta, adapters, FSDP2, then the weights. -> model, facts of the load"""
    dist.barrier()
    start = time.perf_counter()
    model = meta_model(
        args.model, torch.bfloat16 if args.lora_rank and device.type == "cuda" else torch.float32
    )
    if args.lora_rank:
        add_lora(model, args.lora_rank, args.lora_alpha)
    model = parallelize(model, args)
    built = time.perf_counter()
    with HostMemory() as host:
        load_weights(model, device)
        synchronize()
    seconds = time.perf_counter() - built
    nbytes = sum(path.stat().st_size for path in set(tensor_files(Path(args.model)).values()))
    now, ranks = host.read(), [None] * dist.get_world_size()
    memory = {
        "anon_before": host.before,
        "anon_peak": host.peak,
        "anon": now["RssAnon"],
        "file": now["RssFile"],
    }
    memory = {f"{key}_gib": gib(value) for key, value in (memory | {"hwm": now["VmHWM"]}).items()}
    dist.all_gather_object(ranks, memory | {"seconds": seconds})
    seconds = max(rank["seconds"] for rank in ranks)
    facts = {
        "seconds": seconds,
        "before_weights_s": round(built - start, 2),
        "file_gb": nbytes / 1e9,
        "gb_per_s": nbytes / 1e9 / seconds,
        "all_ranks_anon_peak_gib": round(sum(rank["anon_peak_gib"] for rank in ranks), 2),
        "least_and_most_of_a_rank": {
            key: [pick(rank[key] for rank in ranks) for pick in (min, max)] for key in ranks[0]
        },
    }
    if device.type == "cuda":
        facts["peak_gib"] = gib(torch.cuda.max_memory_allocated())
    return model, facts


def forget_files(directory):
    """Drop the files from the page cache, so that the next read comes from the disk; no effect on tmpfs."""
    for path in set(tensor_files(directory).values()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def rates(seconds, work, args, matmul):
    """-> what a reader compares: seconds, tokens/s of all ranks, TFLOP/s of one and its share of the measured product"""
    tokens = args.rows * args.length * dist.get_world_size()
    tflops = work / seconds / 1e12
    return {
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "tflops": tflops,
        "share_of_matmul": tflops / matmul,
    }


def forward(model, batch, args, matmul):
    """Log-probabilities of every token, without gradient, in micro-batches."""

    def run():
        with torch.no_grad():
            for i in range(0, args.rows, args.micro_batch_size):
                rows = slice(i, i + args.micro_batch_size)
                logps = model.logps(
                    batch.input_ids[rows],
                    batch.noisy_ids[rows],
                    batch.valid[rows],
                    batch.valid[rows],
                )
        return logps.mean().item()

    seconds, facts = timed(run, args.steps)
    return (
        rates(
            seconds,
            flops(model, *full_rows(model, args.rows, args.length), args.rows * args.length, False),
            args,
            matmul,
        )
        | facts
    )


def our_step(model, batch, args, matmul):
    """algos/sft.py's update on masked cross-entropy."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-5, weight_decay=0.0, fused=params[0].is_cuda)
    scored = batch.masked.sum()

    def micro_loss(rows, is_last):
        model.set_requires_gradient_sync(is_last)
        logps = model.logps(
            batch.input_ids[rows], batch.noisy_ids[rows], batch.masked[rows], batch.valid[rows]
        )
        return -logps.sum() / scored

    seconds, facts = timed(
        lambda: train_step(micro_loss, params, optimizer, args, args.micro_batch_size), args.steps
    )
    work = flops(model, *full_rows(model, args.rows, args.length), scored.item(), True)
    return rates(seconds, work, args, matmul) | facts


def official_step(args, device, adapters, logits_of):
    """The same update by the official code with peft.

    adapters: "fp32" under autocast, as its trainers run it, or "bf16" like the base. logits_of: cross-entropy on the "masked"
    rows (ML-GSAI/LLaDA, GUIDELINES.md) or on "all" of [B, T, V].
    """
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    folder, directory = Path(args.peer).resolve(), Path(args.model)
    sys.path.insert(0, str(folder.parent))
    code = import_module(f"{folder.name}.modeling_llada")
    raw = read_json(directory / "config.json")
    targets = meta_model(args.model).lora_targets
    # As in the real config.json; the code's own default is dropout.
    raw |= {"attention_dropout": 0.0, "embedding_dropout": 0.0, "residual_dropout": 0.0}
    model = code.LLaDAModelLM(
        code.LLaDAConfig(**raw | {"flash_attention": False, "init_device": "meta"})
    )
    for path in sorted(set(tensor_files(directory).values())):
        weights = {name: value.bfloat16() for name, value in load_file(path, str(device)).items()}
        model.load_state_dict(weights, strict=False, assign=True)
    if missing := [name for name, p in model.named_parameters() if p.is_meta]:
        raise RuntimeError(f"no weights for {missing[:5]}")
    torch.backends.cuda.enable_mem_efficient_sdp(
        True
    )  # which building it switches off for the whole process
    head = ["model.transformer.ff_out"]  # bears the name of a block's layer
    lora = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules=list(targets),
        exclude_modules=head,
        lora_dropout=0.0,
    )
    model = get_peft_model(model, lora, autocast_adapter_dtype=adapters == "fp32").train()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-5, weight_decay=0.0, fused=device.type == "cuda")
    batch = Batch.draw(args, raw["mask_token_id"], device)
    scored = batch.masked.sum()

    def micro_loss(rows, is_last):
        ids, masked = batch.input_ids[rows], batch.masked[rows]
        with torch.autocast(device.type, torch.bfloat16, enabled=adapters == "fp32"):
            logits = model(batch.noisy_ids[rows], use_cache=False, return_dict=True).logits
            if logits_of == "masked":
                loss = F.cross_entropy(logits[masked], ids[masked], reduction="none")
            else:
                loss = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none") * masked
        return loss.float().sum() / scored

    size = args.peer_micro_batch_size or args.rows
    seconds, facts = timed(
        lambda: train_step(micro_loss, params, optimizer, args, size), args.steps
    )
    return {
        "seconds": seconds,
        "tokens_per_s": args.rows * args.length / seconds,
        "micro_batch_size": size,
    } | facts


def main(args):
    rank, world_size, device = setup_distributed()
    args.model = str(resolve(args.model))
    report = Report(args)
    setting = {
        key: getattr(args, key) for key in ("lora_rank", "rows", "length", "attention", "compile")
    }
    setting |= {"activation_checkpointing": args.activation_checkpointing}
    if device.type == "cuda":
        torch.zeros(1, device=device)
        report.write(
            {
                "what": "machine",
                "gpu": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "ranks": world_size,
            }
        )
    official = []
    if not args.load_only:
        matmul = report.measure("matmul", matmul_rate, device)["tflops"]
    if args.peer and not args.load_only:
        for adapters, logits_of in (("fp32", "masked"), ("fp32", "all"), ("bf16", "masked")):
            facts = {"code": "official", "adapters": adapters, "logits": logits_of}
            official.append(
                facts
                | report.measure("step", official_step, args, device, adapters, logits_of, **facts)
            )
    for state in ("cold", "warm") if args.cold else ("warm",):
        if state == "cold" and rank == 0:
            forget_files(Path(args.model))
        model = None  # the first one makes room for the second
        reset_memory()
        model, facts = build(args, device)
        report.write(
            {
                "what": "load",
                "model": Path(args.model).name,
                "state": state,
                "lora_rank": args.lora_rank,
            }
            | facts
        )
    if args.load_only:
        return dist.destroy_process_group()
    batch = Batch.draw(args, model.mask_token_id, device)
    report.measure(
        "forward",
        forward,
        model,
        batch,
        args,
        matmul,
        micro_batch_size=args.micro_batch_size,
        **setting,
    )
    ours = {"code": "ours", "micro_batch_size": args.micro_batch_size} | setting
    ours |= report.measure("step", our_step, model, batch, args, matmul, **ours)
    for peer in official:
        if "error" not in peer and "error" not in ours:
            ratio = {
                key: ours[key] / peer[key] for key in ("tokens_per_s", "peak_gib") if key in ours
            }
            loss = {"first_loss": ours["first_value"], "official_first_loss": peer["first_value"]}
            report.write(
                {"what": "ratio", "adapters": peer["adapters"], "logits": peer["logits"]}
                | ratio
                | loss
            )
    dist.destroy_process_group()
    if any("error" in line for line in report.lines):
        raise SystemExit("a measurement failed, see above")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
