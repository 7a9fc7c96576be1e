"""Write a checkpoint with random weights: to train a tiny model from, or to measure without a
download.

python models/random_init.py --config tiny-llada --out runs/tiny-init    # byte tokenizer
python models/random_init.py --config DIR --tokenizer DIR --out runs/sdar  # size of DIR/config.json
"""

import sys

sys.path.insert(0, __file__.rpartition("/models/")[0])
import distributed.start  # noqa: F401

# isort: split
from distributed.groups import own_device
from models import load_tokenizer, save_model
from models.checkpoint import set_special_tokens
from models.config import stored_dtype
from models.names import checkpoint_config
from models.tiny import random_model


def main(out: str, config: str = "tiny-sdar", tokenizer: str = ""):
    """Write a checkpoint with random weights, drawn on a GPU if there is one.

    Args:
        out: directory to write
        config: a key of MODELS or a directory whose config.json to follow
        tokenizer: one whose tokenizer to copy; empty: that of config
    """
    content, directory, _ = checkpoint_config(config)
    tokenizer = load_tokenizer(tokenizer or config)  # first: weights of 8B take a minute
    model = random_model(content, 0, own_device(), stored_dtype(content))
    set_special_tokens(model, directory)
    save_model(model, out, tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {out}")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
