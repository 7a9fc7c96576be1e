"""VRPO (LLaDA 1.5, 2505.19223): DPO on ELBO estimates whose variance is brought down by where the draws are spent.

    B(y)   = mean over n_t timesteps of the ELBO of answer y at one mask each: a sum over its tokens, never divided by them
    margin = beta [B(chosen) - B_ref(chosen)] - beta [B(rejected) - B_ref(rejected)]
    loss   = mean over pairs of -log sigmoid(margin) + sft_coef * (-B(chosen) / number of chosen tokens)

Policy and reference see the same timesteps and masks of an answer, so that what they have in common cancels; the two answers
of a pair are drawn independently. The gradient is exact with the graph of one forward in memory: values of all draws without
graph, d loss / d value, then one forward and backward per draw.

Run it on the tiny model on CPU (right against wrong answers), or on eight GPUs:

    python   algos/vrpo.py --learning-rate 1e-4 --batch-size 16
    torchrun --nproc-per-node 8 algos/vrpo.py --model llada-8b --task gsm8k --data HuggingFaceH4/ultrafeedback_binarized
"""

import math
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch._functorch.config
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.preferences import encode_pairs, held_out_pairs, training_pairs
from data.reference import ReferenceCache, model_facts, row_digests
from data.stream import ShuffledStream
from evals import load_problems, load_task, mean_score
from models import adapters_off, add_lora, export_weights, load_tokenizer, load_weights, meta_model
from models.experts import router_metrics, routing_extremes
from models.training_state import Saves
from rollout import make_engine
from rollout.sampling import keyed_uniform
from runlog import RunLog, StopSignal, Stopwatch, command_line, peak_memory_gb

# P pairs, B = 2P sequences (chosen, rejected, chosen, ...), T tokens of a sequence, n draws of a sequence
HELD_OUT_DRAWS = 4  # timesteps of a held-out answer, one mask each, shared with the reference: the same at every evaluation
HELD_OUT_KEYS = {  # split -> metrics
    "validation": ("reward/eval_accuracy", "reward/eval_margin"),
    "test": ("reward/test_accuracy", "reward/test_margin"),
}


@dataclass
class Args:
    data: str = ""
    """file, folder or hub id of chosen/rejected rows; empty or a preset: the task's gold answers against wrong ones"""
    eval_pairs: str = ""
    """held-out pairs, scored beside the problems, --eval-limit of them; empty: other splits of --data, where it has them"""
    token_cache: bool = True
    """keep tokenised pairs in $CLEANDLLM_CACHE (~/.cache/cleandllm), under a hash of their content"""
    batch_size: int = 64
    """pairs per optimizer step, over all ranks (paper: 64)"""
    # >>> shared: args
    model: str = "tiny-sdar"
    """key of models.MODELS, or a directory in HF layout"""
    task: str = "countdown"
    """module of evals/: held-out score, and training rows where --data names no file"""
    eval_data: str = ""
    """problems of the held-out score; empty: other splits of the preset, else the task's own"""
    max_length: int = 2048
    """tokens of prompt + answer + end tokens; longer rows are dropped and counted; block models round up to whole blocks"""
    lora_rank: int = 0
    """rank of the LoRA adapters; 0: full fine-tuning"""
    lora_alpha: int = 64
    """adapters are scaled by lora_alpha / lora_rank"""
    lora_targets: tuple[str, ...] = ()
    """linear layers that get adapters, e.g. q_proj v_proj; empty: all of a block"""
    micro_batch_size: int = 64
    """sequences per forward; does not change the gradient"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """after the warm-up; linear and cosine end at 0 after --schedule-steps"""
    schedule_steps: int = 0
    """steps of the schedule; 0: --max-steps"""
    warmup_steps: int = 0
    """linear warm-up of the learning rate"""
    attention: Literal["auto", "sdpa", "flex", "varlen", "flash-attn"] = "auto"
    """backend of training's attention; auto: the fastest that was measured for the model's pattern"""
    activation_checkpointing: bool = False
    """recompute every block in the backward pass: less memory, a third more compute"""
    compile: bool = False
    """torch.compile every block: faster steps, minutes of warm-up"""
    sync_every_backward: bool = False
    """reduce gradients after every micro-batch, not only the last: slower, but no rank holds full-size gradients"""
    max_steps: int = 100
    """optimizer steps"""
    eval_every: int = 0
    """steps between evaluations on the validation split, 0: never"""
    eval_limit: int = 512
    """held-out problems per evaluation; 0: no evaluation at all, not even at the end"""
    gen_length: int = 12
    """evaluation: tokens generated per completion, whole blocks"""
    block_length: int = 0
    """evaluation: tokens per denoising block; 0: the model's own"""
    denoising_steps: int = 2
    """evaluation: denoising steps per block"""
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
    learning_rate: float = 5e-7
    """AdamW (paper: 5e-7, all weights; 15 warm-up steps, then cosine)"""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW (paper: 0.9, 0.95)"""
    weight_decay: float = 0.01
    """AdamW (paper: 0.01)"""
    max_grad_norm: float = 1.0
    """gradient norm clip (the paper names none; the field's usual 1.0)"""
    beta: float = 0.2
    """scale of the log-ratios in the margin (paper: 0.2)"""
    mc_num: int = 8
    """timesteps per answer, n_t (paper: 8; naive DPO: 1)"""
    masks_per_timestep: int = 1
    """masks per timestep, n_yt (paper: 1)"""
    share_masks: bool = True
    """policy and reference see the same timesteps and masks (paper: yes; naive DPO: no)"""
    sft_coef: float = 0.05
    """weight of the supervised term on the chosen answer (paper: 0.05)"""
    ref_cache: str = ""
    """file of the reference's values: made at the start unless it exists, after which no reference is kept in memory"""


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


@dataclass
class Batch:
    """Pairs of one rank in one optimizer step: rows 2i and 2i + 1 are the chosen and the rejected answer of pair i."""

    input_ids: torch.Tensor  # [B, T] prompt + answer
    valid_mask: torch.Tensor  # [B, T] bool: False on the pads on the right
    answer_mask: (
        torch.Tensor
    )  # [B, T] bool: up to and with the end of turn; may be masked and is scored
    block_ids: torch.Tensor  # [B, T] likelihood block: tokens of one block are predicted jointly, given the blocks before it
    sample_index: (
        torch.Tensor
    )  # [B] index of the sequence in the step, over all ranks: the key of its draws
    mask_token_id: int
    seed: int
    step: int
    num_pairs: float  # of the step on all ranks
    num_tokens: float  # answer tokens of the chosen side on all ranks

    def uniform(self, *key):
        """fp64 in [0, 1), keyed by (seed, step, sample, ...): key are words, numbers and tensors [B, T]."""
        return keyed_uniform(self.seed, self.step, self.sample_index[:, None], *key)


@dataclass
class Masks:
    """n draws of every sequence of a batch."""

    masked: torch.Tensor  # [B, n, T] bool: shown to the model as [MASK]
    weights: torch.Tensor  # [B, n, T] fp64: weight of a token in the ELBO; 0 is not scored


def make_batch(pairs, first, args, model, step, device):
    """pairs: [(prompt, chosen, rejected ids)] of this rank, the first of them number `first` of the step. -> Batch

    A block model sees its last block whole, as the sampler does: pads fill it, always masked and never scored.
    """
    rows = [(prompt, answer) for prompt, *answers in pairs for answer in answers]
    fills = model.block_length if model.attention == "block-causal" else 1
    lengths = [len(prompt) + len(answer) for prompt, answer in rows]
    lengths = [n + -n % fills for n in lengths]
    T = max(lengths)
    table = lambda rows, fill: torch.tensor(
        [row + [fill] * (T - len(row)) for row in rows], device=device
    )
    valid_mask = table([[True] * n for n in lengths], False)
    answer_mask = table(
        [[False] * len(prompt) + [True] * len(answer) for prompt, answer in rows], False
    )
    return Batch(
        input_ids=table([prompt + answer for prompt, answer in rows], model.pad_token_id),
        valid_mask=valid_mask,
        answer_mask=answer_mask,
        block_ids=model.grid(valid_mask)[1],
        sample_index=2 * first + torch.arange(len(rows), device=device),
        mask_token_id=model.mask_token_id,
        seed=args.seed,
        step=step,
        num_pairs=args.batch_size,
        num_tokens=all_reduce({"tokens": answer_mask[0::2].sum()})["tokens"],
    )


def sample_masks(batch, args, stream="masks"):
    """n = mc_num * masks_per_timestep draws of every sequence. `stream` keeps draws of different uses apart. -> Masks

    A timestep masks m of the k scored tokens of each likelihood block, m uniform on 1..k, stratified over the timesteps (floor
    form); which ones is drawn for every mask; weights k / m: the sum over a draw is the block's log-likelihood bound.
    """
    c, block = batch.answer_mask, batch.block_ids
    counts = torch.zeros(len(c), int(block.max()) + 1, device=c.device).scatter_add_(
        1, block, c.float()
    )
    k = counts.gather(1, block).double()  # [B, T], scored tokens in the block of each token
    before = (counts.cumsum(1) - counts).gather(1, block)  # and in the blocks before it
    hidden = (
        batch.valid_mask & ~c & (c.cumsum(1) > 0)
    )  # behind the answer: no later token may tell where it ends
    u, position = batch.uniform(stream, "count", block), torch.arange(c.shape[1], device=c.device)
    masked, weights = [], []
    for j in range(args.mc_num * args.masks_per_timestep):
        m = ((u + j // args.masks_per_timestep / args.mc_num) % 1 * k).floor() + 1
        rank = (
            torch.where(c, block + batch.uniform(stream, j, position), torch.inf)
            .argsort(1)
            .argsort(1)
            - before
        )
        chosen = c & (rank < m)  # random order within the block
        masked.append(chosen | hidden)
        weights.append(chosen * k / m)
    return Masks(torch.stack(masked, 1), torch.stack(weights, 1))


def draw_elbos(model, batch, masks, rows):
    """The only forward in training: one-draw ELBOs of some rows, numbered sequence * n + draw. rows [R] -> [R] fp32"""
    sequence, draw = rows // masks.masked.shape[1], rows % masks.masked.shape[1]
    width = int(
        batch.valid_mask[sequence].sum(1).max()
    )  # pads beyond the longest of these rows cost nothing
    input_ids, weights = batch.input_ids[sequence, :width], masks.weights[sequence, draw, :width]
    noisy_ids = torch.where(masks.masked[sequence, draw, :width], batch.mask_token_id, input_ids)
    logps = model.logps(input_ids, noisy_ids, weights != 0, batch.valid_mask[sequence, :width])
    return (weights.to(logps.dtype) * logps).sum(1)


def micro_batches(masks, args):
    """Row numbers of each forward, draws of a sequence together. Equally many on every rank: all have as many pairs."""
    B, n, _ = masks.masked.shape
    return torch.arange(B * n, device=masks.masked.device).split(args.micro_batch_size)


@torch.no_grad()
def elbo_values(model, batch, masks, args):
    """One-draw ELBOs of the whole batch without a graph. -> [B, n]"""
    return torch.cat(
        [draw_elbos(model, batch, masks, rows) for rows in micro_batches(masks, args)]
    ).view(masks.masked.shape[:2])


def preference_loss(elbos, ref_elbos, batch, args):
    """One-draw ELBOs [B, n] of policy and reference -> this rank's share of the loss of the step, and of its metrics."""
    elbo, ref_elbo, c = elbos.mean(1), ref_elbos.mean(1), 1 / batch.num_pairs
    rewards = args.beta * (elbo - ref_elbo)  # [B], what DPO calls the implicit reward
    margin = rewards[0::2] - rewards[1::2]  # [P]
    dpo = -F.logsigmoid(margin).sum() * c
    sft = -elbo[0::2].sum() / batch.num_tokens
    metrics = {
        "loss/dpo": dpo,
        "loss/sft": sft,
        "reward/accuracy": ((margin > 0).float() + (margin == 0).float() / 2).sum()
        * c,  # 1/2 at the start, where both agree
        "reward/margin": margin.sum() * c,
        "reward/chosen": rewards[0::2].sum() * c,
        "reward/rejected": rewards[1::2].sum() * c,
    }
    if (
        args.mc_num > 1
    ):  # sample variance over timesteps; they are stratified, so the true one is not larger on average
        timesteps = (args.beta * (elbos - ref_elbos)).unflatten(1, (args.mc_num, -1)).mean(2)
        metrics["reward/margin_var"] = timesteps.var(1).sum() * c / args.mc_num
    return dpo + args.sft_coef * sft, metrics


def backward(model, batch, masks, ref_elbos, scale, args):
    """Exact gradient of scale * preference_loss, though the loss couples all draws of a pair. -> metrics"""
    values = elbo_values(model, batch, masks, args).requires_grad_()  # [B, n]
    loss, metrics = preference_loss(values, ref_elbos, batch, args)
    slope = torch.autograd.grad(loss, values)[0].flatten()
    micros = micro_batches(masks, args)
    for i, rows in enumerate(micros):
        model.set_requires_gradient_sync(args.sync_every_backward or i + 1 == len(micros))
        (scale * (slope[rows] * draw_elbos(model, batch, masks, rows)).sum()).backward()
    return {name: value.detach() for name, value in ({"loss/total": loss} | metrics).items()}


def held_out_draws(pairs, args, model, reference, device):
    """This rank's share of the held-out pairs, its draws, and the reference's values there. -> Batch, Masks, [B, n]

    Every rank gets equally many: behind the last pair it stands again, and is not counted.
    """
    share = math.ceil(len(pairs) / dist.get_world_size())
    first = dist.get_rank() * share
    mine = [pairs[min(i, len(pairs) - 1)] for i in range(first, first + share)]
    batch = replace(
        make_batch(mine, first, args, model, -1, device), num_pairs=len(pairs)
    )  # no training step is -1
    masks = sample_masks(batch, replace(args, mc_num=HELD_OUT_DRAWS, masks_per_timestep=1), "held")
    return batch, masks, elbo_values(reference, batch, masks, args)


def held_out_metrics(model, batch, masks, ref_elbos, keys, args):
    """Share of the held-out pairs with a positive margin, and their mean margin, by the names of HELD_OUT_KEYS. Collective."""
    real = int((batch.sample_index < 2 * batch.num_pairs).sum())
    elbos = elbo_values(model, batch, masks, args)
    _, metrics = preference_loss(
        elbos[:real], ref_elbos[:real], batch, replace(args, mc_num=HELD_OUT_DRAWS)
    )
    return all_reduce(
        dict(zip(keys, (metrics["reward/accuracy"], metrics["reward/margin"]), strict=True))
    )


def main(args):
    if args.beta <= 0:
        raise SystemExit(
            f"--beta {args.beta}: preferences need a positive scale; algos/sft.py trains on one side alone"
        )
    rank, world_size, device = setup_distributed()
    if left := args.batch_size % world_size:
        raise SystemExit(
            f"--batch-size {args.batch_size} does not divide by {world_size} ranks: {left} left over"
        )
    per_rank = args.batch_size // world_size
    task, tokenizer = load_task(args.task), load_tokenizer(args.model)
    frozen = (
        torch.bfloat16 if device.type == "cuda" else torch.float32
    )  # of weights that are not trained
    model = meta_model(args.model, frozen if args.lora_rank else torch.float32)
    eval_data = args.eval_data or (args.data if args.data in task.PRESETS else "")
    splits = ("validation", "test") if args.eval_limit else ()
    load = lambda split: load_problems(
        task, split, eval_data, tokenizer, args.max_length, args.eval_limit
    )
    held_out = {split: load(split) for split in splits}
    compared = {
        split: held_out_pairs(task, split, args.data, args.eval_pairs, args.eval_limit)
        for split in splits
    }
    asked = [task.prompt(problem) for problems, _ in held_out.values() for problem, _ in problems]
    asked += [pair["prompt"] for pairs in compared.values() for pair in pairs if "prompt" in pair]
    encoded = lambda pairs: encode_pairs(pairs, tokenizer, model, args.max_length, args.token_cache)
    pairs = encoded(training_pairs(task, args.data, asked)).at_least(args.batch_size)
    compared = {split: encoded(rows) for split, rows in compared.items()}
    if args.eval_pairs and (lacking := [split for split, rows in compared.items() if not rows]):
        reasons = (
            "; ".join(reason for split in lacking for reason in compared[split].dropped)
            or "no such split"
        )
        raise SystemExit(
            f"--eval-pairs {args.eval_pairs} holds no pairs for {' and '.join(lacking)}: {reasons}"
        )
    if args.lora_rank:
        add_lora(model, args.lora_rank, args.lora_alpha, args.lora_targets, args.seed)
    model = load_weights(
        parallelize(model, args), device
    )  # sharded first: no rank ever holds the whole of it
    ref_model = None  # with LoRA the reference is the model without its adapters
    if not args.lora_rank:
        ref_model = load_weights(
            parallelize(meta_model(args.model, frozen).requires_grad_(False), args), device
        )
    reference = lambda: nullcontext(ref_model) if ref_model else adapters_off(model)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        params, betas=args.betas, weight_decay=args.weight_decay, fused=device.type == "cuda"
    )
    engine = make_engine(args.model, device=device) if args.eval_limit else None
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
    stream, stop = ShuffledStream(pairs, args.seed, log.run_dir), StopSignal()
    lost = {split: dropped for split, (_, dropped) in held_out.items()}
    log.say(
        f"{pairs.report('training pairs')}\nheld-out problems dropped because of --max-length: {lost}"
    )
    for split, rows in compared.items():
        log.say(rows.report(f"{split} pairs"))
    decoding = {
        name: getattr(args, name) for name in ("gen_length", "block_length", "denoising_steps")
    }
    decoding |= {"remasking": "low_confidence_static"}
    if engine:
        log.say(f"evaluations: {engine.plan(**decoding)}")

    def draw(step):
        first = step * args.batch_size + rank * per_rank
        taken = [stream[i] for i in range(first, first + per_rank)]
        batch = make_batch(taken, rank * per_rank, args, model, step, device)
        masks = sample_masks(batch, args)
        return batch, masks, masks if args.share_masks else sample_masks(batch, args, "ref")

    digests = lambda batch, masks: row_digests(
        batch.valid_mask, batch.input_ids, masks.masked, masks.weights
    )
    cache = None
    with reference() as ref:
        compared = {
            split: held_out_draws(rows, args, model, ref, device)
            for split, rows in compared.items()
            if rows
        }
        if args.ref_cache:
            cache = ReferenceCache(args.ref_cache, {"device": device.type} | model_facts(ref))
            for step in (
                {0, len(cache) - 1} if len(cache) else ()
            ):  # a file of other draws must not be added to
                batch, _, ref_masks = draw(step)
                cache.values(step, 2 * rank * per_rank, digests(batch, ref_masks))
            while len(cache) < args.max_steps:
                batch, _, ref_masks = draw(len(cache))
                cache.append(elbo_values(ref, batch, ref_masks, args), digests(batch, ref_masks))
                if len(cache) % 50 == 0 or len(cache) == args.max_steps:
                    cache.save()
                    log.say(
                        f"{args.ref_cache}: values of the reference for {len(cache)} of {args.max_steps} steps"
                    )
            ref = ref_model = None  # its memory is free for the training

    def evaluate(split, name):
        engine.load_weights(export_weights(model))
        score = mean_score(engine, task, tokenizer, held_out[split][0], temperature=0.0, **decoding)
        pair_metrics = (
            held_out_metrics(model, *compared[split], HELD_OUT_KEYS[split], args)
            if split in compared
            else {}
        )
        return {name: score} | pair_metrics

    if args.eval_limit and not start:
        log.write(0, evaluate("test", f"test/{args.task}"))
    ended = False
    for step in range(start, args.max_steps):
        clock = Stopwatch()
        with clock("data"):
            batch, masks, ref_masks = draw(step)
        with clock("reference"):
            if cache is not None:
                ref_elbos = cache.values(step, 2 * rank * per_rank, digests(batch, ref_masks))
            else:
                with reference() as ref:
                    ref_elbos = elbo_values(ref, batch, ref_masks, args)
        with clock("update"), router_metrics(model) as routing:
            sums = backward(
                model, batch, masks, ref_elbos, world_size, args
            )  # FSDP averages over ranks
            local_loss, sums = sums["loss/total"].item(), all_reduce(sums)
            grad_norm = (
                torch.nn.utils.clip_grad_norm_(params, args.max_grad_norm).full_tensor().item()
            )
            if not math.isfinite(sums["loss/total"] + grad_norm):
                where = (
                    f"step {step + 1}: loss {local_loss} on rank {rank}, gradient norm {grad_norm}"
                )
                raise SystemExit(
                    f"not finite at {where}; stopped before the optimizer step, run directory {log.run_dir}"
                )
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step, args)
            optimizer.step()
            optimizer.zero_grad()
        metrics = (
            sums
            | {"optim/lr": lr_at(step, args), "optim/grad_norm": grad_norm}
            | routing_extremes(routing)
        )
        if args.eval_limit and args.eval_every and (step + 1) % args.eval_every == 0:
            with clock("eval"):
                metrics |= evaluate("validation", f"eval/{args.task}")
        tokens = all_reduce({"tokens": batch.valid_mask.sum()})["tokens"]
        metrics |= clock | {
            "speed/tokens_per_s": tokens / clock["time/update"],
            "memory/peak_gb": peak_memory_gb(device),
        }
        log.write(step + 1, metrics)
        due, last = (
            args.save_every and (step + 1) % args.save_every == 0,
            step + 1 == args.max_steps,
        )
        ended = stop.is_set()
        saves.after_step(
            step + 1,
            metrics.get(f"eval/{args.task}"),
            weights=due or last or ended,
            state=due or ended,
        )
        if ended:
            log.say(f"stopped by a signal after step {step + 1}: go on with --resume {log.run_dir}")
            break
    if args.eval_limit and not ended:
        log.write(args.max_steps, evaluate("test", f"test/{args.task}"))
    log.say(f"saved {saves.newest}")
    log.close()
    dist.barrier()  # a rank that leaves while another still draws can abort in gloo
    dist.destroy_process_group()


if __name__ == "__main__":
    main(command_line(Args))
