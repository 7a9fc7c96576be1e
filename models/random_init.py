"""Random checkpoints: the starting point of tiny models, and stand-ins of real sizes for benchmarks without a download.

python models/random_init.py --out runs/tiny-init                                  # tiny SDAR with the byte tokenizer
python models/random_init.py --config DIR --tokenizer DIR --out runs/sdar-random   # the size that DIR/config.json states
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import load_tokenizer, save_model
from models.checkpoint import build_model, materialize, resolve, set_special_tokens

SPECIAL_TOKENS = ["<|endoftext|>", "<|MASK|>", "<|user|>", "<|assistant|>"]  # ids 256..259, behind the 256 bytes
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TINY_SDAR = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
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
    "block_size": 4,
    "mask_token_id": 257,
    "eos_token_id": 256,
    "pad_token_id": 256,
    "torch_dtype": "float32",
}


def byte_tokenizer():
    """One token a byte plus SPECIAL_TOKENS, as an ordinary fast tokenizer that AutoTokenizer loads."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # GPT-2's printable stand-ins for the 256 bytes, in byte order
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_in = {byte: chr(byte) for byte in printable}
    stand_in |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in stand_in)}
    tokenizer = Tokenizer(models.BPE(vocab={stand_in[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    end, mask = SPECIAL_TOKENS[:2]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end, mask_token=mask)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@torch.no_grad()
def random_model(config, seed=0, device="cpu", dtype=torch.float32):
    """config: content of config.json -> model with matrices N(0, 0.5 / fan_in), embedding and head N(0, 0.02^2), norms 1."""
    model = materialize(build_model(config, dtype), device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, value in model.state_dict().items():
        if value.dim() == 1:
            value.fill_(1.0)
        else:
            std = 0.02 if "embed" in name or "lm_head" in name else math.sqrt(0.5 / value.shape[1])
            value.normal_(0.0, std, generator=generator)
    return model


@dataclass
class Args:
    out: str
    """directory to write"""
    config: str = ""
    """directory with the config.json to follow; empty: the tiny SDAR"""
    tokenizer: str = ""
    """directory with the tokenizer to copy; empty: the byte tokenizer"""
    seed: int = 0
    """of the weights"""
    device: str = "cpu"
    """where they are drawn; cuda is quicker at real sizes"""


def main(args):
    directory = resolve(args.config) if args.config else None
    config = json.loads((directory / "config.json").read_text()) if directory else TINY_SDAR
    model = random_model(config, args.seed, args.device)
    if directory:
        set_special_tokens(model, directory)
    else:
        model.eos_token_ids, model.pad_token_id = [config["eos_token_id"]], config["pad_token_id"]
    save_model(model, args.out, load_tokenizer(args.tokenizer) if args.tokenizer else byte_tokenizer())


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
