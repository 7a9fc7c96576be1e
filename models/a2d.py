"""Autoregressive decoders made diffusion models: Qwen2, Qwen2.5, Qwen3, Llama (ZHZisZZ/dllm's a2d).

The layers, and the names of their tensors, are those of the autoregressive model. What differs is
who sees whom: without blocks every token sees every other (dllm's mdlm), with `block_size` n a
token sees its own block and those before it (bd3lm). Token i is predicted at position i, or with
`shift`, as before the conversion, at position i - 1. dllm states neither of these nor the id of the
mask token in config.json; its code ignores our keys. models/from_ar.py converts. The forward
`hidden`, `grid`, `logits` and `logps` are in models/language_model.py.
"""

import math
from dataclasses import dataclass

from models.config import DecoderKeys, Objective
from models.language_model import Bidirectional, BlockCausal
from models.layers import MLP, Attention, Block


@dataclass(frozen=True)
class Config(DecoderKeys):
    """The keys of config.json that this architecture reads, besides those of every decoder."""

    model_type: str  # a2d-qwen2: q, k, v have biases; a2d-qwen3: heads have norms; a2d-llama
    intermediate_size: int
    mask_token_id: int
    block_size: int = 0  # 0: bidirectional; `architecture` sees to it that config.json states it
    shift: bool = False
    block_length: int = 32  # of semi-autoregressive decoding without blocks of its own
    head_dim: int = 0
    attention_bias: bool = False  # of all four projections
    tie_word_embeddings: bool = False
    rope_llama3: dict | None = None  # the rope_scaling of that rope_type

    no_effect = "is_llama_config pretraining_tp transformers.js_config"

    def __post_init__(self):
        if self.shift and self.block_size:
            raise SystemExit("config.json has shift = true, which needs block_size = 0")
        super().__post_init__()


class A2D:
    """What both models below have in common. Callers use `hidden`, `logits` and `logps`."""

    def __init__(self, config):
        super().__init__(config)
        self.shift = config.shift
        self.turn_end = "<|eot_id|>" if config.model_type == "a2d-llama" else "<|im_end|>"

    def block(self, layer):
        config, kind = self.config, self.config.model_type
        bias, mlp = config.attention_bias, MLP(config.hidden_size, config.intermediate_size)
        in_bias, norm = bias or kind == "a2d-qwen2", kind == "a2d-qwen3"
        return Block(config, Attention(config, layer, in_bias, norm, bias), mlp)

    def frequency(self, exponent):
        """Llama 3 slows down dimensions that turn seldom within the context of its first
        training.
        """
        frequency, rope = super().frequency(exponent), self.config.rope_llama3
        if not rope:
            return frequency
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / rope["factor"])


class A2DMasked(A2D, Bidirectional):
    # dllm, core/trainers/mdlm.py
    objective = Objective()


class A2DBlock(A2D, BlockCausal):
    # dllm, core/trainers/bd3lm.py
    objective = Objective(t_min=0, weight="1/n")
