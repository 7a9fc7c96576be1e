"""Coupled-GRPO (DiffuCoder, arXiv 2506.20639): GRPO on a score from two complementary masks.

score = 1/2 [lp(all masked) + a lp(mask a) / t + (1 - a) lp(mask not a) / (1 - t)]
        a ~ Bernoulli(t) per token, t ~ U(0.2, 0.8) per group
ratio = exp(score - old), and the loss is d1's: every token is scored once with all masked and
        once in a half-masked context; a block model sees the clean blocks before its own

What differs from d1, and why:
1. Three passes score a row, two of them with complementary masks, so that every token is
   predicted once with all masked and once in context.
2. The clip couples the three, so one forward takes them all.
3. The prompt stays clean: the masks of the completion are random already.
4. With all weights the reference moves with the policy.

python   algos/coupled_grpo.py                                      # the tiny model on a CPU
torchrun --nproc-per-node 8 algos/coupled_grpo.py --model dream-7b  # GSM8K, LoRA, eight GPUs
"""

# >>> shared: imports
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
from models import adapters_off, add_lora, load_weights, meta_model, router_metrics, set_speed
from models.tensors import frozen_dtype
from rollout import sync_engine
from rollout.rows import Rows
from run import Problems, RolloutFlags, Run

# B sequences, G completions per prompt, P prompt length, L completion length, T = P + L
# R rows: terms of the loss. K draws: noisy copies of a row
# run/flags.py has the rest: GSM8K, LoRA of rank 128, 100 steps; models/names.py the lengths
TINY = {  # what every method takes on the tiny models
    "task": "countdown", "lora_rank": 0, "learning_rate": 3e-4, "betas": (0.9, 0.99),
    "weight_decay": 0.0, "max_grad_norm": 1.0, "temperature": 1.0, "num_generations": 8,
    "prompts_per_step": 16, "warmup_steps": 5, "eval_every": 25, "eval_limit": 512,
}  # fmt: skip
# <<< shared: imports
# isort: split
from typing import Literal


@dataclass
class Args(RolloutFlags):
    learning_rate: float = 3e-6
    """AdamW (d1: 3e-6 with LoRA; official recipe, all weights: 1e-6)"""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW (official recipe)"""
    weight_decay: float = 0.1
    """AdamW (official recipe: 0.1)"""
    max_grad_norm: float = 0.2
    """gradient norm clip (official recipe: 0.2)"""
    temperature: float = 1.2
    """of the rollout (paper: 1.2; official recipe: 1.0)"""
    top_p: float = 1.0
    """nucleus of the rollout (official recipe: 0.95); the scores ignore it"""
    num_generations: int = 10
    """completions per prompt, G (official recipe: 10)"""
    num_iterations: int = 2
    """updates per rollout, mu (official recipe: 2)"""
    epsilon: float = 0.5
    """clip range (official recipe: 0.5)"""
    beta: float = 0.01
    """KL coefficient (official recipe: 0.01)"""
    ref_sync_steps: int = 64
    """optimizer steps between updates of the reference; 0, or with LoRA: never (official: 64)"""
    ref_mixup: float = 0.6
    """share of the policy in an updated reference (official recipe: TRL's default, 0.6)"""
    t_range: tuple[float, float] = (0.2, 0.8)
    """masked share t of one half; the other has 1 - t (paper: 0.2 to 0.8)"""
    baseline: Literal["mean", "loo"] = "mean"
    """of the group (paper's headline), or leave-one-out (official code, a row of the paper)"""
    remasking: Literal["low_confidence_static", "low_confidence_dynamic", "random", "entropy"] = (
        "low_confidence_static"
    )
    """which masked tokens a step reveals; entropy: those of lowest entropy (official recipe)"""
    RANGES = {"t_range": (1e-6, 0.999999)}

    def num_draws(self, replays):
        return 3


# What differs on the tiny models, and on others where all weights train.
BY_SIZE = {
    "tiny": TINY,
    "full": {"learning_rate": 1e-6},
}
RECORDS = None  # read from the rollout besides tokens: "steps", "events", "states" or "draws"
USES_OLD = True  # policy_loss compares with the estimates before the first update
DRAWS_TOGETHER = True  # the K draws of a row need one forward: the loss is no sum over them


def sample_masks(batch, iteration, args):
    """Three draws mask the whole completion, a random part a of it, and the rest.

    Weights 1/2, a / 2t, (1 - a) / 2(1 - t); one t for each group; the prompt stays clean. All three
    mask everything after the EOS, so that no later token shows where the end is.
    -> Rows, R = B, K = 3
    """
    c, (low, high) = batch.completion_mask, args.t_range
    # keyed by the first sample of the group
    u = batch.uniform(iteration, "t", 0)[:: args.num_generations]
    t = (low + (high - low) * u).repeat_interleave(args.num_generations, 0)  # [B, 1]
    a = batch.uniform(iteration, 0) < t
    parts = torch.stack([torch.ones_like(a), a, ~a], 1)  # [B, 3, L]
    shares = torch.stack([torch.ones_like(t), t, 1 - t], 1)
    return Rows(batch, parts | ~c[:, None], parts * c[:, None] / (2 * shares))


def estimate_logps(logps, rows, args):
    """Weighted sum of the passes, on average 1.5 log-probabilities. [R, 3, L] -> [R, L]"""
    return (rows.weights * logps).sum(1)


def compute_advantages(rewards, args):
    """Reward minus the mean of the group, or of its other members; no std. [B] -> [B]"""
    # >>> shared: method_centred
    groups = rewards.view(-1, args.num_generations)
    groups = groups - groups[:, :1]  # equal rewards give exactly 0
    groups = groups - groups.mean(1, keepdim=True)
    # <<< shared: method_centred
    G = args.num_generations  # r - mean of the others = G / (G - 1) (r - mean of all)
    scale = G / (G - 1) if args.baseline == "loo" else 1
    return (scale * groups).flatten()


def policy_loss(estimates, old, ref, rows, args):
    """PPO clip and k3 KL, mean over all tokens of the step. estimates, old, ref [R, L]

    -> loss, metrics
    """
    A, c = rows.advantages[:, None], rows.completion_mask / rows.batch.num_tokens
    # >>> shared: method_kl
    log_ratio = torch.zeros_like(estimates) if ref is None else ref - estimates
    kl = ((log_ratio.expm1() - log_ratio) * c).sum()  # k3
    # <<< shared: method_kl
    # >>> shared: method_clip
    ratio = (estimates - old).exp()
    clipped = ratio.clamp(1 - args.epsilon, 1 + args.epsilon)
    policy = (-torch.minimum(ratio * A, clipped * A) * c).sum()
    metrics = {
        "loss/policy": policy,
        "loss/kl": kl,
        "policy/ratio": (ratio * c).sum(),
        "policy/clip_frac": ((clipped * A < ratio * A) * c).sum(),
        "policy/weight": c.sum(),
    }
    # <<< shared: method_clip
    return policy + args.beta * kl, metrics


# >>> shared: reference
@torch.no_grad()
def move_reference(ref_model, model, args):
    """reference <- ref_mixup policy + (1 - ref_mixup) reference"""
    for ref, new in zip(ref_model.parameters(), model.parameters(), strict=True):
        # a reference that every rank holds whole is no DTensor
        new = new if hasattr(ref, "to_local") else new.full_tensor()
        ref.lerp_(new.to(ref.dtype), args.ref_mixup)


# <<< shared: reference


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


# >>> shared: learner
def draw_logps(model, rows, entropy=False):
    """The only forward in training: log-probabilities of the tokens that the draws score.

    -> [R, K, L] fp32, 0 elsewhere; with entropy=True a pair (logps, entropies without gradient)
    """
    how = {"temperature": rows.temperature, "entropy": entropy, "targets": rows.targets}
    # weights, of the completion: the last L columns
    return model.logps(rows.input_ids, rows.noisy_ids, rows.weights != 0, rows.valid_mask, **how)


def frozen_estimates(model, rows, args):
    """Estimates of all rows without a graph: the old and the reference values."""
    estimates = lambda micro: estimate_logps(draw_logps(model, micro), micro, args)
    return rows.evaluate(args.micro_batch_size, estimates)


def prepare_rows(model, ref, batch, args):
    """Rows of every inner iteration, with old and reference values, before the first update."""
    iterations = []
    for iteration in range(args.num_iterations):
        rows = sample_masks(batch, iteration, args)
        if rows is None:  # nothing random: the same rows for all
            return iterations * args.num_iterations
        rows = rows.for_update(args.micro_batch_size, DRAWS_TOGETHER, keep_all=args.beta > 0)
        if USES_OLD and args.num_iterations > 1:
            rows.old = frozen_estimates(model, rows, args)
        if args.beta:
            with adapters_off(ref or model) as reference:
                rows.ref = frozen_estimates(reference, rows, args)
        iterations.append(rows)
    return iterations


def micro_loss(model, rows, args):
    """-> share of the loss of a micro-batch, metrics"""
    logps, entropies = draw_logps(model, rows, entropy=True)
    estimates = estimate_logps(logps, rows, args)
    # with one update per rollout the old values are the current ones
    old = estimates.detach() if rows.old is None else rows.old
    loss, metrics = policy_loss(estimates, old, rows.ref, rows, args)
    return loss, metrics | rows.mismatch(logps, entropies)


# <<< shared: learner


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
    # >>> shared: load
    problems = Problems(args, model, RECORDS, DRAWS_TOGETHER, USES_OLD)
    engine = problems.make_engine(device)
    model, ref = load_models(model, device, args)
    optimizer = make_optimizer(model, args)
    run = Run(__file__, args, problems, model, optimizer)
    run.begin(engine, model)
    # <<< shared: load
    # >>> shared: reference_kept
    if ref_moves := ref and args.ref_sync_steps:
        run.saves.include(ref, None, run.start)
    # <<< shared: reference_kept
    for step, clock in run.steps():
        # >>> shared: reference_moved
        updates = step * args.num_iterations
        if ref_moves and step and updates % args.ref_sync_steps < args.num_iterations:
            move_reference(ref, model, args)
        # <<< shared: reference_moved
        # >>> shared: rollout
        with clock("rollout"):
            trace = engine.generate(**problems.request(step, args.num_generations))
            engine.make_room()
        with clock("reward"):
            batch, rewards, metrics = problems.reward(trace, step, model)
        batch.advantages = compute_advantages(rewards, args)
        # <<< shared: rollout
        # >>> shared: learn
        if args.positive_only:
            batch.advantages.clamp_(min=0)
        with clock("update"), router_metrics(model) as routing:
            for rows in prepare_rows(model, ref, batch, args):
                learned = update(model, optimizer, rows, step, args)
        with clock("sync"):
            sync_engine(engine, model)
        metrics |= learned | routing | run.validate(engine, model)
        run.end_step(metrics, batch)
    run.end(engine)


if __name__ == "__main__":
    start(main, Args, BY_SIZE)
# <<< shared: learn
