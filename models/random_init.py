"""Write a checkpoint with random weights: to train a tiny model from, or to measure without a
download.

python models/random_init.py --config tiny-llada --out runs/tiny-init    # byte tokenizer
python models/random_init.py --config small-sdar --tokenizer DIR --out runs/small  # 51 M parameters
python models/random_init.py --config DIR --tokenizer DIR --out runs/sdar  # size of DIR/config.json
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import load_tokenizer, meta_model, save_model
from models.checkpoint import set_special_tokens
from models.config import stored_dtype
from models.names import resolve
from models.tensors import read_json
from models.tiny import TINY_CONFIGS, TINY_SDAR, byte_tokenizer, random_model

# These learn some text in minutes on one GPU. With the 152 k tokens of a real vocabulary most of
# their parameters are embedding and head.
SMALL_CONFIGS = {
    "small-sdar": TINY_SDAR
    | dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=12)
    | dict(num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True),
}


def with_vocabulary(config, name_or_dir):
    """A tiny or small config.json with another checkpoint's vocabulary: rows, mask, end and padding
    ids.
    """
    model = meta_model(name_or_dir)
    sizes = [key for key in ("vocab_size", "embedding_size") if key in config]
    return (
        config
        | dict.fromkeys(sizes, model.lm_head.out_features)
        | {
            "mask_token_id": model.mask_token_id,
            "eos_token_id": model.eos_token_ids,
            "pad_token_id": model.pad_token_id,
        }
    )


@dataclass
class Args:
    out: str
    """directory to write"""
    config: str = "tiny-sdar"
    """key of TINY_CONFIGS or SMALL_CONFIGS, or a directory whose config.json to follow"""
    tokenizer: str = ""
    """model directory whose tokenizer to copy, and for keys of --config its vocabulary; empty:
    bytes, or none if --config is a directory
    """
    seed: int = 0
    """of the weights"""
    device: str = "cpu"
    """where they are drawn; cuda is quicker at real sizes"""


def main(args):
    config, directory = (TINY_CONFIGS | SMALL_CONFIGS).get(args.config), None
    tokenizer = byte_tokenizer() if config else None
    if config and args.tokenizer:
        config = with_vocabulary(config, args.tokenizer)
    elif not config:
        directory = resolve(args.config)
        config = read_json(directory / "config.json")
    model = random_model(config, args.seed, args.device, stored_dtype(config))
    set_special_tokens(model, directory)
    save_model(model, args.out, load_tokenizer(args.tokenizer) if args.tokenizer else tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {args.out}")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
