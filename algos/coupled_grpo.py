"""Coupled-GRPO (DiffuCoder, arXiv 2506.20639): GRPO on a score of three passes, two of them with complementary masks.

    score = 1/2 [lp(all masked) + a lp(mask a) / t + (1 - a) lp(mask not a) / (1 - t)]    a ~ Bernoulli(t), t ~ U(0.2, 0.8)
    ratio = exp(score - old), and the loss is d1's: every token is scored once alone and once in a half-masked context;
            a block model sees the clean blocks before the one it predicts, one pass for all blocks

Run it on the shipped tiny model on CPU, or on eight GPUs; `diff algos/d1.py algos/coupled_grpo.py` is the method:

    python   algos/coupled_grpo.py --learning-rate 1e-4 --max-steps 30
    torchrun --nproc-per-node 8 algos/coupled_grpo.py --model dream-7b --task gsm8k --gen-length 256 --micro-batch-size 8
"""

# >>> shared: imports
import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch._functorch.config
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.stream import ShuffledStream
from evals import TRIAL, load_problems, load_task, mean_score
from evals.rewards import load_reward
from models import (
    adapters_off,
    add_lora,
    export_adapter,
    export_weights,
    load_tokenizer,
    load_weights,
    meta_model,
)
from models.experts import router_metrics, routing_extremes
from models.training_state import Saves
from rollout import Trace, make_engine, probe, rollout_means, rollout_sums
from rollout.sampling import keyed_uniform
from runlog import RunLog, StopSignal, Stopwatch, command_line, peak_memory_gb

# B sequences, G generations per prompt, P prompt length, L completion length, T = P + L, V vocabulary
# R rows: terms of the loss. K draws: forwards per row
# <<< shared: imports


@dataclass
class Args:
    # >>> shared: args
    model: str = "tiny-sdar"
    """key of models.MODELS, or a directory in HF layout"""
    task: str = "countdown"
    """module of evals/ that gives prompts and scores"""
    data: str = ""
    """problems: preset of the task, file, or hub id; empty: the task's own preset"""
    eval_data: str = ""
    """held-out problems; empty: other splits of --data (a file has none: then name one here)"""
    reward: str = ""
    """name in evals/rewards.py; empty: the task's exact score"""
    gen_length: int = 12
    """tokens per completion: whole blocks; block models add what completes the last one"""
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
    """of bidirectional models: Fast-dLLM's, faster and approximate; not for methods that replay the rollout"""
    rollout_backend: Literal["auto", "masked", "block", "lmdeploy"] = "auto"
    """sampler; auto: the one of the model's attention pattern; lmdeploy: that package's engine, docs/lmdeploy.md"""
    max_prompt_length: int = 1024
    """tokens; problems with longer prompts are dropped and counted"""
    prompts_per_step: int = 32
    """prompts per rollout, over all ranks"""
    micro_batch_size: int = 256
    """rows per forward; does not change the gradient"""
    lora_rank: int = 0
    """rank of the LoRA adapters; 0: full fine-tuning"""
    lora_alpha: int = 64
    """adapters are scaled by lora_alpha / lora_rank"""
    lora_targets: tuple[str, ...] = ()
    """linear layers that get adapters, e.g. q_proj v_proj; empty: all of a block"""
    lora_merged_rollout: bool = False
    """sample from adapters merged into bf16 weights, which rounds small updates away, instead of beside them"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """after the warm-up; linear and cosine end at 0 after --schedule-steps"""
    schedule_steps: int = 0
    """rollout steps of the schedule; 0: --max-steps"""
    warmup_steps: int = 0
    """linear warm-up of the learning rate, in rollout steps"""
    attention: Literal["auto", "sdpa", "flex", "varlen", "flash-attn"] = "auto"
    """backend of training's attention; auto: the fastest that was measured for the model's pattern"""
    activation_checkpointing: bool = False
    """recompute every block in the backward pass: less memory, a third more compute"""
    compile: bool = False
    """torch.compile every block: faster steps, minutes of warm-up"""
    sync_every_backward: bool = False
    """reduce gradients after every backward, not only the last: slower, but no rank holds full-size gradients"""
    max_steps: int = 100
    """rollouts"""
    eval_every: int = 25
    """steps between evaluations on the validation split, 0: never"""
    eval_limit: int = 512
    """held-out problems per evaluation; 0: no evaluation at all, not even before and after"""
    eval_temperature: float = 0.0
    """of evaluation completions; 0 is greedy"""
    save_every: int = 0
    """steps between saves of weights and of all that --resume needs, 0: only the weights, at the end"""
    keep_saves: int = 0
    """newest saves to keep beside the best by validation score; 0: all"""
    resume: str = ""
    """run directory to continue, with the arguments it had; only --max-steps may change"""
    out: str = "runs"
    """parent of the run directory"""
    seed: int = 42
    """every draw is keyed by (seed, step, sample, ...)"""
    track: bool = False
    """mirror the log to wandb"""
    # <<< shared: args
    # method
    remasking: Literal["low_confidence_static", "low_confidence_dynamic", "random", "entropy"] = (
        "low_confidence_static"
    )
    """which masked tokens a step reveals; entropy: the surest by theirs (official recipe)"""
    top_p: float = 1.0
    """tokens are drawn from the fewest whose probability reaches it (official recipe: 0.95); scores do not know of it"""
    learning_rate: float = 1e-6
    """AdamW (official recipe: 1e-6, for all weights)"""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW (official recipe)"""
    weight_decay: float = 0.1
    """AdamW (official recipe: 0.1)"""
    max_grad_norm: float = 0.2
    """gradient norm clip (official recipe: 0.2)"""
    temperature: float = 1.2
    """of the rollout (paper: 1.2; official recipe: 1.0)"""
    num_generations: int = 10
    """completions per prompt, G (official recipe: 10)"""
    num_iterations: int = 2
    """updates per rollout, mu (official recipe: 2)"""
    epsilon: float = 0.5
    """clip range (official recipe: 0.5)"""
    beta: float = 0.01
    """KL coefficient (official recipe: 0.01)"""
    ref_sync_steps: int = 64
    """optimizer steps after which the reference moves; 0, or with LoRA: never (official recipe: 64)"""
    ref_mixup: float = 0.6
    """share of the policy in a reference that moves (official recipe: TRL's default, 0.6)"""
    t_range: tuple[float, float] = (0.2, 0.8)
    """masked share t of one half; the other has 1 - t (paper: 0.2 to 0.8)"""
    baseline: Literal["mean", "loo"] = "mean"
    """mean: of the group (paper's headline); loo: of the other completions (official code, a row of its own in the paper)"""


# >>> shared: setup
def setup_distributed():
    """-> rank, world_size, device. A plain `python` run is one rank of the same code."""
    cuda = torch.cuda.is_available()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    )
    if cuda:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", **alone)
    return dist.get_rank(), dist.get_world_size(), device


def parallelize(model, args):
    """FSDP2: compile and shard each block, then shard the rest. fp32 masters; bf16 compute on GPU, fp32 on CPU."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    bf16 = (
        {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        if device_type == "cuda"
        else {}
    )
    # Floating inputs are left alone: rotary tables and masks would be rounded on their way into a block.
    policy = MixedPrecisionPolicy(**bf16, cast_forward_inputs=False)
    model.activation_checkpointing, model.attention_backend = (
        args.activation_checkpointing,
        args.attention,
    )
    torch._functorch.config.activation_memory_budget = (
        0.7  # compiled blocks recompute what is cheap: less memory, same speed
    )
    alone = (
        {p for p in model.parameters() if not p.requires_grad} if mesh.size() == 1 else None
    )  # FSDP2 would copy these
    for module in model.fp32_modules:
        fully_shard(module, mesh=mesh, ignored_params=alone)
    for layer in model.layers:
        if args.compile:
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=alone)
    # The root reshards after its forward too: parameters left gathered by a no-grad pass would hide the next optimizer step.
    fully_shard(
        model, mesh=mesh, mp_policy=policy, reshard_after_forward=True, ignored_params=alone
    )
    for name in ("logps", "logits"):
        register_fsdp_forward_method(model, name)
    return model


def lr_at(step, args):
    """Learning rate of optimizer step 0, 1, ...: linear warm-up, then the schedule."""
    warm = min(1.0, (step + 1) / max(args.warmup_steps, 1))
    progress = min(
        1.0,
        max(0, step - args.warmup_steps)
        / max((args.schedule_steps or args.max_steps) - args.warmup_steps, 1),
    )
    decay = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[args.lr_schedule]
    return args.learning_rate * warm * decay


def all_reduce(values, op=dist.ReduceOp.SUM):
    """{name: number or 0-d tensor} summed over ranks, or their maximum, in one collective. -> {name: float}"""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensor = torch.stack(
        [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values.values()]
    )
    dist.all_reduce(tensor, op)
    return dict(zip(values, tensor.tolist(), strict=True))


# <<< shared: setup


# >>> shared: batch
@dataclass
class Batch:
    """What a rollout gives this rank: B sequences, the G generations of a prompt together. Completions: the last L columns."""

    input_ids: torch.Tensor  # [B, T] prompt (padded on the left) + completion, clean
    valid_mask: (
        torch.Tensor
    )  # [B, T] bool: no padding, and no column that the sampler did not denoise
    completion_mask: torch.Tensor  # [B, L] bool, up to and with the first EOS
    block_ids: torch.Tensor  # [B, L] likelihood block: tokens of one block are predicted jointly, given the blocks before it
    sample_index: (
        torch.Tensor
    )  # [B] index of the sequence in this step, over all ranks: the key of its draws
    trace: Trace  # step maps, canvas lengths, records
    mask_token_id: int
    seed: int  # of this step
    num_tokens: float  # completion tokens of this step on all ranks
    num_sequences: float  # sequences of this step on all ranks
    advantages: torch.Tensor | None = None  # [B]

    def uniform(self, iteration, draw):
        """[B, T] fp64 in [0, 1), keyed by (seed, sample, iteration, draw, offset from the start of the completion)."""
        T, L = self.input_ids.shape[1], self.completion_mask.shape[1]
        offset = torch.arange(L - T, L, device=self.input_ids.device)  # padding moves no draw
        return keyed_uniform(
            self.seed, "masks", self.sample_index[:, None], iteration, draw, offset
        )

    def rows(self, masked, weights, index=None, input_ids=None, advantages=None, temperature=1.0):
        """One row per term of the loss. masked [R, K, T], weights [R, K, L]; index [R]: each row's sequence, default all."""
        index = torch.arange(len(self.input_ids), device=masked.device) if index is None else index
        return Rows(
            input_ids=self.input_ids[index] if input_ids is None else input_ids,
            valid_mask=self.valid_mask[index],
            masked=masked,
            weights=weights.float(),
            completion_mask=self.completion_mask[index],
            advantages=self.advantages[index] if advantages is None else advantages,
            mask_token_id=self.mask_token_id,
            temperature=temperature,
            num_tokens=self.num_tokens,
            num_sequences=self.num_sequences,
        )


@dataclass
class Rows:
    """The masks of one inner iteration. A row is one term of the loss, estimated with K forwards."""

    input_ids: torch.Tensor  # [R, T] clean
    valid_mask: torch.Tensor  # [R, T] bool
    masked: torch.Tensor  # [R, K, T] bool: shown to the model as [MASK]
    weights: (
        torch.Tensor
    )  # [R, K, L] fp32: weight of a token in the estimate or the loss; 0 is not scored
    completion_mask: torch.Tensor  # [R, L] bool
    advantages: torch.Tensor  # [R]
    mask_token_id: int
    temperature: float  # of the scored distribution
    num_tokens: float
    num_sequences: float
    old: torch.Tensor | None = None  # estimates before the first update; None: now
    ref: torch.Tensor | None = None  # estimates of the reference; None: no KL

    def select(self, index):
        """rows[index]: slice, bool or long index on every tensor; numbers and None stay."""
        return replace(
            self,
            **{
                name: value[index]
                for name, value in vars(self).items()
                if isinstance(value, torch.Tensor)
            },
        )

    def split(self, size):
        return [self.select(slice(i, i + size)) for i in range(0, len(self.input_ids), size)]


def make_batch(trace, model, seed):
    """Trace of a rollout -> Batch. Collective: the token and sequence counts are sums over ranks."""
    (input_ids, valid_mask), L = trace.sequences(model.pad_token_id), trace.completion_ids.shape[1]
    counts = all_reduce({"tokens": trace.completion_mask.sum(), "sequences": len(input_ids)})
    return Batch(
        input_ids=input_ids,
        valid_mask=valid_mask,
        completion_mask=trace.completion_mask,
        block_ids=model.grid(valid_mask)[1][:, -L:],
        sample_index=trace.sample_index,
        trace=trace,
        mask_token_id=model.mask_token_id,
        seed=seed,
        num_tokens=counts["tokens"],
        num_sequences=counts["sequences"],
    )


# <<< shared: batch


ROLLOUT = (
    "gen_length",
    "block_length",
    "denoising_steps",
    "remasking",
    "confidence_threshold",
    "cache",
)  # the sampler's
ROLLOUT += ("top_p",)
RECORDS = None  # read of a rollout besides tokens: "steps" (step maps, log-probabilities), "events", "states"
USES_OLD = True  # policy_loss compares with the estimates before the first update
USES_REF = True  # policy_loss has a KL to the reference


def sample_masks(batch, iteration, args):
    """A row is a sequence with three draws: all of the completion, a random part a of it, and the rest. Weights 1/2,
    a / 2t, (1 - a) / 2(1 - t); t is one number for a group, the prompt stays clean. After the EOS all three mask, so that no
    later token tells where the end is. -> Rows, R = B, K = 3
    """
    c, L = batch.completion_mask, batch.completion_mask.shape[1]
    of_group = batch.uniform(iteration, "t")[
        :: args.num_generations, -L, None
    ]  # keyed by the first sample of the group
    t = (args.t_range[0] + (args.t_range[1] - args.t_range[0]) * of_group).repeat_interleave(
        args.num_generations, 0
    )  # [B, 1]
    a = batch.uniform(iteration, 0)[:, -L:] < t
    parts = torch.stack([torch.ones_like(a), a, ~a], 1)  # [B, 3, L]
    masked = torch.zeros_like(batch.valid_mask)[:, None].repeat(1, 3, 1)
    masked[:, :, -L:] = parts | ~c[:, None]
    return batch.rows(
        masked, parts * c[:, None] / (2 * torch.stack([torch.ones_like(t), t, 1 - t], 1))
    )


def estimate_logps(logps, rows, args):
    """Weighted sum of the passes: a score, on average 1.5 log-probabilities and not one. [R, 3, L] -> [R, L]"""
    return (rows.weights * logps).sum(1)


def compute_advantages(rewards, args):
    """Reward minus the mean of the group, or of the others in it; not divided by the std. [B] -> [B]"""
    G = args.num_generations
    groups = rewards.view(-1, G) - rewards[::G, None]  # equal rewards: exactly 0
    scale = (
        G / (G - 1) if args.baseline == "loo" else 1
    )  # r - mean of the others = G / (G - 1) (r - mean of all)
    return (scale * (groups - groups.mean(1, keepdim=True))).flatten()


def policy_loss(estimates, old, ref, rows, args):
    """PPO clip and k3 KL per token, mean over all completion tokens of the step. estimates, old, ref [R, L] -> loss, metrics"""
    A, c = (
        rows.advantages[:, None],
        rows.completion_mask.to(estimates) / rows.num_tokens,
    )  # [R, 1], [R, L]
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


# >>> shared: inner
def draw_logps(model, rows, k):
    """The only forward in training: log-probabilities of the tokens that draw k scores. -> [R, L] fp32, 0 elsewhere"""
    L = rows.weights.shape[2]
    noisy_ids = torch.where(rows.masked[:, k], rows.mask_token_id, rows.input_ids)
    score_mask = torch.zeros_like(rows.valid_mask)
    score_mask[:, -L:] = rows.weights[:, k] != 0
    return model.logps(
        rows.input_ids, noisy_ids, score_mask, rows.valid_mask, temperature=rows.temperature
    )[:, -L:]


def micro_batches(rows, args):
    """-> [(micro, is_real)], equally many on every rank: a rank that has run out repeats its last one without effect."""
    micros = rows.split(args.micro_batch_size)
    count = int(all_reduce({"count": len(micros)}, dist.ReduceOp.MAX)["count"])
    return [(micros[min(i, len(micros) - 1)], i < len(micros)) for i in range(count)]


@torch.no_grad()
def frozen_estimates(model, rows, args):
    """Estimates of all rows without a graph: the old and the reference values."""
    parts = []
    for micro, is_real in micro_batches(rows, args):
        logps = torch.stack([draw_logps(model, micro, k) for k in range(micro.masked.shape[1])], 1)
        parts += [estimate_logps(logps, micro, args)] if is_real else []
    return torch.cat(parts)


def backward(model, rows, scale, last, args):
    """Exact gradient of scale * policy_loss with the graph of a single forward in memory. -> metrics

    One draw: its graph is kept. Several: the loss may couple them, so first their values without a graph, then
    d loss / d value, then the chain rule with one forward and backward per draw.
    """
    K = rows.masked.shape[1]
    with torch.set_grad_enabled(K == 1):
        draws = [draw_logps(model, rows, k) for k in range(K)]
    values = torch.stack(draws, 1).detach().requires_grad_()  # [R, K, L]
    estimates = estimate_logps(values, rows, args)
    old = (
        estimates.detach() if rows.old is None else rows.old
    )  # with one update per rollout, old is the value itself
    loss, metrics = policy_loss(estimates, old, rows.ref, rows, args)
    (slope,) = torch.autograd.grad(loss, values)
    for k in range(K):
        model.set_requires_gradient_sync(args.sync_every_backward or (last and k == K - 1))
        logps = draws[k] if K == 1 else draw_logps(model, rows, k)
        (scale * (slope[:, k] * logps).sum()).backward()
    return {
        "loss/total": loss.detach(),
        **{name: value.detach() for name, value in metrics.items()},
    }


# <<< shared: inner


def main(args):
    if not 0 < args.t_range[0] <= args.t_range[1] < 1:
        raise SystemExit(
            f"--t-range {args.t_range[0]} {args.t_range[1]}: the estimate divides by t and 1 - t, so 0 < low <= high < 1"
        )
    # >>> shared: main_setup
    rank, world_size, device = setup_distributed()
    if left := args.prompts_per_step % world_size:
        raise SystemExit(
            f"--prompts-per-step {args.prompts_per_step} does not divide by {world_size} ranks: {left} left over"
        )
    if args.num_generations < 2:
        raise SystemExit(
            f"--num-generations {args.num_generations}: a group needs at least 2 completions to compare"
        )
    if args.beta and not USES_REF:
        raise SystemExit(f"--beta {args.beta}: this method has no KL to a reference; leave it at 0")
    prompts_per_rank = args.prompts_per_step // world_size
    task, tokenizer = load_task(args.task), load_tokenizer(args.model)
    reward = load_reward(args.reward, task)
    if args.eval_limit and Path(args.data).is_file() and not args.eval_data:
        raise SystemExit(
            f"--data {args.data} has no held-out split: name one with --eval-data, or pass --eval-limit 0"
        )
    load = lambda split, data, limit: load_problems(
        task, split, data, tokenizer, args.max_prompt_length, limit
    )
    problems, dropped = load("train", args.data, None)
    reward(
        [TRIAL], [problems[0][0]]
    )  # refuses problems that it does not fit, a broken sandbox too, before any work on a GPU
    held_out = {
        s: load(s, args.eval_data or args.data, args.eval_limit)
        for s in ("validation", "test")
        if args.eval_limit
    }
    rollout = {
        name: getattr(args, name) for name in ROLLOUT
    }  # what training and evaluation have in common
    frozen = (
        torch.bfloat16 if device.type == "cuda" else torch.float32
    )  # of weights that are not trained
    model = meta_model(args.model, frozen if args.lora_rank else torch.float32)
    engine = make_engine(
        args.model, args.rollout_backend, device, asked=(RECORDS, rollout)
    )  # refuses what it cannot do
    plan = engine.plan(RECORDS, **rollout)
    beside = args.lora_rank and not args.lora_merged_rollout  # the engine holds adapters of its own
    if args.lora_rank:
        add_lora(model, args.lora_rank, args.lora_alpha, args.lora_targets, args.seed)
    if beside:
        add_lora(
            engine.model,
            args.lora_rank,
            args.lora_alpha,
            args.lora_targets,
            args.seed,
            engine.dtype,
        )
    model = load_weights(
        parallelize(model, args), device
    )  # sharded first: no rank ever holds the whole of it
    ref_model = None  # with LoRA the reference is the model without its adapters
    if args.beta and not args.lora_rank:
        ref_model = load_weights(
            parallelize(meta_model(args.model, frozen).requires_grad_(False), args), device
        )
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        params, betas=args.betas, weight_decay=args.weight_decay, fused=device.type == "cuda"
    )
    start = Saves.load(args.resume, model, optimizer) if args.resume else 0
    name = f"{Path(__file__).stem}-{Path(args.model).name}-{args.task}-s{args.seed}"
    log = RunLog(args.out, name, rank, asdict(args), args.max_steps, args.track, args.resume, start)
    saves = Saves(
        log.run_dir,
        model,
        optimizer,
        tokenizer,
        args.model,
        args.keep_saves,
        log.history(f"eval/{args.task}"),
    )
    stream, stop = ShuffledStream(problems, args.seed, log.run_dir), StopSignal()
    lost = {"train": dropped} | {split: dropped for split, (_, dropped) in held_out.items()}
    log.say(f"{len(problems)} problems; dropped by --max-prompt-length: {lost}; rollouts: {plan}")

    hand_over = lambda: engine.load_weights(
        export_adapter(model) if beside else export_weights(model)
    )
    probe_engine = lambda: probe(
        engine, model, problems[0][1], temperature=args.temperature, seed=args.seed, **rollout
    )

    def evaluate(split):
        hand_over()
        settings = rollout | {"temperature": args.eval_temperature, "seed": -1 - args.seed}
        return mean_score(engine, task, tokenizer, held_out[split][0], **settings)

    started, ended = time.perf_counter(), False
    if not start:
        hand_over()
        log.write(0, probe_engine())
        if args.eval_limit:
            log.write(0, {f"test/{args.task}": evaluate("test")})
    # <<< shared: main_setup
    if ref_moves := bool(ref_model and args.ref_sync_steps):
        saves.include(ref_model, start)

    for step in range(start, args.max_steps):
        # >>> shared: rollout
        clock = Stopwatch()
        with clock("sync"):
            hand_over()
        with clock("rollout"):
            first = step * args.prompts_per_step + rank * prompts_per_rank
            chosen = [stream[i] for i in range(first, first + prompts_per_rank)]
            seed, offset = (args.seed << 32) + step, rank * prompts_per_rank * args.num_generations
            sampling = {
                "num_samples": args.num_generations,
                "temperature": args.temperature,
                "records": RECORDS,
            }
            trace = engine.generate(
                [ids for _, ids in chosen], seed=seed, sample_offset=offset, **sampling, **rollout
            )
        with clock("reward"):
            owners = [example for example, _ in chosen for _ in range(args.num_generations)]
            components = reward([trace.text(i, tokenizer) for i in range(len(owners))], owners)
            rewards = torch.tensor(
                [sum(parts.values()) for parts in components], device=device
            )  # [B]
        batch = make_batch(trace, model, seed)
        # <<< shared: rollout
        batch.advantages = compute_advantages(rewards, args)

        # >>> shared: update
        with clock("update"), router_metrics(model) as routing:
            iterations = []  # masks, old and reference values of every update come before the first of them
            for iteration in range(args.num_iterations):
                rows = sample_masks(batch, iteration, args)
                if rows is None:  # nothing random: the same rows again
                    iterations.append(iterations[0])
                    continue
                # Rows with advantage 0 have no gradient; one stays if there are no others, because every rank must run.
                if not args.beta:
                    live = rows.advantages != 0
                    live[0] |= ~live.any()
                    rows = rows.select(live)
                if USES_OLD and args.num_iterations > 1:
                    rows.old = frozen_estimates(model, rows, args)
                if args.beta:
                    with nullcontext(ref_model) if ref_model else adapters_off(model) as reference:
                        rows.ref = frozen_estimates(reference, rows, args)
                iterations.append(rows)
            for rows in iterations:
                micros, sums = micro_batches(rows, args), {}
                has_gradient = bool(args.beta or rows.advantages.any())
                for i, (micro, is_real) in enumerate(micros):
                    scale = world_size * (is_real and has_gradient)  # FSDP averages over ranks
                    for name, value in backward(
                        model, micro, scale, i == len(micros) - 1, args
                    ).items():
                        sums[name] = sums.get(name, 0) + value * (scale > 0)
                local_loss, sums = sums["loss/total"].item(), all_reduce(sums)
                grad_norm = (
                    torch.nn.utils.clip_grad_norm_(params, args.max_grad_norm).full_tensor().item()
                )
                if not math.isfinite(sums["loss/total"] + grad_norm):
                    where = f"step {step + 1}: loss {local_loss} on rank {rank}, gradient norm {grad_norm}"
                    raise SystemExit(
                        f"not finite at {where}; stopped before the optimizer step, run directory {log.run_dir}"
                    )
                for group in optimizer.param_groups:
                    group["lr"] = lr_at(step, args)
                optimizer.step()
                optimizer.zero_grad()
            weight = sums.pop(
                "policy/weight"
            )  # 0 if no row on any rank had a gradient: then there is nothing to average
            policy = {
                name: sums.pop(name) / weight
                for name in list(sums)
                if name.startswith("policy/") and weight
            }
            metrics = {
                name: value for name, value in sums.items() if not name.startswith("policy/")
            } | policy
        # <<< shared: update
        if (
            ref_moves
            and (step + 1) * args.num_iterations % args.ref_sync_steps < args.num_iterations
        ):
            with torch.no_grad():
                for ref, new in zip(
                    ref_model.parameters(), params, strict=True
                ):  # on one rank frozen ones are no DTensors
                    ref = ref.to_local() if world_size > 1 else ref
                    ref.lerp_(new.to_local().to(ref.dtype), args.ref_mixup)

        # >>> shared: log_eval_save
        sums = all_reduce(rollout_sums(trace, rewards, components, args.num_generations))
        metrics |= rollout_means(sums, batch.num_sequences) | {
            "optim/grad_norm": grad_norm,
            "optim/lr": lr_at(step, args),
        }
        if args.eval_limit and args.eval_every and (step + 1) % args.eval_every == 0:
            with clock("eval"):
                metrics |= {f"eval/{args.task}": evaluate("validation")} | probe_engine()
        metrics |= routing_extremes(routing) | {
            "speed/tokens_per_s": batch.num_tokens / clock["time/rollout"]
        }
        log.write(
            step + 1,
            metrics
            | clock
            | {"time/step": sum(clock.values()), "memory/peak_gb": peak_memory_gb(device)},
        )
        log.samples(
            step + 1,
            [trace.describe(i, tokenizer, rewards[i]) for i in range(args.num_generations)],
        )
        due, last, ended = (
            args.save_every and (step + 1) % args.save_every == 0,
            step + 1 == args.max_steps,
            stop.is_set(),
        )
        saves.after_step(
            step + 1,
            metrics.get(f"eval/{args.task}"),
            weights=due or last or ended,
            state=due or ended,
        )
        if ended:
            log.say(f"stopped by a signal after step {step + 1}: go on with --resume {log.run_dir}")
            break
        # <<< shared: log_eval_save

    # >>> shared: after
    if args.eval_limit and not ended:
        before, after = log.history(f"test/{args.task}")[0][1], evaluate("test")
        log.write(args.max_steps, {f"test/{args.task}": after})
        log.say(
            f"{args.task} on {len(held_out['test'][0])} held-out problems: {before:.1%} before, {after:.1%} after"
        )
    if start < args.max_steps:
        log.say(trace.draw(0, tokenizer))
    log.say(
        f"{time.perf_counter() - started:.0f} s; curves: {log.run_dir / 'curves.png'}; weights: {saves.newest}"
    )
    log.close()
    dist.barrier()  # a rank that leaves while another still draws can abort in gloo
    dist.destroy_process_group()
    # <<< shared: after


if __name__ == "__main__":
    main(command_line(Args))
