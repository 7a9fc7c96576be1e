"""d1 / diffu-GRPO (arXiv 2504.12216): GRPO with one-pass mean-field token log-probabilities.

loss  = mean over tokens of -min(ratio A, clip(ratio, 1-eps, 1+eps) A) + beta KL(policy || ref)
ratio = exp(logps - old);  logps: one forward with the whole completion and 15 % of the prompt
        masked; a block model sees the clean blocks before the one it predicts, as in sampling

python   algos/d1.py                                     # the shipped tiny model on a CPU
torchrun --nproc-per-node 8 algos/d1.py --model sdar-8b  # GSM8K, LoRA, eight GPUs
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


@dataclass
class Args(RolloutFlags):
    learning_rate: float = 3e-6
    """AdamW (official train.yaml: 3e-6)"""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW (official train.yaml)"""
    weight_decay: float = 0.1
    """AdamW (official train.yaml: 0.1)"""
    max_grad_norm: float = 0.2
    """gradient norm clip (official train.yaml: 0.2)"""
    temperature: float = 0.9
    """of the rollout (official config: 0.9)"""
    num_generations: int = 6
    """completions per prompt, G (official train.yaml: 6)"""
    num_iterations: int = 12
    """updates per rollout, mu (official gsm8k and math: 12; countdown and sudoku: 8)"""
    epsilon: float = 0.5
    """clip range (official train.yaml: 0.5)"""
    beta: float = 0.04
    """KL coefficient (official train.yaml: 0.04)"""
    p_mask_prompt: float = 0.15
    """probability of masking a prompt token (official train.yaml: 0.15)"""


# What differs on the tiny models, and on others where all weights train (rates of ours).
BY_SIZE = {"tiny": TINY | {"num_iterations": 4}, "full": {"learning_rate": 5e-7}}
RECORDS = None  # read from the rollout besides tokens: "steps", "events", "states" or "draws"
USES_OLD = True  # policy_loss compares with the estimates before the first update
DRAWS_TOGETHER = True  # the K draws of a row need one forward: the loss is no sum over them


# >>> shared: method_one_pass
def sample_masks(batch, iteration, args):
    """The whole completion is masked, and each prompt token with p_mask_prompt (Sec. 3.2).

    A masked prompt token is masked in the clean ids too: a block model attends to those.
    -> Rows, R = B sequences, K = 1, weight 1 on every completion token
    """
    c = batch.completion_mask
    hidden = batch.uniform(iteration, 0, batch.offset) < args.p_mask_prompt  # [B, T]
    hidden = hidden & batch.valid_mask & (batch.offset < 0)  # of the prompt alone
    rows = Rows(batch, torch.ones_like(c)[:, None], c[:, None])
    rows.masked |= hidden[:, None]
    rows.input_ids = torch.where(hidden, batch.mask_token_id, batch.input_ids)
    return rows


# <<< shared: method_one_pass


# >>> shared: method_estimate
def estimate_logps(logps, rows, args):
    """The single pass is the estimate. [R, 1, L] -> [R, L]"""
    return logps[:, 0]


# <<< shared: method_estimate


def compute_advantages(rewards, args):
    """Reward minus group mean, not divided by the std. [B] -> [B]"""
    # >>> shared: method_centred
    groups = rewards.view(-1, args.num_generations)
    groups = groups - groups[:, :1]  # equal rewards give exactly 0
    groups = groups - groups.mean(1, keepdim=True)
    # <<< shared: method_centred
    return groups.flatten()


def policy_loss(estimates, old, ref, rows, args):
    """PPO clip and k3 KL, mean over all tokens of the step. [R, L] each -> loss, metrics"""
    # c: share of a token in the mean over all tokens of the step
    A, c = rows.advantages[:, None], rows.weights[:, 0] / rows.batch.num_tokens  # [R, 1], [R, L]
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
