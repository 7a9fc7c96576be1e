"""Model families of diffusion language models, one file each, and the table of names that --model takes."""

from pathlib import Path

from models.checkpoint import export_weights, load_model, load_tokenizer, prompt_ids, save_model, source_of
from models.lora import adapters_off, add_lora, export_adapter, save_adapter

# --model NAME -> hub id, or directory in the repository
MODELS = {
    "tiny-sdar": str(Path(__file__).parent / "tiny-sdar"),
    "sdar-1.7b": "JetLM/SDAR-1.7B-Chat",
    "sdar-4b": "JetLM/SDAR-4B-Chat",
    "sdar-8b": "JetLM/SDAR-8B-Chat",
}

__all__ = [
    "MODELS",
    "adapters_off",
    "add_lora",
    "export_adapter",
    "export_weights",
    "load_model",
    "load_tokenizer",
    "prompt_ids",
    "save_adapter",
    "save_model",
    "source_of",
]
