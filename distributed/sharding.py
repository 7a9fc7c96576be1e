"""What FSDP2 shards, over which ranks, and when it gathers and reduces."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distributed.groups import maximum, ranks_of_a_node


def replicated(model, ranks, memory):
    """The frozen parameters that every rank keeps whole, so that no forward has to gather them: all
    on one rank, else the base under adapters if it fills less than a quarter of a GPU of `memory`
    bytes. A frozen reference model is sharded: full fine-tuning needs the memory. -> set
    """
    values = list(model.parameters())
    frozen = {value for value in values if not value.requires_grad}
    size = sum(value.numel() * value.itemsize for value in frozen)
    fits = len(frozen) < len(values) and memory > 4 * size
    return frozen if fits or ranks == 1 else set()


def gathered_bytes(module, replicas):
    """Bytes of a module's sharded parameters when gathered, in bf16. replicas: of `replicated`"""
    return sum(2 * value.numel() for value in module.parameters() if value not in replicas)


def gathers_once(model, replicas, memory):
    """Whether a pass gathers its parameters in one call for all blocks: where they fill little of a
    GPU of `memory` bytes, as adapters do. With a call for each block the GPU waited for the host
    a fifth of a step.
    """
    return memory > 50 * gathered_bytes(model, replicas)


def sharding(model, mixed):
    """What FSDP2 shards, and over which ranks. -> [(module, types, keyword arguments of
    fully_shard)], the model last; types: `mixed`, but () of modules that compute in fp32

    mesh: None, all ranks. Under torchrun on several nodes (nodes, ranks of a node), HSDP: every
    node holds the whole model, and only gradients travel between nodes.

    Sets model.groups, all these modules, and model.gathers_once: what the micro-batches of an
    optimizer step gather is kept from the first forward to the last backward. Collective.
    """
    mesh, ranks = None, dist.get_world_size()
    memory = -maximum(-cuda_bytes())  # of the smallest GPU, so that all ranks decide alike
    replicas, in_node = replicated(model, ranks, memory), ranks_of_a_copy(ranks)
    if in_node < ranks:
        shape, names = (ranks // in_node, in_node), ("nodes", "ranks")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    model.gathers_once = gathers_once(model, replicas, memory)
    layout = {"ignored_params": replicas, "mesh": mesh}
    layout["reshard_after_forward"] = not model.gathers_once
    fp32_modules = [m for m in model.fp32_modules if not replicas.issuperset(m.parameters())]
    model.groups = [*fp32_modules, *([] if model.gathers_once else model.layers), model]
    return [(one, () if one in fp32_modules else mixed, layout) for one in model.groups]


def register_forwards(model):
    """FSDP2's hooks run around `logps` and `logits`."""
    from torch.distributed.fsdp import register_fsdp_forward_method  # not at the top: takes 0.7 s

    for name in ("logps", "logits"):
        register_fsdp_forward_method(model, name)
        if model.gathers_once:
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
    only in the last. Where model.gathers_once, parameters are freed in the last alone.
    """
    # model.set_...() would visit all its modules, thousands with adapters: 7 ms a call
    for group in model.groups:
        group.set_requires_gradient_sync(every or is_last, recurse=False)
        group.set_requires_all_reduce(is_last, recurse=False)
        group.set_reshard_after_backward(is_last or not model.gathers_once, recurse=False)


def cuda_bytes():
    """Memory of this rank's GPU; 0 on a CPU"""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties().total_memory
