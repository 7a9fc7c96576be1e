"""VRPO (LLaDA 1.5, 2505.19223): DPO on ELBO estimates with low variance for their cost.

B(y)   = mean over n_t timesteps x n_yt masks of the ELBO of y at one mask, a sum over its tokens
margin = beta [B(chosen) - B_ref(chosen)] - beta [B(rejected) - B_ref(rejected)]
loss   = mean over pairs of -log sigmoid(margin)
         + sft_coef * (-sum over pairs of B(chosen) / chosen tokens of all pairs)

Policy and reference see the same timesteps and masks of an answer, so that their common noise
cancels; the two answers of a pair are drawn independently. A forward takes all draws of both, which
the loss couples.

python   algos/vrpo.py                                      # the shipped tiny model on a CPU
torchrun --nproc-per-node 8 algos/vrpo.py --model llada-8b  # GSM8K, LoRA, eight GPUs
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
import math
from dataclasses import replace

import torch.nn.functional as F

from data.tokens import batch_of
from distributed.groups import over_ranks
from distributed.sequence import data_rank
from models import adapters_off
from rollout.rows import Rows, choose_in_blocks

# P pairs, B = 2P sequences (chosen, rejected, chosen, ...), L tokens of an answer, n draws of each


@dataclass
class Args(RunFlags):
    data: str = ""
    """chosen/rejected rows (file, folder, hub id), or a folder of evaluations, SPLIT/samples.jsonl;
    empty or a preset: gold against wrong answers"""
    max_length: int = 2048
    """tokens of prompt + answer + end tokens, in whole blocks; longer rows are dropped"""
    batch_size: int = 16
    """pairs per optimizer step, over all ranks (paper: 64)"""
    learning_rate: float = 5e-6
    """AdamW (ours; paper, all weights: 5e-7, 15 warm-up steps, then cosine)"""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW (paper: 0.9, 0.95)"""
    weight_decay: float = 0.01
    """AdamW (paper: 0.01)"""
    max_grad_norm: float = 1.0
    """gradient norm clip (the paper names none; the field's usual 1.0)"""
    beta: float = 0.2
    """scale of the log-ratios in the margin (paper: 0.2)"""
    mc_num: int = 8
    """timesteps per answer, n_t (paper: 8; naive DPO: 1)"""
    masks_per_timestep: int = 1
    """masks per timestep, n_yt (paper: 1)"""
    share_masks: bool = True
    """policy and reference see the same timesteps and masks (paper: yes; naive DPO: no)"""
    sft_coef: float = 0.05
    """weight of the supervised term on the chosen answer (paper: 0.05)"""
    RANGES = {"beta": 1e-9}

    def num_draws(self, replays):
        return self.mc_num * self.masks_per_timestep


# What differs on the tiny models, and on others where all weights train.
BY_SIZE = {
    "tiny": TINY | {"batch_size": 64, "eval_every": 0},
    "full": {"learning_rate": 5e-7},
}


# timesteps of a held-out answer, one mask each, shared with the reference, equal at all evaluations
HELD_OUT_DRAWS = 4


def sample_masks(batch, stream, args):
    """n = mc_num * masks_per_timestep draws of every sequence. stream: separates different uses

    A timestep masks m of the k scored tokens of each likelihood block, m uniform on 1..k and
    stratified over the timesteps (floor form); the tokens are drawn anew for every mask. Weights
    k / m: the sum over a draw bounds the log-likelihood. After the answer all is masked: no later
    token may show where it ends. -> Rows, R = B, K = n
    """
    c, block = batch.completion_mask, batch.block_ids
    # searchsorted finds the first column of a block: its u serves all tokens of the block
    u, weights = batch.uniform(stream, "count", torch.searchsorted(block, block)), []
    for j in range(args.num_draws(replays=0)):
        shifted = (u + j // args.masks_per_timestep / args.mc_num) % 1
        chosen, k, m = choose_in_blocks(c, block, shifted, batch.uniform(stream, j))
        weights.append(chosen * k / m)
    weights = torch.stack(weights, 1)
    return Rows(batch, (weights > 0) | ~c[:, None], weights)


def preference_loss(elbo, ref_elbo, batch, args):
    """ELBOs [B] of policy and reference -> share of the loss, and metrics"""
    c = 1 / batch.num_pairs
    rewards = args.beta * (elbo - ref_elbo)  # [B], what DPO calls the implicit reward
    margin = rewards[0::2] - rewards[1::2]  # [P]
    dpo = -F.logsigmoid(margin).sum() * c
    sft = -elbo[0::2].sum() / batch.num_tokens
    wins = (margin.sign() + 1) / 2  # 1/2 at the start, where both agree
    return dpo + args.sft_coef * sft, {
        "loss/dpo": dpo,
        "loss/sft": sft,
        "reward/accuracy": wins.sum() * c,
        "reward/margin": margin.sum() * c,
        "reward/chosen": rewards[0::2].sum() * c,
        "reward/rejected": rewards[1::2].sum() * c,
    }


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


# >>> shared: load_models
def load_models(model, device, args):
    """-> policy, frozen reference (with LoRA None: the policy without its adapters)"""
    ref = None
    if args.beta and not args.lora_rank:
        ref = meta_model(args.model, frozen_dtype(device)).requires_grad_(False)
        load_weights(parallelize(ref, args), device)
    # sharded before weights are read: no rank ever holds the whole model
    return load_weights(parallelize(model, args), device), ref


# <<< shared: load_models


def make_batch(pairs, first, args, model, step, device):
    """pairs: [(prompt, chosen, rejected ids)] of this rank, numbers first, ... of the step -> Batch
    of which sequences 2i and 2i + 1 are the answers of pair i

    A block model sees its last block whole, as the sampler does: padding fills it, always masked
    and never scored.
    """
    n, rows = model.block_length if model.attention == "block-causal" else 1, []
    for prompt, *answers in pairs:
        for ids in answers:
            rest = -(len(prompt) + len(ids)) % n
            canvas = ids + [model.pad_token_id] * rest
            rows.append((prompt, canvas, [0] * len(ids) + [-1] * rest))
    index = range(2 * first, 2 * first + len(rows))
    batch = batch_of(rows, index, (args.seed << 32) + step, model, device)
    # of the step on all ranks; of tokens those of chosen answers
    batch.num_pairs, batch.num_tokens = (
        args.batch_size,
        over_ranks(batch.completion_mask[0::2].sum()),
    )
    return batch


def draw_elbos(model, rows):
    """The only forward in training: ELBOs of R sequences, means over the draws. -> [R] fp32"""
    logps = model.logps(rows.input_ids, rows.noisy_ids, rows.weights > 0, rows.valid_mask)
    return (rows.weights * logps).sum(2).mean(1)


def elbo_values(model, rows, args):
    """ELBOs [B] of the whole batch, without a graph: then the draws of a sequence always fit."""
    size = max(args.micro_batch_size, rows.masked.shape[1])
    return rows.evaluate(size, lambda micro: draw_elbos(model, micro))


def micro_loss(model, rows, args):
    """rows: whole pairs -> share of the loss, metrics"""
    return preference_loss(draw_elbos(model, rows), rows.ref, rows.batch, args)


def held_out_draws(pairs, args, model, reference, device):
    """-> Rows of this rank's held-out pairs, with reference values

    Every rank gets equally many: the last pair is repeated, and its copies are not counted.
    """
    group, groups = data_rank()
    share = math.ceil(len(pairs) / groups)
    first = group * share
    mine = [pairs[min(i, len(pairs) - 1)] for i in range(first, first + share)]
    # no training step is -1
    batch = make_batch(mine, first, args, model, -1, device)
    batch.num_pairs, rows = len(pairs), sample_masks(batch, "held", args)
    rows.ref = elbo_values(reference, rows, args)
    return rows


def held_out_metrics(model, rows, prefix, args):
    """Share of held-out pairs with a positive margin, and the mean margin. Collective."""
    batch = rows.batch
    real = int((batch.trace.sample_index < 2 * batch.num_pairs).sum())
    elbos = elbo_values(model, rows, args)[:real]
    _, metrics = preference_loss(elbos, rows.ref[:real], batch, args)
    names = "accuracy", "margin"
    return {f"reward/{prefix}_{name}": over_ranks(metrics[f"reward/{name}"]) for name in names}


def load_pairs(held_out, model, args):
    """-> training pairs, {split: held-out pairs}"""
    pairs, compared = held_out.pairs(args.data, args.eval_limit)
    asked = [pair["prompt"] for pairs in compared.values() for pair in pairs if "prompt" in pair]
    pairs = held_out.encode(pairs, model, asked + held_out.prompts())
    compared = {split: held_out.encode(rows, model) for split, rows in compared.items()}
    return pairs, compared


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
    held_out = HeldOut(args, args.max_length)
    pairs, compared = load_pairs(held_out, model, args)
    engine = held_out.train_on(pairs, model, device, args)
    args.micro_batch_size -= args.micro_batch_size % (2 * args.num_draws(replays=0))  # whole pairs
    model, ref = load_models(model, device, args)
    # >>> shared: offline_load
    optimizer = make_optimizer(model, args)
    run = Run(__file__, args, held_out, model, optimizer)
    run.say(held_out.facts)
    # <<< shared: offline_load
    run.say("\n".join(pairs.report(f"{split} pairs") for split, pairs in compared.items()))
    held = replace(args, mc_num=HELD_OUT_DRAWS, masks_per_timestep=1)
    with adapters_off(ref or model) as reference:
        compared = {
            split: held_out_draws(pairs, held, model, reference, device)
            for split, pairs in compared.items()
            if pairs
        }

    def compare(split, name):
        return held_out_metrics(model, compared[split], name, held) if split in compared else {}

    held_out.compare = compare
    if engine and not run.start:
        run.write(0, held_out.score(engine, "test", "test", model))
    for step, clock in run.steps():
        with clock("data"):
            first = held_out.mine.start
            batch = make_batch(held_out.chosen(step), first, args, model, step, device)
            rows = ref_rows = sample_masks(batch, "masks", args)
            if not args.share_masks:
                ref_rows = sample_masks(batch, "ref", args)
            tokens = over_ranks(batch.valid_mask.sum())
        with clock("reference"), adapters_off(ref or model) as reference:
            rows.ref = elbo_values(reference, ref_rows, args)
        # >>> shared: offline_learn
        with clock("update"), router_metrics(model) as routing:
            metrics = update(model, optimizer, rows, step, args)
        metrics["speed/tokens_per_s"] = tokens / clock["time/update"]
        run.end_step(metrics | routing | run.validate(engine, model))
    run.end(engine, model)


if __name__ == "__main__":
    start(main, Args, BY_SIZE)
# <<< shared: offline_learn
