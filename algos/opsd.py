"""d-OPSD (arXiv 2606.18195): on-policy self-distillation from a teacher that sees ahead.

loss    = mean over prompts of the mean over masks, in the states that the first right completion
          passed through, of the sum over the teacher's 20 likeliest tokens there of
          min(p (log p - log q), 0.05);  0 without a right completion
p, q    : student and teacher, each normalised over these tokens
teacher : the model before training, in the same state with a share of the tokens of later
          blocks filled in from the finished completion
masks   : of the block in work, where the teacher is surest, as many as the step revealed

What differs from d1, and why:
1. No reward is spread over tokens: it only says which completion teaches.
2. A row is a right completion, with a draw for each denoising step, as in CJ-GRPO.
3. The reference is the teacher. It sees more than the student, and chooses what is scored.
4. A block model cannot see later blocks: its teacher sees later tokens of the block itself.
5. Each update takes its share of the states, every fourth of them where there are four updates.

python   algos/opsd.py                                      # the shipped tiny model on a CPU
torchrun --nproc-per-node 4 algos/opsd.py --model llada-8b  # GSM8K, LoRA, four GPUs
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
    learning_rate: float = 5e-6
    """AdamW (official opsd.yaml: 5e-6)"""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW (official opsd.yaml)"""
    weight_decay: float = 0.1
    """AdamW (official opsd.yaml: 0.1)"""
    max_grad_norm: float = 0.2
    """gradient norm clip (official opsd.yaml: 0.2)"""
    temperature: float = 0.9
    """of the rollout (official config and `passk_temperature`: 0.9)"""
    num_generations: int = 8
    """completions per prompt, G; the first right one trains (official `passk`: 8)"""
    num_iterations: int = 4
    """updates per rollout, each with its share of the states (official `batch_divide`: 4)"""
    min_reward: float = 1.0
    """of a right completion (official: right; sudoku 0.25)"""
    teacher_share: float = 0.5
    """probability that the teacher sees a token ahead (official `teacher_retain_ratio`: 0.25)"""
    teacher_top_k: int = 20
    """tokens of a mask that are compared (official `top_k_loss`: 20)"""
    kl_clip: float = 0.05
    """largest term of the KL (official `jsd_token_clip`: 0.05; math 0.04)"""
    # replaces the shared field
    prompts_per_step: int = 4
    """prompts per rollout, over all ranks (official: one on each of 4 GPUs)"""
    beta = 1.0  # the reference is loaded as the teacher: not a flag
    minibatches = True  # a state is in one update: for the plan
    one_reward = True  # says what is right

    def num_draws(self, replays):
        return -(-replays // self.num_generations)  # one completion of a group at most


# What differs on the tiny models, with all weights, and on real bidirectional models. Ours: rate of
# all weights, share of block models. With a clip of 0.05 the tiny models forget (see the page).
BY_SIZE = {
    "tiny": TINY | {"num_iterations": 2, "kl_clip": 1.0},
    "full": {"learning_rate": 1e-6},
    "bidirectional": {"cache": "none", "teacher_share": 0.25},
}
RECORDS = "steps"  # the trace holds the step maps
USES_OLD = False  # no ratio
DRAWS_TOGETHER = False  # the loss is a sum over the K draws of a row


def sample_masks(batch, iteration, args):
    """The states before steps that revealed a token up to the EOS, as the teacher sees them; of
    these the share of this update. A draw of a block model is a state of each of its blocks.

    Weights 1 / revealed tokens, at all masks of blocks in work. `teach` makes them the student's.
    -> Rows, R = B, K = num_replays
    """
    trace = batch.trace
    new, masked = trace.replayed()  # [B, K, L]
    mine = (trace.replay_map + trace.blocks) % args.num_iterations == iteration
    hit = new & (mine & batch.completion_mask)[:, None]
    work = block_counts(hit, trace.blocks[:, None])[0] > 0  # in the block of such a token
    ahead = masked & ~new & (trace.step_map >= 0)[:, None]  # later steps revealed it
    if trace.settings["attention"] == "bidirectional":  # a block model sees no later block
        later = ahead & ~work
        ahead &= ~(work & later.any(2, keepdim=True))
    noise = torch.stack([batch.uniform("ahead", k) for k in range(trace.num_replays)], 1)
    hidden = masked & ~(ahead & (noise < args.teacher_share))  # from the teacher
    revealed = hit.sum(2, keepdim=True)
    rows = Rows(batch, hidden, (work & hidden) / revealed.sum(1, keepdim=True).clamp(min=1))
    rows.student = torch.nn.functional.pad(masked, (batch.P, 0))
    rows.targets, rows.revealed = args.teacher_top_k, revealed
    return rows


def teach(teacher, rows, args):
    """-> rows for an update of the student, from those of `sample_masks`: weights at the masks of
    which the teacher is surest, as many as the step revealed; its tokens there, targets [R, K, L,
    k], and their estimates, ref [R, K, L, k]
    """
    logps, ids = rows.evaluate(args.micro_batch_size, lambda micro: draw_logps(teacher, micro))
    surprisal = (-logps[..., 0]).where(rows.weights > 0, torch.inf)
    rows.weights *= surprisal.argsort(2).argsort(2) < rows.revealed
    rows.targets, rows.masked = ids, rows.student
    rows.ref = estimate_logps(logps, rows, args)
    return rows


def estimate_logps(logps, rows, args):
    """Normalised over the k tokens. [R, K, L, k] -> [R, K, L, k]"""
    return logps.log_softmax(-1)


def compute_advantages(rewards, args):
    """1 for the first right completion of a group, else 0. [B] -> [B]"""
    right = rewards.view(-1, args.num_generations) >= args.min_reward
    return (right * right.cumsum(1) == 1).flatten().to(rewards)


def policy_loss(estimates, old, ref, rows, args):
    """Reverse KL, its terms clipped from above, mean over prompts of the mean over masks.

    estimates, ref [R, K, L, k] -> loss, metrics
    """
    c = rows.weights[..., None] * args.num_generations / rows.batch.num_sequences
    terms = estimates.exp() * (estimates - ref)
    loss = (terms.clamp(max=args.kl_clip) * c).sum()
    return loss, {
        "loss/policy": loss,
        "policy/kl": (terms * c).sum(),
        "policy/weight": c.sum(),
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
def draw_logps(model, rows):
    """The only forward in training: log-probabilities of the k targets where the draws score.

    -> [R, K, L, k] fp32, 0 elsewhere; where rows.targets is k, with the ids of the likeliest
    """
    how = {"temperature": rows.temperature, "targets": rows.targets}
    # weights, of the completion: the last L columns
    return model.logps(rows.input_ids, rows.noisy_ids, rows.weights != 0, rows.valid_mask, **how)


def prepare_rows(model, ref, batch, args):
    """Rows of every inner iteration, with what the teacher chose, before the first update."""
    iterations = []
    for iteration in range(args.num_iterations):
        rows = sample_masks(batch, iteration, args)
        rows = rows.for_update(args.micro_batch_size, DRAWS_TOGETHER)
        with adapters_off(ref or model) as teacher:
            iterations.append(teach(teacher, rows, args))
    return iterations


def micro_loss(model, rows, args):
    """-> share of the loss of a micro-batch, metrics"""
    estimates = estimate_logps(draw_logps(model, rows), rows, args)
    return policy_loss(estimates, None, rows.ref, rows, args)


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
