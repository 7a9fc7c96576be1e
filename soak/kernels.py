"""Every Triton kernel, compiled as its launches ask, for five generations of GPUs; none is needed.

    python soak/kernels.py [WORD ...]    all GPUs, or those whose name has one of the words

It needs Triton, which torch for CUDA brings. The layers of fast samplers run at the sizes of the
released models on tensors without contents. Each kernel must pass the assembler and fit the shared
memory that a program may have.
"""

import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import table

from models.tensors import build_model
from models.tiny import TINY_CONFIGS

GPUS = {  # name: compute capability, bytes of shared memory that a program may have
    "A100, sm_80": ((8, 0), 163 << 10),
    "RTX 4090, sm_89": ((8, 9), 99 << 10),
    "H100, sm_90": ((9, 0), 227 << 10),
    "B200, sm_100": ((10, 0), 227 << 10),
    "RTX 5090, sm_120": ((12, 0), 99 << 10),
}
SIZES = {  # config.json of released models, as far as kernels depend on it
    "tiny-sdar": dict(
        hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=12288,
    ),
    "tiny-llada": dict(d_model=4096, n_heads=32, n_kv_heads=32, mlp_hidden_size=12288),
    "tiny-dream": dict(
        hidden_size=3584, num_attention_heads=28, num_key_value_heads=4, intermediate_size=18944
    ),
    "tiny-llada-moe": dict(
        hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, num_experts=64,
        num_experts_per_tok=8, expert_intermediate_size=1024,
    ),
    "tiny-sdar-moe": dict(
        hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "tiny-llada2": dict(
        hidden_size=2048, num_attention_heads=16, num_key_value_heads=4, head_dim=128,
        rotary_dim=64, intermediate_size=5120, num_experts=256, num_experts_per_tok=8, n_group=8,
        topk_group=4, moe_intermediate_size=512,
    ),
}  # fmt: skip
VOCABULARY, WIDTH = 152064, 512  # WIDTH: positions of the cache
ROWS = 1, 16, 128, 1024


def new(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def sample(name):
    """What a fast sampler does: layers, experts, attention to the cache, draws."""
    from kernels.decode import cached_attention
    from kernels.layers import install
    from kernels.sampling_triton import sample_fused, uniform_fused

    config = TINY_CONFIGS[name] | SIZES[name] | dict(num_hidden_layers=2, n_layers=2)
    model = build_model({key: config[key] for key in TINY_CONFIGS[name]}, torch.bfloat16)
    install(model)
    n, K, h = model.block_length, model.config.num_key_value_heads, model.config.head_dim
    ways = [(32, None, False), (64, None, True)]  # a window of a canvas; with padding
    if "block_size" in config:
        ways = [(n, n, False), (2 * n, n, False)]  # a block; with the one before
    for R in ROWS:
        keys, values, start = new(R, K, WIDTH, h), new(R, K, WIDTH, h), new(R, dtype=torch.long)
        for T, block_length, is_padded in ways:
            attend = partial(
                cached_attention, keys=keys, values=values, start=start, block_length=block_length,
                bias=new(R, 1, 1, WIDTH) if is_padded else None,
            )  # fmt: skip
            ids = new(R, T, dtype=torch.long)
            model.hidden(ids, ids, lambda layer, q, k, v, attend=attend: attend(q, k, v))
    for temperature in (0, 1):
        sample_fused(new(16, VOCABULARY), new(16, dtype=torch.double), temperature, True)
    uniform_fused(1, new(16, dtype=torch.long))


class Driver:
    """What Triton asks of a GPU before it compiles for it."""

    def __init__(self, capability):
        from triton.backends.compiler import GPUTarget

        self.number = 10 * capability[0] + capability[1]
        self.target = GPUTarget("cuda", self.number, 32)

    def get_current_device(self):
        return self.number

    def get_current_target(self):
        return self.target

    def get_current_stream(self, device):
        return 0


def compiles(folder, capability, limit):
    import triton
    from triton.runtime.jit import JITFunction

    launch, seen = JITFunction.run, {}

    def compile_only(kernel, *args, warmup, **options):
        made = launch(kernel, *args, warmup=True, **options)
        seen[made.hash] = made.metadata

    triton.runtime.driver.set_active(Driver(capability))
    facts = SimpleNamespace(shared_memory_per_block_optin=limit)
    with (
        patch.object(JITFunction, "run", compile_only),
        patch.object(torch.Tensor, "is_cuda", True),
        patch("torch.cuda.get_device_capability", lambda device: capability),
        patch("torch.cuda.get_device_properties", lambda device: facts),
        patch.dict(os.environ, TRITON_CACHE_DIR=str(folder)),
    ):
        for name in SIZES:
            sample(name)
            for number in [*seen]:
                kernel = seen[number]
                said = f"{kernel.name} takes {kernel.shared} bytes of shared memory"
                assert kernel.shared <= limit, f"{name}: {said}, a program has {limit}"
    yield from seen


if __name__ == "__main__":
    if not find_spec("triton"):
        sys.exit("soak/kernels.py needs Triton: pip install triton")
    sys.exit(table.run([(name, compiles, *facts) for name, facts in GPUS.items()]))
