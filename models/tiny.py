"""Random weights, the byte tokenizer, and the configurations of the tiny models."""

import json
import math
from pathlib import Path

import torch

from models.tensors import build_model, local_rows, materialize

HERE = Path(__file__).resolve().parent
# tiny-sdar and tiny-llada are trained; the others have no weights, these are drawn
TINY_CONFIGS = {
    file.parent.name: json.loads(file.read_text())
    for file in sorted(HERE.glob("tiny-*/config.json"))
}


def byte_tokenizer():
    """One token a byte, then <|endoftext|>, <|MASK|>, <|user|> and <|assistant|>: ids 256 to 259"""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(HERE / "tiny-sdar")


@torch.no_grad()
def random_weights(model, seed=0):
    """Fill a materialised model: matrices N(0, 0.5 / fan_in), embedding and head N(0, 0.02^2),
    norms 1, biases 0.

    Values depend on the seed and the order of the tensors; a rank of a sharded model draws all and
    keeps its own rows. -> the model
    """
    generator = torch.Generator(model.lm_head.weight.device).manual_seed(seed)
    for name, value in model.state_dict().items():
        if ".lora_" in name:  # adapters do not change the weights under them
            continue
        local, rows = local_rows(value)
        if value.dim() == 1:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        is_end = value.shape[0] == model.lm_head.weight.shape[0]  # embedding or head
        std = 0.02 if is_end else math.sqrt(0.5 / value.shape[-1])
        full = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        full.normal_(0.0, std, generator=generator)
        local.copy_(full[rows.start : rows.stop])
    return model


def random_model(config, seed=0, device="cpu", dtype=torch.float32):
    """config: content of config.json -> model with `random_weights`"""
    return random_weights(materialize(build_model(config, dtype), device), seed)
