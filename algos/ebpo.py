"""EBPO (LLaDA2.1, arXiv 2602.08676): PPO on the composite ELBO of all blocks of a completion.

loss  = mean over sequences of -min(ratio A, clip(ratio, 1-eps, 1+eps) A)
ratio = exp(elbo - old), over the whole completion
elbo  = mean over n draws of the sum over blocks of  tokens / masked * sum of lp over the masked
        every draw masks tokens of every block, near one noise level; earlier blocks are clean

Block models only. `diff algos/bgpo.py algos/ebpo.py` shows what replaces BGPO's bounds.

What differs from d1, and why:
1. One ratio and one clip for a completion, because its reward is one; in log space.
2. The likelihood is the ELBO of all blocks at once, near one noise level in a draw.
3. The ratio couples the N draws, so one forward takes them all.
4. Block models only: on others it would be ESPO without the division by the length.
5. No KL; advantages are divided by the standard deviation; the prompt stays clean.

python   algos/ebpo.py                                     # the shipped tiny model on a CPU
torchrun --nproc-per-node 8 algos/ebpo.py --model sdar-8b  # GSM8K, LoRA, eight GPUs
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
import math

from rollout.rows import choose_in_blocks


@dataclass
class Args(RolloutFlags):
    learning_rate: float = 3e-6
    """AdamW (d1: 3e-6 with LoRA; DARE, all weights: 5e-7)"""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW (verl default)"""
    weight_decay: float = 0.01
    """AdamW (DARE: 0.01)"""
    max_grad_norm: float = 1.0
    """gradient norm clip (verl default: 1.0)"""
    temperature: float = 1.0
    """of the rollout (DARE: SDAR 1.0, LLaDA2 0.6)"""
    num_generations: int = 8
    """completions per prompt, G (DARE: 8)"""
    num_iterations: int = 1
    """updates per rollout (DARE: 1)"""
    epsilon: float = 0.2
    """clip range of the ratio (verl default: 0.2)"""
    mc_num: int = 16
    """mask draws per sequence, N (DARE: 16)"""
    beta = 0.0  # no KL: not a flag
    RANGES = {"epsilon": (0, 0.999)}


# What differs on the tiny models, and on others where all weights train.
BY_SIZE = {
    "tiny": TINY | {"num_iterations": 2, "mc_num": 4},
    "full": {"learning_rate": 5e-7},
}
RECORDS = None  # read from the rollout besides tokens: "steps", "events", "states" or "draws"
USES_OLD = True  # policy_loss compares with the estimates before the first update
DRAWS_TOGETHER = True  # the K draws of a row need one forward: the loss is no sum over them


def sample_masks(batch, iteration, args):
    """Draw j masks m of the n scored tokens of every likelihood block, with weights n / m.

    m = floor(level n) + 1, levels (u + (j + b / B) / N) mod 1 for blocks b of B: near one noise
    level in a draw, stratified over draws and blocks, and each m uniform on 1..n. Everything after
    the EOS is masked and not scored, so that no later token shows where the end is.
    -> Rows, R = B, K = mc_num
    """
    c, block = batch.completion_mask, batch.block_ids
    b = block - block[:, :1]
    share = b / ((b * c).amax(1, keepdim=True) + 1)  # b / B
    u = batch.uniform(iteration, "level", 0)  # [B, 1]
    weights = []
    for j in range(args.mc_num):
        level = (u + (j + share) / args.mc_num) % 1
        chosen, n, m = choose_in_blocks(c, block, level, batch.uniform(iteration, j))
        weights.append(chosen * n / m)
    weights = torch.stack(weights, 1)
    return Rows(batch, (weights > 0) | ~c[:, None], weights)


def estimate_logps(logps, rows, args):
    """Composite ELBO: mean over draws of the sum over all blocks. [R, K, L] -> [R]"""
    return (rows.weights * logps).sum(2).mean(1)


def compute_advantages(rewards, args):
    """Group-normalised reward; 0 in a group without spread. [B] -> [B]"""
    # >>> shared: method_normalised
    groups = rewards.view(-1, args.num_generations)
    std, centred = groups.std(1, keepdim=True), groups - groups.mean(1, keepdim=True)
    # <<< shared: method_normalised
    return torch.where(std > 1e-4, centred / (std + 1e-6), 0.0).flatten()


def policy_loss(estimates, old, ref, rows, args):
    """PPO clip of one ratio per completion, in log space, mean over sequences. estimates, old [R]

    -> loss, metrics
    """
    A, d, c = rows.advantages, estimates - old, 1 / rows.batch.num_sequences
    # before exp, which would overflow on the clipped side
    high, low = d.clamp(max=math.log1p(args.epsilon)), d.clamp(min=math.log1p(-args.epsilon))
    clipped = torch.where(A >= 0, high, low)
    policy = -(A * clipped.exp()).sum() * c
    return policy, {
        "loss/policy": policy,
        "policy/elbo": estimates.sum() * c,
        "policy/clip_frac": (clipped != d).sum() * c,
        "policy/weight": torch.ones_like(d).sum() * c,
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
    if model.attention != "block-causal":
        raise SystemExit(
            f"--model {args.model}: ebpo needs a block model; a {model.attention} one has no "
            "blocks that are scored given clean ones: try espo"
        )
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
