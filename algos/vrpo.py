"""VRPO (LLaDA 1.5, 2505.19223): DPO on ELBO estimates with low variance for their cost.

    B(y)   = mean over n_t timesteps of the ELBO of answer y at one mask each, a sum over its tokens
    margin = beta [B(chosen) - B_ref(chosen)] - beta [B(rejected) - B_ref(rejected)]
    loss   = mean over pairs of -log sigmoid(margin)
             + sft_coef * (-B(chosen) / number of chosen tokens)

Policy and reference see the same timesteps and masks of an answer, so that their common noise
cancels; the two answers of a pair are drawn independently. A forward takes all draws of both, which
the loss couples.

Run it on the tiny model on CPU (right against wrong answers), or on eight GPUs:

    python   algos/vrpo.py
    torchrun --nproc-per-node 8 algos/vrpo.py --model llada-8b
"""

import math
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.preferences import encode_pairs, held_out_pairs, training_pairs
from data.stream import ShuffledStream
from distributed.groups import (
    all_reduce,
    close_distributed,
    group_share,
    reduce_metrics,
    setup_distributed,
)
from distributed.sequence import data_place
from distributed.sharding import reduce_gradients, register_forwards, sharding
from evals import load_splits, load_task, mean_score, score_all
from models import (
    adapters_off,
    add_lora,
    compile_blocks,
    load_tokenizer,
    load_weights,
    meta_model,
    router_metrics,
)
from rollout import keyed_uniform, make_engine, sync_engine
from run.flags import command_line
from run.log import RunLog, Stop, Stopwatch, machine_metrics
from run.plan import fit_answers
from run.schedule import share_at

# P pairs, B = 2P sequences (chosen, rejected, chosen, ...), T tokens, n draws of a sequence


@dataclass
class Args:
    # the method's own
    data: str = ""
    """chosen/rejected rows (file, folder, hub id); empty or a preset: gold against wrong answers"""
    eval_pairs: str = ""
    """held-out pairs, --eval-limit of them; empty: other splits of --data, where it has them"""
    batch_size: int = 64
    """pairs per optimizer step, over all ranks (paper: 64)"""
    learning_rate: float = 5e-7
    """AdamW (paper: 5e-7, all weights; 15 warm-up steps, then cosine)"""
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
    # >>> shared: offline_args
    # task and data
    model: str = "tiny-sdar"
    """key of models.MODELS, or a directory in HF layout"""
    task: str = "countdown"
    """file of evals/, or path.py: held-out score, and training rows where --data names no file"""
    eval_data: str = ""
    """problems of the held-out score; empty: other splits of the preset, else the task's own"""
    max_length: int = 2048
    """tokens of prompt + answer + end tokens, in whole blocks; longer rows are dropped"""
    # length of the run and evaluation
    max_steps: int = 100
    """optimizer steps"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """after the warm-up; linear and cosine end at 0 after --schedule-steps"""
    schedule_steps: int = 0
    """steps of the schedule; 0: --max-steps"""
    warmup_steps: int = 0
    """linear warm-up of the learning rate"""
    eval_every: int = 0
    """steps between evaluations on the validation split, 0: never"""
    eval_limit: int = 512
    """held-out problems per evaluation; 0: no evaluation at all, not even at the end"""
    gen_length: int = 12
    """evaluation: tokens generated per completion, whole blocks"""
    block_length: int = 0
    """evaluation: tokens per denoising block; 0: the model's own"""
    denoising_steps: int = 2
    """evaluation: denoising steps per block"""
    cache: Literal["none", "prefix", "dual"] = "none"
    """evaluation: Fast-dLLM's caches of bidirectional models"""
    seed: int = 42
    """every draw is keyed by (seed, step, sample, ...)"""
    # memory and speed
    micro_batch_size: int = 0
    """noised sequences per forward; 0: the most that fit; does not change the gradient"""
    attention: Literal["auto", "sdpa", "flex", "varlen", "flash-attn"] = "auto"
    """attention backend in training; auto: the fastest measured for the model's pattern"""
    activation_checkpointing: bool = False
    """recompute every block in the backward pass: less memory, a third more compute"""
    compile: bool = True
    """torch.compile every block on CUDA: faster steps, about a minute in the first"""
    sync_every_backward: bool = False
    """reduce gradients after every backward: slower, but no rank holds full-size gradients"""
    sequence_parallel: int = 1
    """so many ranks share each row in the update: for rows that do not fit one GPU"""
    # LoRA
    lora_rank: int = 0
    """rank of the LoRA adapters; 0: full fine-tuning"""
    lora_alpha: int = 64
    """adapters are scaled by lora_alpha / lora_rank"""
    lora_targets: tuple[str, ...] = ()
    """linear layers that get adapters, e.g. q_proj v_proj; empty: all of a block"""
    # log and saves
    save_every: int = 0
    """steps between saves of weights and of all that --resume needs, 0: only weights, at the end"""
    keep_saves: int = 0
    """newest saves to keep besides the best by validation score; 0: all"""
    resume: str = ""
    """run directory to continue, with its flags; --max-steps and --track may change"""
    out: str = "runs"
    """parent of the run directory"""
    track: bool = False
    """mirror the log to wandb"""
    # <<< shared: offline_args


# Fields where no flag is given: on the tiny models (more: run/defaults.py), with LoRA or with
# all weights. Rates are ours; empty: as above.
BY_SIZE = {
    "tiny": {"learning_rate": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.01},
    "lora": {"learning_rate": 5e-6},
    "full": {},
}


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
    mask_token_id: int
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


# >>> shared: draws
def block_counts(tokens, block):
    """Marked tokens in the likelihood block of each token, and in all blocks before it.

    tokens, block [B, L] -> two [B, L]
    """
    ends, block = tokens.long().cumsum(1), block.contiguous()
    before = (ends - tokens.long()).gather(1, torch.searchsorted(block, block))
    return ends.gather(1, torch.searchsorted(block, block, right=True) - 1) - before, before


def choose_in_blocks(tokens, block, u, noise):
    """Choose m of the n marked tokens of each likelihood block, m = floor(u n) + 1, in the random
    order of their noise. tokens, block, u, noise [B, L]; u is equal within a block

    -> chosen [B, L] bool, n and m [B, L]
    """
    n, before = block_counts(tokens, block)
    m = (u * n).floor() + 1
    rank = torch.where(tokens, block + noise, torch.inf).argsort(1).argsort(1) - before
    return tokens & (rank < m), n, m


# <<< shared: draws


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
    for j in range(args.mc_num * args.masks_per_timestep):
        shifted = (u + j // args.masks_per_timestep / args.mc_num) % 1
        noise = batch.uniform(stream, j, position)
        chosen, k, m = choose_in_blocks(c, block, shifted, noise)
        masked.append(chosen | hidden)
        weights.append(chosen * k / m)
    return Masks(torch.stack(masked, 1), torch.stack(weights, 1))


def preference_loss(elbos, ref_elbos, batch, args):
    """One-draw ELBOs [B, n] of policy and reference -> share of the loss, and metrics"""
    elbo, ref_elbo, c = elbos.mean(1), ref_elbos.mean(1), 1 / batch.num_pairs
    rewards = args.beta * (elbo - ref_elbo)  # [B], what DPO calls the implicit reward
    margin = rewards[0::2] - rewards[1::2]  # [P]
    dpo = -F.logsigmoid(margin).sum() * c
    sft = -elbo[0::2].sum() / batch.num_tokens
    wins = (margin.sign() + 1) / 2  # 1/2 at the start, where both agree
    metrics = {
        "loss/dpo": dpo,
        "loss/sft": sft,
        "reward/accuracy": wins.sum() * c,
        "reward/margin": margin.sum() * c,
        "reward/chosen": rewards[0::2].sum() * c,
        "reward/rejected": rewards[1::2].sum() * c,
    }
    if args.mc_num > 1:
        # sample variance over timesteps: an upper bound on average, because they are stratified
        timesteps = (args.beta * (elbos - ref_elbos)).unflatten(1, (args.mc_num, -1)).mean(2)
        metrics["reward/margin_var"] = timesteps.var(1).sum() * c / args.mc_num
    return dpo + args.sft_coef * sft, metrics


# >>> shared: setup
def parallelize(model, args):
    """FSDP2: compile each block, then shard.

    fp32 master weights; computes in bf16 on GPU and in fp32 on CPU.
    """
    # not at the top: takes 0.7 s, for which --help and refused commands need not wait
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # gradients are reduced in fp32
    types = (torch.bfloat16, torch.float32) if torch.cuda.is_available() else ()
    # forward inputs are not cast: rotary tables and masks stay exact
    policy = MixedPrecisionPolicy(*types, cast_forward_inputs=False)
    model.activation_checkpointing = args.activation_checkpointing
    model.attention_backend = args.attention
    if args.compile:
        compile_blocks(model)
    layout, fp32_modules, modules = sharding(model)
    for module in fp32_modules:
        fully_shard(module, **layout)
    for module in modules:
        fully_shard(module, mp_policy=policy, **layout)
    register_forwards(model)
    return model


def optimizer_step(optimizer, sums, step, args):
    """Clip the gradient and step. sums: this rank's metrics. -> metrics over all ranks

    A loss or gradient that is not finite on any rank stops the run before the step.
    """
    (group,), metrics = optimizer.param_groups, reduce_metrics(sums)
    norm = torch.nn.utils.clip_grad_norm_(group["params"], args.max_grad_norm).full_tensor().item()
    if not math.isfinite(metrics["loss/total"] + norm):
        raise SystemExit(
            f"not finite at step {step + 1}: loss {float(sums['loss/total'])} on rank "
            f"{dist.get_rank()}, gradient norm {norm}; stopped before the optimizer step"
        )
    group["lr"] = args.learning_rate * share_at(
        step, args.lr_schedule, args.warmup_steps, args.schedule_steps or args.max_steps
    )
    optimizer.step()
    optimizer.zero_grad()
    return metrics | {"optim/grad_norm": norm, "optim/lr": group["lr"]}


def open_run(task, model, tokenizer, args):
    """-> optimizer, first step, log, saves; with --resume they continue that run"""
    from run.saves import Saves

    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        betas=args.betas,
        weight_decay=args.weight_decay,
        fused=torch.cuda.is_available(),
    )
    start = Saves.load(args.resume, model, optimizer)
    name = f"{Path(__file__).stem}-{Path(args.model).name}-{task.NAME}-s{args.seed}"
    log = RunLog(args.out, name, vars(args), args.max_steps, args.track, args.resume, start)
    saves = Saves(
        log.run_dir,
        model,
        optimizer,
        tokenizer,
        args.model,
        args.keep_saves,
        args.save_every,
        args.max_steps,
        log.history(f"eval/{task.NAME}"),
    )
    return optimizer, start, log, saves


# <<< shared: setup


# >>> shared: evaluation
def load_held_out(task, tokenizer, args):
    """-> {split: [(example, prompt ids)]}, a line on the problems dropped as too long"""
    data = args.eval_data or (args.data if args.data.partition("@")[0] in task.PRESETS else "")
    held_out, dropped = load_splits(task, None, data, tokenizer, args.max_length, args.eval_limit)
    return held_out, f"held-out problems dropped because of --max-length: {dropped}"


def decoding(args):
    """How held-out problems are answered."""
    return {
        "gen_length": args.gen_length,
        "block_length": args.block_length,
        "denoising_steps": args.denoising_steps,
        "cache": args.cache,
        "remasking": "low_confidence_static",
        "temperature": 0.0,
    }


def evaluate(engine, model, task, tokenizer, problems, name, args):
    """Mean score of the current model on held-out problems. -> {name/task: score}"""
    sync_engine(engine, model)
    return mean_score(engine, task, tokenizer, problems, name, **decoding(args))


# <<< shared: evaluation


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
        model.mask_token_id,
        args.seed,
        step,
        num_pairs=args.batch_size,
        num_tokens=all_reduce({"tokens": answer_mask[0::2].sum()})["tokens"],
    )


def draw_batch(stream, model, device, step, args):
    """This rank's pairs of the step. -> Batch, Masks of the policy, Masks of the reference"""
    mine = group_share(args.batch_size, "--batch-size")
    pairs = [stream[step * args.batch_size + i] for i in mine]
    batch = make_batch(pairs, mine.start, args, model, step, device)
    masks = sample_masks(batch, args)
    return batch, masks, masks if args.share_masks else sample_masks(batch, args, "ref")


def draw_elbos(model, batch, masks, rows):
    """The only forward in training: one-draw ELBOs of R sequences. -> [R, n] fp32"""
    input_ids, weights = batch.input_ids[rows], masks.weights[rows]
    noisy_ids = torch.where(masks.masked[rows], batch.mask_token_id, input_ids[:, None])
    logps = model.logps(input_ids, noisy_ids, weights != 0, batch.valid_mask[rows])
    return (weights.to(logps.dtype) * logps).sum(2)


@torch.no_grad()
def elbo_values(model, batch, masks, args):
    """One-draw ELBOs of the whole batch. Without a graph the draws of a sequence always fit.

    -> [B, n]
    """
    B, n, _ = masks.masked.shape
    parts = torch.arange(B).split(max(args.micro_batch_size // n, 1))
    return torch.cat([draw_elbos(model, batch, masks, rows) for rows in parts])


def backward(model, batch, masks, ref_elbos, args):
    """Gradient of preference_loss. -> metrics

    A forward takes whole pairs, at most --micro-batch-size sequences x draws. Every rank runs as
    many forwards, because all have as many pairs.
    """
    (B, n, _), sums = masks.masked.shape, Counter()
    size = 2 * (args.micro_batch_size // (2 * n))
    for i in range(0, B, size):
        rows = slice(i, i + size)
        reduce_gradients(model, rows.stop >= B, args.sync_every_backward)
        elbos = draw_elbos(model, batch, masks, rows)
        loss, metrics = preference_loss(elbos, ref_elbos[rows], batch, args)
        (loss * dist.get_world_size()).backward()  # FSDP averages over ranks
        for name, value in (metrics | {"loss/total": loss}).items():
            sums[name] += value.detach()
    return sums


def held_out_args(args):
    """Fields with which held-out pairs are drawn and scored: the same whatever the training's."""
    return replace(args, mc_num=HELD_OUT_DRAWS, masks_per_timestep=1)


def held_out_draws(pairs, args, model, reference, device):
    """This rank's held-out pairs, draws, and reference values there. -> Batch, Masks, [B, n]

    Every rank gets equally many: the last pair is repeated, and its copies are not counted.
    """
    group, groups = data_place()
    share = math.ceil(len(pairs) / groups)
    first = group * share
    mine = [pairs[min(i, len(pairs) - 1)] for i in range(first, first + share)]
    # no training step is -1
    batch = replace(make_batch(mine, first, args, model, -1, device), num_pairs=len(pairs))
    masks = sample_masks(batch, held_out_args(args), "held")
    return batch, masks, elbo_values(reference, batch, masks, args)


def held_out_metrics(model, batch, masks, ref_elbos, prefix, args):
    """Share of held-out pairs with a positive margin, and the mean margin. Collective."""
    real = int((batch.sample_index < 2 * batch.num_pairs).sum())
    elbos = elbo_values(model, batch, masks, args)[:real]
    _, metrics = preference_loss(elbos, ref_elbos[:real], batch, held_out_args(args))
    names = "accuracy", "margin"
    return all_reduce({f"reward/{prefix}_{name}": metrics[f"reward/{name}"] for name in names})


def load_data(task, tokenizer, model, args):
    """-> training pairs, {split: held-out problems}, {split: held-out pairs}, report lines"""
    encode = lambda pairs: encode_pairs(pairs, tokenizer, model, args.max_length)
    held_out, dropped = load_held_out(task, tokenizer, args)
    compared = {
        split: held_out_pairs(task, split, args.data, args.eval_pairs, args.eval_limit, score_all)
        for split in held_out
    }
    asked = [task.prompt(problem) for problems in held_out.values() for problem, _ in problems]
    asked += [pair["prompt"] for pairs in compared.values() for pair in pairs if "prompt" in pair]
    pairs = encode(training_pairs(task, args.data, score_all, asked)).at_least(args.batch_size)
    facts = [pairs.report("training pairs"), dropped]
    for split in held_out:
        compared[split] = rows = encode(compared[split])
        facts.append(rows.report(f"{split} pairs"))
        if args.eval_pairs and not rows:
            reasons = "; ".join(rows.reasons) or "no such split"
            raise SystemExit(f"--eval-pairs {args.eval_pairs}: no pairs for {split}: {reasons}")
    return pairs, held_out, {split: rows for split, rows in compared.items() if rows}, facts


def load_models(model, frozen, device, at_once, args):
    """-> policy, frozen reference, engine. With LoRA the reference is the policy itself, used under
    adapters_off."""
    if args.lora_rank:
        add_lora(model, args.lora_rank, args.lora_alpha, args.lora_targets, args.seed)
    # sharded before weights are read: no rank ever holds the whole model
    model = ref_model = load_weights(parallelize(model, args), device)
    if not args.lora_rank:
        ref_model = meta_model(args.model, frozen).requires_grad_(False)
        load_weights(parallelize(ref_model, args), device)
    if not args.eval_limit:
        return model, ref_model, None
    return model, ref_model, make_engine(args.model, device=device, max_batch_size=at_once)


def main(args):
    if args.beta <= 0:
        raise SystemExit(
            f"--beta {args.beta}: must be positive; algos/sft.py trains on chosen answers alone"
        )
    device = setup_distributed(args.sequence_parallel)
    group_share(args.batch_size, "--batch-size")
    task, tokenizer = load_task(args.task), load_tokenizer(args.model)
    frozen = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = meta_model(args.model, frozen if args.lora_rank else torch.float32)
    pairs, held_out, compared, facts = load_data(task, tokenizer, model, args)
    draws = args.mc_num * args.masks_per_timestep
    args.micro_batch_size, at_once = fit_answers(
        pairs, held_out, vars(args), draws, has_reference=True
    )
    model, ref_model, engine = load_models(model, frozen, device, at_once, args)
    optimizer, start, log, saves = open_run(task, model, tokenizer, args)
    stream, stop = ShuffledStream(pairs, args.seed, log.run_dir), Stop()
    log.say("\n".join(facts))
    if engine:
        log.say(f"evaluations: {engine.plan(**decoding(args))}")
    with adapters_off(ref_model) as reference:
        for split, rows in compared.items():
            compared[split] = held_out_draws(rows, args, model, reference, device)

    def score(split, name):
        metrics = evaluate(engine, model, task, tokenizer, held_out[split], name, args)
        if split in compared:
            metrics |= held_out_metrics(model, *compared[split], name, args)
        return metrics

    if engine and not start:
        log.write(0, score("test", "test"))
    for step in range(start, args.max_steps):
        clock = Stopwatch()
        with clock("data"):
            batch, masks, ref_masks = draw_batch(stream, model, device, step, args)
        with clock("reference"), adapters_off(ref_model) as reference:
            ref_elbos = elbo_values(reference, batch, ref_masks, args)
        with clock("update"), router_metrics(model) as routing:
            sums = backward(model, batch, masks, ref_elbos, args)
            metrics = optimizer_step(optimizer, sums, step, args)
        if engine and args.eval_every and (step + 1) % args.eval_every == 0:
            with clock("eval"):
                metrics |= score("validation", "eval")
        tokens = all_reduce({"tokens": batch.valid_mask.sum()})["tokens"]
        metrics |= {"speed/tokens_per_s": tokens / clock["time/update"]} | clock | routing
        log.write(step + 1, metrics | machine_metrics())
        # >>> shared: offline_save
        stopped = stop.is_set()
        saves.after_step(step + 1, metrics, stopped)
        if stopped:
            log.say(f"step {step + 1}: {stop.reason}; go on with --resume {log.run_dir}")
            break
        # <<< shared: offline_save
    else:  # not stopped
        if engine:
            log.write(args.max_steps, score("test", "test"))
    log.end(saves.newest)
    close_distributed()


if __name__ == "__main__":
    main(command_line(Args, BY_SIZE))
