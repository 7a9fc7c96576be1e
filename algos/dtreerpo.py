"""d-TreeRPO (arXiv 2512.09675): GRPO on trees of rollouts; a segment is judged by its siblings.

V      = reward of a leaf; of any other node the mean over its children
A      = V - mean of V over the siblings
logps  = log-probabilities of the tokens that a segment reveals, in one forward of its parent
loss_s = mean over these tokens of
         -min(ratio A, clip(ratio, 1-eps, 1+eps) A) + beta KL(policy || ref)
loss   = mean over segments of loss_s + lambda(t) * mean over positions of
         -sum of q logps over the siblings with A > 0, q ~ exp(A / tau(t))

What differs from d1, and why:
1. Rollouts are trees: siblings judge a segment, which gives credit inside a completion.
2. A row is a segment, scored in the canvas of its parent, which is a state of the sampler.
3. Advantages are leave-one-out over siblings, one for each segment of a completion.
4. Distillation towards better siblings sharpens the model, because one forward scores the
   tokens of a segment as if they were independent.

python   algos/dtreerpo.py                                      # the shipped tiny model on a CPU
torchrun --nproc-per-node 8 algos/dtreerpo.py --model llada-8b  # GSM8K, LoRA, eight GPUs
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
from itertools import accumulate
from operator import mul
from typing import Literal

from distributed.groups import over_ranks
from rollout.traces import among


@dataclass
class Args(RolloutFlags):
    learning_rate: float = 3e-5
    """AdamW (official dtreerpo.yaml: 3e-5)"""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW (official dtreerpo.yaml)"""
    weight_decay: float = 0.1
    """AdamW (official dtreerpo.yaml: 0.1)"""
    max_grad_norm: float = 0.2
    """gradient norm clip (official dtreerpo.yaml: 0.2)"""
    temperature: float = 0.9
    """of the rollout, and of the scored distribution (official config: 0.9)"""
    num_generations: int = 16
    """leaves of a tree, the completions of a prompt (official: 4 x 4)"""
    branches: tuple[int, ...] = (4, 4)
    """children of a node, the root's first; all paths are cut into as many segments, of equally
    many denoising steps (official: 4 4)"""
    num_iterations: int = 12
    """updates per rollout, mu (official dtreerpo.yaml: 12, for each parent)"""
    epsilon: float = 0.4
    """clip range (official dtreerpo.yaml: 0.4)"""
    beta: float = 0.01
    """KL coefficient (official dtreerpo.yaml: 0.01)"""
    lambda_max: float = 3e-3
    """weight of the self-distillation at the end of the run, or after --schedule-steps, which a
    resumed run with more --max-steps needs to go on as planned (official dtreerpo.yaml: 3e-3)"""
    gamma: float = 2.0
    """exponential growth of this weight (official dtreerpo.yaml: 2)"""
    tau_max: float = 2.0
    """temperature of its targets at the start; 0 at the end (official dtreerpo.yaml: 2)"""
    tau_power: float = 0.7
    """power with which tau falls (official dtreerpo.yaml: 0.7)"""
    remasking: Literal[
        "low_confidence_static", "low_confidence_dynamic", "random", "entropy", "sequential"
    ] = "low_confidence_static"
    """which masked tokens a step reveals; entropy, sequential: whatever tokens are drawn"""
    # the rollouts of --refill are no trees
    RANGES = {"branches": 2, "gamma": (1e-6, 100), "refill": (0, 0)}


# What differs on the tiny models, with all weights, and on real bidirectional models.
# The rate of all weights is ours.
BY_SIZE = {
    "tiny": TINY | {"branches": (4, 2), "num_iterations": 4},
    "full": {"learning_rate": 5e-7},
    # without a cache a rollout took 12 s a prompt on an H200
    "bidirectional": {"cache": "none", "prompts_per_step": 2},
}  # fmt: skip
RECORDS = "steps"  # the trace holds the step maps
USES_OLD = True  # policy_loss compares with the estimates before the first update
DRAWS_TOGETHER = False  # a row has one of them


def tree_forks(args, block_length):
    """Where the paths of a tree fork, so that its segments have equally many denoising steps.

    -> numbers of steps, as `until` of Engine.generate counts them, one less than there are
    segments. SystemExit where no such tree exists.
    """
    steps = -(-args.gen_length // block_length) * args.denoising_steps
    depth, product = len(args.branches), math.prod(args.branches)
    flag = f"--branches {' '.join(map(str, args.branches))}"
    if product != args.num_generations:
        wanted = f"--num-generations {product}, or branches whose product is {args.num_generations}"
        raise SystemExit(f"{flag} makes trees of {product} leaves: give {wanted}")
    if depth > steps:
        wanted = f"give at most {steps} numbers, or more --denoising-steps or --gen-length"
        raise SystemExit(f"{flag} needs {depth} denoising steps, a rollout has {steps}: {wanted}")
    return [s * steps // depth for s in range(1, depth)]


def sample_trees(engine, args, prompt_ids, num_samples, sample_offset, **settings):
    """As engine.generate; the samples of a prompt are the leaves of a tree. It is made in parts:
    those below a node share the tokens that were revealed before it.
    """
    forks, canvas = tree_forks(args, engine.block_length(args.block_length)), None
    for nodes, until in zip(accumulate(args.branches, mul), [*forks, None], strict=True):
        part = {"num_samples": nodes, "sample_offset": sample_offset * nodes // num_samples}
        canvas = engine.generate(prompt_ids, canvas=canvas, until=until, **part, **settings)
    return canvas


def tree_segments(trace, args):
    """The S segments from the root of a tree to each leaf.

    -> [B, S, L] bool: masked in the canvas from which a segment starts; revealed by it, up to the
    first EOS of the canvas with which it ends
    """
    ids, block_length = trace.completion_ids, trace.settings["block_length"]
    forks = tree_forks(args, block_length)
    step = trace.blocks * args.denoising_steps + trace.step_map  # counted over all blocks
    number = torch.bucketize(step, ids.new_tensor(forks), right=True)
    new, masked = trace.replayed(number.where(trace.step_map >= 0, -1), len(forks) + 1)
    is_eos = among(ids, trace.settings["eos_token_ids"])
    seen = is_eos[:, None] & (new | ~masked)  # in the canvas with which a segment ends
    return masked, new & (seen.cumsum(2) - seen.long() == 0)


def schedule(progress, args):
    """Self-distillation grows and sharpens over the run, progress in [0, 1]. -> lambda, tau"""
    weight = args.lambda_max * math.expm1(args.gamma * progress) / math.expm1(args.gamma)
    return weight, max(args.tau_max * (1 - progress) ** args.tau_power, 1e-6)


def sibling_targets(A, active, tau):
    """What each token weighs in the target of its position: softmax(A / tau) over the siblings
    with A > 0 that reveal the position.

    A [F, K], active [F, K, L] bool, of the K children of F nodes -> [F, K, L], sums over K: 1 or 0
    """
    kept = active & (A > 0)[..., None]
    return (A / tau)[..., None].where(kept, -math.inf).softmax(1).where(kept, 0.0)


def sample_masks(batch, iteration, args):
    """A row is a segment: what it reveals, up to the first EOS of its child, scored in one forward
    of its parent. Nothing is random, so that all iterations have the rows of the first.

    Its tokens are read from the first leaf below it. Weights 1 / (tokens of the segment x
    segments), targets lambda q / positions.
    -> Rows, one per segment, K = 1, with sibling_weights [R, L]
    """
    if iteration > 0:
        return None
    weight, tau = schedule(batch.progress, args)
    masked, revealed = tree_segments(batch.trace, args)  # [B, depth, L]
    leaves, segments = args.num_generations, []
    for s, K in enumerate(args.branches):
        leaves //= K
        index = torch.arange(0, len(masked), leaves)  # the first leaf below each child
        A, active = batch.advantages[index, s], revealed[index, s]
        targets = sibling_targets(A.view(-1, K), active.unflatten(0, (-1, K)), tau)
        segments.append((index, masked[index, s], active, A, targets.flatten(0, 1)))
    index, masked, active, A, targets = map(torch.cat, zip(*segments, strict=True))
    weights = active / active.sum(1, keepdim=True).clamp(min=1) / over_ranks(len(index))
    rows = Rows(batch, masked[:, None], weights[:, None], index)
    rows.sibling_weights = weight * targets / max(over_ranks(targets.sum()), 1)
    rows.advantages, rows.temperature = A, args.temperature
    return rows


# >>> shared: method_estimate
def estimate_logps(logps, rows, args):
    """The single pass is the estimate. [R, 1, L] -> [R, L]"""
    return logps[:, 0]


# <<< shared: method_estimate


def compute_advantages(rewards, args):
    """Leave-one-out over siblings; the value of a node is the mean over its children.

    rewards [B] of the leaves -> [B, depth], of the segments from the root to each leaf
    """
    values, advantages = rewards, []
    for K in reversed(args.branches):
        siblings = values.view(-1, K)
        gap = siblings - siblings[:, :1]  # equal values give exactly 0
        A = (gap - gap.mean(1, keepdim=True)) * K / (K - 1)
        advantages.insert(0, A.flatten().repeat_interleave(len(rewards) // A.numel()))
        values = siblings.mean(1)
    return torch.stack(advantages, 1)


def policy_loss(estimates, old, ref, rows, args):
    """PPO clip and k3 KL, equal weight for each segment; cross-entropy to the siblings' targets.

    estimates, old, ref [R, L] -> loss, metrics
    """
    A, c = rows.advantages[:, None], rows.weights[:, 0]  # [R, 1], [R, L]
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
    distillation = -(rows.sibling_weights * estimates).sum()
    return policy + args.beta * kl + distillation, metrics | {"loss/distillation": distillation}


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
    tree_forks(args, args.block_length or model.block_length)  # refuses
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
            trace = sample_trees(engine, args, **problems.request(step, args.num_generations))
            engine.make_room()
        with clock("reward"):
            batch, rewards, metrics = problems.reward(trace, step, model)
        batch.advantages = compute_advantages(rewards, args)  # [B, depth]
        # <<< shared: rollout
        batch.progress = min(step / (args.schedule_steps or args.max_steps), 1.0)
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
