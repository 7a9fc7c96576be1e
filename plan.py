"""A plan of a run, made before weights are read: memory, seconds, and the micro-batch that fits.

Parameters, and what a block keeps for the backward pass, are counted on the model without weights
(the meta device), whatever the family. The other terms are estimates, with constants fitted to
bench/step.py and to the samplers' tables. docs/models.md compares plans with measurements.
"""

import math
from copy import deepcopy
from dataclasses import dataclass, replace
from statistics import fmean

import torch
import torch._functorch.config
import torch.distributed as dist

from models import add_lora, meta_model
from models.layers import MEMORY_BUDGET
from models.ranks import ranks_of_a_copy, unsharded


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: float  # bytes
    flops: float  # a second, of an 8192^3 bf16 product; 0: unknown, so no seconds are shown
    bandwidth: float  # bytes a second


GPUS = {
    "H100": Gpu("H100", 85.0e9, 0.69e15, 3.35e12),
    "H200": Gpu("H200", 150.1e9, 0.69e15, 4.8e12),
}
# Share of the memory that a plan leaves to the CUDA context, libraries, graphs, and gaps between
# tensors
RESERVE = 0.07
LOGITS = 1024 * 8  # rows of logits that exist together, times bytes of each logit
# Rows, and tokens of prompts, that a sampler takes at once; its cache's width is a multiple
ROWS, PREFILL, WIDTHS = 256, 1 << 15, 128
# Gradients and recomputed tensors of the block in work, as a multiple of what a block keeps
IN_WORK = 2
# Training: all products, as a share of the rate of a large one; how often a forward and backward
# pass read or write what blocks keep; FLOP/s of attention of bidirectional and of block models;
# seconds to launch a block forward and backward
PRODUCTS, TOUCHES, SDPA, FLEX, LAUNCH = 0.92, 11, 285e12, 130e12, 6e-4
# A sampler's forward: share of the roofline; seconds of an adapter, which takes four kernels
SAMPLER, ADAPTER = 0.8, 2e-5


def this_gpu():
    """-> Gpu of this rank; None on a CPU"""
    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    known = next((gpu for key, gpu in GPUS.items() if key in facts.name), Gpu("", 0, 0, 0))
    return replace(known, name=facts.name, memory=facts.total_memory)


@dataclass
class Work:
    """What a rank computes in a step. A pair: tokens of the prompt, tokens that are scored."""

    longest: tuple  # pair
    typical: tuple  # pair
    asked: int  # tokens of the longest prompt that is sampled from
    sequences: int
    draws: int  # noisy copies of each
    together: int  # noised sequences that one forward must hold
    values: int  # passes over all sequences without a gradient
    updates: int  # passes with one
    rollout: int  # completions that the sampler makes
    held_out: int  # completions in an evaluation


def kept_bytes(layer, x, cos, sin, compiled=False):
    """Bytes that a block on the meta device keeps for its backward pass, without its parameters.

    x [B, T, D]; cos, sin [B, 1, T, r]. Attention keeps its inputs, its output and a logsumexp, as
    fused kernels do. compiled: what the partitioner of torch.compile keeps.
    """
    own = {value.untyped_storage()._cdata for value in (*layer.parameters(), cos, sin)}
    kept = {}  # holds the storages, so that no other takes the number of one

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    def attend(number, q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]

    if compiled:
        layer.compile(backend="aot_eager_decomp_partition")
    budget = torch._functorch.config.patch(activation_memory_budget=MEMORY_BUDGET)
    with budget, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, cos, sin, attend)
    return sum(kept[number].nbytes() for number in kept.keys() - own)


def kept_per_token(model, compiled, dtype=torch.bfloat16):
    """-> bytes a token that a block keeps for its backward pass"""
    with torch.device("meta"):
        x = torch.empty(1, 128, model.lm_head.in_features, dtype=dtype, requires_grad=True)
        cos, sin = model.rope(torch.arange(128)[None], dtype)
    layer = deepcopy(model.layers[-1]).to(dtype)  # of a mixture: the first may be dense
    kept = kept_bytes(layer, x, cos, sin, compiled)
    torch._dynamo.reset()
    return kept / 128


class Plan:
    """The plan of one of `ranks`. args: of a script; make_work(args, model, ranks) -> Work.

    fitting: the sizes of a micro-batch that fit; size: that of args, or the largest of them; 0:
    none.
    """

    def __init__(self, args, make_work, gpu, ranks):
        self.args, self.gpu, self.ranks = args, gpu, ranks
        dtype = torch.bfloat16 if args.lora_rank else torch.float32
        self.model = model = meta_model(args.model, dtype)
        self.base = sum(p.numel() for p in model.parameters())
        if args.lora_rank:
            add_lora(model, args.lora_rank, args.lora_alpha, args.lora_targets)
        self.trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.work = work = make_work(args, model, ranks)
        self.is_block = model.attention == "block-causal"
        self.has_reference = bool(work.values and args.beta and not args.lora_rank)
        self.kept = kept_per_token(model, args.compile)
        self.rows = min(ROWS, max(work.rollout, work.held_out))
        config = model.config
        self.cache = 4 * len(model.layers) * config.num_key_value_heads * config.head_dim
        if not self.is_block and getattr(args, "cache", "none") == "none":
            self.cache = 0
        # the sampler's own: offline scripts and lora_merged_rollout have none
        is_merged = not args.lora_rank or getattr(args, "lora_merged_rollout", True)
        self.adapters = 0 if is_merged else self.trained
        sizes = [work.together]
        while sizes[-1] < work.sequences * work.draws:
            sizes.append(2 * sizes[-1])
        room = (1 - RESERVE) * gpu.memory
        self.fitting = [size for size in sizes if sum(self.memory(size).values()) < room]
        self.size = args.micro_batch_size or max(self.fitting, default=0)

    def layout(self, size, prompt, scored):
        """-> rows of a forward, noisy copies in each, tokens of each"""
        K, size = self.work.draws, min(size, self.work.sequences * self.work.draws)
        K = K if self.work.together > 1 else math.gcd(K, size)  # Rows.split divides a row
        rows = max(size // K, 1)
        return (
            (rows, K, prompt + scored + K * scored)
            if self.is_block
            else (rows * K, 1, prompt + scored)
        )

    def memory(self, size):
        """-> {term: bytes} with micro-batches of this size"""
        args, work, model, ranks = self.args, self.work, self.model, ranks_of_a_copy(self.ranks)
        whole, layers = unsharded(model, ranks, self.gpu.memory), len(model.layers)
        gathered = lambda module: sum(2 * p.numel() for p in module.parameters() if p not in whole)
        rows, _, length = self.layout(size, *work.longest)
        tokens, canvas = rows * length, work.asked + args.gen_length
        is_summed = work.sequences * work.draws > size and not args.sync_every_backward
        kept, in_block = layers * self.kept * tokens, IN_WORK * self.kept * tokens
        if args.activation_checkpointing:
            kept, in_block = 2 * layers * model.lm_head.in_features * tokens, 1.5 * in_block
        head = LOGITS * model.lm_head.out_features
        if not args.lora_rank:
            head += 6 * model.lm_head.weight.numel()
        sampled = self.rows * canvas
        if self.is_block:  # a forward of prompts
            sampled = min(self.rows * work.asked, PREFILL)
        cache = self.cache * self.rows * math.ceil(canvas / WIDTHS) * WIDTHS
        training = kept + max(head, in_block)
        return {
            "policy": sum(p.nbytes / (1 if p in whole else ranks) for p in model.parameters()),
            # in bf16: embedding and head, the block in work and the next one
            "gathered": gathered(model) - gathered(model.layers) + 2 * gathered(model.layers[-1]),
            "optimizer": 8 * self.trained / ranks,
            "gradients": 4 * self.trained / (1 if is_summed else ranks),
            "reference": 2 * self.base / ranks * self.has_reference,
            "sampler": 2 * (self.base + self.adapters) * bool(self.rows),
            "activations": kept,
            "head or block": max(head, in_block),
            # the sampler frees them before an update that needs their memory
            "cache and tokens of the sampler, beyond these": max(
                0, cache + self.kept * sampled - training
            ),
        }

    def seconds(self, size):
        """-> {phase: seconds of a step}, waiting for other ranks left out; {} on an unknown GPU"""
        args, work, gpu = self.args, self.work, self.gpu
        if not gpu.flops:
            return {}
        again = int(args.activation_checkpointing)  # one more forward
        update = self.pass_seconds(size, 2 + again, 1, 1 + again / 3)
        update += 40 * self.trained / self.ranks / gpu.bandwidth  # clipping and AdamW
        phases = {
            "rollout": self.sampler_seconds(work.rollout),
            "old and reference values": work.values * self.pass_seconds(size, 1, 0, 1 / 3),
            "update": work.updates * update,
            "evaluations": self.sampler_seconds(work.held_out) / (args.eval_every or math.inf),
        }
        return phases | {"step": sum(phases.values())}

    def products(self, tokens, scored, times, trained=0):
        """FLOPs of products that take a weight `times`, and a trained one `trained` times more"""
        flops = lambda p, n: 2 * p.numel() * n * (times + trained * p.requires_grad)
        used = lambda p: self.model.config.num_experts_per_tok / len(p) if p.dim() == 3 else 1
        blocks = (flops(p, tokens * used(p)) for p in self.model.layers.parameters() if p.dim() > 1)
        return sum(blocks) + flops(self.model.lm_head.weight, scored)

    def pass_seconds(self, size, times, trained, share):
        """Seconds of a pass over the sequences of a step. times, trained: of `products`; share of
        a forward and backward pass in all else
        """
        (prompt, scored), work, config = self.work.typical, self.work, self.model.config
        rows, K, length = self.layout(size, prompt, scored)
        pairs, layers = length**2 / SDPA, len(self.model.layers)
        if self.is_block:  # those that see each other
            pairs = ((prompt + scored) ** 2 / 2 + K * scored * (prompt + scored / 2)) / FLEX
        # 4 FLOPs a pair and dimension in the forward pass, 10 in the backward pass
        other = 14 * pairs * config.num_attention_heads * config.head_dim
        other += length * self.kept * TOUCHES / self.gpu.bandwidth + LAUNCH / rows
        number = work.sequences * work.draws / K
        flops = self.products(number * length, number * K * scored, times, trained)
        return flops / PRODUCTS / self.gpu.flops + share * number * layers * other

    def sampler_seconds(self, number):
        """Seconds of `number` completions"""
        args, gpu, prompt = self.args, self.gpu, self.work.typical[0]
        n, rows = args.block_length or self.model.block_length, min(number, ROWS)
        steps, canvas = min(args.denoising_steps, n), prompt + args.gen_length
        window = n if self.cache else canvas  # tokens of a forward, besides the first of a block
        first = 2 * n if self.is_block else canvas
        tokens = (first + (steps - 1) * window) / steps
        flops = self.products(rows * tokens, rows * n / 2, 1)
        read = self.cache * rows * canvas / gpu.bandwidth
        read += max(flops / gpu.flops, 2 * self.base / gpu.bandwidth)
        adapters = sum("lora_A" in name for name, _ in self.model.named_parameters())
        forward = read / SAMPLER + ADAPTER * adapters * bool(self.adapters)
        return math.ceil(number / ROWS) * math.ceil(args.gen_length / n) * steps * forward

    def table(self):
        """-> the plan in lines"""
        memory, line = (
            self.memory(self.size),
            lambda pairs: ", ".join(f"{k} {v:.3g}" for k, v in pairs if v),
        )
        terms = memory | {"sum": sum(memory.values())}
        return "\n".join(
            [
                f"plan for one of {self.ranks} x {self.gpu.name}, --micro-batch-size {self.size}",
                f"  GB of {self.gpu.memory / 1e9:.3g}: "
                + line((k, v / 1e9) for k, v in terms.items()),
                f"  seconds: {line(self.seconds(self.size).items()) or 'unknown on this GPU'}",
            ]
        )

    def refusal(self, make_work):
        """-> None, or a line: this cannot fit, and ways in which it would"""
        import tyro

        size, GB = self.size or self.work.together, self.gpu.memory / 1e9
        needed = sum(self.memory(size).values()) / 1e9
        if self.size and needed < GB:  # a size of the user's own may take the reserve
            return None
        ways = [f"--micro-batch-size {n}" for n in self.fitting[-1:]]
        again, lora = "--activation-checkpointing", "--lora-rank 128"
        half = f"--gen-length {self.args.gen_length // 2}"
        changes = "--sync-every-backward", again, lora, f"{again} {lora}", half
        for way, more in [(way, 1) for way in changes] + [
            (f"{n} x the GPUs", n) for n in (2, 4, 8)
        ]:
            flags = way.split() if more == 1 else []
            args = tyro.cli(type(self.args), args=flags, default=self.args)
            is_more = self.fitting or any("GPUs" in one or one in way for one in ways)
            if not is_more and Plan(args, make_work, self.gpu, more * self.ranks).fitting:
                ways.append(way)
        problem = f"--micro-batch-size {size} needs {needed:.3g} GB on a GPU of {GB:.3g} GB"
        return f"{problem}: try {', or '.join(ways) or 'a smaller model'}"


def choose(args, make_work, together, of, on_cpu):
    """-> the micro-batch size of a run: args' own, or the largest that fits; on CPUs on_cpu.

    Prints the plan. SystemExit if `together` noised sequences of a row or pair (of) are more than
    the size that args name, or if the run does not fit the GPU.
    """
    size, gpu = args.micro_batch_size, this_gpu()
    if 0 < size < together:
        raise SystemExit(f"--micro-batch-size {size} does not hold the {together} draws of a {of}")
    if gpu is None:
        return size or max(on_cpu, together)
    plan = Plan(args, make_work, gpu, dist.get_world_size())
    if line := plan.refusal(make_work):
        raise SystemExit(line)
    if not dist.get_rank():
        print(plan.table(), flush=True)
    return plan.size


def fit(args, problems, draws, draws_together, uses_old):
    """The micro-batch size of a script with rollouts: see `choose`.

    problems {split: [(example, prompt ids)]}; draws(args, replays) -> noisy copies of a completion;
    replays: forwards of a rollout that the learner can replay one by one.
    """
    lengths = {split: [len(ids) for _, ids in rows] for split, rows in problems.items()}

    def make_work(args, model, ranks):
        n, iterations = args.block_length or model.block_length, args.num_iterations
        replays = min(args.denoising_steps, n)
        if model.attention == "bidirectional":
            replays *= math.ceil(args.gen_length / n)
        K, sequences = draws(args, replays), args.prompts_per_step * args.num_generations // ranks
        return Work(
            longest=(max(map(max, lengths.values())), args.gen_length),
            typical=(fmean(lengths["train"]), args.gen_length),
            asked=max(map(max, lengths.values())),
            sequences=sequences,
            draws=K,
            together=K if draws_together else 1,
            values=iterations * ((uses_old and iterations > 1) + bool(args.beta)),
            updates=iterations,
            rollout=sequences,
            held_out=len(lengths.get("test", ())) // ranks,
        )

    return choose(args, make_work, draws(args, 1) if draws_together else 1, "row", 256)


def fit_answers(args, rows, held_out, draws=1, values=0):
    """The micro-batch size of a script without rollouts: see `choose`.

    rows: TokenRows of prompts and answers; held_out {split: problems}; draws: noisy copies of an
    answer; values: passes of a frozen reference. The answers of a row share a micro-batch.
    """
    prompt, *sides = rows.bounds.diff().unflatten(0, (-1, rows.parts)).T
    answer, together = torch.stack(sides).amax(0), draws * len(sides)

    def make_work(args, model, ranks):
        tail = getattr(args, "eos_tail", 0) * (model.attention == "bidirectional")
        whole, scored = prompt + answer + tail, answer + tail
        longest = max(int(whole.max()), getattr(args, "pack_length", 0))
        most = max(int(scored.max()), int(longest * scored.sum() / whole.sum()))
        return Work(
            longest=(longest - most, most),
            typical=(prompt.float().mean().item(), scored.float().mean().item()),
            asked=int(prompt.max()),
            sequences=args.batch_size * len(sides) // ranks,
            draws=draws,
            together=together,
            values=values,
            updates=1,
            rollout=0,
            held_out=max(map(len, held_out.values()), default=0) // ranks,
        )

    return choose(args, make_work, together, "pair", 64)
