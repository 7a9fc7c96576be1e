"""Random checkpoints: the starting point of tiny models, and stand-ins of real sizes for benchmarks without a download.

python models/random_init.py --config tiny-llada --out runs/tiny-init              # a key of TINY_CONFIGS, byte tokenizer
python models/random_init.py --config small-sdar --tokenizer DIR --out runs/small  # 51 M parameters with SDAR's vocabulary
python models/random_init.py --config DIR --tokenizer DIR --out runs/sdar-random   # the size that DIR/config.json states
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import load_tokenizer, meta_model, save_model
from models.checkpoint import (
    build_model,
    local_rows,
    materialize,
    read_json,
    resolve,
    set_special_tokens,
)
from models.config import stored_dtype

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|MASK|>",
    "<|user|>",
    "<|assistant|>",
]  # ids 256..259, behind the 256 bytes
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TINY = {
    "vocab_size": 264,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "mask_token_id": 257,
    "eos_token_id": 256,
    "pad_token_id": 256,
    "torch_dtype": "float32",
}
TINY_SDAR = {"architectures": ["SDARForCausalLM"], "model_type": "sdar"} | TINY | {"block_size": 4}
TINY_LLADA = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "vocab_size": 264,
    "embedding_size": 264,
    "d_model": 96,
    "mlp_hidden_size": 256,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "activation_type": "silu",
    "block_type": "llama",
    "layer_norm_type": "rms",
    "rope": True,
    "rope_full_precision": True,
    "weight_tying": False,
    "max_sequence_length": 4096,
    "block_length": 4,
    "mask_token_id": 257,
    "eos_token_id": 256,
    "pad_token_id": 256,
    "torch_dtype": "float32",
}
TINY_DREAM = {"architectures": ["DreamModel"], "model_type": "Dream"} | TINY | {"block_length": 4}
del TINY_DREAM["head_dim"]  # Dream's is hidden_size / heads
SMALL_EXPERTS = {
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
TINY_SDAR_MOE = (
    TINY_SDAR
    | {"architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe"}
    | SMALL_EXPERTS
    | {"num_experts": 8}
)
TINY_LLADA2 = {
    **({"architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe"} | TINY | SMALL_EXPERTS),
    "num_experts": 16,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 16,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "use_qk_norm": True,
    "use_rmsnorm": True,
    "block_size": 4,
}
TINY_CONFIGS = {
    "tiny-sdar": TINY_SDAR,
    "tiny-llada": TINY_LLADA,
    "tiny-dream": TINY_DREAM,
    "tiny-sdar-moe": TINY_SDAR_MOE,
    "tiny-llada2": TINY_LLADA2,
}
# Models that learn some text in minutes on one GPU, with the 152 k tokens of a real vocabulary: most parameters are its rows.
SMALL_WIDTHS = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
}
SMALL_CONFIGS = {
    "small-sdar": TINY_SDAR
    | SMALL_WIDTHS
    | {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "small-llada": TINY_LLADA
    | {
        "d_model": 160,
        "mlp_hidden_size": 640,
        "n_layers": 12,
        "n_heads": 5,
        "n_kv_heads": 5,
        "block_length": 32,
    },
}


def byte_tokenizer():
    """One token a byte plus SPECIAL_TOKENS, as an ordinary fast tokenizer that AutoTokenizer loads."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # GPT-2's printable stand-ins for the 256 bytes, in byte order
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_in = {byte: chr(byte) for byte in printable}
    stand_in |= {
        byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in stand_in)
    }
    tokenizer = Tokenizer(
        models.BPE(vocab={stand_in[byte]: byte for byte in range(256)}, merges=[])
    )
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
    """Fill a materialised model: matrices N(0, 0.5 / fan_in), embedding and head N(0, 0.02^2), norms 1, biases 0. -> the model

    Values depend on the seed and the order of the tensors; a rank of a sharded model draws all and keeps its own rows.
    """
    generators = {}
    for name, value in model.state_dict().items():
        if ".lora_" in name:  # adapters do not change what is under them
            continue
        local, rows = local_rows(value)
        if value.dim() == 1:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        is_end = value.shape[0] == model.lm_head.weight.shape[0]  # embedding or head
        std = 0.02 if is_end else math.sqrt(0.5 / value.shape[-1])
        generator = generators.setdefault(
            value.device, torch.Generator(value.device).manual_seed(seed)
        )
        full = torch.empty(value.shape, dtype=value.dtype, device=value.device).normal_(
            0.0, std, generator=generator
        )
        local.copy_(full[rows.start : rows.stop])
    return model


def random_model(config, seed=0, device="cpu", dtype=torch.float32):
    """config: content of config.json -> model with `random_weights`"""
    return random_weights(materialize(build_model(config, dtype), device), seed)


def with_vocabulary(config, name_or_dir):
    """config.json of a tiny or small model with the vocabulary of another checkpoint: its rows, mask, end and padding ids."""
    model = meta_model(name_or_dir)
    sizes = {
        key: model.lm_head.out_features for key in ("vocab_size", "embedding_size") if key in config
    }
    ids = {
        "mask_token_id": model.mask_token_id,
        "eos_token_id": model.eos_token_ids,
        "pad_token_id": model.pad_token_id,
    }
    return config | sizes | ids


@dataclass
class Args:
    out: str
    """directory to write"""
    config: str = "tiny-sdar"
    """key of TINY_CONFIGS or SMALL_CONFIGS, or a directory with the config.json to follow"""
    tokenizer: str = ""
    """model directory whose tokenizer to copy; keys of --config take its vocabulary too; empty: the byte tokenizer for a key"""
    seed: int = 0
    """of the weights"""
    device: str = "cpu"
    """where they are drawn; cuda is quicker at real sizes"""


def main(args):
    named = TINY_CONFIGS | SMALL_CONFIGS
    if config := named.get(args.config):
        config = with_vocabulary(config, args.tokenizer) if args.tokenizer else config
        model = set_special_tokens(random_model(config, args.seed, args.device))
    else:
        directory = resolve(args.config)
        config = read_json(directory / "config.json")
        model = set_special_tokens(
            random_model(config, args.seed, args.device, stored_dtype(config)), directory
        )
    own = byte_tokenizer() if args.config in named else None
    save_model(model, args.out, load_tokenizer(args.tokenizer) if args.tokenizer else own)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {args.out}")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
