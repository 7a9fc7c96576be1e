"""What only makes training and sampling faster."""

from importlib.util import find_spec

import torch


def has_kernels(x):
    """Whether Triton kernels can compute on tensors like x."""
    return (
        x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and find_spec("triton") is not None
    )


def speed_up_engine(model):
    return model
