"""CUDA graphs of functions with fixed shapes: a step of a thousand kernels becomes one launch."""

import torch

from kernels import has_triton
from models.experts import experts_of, runs_grouped


def can_record(model):
    """Whether the forward of a model can be captured: on CUDA, with experts that run together, in
    bf16. One by one they read back how many tokens each has.
    """
    weight = model.lm_head.weight
    if not weight.is_cuda:
        return False
    together = has_triton() or runs_grouped(weight.device)
    if all(together and experts.is_grouped(weight.dtype) for experts in experts_of(model)):
        return True
    print(
        f"rollout without CUDA graphs: experts in {weight.dtype} run one by one on this GPU",
        flush=True,
    )
    return False


class Graphs:
    """run(key, function): function() is captured once per key and replayed from then on.

    function writes its results into tensors that outlive the graphs, reads nothing back to the
    host, and does the same whenever the key is the same. Weights may change in place, but not their
    addresses.
    """

    def __init__(self, device):
        self.device, self.graphs, self.pool = device, {}, torch.cuda.graph_pool_handle()

    def run(self, key, function):
        if key in self.graphs:
            return self.graphs[key].replay()
        function()  # an ordinary call, in which libraries also allocate what they allocate once
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog queries its events from another thread during the capture
        mode = {"pool": self.pool, "capture_error_mode": "thread_local"}
        with torch.cuda.device(self.device), torch.cuda.graph(graph, **mode):
            function()
        self.graphs[key] = graph
