"""TraceRL (arXiv 2509.06949): PPO on the states of the rollout, token by token.

row   = a state of the rollout and the tokens that its next --shrink denoising steps revealed;
        on a block model one such state of every block
loss  = mean over rows of the sum over a row's tokens, divided by --gen-length, of
        -min(ratio A, clip(ratio, 1-eps, 1+eps) A) + kl_to_old KL(policy || old)
A     = (reward - group mean) / group std; with --value-model GAE over the denoising steps, of
        which the last one earns this A, with a value for each token

What differs from d1, and why:
1. Tokens are scored in the states that revealed them; --shrink merges steps to save passes.
2. The KL is to the policy before the rollout's updates, so there is no reference model.
3. Each update takes its share of the completions, as in PPO.
4. Groups that are too easy or too hard are left out, because they teach little.
5. An optional value model gives every token its own advantage.

python   algos/tracerl.py                                     # the shipped tiny model on a CPU
torchrun --nproc-per-node 8 algos/tracerl.py --model sdar-8b  # GSM8K, LoRA, eight GPUs
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
from dataclasses import replace

from distributed.groups import over_ranks
from models.value import load_value_model


@dataclass
class Args(RolloutFlags):
    learning_rate: float = 3e-6
    """AdamW (d1: 3e-6 with LoRA; official rl_sdar.yaml, all weights: 1e-6)"""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW (official rl_sdar.yaml)"""
    weight_decay: float = 0.0
    """AdamW (official rl_sdar.yaml: 0)"""
    max_grad_norm: float = 1.0
    """gradient norm clip (official rl_sdar.yaml: 1)"""
    temperature: float = 1.0
    """of the rollout (official rl_sdar.yaml: 1; rl_llada.yaml: 0.8)"""
    num_generations: int = 16
    """completions per prompt, G (official rl_sdar.yaml: 16; rl_llada.yaml: 8)"""
    num_iterations: int = 2
    """updates per rollout (official, all weights: one for 256 rows, about 8)"""
    minibatches: bool = True
    """each update takes its share of the completions (official); off: all of them"""
    epsilon: float = 0.2
    """clip range (official rl_sdar.yaml: 0.2)"""
    kl_to_old: float = 0.01
    """coefficient of the KL to the policy before the rollout's updates (official beta: 0.01)"""
    beta: float = 0.0
    """of the KL to the start (LightningRL, 2603.13319: 0.01, and none to the old policy)"""
    nll_weight: float = 0.0
    """of -log p of right completions, a mean over their tokens (LightningRL: 0.1)"""
    shrink: int = 1
    """denoising steps that a row merges (official rl_sdar.yaml: 1; rl_llada.yaml: 8)"""
    train_steps: int = 0
    """rounds scored, chosen at random in every update, without bias (ours); 0: all"""
    row_mean: bool = False
    """divide a row by its own tokens (official rl_llada.py), not by --gen-length (rl_sdar.py)"""
    accuracy_range: tuple[float, float] = (0.2, 0.8)
    """mean reward of the groups that are trained (official rl_reward.py: 0.2 to 0.8)"""
    value_model: bool = False
    """advantages from a value model of the policy's size, trained along with it (paper: both)"""
    value_learning_rate: float = 1.5e-5
    """AdamW of the value model (official rl_sdar_with_value.yaml, all weights: 5e-6)"""
    gamma: float = 1.0
    """discount of a denoising step (official rl_sdar_with_value.yaml: 1)"""
    lam: float = 1.0
    """GAE's lambda (official rl_sdar_with_value.yaml: 1)"""
    RANGES = {"shrink": 1}

    def num_draws(self, replays):
        return super().num_draws(-(-replays // self.shrink))  # rounds, rounded up


# What differs on the tiny models, with all weights, and on real bidirectional models.
BY_SIZE = {
    "tiny": TINY | {
        "num_iterations": 4, "accuracy_range": (0.0, 1.0), "value_learning_rate": 1e-3,
    },
    "full": {"learning_rate": 1e-6, "num_iterations": 8, "value_learning_rate": 5e-6},
    # without a cache a rollout is planned with 27 s a prompt on an H100
    "bidirectional": {
        "temperature": 0.8, "shrink": 8, "row_mean": True, "cache": "none", "prompts_per_step": 4,
    },
}  # fmt: skip
RECORDS = "steps"  # the trace holds the step maps
USES_OLD = True  # policy_loss compares with the estimates before the first update
DRAWS_TOGETHER = False  # the loss is a sum over the K draws of a row


def sample_masks(batch, iteration, args):
    """Draw k is the state before round k, of all blocks at once, and scores what round k revealed.

    Completions of groups that are left out and of other updates have weight 0. -> Rows, R = B, K
    rounds; with all of them each token up to the EOS is scored in one draw of one update
    """
    G = args.num_generations
    mine = batch.advantages.view(-1, G).any(1).repeat_interleave(G)  # a group as a whole, [B]
    if args.minibatches:
        mine &= batch.trace.sample_index % args.num_iterations == iteration
    rounds, K = batch.trace.reveal_map // args.shrink, -(-batch.trace.num_replays // args.shrink)
    revealed, masked = batch.trace.replayed(rounds, K)  # [B, K, L]
    scored = revealed & (batch.completion_mask & mine[:, None])[:, None]
    size = scored.sum(2, keepdim=True).clamp(min=1) if args.row_mean else args.gen_length
    rows = Rows(batch, masked, scored / size)
    rows.advantages = mine.float()  # those of a trained group count, even where theirs is 0
    # draws with a scored token, over all ranks: the rows of the paper
    rows.total = max(over_ranks(scored.any(2).sum()), 1)
    right = (batch.rewards >= 1).float()
    rows.right = right / (over_ranks(rows.weights.sum((1, 2)) @ right) or 1)  # [B]
    return rows.subsample(args.train_steps, iteration)


# >>> shared: method_passes
def estimate_logps(logps, rows, args):
    """A pass is the estimate of the tokens that it scores. [R, K, L] -> [R, K, L]"""
    return logps


# <<< shared: method_passes


def compute_advantages(rewards, args):
    """Reward minus group mean, divided by the biased std; 0 in a group without spread or with a
    mean outside of accuracy_range. [B] -> [B]
    """
    groups = rewards.view(-1, args.num_generations)
    std, mean = torch.std_mean(groups, 1, correction=0, keepdim=True)
    # several rewards have a rounded mean
    is_trained = (std > 1e-4) & ((mean - mean.clamp(*args.accuracy_range)).abs() < 1e-4)
    return torch.where(is_trained, (groups - mean) / std, 0.0).flatten()


def policy_loss(estimates, old, ref, rows, args):
    """PPO clip and k3 KLs to the old policy and to the start, mean over the rows of the update.

    estimates, old, ref [R, K, L] -> loss, metrics
    """
    batch, c = rows.batch, rows.weights / rows.total  # [R, K, L]
    if hasattr(rows, "returns"):  # of the value model: estimates are values
        near = old + (estimates - old).clamp(-args.epsilon, args.epsilon)
        gaps = torch.stack([estimates, near]) - rows.returns[:, None]
        return (gaps.square().amax(0) * c).sum() / 2, {}
    # [R, 1, 1], or with a value model [R, 1, L]
    A = getattr(batch, "token_advantages", batch.advantages[:, None])[rows.sequence, None]
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
    log_ratio = old - estimates
    to_old = ((log_ratio.expm1() - log_ratio) * c).sum()
    nll = -(estimates * rows.weights * rows.right[:, None, None]).sum()
    loss = policy + args.beta * kl + args.kl_to_old * to_old + args.nll_weight * nll
    return loss, metrics | {"loss/kl_to_old": to_old, "loss/nll": nll}


def gae(outcome, values, steps, gamma, lam):
    """Generalised advantage estimation over denoising steps, the last of which earns the outcome.
    Backwards in time: values of a step should be gamma times the mean of V + lam A over the tokens
    of the step after it. With values of 0 and lam 1 these are the returns.

    outcome [B]; values, steps [B, L], steps: when a token was revealed, -1 where it is not scored
    -> advantages [B, L]
    """
    A, target = torch.zeros_like(values), outcome[:, None]  # what values should be, [B, 1]
    for t in steps[steps >= 0].unique().flip(0):
        here = steps == t
        A, n = torch.where(here, target - values, A), here.sum(1, keepdim=True)
        mean = ((values + lam * A) * here).sum(1, keepdim=True) / n
        target = torch.where(n > 0, gamma * mean, target)
    return A


def update_values(model, optimizer, batch, step, args):
    """Give the batch its tokens' advantages, then update the value model in the policy's loop.

    -> metrics of the last update
    """
    args = replace(args, beta=0.0)  # values have no KL
    whole = replace(args, num_iterations=1, train_steps=0)  # every token needs its value
    (rows,) = prepare_rows(model, None, batch, whole)
    values = frozen_estimates(model, rows, args).sum(1)
    values = values.new_zeros(batch.completion_mask.shape).index_add(0, rows.sequence, values)
    steps = batch.block_ids * args.gen_length + batch.trace.reveal_map // args.shrink
    steps = steps.where(batch.completion_mask, -1)
    batch.token_advantages = gae(batch.advantages, values, steps, args.gamma, args.lam)
    if args.positive_only:
        batch.token_advantages.clamp_(min=0)
    returns = gae(batch.advantages, 0 * values, steps, args.gamma, 1)
    rate = replace(args, learning_rate=args.value_learning_rate)
    for rows in prepare_rows(model, None, batch, rate):
        rows.returns = returns[rows.sequence]
        metrics = update(model, optimizer, rows, step, rate)
    return {"value/loss": metrics["loss/total"], "value/grad_norm": metrics["optim/grad_norm"]}


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
    if args.value_model:
        critic = load_value_model(
            build_policy(device, args), device, parallelize, make_optimizer, args
        )
        run.saves.include(*critic, run.start)
    for step, clock in run.steps():
        # >>> shared: rollout
        with clock("rollout"):
            trace = engine.generate(**problems.request(step, args.num_generations))
            engine.make_room()
        with clock("reward"):
            batch, rewards, metrics = problems.reward(trace, step, model)
        batch.advantages = compute_advantages(rewards, args)
        # <<< shared: rollout
        if args.value_model:
            with clock("value"):
                metrics |= update_values(*critic, batch, step, args)
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
