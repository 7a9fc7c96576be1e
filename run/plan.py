"""A plan of a run, made before weights are read: memory, seconds, and the micro-batch that fits.

A run on a GPU prints its own; with --plan any command prints that of other GPUs, and ends.

Parameters, and what a block keeps for the backward pass, are counted on the model without weights
(the meta device), whatever the family. The other terms are estimates, with constants fitted to
bench/step.py and to the samplers' tables. docs/models.md compares plans with measurements.
"""

import math
import os
import re
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch._functorch.config
import torch.distributed as dist

from distributed import groups
from distributed.sharding import (
    cuda_bytes,
    gathered_bytes,
    gathers_once,
    ranks_of_a_copy,
    replicated,
)
from models import add_lora, meta_model, names
from models.attention import check_backend
from models.config import stored_dtype
from models.layers import memory_budget
from run.flags import flags_of

# Parts of a GPU's name -> FLOP/s of a large bf16 product, bytes/s of its memory, its size as the
# driver gives it. Measured on H100 and H200; of others 0.7 of the FLOP/s of the data sheet.
GPUS = """
    A100-40   0.218e15   1.56e12    42e9
    A100-80   0.218e15   2.04e12    85e9
    A10G      0.049e15    0.6e12  23.6e9
    A10       0.088e15    0.6e12  23.6e9
    B200       1.58e15      8e12   191e9
    H100       0.69e15   3.35e12    85e9
    H200       0.69e15    4.8e12   150e9
    L40S      0.253e15  0.864e12  47.7e9
    L4        0.085e15    0.3e12  23.6e9
    RTX-3090   0.05e15  0.936e12  25.4e9
    RTX-4090  0.116e15   1.01e12  25.4e9
"""
GPUS = {name: [*map(float, facts)] for name, *facts in map(str.split, GPUS.strip().splitlines())}
# bytes and name of a GPU that is not here, but planned for
ASKED = None
# Share of the memory that a plan leaves to the CUDA context, libraries, graphs, and gaps between
# tensors
RESERVE = 0.07
# Rows of logits that exist together, times bytes of each: two copies in fp32, one in bf16
LOGITS = 1024 * 10
# Rows, and tokens of prompts, that a sampler takes at once; its cache's width is a multiple
ROWS, PREFILL, WIDTHS = 256, 1 << 15, 128
ON_CPU = 256  # micro-batch
# What blocks keep where attention takes a mask, as a multiple of what is counted without one
MASKED = 1.06
# Gradients and recomputed tensors of the block in work, as a multiple of what a block keeps
IN_WORK = 2
# Training: all products, as a share of the rate of a large one; how often a forward and backward
# pass read or write what blocks keep; attention's share, of bidirectional and of block models;
# seconds to launch a block forward and backward
PRODUCTS, TOUCHES, SDPA, FLEX, LAUNCH = 0.92, 11, 0.413, 0.188, 6e-4
# A sampler's forward: share of the roofline; seconds of an adapter, which takes four kernels
SAMPLER, ADAPTER = 0.66, 2e-5


@cache
def kept_per_token(model, compiled, dtype=torch.bfloat16):
    """-> bytes a token that a block of a model on the meta device keeps for its backward pass,
    without its parameters.

    Attention keeps its inputs, its output and a logsumexp, as fused kernels do. compiled: what the
    partitioner of torch.compile keeps.
    """
    with torch.device("meta"):
        x = torch.empty(1, 128, model.lm_head.in_features, dtype=dtype, requires_grad=True)
        cos, sin = model.rope(torch.arange(128)[None], dtype)
    layer = deepcopy(model.layers[-1]).to(dtype)  # of a mixture: the first may be dense
    own = {value.untyped_storage()._cdata for value in (*layer.parameters(), cos, sin)}
    kept = {}  # a tensor of each storage
    keep = lambda tensor: kept.setdefault(tensor.untyped_storage()._cdata, tensor)

    def attend(number, q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]

    if compiled:
        layer.compile(backend="aot_eager_decomp_partition")
    budget = torch._functorch.config.patch(activation_memory_budget=memory_budget(model))
    with budget, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, cos, sin, attend)
    torch._dynamo.reset()
    return sum(kept[number].untyped_storage().nbytes() for number in kept.keys() - own) / 128


def share_taken(p, config):
    """-> share of a parameter of a block that a token takes: of stacked experts a few"""
    return config.num_experts_per_tok / len(p) if p.dim() == 3 else 1


@dataclass
class Plan:
    """The plan of one of `ranks`. Counts are those of all ranks.

    fitting: the sizes of a micro-batch that fit; size: --micro-batch-size, or the largest of them;
    0: none. rows: completions that the sampler makes together.
    """

    model: torch.nn.Module  # the policy on the meta device, with its adapters
    args: object  # flags of the script
    lengths: list  # [N, 2] tokens of the prompt, and scored, of every sequence
    held_out: int  # completions in an evaluation
    coupled: int  # sequences whose draws one forward must hold; 0: not even those of one
    has_old: bool  # values before the first update
    room: float  # bytes of memory of a GPU
    gpu: str  # its name
    ranks: int

    def __post_init__(self):
        net, args = self.model, self.args
        config, self.is_block = net.config, net.attention == "block-causal"
        self.lengths = torch.as_tensor(self.lengths)
        # completions of a step, updates that each is in, a frozen and a second trained model
        self.rollout = getattr(args, "prompts_per_step", 0) * getattr(args, "num_generations", 0)
        # of trees: nodes at the end of each part of a rollout, which are the rows
        K = getattr(args, "branches", (1,))
        self.parts = [self.rollout // math.prod(K[i:]) for i, _ in enumerate(K, 1)]
        self.iterations = getattr(args, "num_iterations", 1)
        self.epochs = 1 if getattr(args, "minibatches", False) else self.iterations
        self.has_reference = getattr(args, "beta", 0) > 0
        self.values = getattr(args, "value_model", False)
        self.base = sum(p.numel() for name, p in net.named_parameters() if "lora_" not in name)
        self.active = sum(p.numel() * share_taken(p, config) for p in net.layers.parameters())
        self.trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
        # of the sampler's own; offline it gets merged weights
        is_merged = getattr(args, "lora_merged_rollout", True)
        self.adapters = 0 if is_merged or not args.lora_rank else self.trained
        self.kept = kept_per_token(net, args.compile)
        in_copy = ranks_of_a_copy(self.ranks)
        self.whole = whole = replicated(net, in_copy, self.room)
        self.policy = sum(p.nbytes / (1 if p in whole else in_copy) for p in net.parameters())
        self.gathered = gathered_bytes(net, whole)
        if not gathers_once(net, whole, self.room):
            # embedding and head, the block in work and the next one
            blocks = gathered_bytes(net.layers, whole)
            self.gathered += 2 * gathered_bytes(net.layers[-1], whole) - blocks
        self.n = n = args.block_length or net.block_length
        self.blocks, self.steps = math.ceil(args.gen_length / n), min(args.denoising_steps, n)
        # of a sequence; of a rank, and of those that share rows with it
        self.copies = args.num_draws(self.steps * (1 if self.is_block else self.blocks))
        sequences = sum(self.parts) or args.batch_size * self.coupled
        self.noised = sequences * self.copies * args.sequence_parallel // self.ranks
        self.rows = min(ROWS, math.ceil(max(self.rollout, self.held_out) / self.ranks))
        self.canvas = int(self.lengths.amax(0)[0]) + args.gen_length  # the sampler's longest row
        # bytes of keys and values of a token
        self.cached = 4 * len(net.layers) * config.num_key_value_heads * config.head_dim
        self.cached *= self.is_block or args.cache != "none"
        self.least = max(1, self.coupled * self.copies)  # copies that one forward must hold
        sizes = [self.least]
        while sizes[-1] < self.noised:
            sizes.append(2 * sizes[-1])
        fits = lambda size: self.memory(size)["sum"] < (1 - RESERVE) * self.room
        while self.rows > 1 and not fits(sizes[0]):
            self.rows //= 2
        self.fitting = list(filter(fits, sizes))
        self.size = args.micro_batch_size or max(self.fitting, default=0)

    def layout(self, size, prompt, scored):
        """-> rows of a forward, noisy copies in each, tokens of each"""
        size, K = min(size, self.noised), self.copies
        K = K if self.coupled else math.gcd(K, size)  # Rows.split divides a row
        rows = max(size // K, 1)
        if self.is_block:
            # in the noisy copies the whole blocks that hold a scored token
            return rows, K, prompt + scored + K * (scored / len(self.parts) + self.n)
        return rows * K, 1, prompt + scored

    def memory(self, size):
        """-> {term: bytes} with micro-batches of this size"""
        net, args, ranks = self.model, self.args, ranks_of_a_copy(self.ranks)
        layers = len(net.layers)
        asked, scored = self.lengths.amax(0).tolist()
        rows, _, length = self.layout(size, int(self.lengths.sum(1).max()) - scored, scored)
        tokens = MASKED * math.ceil(rows * length / args.sequence_parallel)
        kept, in_block = layers * self.kept * tokens, IN_WORK * self.kept * tokens
        if args.activation_checkpointing:
            kept, in_block = 2 * layers * net.lm_head.in_features * tokens, 1.5 * in_block
        head = LOGITS * net.lm_head.out_features
        if not args.lora_rank:
            head += 6 * net.lm_head.weight.numel()
        # of the sampler, which under adapters takes a base that this rank holds whole
        base = 0 if self.whole and self.adapters else self.base
        cache = self.rows * self.cached * math.ceil(self.canvas / WIDTHS) * WIDTHS
        sampled = min(self.rows * asked, PREFILL) if self.is_block else self.rows * self.canvas
        is_reduced = args.sync_every_backward or self.noised <= size  # in every backward
        moments = 8 * self.trained / ranks
        terms = {
            "policy": self.policy,
            "gathered": self.gathered,
            "optimizer": moments,
            "gradients": 4 * self.trained / (ranks if is_reduced else 1),
            "reference": 2 * self.base / ranks * (self.has_reference and not args.lora_rank),
            "value model": (self.policy + moments) * self.values,
            "sampler": 2 * (base + self.adapters) * bool(self.rows),
            # of an update or a rollout: the sampler frees its cache where an update needs it
            "activations": max(kept + max(head, in_block), cache + self.kept * sampled),
        }
        return terms | {"sum": sum(terms.values())}

    def seconds(self):
        """-> {phase: seconds of a step}, waiting for other ranks left out; {} on an unknown GPU"""
        words = re.split(r"\W|GB", self.gpu)  # of "NVIDIA A100-SXM4-40GB": A100 and 40
        rates = [GPUS[name] for name in GPUS if {*name.split("-")} <= {*words}]
        if not rates:
            return {}
        (flop_rate, byte_rate, _), args, net, n = rates[0], self.args, self.model, self.n
        prompt, scored = self.lengths.double().mean(0).tolist()
        adapters = sum("lora_A" in name for name, _ in net.named_parameters())
        products = lambda tokens, scored: tokens * self.active + scored * net.lm_head.weight.numel()

        together, K, length = self.layout(self.size, prompt, scored)
        noisy = K * scored / len(self.parts)
        pairs = length**2 / SDPA / flop_rate  # of tokens that see each other
        if self.is_block:
            pairs = (prompt + scored) ** 2 / 2 + noisy * (prompt + scored / 2)
            pairs /= FLEX * flop_rate
        # 4 FLOPs a pair and dimension in the forward pass, 10 in the backward pass
        other = 14 * pairs * net.config.num_attention_heads * net.config.head_dim
        other += length * self.kept * TOUCHES / byte_rate + LAUNCH / together
        other *= len(net.layers) / 3
        flops = products(length, noisy)
        # of all sequences of a step: a forward pass, which takes as long as the gradients of the
        # inputs, and those of the trained weights
        in_products = lambda flops: 2 * flops / flop_rate / PRODUCTS
        rows = self.noised / K / args.sequence_parallel
        forward = rows * (in_products(flops) + other)
        gradients = rows * (in_products(min(flops, length * self.trained)) + other)

        def sampling(completions):
            """All ranks make so many completions."""
            number = completions // self.ranks
            rows, canvas = min(number, self.rows), prompt + args.gen_length
            window = n if self.cached else canvas  # tokens of a forward after the first of a block
            first = 2 * n if self.is_block else canvas
            tokens = rows * (first + (self.steps - 1) * window) / self.steps
            one = max(2 * products(tokens, rows * n / 2) / flop_rate, 2 * self.base / byte_rate)
            one = (one + self.cached * rows * canvas / byte_rate) / SAMPLER
            one += ADAPTER * adapters * bool(self.adapters)
            return number / max(rows, 1) * self.blocks * self.steps * one

        update = self.epochs * ((2 + args.activation_checkpointing) * forward + gradients)
        values = (self.has_old and self.iterations > 1) + self.has_reference
        # masks are drawn anew
        if args.num_draws(1 << 20) == self.copies and self.parts == [self.rollout]:
            values *= self.epochs
        phases = {
            "rollout": sum(map(sampling, self.parts)) / len(self.parts),
            "old and reference values": values * forward,
            "update": update,
            "value model": (2 * forward + update) * self.values,
            "evaluations": sampling(self.held_out) / (args.eval_every or math.inf),
        }
        return phases | {"step": sum(phases.values())}

    def table(self):
        """-> the plan in lines"""
        line = lambda terms, unit: ", ".join(f"{k} {v / unit:.3g}" for k, v in terms.items() if v)
        weights = stored_dtype(self.model.checkpoint_config).itemsize * self.base
        # parameters and moments in fp32
        save = {"weights": 4 * self.trained if self.args.lora_rank else weights}
        save["for --resume"] = 12 * self.trained * (1 + self.values)
        return (
            f"plan for one of {self.ranks} x {self.gpu}, --micro-batch-size {self.size}, "
            f"{self.rows} completions at a time\n"
            f"  GB of {self.room / 1e9:.3g}: {line(self.memory(self.size), 1e9)}\n"
            f"  seconds: {line(self.seconds(), 1) or 'unknown on this GPU'}\n"
            f"  GB of a save: {line(save, 1e9)}"
        )

    def check(self):
        """SystemExit if the micro-batch does not fit, with what would."""
        size = self.size or self.least
        needed = self.memory(size)["sum"]
        # a size of the user's own may take RESERVE
        if not self.size or needed >= self.room:
            raise SystemExit(
                f"--micro-batch-size {size} needs {needed / 1e9:.3g} GB on a GPU of "
                f"{self.room / 1e9:.3g} GB: "
                + (f"try --micro-batch-size {self.fitting[-1]}" if self.fitting else self.advice())
            )

    def advice(self):
        """-> how many such GPUs of a node fit the run as it is, or fewer with flags that take less
        memory; the largest adapters below the run's own that fit the GPUs asked for
        """
        found, fewest, largest, own = [], math.inf, 0, self.args
        # a resumed run keeps its adapters
        most = 0 if own.resume else own.lora_rank or math.inf
        smaller = [rank for rank in (128, 64, 32, 16, 8) if rank < most]

        @cache  # counting takes seconds at 8B
        def adapted(rank):
            return add_lora(meta_model(own.model, torch.bfloat16), rank, *own.lora[1:])

        def fits(ranks, flags, model=self.model):
            args = replace(own, **flags)
            if is_fitting := replace(self, model=model, args=args, ranks=ranks).fitting:
                found.append(" ".join([f"{ranks}", *flags_of(flags)]))
            return is_fitting

        sync, recompute = {"sync_every_backward": True}, {"activation_checkpointing": True}
        if self.ranks < 8:  # more GPUs than now would be those of one node
            os.environ.pop("LOCAL_WORLD_SIZE", None)
        for flags in ({}, sync, recompute, sync | recompute):
            for ranks in (self.ranks, 2, 4, 8):
                if self.ranks <= ranks < fewest and fits(ranks, flags):
                    fewest = ranks
            for rank in smaller:
                if self.ranks < fewest and largest < rank:
                    if fits(self.ranks, {"lora_rank": rank} | flags, adapted(rank)):
                        largest = rank
        return (
            f"such GPUs that fit: {', or '.join(found or ['none up to 8'])}; else try "
            "--sequence-parallel for long rows, or a smaller model"
        )


def fit(model, args, lengths, splits, coupled, has_old=False):
    """-> the micro-batch size of the run, asked for or the largest that fits, and the completions
    that its sampler makes together; on CPUs ON_CPU and ROWS. splits {split: held-out problems}; the
    others: see `Plan`.

    Prints the plan. SystemExit for an --attention that cannot serve the model, if the size asked
    for does not hold what one forward must, or if the run does not fit the GPU.
    """
    room, gpu = ASKED or (cuda_bytes(), "")
    check_backend(args.attention, model.attention, "cuda" if room else "cpu")
    size, together = args.micro_batch_size, coupled * args.num_draws(1)
    if 0 < size < together:
        raise SystemExit(
            f"--micro-batch-size {size} does not hold the {together} draws that one forward takes"
        )
    if not room:
        return size or max(ON_CPU, together), ROWS
    machine = room, gpu or torch.cuda.get_device_name(), dist.get_world_size()
    plan = Plan(model, args, lengths, len(splits.get("test", ())), coupled, has_old, *machine)
    plan.check()
    if not dist.get_rank():
        print(plan.table(), flush=True)
    if ASKED:
        raise SystemExit(0)
    return plan.size, plan.rows


def pretend(gpus):
    """--plan: from here on this process is the first of a run on these GPUs, which are of one node,
    until `fit` ends it. Weights are not downloaded.
    """
    global ASKED
    from torch.testing._internal.distributed.fake_pg import FakeStore

    plain = lambda name: re.sub("[ -]", "", name.lower())  # 2 x A100-40, 1xRTX4090
    spelled = {plain(name): name for name in GPUS}
    found = re.fullmatch(f"([1-8])x({'|'.join(spelled)}|[0-9]{{1,3}})", plain(gpus))
    if not found:
        raise SystemExit(f"--plan {gpus}: use 1x24 to 8x24 (GB), or 1x one of {', '.join(GPUS)}")
    ranks, gpu = found[1], spelled.get(found[2], found[2])
    ASKED = (GPUS[gpu][2] if gpu in GPUS else 1e9 * int(gpu)), gpu
    groups.own_device = lambda: torch.device("cuda")
    names.FILES[:] = names.SMALL
    dist.init_process_group("fake", rank=0, world_size=int(ranks), store=FakeStore())
