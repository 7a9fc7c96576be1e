"""CJ-GRPO (arXiv 2509.23924): GRPO that scores each token in the state that revealed it.

    logps  = log-probability of a token in the state of its denoising step, from the trace
    loss_k = mean over the tokens of transition k of
             -min(ratio A, clip(ratio, 1-eps, 1+eps) A) + beta KL(policy || ref)
    loss   = mean over sequences of the mean over their transitions (Eq. 11)
    A      = (reward - group mean) / group std

`diff algos/d1.py algos/cj_grpo.py` is the method. Run it on the tiny model on CPU, or on GPUs:

    python   algos/cj_grpo.py
    torchrun --nproc-per-node 8 algos/cj_grpo.py --model sdar-8b
"""

# >>> shared: imports
import math
import sys
from collections import Counter
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.stream import ShuffledStream
from distributed.groups import (
    all_reduce,
    close_distributed,
    maximum,
    rank_share,
    reduce_metrics,
    setup_distributed,
)
from distributed.sharding import reduce_gradients, register_forwards, sharding
from evals import TRIAL, load_splits, load_task, mean_score
from evals.rewards import load_reward
from models import (
    adapters_off,
    add_lora,
    compile_blocks,
    load_tokenizer,
    load_weights,
    meta_model,
    mismatch,
    router_metrics,
)
from rollout import gathered, keyed_uniform, make_engine, probe, rollout_metrics, sync_engine
from run.flags import command_line
from run.log import RunLog, Stop, Stopwatch, machine_metrics
from run.plan import fit_rollouts
from run.schedule import share_at

# B sequences, G completions per prompt, P prompt length, L completion length, T = P + L
# R rows: terms of the loss. K draws: noisy copies of a row
# <<< shared: imports


@dataclass
class Args:
    # the method's own
    learning_rate: float = 3e-6
    """AdamW (official train.yaml: 3e-6)"""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW (official train.yaml)"""
    weight_decay: float = 0.1
    """AdamW (official train.yaml: 0.1)"""
    max_grad_norm: float = 0.2
    """gradient norm clip (official train.yaml: 0.2)"""
    temperature: float = 1.0
    """of the rollout, and of the scored distribution (official train.yaml: 1.0)"""
    num_generations: int = 6
    """completions per prompt, G (official train.yaml: 6)"""
    num_iterations: int = 8
    """updates per rollout, mu (official countdown and sudoku: 8; gsm8k and math: 12)"""
    epsilon: float = 0.5
    """clip range (official train.yaml: 0.5)"""
    beta: float = 0.04
    """KL coefficient (official train.yaml: 0.04)"""
    scale_rewards: bool = True
    """divide advantages by the group's std (Algorithm 1); False: as released"""
    eos_policy: Literal["none", "eoser"] = "none"
    """bidirectional models; eoser (EOS Early Rejection) damps an EOS's confidence in early steps"""
    schedule: Literal["uniform", "ascending"] = "uniform"
    """bidirectional models; ascending (ASS) reveals 1, 2, 4, ... tokens: log2(gen_length) steps"""
    # >>> shared: args
    # task and data
    model: str = "tiny-sdar"
    """key of models.MODELS, or a directory in HF layout"""
    task: str = "countdown"
    """file of evals/ that gives prompts and scores, or path.py, a file of your own"""
    data: str = ""
    """problems: preset of the task, file, or hub id; empty: the task's own preset"""
    eval_data: str = ""
    """held-out problems; empty: other splits of --data, of a file two tenths of its problems"""
    reward: str = ""
    """name in evals/rewards.py, or path.py:function; empty: the task's exact score"""
    max_prompt_length: int = 1024
    """tokens; problems with longer prompts are dropped and counted"""
    # rollout
    prompts_per_step: int = 32
    """prompts per rollout, over all ranks"""
    gen_length: int = 12
    """tokens per completion, whole blocks; block models fill up the last one"""
    block_length: int = 0
    """tokens per denoising block; 0: the model's own"""
    denoising_steps: int = 2
    """denoising steps per block"""
    remasking: Literal["low_confidence_static", "low_confidence_dynamic", "random"] = (
        "low_confidence_static"
    )
    """which masked tokens a step reveals"""
    confidence_threshold: float = 0.9
    """low_confidence_dynamic reveals every token above it"""
    cache: Literal["none", "prefix", "dual"] = "none"
    """Fast-dLLM's caches of bidirectional models: approximate; methods that replay refuse them"""
    rollout_backend: Literal["auto", "masked", "block", "lmdeploy"] = "auto"
    """sampler; auto: by the model's attention; lmdeploy: that package's engine, docs/lmdeploy.md"""
    # length of the run and evaluation
    max_steps: int = 100
    """rollouts"""
    dead_steps: int = 50
    """end, with status 3, after so many steps in which no completion has an advantage; 0: never"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """after the warm-up; linear and cosine end at 0 after --schedule-steps"""
    schedule_steps: int = 0
    """rollout steps of the schedule; 0: --max-steps"""
    warmup_steps: int = 0
    """linear warm-up of the learning rate, in rollout steps"""
    eval_every: int = 25
    """steps between evaluations on the validation split, 0: never"""
    eval_limit: int = 512
    """held-out problems per evaluation; 0: no evaluation at all, not even before and after"""
    eval_temperature: float = 0.0
    """of evaluation completions; 0 is greedy"""
    seed: int = 42
    """every draw is keyed by (seed, step, sample, ...)"""
    # memory and speed
    micro_batch_size: int = 0
    """sequences per forward, rows x draws; 0: the most that fit; does not change the gradient"""
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
    lora_merged_rollout: bool = False
    """merge the adapters into the sampler's bf16 weights (loses small updates)"""
    # log and saves
    save_every: int = 0
    """steps between saves of weights and of all that --resume needs, 0: only weights, at the end"""
    keep_saves: int = 0
    """newest saves to keep besides the best by validation score; 0: all"""
    resume: str = ""
    """run directory to continue, with its flags; --max-steps, --dead-steps, --track may change"""
    out: str = "runs"
    """parent of the run directory"""
    track: bool = False
    """mirror the log to wandb"""
    # <<< shared: args


# Fields where no flag is given: on the tiny models (more: run/defaults.py), with LoRA or with
# all weights; of real bidirectional models in addition "bidirectional". Empty: as above.
# All weights: our rate.
BY_SIZE = {
    "tiny": {"learning_rate": 3e-4, "num_iterations": 1},
    "lora": {},
    "full": {"learning_rate": 5e-7},
    # ASS: all steps are replayed, and the paper's eight reveal 256 tokens in one block
    "bidirectional": {
        "schedule": "ascending",
        "block_length": 256,
        "denoising_steps": 8,
        "cache": "none",
    },
}
# fields of Args that the sampler receives
ROLLOUT = "temperature gen_length block_length denoising_steps remasking confidence_threshold cache"
ROLLOUT += " eos_policy schedule"
# The method: from here to `parallelize`. Further below: Batch, a rollout, and Rows, its masks.
RECORDS = "steps"  # the trace holds the step maps
USES_OLD = True  # policy_loss compares with the estimates before the first update
USES_REF = True  # policy_loss has a KL to the reference
DRAWS = lambda args, replays: replays  # noisy copies of a completion in a step
DRAWS_TOGETHER = False  # the loss is a sum over the K draws of a row


def sample_masks(batch, iteration, args):
    """The forward of one denoising step, which scores what that step revealed. Nothing is
    random, so that all iterations have the rows of the first.

    The terminal block is scored beyond its EOS too. One pass of a block model replays a step of all
    its blocks, and each block is a transition of its own.
    Weights 1 / (transitions of the sequence x tokens of the transition).
    -> Rows, R = B, K = num_replays; a sequence that needed fewer steps has draws of weight 0
    """
    if iteration > 0:
        return None
    replay, block = batch.trace.replay_map, batch.block_ids - batch.block_ids.min()  # [B, L]
    revealed, num_replays = replay >= 0, batch.trace.num_replays
    transition = block * num_replays + replay.clamp(min=0)
    tokens = torch.zeros(len(replay), int(transition.max()) + 1, device=replay.device)
    tokens.scatter_add_(1, transition, revealed.float())  # [B, number of transitions]
    weight = revealed / (tokens.gather(1, transition) * (tokens > 0).sum(1, keepdim=True))
    # [B, K, L], 0: revealed by this step
    now = replay[:, None] - torch.arange(num_replays, device=replay.device)[:, None]
    masked = torch.nn.functional.pad((now >= 0) | ~revealed[:, None], (batch.P, 0))
    rows = Rows(batch, masked, torch.where(now == 0, weight[:, None], 0.0))
    rows.temperature = args.temperature
    return rows


def estimate_logps(logps, rows, args):
    """A pass is the estimate of the tokens that its step revealed. [R, K, L] -> [R, K, L]"""
    return logps


def compute_advantages(rewards, args):
    """Group-normalised reward; 0 in a group without spread. [B] -> [B]"""
    groups = rewards.view(-1, args.num_generations)
    std, centred = groups.std(1, keepdim=True), groups - groups.mean(1, keepdim=True)
    scale = std + 1e-6 if args.scale_rewards else 1.0
    return torch.where(std > 1e-4, centred / scale, 0.0).flatten()


def policy_loss(estimates, old, ref, rows, args):
    """PPO clip and k3 KL, equal weight for each transition of a sequence.

    estimates, old, ref [R, K, L] -> loss, metrics
    """
    # [R, 1, 1], [R, K, L]
    A, c = rows.advantages[:, None, None], rows.weights / rows.batch.num_sequences
    ratio = (estimates - old).exp()
    clipped = ratio.clamp(1 - args.epsilon, 1 + args.epsilon)
    policy = (-torch.minimum(ratio * A, clipped * A) * c).sum()
    log_ratio = torch.zeros_like(estimates) if ref is None else ref - estimates
    kl = ((log_ratio.expm1() - log_ratio) * c).sum()  # k3
    return policy + args.beta * kl, {
        "loss/policy": policy,
        "loss/kl": kl,
        "policy/ratio": (ratio * c).sum(),
        "policy/clip_frac": ((clipped * A < ratio * A) * c).sum(),
        "policy/weight": c.sum(),
    }


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


# >>> shared: batch
class Batch:
    """A rollout on this rank: B sequences, the G completions of a prompt together.

    The completion is the last L columns. Collective: token counts are sums over ranks.
    """

    def __init__(self, trace, model):
        self.trace = trace
        # [B, T] prompt (padded on the left) + completion; bool: no padding, reached by the sampler
        self.input_ids, self.valid_mask = trace.sequences(model.pad_token_id)
        self.completion_mask = trace.completion_mask  # [B, L] bool, up to and with the first EOS
        self.P = self.input_ids.shape[1] - self.completion_mask.shape[1]
        # [B, L] likelihood block: its tokens are predicted jointly, given the blocks before it
        self.block_ids = model.grid(self.valid_mask)[1][:, self.P :]
        self.mask_token_id = model.mask_token_id
        self.num_tokens, self.num_sequences = all_reduce(  # of this step
            {"tokens": self.completion_mask.sum(), "sequences": len(self.input_ids)}
        ).values()

    def uniform(self, iteration, draw):
        """Keyed by the step's seed, the sample's index over all ranks, iteration, draw, and the
        offset from the start of the completion, so that left padding changes nothing.

        -> [B, T] fp64 in [0, 1)
        """
        offset = torch.arange(self.input_ids.shape[1], device=self.input_ids.device) - self.P
        seed, sample = self.trace.settings["seed"], self.trace.sample_index[:, None]
        return keyed_uniform(seed, "masks", sample, iteration, draw, offset)


class Rows:
    """The masks of an inner iteration. A row is a term of the loss, with K noisy copies."""

    temperature = 1.0  # of the scored distribution
    old = None  # estimates before the first update; None: the current ones
    ref = None  # estimates of the reference; None: no KL

    def __init__(self, batch, masked, weights, index=slice(None)):
        """index [R]: the sequence of each row; default: row r is sequence r"""
        self.batch = batch
        self.masked = masked  # [R, K, T] bool: shown to the model as [MASK]
        self.weights = weights.float()  # [R, K, L] in the estimate or the loss; 0: not scored
        self.input_ids = batch.input_ids[index]  # [R, T] clean
        self.valid_mask = batch.valid_mask[index]  # [R, T] bool
        self.completion_mask = batch.completion_mask[index]  # [R, L] bool
        self.advantages = batch.advantages[index]  # [R]

    def select(self, index):
        """rows[index] for a slice, bool or long index"""
        rows = copy(self)
        for name, value in vars(self).items():
            setattr(rows, name, value[index] if torch.is_tensor(value) else value)
        return rows

    def split(self, size):
        """-> the same with at most `size` draws in a row, where the loss is a sum over draws"""
        R, K, _ = self.masked.shape
        assert K <= size or not DRAWS_TOGETHER  # the plan refuses such a size, if DRAWS is right
        n = next(n for n in range(1, K + 1) if K % n == 0 and K // n <= size)
        rows = self.select(torch.arange(R).repeat_interleave(n))
        shape = R * n, K // n, -1
        rows.masked, rows.weights = self.masked.reshape(shape), self.weights.reshape(shape)
        return rows


# <<< shared: batch


# >>> shared: inner
def draw_logps(model, rows, entropy=False):
    """The only forward in training: log-probabilities of the tokens that the draws score.

    -> [R, K, L] fp32, 0 elsewhere; with entropy=True a pair (logps, entropies without gradient)
    """
    P = rows.batch.P
    noisy_ids = torch.where(rows.masked, model.mask_token_id, rows.input_ids[:, None])
    score_mask = torch.nn.functional.pad(rows.weights != 0, (P, 0))
    values = model.logps(
        rows.input_ids, noisy_ids, score_mask, rows.valid_mask, rows.temperature, entropy
    )
    return [value[:, :, P:] for value in values] if entropy else values[:, :, P:]


def micro_batches(rows, args):
    """-> [(micro-batch, is real)], equally many on every rank: FSDP's collectives must match.

    A rank that has run out repeats its last one without effect.
    """
    size = args.micro_batch_size // rows.masked.shape[1]
    micros = [rows.select(slice(i, i + size)) for i in range(0, len(rows.input_ids), size)]
    count = maximum(len(micros))
    return [(micros[min(i, len(micros) - 1)], i < len(micros)) for i in range(count)]


@torch.no_grad()
def frozen_estimates(model, rows, args):
    """Estimates of all rows without a graph: the old and the reference values."""
    parts = []
    for micro, is_real in micro_batches(rows, args):
        estimates = estimate_logps(draw_logps(model, micro), micro, args)
        if is_real:
            parts.append(estimates)
    return torch.cat(parts)


def backward(model, rows, scale, args):
    """Gradient of scale * policy_loss. -> metrics"""
    logps, entropies = draw_logps(model, rows, entropy=True)
    estimates = estimate_logps(logps, rows, args)
    # with one update per rollout the old values are the current ones
    old = estimates.detach() if rows.old is None else rows.old
    loss, metrics = policy_loss(estimates, old, rows.ref, rows, args)
    (scale * loss).backward()
    return metrics | mismatch(logps, entropies, rows.weights) | {"loss/total": loss}


# <<< shared: inner


# >>> shared: loop
def load_data(args):
    """-> task, tokenizer, reward, {split: [(example, prompt ids)]}, a line on the problems

    Stops the run here, before any work on a GPU, if the arguments or the reward cannot train.
    """
    rank_share(args.prompts_per_step, "--prompts-per-step")
    if args.beta and not USES_REF:
        raise SystemExit(f"--beta {args.beta}: this method has no KL to a reference; leave it at 0")
    task, tokenizer = load_task(args.task), load_tokenizer(args.model)
    reward = load_reward(args.reward, task)
    problems, dropped = load_splits(
        task, args.data, args.eval_data, tokenizer, args.max_prompt_length, args.eval_limit
    )
    reward([TRIAL], [problems["train"][0][0]])
    facts = f"{len(problems['train'])} training problems; dropped by --max-prompt-length: {dropped}"
    return task, tokenizer, reward, problems, facts


def plan_run(problems, args):
    """Plan memory and seconds. -> the micro-batch size asked for, or the largest that fits; the
    completions that the sampler makes together
    """
    return fit_rollouts(
        problems,
        vars(args),
        draws=lambda replays: DRAWS(args, replays),
        coupled=DRAWS_TOGETHER,
        has_old=USES_OLD,
    )


def load_models(device, sampling, rows, args):
    """-> policy, frozen reference, engine

    The reference is None without KL, and with LoRA: then it is the policy without its adapters.
    """
    # refuses settings that it cannot serve, before weights are read
    engine = make_engine(args.model, args.rollout_backend, device, None, rows, (RECORDS, sampling))
    # weights that are not trained have the engine's type: bf16 on GPU, fp32 on CPU
    model = meta_model(args.model, engine.dtype if args.lora_rank else torch.float32)
    if args.lora_rank:
        lora = args.lora_rank, args.lora_alpha, args.lora_targets, args.seed
        add_lora(model, *lora)
        if not args.lora_merged_rollout:
            add_lora(engine.model, *lora, engine.dtype)
    # sharded before weights are read: no rank ever holds the whole model
    model, ref_model = load_weights(parallelize(model, args), device), None
    if args.beta and not args.lora_rank:
        ref_model = meta_model(args.model, engine.dtype).requires_grad_(False)
        load_weights(parallelize(ref_model, args), device)
    return model, ref_model, engine


def roll_out(engine, stream, sampling, step, args):
    """G completions for each of this rank's prompts of the step. -> Trace, example of each"""
    G, mine = args.num_generations, rank_share(args.prompts_per_step, "--prompts-per-step")
    chosen = [stream[step * args.prompts_per_step + i] for i in mine]
    trace = engine.generate(
        [ids for _, ids in chosen],
        num_samples=G,
        records=RECORDS,
        seed=(args.seed << 32) + step,
        sample_offset=mine.start * G,
        **sampling,
    )
    engine.make_room()
    return trace, [example for example, _ in chosen for _ in range(G)]


def prepare_rows(model, ref_model, batch, args):
    """Rows of every inner iteration, with old and reference values, before the first update."""
    iterations = []
    for iteration in range(args.num_iterations):
        rows = sample_masks(batch, iteration, args)
        if rows is None:  # nothing random: the same rows for all
            return iterations * args.num_iterations
        # rows of similar length together: padding of a whole micro-batch is not computed
        rows = rows.select(rows.valid_mask.sum(1).argsort(stable=True)).split(args.micro_batch_size)
        live = rows.weights.any((1, 2))
        if not args.beta:
            live &= rows.advantages != 0  # no gradient
        live[0] |= ~live.any()  # every rank must run
        rows = rows.select(live)
        if USES_OLD and args.num_iterations > 1:
            rows.old = frozen_estimates(model, rows, args)
        if args.beta:
            with adapters_off(ref_model or model) as reference:
                rows.ref = frozen_estimates(reference, rows, args)
        iterations.append(rows)
    return iterations


def update(model, ref_model, optimizer, batch, step, args):
    """One optimizer step per inner iteration. -> metrics of the last"""
    for rows in prepare_rows(model, ref_model, batch, args):
        micros, sums = micro_batches(rows, args), Counter()
        has_gradient = args.beta > 0 or rows.advantages.any()
        for i, (micro, is_real) in enumerate(micros):
            reduce_gradients(model, i + 1 == len(micros), args.sync_every_backward)
            scale = dist.get_world_size() * (is_real and has_gradient)  # FSDP averages over ranks
            for name, value in backward(model, micro, scale, args).items():
                sums[name] += value.detach() * (scale > 0)
        metrics = optimizer_step(optimizer, sums, step, args)
    return metrics


# <<< shared: loop


def main(args):
    # >>> shared: start
    device = setup_distributed(args.sequence_parallel)
    sampling = {name: getattr(args, name) for name in ROLLOUT.split()}
    task, tokenizer, reward, problems, facts = load_data(args)
    args.micro_batch_size, rows = plan_run(problems, args)
    model, ref_model, engine = load_models(device, sampling, rows, args)
    optimizer, start, log, saves = open_run(task, model, tokenizer, args)
    stream, stop = ShuffledStream(problems["train"], args.seed, log.run_dir), Stop(args.dead_steps)
    log.say(f"{facts}; rollouts: {engine.plan(RECORDS, **sampling)}")
    check = lambda: probe(engine, model, problems["train"][0][1], seed=args.seed, **sampling)
    scored = sampling | {"temperature": args.eval_temperature, "seed": -1 - args.seed}
    score = lambda split, name: mean_score(engine, task, tokenizer, problems[split], name, **scored)
    sync_engine(engine, model)
    if not start:
        log.write(0, check())
        if args.eval_limit:
            log.write(0, score("test", "test"))
    # <<< shared: start
    for step in range(start, args.max_steps):
        # >>> shared: rollout
        clock, G = Stopwatch(), range(args.num_generations)
        with clock("rollout"):
            trace, examples = roll_out(engine, stream, sampling, step, args)
        with clock("reward"):
            parts = reward(trace.texts(tokenizer), examples)
            trace, rewards, parts, examples = gathered(trace, parts, examples, model.pad_token_id)
        batch = Batch(trace, model)
        # <<< shared: rollout
        batch.advantages = compute_advantages(rewards, args)
        # >>> shared: update
        with clock("update"), router_metrics(model) as routing:
            metrics = update(model, ref_model, optimizer, batch, step, args)
        # <<< shared: update
        # >>> shared: log
        with clock("sync"):
            sync_engine(engine, model)
        metrics |= rollout_metrics(trace, rewards, parts, args.num_generations)
        if args.eval_limit and args.eval_every and (step + 1) % args.eval_every == 0:
            with clock("eval"):
                metrics |= score("validation", "eval") | check()
        speed = {"speed/tokens_per_s": batch.num_tokens / clock["time/rollout"]}
        log.write(step + 1, metrics | clock | routing | speed | machine_metrics())
        log.samples(step + 1, [trace.describe(i, tokenizer, rewards[i], examples[i]) for i in G])
        stopped = stop.is_set(batch.advantages, metrics)
        saves.after_step(step + 1, metrics, stopped)
        if stopped:
            log.say(f"step {step + 1}: {stop.reason}; go on with --resume {log.run_dir}")
            break
        # <<< shared: log
    else:  # not stopped
        # >>> shared: end
        if args.eval_limit:
            log.write(args.max_steps, score("test", "test"))
            before, *_, after = dict(log.history(f"test/{task.NAME}")).values()
            facts = f"{task.NAME} on {len(problems['test'])} held-out problems"
            log.say(f"{facts}: {before:.1%} before, {after:.1%} after")
    if start < args.max_steps:
        log.say(trace.draw(0, tokenizer))
    log.end(saves.newest, stop.status)
    close_distributed(stop.status)
    # <<< shared: end


if __name__ == "__main__":
    main(command_line(Args, BY_SIZE))
