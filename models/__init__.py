"""Model families of diffusion language models, one file each, and the table of names that --model takes."""

from pathlib import Path

from models.checkpoint import (
    export_weights,
    load_model,
    load_tokenizer,
    load_weights,
    meta_model,
    prompt_ids,
    save_model,
    source_of,
)
from models.lora import adapters_off, add_lora, export_adapter, save_adapter

# --model NAME -> hub id, directory in the repository, or a key of TINY_CONFIGS with random weights, built in the process
MODELS = {
    "tiny-sdar": str(Path(__file__).parent / "tiny-sdar"),
    "tiny-llada": str(Path(__file__).parent / "tiny-llada"),
    "tiny-dream": "random:tiny-dream",
    "tiny-sdar-moe": "random:tiny-sdar-moe",
    "tiny-llada2": "random:tiny-llada2",
    "llada-8b": "GSAI-ML/LLaDA-8B-Instruct",
    "llada-8b-base": "GSAI-ML/LLaDA-8B-Base",
    "llada-1.5": "GSAI-ML/LLaDA-1.5",
    "dream-7b": "Dream-org/Dream-v0-Instruct-7B",
    "dream-7b-base": "Dream-org/Dream-v0-Base-7B",
    "sdar-1.7b": "JetLM/SDAR-1.7B-Chat",
    "sdar-4b": "JetLM/SDAR-4B-Chat",
    "sdar-8b": "JetLM/SDAR-8B-Chat",
    "sdar-30b-a3b": "JetLM/SDAR-30B-A3B-Chat",
    "llada2-mini": "inclusionAI/LLaDA2.0-mini",
    "llada2.1-mini": "inclusionAI/LLaDA2.1-mini",
}

__all__ = [
    "MODELS",
    "adapters_off",
    "add_lora",
    "export_adapter",
    "export_weights",
    "load_model",
    "load_tokenizer",
    "load_weights",
    "meta_model",
    "prompt_ids",
    "save_adapter",
    "save_model",
    "source_of",
]
