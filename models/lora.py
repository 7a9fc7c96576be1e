"""LoRA through peft, in place: a frozen model with trainable adapters, saved in peft's format.

The model without its adapters is the reference policy.
"""

import math
from contextlib import contextmanager
from copy import copy
from pathlib import Path

import torch
from safetensors.torch import save_file

from distributed.disk import is_first_rank, read_json, whole_directory
from models.names import pinned
from models.tensors import (
    full_tensor,
    local_rows,
    open_tensors,
    tensor_parts,
)

# peft is imported where it is used: it takes a second, and full fine-tuning does not need it.


def add_lora(model, rank, alpha, targets=(), seed=0, dtype=torch.float32):
    """Freeze the model and put adapters of this rank on its linear layers, in place; no dropout. ->
    the model

    targets: last parts of module names; empty: every linear layer of a block.
    The scale is alpha / rank. A is drawn from a generator keyed by seed, the same on every rank; B
    is 0, so the model's outputs do not change yet. dtype: fp32 for training; an engine takes its
    own dtype. SystemExit names a target that matches nothing.
    """
    from peft import LoraConfig, inject_adapter_in_model

    last = lambda name: name.rsplit(".", 1)[-1]
    linear = {
        last(name)
        for name, module in model.layers.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    targets = list(targets) or sorted(linear)
    if unknown := sorted(set(targets) - linear):
        there = f"match no linear layer; there are {', '.join(sorted(linear))}"
        raise SystemExit(f"--lora-targets {', '.join(unknown)} {there}")
    model.requires_grad_(False)
    # No adapter on the head: LLaDA's bears the name of a block's layer.
    head = [name for name, module in model.named_modules() if module is model.lm_head]
    model.lora_config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=targets, exclude_modules=head
    )
    # peft's own draws would take 10 s for an 8B model
    inject_adapter_in_model(model.lora_config, model, low_cpu_mem_usage=True)
    device = next(model.parameters()).device
    for name, module in model.named_modules():
        if last(name) in ("lora_A", "lora_B"):
            module.to(dtype).to_empty(device=device)
    model.lora_seed = seed
    return model if device.type == "meta" else init_adapters(model)


@torch.no_grad()
def init_adapters(model):
    """A as peft draws it (Kaiming uniform, a = sqrt 5) but keyed by the seed of add_lora; B = 0.

    Every rank of a sharded model draws all of A and keeps its own rows. -> the model
    """
    generator = torch.Generator().manual_seed(model.lora_seed)
    for name, value in adapter_tensors(model).items():
        local, rows = local_rows(value)
        if ".lora_A." not in name:
            local.zero_()
            continue
        bound = 1 / math.sqrt(value.shape[1])
        draws = torch.rand(value.shape, generator=generator) * 2 * bound - bound
        local.copy_(draws[rows.start : rows.stop])
    return model


def adapter_tensors(model):
    """{name in the model: adapter parameter}, without gathering"""
    return {name: value for name, value in model.state_dict().items() if ".lora_" in name}


def export_adapter(model):
    """Yield (name, full tensor) of the adapters, for an engine with the same adapters.
    Collective.
    """
    for name, value in adapter_tensors(model).items():
        yield name, full_tensor(value)


@contextmanager
def adapters_off(model):
    """The frozen model under the adapters: the reference policy. Enter it on all ranks alike."""
    layers = [module for module in model.modules() if hasattr(module, "enable_adapters")]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield model
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def save_adapter(model, directory, base, tokenizer):
    """Write the adapters in peft's format, for PeftModel.from_pretrained and for --model.
    Collective.

    base: the run's --model, as a hub id or an absolute directory: base_model_name_or_path. The
    directory appears under its name only when complete, as with save_model.
    """
    config = copy(model.lora_config)
    config.base_model_name_or_path, config.revision = pinned(base)
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)
    with whole_directory(directory) as folder:
        tensors = {
            PREFIX + name.replace(".default.", "."): value.contiguous().cpu().clone()
            for name, value in export_adapter(model)
        }
        if is_first_rank():
            save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
            config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)


PREFIX = "base_model.model."  # of tensor names in peft's files
# What plain LoRA sets in adapter_config.json; anything else cannot be merged as B @ A.
PLAIN = dict(
    peft_type="LORA", bias="none", modules_to_save=None, rank_pattern={}, alpha_pattern={},
    lora_bias=False, use_dora=False, use_rslora=False,
)  # fmt: skip


@torch.no_grad()
def merge_adapter(model, directory):
    """Add the adapter of a peft directory to the weights, in fp32 before rounding. -> the model

    SystemExit if it does not fit (a tensor of another model or rank) or is no plain LoRA.
    """
    config = read_json(Path(directory) / "adapter_config.json")
    if other := {k: config[k] for k, v in PLAIN.items() if config.get(k) not in (v, None)}:
        only = "only plain LoRA adapters can be merged"
        raise SystemExit(f"{directory}: {only}; this one has {other}")
    with open_tensors(Path(directory) / "adapter_model.safetensors") as file:
        found = {name.removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}
    parts, layers = tensor_parts(model), {name.partition(".lora_")[0] for name in found}
    if not layers:
        raise SystemExit(f"{directory} holds no adapters")
    for layer in layers:
        value, index = parts.get(f"{layer}.weight", (None, None))
        a, b = (found.get(f"{layer}.lora_{part}.weight") for part in "AB")
        r, is_pair = config["r"], index == () and a is not None and b is not None
        if not is_pair or (a.shape, b.shape) != ((r, value.shape[1]), (value.shape[0], r)):
            raise SystemExit(f"{directory}, of rank {r}, does not fit its model at {layer}")
        weight, rows = local_rows(value)
        a, b = (part.to(weight.device, torch.float32) for part in (a, b[rows.start : rows.stop]))
        weight.copy_(weight.float() + config["lora_alpha"] / r * (b @ a))
    return model
