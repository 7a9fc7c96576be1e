"""Checkpoints in the official layout, in and out: config.json, safetensors, tokenizer files."""

import json
import re
import shutil
from collections import defaultdict

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from distributed.disk import is_first_rank, whole_directory
from distributed.sequence import check_heads
from models.config import stored_dtype
from models.lora import adapter_tensors, init_adapters, merge_adapter
from models.names import SMALL, checkpoint_config, resolve, special_tokens
from models.tensors import (
    build_model,
    fitting_weights,
    full_tensor,
    json_if_there,
    materialize,
    read_weights,
    tensor_parts,
    tensor_shapes,
)
from models.tiny import byte_tokenizer, random_weights

# Before Qwen3's template: answers of a2d models begin behind an empty think block, as in dllm.
NO_THINKING = "{%- set enable_thinking = false %}"


def meta_model(name_or_dir, dtype=torch.float32):
    """A key of MODELS or a directory in HF layout -> the model on the meta device, for
    `load_weights`.

    add_lora and FSDP2 come in between: they need no weights. The model carries mask_token_id,
    pad_token_id, eos_token_ids (every id that ends a completion) and its config. Parameters are of
    `dtype`, except those that always stay fp32.
    """
    config, directory, adapters = checkpoint_config(name_or_dir)
    model = build_model(config, dtype)
    model.sources = directory, adapters
    return set_special_tokens(model, directory)


def load_weights(model, device):
    """Allocate a meta_model on `device` and read its weights; sharded, each rank reads its own
    rows.

    Merges the adapters of a LoRA directory and initialises those of add_lora; a value head is 0.
    SystemExit, before anything is read, for heads that --sequence-parallel does not divide. -> the
    model
    """
    directory, adapters = model.sources
    check_heads(model.config)
    files = directory and fitting_weights(model, directory)  # before memory is taken
    materialize(model, device)
    if directory is None:
        random_weights(model)
    else:
        read_weights(model, files)
    for adapter in adapters:
        merge_adapter(model, adapter)
    if model.value_head is not None:
        torch.nn.init.zeros_(model.value_head.weight)
    return init_adapters(model) if model.lora_config else model


def load_model(name_or_dir, device="cpu", dtype=torch.float32):
    """A key of MODELS or a directory in HF layout -> model on `device`, parameters in `dtype`, not
    sharded.

    A directory with a LoRA adapter in peft's format loads merged into its base model.
    """
    return load_weights(meta_model(name_or_dir, dtype), device)


def set_special_tokens(model, directory=None):
    """Set end-of-text and padding ids of the model. -> the model

    They come from generation_config.json where it states them (SDAR ends at two ids), else from
    config.json, else from the model file. A single end id is preceded by the family's turn end.
    """
    facts, named = dict(model.checkpoint_config), {}
    if directory:
        facts |= json_if_there(directory / "generation_config.json")
        named = special_tokens(directory)
    facts = {key: value for key, value in facts.items() if value is not None}
    eos = facts.get("eos_token_id", model.eos_token_id)
    if eos in (None, []):
        raise SystemExit(f"{directory}: no config file states eos_token_id")
    mask, turn_end = model.mask_token_id, named.get(model.turn_end, eos)
    if named and mask is not None and mask not in named.values():
        raise SystemExit(
            f"{directory}: mask_token_id {mask} is no special token of its tokenizer {named}"
        )
    if not isinstance(eos, list):
        eos = [eos] if turn_end == eos else [turn_end, eos]
    model.eos_token_ids = eos
    model.pad_token_id = facts.get("pad_token_id", eos[-1])
    return model


def load_tokenizer(name_or_dir):
    """The checkpoint's own tokenizer and chat template, without remote code."""
    from transformers import AutoTokenizer, PretrainedConfig

    directory, config, adapters = resolve(name_or_dir, SMALL), {}, []
    if any((directory / name).is_file() for name in ("config.json", "adapter_config.json")):
        config, directory, adapters = checkpoint_config(name_or_dir, SMALL)
    for adapter in adapters:
        if any(adapter.glob("*token*")):  # else the base's
            directory = adapter
    if directory is None:
        return byte_tokenizer()
    facts = json_if_there(directory / "tokenizer_config.json")
    # Dream's class is Qwen2's under another name.
    kind = "qwen2" if facts.get("tokenizer_class") == "DreamTokenizer" else None
    try:
        # With an explicit config AutoTokenizer does not look up the model type, nor warn about it.
        # It warns of longer texts than the model's context; transformers 5.17 of Mistral's regular
        # expression, whatever the model, unless told.
        tokenizer = AutoTokenizer.from_pretrained(
            directory, config=PretrainedConfig(), tokenizer_type=kind, trust_remote_code=False,
            fix_mistral_regex=False,
            model_max_length=config.get("max_position_embeddings")
            or config.get("max_sequence_length"),
        )  # fmt: skip
        tokenizer.init_kwargs.pop("auto_map", None)  # what it is saved as needs no code
        if config.get("model_type") == "a2d-qwen3" and tokenizer.chat_template:
            own = tokenizer.chat_template.removeprefix(NO_THINKING)
            tokenizer.chat_template = NO_THINKING + own
        return tokenizer
    except Exception as error:  # tokenizers raises plain Exception; transformers almost anything
        raise SystemExit(
            f"{directory}: its tokenizer cannot be loaded ({error!r:.200}); copy its files again"
        ) from error


def prompt_text(tokenizer, messages):
    """messages [{"role", "content"}] -> the chat prompt, up to where the answer starts

    Tokenise it without special tokens. SystemExit if the template cannot render it.
    """
    if tokenizer.chat_template is None:
        copy = "copy the model's chat_template.jinja into it"
        raise SystemExit(f"{tokenizer.name_or_path} has no chat template: {copy}")
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        text.encode()  # no half of a character, a surrogate
        return text
    except Exception as error:  # a template runs what its author wrote
        raise SystemExit(
            f"{tokenizer.name_or_path}: chat template raises {error!r:.200} for {messages!r:.99}"
        ) from error


def prompt_ids(tokenizer, messages):
    """messages [{"role", "content"}] -> token ids of the chat prompt, up to where the
    answer starts
    """
    return tokenizer(prompt_text(tokenizer, messages), add_special_tokens=False)["input_ids"]


def export_weights(model, dtype=None):
    """Yield (official name, full tensor on the model's device), one at a time; dtype None keeps
    each tensor's own.

    Buffers always keep theirs: bf16 would lose small steps of an expert bias. Each adapter is added
    to its weight, in fp32 and from the frozen base, never from an earlier merge. Rounding a merged
    weight to bf16 loses early updates; export_adapter hands adapters over unmerged instead.
    Collective: with FSDP2 every rank must walk all of it, because gathering a tensor takes all
    ranks.
    """
    adapters, buffers = adapter_tensors(model), dict(model.named_buffers())
    source = gathered = None
    for name, (value, index) in tensor_parts(model).items():
        if source is not value:  # stacked experts are gathered once for all of them
            source, gathered = value, full_tensor(value)
        value, layer = gathered[index], name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" in adapters:
            names = (f"{layer}.lora_{part}.default.weight" for part in "AB")
            a, b = (full_tensor(adapters[name]).float() for name in names)
            lora = model.lora_config
            value = value.float() + lora.lora_alpha / lora.r * (b @ a)
        yield name, value.to(dtype if dtype and name not in buffers else value.dtype)


def write_files(folder, config, tensors, shapes, end_ids, pad_id, tokenizer):
    """Write the files of a checkpoint. tensors: pairs (name, tensor) in the dtype that config.json
    names. Each file, of up to 5 GB, is written as soon as it is full, and an index if there are
    several. shapes {name: shape}. tokenizer: None for none.
    """
    dtype = stored_dtype(config)
    like = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    plan = split_torch_state_dict_into_shards(like)
    files = defaultdict(dict)
    for name, tensor in tensors:
        file = plan.tensor_to_filename[name]
        files[file][name] = tensor.contiguous().cpu().clone()
        if len(files[file]) == len(plan.filename_to_tensors[file]):
            save_file(files.pop(file), folder / file, {"format": "pt"})
    generation = {"eos_token_id": end_ids, "pad_token_id": pad_id}
    contents = {"config": config, "generation_config": generation}
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        contents["model.safetensors.index"] = index
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    if tokenizer:
        tokenizer.save_pretrained(folder)


def save_model(model, directory, tokenizer):
    """Write a checkpoint that load_model and the official code read, which is copied along if it
    lies beside the model's weights. Collective; rank 0 writes.

    Tensors take the dtype that config.json names, expert biases stay fp32; adapters are merged.
    tokenizer: None writes no tokenizer files. SystemExit if the directory exists already or cannot
    be written: then nothing appears under its name.
    """
    config, source = dict(model.checkpoint_config), model.sources[0]
    # modules of this directory; "owner/name--module.Class" lies elsewhere
    named = {*re.findall(r'"(\w+)\.', json.dumps(config.get("auto_map")))}
    code = {path.stem: path for path in source.glob("*.py")} if named and source else {}
    if not named <= code.keys():
        del config["auto_map"]  # it would ask for what is not there
    with whole_directory(directory) as folder:
        tensors = export_weights(model, stored_dtype(config))
        ends = model.eos_token_ids, model.pad_token_id
        try:
            if is_first_rank():
                for path in code.values():
                    shutil.copy(path, folder)
                write_files(folder, config, tensors, tensor_shapes(model), *ends, tokenizer)
        finally:
            for _ in tensors:  # all ranks gather all of them, also if rank 0 fails
                pass
