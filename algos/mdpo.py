"""MDPO (arXiv 2508.13148): grades every denoising step by its prediction of the whole completion.

a_s    = r_s - r_{s-1} + mean of the later rewards
A_s    = (a_s - mean) / std over the group at the same step s
loss_s = mean over the M masked tokens of
         q [-min(ratio A_s, clip(ratio, 1-eps, 1+eps) A_s) L / M + beta (ref - logps)^2 / 2]
loss   = mean over sequences of the sum over the steps with the largest |A|
q      = probability that the prediction was drawn with

What differs from d1, and why:
1. Every step's prediction is graded: credit for becoming right, blame for spoiling it.
2. A row is (sequence, chosen step), scored on its predictions in the state of the sampler.
3. Only the steps with the largest |A| are trained, because each costs a forward.
4. Terms are weighted by confidence, and the KL is k2.
5. Bidirectional models only: a block model predicts no whole completion to grade.

python   algos/mdpo.py                                      # the shipped tiny model on a CPU
torchrun --nproc-per-node 8 algos/mdpo.py --model llada-8b  # GSM8K, LoRA, eight GPUs
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

from rollout.traces import Completion, predictions_of


@dataclass
class Args(RolloutFlags):
    learning_rate: float = 3e-6
    """AdamW (d1: 3e-6 with LoRA; official command, all weights: 7e-7)"""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW (transformers default)"""
    weight_decay: float = 0.0
    """AdamW (transformers default: 0)"""
    max_grad_norm: float = 1.0
    """gradient norm clip (transformers default: 1)"""
    temperature: float = 0.4
    """of the rollout, and of the scored distribution (official command: 0.4)"""
    num_generations: int = 8
    """completions per prompt, G (official: the number of GPUs)"""
    num_iterations: int = 1
    """updates per rollout (official: 1)"""
    epsilon: float = 0.2
    """clip range, without effect in one update (official config: 0.2)"""
    beta: float = 0.02
    """KL coefficient (official command: 0.02)"""
    train_steps: int = 8
    """denoising steps trained: the largest |A|; 0, or more than there are: all (official: 8)"""
    steps_of: Literal["group", "sequence"] = "group"
    """|A| summed over the group chooses its steps, or each sequence's own (released code)"""
    # replace the shared fields
    model: str = "tiny-llada"
    """key of models.MODELS, hub id, or directory in HF layout; of a bidirectional model"""
    remasking: Literal["low_confidence_static", "low_confidence_dynamic", "random", "rcr"] = (
        "low_confidence_static"
    )
    """which masked tokens a step reveals; rcr (Running Confidence Remasking) may mask them again"""
    one_reward = True  # of every step


# What differs on the tiny models, with all weights, and on real bidirectional models.
BY_SIZE = {
    "tiny": TINY | {"train_steps": 4},
    "full": {"learning_rate": 7e-7},
    "bidirectional": {"cache": "none"},
}
RECORDS = "states"  # the trace holds what every step drew at all masks
USES_OLD = True  # policy_loss compares with the estimates before the first update
DRAWS_TOGETHER = False  # a row has one of them


def step_rewards(trace, problems, examples):
    """Reward of every step's prediction up to its EOS; a step without a forward repeats the last.

    examples [B] -> [B, S]
    """
    eos, decode = set(trace.settings["eos_token_ids"]), problems.tokenizer.decode
    predictions, texts = predictions_of(trace.records["tokens"]), []
    for ids in predictions.flatten(0, 1).tolist():
        end = next((i + 1 for i, token in enumerate(ids) if token in eos), len(ids))
        text = decode(ids[:end], skip_special_tokens=True)
        texts.append(Completion(text, end, eos.isdisjoint(ids)))
    S = predictions.shape[1]
    parts = problems.grade(texts, [example for example in examples for _ in range(S)])
    values = [sum(part.values()) for part in parts]
    return torch.tensor(values, device=predictions.device).view(-1, S)


def sample_masks(batch, iteration, args):
    """The state of a chosen step, scored on the step's own prediction. Nothing is random, so that
    all iterations have the rows of the first.

    Chosen are the K steps with the largest |A| among those with a forward. Weights q / M.
    -> Rows, one per (sequence, chosen step), R <= B K, one draw each
    """
    if iteration > 0:
        return None
    A, tokens = batch.advantages, batch.trace.records["tokens"]  # A [B, S]
    # made [B, S]: the step ran a forward. G: sequences that share their chosen steps
    made, G = (tokens >= 0).any(2), args.num_generations if args.steps_of == "group" else 1
    in_groups = lambda values: values.view(-1, G, A.shape[1])
    # [B / G, S] |A| of a step; -1 if no sequence of the group made it: it is chosen last
    size = in_groups(A.abs() * made).sum(1).masked_fill(~in_groups(made).any(1), -1.0)
    rank = size.argsort(dim=1, descending=True, stable=True).argsort(1)
    chosen = (rank < args.num_draws(A.shape[1])).repeat_interleave(G, 0) & made
    index, step = chosen.nonzero(as_tuple=True)  # [R]
    state, q = tokens[index, step] >= 0, batch.trace.records["logps"][index, step].exp()  # [R, L]
    weights = torch.where(state, q, 0.0) / state.sum(1, keepdim=True)
    rows = Rows(batch, state[:, None], weights[:, None], index)
    predictions = predictions_of(tokens)[index, step]
    rows.input_ids = torch.cat([rows.input_ids[:, : batch.P], predictions], 1)
    rows.advantages, rows.temperature = A[index, step], args.temperature
    return rows


# >>> shared: method_estimate
def estimate_logps(logps, rows, args):
    """The single pass is the estimate. [R, 1, L] -> [R, L]"""
    return logps[:, 0]


# <<< shared: method_estimate


def compute_advantages(rewards, args):
    """Gain of the step plus the mean of the later rewards (of the last step: its own), normalised
    over the group at the same step; 0 without spread. [B, S] -> [B, S]
    """
    S = rewards.shape[1]
    gain = rewards.diff(dim=1, prepend=torch.zeros_like(rewards[:, :1]))
    later = (rewards.flip(1).cumsum(1).flip(1) - rewards)[:, :-1]
    later = later / torch.arange(S - 1, 0, -1, device=rewards.device)
    groups = (gain + torch.cat([later, rewards[:, -1:]], 1)).view(-1, args.num_generations, S)
    std, centred = groups.std(1, keepdim=True), groups - groups.mean(1, keepdim=True)
    return torch.where(std > 1e-4, centred / (std + 1e-4), 0.0).view(-1, S)


def policy_loss(estimates, old, ref, rows, args):
    """PPO clip times L / M and k2 KL, per token, weighted by confidence.

    estimates, old, ref [R, L] -> loss, metrics
    """
    c = rows.weights[:, 0] / rows.batch.num_sequences  # [R, L]
    # L / M: tokens of the completion over masked tokens
    scale = rows.weights.shape[2] / rows.masked.sum(2)
    A = rows.advantages[:, None] * scale  # [R, 1]
    log_ratio = torch.zeros_like(estimates) if ref is None else ref - estimates
    kl = (log_ratio.square() / 2 * c).sum()  # k2
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
    if model.attention != "bidirectional":
        raise SystemExit(
            f"--model {args.model}: mdpo needs a bidirectional model; a {model.attention} one "
            "predicts one block at a time, so its steps have no whole completion to grade"
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
        graded = step_rewards(batch.trace, problems, batch.examples)  # [B, S]
        batch.advantages = compute_advantages(graded, args)
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
