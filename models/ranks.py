"""Ranks of a run. A plain `python` command is one rank of the same code that torchrun starts."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from models.sequence_parallel import data_place, form_groups, place

TIMEOUT = timedelta(minutes=30)  # a rank that waits so long for another ends with an error


def setup_distributed(sequence_parallel=1):
    """Start the process group, gloo on CPU, NCCL for CUDA tensors, and in it the groups of ranks
    that share rows (models/sequence_parallel.py). -> device of this rank
    """
    cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT, **alone)
    form_groups(sequence_parallel, ranks_of_a_node(dist.get_world_size()), TIMEOUT)
    return device


def ranks_of_a_node(ranks):
    """ranks: of all nodes"""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def unsharded(model, ranks, memory):
    """The frozen parameters that every rank keeps whole, so that no forward has to gather them: all
    on one rank, else the base under adapters if it fills less than a quarter of a GPU of `memory`
    bytes. A frozen reference model is sharded: full fine-tuning needs the memory. -> set
    """
    values = list(model.parameters())
    frozen = {value for value in values if not value.requires_grad}
    size = sum(value.numel() * value.itemsize for value in frozen)
    fits = len(frozen) < len(values) and memory > 4 * size
    return frozen if fits or ranks == 1 else set()


def gathered_bytes(module, whole):
    """Bytes of a module's sharded parameters when gathered, in bf16. whole: of `unsharded`"""
    return sum(2 * value.numel() for value in module.parameters() if value not in whole)


def gathers_at_once(model, whole, memory):
    """Whether a pass gathers its parameters in one call for all blocks: where they fill little of a
    GPU of `memory` bytes, as adapters do. With a call for each block the GPU waited for the host
    a fifth of a step (docs/models.md).
    """
    return memory > 50 * gathered_bytes(model, whole)


def sharding(model):
    """What FSDP2 shards, and over which ranks. -> keyword arguments of fully_shard; fp32 modules to
    shard, without mixed precision; other modules to shard, the model last

    mesh: None, all ranks. Under torchrun on several nodes (nodes, ranks of a node), HSDP: every
    node holds the whole model, and only gradients travel between nodes.

    Sets model.groups, all these modules, and model.stays_gathered: what the micro-batches of an
    optimizer step gather is kept from the first forward to the last backward. Collective.
    """
    mesh, ranks = None, dist.get_world_size()
    memory = -maximum(-cuda_bytes())  # of the smallest GPU, so that all ranks decide alike
    whole, in_node = unsharded(model, ranks, memory), ranks_of_a_copy(ranks)
    if in_node < ranks:
        shape, names = (ranks // in_node, in_node), ("nodes", "ranks")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    model.stays_gathered = gathers_at_once(model, whole, memory)
    layout = {"ignored_params": whole, "mesh": mesh}
    layout["reshard_after_forward"] = not model.stays_gathered
    fp32_modules = [m for m in model.fp32_modules if not whole.issuperset(m.parameters())]
    modules = [*([] if model.stays_gathered else model.layers), model]
    model.groups = [*fp32_modules, *modules]
    return layout, fp32_modules, modules


def register_forwards(model):
    """FSDP2's hooks run around `logps` and `logits`."""
    from torch.distributed.fsdp import register_fsdp_forward_method  # not at the top: takes 0.7 s

    for name in ("logps", "logits"):
        register_fsdp_forward_method(model, name)
        if model.stays_gathered:
            setattr(model, name, resharding(model, getattr(model, name)))


def resharding(model, method):
    """-> the method, which frees what a call without gradient has gathered. The next forward would
    use these values instead of what an optimizer, or a mix of weights, has written since.
    """

    def forward(*args, **kwargs):
        values = method(*args, **kwargs)
        if not torch.is_grad_enabled():
            for group in model.groups:
                group.reshard()
        return values

    return forward


def ranks_of_a_copy(ranks):
    """-> how many of the ranks share one copy of what is sharded: those of a node, or all where
    every node has one rank
    """
    in_node = ranks_of_a_node(ranks)
    return in_node if 1 < in_node < ranks else ranks


def reduce_gradients(model, is_last, every):
    """Call it before each forward and backward of an optimizer step.

    Gradients are summed over ranks in the last backward, or with `every` in every one; over nodes
    only in the last. Where model.stays_gathered, parameters are freed in the last alone.
    """
    # model.set_...() would visit all its modules, thousands with adapters: 7 ms a call
    for group in model.groups:
        group.set_requires_gradient_sync(every or is_last, recurse=False)
        group.set_requires_all_reduce(is_last, recurse=False)
        group.set_reshard_after_backward(is_last or not model.stays_gathered, recurse=False)


def cuda_bytes():
    """Memory of this rank's GPU; 0 on a CPU"""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def rank_share(total, flag):
    """-> range: which of the items 0 to total - 1 of a step belong to this rank

    SystemExit names the flag that set `total` if it does not divide by the number of ranks.
    """
    return share(total, flag, "ranks", dist.get_rank(), dist.get_world_size())


def group_share(total, flag):
    """The same where all ranks that share rows get the same items."""
    return share(total, flag, "groups of ranks", *data_place())


def share(total, flag, kind, rank, ranks):
    if left := total % ranks:
        raise SystemExit(f"{flag} {total} does not divide by {ranks} {kind}: {left} left over")
    return range(rank * total // ranks, (rank + 1) * total // ranks)


def all_reduce(values):
    """{name: number or 0-d tensor} -> {name: float}, fp64 sums over ranks; of those that share
    rows, and so have equal values, one counts
    """
    tensor = torch.tensor([float(value) for value in values.values()], dtype=torch.float64)
    dist.all_reduce(tensor)
    tensor /= place()[1]
    return dict(zip(values, tensor.tolist(), strict=True))


def reduce_metrics(sums):
    """Sum a step's metrics over ranks (`all_reduce`), then divide those under policy/ by
    policy/weight, the sum of their weights, and those under mismatch/ likewise. If that is 0, no
    row on any rank had a gradient, and they are left out.
    """
    metrics = all_reduce(sums)
    weights = {name: metrics.pop(name) for name in list(metrics) if name.endswith("/weight")}
    divisors = {name: weights.get(f"{name.split('/')[0]}/weight", 1) for name in metrics}
    if "policy/weight" not in weights and any(name.startswith("policy/") for name in metrics):
        raise SystemExit("policy_loss returns sums under policy/ and no policy/weight to divide by")
    return {name: metrics[name] / divisor for name, divisor in divisors.items() if divisor}


def maximum(number):
    """The largest of an integer over all ranks."""
    tensor = torch.tensor(number)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor)


def close_distributed(status=0):
    """End the process group on all ranks together: gloo can abort on a rank that still works. An
    exit status other than 0 ends the process.
    """
    dist.barrier()
    dist.destroy_process_group()
    if status:
        raise SystemExit(status)
