"""CUDA graphs of functions with fixed shapes: a step of some thousand kernels is launched as one."""

import torch


class Graphs:
    """run(key, function): function() is captured once per key and replayed from then on.

    function writes its results into tensors that live longer than the graphs, reads no value back, and does the same
    whenever the key is the same. Weights may change in place, never their addresses.
    """

    def __init__(self, device):
        self.device, self.graphs, self.pool = device, {}, torch.cuda.graph_pool_handle()

    def run(self, key, function):
        if key in self.graphs:
            return self.graphs[key].replay()
        function()  # the first call counts as any other, and makes what libraries make once
        graph = torch.cuda.CUDAGraph()
        # thread_local: the watchdog of NCCL asks after its events meanwhile
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
        ):
            function()
        self.graphs[key] = graph
