"""LoRA through peft, in place: a frozen model with trainable adapters, its files in peft's format, its reference policy."""

import json
import math
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from models.atomic import AtomicDirectory

# peft is imported where it is used: it costs a second at start-up, and full fine-tuning does not need it.


def add_lora(model, rank, alpha, targets=(), seed=0, dtype=torch.float32):
    """Freeze the model and put adapters of this rank on its linear layers, in place; no dropout. -> the model

    targets: last parts of module names; empty: model.lora_targets, every linear layer of a block. The scale is alpha / rank.
    A is drawn from a generator keyed by seed, the same on every rank, B is 0: the model's outputs do not change yet.
    dtype: fp32 for training; an engine holds its copy in its own dtype. SystemExit names a target that matches nothing.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = list(targets) or list(model.lora_targets)
    modules = [
        (name, module) for layer in model.layers for name, module in layer.named_modules()
    ]  # no adapter on the head
    linear = {
        name.rsplit(".", 1)[-1] for name, module in modules if isinstance(module, torch.nn.Linear)
    }
    if unknown := sorted(set(targets) - linear):
        raise SystemExit(
            f"--lora-targets {', '.join(unknown)} match no linear layer; there are {', '.join(sorted(linear))}"
        )
    model.requires_grad_(False)
    inside = {id(module) for _, module in modules}
    outside = [name for name, module in model.named_modules() if id(module) not in inside]
    head = [
        name for name in outside if name.rsplit(".", 1)[-1] in targets
    ]  # LLaDA's head bears the name of a block's layer
    model.lora_config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=targets,
        exclude_modules=head or None,
        lora_dropout=0.0,
    )
    is_meta = next(model.parameters()).is_meta
    with torch.random.fork_rng(devices=[]):  # peft draws too, from the global generator
        inject_adapter_in_model(model.lora_config, model, low_cpu_mem_usage=is_meta)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    model.lora_seed = seed
    return model if is_meta else init_adapters(model)


@torch.no_grad()
def init_adapters(model):
    """A ~ peft's initialisation (Kaiming uniform, a = sqrt 5), keyed by the seed of add_lora; B = 0. Sharded models too."""
    from models.checkpoint import local_rows

    generator = torch.Generator().manual_seed(model.lora_seed)
    for name, value in adapter_tensors(model).items():
        local, rows = local_rows(value)
        if ".lora_A." not in name:
            local.zero_()
            continue
        bound = 1 / math.sqrt(value.shape[1])
        draws = (
            torch.rand(value.shape, generator=generator) * 2 * bound - bound
        )  # the whole of it on every rank
        local.copy_(draws[rows.start : rows.stop])
    return model


def has_lora(model):
    return getattr(model, "lora_config", None) is not None


def lora_scaling(config):
    """config: LoraConfig, or the content of adapter_config.json. -> what B @ A is multiplied with"""
    config = config if isinstance(config, dict) else config.to_dict()
    return config["lora_alpha"] / (
        math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
    )


def adapter_tensors(model):
    """{name in the model: adapter parameter}, without gathering."""
    return {name: value for name, value in model.state_dict().items() if ".lora_" in name}


def export_adapter(model, dtype=None):
    """Yield (name, full tensor) of the adapters, for an engine with the same adapters. Collective over all ranks."""
    for name, value in adapter_tensors(model).items():
        value = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        yield name, value.to(dtype or value.dtype)


@contextmanager
def adapters_off(model):
    """The frozen model under the adapters: the reference policy. Between steps, on all ranks at the same place."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield model
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def save_adapter(model, directory, base, tokenizer):
    """Write the adapters in peft's format: PeftModel.from_pretrained reads the directory, and so does --model. Collective.

    base: what --model was, kept as base_model_name_or_path (a hub id or an absolute directory). Appears under its name only
    when complete, as save_model does.
    """
    save, tensors = AtomicDirectory(directory), {}
    for name, tensor in export_adapter(model):
        if save.is_active:
            tensors["base_model.model." + name.replace(".default.", ".")] = (
                tensor.contiguous().cpu().clone()
            )
    config = model.lora_config.to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
    plain = {
        key: sorted(value) if isinstance(value, set) else value for key, value in config.items()
    }
    text = json.dumps(plain, indent=2, default=str) + "\n"
    save.attempt(save_file, tensors, save.folder / "adapter_model.safetensors", {"format": "pt"})
    save.attempt((save.folder / "adapter_config.json").write_text, text)
    save.attempt(tokenizer.save_pretrained, save.folder)
    save.finish()


def merge_adapter(model, directory):
    """Add the adapter of a peft directory to the model's weights, in fp32 before rounding to their dtype. -> the model

    SystemExit if the adapter does not fit: tensors of another model or rank (listed), or an adapter that is no plain LoRA.
    """
    from models.checkpoint import local_rows, open_tensors, read_json, tensor_parts, tensor_shapes

    directory = Path(directory)
    config = read_json(directory / "adapter_config.json")
    plain = {
        "peft_type": "LORA",
        "bias": "none",
        "lora_bias": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    if other := {
        key: config[key]
        for key, value in plain.items()
        if config.get(key, value) not in (value, None)
    }:
        raise SystemExit(
            f"{directory}: only plain LoRA adapters can be merged; this one has {other}"
        )
    with open_tensors(directory / "adapter_model.safetensors") as file:
        files = {
            name.removeprefix("base_model.model."): file.get_tensor(name) for name in file.keys()
        }
    parts, shapes, problems, scaling, pairs = (
        tensor_parts(model),
        tensor_shapes(model),
        [],
        lora_scaling(config),
        {},
    )
    for name, value in files.items():
        base, part, kind = name.rsplit(".", 2)
        pairs.setdefault(f"{base}.{kind}", {})[part] = value
    for name, pair in pairs.items():
        if name not in parts or parts[name][1] or pair.keys() != {"lora_A", "lora_B"}:
            problems.append(f"{name} is no layer of this model")
        elif (*pair["lora_B"].shape, *pair["lora_A"].shape) != (
            shapes[name][0],
            config["r"],
            config["r"],
            shapes[name][1],
        ):
            adapter = f"{list(pair['lora_B'].shape)} x {list(pair['lora_A'].shape)}"
            problems.append(
                f"{name} is {list(shapes[name])}, its adapter {adapter} at rank {config['r']}"
            )
    if problems or not pairs:
        raise SystemExit(
            f"{directory} does not fit its base model: {'; '.join(problems[:10]) or 'it holds no adapters'}"
        )
    with torch.no_grad():
        for name, pair in pairs.items():
            weight, rows = local_rows(parts[name][0])
            a, b = pair["lora_A"], pair["lora_B"][rows.start : rows.stop]
            a, b = (part.to(weight.device, torch.float32) for part in (a, b))
            weight.copy_(weight.float() + scaling * (b @ a))
    return model
