"""Checkpoints in the official layout: config.json, safetensors with the official tensor names, tokenizer files. In and out."""

import json
from importlib import import_module
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from models.atomic import AtomicDirectory
from models.lora import adapter_tensors, has_lora, lora_scaling, merge_adapter

# model_type of config.json -> (module, class)
ARCHITECTURES = {"sdar": ("models.sdar", "SDAR")}
SHARD_BYTES = 4 * 2**30


def resolve(name_or_dir):
    """A key of MODELS or a directory -> directory on this machine; hub ids are downloaded. SystemExit for an unknown name."""
    from models import MODELS  # here, because models imports this file

    if Path(name_or_dir).is_dir():
        if not any((Path(name_or_dir) / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise SystemExit(f"{name_or_dir} is no model directory: it holds neither config.json nor adapter_config.json")
        return Path(name_or_dir)
    if name_or_dir not in [*MODELS, *MODELS.values()]:
        raise SystemExit(
            f"unknown model {name_or_dir!r}: use one of {', '.join(MODELS)}, or a directory that holds config.json"
        )
    source = source_of(name_or_dir)
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except (OSError, ValueError) as error:  # no network, no such repository, a gated one
        reason = " ".join(str(error).split())[:200]
        raise SystemExit(f"{source} cannot be downloaded ({reason}): give --model a directory that holds it") from error


def source_of(name_or_dir):
    """What names a model on other machines too: the hub id of a key of MODELS; an absolute path for a directory."""
    from models import MODELS

    source = MODELS.get(name_or_dir, name_or_dir)
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def adapter_base(directory):
    """The base model that adapter_config.json names, as load_model takes it. SystemExit if it cannot be found."""
    from models import MODELS

    base = read_json(directory / "adapter_config.json").get("base_model_name_or_path")
    if base not in MODELS.values() and not (base and Path(base).is_dir()):
        raise SystemExit(f"{directory} is an adapter of {base!r}, which is no directory here and no known hub id")
    return base


def read_json(path):
    if not path.is_file():
        raise SystemExit(f"{path} is missing: a model directory needs config.json, *.safetensors and a tokenizer")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise SystemExit(f"{path} is not JSON ({error}): it is truncated or damaged; copy it again") from error


def build_model(config):
    """config: content of config.json -> the model on the meta device, without weights."""
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise SystemExit(f"config.json has model_type {model_type!r}; supported are {', '.join(ARCHITECTURES)}")
    module, name = ARCHITECTURES[model_type]
    module = import_module(module)
    with torch.device("meta"):
        model = getattr(module, name)(module.Config.from_dict(config))
    model.checkpoint_config = config
    return model


def materialize(model, device, dtype):
    """A model from the meta device to real, uninitialised tensors. A tied head is tied again: to_empty parts it."""
    model = model.to(dtype).to_empty(device=device)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def tensor_names(model):
    """{official name: parameter}, adapters left out; a tied head is stored once, as the embedding, as official files do."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    names = {name.replace(".base_layer.", "."): value for name, value in model.state_dict().items() if ".lora_" not in name}
    return {name: value for name, value in names.items() if name not in tied}


def tensor_files(directory):
    """{tensor name: file} through model.safetensors.index.json, or from a single model.safetensors."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        return {name: directory / file for name, file in read_json(index)["weight_map"].items()}
    if single.is_file():
        with open_tensors(single) as file:
            return dict.fromkeys(file.keys(), single)
    raise SystemExit(f"{directory} has neither model.safetensors nor model.safetensors.index.json: it holds no weights")


def open_tensors(path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise SystemExit(f"{path} cannot be read ({error}): it is truncated or missing; download or copy it again") from error


def read_weights(model, directory):
    """Copy every tensor of the directory into the model. Strict: SystemExit lists missing, extra and misshapen tensors."""
    files, want = tensor_files(directory), tensor_names(model)
    problems = [f"missing {name}" for name in want.keys() - files.keys()] + [
        f"extra {name}" for name in files.keys() - want.keys()
    ]
    for path in sorted(set(files.values())):
        with open_tensors(path) as file:
            held = set(file.keys())
            for name in (name for name, place in files.items() if place == path and name in want):
                if name not in held:
                    problems.append(f"missing {name} (the index places it in {path.name})")
                elif (shape := tuple(file.get_slice(name).get_shape())) != tuple(want[name].shape):
                    problems.append(f"{name} is {list(shape)}, config.json makes it {list(want[name].shape)}")
                elif not problems:
                    with torch.no_grad():
                        want[name].copy_(file.get_tensor(name))
    if problems:
        more = f" and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise SystemExit(f"{directory} does not fit its config.json: {'; '.join(sorted(problems)[:20])}{more}")


def load_model(name_or_dir, device="cpu", dtype=torch.float32):
    """A key of models.MODELS or a directory in HF layout -> model on `device`, parameters in `dtype`.

    The model carries mask_token_id, pad_token_id, eos_token_ids (every id that ends a completion) and its config. A directory
    with a LoRA adapter in peft's format loads merged into its base model.
    """
    directory = resolve(name_or_dir)
    if (directory / "adapter_config.json").is_file():
        return merge_adapter(load_model(adapter_base(directory), device, dtype), directory)
    config = read_json(directory / "config.json")
    model = materialize(build_model(config), device, dtype)
    read_weights(model, directory)
    return set_special_tokens(model, directory)


def set_special_tokens(model, directory):
    """End-of-text and padding ids: generation_config.json where it states them (SDAR ends at two ids), else config.json."""
    generation = directory / "generation_config.json"
    facts = model.checkpoint_config | (read_json(generation) if generation.is_file() else {})
    eos = facts.get("eos_token_id")
    if eos is None:
        raise SystemExit(f"{directory}: neither generation_config.json nor config.json states eos_token_id")
    model.eos_token_ids = eos if isinstance(eos, list) else [eos]
    pad = facts.get("pad_token_id")
    model.pad_token_id = model.eos_token_ids[-1] if pad is None else pad
    return model


def load_tokenizer(name_or_dir):
    """The checkpoint's own tokenizer and chat template, without remote code."""
    from transformers import AutoTokenizer, PretrainedConfig

    directory = resolve(name_or_dir)
    if not any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        raise SystemExit(f"{directory} holds no tokenizer: copy the tokenizer files of the model into it")
    # An explicit config, because AutoTokenizer would look the model type up among its own and warn that it is not there.
    return AutoTokenizer.from_pretrained(directory, config=PretrainedConfig(), trust_remote_code=False)


def prompt_ids(tokenizer, messages):
    """messages [{"role", "content"}] -> token ids of the chat prompt, up to where the answer starts."""
    if tokenizer.chat_template is None:
        raise SystemExit(f"{tokenizer.name_or_path} has no chat template: copy the model's chat_template.jinja into it")
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def export_weights(model, dtype=None, merge_lora=True):
    """Yield (official name, full tensor on the model's device), one at a time; dtype None keeps each tensor's own.

    merge_lora: add each adapter to its weight, in fp32 and from the frozen base, never from an earlier merge; False leaves the
    base as it is. Rounding a merged weight to bf16 eats early updates: export_adapter hands adapters over unmerged instead.
    Collective: with FSDP2 every rank must walk all of it, because gathering a tensor takes all ranks.
    """
    full = lambda value: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
    adapters = adapter_tensors(model) if merge_lora and has_lora(model) else {}
    for name, value in tensor_names(model).items():
        value, layer = full(value), name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" in adapters:
            a, b = (full(adapters[f"{layer}.{part}.default.weight"]).float() for part in ("lora_A", "lora_B"))
            value = value.float() + lora_scaling(model.lora_config) * (b @ a)
        yield name, value.to(dtype or value.dtype)


def save_model(model, directory, tokenizer):
    """Write a checkpoint that load_model and the official code read: collective over all ranks, rank 0 writes.

    Tensors keep the dtype that config.json names; adapters are merged. SystemExit if the directory exists already or cannot be
    written: then nothing appears under its name.
    """
    save, config = AtomicDirectory(directory), model.checkpoint_config
    dtype = getattr(torch, config.get("torch_dtype") or config.get("dtype") or "float32")
    shards, pending = plan_shards(model, dtype), {}
    for name, tensor in export_weights(model, dtype):
        if save.is_active:  # the others still take part in gathering
            pending[name] = tensor.contiguous().cpu().clone()
            if len(pending) == sum(file == shards[name] for file in shards.values()):
                save.attempt(save_file, pending, save.folder / shards[name], {"format": "pt"})
                pending = {}
    total = sum(value.numel() for value in tensor_names(model).values()) * dtype.itemsize
    generation = {"eos_token_id": model.eos_token_ids, "pad_token_id": model.pad_token_id}
    if len(set(shards.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": shards}
        save.attempt(write_json, save.folder / "model.safetensors.index.json", index)
    save.attempt(write_json, save.folder / "config.json", config)
    save.attempt(write_json, save.folder / "generation_config.json", generation)
    save.attempt(tokenizer.save_pretrained, save.folder)
    save.finish()


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def plan_shards(model, dtype):
    """{tensor name: file name}: tensors in order, up to SHARD_BYTES a file."""
    groups, size = [[]], 0
    for name, value in tensor_names(model).items():
        nbytes = value.numel() * dtype.itemsize
        if groups[-1] and size + nbytes > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    if len(groups) == 1:
        return dict.fromkeys(groups[0], "model.safetensors")
    return {
        name: f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number, names in enumerate(groups, 1) for name in names
    }
