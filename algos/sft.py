"""Supervised fine-tuning: the masked cross-entropy of each family's authors (model.objective).

t    ~ U(t_min, t_max) per document: a prompt and its answer, or in block models a dialogue with
       all its answers (--turns all). Answer tokens are masked with probability t, prompts never
loss = sum over masked tokens of -weight logps / divisor, both counted over the whole step

       family                t             weight                 divisor
       LLaDA (2502.09992)    U(0.001, 1)   1 / (t answer length)  answers
       Dream (2508.15487)    U(0.001, 1)   1 / t                  answer tokens
         with --cart-p                     from the context       masked tokens
       SDAR  (2510.06303), a2d with blocks
                             U(0, 1)       (L + 1) / n            answer tokens
       LLaDA2.x              U(0.3, 0.8)   1                      scored tokens
         with --edit-rate    others of its visible tokens are replaced, and scored likewise

       (L + 1) / n is the mean of the authors' 1 / t where n of the L answer tokens of a block are
       masked: the same loss on average, with less noise

logps: one pass over the noisy row; a block model: over [clean | noisy], where every block sees
       its own noisy tokens and the clean blocks before it. Documents packed into one row do not
       see each other.

python   algos/sft.py                                     # the shipped tiny model on a CPU
torchrun --nproc-per-node 8 algos/sft.py --model sdar-8b  # GSM8K, LoRA, eight GPUs
"""

# >>> shared: offline_imports
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
from models import add_lora, load_weights, meta_model, router_metrics, set_speed
from models.tensors import frozen_dtype
from run import HeldOut, Run, RunFlags

TINY = {  # what every offline script takes on the tiny models
    "task": "countdown", "lora_rank": 0, "learning_rate": 3e-4, "batch_size": 128,
    "warmup_steps": 5, "eval_limit": 512,
}  # fmt: skip
# <<< shared: offline_imports
# isort: split
from typing import Literal

from data.sft import training_rows
from distributed.groups import over_ranks
from distributed.sequence import data_rank
from rollout import keyed_uniform

# B rows, T tokens of a row


@dataclass
class Args(RunFlags):
    data: str = ""
    """messages, conversations, prompt/response or instruction/input/output rows (file, folder, hub
    id); or the task's gold answers (preset, file)"""
    turns: Literal["last", "all"] = "last"
    """answers of a dialogue to train on; block models see all of them in one row"""
    max_length: int = 2048
    """tokens of prompt + answer + end tokens, in whole blocks; longer rows are dropped"""
    batch_size: int = 64
    """sequences per optimizer step, over all ranks"""
    eval_limit: int = 32
    """held-out problems per evaluation; 0: no evaluation at all"""
    learning_rate: float = 1e-4
    """AdamW (ours; official sdar_4b_math_cot_full.yaml, all weights: 1e-5, warm-up of 3 %)"""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW (the official recipe leaves torch's default)"""
    weight_decay: float = 0.0
    """AdamW (the official recipe sets none)"""
    max_grad_norm: float = 1.0
    """gradient norm clip (the official recipe leaves LlamaFactory's default, 1.0)"""
    eos_tail: int = 64
    """LLaDA, Dream: 0 to this many end tokens follow an answer, drawn per answer, and are scored"""
    cart_p: float = 0.0
    """Dream: context-adaptive weights with this parameter (released: 0.1; dllm: 0.3); 0: 1/t"""
    edit_rate: float = 0.0
    """LLaDA2.1: share of the visible answer tokens that are replaced by random ones and scored (its
    report, arXiv 2602.08676, has no rate); 0: none"""
    pack_length: int = 0
    """pack the examples of a step into rows of this many tokens (SDAR: 20480); 0: one per row"""
    group_by_length: bool = True
    """sort the rows of a step by length, so that micro-batches need little padding"""
    RANGES = {"edit_rate": (0, 1)}


# What differs on the tiny models, and on others where all weights train.
BY_SIZE = {
    "tiny": TINY | {"learning_rate": 1e-3, "eval_every": 0},
    "full": {"learning_rate": 1e-5, "batch_size": 16, "eval_limit": 128},
}


@dataclass
class Batch:
    """Rows of one rank in one optimizer step: one document each or, packed, several.

    A document is an example of the step: prompt, answer, and the end tokens that belong to the
    answer. Padding on the right is not valid.
    """

    input_ids: torch.Tensor  # [B, T]
    valid_mask: torch.Tensor  # [B, T] bool
    answer_mask: torch.Tensor  # [B, T] bool: may be masked and is scored
    hidden_mask: torch.Tensor  # [B, T] bool: behind an answer in its block, always masked
    document_ids: torch.Tensor  # [B, T] index of the document in the step: keys its draws; -1: none
    position_ids: torch.Tensor  # [B, T] position in the document
    answer_length: torch.Tensor  # [B, T] tokens of the document's one answer, 1 on padding
    mask_token_id: int
    block_length: int
    seed: int
    step: int
    num_answers: int  # of the step on all ranks
    num_tokens: int  # answer tokens of the step on all ranks
    noise: tuple = ()  # of sample_masks

    def micro_batches(self, size):
        """Yield ((self, slice of its rows), is it the last, 1)"""
        B = len(self.input_ids)
        for i in range(0, B, size):
            yield (self, slice(i, i + size)), i + size >= B, 1

    def uniform(self, *key):
        """[B, T] fp64 in [0, 1), keyed by (seed, step, document, position, key)"""
        return keyed_uniform(self.seed, self.step, self.document_ids, self.position_ids, *key)


def context_weights(masked, batch, p):
    """Dream's context-adaptive weights: how near clean tokens of its document are to a masked one.

    w_i = sum over clean j of p (1 - p)^(|i - j| - 1) / 2, a geometric distribution to either side;
    the prompt is clean. -> [B, T] fp32
    """
    column = torch.arange(masked.shape[1], device=masked.device)

    def before(clean, document):
        """The sum over clean j < i, without p / 2. Its reach doubles in every pass (no T x T)."""
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
    """One noise level per document, each uniform, stratified over the step.

    -> noisy ids [B, T], weights [B, T] fp32 of the tokens to predict, 0 elsewhere, divisor of the
    weighted sum over all ranks
    """
    u0 = keyed_uniform(batch.seed, batch.step, torch.tensor(-1, device=batch.input_ids.device))
    u = (u0 + batch.document_ids / batch.num_answers) % 1  # [B, T], equal within a document
    t = (objective.t_max - objective.t_min) * u + objective.t_min
    noise, ids, mask = batch.uniform(), batch.input_ids, batch.mask_token_id
    masked = (noise < t) & batch.answer_mask
    scored = (noise < t + args.edit_rate * (1 - t)) & batch.answer_mask
    # any token below the mask token but the right one
    others = (ids + 1 + (batch.uniform("edit") * (mask - 1)).long()) % mask
    noisy_ids = ids.where(~scored, others).masked_fill(masked | batch.hidden_mask, mask)
    num_scored = max(over_ranks(scored.sum()), 1)
    if args.cart_p:
        return noisy_ids, context_weights(masked, batch, args.cart_p), num_scored
    weights = scored / t if objective.weight == "1/t" else scored.float()
    if objective.weight == "1/n":
        size = batch.block_length
        total = lambda tokens: tokens.unflatten(1, (-1, size)).sum(2).repeat_interleave(size, 1)
        weights = masked * (total(batch.answer_mask) + 1) / total(masked).clamp(min=1)
    if objective.mean == "answers":
        weights = weights / batch.answer_length
    counts = {"answers": batch.num_answers, "tokens": batch.num_tokens, "masked": num_scored}
    return noisy_ids, weights.float(), counts[objective.mean]


def sft_loss(logps, weights, divisor):
    """logps, weights [B, T] -> this micro-batch's share of the loss of the step"""
    return -(weights * logps).sum() / divisor


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


def add_tails(examples, args, model, step):
    """examples: [(prompt ids, answer ids)] -> documents [(index, prompt ids, answer ids)]

    Adds end tokens, scored like the answer, because the sampler denoises past the end: up to the
    end of the block, or without blocks 0 to eos_tail within max_length, drawn for each document.
    """
    lengths = [len(prompt) + len(answer) for prompt, answer in examples]
    if model.attention == "block-causal":
        tails = [-n % model.block_length for n in lengths]
    else:
        u = keyed_uniform(args.seed, step, torch.arange(len(examples)), "tail")
        drawn = (u * (args.eos_tail + 1)).long().tolist()
        tails = [min(tail, args.max_length - n) for tail, n in zip(drawn, lengths, strict=True)]
    return [
        (i, prompt, answer + [model.pad_token_id] * tails[i])
        for i, (prompt, answer) in enumerate(examples)
    ]


def lay_out(documents, args, world_size):
    """Documents of the step -> rows [[document]]; row i goes to rank i % world_size.

    Packing: each document, the longest first, goes to the first row with room. Rows that fill up
    the last round of ranks hold a document without an answer.
    """
    size = lambda document: len(document[1]) + len(document[2])
    ordered = sorted(documents, key=size, reverse=True)  # stable: the same rows on every rank
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
    """examples: [(prompt ids, answer ids)] of the step, equal on all ranks -> Batch of this rank

    In an answer of several turns, ~id is a token between them.
    """
    documents = add_tails(examples, args, model, step)

    def cells(i, prompt, answer):
        """token, valid, answer, hidden, document, position, answer length of each token"""
        answered = False  # in this block
        for j, token in enumerate(prompt + answer):
            scored = j >= len(prompt) and token >= 0
            answered = scored or (answered and j % model.block_length > 0)
            hidden = answered and not scored
            yield max(token, ~token), 1, scored, hidden, i, j, max(len(answer), 1)

    rows = lay_out(documents, args, world_size)[rank::world_size]
    rows = [[cell for document in row for cell in cells(*document)] for row in rows]
    T, padding = max(map(len, rows)), (0, 0, 0, 0, -1, 0, 1)
    table = torch.tensor([row + [padding] * (T - len(row)) for row in rows], device=device)
    input_ids, *columns = table.movedim(2, 0).contiguous()
    masks, keys = map(torch.Tensor.bool, columns[:3]), columns[3:]
    num_tokens = sum(token >= 0 for _, _, answer in documents for token in answer)
    facts = model.mask_token_id, model.block_length, args.seed, step, len(documents), num_tokens
    return Batch(input_ids, *masks, *keys, *facts)


def micro_loss(model, micro, args):
    """The only forward in training. micro: of Batch.micro_batches -> share of the loss, metrics"""
    batch, rows = micro
    noisy_ids, weights, divisor = batch.noise
    input_ids, noisy_ids = batch.input_ids[rows, None], noisy_ids[rows, None]
    logps = model.logps(
        input_ids[:, 0],
        noisy_ids,
        noisy_ids != input_ids,
        batch.valid_mask[rows],
        document_ids=batch.document_ids[rows] if args.pack_length else None,
    )
    return sft_loss(logps[:, 0], weights[rows], divisor), {}


def load_rows(held_out, model, args):
    """-> training rows. Refuses bad layouts first."""
    longest, has_blocks = args.max_length, model.attention == "block-causal"
    if has_blocks:
        longest += -longest % model.block_length
    if 0 < args.pack_length < longest:
        raise SystemExit(
            f"--pack-length {args.pack_length} is shorter than an example may be: "
            f"--max-length gives {longest}"
        )
    if args.cart_p and not (model.objective.has_cart and 0 < args.cart_p < 1):
        raise SystemExit(f"--cart-p {args.cart_p}: a number between 0 and 1, for Dream alone")
    if args.edit_rate and not getattr(model, "is_edited", False):
        raise SystemExit(f"--edit-rate {args.edit_rate}: for LLaDA2 alone, whose sampler edits")
    rows = training_rows(held_out.task, args.data, args.turns)
    # other models would see later turns
    joins = args.turns == "all" and has_blocks
    return held_out.encode(rows, model, held_out.prompts(), joins)


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
    held_out = HeldOut(args, args.max_length)
    rows = load_rows(held_out, model, args)
    tail = args.eos_tail * (model.attention == "bidirectional")
    engine = held_out.train_on(rows, model, device, args, tail)
    # sharded before weights are read: no rank ever holds the whole model
    model = load_weights(parallelize(model, args), device)
    # >>> shared: offline_load
    optimizer = make_optimizer(model, args)
    run = Run(__file__, args, held_out, model, optimizer)
    run.say(held_out.facts)
    # <<< shared: offline_load
    for step, clock in run.steps():
        first = step * args.batch_size
        with clock("data"):
            examples = [held_out.stream[i] for i in range(first, first + args.batch_size)]
            rows = make_batch(examples, args, model, step, *data_rank(), device)
            rows.noise = sample_masks(rows, args, model.objective)
        tokens = over_ranks((rows.document_ids >= 0).sum())
        # >>> shared: offline_learn
        with clock("update"), router_metrics(model) as routing:
            metrics = update(model, optimizer, rows, step, args)
        metrics["speed/tokens_per_s"] = tokens / clock["time/update"]
        run.end_step(metrics | routing | run.validate(engine, model))
    run.end(engine, model)


if __name__ == "__main__":
    start(main, Args, BY_SIZE)
# <<< shared: offline_learn
