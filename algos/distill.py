"""Distillation (dParallel 2509.26488, d3LLM 2601.07568): fewer steps, from own right answers.

copies = an answer with masks, and with the complement of these masks
loss   = mean over answers of sum over copies of CE + entropy_weight H
CE     = mean over masked tokens of -log p
H      = mean of the entropy of softmax(logits / 0.5), over masked tokens that are the most
         probable already: a sampler reveals all tokens that it is sure of in one step

--masks            masked in the first copy                            H of
random  dParallel  each token with probability 1/2                     both copies
steps   d3LLM      tokens that the model's own rollout revealed last;  the first one
                   their share grows in training

A bidirectional model has these masks in one block of the answer, and all behind it is masked; a
block model has them in each of its blocks, which see the clean blocks before them.

python   evals/run.py --model tiny-sdar --tasks countdown --split train --out runs/own  # answers
python   algos/distill.py --data runs/own               # of the shipped tiny model on a CPU
torchrun --nproc-per-node 8 algos/distill.py --model sdar-8b --data runs/own  # LoRA, eight GPUs
"""

# >>> shared: offline_imports
import os
import sys
from dataclasses import dataclass

sys.path.insert(0, os.path.realpath(f"{__file__}/../.."))
from distributed.start import start  # before torch

# isort: split
import torch
import torch.distributed as dist

from distributed.groups import StepMetrics, setup_distributed
from distributed.sharding import reduce_gradients, register_forwards, sharding
from models import add_lora, load_weights, meta_model, router_metrics, set_speed
from models.tensors import frozen_dtype
from run import HeldOut, Run, RunFlags

TINY = {  # what every offline script takes on the tiny models
    "task": "countdown", "lora_rank": 0, "learning_rate": 3e-4, "batch_size": 128,
    "warmup_steps": 5, "eval_limit": 512,
}  # fmt: skip
# <<< shared: offline_imports
# isort: split
from typing import Literal

from data.own_samples import right_answers
from data.tokens import batch_of
from rollout.rows import Rows, choose_in_blocks

# B answers, L tokens of the canvas behind the prompt


@dataclass
class Args(RunFlags):
    data: str = ""
    """directory that evals/run.py --split train wrote, or its samples.jsonl; right ones count"""
    masks: Literal["random", "steps"] = "steps"
    """random: dParallel's; steps: d3LLM's, by the steps of the rollout"""
    mask_ratio: tuple[float, float] = (0.0, 0.8)
    """steps: share that is masked, uniform up to the second number; from the first one, which rises
    to the second in training (d3LLM: 0 and 0.8)"""
    blocks: tuple[int, int] = (16, 32)
    """tokens of a block, at the start and the end; not of block models (d3LLM; dParallel: 32 32)"""
    entropy_weight: float = 2.0
    """weight of H (both, LLaDA: 2; Dream: 1)"""
    batch_size: int = 64
    """answers per optimizer step, over all ranks (on each GPU dParallel: 8, d3LLM: 16)"""
    learning_rate: float = 2e-5
    """AdamW (both: 2e-5, constant)"""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW (both leave torch's default)"""
    weight_decay: float = 0.01
    """AdamW (both: 0.01)"""
    max_grad_norm: float = 1.0
    """gradient norm clip (both: 1)"""
    lora_alpha: int = 128
    """adapters are scaled by lora_alpha / lora_rank (dParallel: 128 / 128; d3LLM: 256 / 256)"""
    RANGES = {"blocks": 1}


BY_SIZE = {"tiny": TINY}


def sample_masks(batch, progress, args):
    """progress: share of the run that is over -> Rows for an update, K = 2: both copies"""
    low, size = (
        first + (last - first) * progress for first, last in (args.mask_ratio, args.blocks)
    )
    c, noise = batch.completion_mask, batch.uniform(0, "order")
    u = batch.uniform(0, "level", 0)  # [B, 1]
    block = in_work = batch.block_ids  # all blocks of a block model are in work
    if batch.trace.settings["attention"] == "bidirectional":
        block = (c.cumsum(1) - 1) // int(size)
        u = u * (block[:, -1:] + 1)
        in_work = u.floor()  # one block, drawn at random; the fraction of u is still uniform
    work = c & (block == in_work)
    masked = work & (noise < 0.5)
    if args.masks == "steps":
        # last revealed first, tokens of one forward in any order; 2^20: more than there are steps
        order = 1 - (batch.trace.step_map + noise) / (1 << 20)
        share = low + (args.mask_ratio[1] - low) * (u % 1)
        masked, *_ = choose_in_blocks(work, block, share, order)
    scored, behind = torch.stack([masked, work & ~masked], 1), ~c | (block > in_work)
    # True: both copies of an answer stay in one micro-batch
    return Rows(batch, scored | behind[:, None], scored).for_update(args.micro_batch_size, True)


def certainty_loss(logps, entropies, right, rows, args):
    """logps, entropies, right [B, 2, L], 0 where not scored -> loss, metrics"""
    # of each copy, as a share of the mean over answers
    mean = lambda x, where: (x * where).sum(2) / where.sum(2).clamp(min=1) / args.batch_size
    copies = 1 + (args.masks == "random")  # that have H
    ce, H = -mean(logps, rows.weights).sum(), mean(entropies, right)[:, :copies].sum()
    return ce + args.entropy_weight * H, {"loss/cross_entropy": ce, "loss/entropy": H}


# >>> shared: parallelize
def parallelize(model, args):
    """torch.compile and FSDP2: fp32 master weights; computes in bf16 on GPU and in fp32 on CPU."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # 0.7 s: not for --help

    mixed = (torch.bfloat16, torch.float32) if torch.cuda.is_available() else ()
    set_speed(model, args.attention, args.activation_checkpointing, args.compile)
    for module, types, layout in sharding(model, mixed):
        policy = MixedPrecisionPolicy(*types, cast_forward_inputs=False)  # rotary tables stay exact
        fully_shard(module, mp_policy=policy, **layout)
    register_forwards(model)
    return model


def build_policy(device, args):
    """The model to train, without weights: flags that cannot work are refused before they load."""
    model = meta_model(args.model, frozen_dtype(device) if args.lora_rank else torch.float32)
    return add_lora(model, *args.lora) if args.lora_rank else model


def make_optimizer(model, args):
    """AdamW of what is trained; `update` sets its learning rate"""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        trained, betas=args.betas, weight_decay=args.weight_decay, fused=torch.cuda.is_available()
    )


# <<< shared: parallelize


def micro_loss(model, rows, args):
    """The only forward in training. -> share of the loss of a micro-batch, metrics"""
    how = rows.weights > 0, rows.valid_mask, 0.5  # the temperature of H (both)
    values = model.logps(rows.input_ids, rows.noisy_ids, *how, certainty=True)
    return certainty_loss(*values, rows, args)


# >>> shared: update
def update(model, optimizer, rows, step, args):
    """One optimizer step, unless loss or gradient are not finite. -> metrics over all ranks"""
    sums = StepMetrics()
    for micro, is_last, counts in rows.micro_batches(args.micro_batch_size):
        reduce_gradients(model, is_last, args.sync_every_backward)
        loss, metrics = micro_loss(model, micro, args)
        (loss * counts * dist.get_world_size()).backward()  # FSDP averages over ranks
        sums.add(loss, metrics, counts)
    (group,) = optimizer.param_groups
    norm = torch.nn.utils.clip_grad_norm_(group["params"], args.max_grad_norm)
    metrics = sums.reduce(step + 1, norm)  # the run ends here if it or the loss is not finite
    group["lr"] = args.learning_rate * args.lr_share(step)
    optimizer.step()
    optimizer.zero_grad()
    return metrics | {"optim/lr": group["lr"]}


# <<< shared: update


def main(args):
    # >>> shared: start
    device = setup_distributed(args.sequence_parallel)
    model = build_policy(device, args)
    # <<< shared: start
    held_out = HeldOut(args, 1024)  # tokens of a prompt and its answer, at most
    answers = right_answers(
        args.data,
        held_out.tokenizer,
        held_out.prompts(),
        f"--model {args.model} --tasks {args.task}",
    )
    engine = held_out.train_on(answers, model, device, args)
    # sharded before weights are read: no rank ever holds the whole model
    model = load_weights(parallelize(model, args), device)
    # >>> shared: offline_load
    optimizer = make_optimizer(model, args)
    run = Run(__file__, args, held_out, model, optimizer)
    run.say(held_out.facts)
    # <<< shared: offline_load
    for step, clock in run.steps():
        with clock("data"):
            seed = (args.seed << 32) + step
            batch = batch_of(held_out.chosen(step), held_out.mine, seed, model, device)
            rows, tokens = sample_masks(batch, step / args.max_steps, args), batch.num_tokens
        # >>> shared: offline_learn
        with clock("update"), router_metrics(model) as routing:
            metrics = update(model, optimizer, rows, step, args)
        metrics["speed/tokens_per_s"] = tokens / clock["time/update"]
        run.end_step(metrics | routing | run.validate(engine, model))
    run.end(engine, model)


if __name__ == "__main__":
    start(main, Args, BY_SIZE)
# <<< shared: offline_learn
