"""StableDRL (arXiv 2603.06743): SPG's bounds with clipped, self-normalised importance weights.

elbo  = mean over draws of w logp, per token
eubo  = 1/beta mean over tokens of log mean over draws of w p^beta
bound = elbo if A > 0, omega eubo + (1 - omega) elbo if A < 0
ratio = min(exp(elbo - old), clip_ratio), whatever the sign of A; without gradient
loss  = -mean over groups of sum of ratio A bound / sum of ratio, sums over the group
w     = tokens / masked tokens where masked. A draw masks part of one block of the rollout, all
        that follows it, and a little of what precedes it; a block model does so inside each of
        its blocks and sees the clean blocks before it

What differs from d1, and why:
1. Masks and bounds are SPG's: a ratio of ELBOs is noisy, so the loss has the bound itself.
2. Ratios are weights, clipped for both signs of A: PPO's clip lets those of A < 0 grow.
3. They are divided by their mean in the group, so that an update is a mean of its completions'.
4. The mean needs the current ELBOs of the whole group: one forward more in each update, unless a
   rollout has one update only.
5. No KL, so no reference.

python   algos/stabledrl.py                                      # the tiny model on a CPU
torchrun --nproc-per-node 8 algos/stabledrl.py --model llada-8b  # GSM8K, LoRA, eight GPUs
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
from rollout.rows import block_counts, choose_in_blocks


@dataclass
class Args(RolloutFlags):
    learning_rate: float = 3e-6
    """AdamW (Block-R1, LoRA: 3e-6; official, all weights: 2e-6, countdown and sudoku 1e-6)"""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW (official configs)"""
    weight_decay: float = 0.1
    """AdamW (official configs: 0.1)"""
    max_grad_norm: float = 0.2
    """gradient norm clip (official configs: 0.2)"""
    temperature: float = 0.9
    """of the rollout (official configs: 0.9)"""
    num_generations: int = 16
    """completions per prompt, G (official configs: 8 x `repeat_times` 2)"""
    num_iterations: int = 2
    """updates per rollout, mu (official configs: 2)"""
    # >>> shared: method_bound_flags
    mc_num: int = 2
    """mask draws per sequence, at least 2, or both bounds are the same (SPG, StableDRL: 2)"""
    omega: float = 0.5
    """share of the upper bound where A < 0 (both: 0.5; SPG's EUBO row: 1, its ELBO row: 0)"""
    eubo_beta: float = 1.5
    """order of the upper bound (both: 1.5; SPG on sudoku: 1, its EUBO row on countdown: 2)"""
    p_mask_context: float = 0.15
    """probability of masking tokens of the prompt and of earlier blocks (both: 0.15)"""
    beta = 0.0  # no KL: not a flag
    RANGES = {"mc_num": 2, "omega": (0, 1), "eubo_beta": 1}
    # <<< shared: method_bound_flags
    clip_ratio: float = 5.0
    """largest ratio (official `ais_clip_iw`: 5)"""
    RANGES |= {"clip_ratio": 1}


# What differs on the tiny models, and on others where all weights train.
# All weights: the official config of GSM8K.
BY_SIZE = {"tiny": TINY, "full": {"learning_rate": 2e-6}}
RECORDS = None  # read from the rollout besides tokens: "steps", "events", "states" or "draws"
USES_OLD = True  # policy_loss compares with the estimates before the first update
DRAWS_TOGETHER = True  # the K draws of a row need one forward: the loss is no sum over them


# >>> shared: method_bounds
def sample_masks(batch, iteration, args):
    """In each likelihood block a draw picks one block of the rollout.

    Of its n scored tokens k are masked, k uniform on 1..n; all tokens after it are masked, and each
    before it with p_mask_context. Picks and counts are stratified over the draws (floor form).
    Weights: tokens / masked tokens of the likelihood block. All draws mask the same prompt tokens,
    in the clean ids too, because a block model attends to those. -> Rows, R = B, K = mc_num
    """
    c, block = batch.completion_mask, batch.block_ids
    head, n = torch.searchsorted(block, block), batch.trace.settings["block_length"]
    part = (torch.arange(c.shape[1], device=c.device) - head) // n  # block of the rollout
    tokens, _ = block_counts(c, block)
    u, v = (batch.uniform(iteration, key, head) for key in ("block", "count"))
    hidden = batch.uniform(iteration, "prompt", batch.offset) < args.p_mask_context  # [B, T]
    hidden = hidden & batch.valid_mask & (batch.offset < 0)
    masked, weights = [], []
    for j in range(args.mc_num):
        noise, shift = batch.uniform(iteration, j), j / args.mc_num
        picked = ((u + shift) % 1 * (tokens / n).ceil()).floor()
        chosen, *_ = choose_in_blocks(c & (part == picked), block, (v + shift) % 1, noise)
        lightly = (part < picked) & (noise < args.p_mask_context)
        # after the EOS all is masked, so that no later token shows where the end is
        masked.append(chosen | (part > picked) | lightly | ~c)
        scored = masked[j] & c
        weights.append(scored * tokens / block_counts(scored, block)[0].clamp(min=1))
    rows = Rows(batch, torch.stack(masked, 1), torch.stack(weights, 1))
    rows.masked |= hidden[:, None]
    rows.input_ids = torch.where(hidden, batch.mask_token_id, batch.input_ids)
    return rows


def estimate_logps(logps, rows, args):
    """Lower and upper bound of the log-likelihood, per token. [R, K, L] -> [R, 2]

    The upper one averages over tokens that a draw masked, in log space, because p^beta underflows.
    """
    w, K = rows.weights, rows.weights.shape[1]
    elbo = (w * logps).sum((1, 2)) / (K * rows.completion_mask.sum(1))
    covered = w.any(1)  # [R, L]
    terms = torch.where(w > 0, args.eubo_beta * logps + (w / K).log(), -torch.inf)
    terms = terms.masked_fill(~covered[:, None], 0.0).logsumexp(1)
    eubo = (terms / args.eubo_beta * covered).sum(1) / covered.sum(1)
    return torch.stack([elbo, eubo], 1)


# <<< shared: method_bounds


def compute_advantages(rewards, args):
    """Reward minus group mean, not divided by the std. [B] -> [B]"""
    # >>> shared: method_centred
    groups = rewards.view(-1, args.num_generations)
    groups = groups - groups[:, :1]  # equal rewards give exactly 0
    groups = groups - groups.mean(1, keepdim=True)
    # <<< shared: method_centred
    return groups.flatten()


def group_weights(estimates, rows, args):
    """Clipped ratios, divided by their mean in the group. Current estimates [R, 2] -> [R]"""
    ratio = (estimates - rows.old)[:, 0].exp().clamp(max=args.clip_ratio)
    group = rows.sequence // args.num_generations
    # completions whose A is 0 are no rows: their ratio is 1
    excess = (group == group[:, None]).to(ratio) @ (ratio - 1)
    return ratio / (1 + excess / args.num_generations)


def policy_loss(estimates, old, ref, rows, args):
    """Weighted advantage times bound, mean over groups. estimates [R, 2] -> loss, metrics"""
    c = torch.ones_like(rows.advantages) / rows.batch.num_sequences  # [R]
    # >>> shared: method_bound
    (elbo, eubo), A = estimates.unbind(1), rows.advantages  # [R]
    bound = torch.where(A > 0, elbo, elbo.lerp(eubo, args.omega))
    policy = -(A * bound * c).sum()
    metrics = {
        "loss/policy": policy,
        "policy/elbo": (elbo * c).sum(),
        "policy/eubo": (eubo * c).sum(),
        "policy/weight": c.sum(),
    }
    # <<< shared: method_bound
    return policy, metrics | {"policy/ratio": ((elbo - old[:, 0]).exp() * c).sum()}


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
    if rows.old is not None:  # else this is the only update of a rollout: all weights are 1
        weights = group_weights(frozen_estimates(model, rows, args), rows, args)
        rows.advantages = rows.advantages * weights
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
    for step, clock in run.steps():
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
