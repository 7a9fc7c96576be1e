"""ESPO (arXiv 2512.03759): PPO on the whole completion, with its ELBO as the log-likelihood.

loss  = mean over sequences of -min(ratio A, clip(ratio, 1-eps, 1+eps) A) + beta KL
ratio = exp((elbo - old) / L), L tokens;  KL = (elbo - ref)^2 / 2L
elbo  = mean over pairs of masks of 1/2 [(n+1)/k lp(masked) + (n+1)/(n-k) lp(the rest, masked)]
        k of n tokens masked, k ~ U{0..n}; on a block model those of each block, given the clean
        blocks before it

What differs from d1, and why:
1. The completion is one action with one ratio, of its ELBO, because its reward is one.
2. The ratio is taken per token: over the whole length it would leave any clip range at once.
3. Masks come in complementary pairs, so that every token counts once in a pair.
4. The KL is k2: the exponential of k3 explodes on the noise of an ELBO.
5. Advantages are leave-one-out; the prompt stays clean; with all weights the reference moves with
   the policy.

python   algos/espo.py                                      # the shipped tiny model on a CPU
torchrun --nproc-per-node 8 algos/espo.py --model llada-8b  # GSM8K, LoRA, eight GPUs
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
from rollout.rows import block_counts


@dataclass
class Args(RolloutFlags):
    learning_rate: float = 3e-6
    """AdamW (official recipes: 3e-6, LoRA)"""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW (official train.yaml)"""
    weight_decay: float = 0.01
    """AdamW (official recipes: 0.01; code: 0.1)"""
    max_grad_norm: float = 0.2
    """gradient norm clip (official train.yaml: 0.2; code: 0.8)"""
    temperature: float = 1.0
    """of the rollout (official train.yaml: 1.0)"""
    num_generations: int = 6
    """completions per prompt, G (official recipes: 6; math 16, code 10)"""
    num_iterations: int = 8
    """updates per rollout, mu (official recipes: 8)"""
    epsilon: float = 0.2
    """clip range of the ratio per token (official train.yaml: 0.2; countdown 0, demos 4e-4)"""
    beta: float = 1e-3
    """KL coefficient (official gsm8k and math: 1e-3; countdown 3e-3; sudoku and code 1e-2)"""
    ref_sync_steps: int = 64
    """optimizer steps between updates of the reference; 0, or with LoRA: never (official: 64)"""
    ref_mixup: float = 0.6
    """share of the policy in an updated reference (official recipe: TRL's default, 0.6)"""
    mc_num: int = 2
    """pairs of masks per sequence, M (official recipes: 2)"""

    def num_draws(self, replays):
        return 2 * self.mc_num


# What differs on the tiny models, and on others where all weights train.
# All weights: the official recipe for code.
BY_SIZE = {
    "tiny": TINY | {"num_iterations": 2},
    "full": {"learning_rate": 1e-6},
}
RECORDS = None  # read from the rollout besides tokens: "steps", "events", "states" or "draws"
USES_OLD = True  # policy_loss compares with the estimates before the first update
DRAWS_TOGETHER = True  # the K draws of a row need one forward: the loss is no sum over them


def sample_masks(batch, iteration, args):
    """A pair of draws masks a random part of each likelihood block, and the rest of it.

    Masked are the k of n tokens whose noise is below t ~ U(0, 1): k is uniform on 0..n, and all
    parts of a size are equally likely. One t for each block, stratified over the pairs. Weights
    (n + 1) / k and (n + 1) / (n - k). Both draws mask everything after the EOS, so that no later
    token shows where the end is. -> Rows, R = B, K = 2 mc_num
    """
    c, block = batch.completion_mask, batch.block_ids
    # searchsorted finds the first column of a block: its t serves all tokens of the block
    t = batch.uniform(iteration, "t", torch.searchsorted(block, block))
    n, weights = block_counts(c, block)[0], []
    for j in range(args.mc_num):
        below = batch.uniform(iteration, j) < (t + j / args.mc_num) % 1
        for part in (c & below, c & ~below):
            weights.append(part * (n + 1) / block_counts(part, block)[0].clamp(min=1))
    weights = torch.stack(weights, 1)
    return Rows(batch, (weights > 0) | ~c[:, None], weights)


def estimate_logps(logps, rows, args):
    """ELBO of a completion: mean over draws of the sum over its tokens. [R, K, L] -> [R]"""
    return (rows.weights * logps).sum(2).mean(1)


def compute_advantages(rewards, args):
    """Reward minus the mean of the other members of the group; no std. [B] -> [B]"""
    # >>> shared: method_centred
    groups = rewards.view(-1, args.num_generations)
    groups = groups - groups[:, :1]  # equal rewards give exactly 0
    groups = groups - groups.mean(1, keepdim=True)
    # <<< shared: method_centred
    G = args.num_generations  # r - mean of the others = G / (G - 1) (r - mean of all)
    return (G / (G - 1) * groups).flatten()


def policy_loss(estimates, old, ref, rows, args):
    """PPO clip of the ratio per token, k2 KL of the whole ELBO. estimates, old, ref [R]

    -> loss, metrics
    """
    # >>> shared: method_clip_whole
    # c: share of a sequence in the mean over all of the step
    A, L, c = rows.advantages, rows.completion_mask.sum(1), 1 / rows.batch.num_sequences
    ratio = ((estimates - old) / L).exp()
    clipped = ratio.clamp(1 - args.epsilon, 1 + args.epsilon)
    policy = -torch.minimum(ratio * A, clipped * A).sum() * c
    metrics = {
        "loss/policy": policy,
        "policy/elbo": estimates.sum() * c,
        "policy/ratio": ratio.sum() * c,
        "policy/clip_frac": (clipped * A < ratio * A).sum() * c,
        "policy/weight": torch.ones_like(A).sum() * c,
    }
    # <<< shared: method_clip_whole
    gap = torch.zeros_like(estimates) if ref is None else estimates - ref
    kl = (gap**2 / (2 * L)).sum() * c  # k2 of the ratio per token would be L times less
    return policy + args.beta * kl, metrics | {"loss/kl": kl}


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
