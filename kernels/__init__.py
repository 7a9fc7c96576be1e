"""Faster samplers: fused layers, continuous batching, CUDA graphs. Nothing else needs this folder.

`make_engine` is the only place that installs it, on the engine's own model. Model files,
plain samplers and training never import it.
"""

from importlib.util import find_spec

import torch


def has_triton():
    return find_spec("triton") is not None


def has_kernels(tensor):
    """Whether the kernels of this folder can compute on a tensor: on CUDA, in bf16 or fp16."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and has_triton()


def speed_up_engine(engine):
    """Replace the forward of an engine's own model by fused layers and its draws by kernels, in
    place.

    Adapters may be added before or after, and weights copied in place. A model in fp32 stays as it
    is; so does every model, with one printed line, where Triton is missing.
    """
    if has_kernels(engine.model.lm_head.weight):
        from kernels.layers import install  # machines without a GPU have no Triton
        from kernels.sampling_triton import sample_fused

        install(engine.model)
        engine.sample_categorical = sample_fused
    elif not has_triton():
        print("no Triton: the sampler runs without fused layers", flush=True)
