"""What a training run takes from its model where no flag says otherwise: the model's sampling
lengths, and batches that fit one GPU of 80 GB with LoRA. The tiny models' lengths are the defaults
of the scripts' own fields. Lengths of evaluations stand in evals/decoding.py.
"""

from models.checkpoint import meta_model
from models.config import architecture
from models.names import checkpoint_config

# 256 tokens, two of a block in each step (d1's train.yaml), Fast-dLLM's cache
MASKED = {"gen_length": 256, "block_length": 32, "denoising_steps": 16, "cache": "dual"}
# 256 tokens, one of a block in each step (DARE's training of SDAR)
SDAR = {"gen_length": 256, "denoising_steps": 4}
# all tokens above 0.95, at least one of a block in each step (model card)
LLADA2 = {"gen_length": 256, "denoising_steps": 32}
LLADA2 |= {"remasking": "low_confidence_dynamic", "confidence_threshold": 0.95}
# model_type of config.json -> fields
SAMPLING = {"llada": MASKED, "lladamoe": MASKED, "Dream": MASKED}
SAMPLING |= {"sdar": SDAR, "sdar_moe": SDAR, "llada2_moe": LLADA2}
REAL = {
    "task": "gsm8k",
    "lora_rank": 128,
    "prompts_per_step": 8,
    "batch_size": 16,
    "eval_limit": 128,
    "eval_every": 50,
}
# problems with worked answers, instead of the tiny models' bare expressions and boards
DATA = {"countdown": "cd3", "sudoku": "sudoku4-tags"}
# what every method takes on the tiny models, unless its BY_SIZE differs (bench/curves.py)
TINY = {
    "betas": (0.9, 0.99),
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "warmup_steps": 5,
    "prompts_per_step": 16,
    "num_generations": 8,
    "temperature": 1.0,
}
TINY_WIDTH = 1024  # hidden size of a real model, at least


def is_tiny(model):
    return meta_model(model).lm_head.in_features < TINY_WIDTH


def training(model, task, lora_rank, by_size):
    """-> {field: value} of a run of `model` (as --model), on `task`, with that LoRA rank (0: all
    weights).

    by_size: what a method sets by itself: {"tiny" | "lora" | "full" | "bidirectional": {field:
    value}}; the last, if present, applies to real models of that attention.
    """
    if is_tiny(model):
        return TINY | by_size["tiny"]
    data = {"data": DATA[task]} if task in DATA else {}
    sampling = SAMPLING[architecture(checkpoint_config(model)[0])]
    own = by_size["lora" if lora_rank else "full"]
    if sampling is MASKED:
        own = own | by_size.get("bidirectional", {})
    return REAL | sampling | data | own
