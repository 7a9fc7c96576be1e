"""Random weights, the byte tokenizer, and the configurations of the tiny models."""

import math

import torch

from models.tensors import build_model, local_rows, materialize

# ids 256 to 259, after the 256 bytes
SPECIAL_TOKENS = ["<|endoftext|>", "<|MASK|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SHARED = dict(
    vocab_size=264, mask_token_id=257, eos_token_id=256, pad_token_id=256, torch_dtype="float32"
)
TINY = SHARED | dict(
    hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, hidden_act="silu", rms_norm_eps=1e-06, rope_theta=10000,
    tie_word_embeddings=False, max_position_embeddings=4096,
)  # fmt: skip
TINY_SDAR = dict(architectures=["SDARForCausalLM"], model_type="sdar", block_size=4) | TINY
TINY_LLADA = SHARED | dict(
    architectures=["LLaDAModelLM"], model_type="llada", embedding_size=264, d_model=96,
    mlp_hidden_size=256, n_layers=4, n_heads=4, n_kv_heads=4, rms_norm_eps=1e-5, rope_theta=10000.0,
    activation_type="silu", block_type="llama", layer_norm_type="rms", rope=True,
    rope_full_precision=True, weight_tying=False, max_sequence_length=4096, block_length=4,
)  # fmt: skip
TINY_DREAM = dict(architectures=["DreamModel"], model_type="Dream", block_length=4) | TINY
del TINY_DREAM["head_dim"]  # Dream's is hidden_size / heads
MIXTURE = dict(
    num_hidden_layers=2, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
)
TINY_SDAR_MOE = TINY_SDAR | MIXTURE | {"num_experts": 8, "model_type": "sdar_moe"}
TINY_SDAR_MOE["architectures"] = ["SDARMoeForCausalLM"]
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
    "tiny-sdar-moe": TINY_SDAR_MOE,
    "tiny-llada2": TINY_LLADA2,
}


def byte_tokenizer():
    """One token a byte plus SPECIAL_TOKENS: an ordinary fast tokenizer that AutoTokenizer loads."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {
        char: byte for byte, char in bytes_to_unicode().items()
    }  # GPT-2's printable characters
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    end, mask = SPECIAL_TOKENS[:2]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end, mask_token=mask
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@torch.no_grad()
def random_weights(model, seed=0):
    """Fill a materialised model: matrices N(0, 0.5 / fan_in), embedding and head N(0, 0.02^2), norms 1, biases 0.

    Values depend on the seed and the order of the tensors; a rank of a sharded model draws all and
    keeps its own rows. -> the model
    """
    generators = {}
    for name, value in model.state_dict().items():
        if ".lora_" in name:  # adapters do not change the weights under them
            continue
        local, rows = local_rows(value)
        if value.dim() == 1:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        is_end = value.shape[0] == model.lm_head.weight.shape[0]  # embedding or head
        std = 0.02 if is_end else math.sqrt(0.5 / value.shape[-1])
        fresh = torch.Generator(value.device).manual_seed(seed)
        generator = generators.setdefault(value.device, fresh)
        full = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        full.normal_(0.0, std, generator=generator)
        local.copy_(full[rows.start : rows.stop])
    return model


def random_model(config, seed=0, device="cpu", dtype=torch.float32):
    """config: content of config.json -> model with `random_weights`"""
    return random_weights(materialize(build_model(config, dtype), device), seed)
