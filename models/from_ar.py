"""Make a diffusion model of an autoregressive one: Qwen2, Qwen2.5, Qwen3 or Llama.

python models/from_ar.py --model Qwen/Qwen2.5-Coder-0.5B-Instruct --out runs/qwen   # blocks of 4
python models/from_ar.py --model DIR --out runs/qwen --bidirectional --shift        # as Dream

Weights stay as they are, but for the embedding of the mask token, which starts at the mean. What
comes out writes no sense before it is trained: algos/sft.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, __file__.rpartition("/models/")[0])
import distributed.start  # noqa: F401

# isort: split
import torch

from distributed.disk import read_json, whole_directory
from models import load_tokenizer
from models.checkpoint import write_files
from models.config import AUTOREGRESSIVE, stored_dtype
from models.names import SMALL, resolve
from models.tensors import (
    build_model,
    fitting_weights,
    json_if_there,
    tensor_shapes,
)

MASKS = ("<|mask|>", "<|MASK|>")  # the first, dllm's, is added where there is none
# The first found closes an answer, the last one is padding.
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "</s>")


def add_mask_token(tokenizer):
    """-> its id; one that the tokenizer has already, or a new one"""
    there = [tokenizer.mask_token, *filter(tokenizer.get_added_vocab().get, MASKS), MASKS[0]]
    tokenizer.add_special_tokens({"mask_token": next(filter(None, there))})
    return tokenizer.mask_token_id


def end_ids(tokenizer, facts):
    """Every id that ends a completion: ENDS that the tokenizer has, and what the files state."""
    added = tokenizer.get_added_vocab()
    stated = facts.get("eos_token_id") or []
    found = [added[token] for token in ENDS if token in added]
    stated = stated if isinstance(stated, list) else [stated]
    return found[:-1] + [i for i in stated if i not in found] + found[-1:]


def converted(name, value, rows, mask):
    """value: tensor of the autoregressive model -> that of the new one, of `rows` tokens"""
    if name not in ("model.embed_tokens.weight", "lm_head.weight"):
        return value
    mean = value[:mask].float().mean(0).to(value.dtype)
    value = torch.cat([value, mean.expand(rows - len(value), -1)])
    if name != "lm_head.weight":
        value[mask] = mean
    return value


def main(
    model: str,
    out: str,
    block_length: int = 4,
    bidirectional: bool = False,
    shift: bool = False,
    tokenizer: str = "",
    chat_template: str = "",
):
    """Make a diffusion model of an autoregressive one.

    Args:
        model: hub id or directory of a qwen2, qwen3 or llama model
        out: directory to write
        block_length: tokens of a block; a token sees its own block and those before it; 0: none
        bidirectional: every token sees every other; there are no blocks
        shift: token i stays predicted at position i - 1, as in Dream; needs --bidirectional
        tokenizer: hub id or directory of another tokenizer with the same ids
        chat_template: file of another chat template
    """
    old = read_json(resolve(model, SMALL) / "config.json")
    if (kind := old.get("model_type")) not in AUTOREGRESSIVE:
        able = ", ".join(AUTOREGRESSIVE)
        raise SystemExit(f"{model} is of model_type {kind!r}; those converted are {able}")
    words = load_tokenizer(tokenizer or model)
    if chat_template:
        if not (file := Path(chat_template)).is_file():
            raise SystemExit(f"--chat-template {file}: no such file")
        words.chat_template = file.read_text(encoding="utf-8")
    if not words.chat_template:
        raise SystemExit(f"{model} has no chat template: give one with --chat-template FILE")
    mask = add_mask_token(words)
    old.pop("auto_map", None)
    config = old | {
        "model_type": f"a2d-{kind}",
        "architectures": [f"A2D{kind.capitalize()}LMHeadModel"],
        "mask_token_id": mask,
        "block_size": 0 if bidirectional else block_length,
        "shift": shift,
    }
    net, dtype = build_model(config), stored_dtype(old)  # refused before weights are downloaded
    directory, rows = resolve(model), net.config.vocab_size
    files = fitting_weights(net, directory)
    if mask >= rows:  # a multiple of 64 keeps the head's products fast
        rows = -(-(mask + 1) // 64) * 64
    shapes = tensor_shapes(build_model(config := config | {"vocab_size": rows}))
    ends = end_ids(words, old | json_if_there(directory / "generation_config.json"))
    with whole_directory(out) as folder:
        tensors = (
            (name, converted(name, files[name].get_tensor(name), rows, mask).to(dtype))
            for name in shapes
        )
        write_files(folder, config, tensors, shapes, ends, ends[-1], words)
    print(f"{out}: a2d-{kind}, mask token {words.mask_token} {mask}, ends {ends}; now train it:")
    print(f"torchrun algos/sft.py --model {out} --data ROWS --eval-limit 0 --lora-rank 0")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
