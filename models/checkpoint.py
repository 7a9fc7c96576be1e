"""Checkpoints in the official layout: config.json, safetensors with the official tensor names, tokenizer files. In and out."""

import json
import os
import shutil
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

# model_type of config.json -> (module, class)
ARCHITECTURES = {"sdar": ("models.sdar", "SDAR")}
SHARD_BYTES = 4 * 2**30


def resolve(name_or_dir):
    """A key of MODELS or a directory -> directory on this machine; hub ids are downloaded. SystemExit for an unknown name."""
    from models import MODELS  # here, because models imports this file

    if Path(name_or_dir).is_dir():
        return Path(name_or_dir)
    if name_or_dir not in MODELS:
        raise SystemExit(
            f"unknown model {name_or_dir!r}: use one of {', '.join(MODELS)}, or a directory that holds config.json"
        )
    source = MODELS[name_or_dir]
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))


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
    """{official name: parameter}; a tied head is stored once, under the name of the embedding, as the official files do."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: value for name, value in model.state_dict().items() if name not in tied}


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

    The model carries mask_token_id, pad_token_id, eos_token_ids (every id that ends a completion) and its config.
    """
    directory = resolve(name_or_dir)
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

    # An explicit config, because AutoTokenizer would look the model type up among its own and warn that it is not there.
    return AutoTokenizer.from_pretrained(resolve(name_or_dir), config=PretrainedConfig(), trust_remote_code=False)


def prompt_ids(tokenizer, messages):
    """messages [{"role", "content"}] -> token ids of the chat prompt, up to where the answer starts."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def export_weights(model, dtype=None):
    """Yield (official name, full tensor on the model's device), one at a time; dtype None keeps each tensor's own.

    Collective: with FSDP2 every rank must walk all of it, because gathering a tensor takes all ranks.
    """
    for name, value in tensor_names(model).items():  # state_dict, because named_parameters may be stale after a no-grad forward
        value = value.full_tensor() if isinstance(value, DTensor) else value
        yield name, value.detach().to(dtype or value.dtype)


def save_model(model, directory, tokenizer):
    """Write a checkpoint that load_model and the official code read: collective over all ranks, rank 0 writes.

    Tensors keep the dtype that config.json names. The directory appears under its name only when complete and on disk: a
    killed process or a full disk leaves what was there before. SystemExit if it exists already or cannot be written.
    """
    directory = Path(directory)
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    config = model.checkpoint_config
    dtype = getattr(torch, config.get("torch_dtype") or config.get("dtype") or "float32")
    temporary, error = directory.with_name(f".{directory.name}.tmp"), None
    if is_writer:
        try:
            if directory.exists():
                raise FileExistsError("it exists already")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        except OSError as problem:
            error = problem
    shards, weight_map = plan_shards(model, dtype), {}
    pending = {}
    for name, tensor in export_weights(model, dtype):
        if not is_writer or error:
            continue  # still takes part in gathering
        pending[name] = tensor.contiguous().cpu().clone()
        weight_map[name] = shards[name]
        if len(pending) == sum(file == shards[name] for file in shards.values()):
            try:
                save_file(pending, temporary / shards[name], metadata={"format": "pt"})
            except (SafetensorError, OSError) as problem:
                error = problem
            pending = {}
    if is_writer and not error:
        try:
            if len(set(shards.values())) > 1:
                total = sum(value.numel() for value in tensor_names(model).values()) * dtype.itemsize
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
            (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            generation = {"eos_token_id": model.eos_token_ids, "pad_token_id": model.pad_token_id}
            (temporary / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
            tokenizer.save_pretrained(temporary)
            for path in [*temporary.iterdir(), temporary]:
                sync_to_disk(path)
            os.rename(temporary, directory)
            sync_to_disk(directory.parent)
        except Exception as problem:  # tokenizers raises plain Exception for a full disk; whatever it is, it is reported below
            error = problem
    if error:
        shutil.rmtree(temporary, ignore_errors=True)
    message = [f"could not save {directory}: {error}; earlier checkpoints are untouched" if error else None]
    if dist.is_initialized():  # a failure on rank 0 stops all ranks
        dist.broadcast_object_list(message, src=0)
    if message[0]:
        raise SystemExit(message[0])


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


def sync_to_disk(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
