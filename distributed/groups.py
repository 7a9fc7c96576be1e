"""Ranks of a run. A plain `python` command is one rank of the same code that torchrun starts."""

import math
import os
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

from distributed.sequence import form_groups, sequence_rank

TIMEOUT = timedelta(minutes=30)  # a rank that waits so long for another ends with an error


def own_device():
    """-> device of this rank, which becomes the current one; ranks of an evaluation may share it"""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(f"cuda:{rank % torch.cuda.device_count()}")
    torch.cuda.set_device(device)
    return device


def setup_distributed(sequence_parallel):
    """Start the process group, gloo on CPU, NCCL for CUDA tensors, and in it the groups of ranks
    that share rows (distributed/sequence.py). -> device of this rank
    """
    device = own_device()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    join_ranks(backend, TIMEOUT)
    form_groups(sequence_parallel, ranks_of_a_node(dist.get_world_size()), TIMEOUT)
    return device


def join_ranks(backend, timeout):
    """Start the process group, unless there is one. SystemExit if the variables that torchrun sets
    allow none.
    """
    if dist.is_initialized():
        return
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    try:
        dist.init_process_group(backend, timeout=timeout, **alone)
        ranks_of_a_node(1)  # a number?
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"{error!r}: start the command with torchrun, or unset RANK") from error


def ranks_of_a_node(ranks):
    """ranks: of all nodes"""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def rank_share(total, flag, rank=None):
    """-> range: which of the items 0 to total - 1 of a step belong to this rank; rank: its number
    among how many. With `data_rank()` all ranks that share rows get the same items.

    SystemExit names the flag that set `total` if it does not divide.
    """
    rank, ranks = rank or (dist.get_rank(), dist.get_world_size())
    if left := total % ranks:
        raise SystemExit(f"{flag} {total} does not divide by {ranks} ranks: {left} left over")
    return range(rank * total // ranks, (rank + 1) * total // ranks)


def all_reduce(values):
    """{name: number or 0-d tensor} -> {name: float}, fp64 sums over ranks; of those that share
    rows, and so have equal values, one counts
    """
    tensor = torch.tensor([float(value) for value in values.values()], dtype=torch.float64)
    dist.all_reduce(tensor)
    tensor /= sequence_rank()[1]
    return dict(zip(values, tensor.tolist(), strict=True))


def over_ranks(number):
    """-> float, its sum over ranks, see all_reduce"""
    return all_reduce({"": number})[""]


def gather(item):
    """-> [item of every rank], on every rank"""
    items = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


class StepMetrics(Counter):
    """Sums of an optimizer step's metrics over its micro-batches; then over ranks."""

    def add(self, loss, metrics, counts=1):
        """counts: 0 for a micro-batch without effect"""
        for name, value in (metrics | {"loss/total": loss}).items():
            self[name] += value.detach() * counts

    def reduce(self, step, norm):
        """-> all_reduce of the sums, those under policy/ divided by policy/weight, the sum of their
        weights, and those under mismatch/ likewise. If that is 0, no row on any rank had a
        gradient, and they are left out.

        norm: of the gradient, a DTensor. SystemExit on all ranks if it or the loss is not finite.
        """
        metrics, norm = all_reduce(self), norm.full_tensor().item()
        if not math.isfinite(metrics["loss/total"] + norm):
            losses = gather(self["loss/total"].item())
            where = f"not finite at step {step}: loss {losses!r:.200} by rank, gradient norm {norm}"
            raise SystemExit(f"{where}; the optimizer has not stepped")
        weights = {name: metrics.pop(name) for name in list(metrics) if name.endswith("/weight")}
        divisors = {name: weights.get(f"{name.split('/')[0]}/weight", 1) for name in metrics}
        if "policy/weight" not in weights and any(name.startswith("policy/") for name in metrics):
            raise SystemExit(
                "policy_loss returns sums under policy/ and no policy/weight to divide by"
            )
        means = {name: metrics[name] / divisor for name, divisor in divisors.items() if divisor}
        return means | {"optim/grad_norm": norm}


def maximum(number):
    """The largest of an integer over all ranks."""
    tensor = torch.tensor(number)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor)


def close_distributed(status):
    """End the process group on all ranks together: gloo can abort on a rank that still works. An
    exit status other than 0 ends the process.
    """
    dist.barrier()
    dist.destroy_process_group()
    if status:
        raise SystemExit(status)
