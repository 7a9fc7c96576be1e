"""Random weights, the byte tokenizer, and the configurations of the tiny models."""

import json
import math
from pathlib import Path

import torch

from models.tensors import build_model, local_rows, materialize

TINY_SDAR, TINY_LLADA = (
    json.loads((Path(__file__).parent / name / "config.json").read_text())
    for name in ("tiny-sdar", "tiny-llada")
)
TINY = {key: value for key, value in TINY_SDAR.items() if key != "block_size"}
TINY_DREAM = TINY | dict(architectures=["DreamModel"], model_type="Dream", block_length=4)
del TINY_DREAM["head_dim"]  # Dream's is hidden_size / heads
MIXTURE = dict(
    num_hidden_layers=2, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
)
TINY_LLADA_MOE = TINY_DREAM | dict(
    architectures=["LLaDAMoEModelLM"], model_type="llada", num_hidden_layers=2, num_experts=8,
    num_experts_per_tok=2, expert_intermediate_size=64, moe_layer_freq=[1, 1], qk_layernorm=True,
    partial_rotary_factor=1,
)  # fmt: skip
del TINY_LLADA_MOE["intermediate_size"]
TINY_SDAR_MOE = TINY_SDAR | MIXTURE | dict(
    architectures=["SDARMoeForCausalLM"], model_type="sdar_moe", num_experts=8
)  # fmt: skip
TINY_LLADA2 = TINY | MIXTURE | dict(
    architectures=["LLaDA2MoeModelLM"], model_type="llada2_moe", num_experts=16,
    num_shared_experts=1, n_group=4, topk_group=2, first_k_dense_replace=1,
    partial_rotary_factor=0.5, rotary_dim=16, routed_scaling_factor=2.5, score_function="sigmoid",
    router_dtype="fp32", moe_router_enable_expert_bias=True, use_qk_norm=True, use_rmsnorm=True,
    block_size=4,
)  # fmt: skip
TINY_CONFIGS = {
    "tiny-sdar": TINY_SDAR,
    "tiny-llada": TINY_LLADA,
    "tiny-dream": TINY_DREAM,
    "tiny-llada-moe": TINY_LLADA_MOE,
    "tiny-sdar-moe": TINY_SDAR_MOE,
    "tiny-llada2": TINY_LLADA2,
}


def byte_tokenizer():
    """One token a byte, then <|endoftext|>, <|MASK|>, <|user|> and <|assistant|>: ids 256 to 259"""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(Path(__file__).parent / "tiny-sdar")


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
