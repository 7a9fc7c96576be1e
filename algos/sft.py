"""Supervised fine-tuning: the masked cross-entropy of a family's authors, `objective` of its model file.

    t    ~ U(t_min, t_max) per answer; every answer token is masked with probability t, prompt tokens never
    loss = sum over masked tokens of -weight logps / divisor, both counted over the whole step
             LLaDA (2502.09992)    t ~ U(0.001, 1)   weight 1 / (t answer length)   divisor: answers
             Dream (2508.15487)    t ~ U(0.001, 1)   weight 1 / t                   divisor: answer tokens
               with --cart-p                         weight from the context        divisor: masked tokens
             SDAR  (2510.06303)    t ~ U(0.001, 1)   weight 1 / t                   divisor: answer tokens
             LLaDA2.x              t ~ U(0.3, 0.8)   weight 1                       divisor: masked tokens
    logps: one pass over the noisy row; a block model: over [noisy | clean], where every block sees its own noisy self and the
           clean blocks before it. Documents packed into one row do not see each other.

Run it on the tiny model on CPU, or on eight GPUs:

    python   algos/sft.py --learning-rate 1e-3
    torchrun --nproc-per-node 8 algos/sft.py --model sdar-8b --task countdown --data FILE.jsonl
"""

# >>> shared: imports
import math
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch._functorch.config
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.sft import encode, training_rows
from data.stream import ShuffledStream
from evals import load_problems, load_task, mean_score
from models import add_lora, export_weights, load_tokenizer, load_weights, meta_model
from models.experts import router_metrics, routing_extremes
from models.training_state import Saves
from rollout import make_engine
from rollout.sampling import keyed_uniform
from runlog import RunLog, StopSignal, Stopwatch, command_line, peak_memory_gb

# B sequences, T tokens of a sequence, V vocabulary
# <<< shared: imports


@dataclass
class Args:
    data: str = ""
    """file or hub id of messages or prompt/response rows; or a preset or file of the task: then its gold answers"""
    batch_size: int = 64
    """sequences per optimizer step, over all ranks"""
    token_cache: bool = True
    """keep tokenised rows in $CLEANDLLM_CACHE (~/.cache/cleandllm), under a hash of their content; --no-token-cache: nowhere"""
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
    learning_rate: float = 1e-5
    """AdamW (official sdar_4b_math_cot_full.yaml: 1e-5, constant after a warm-up of 3 %)"""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW (the official recipe leaves torch's default)"""
    weight_decay: float = 0.0
    """AdamW (the official recipe sets none)"""
    max_grad_norm: float = 1.0
    """gradient norm clip (the official recipe leaves LlamaFactory's default, 1.0)"""
    eos_tail: int = 64
    """LLaDA, Dream: 0 to so many end tokens behind an answer, drawn per answer, scored (official: up to the longest row)"""
    cart_p: float = 0.0
    """Dream: context-adaptive weights with this parameter in place of 1/t (released recipe: 0.1; dllm: 0.3); 0: off"""
    pack_length: int = 0
    """examples of a step are packed into rows of so many tokens, apart from each other (SDAR: 20480); 0: one example a row"""
    group_by_length: bool = True
    """rows of a step are sorted by length, so that those of a micro-batch are alike; the step keeps its examples"""


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
    """Rows of one rank in one optimizer step: one document each or, packed, several; the pads on the right are not valid.

    A document is an example of the step: prompt, answer and the end tokens that belong to the answer.
    """

    input_ids: torch.Tensor  # [B, T]
    valid_mask: torch.Tensor  # [B, T] bool
    answer_mask: torch.Tensor  # [B, T] bool: may be masked and is scored
    document_ids: torch.Tensor  # [B, T] index of the token's document in the step: the key of its draws; -1: pads and fillers
    position_ids: torch.Tensor  # [B, T] position in the document
    answer_length: torch.Tensor  # [B, T] answer tokens of the document, 1 on pads
    mask_token_id: int
    seed: int
    step: int
    num_answers: int  # of the step on all ranks
    num_tokens: int  # answer tokens of the step on all ranks

    def uniform(self):
        """[B, T] fp64 in [0, 1), keyed by (seed, step, document, position)."""
        return keyed_uniform(self.seed, self.step, self.document_ids, self.position_ids)


def add_tails(examples, args, model, step):
    """examples: [(prompt ids, answer ids)] of the step. -> documents [(index, prompt ids, answer ids with end tokens)]

    End tokens behind the answer are scored like it, because the sampler denoises past the end: up to the end of its block, or
    without blocks 0 to eos_tail within max_length, keyed per document so that none depends on others.
    """
    lengths = [len(prompt) + len(answer) for prompt, answer in examples]
    if model.objective.tail == "block":
        tails = [-n % model.block_length for n in lengths]
    else:
        drawn = (
            (
                keyed_uniform(args.seed, step, torch.arange(len(examples)), "tail")
                * (args.eos_tail + 1)
            )
            .long()
            .tolist()
        )
        tails = [min(drawn[i], args.max_length - n) for i, n in enumerate(lengths)]
    return [
        (i, prompt, answer + [model.pad_token_id] * tails[i])
        for i, (prompt, answer) in enumerate(examples)
    ]


def lay_out(documents, args, world_size):
    """Documents of the step -> rows [[document]]; row i goes to rank i % world_size, and every rank gets equally many.

    Packing: each document, the longest first, goes to the first row with room. A filler row is a document without an answer.
    """
    size = lambda document: len(document[1]) + len(document[2])
    ordered = sorted(
        documents, key=size, reverse=True
    )  # stable: the same rows on every rank and after a restart
    if args.pack_length:
        rows, room = [], []
        for document in ordered:
            row = next((i for i, tokens in enumerate(room) if tokens >= size(document)), len(rows))
            if row == len(rows):
                rows, room = [*rows, []], [*room, args.pack_length]
            rows[row].append(document)
            room[row] -= size(document)
    else:
        rows = [[document] for document in (ordered if args.group_by_length else documents)]
    _, prompt, answer = ordered[-1]
    return rows + [[(-1, prompt + answer, [])]] * (-len(rows) % world_size)


def make_batch(examples, args, model, step, rank, world_size, device):
    """examples: [(prompt ids, answer ids)] of the step, the same on every rank. -> Batch of this rank"""
    documents = add_tails(examples, args, model, step)
    rows = lay_out(documents, args, world_size)[rank::world_size]
    T = max(sum(len(prompt) + len(answer) for _, prompt, answer in row) for row in rows)

    def table(of_document, fill):
        values = [[value for document in row for value in of_document(*document)] for row in rows]
        return torch.tensor([row + [fill] * (T - len(row)) for row in values], device=device)

    return Batch(
        input_ids=table(lambda i, prompt, answer: prompt + answer, 0),
        valid_mask=table(lambda i, prompt, answer: [True] * len(prompt + answer), False),
        answer_mask=table(
            lambda i, prompt, answer: [False] * len(prompt) + [True] * len(answer), False
        ),
        document_ids=table(lambda i, prompt, answer: [i] * len(prompt + answer), -1),
        position_ids=table(lambda i, prompt, answer: range(len(prompt + answer)), 0),
        answer_length=table(
            lambda i, prompt, answer: [max(len(answer), 1)] * len(prompt + answer), 1
        ),
        mask_token_id=model.mask_token_id,
        seed=args.seed,
        step=step,
        num_answers=len(documents),
        num_tokens=sum(len(answer) for _, _, answer in documents),
    )


def context_weights(masked, batch, p):
    """Dream's context-adaptive weights: how near the clean tokens of its document are to a masked one. -> [B, T] fp32

    w_i = sum over clean j of p (1 - p)^(|i - j| - 1) / 2, a geometric distribution to either side; the prompt is clean.
    """
    column = torch.arange(masked.shape[1], device=masked.device)

    def before(clean, document):
        """The sum over clean j < i, without p / 2. What it reaches doubles with every pass: no T x T matrix is made."""
        back = lambda values, n: (
            values.roll(n, 1) * ((document.roll(n, 1) == document) & (column >= n))
        )
        sums, reach = back(clean, 1), 1
        while reach < masked.shape[1]:
            sums, reach = sums + (1 - p) ** reach * back(sums, reach), 2 * reach
        return sums

    clean, document = (batch.valid_mask & ~masked).double(), batch.document_ids
    after = before(clean.flip(1), document.flip(1)).flip(1)
    return (p / 2 * (before(clean, document) + after) * masked).float()


def sample_masks(batch, args, objective):
    """One noise level per document, stratified over the step, each uniform.

    -> masked [B, T] bool, weights [B, T] fp32, divisor of the weighted sum over all ranks
    """
    u0 = keyed_uniform(batch.seed, batch.step, torch.tensor(-1, device=batch.input_ids.device))
    u = (u0 + batch.document_ids / batch.num_answers) % 1  # [B, T], equal within a document
    t = (objective.t_max - objective.t_min) * u + objective.t_min
    masked = (batch.uniform() < t) & batch.answer_mask
    num_masked = all_reduce({"masked": masked.sum()})["masked"]
    if args.cart_p:
        return masked, context_weights(masked, batch, args.cart_p), max(num_masked, 1)
    weights = masked / t if objective.weight == "1/t" else masked.float()
    if objective.mean == "answers":
        weights = weights / batch.answer_length
    divisor = {
        "answers": batch.num_answers,
        "tokens": batch.num_tokens,
        "masked": max(num_masked, 1),
    }[objective.mean]
    return masked, weights.float(), divisor


def sft_loss(logps, weights, divisor):
    """logps, weights [B, T] -> this micro-batch's share of the loss of the step"""
    return -(weights * logps).sum() / divisor


def micro_loss(model, batch, masked, weights, divisor, rows, args):
    """The only forward in training: share of the loss of the step of some rows (a slice) of this rank. -> 0-d"""
    part = (
        rows,
        slice(int(batch.valid_mask[rows].sum(1).max())),
    )  # pads beyond the longest of these rows cost nothing
    input_ids, documents = (
        batch.input_ids[part],
        batch.document_ids[part] if args.pack_length else None,
    )
    noisy_ids = torch.where(masked[part], batch.mask_token_id, input_ids)
    logps = model.logps(
        input_ids, noisy_ids, masked[part], batch.valid_mask[part], document_ids=documents
    )
    return sft_loss(logps, weights[part], divisor)


def main(args):
    rank, world_size, device = setup_distributed()
    if left := args.batch_size % world_size:
        raise SystemExit(
            f"--batch-size {args.batch_size} does not divide by {world_size} ranks: {left} left over"
        )
    task, tokenizer = load_task(args.task), load_tokenizer(args.model)
    model = meta_model(
        args.model, torch.bfloat16 if args.lora_rank and device.type == "cuda" else torch.float32
    )
    longest = args.max_length + (
        -args.max_length % model.block_length if model.objective.tail == "block" else 0
    )
    if 0 < args.pack_length < longest:
        raise SystemExit(
            f"--pack-length {args.pack_length} is shorter than an example may be: --max-length gives {longest}"
        )
    if args.cart_p and not (model.objective.has_cart and 0 < args.cart_p < 1):
        raise SystemExit(f"--cart-p {args.cart_p}: a number between 0 and 1, for Dream alone")
    eval_data = args.eval_data or (args.data if args.data in task.PRESETS else "")
    splits = ("validation", "test") if args.eval_limit else ()
    load = lambda split: load_problems(
        task, split, eval_data, tokenizer, args.max_length, args.eval_limit
    )
    held_out = {split: load(split) for split in splits}
    rows = training_rows(
        task, args.data, [problem for problems, _ in held_out.values() for problem, _ in problems]
    )
    rows = encode(rows, tokenizer, model, args.max_length, args.batch_size, args.token_cache)
    if args.lora_rank:
        add_lora(model, args.lora_rank, args.lora_alpha, args.lora_targets, args.seed)
    model = load_weights(
        parallelize(model, args), device
    )  # sharded first: no rank ever holds the whole of it
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
    stream, stop = ShuffledStream(rows, args.seed, log.run_dir), StopSignal()
    lost = {split: dropped for split, (_, dropped) in held_out.items()}
    log.say(
        f"{rows.report('training rows')}\nheld-out problems dropped because of --max-length: {lost}"
    )
    decoding = {
        name: getattr(args, name) for name in ("gen_length", "block_length", "denoising_steps")
    }
    decoding |= {"remasking": "low_confidence_static"}
    if engine:
        log.say(f"evaluations: {engine.plan(**decoding)}")

    def evaluate(split):
        engine.load_weights(export_weights(model))
        return mean_score(engine, task, tokenizer, held_out[split][0], temperature=0.0, **decoding)

    ended = False
    for step in range(start, args.max_steps):
        clock = Stopwatch()
        with clock("data"):
            examples = [
                stream[i] for i in range(step * args.batch_size, (step + 1) * args.batch_size)
            ]
            batch = make_batch(examples, args, model, step, rank, world_size, device)
            masked, weights, divisor = sample_masks(batch, args, model.objective)
        with clock("update"), router_metrics(model) as routing:
            loss = torch.zeros((), device=device)
            for i in range(0, len(batch.input_ids), args.micro_batch_size):
                rows_i = slice(i, i + args.micro_batch_size)
                model.set_requires_gradient_sync(
                    args.sync_every_backward or rows_i.stop >= len(batch.input_ids)
                )
                share = micro_loss(model, batch, masked, weights, divisor, rows_i, args)
                (share * world_size).backward()  # FSDP averages over ranks
                loss += share.detach()
            local_loss, loss = loss.item(), all_reduce({"loss": loss})["loss"]
            grad_norm = (
                torch.nn.utils.clip_grad_norm_(params, args.max_grad_norm).full_tensor().item()
            )
            if not math.isfinite(loss + grad_norm):
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
        metrics = {
            "loss/total": loss,
            "optim/lr": lr_at(step, args),
            "optim/grad_norm": grad_norm,
        } | routing_extremes(routing)
        if args.eval_limit and args.eval_every and (step + 1) % args.eval_every == 0:
            with clock("eval"):
                metrics[f"eval/{args.task}"] = evaluate("validation")
        tokens = all_reduce({"tokens": (batch.document_ids >= 0).sum()})["tokens"]
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
        log.write(args.max_steps, {f"test/{args.task}": evaluate("test")})
    log.say(f"saved {saves.newest}")
    log.close()
    dist.barrier()  # a rank that leaves while another still draws can abort in gloo
    dist.destroy_process_group()


if __name__ == "__main__":
    main(command_line(Args))
