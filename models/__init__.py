"""Model families of diffusion language models, one file each; models/names.py lists the
checkpoints.
"""
# ruff: noqa: F401

from models.checkpoint import (
    export_weights,
    load_model,
    load_tokenizer,
    load_weights,
    meta_model,
    prompt_ids,
    save_model,
)
from models.experts import router_metrics
from models.layers import set_speed
from models.lora import adapters_off, add_lora, export_adapter, save_adapter
from models.names import MODELS, is_tiny, sampling_facts, source_of, whole_name
