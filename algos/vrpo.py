"""VRPO (LLaDA 1.5, 2505.19223): DPO on ELBO estimates with low variance for their cost.

B(y)   = mean over n_t timesteps of the ELBO of answer y at one mask each, a sum over its tokens
margin = beta [B(chosen) - B_ref(chosen)] - beta [B(rejected) - B_ref(rejected)]
loss   = mean over pairs of -log sigmoid(margin)
         + sft_coef * (-B(chosen) / number of chosen tokens)

Policy and reference see the same timesteps and masks of an answer, so that their common noise
cancels; the two answers of a pair are drawn independently. A forward takes all draws of both, which
the loss couples.

python   algos/vrpo.py                                      # the shipped tiny model on a CPU
torchrun --nproc-per-node 8 algos/vrpo.py --model llada-8b  # GSM8K, LoRA, eight GPUs
"""

import math
import os
import sys
from copy import deepcopy
from dataclasses import dataclass, replace

sys.path.insert(0, os.path.realpath(f"{__file__}/../.."))
from distributed.start import start  # before torch

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F

from distributed.groups import StepMetrics, over_ranks, rank_share, setup_distributed
from distributed.sequence import data_rank
from distributed.sharding import reduce_gradients, register_forwards, sharding
from models import adapters_off, add_lora, load_weights, meta_model, router_metrics, set_speed
from models.tensors import frozen_dtype
from rollout import keyed_uniform
from rollout.rows import choose_in_blocks
from run import HeldOut, Run, RunFlags

# P pairs, B = 2P sequences (chosen, rejected, chosen, ...), T tokens, n draws of a sequence


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
    RANGES = {"batch_size": 1, "max_length": 1, "beta": 1e-9}

    def num_draws(self, replays):
        return self.mc_num * self.masks_per_timestep


# What differs on the tiny models, and on others where all weights train.
BY_SIZE = {
    "tiny": {
        "task": "countdown", "lora_rank": 0, "learning_rate": 3e-4, "batch_size": 64,
        "warmup_steps": 5, "eval_every": 0, "eval_limit": 512,
    },
    "full": {"learning_rate": 5e-7},
}  # fmt: skip


# timesteps of a held-out answer, one mask each, shared with the reference, equal at all evaluations
HELD_OUT_DRAWS = 4


@dataclass
class Batch:
    """Pairs of one rank in one optimizer step: rows 2i and 2i + 1 are the answers of pair i."""

    input_ids: torch.Tensor  # [B, T] prompt + answer
    valid_mask: torch.Tensor  # [B, T] bool: False on the padding on the right
    answer_mask: torch.Tensor  # [B, T] bool: through the end of turn; may be masked and is scored
    # [B, T] likelihood block: its tokens are predicted jointly, given the blocks before it
    block_ids: torch.Tensor
    sample_index: torch.Tensor  # [B] index in the step, over all ranks: keys the draws
    seed: int
    step: int
    num_pairs: float  # of the step on all ranks
    num_tokens: float  # tokens of the chosen answers on all ranks

    def uniform(self, *key):
        """fp64 in [0, 1), keyed by (seed, step, sample, ...): words, numbers and tensors [B, T]"""
        return keyed_uniform(self.seed, self.step, self.sample_index[:, None], *key)


@dataclass
class Masks:
    """n draws of every sequence of a batch."""

    masked: torch.Tensor  # [B, n, T] bool: shown to the model as [MASK]
    weights: torch.Tensor  # [B, n, T] fp64: weight of a token in the ELBO; 0 is not scored


def sample_masks(batch, args, stream="masks"):
    """n = mc_num * masks_per_timestep draws of every sequence. -> Masks

    A timestep masks m of the k scored tokens of each likelihood block, m uniform on 1..k and
    stratified over the timesteps (floor form); the tokens are drawn anew for every mask. Weights
    k / m: the sum over a draw bounds the log-likelihood. stream: separates different uses.
    """
    c, block = batch.answer_mask, batch.block_ids
    # after the answer all is masked: no later token may show where it ends
    hidden = batch.valid_mask & ~c & (c.cumsum(1) > 0)
    u, position = batch.uniform(stream, "count", block), torch.arange(c.shape[1], device=c.device)
    masked, weights = [], []
    for j in range(args.num_draws(0)):
        shifted = (u + j // args.masks_per_timestep / args.mc_num) % 1
        noise = batch.uniform(stream, j, position)
        chosen, k, m = choose_in_blocks(c, block, shifted, noise)
        masked.append(chosen | hidden)
        weights.append(chosen * k / m)
    return Masks(torch.stack(masked, 1), torch.stack(weights, 1))


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
    if args.lora_rank:
        add_lora(model, *args.lora)
    return model


# <<< shared: parallelize


# >>> shared: load_models
def load_models(model, device, args):
    """-> policy, frozen reference (with LoRA None: the policy without its adapters)"""
    ref = None
    if args.beta and not args.lora_rank:
        ref = deepcopy(model).to(frozen_dtype(device)).requires_grad_(False)
        load_weights(parallelize(ref, args), device)
    # sharded before weights are read: no rank ever holds the whole model
    return load_weights(parallelize(model, args), device), ref


# <<< shared: load_models


# >>> shared: optimizer_step
def optimizer_step(optimizer, sums, step, args):
    """sums: StepMetrics of this rank. -> metrics of all ranks"""
    (group,) = optimizer.param_groups
    norm = torch.nn.utils.clip_grad_norm_(group["params"], args.max_grad_norm)
    metrics = sums.reduce(step + 1, norm)  # the run ends here if it or the loss is not finite
    group["lr"] = args.learning_rate * args.lr_share(step)
    optimizer.step()
    optimizer.zero_grad()
    return metrics | {"optim/lr": group["lr"]}


# <<< shared: optimizer_step


def make_batch(pairs, first, args, model, step, device):
    """pairs: [(prompt, chosen, rejected ids)] of this rank, numbers first, ... of the step -> Batch

    A block model sees its last block whole, as the sampler does: padding fills it, always masked
    and never scored.
    """
    rows = [(len(prompt), prompt + answer) for prompt, *answers in pairs for answer in answers]
    n = model.block_length if model.attention == "block-causal" else 1
    start, end = torch.tensor([(P, len(ids)) for P, ids in rows], device=device).T[..., None]
    filled = end + -end % n  # [B, 1], like start and end of the answer
    T, padding = int(filled.max()), model.pad_token_id
    column = torch.arange(T, device=device)
    answer_mask, valid_mask = (column >= start) & (column < end), column < filled
    return Batch(
        torch.tensor([ids + [padding] * (T - len(ids)) for _, ids in rows], device=device),
        valid_mask,
        answer_mask,
        model.grid(valid_mask)[1],
        2 * first + torch.arange(len(rows), device=device),
        args.seed,
        step,
        num_pairs=args.batch_size,
        num_tokens=over_ranks(answer_mask[0::2].sum()),
    )


def draw_elbos(model, batch, masks, rows):
    """The only forward in training: ELBOs of R sequences, means over the draws. -> [R] fp32"""
    input_ids, weights = batch.input_ids[rows], masks.weights[rows]
    noisy_ids = torch.where(masks.masked[rows], model.mask_token_id, input_ids[:, None])
    logps = model.logps(input_ids, noisy_ids, weights != 0, batch.valid_mask[rows])
    return (weights.to(logps.dtype) * logps).sum(2).mean(1)


@torch.no_grad()
def elbo_values(model, batch, masks, args):
    """ELBOs [B] of the whole batch. Without a graph the draws of a sequence always fit."""
    B, n, _ = masks.masked.shape
    parts = torch.arange(B).split(max(args.micro_batch_size // n, 1))
    return torch.cat([draw_elbos(model, batch, masks, rows) for rows in parts])


def backward(model, batch, masks, ref_elbos, args):
    """Gradient of preference_loss. -> metrics

    A forward takes whole pairs, at most --micro-batch-size sequences x draws. Every rank runs as
    many forwards, because all have as many pairs.
    """
    (B, n, _), sums = masks.masked.shape, StepMetrics()
    size = 2 * (args.micro_batch_size // (2 * n))
    for i in range(0, B, size):
        rows = slice(i, i + size)
        reduce_gradients(model, rows.stop >= B, args.sync_every_backward)
        elbos = draw_elbos(model, batch, masks, rows)
        loss, metrics = preference_loss(elbos, ref_elbos[rows], batch, args)
        (loss * dist.get_world_size()).backward()  # FSDP averages over ranks
        sums.add(loss, metrics)
    return sums


def held_out_draws(pairs, args, model, reference, device):
    """This rank's held-out pairs, draws, and reference values there. -> Batch, Masks, [B]

    Every rank gets equally many: the last pair is repeated, and its copies are not counted.
    """
    group, groups = data_rank()
    share = math.ceil(len(pairs) / groups)
    first = group * share
    mine = [pairs[min(i, len(pairs) - 1)] for i in range(first, first + share)]
    # no training step is -1
    batch = replace(make_batch(mine, first, args, model, -1, device), num_pairs=len(pairs))
    masks = sample_masks(batch, args, "held")
    return batch, masks, elbo_values(reference, batch, masks, args)


def held_out_metrics(model, batch, masks, ref_elbos, prefix, args):
    """Share of held-out pairs with a positive margin, and the mean margin. Collective."""
    real = int((batch.sample_index < 2 * batch.num_pairs).sum())
    elbos = elbo_values(model, batch, masks, args)[:real]
    _, metrics = preference_loss(elbos, ref_elbos[:real], batch, args)
    names = "accuracy", "margin"
    return {f"reward/{prefix}_{name}": over_ranks(metrics[f"reward/{name}"]) for name in names}


def load_pairs(held_out, model, args):
    """-> training pairs, {split: held-out pairs}"""
    pairs, compared = held_out.pairs(args.data, args.eval_limit)
    asked = [pair["prompt"] for pairs in compared.values() for pair in pairs if "prompt" in pair]
    pairs = held_out.encode(pairs, model, asked + held_out.prompts())
    compared = {split: held_out.encode(rows, model) for split, rows in compared.items()}
    return pairs.at_least(args.batch_size), compared


def main(args):
    device = setup_distributed(args.sequence_parallel)
    mine = rank_share(args.batch_size, "--batch-size", data_rank())
    model, held_out = build_policy(device, args), HeldOut(args, args.max_length)
    rows, compared = load_pairs(held_out, model, args)
    engine = held_out.train_on(rows, model, device, args)
    model, ref = load_models(model, device, args)
    # >>> shared: offline_start
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        betas=args.betas,
        weight_decay=args.weight_decay,
        fused=torch.cuda.is_available(),
    )
    run = Run(__file__, args, held_out, model, optimizer)
    run.say(held_out.facts)
    # <<< shared: offline_start
    run.say("\n".join(pairs.report(f"{split} pairs") for split, pairs in compared.items()))
    held = replace(args, mc_num=HELD_OUT_DRAWS, masks_per_timestep=1)
    with adapters_off(ref or model) as reference:
        compared = {
            split: held_out_draws(pairs, held, model, reference, device)
            for split, pairs in compared.items()
            if pairs
        }

    def score(split, name):
        metrics = held_out.score(engine, split, name, model)
        if split in compared:
            metrics |= held_out_metrics(model, *compared[split], name, held)
        return metrics

    if engine and not run.start:
        run.write(0, score("test", "test"))
    for step, clock in run.steps():
        with clock("data"):
            pairs = [held_out.stream[step * args.batch_size + i] for i in mine]
            batch = make_batch(pairs, mine.start, args, model, step, device)
            masks = sample_masks(batch, args)
            ref_masks = masks if args.share_masks else sample_masks(batch, args, "ref")
        with clock("reference"), adapters_off(ref or model) as reference:
            ref_elbos = elbo_values(reference, batch, ref_masks, args)
        with clock("update"), router_metrics(model) as routing:
            sums = backward(model, batch, masks, ref_elbos, args)
            metrics = optimizer_step(optimizer, sums, step, args)
        if args.evaluates(step + 1):
            with clock("eval"):
                metrics |= score("validation", "eval")
        rate = over_ranks(batch.valid_mask.sum()) / clock["time/update"]
        metrics |= {"speed/tokens_per_s": rate} | routing
        run.end_step(metrics)
    if engine and not run.stopped:
        run.write(args.max_steps, score("test", "test"))
    run.end()


if __name__ == "__main__":
    start(main, Args, BY_SIZE)
