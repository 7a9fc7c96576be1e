"""What only makes samplers and training faster, on CUDA with Triton. The rest of the repository
runs without this folder.

Two places install it: `make_engine` on the engine's own copy of a model, and `parallelize` in the
scripts. Model files and plain samplers know nothing of it.
"""

from importlib.util import find_spec

import torch


def has_triton():
    return find_spec("triton") is not None


def has_kernels(tensor):
    """Whether the kernels of this folder can compute on a tensor: on CUDA, in bf16 or fp16."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and has_triton()


def speed_up_engine(model):
    """Replace the forward of a sampler's own copy of a model by fused layers, in place. -> the
    model

    Adapters may be added before or after, and weights copied in place. A model on the CPU, or in
    fp32, stays as it is; so does every model, with one printed line, where Triton is missing.
    """
    if model.lm_head.weight.is_cuda and not has_triton():
        print("no Triton: the sampler runs without fused layers", flush=True)
    elif has_kernels(model.lm_head.weight):
        from kernels.layers import install  # machines without a GPU have no Triton

        install(model)
    return model


def speed_up_training(model):
    """Let `model.logps` compute softmax and slope of the head in one Triton kernel. -> the model

    It reads a chunk of logits twice and writes it once. A LoRA step of LLaDA-8B (16 x 512 tokens,
    one H200) took 483 ms instead of 494 with it and with the gradient kept from the forward pass.
    """
    if not has_triton():
        print("no Triton: the head's softmax takes several kernels", flush=True)
        return model
    from kernels.linear_logps_triton import logps_and_slope_

    model.logps_and_slope = logps_and_slope_
    return model
