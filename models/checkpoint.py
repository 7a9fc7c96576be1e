"""Checkpoints in the official layout: config.json, safetensors with the official tensor names, tokenizer files. In and out."""

import json
import math
from collections import Counter
from importlib import import_module
from pathlib import Path

import torch
from jinja2 import TemplateSyntaxError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from models.atomic import AtomicDirectory
from models.attention import check_backend
from models.config import stored_dtype
from models.experts import expert_parts
from models.lora import adapter_tensors, has_lora, init_adapters, lora_scaling, merge_adapter

# model_type of config.json -> (module, class)
ARCHITECTURES = {
    "llada": ("models.llada", "LLaDA"),
    "Dream": ("models.dream", "Dream"),
    "sdar": ("models.sdar", "SDAR"),
    "sdar_moe": ("models.sdar", "SDAR"),
    "llada2_moe": ("models.llada2", "LLaDA2"),
}
SHARD_BYTES = 4 * 2**30


def resolve(name_or_dir):
    """A key of MODELS or a directory -> directory on this machine; hub ids are downloaded. SystemExit for an unknown name."""
    from models import MODELS  # here, because models imports this file

    if Path(name_or_dir).is_dir():
        if not any(
            (Path(name_or_dir) / name).is_file() for name in ("config.json", "adapter_config.json")
        ):
            raise SystemExit(
                f"{name_or_dir} is no model directory: it holds neither config.json nor adapter_config.json"
            )
        return Path(name_or_dir)
    if name_or_dir not in [*MODELS, *MODELS.values()]:
        raise SystemExit(
            f"unknown model {name_or_dir!r}: use one of {', '.join(MODELS)}, or a directory that holds config.json"
        )
    source = source_of(name_or_dir)
    if random_config(name_or_dir):
        how = f"python models/random_init.py --config {source.partition(':')[2]} --out DIR"
        raise SystemExit(
            f"{name_or_dir} is made in the process and has no files; to have some: {how}"
        )
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                source, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]
            )
        )
    except (OSError, ValueError) as error:  # no network, no such repository, a gated one
        reason = " ".join(str(error).split())[:200]
        raise SystemExit(
            f"{source} cannot be downloaded ({reason}): give --model a directory that holds it"
        ) from error


def random_config(name):
    """config.json of a model that is built in the process with random weights, None for any other name."""
    from models import MODELS
    from models.random_init import TINY_CONFIGS

    kind, _, tiny = MODELS.get(name, str(name)).partition(":")
    return TINY_CONFIGS.get(tiny) if kind == "random" else None


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
        raise SystemExit(
            f"{directory} is an adapter of {base!r}, which is no directory here and no known hub id"
        )
    return base


def read_json(path):
    if not path.is_file():
        raise SystemExit(
            f"{path} is missing: a model directory needs config.json, *.safetensors and a tokenizer"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON
        raise SystemExit(
            f"{path} is not JSON ({error}): it is truncated or damaged; copy it again"
        ) from error
    if not isinstance(content, dict):
        raise SystemExit(f"{path} holds no JSON object: it is damaged; copy it again")
    return content


def build_model(config, dtype=torch.float32):
    """config: content of config.json -> the model on the meta device, without weights; fp32 islands stay fp32."""
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise SystemExit(
            f"config.json has model_type {model_type!r}; supported are {', '.join(ARCHITECTURES)}"
        )
    module, name = ARCHITECTURES[model_type]
    module = import_module(module)
    with torch.device("meta"):
        model = getattr(module, name)(module.Config.from_dict(config)).to(dtype)
    model.checkpoint_config = config
    stored_dtype(config)  # a wrong one would show only when the trained model is saved
    return model


def materialize(model, device):
    """A model from the meta device to real, uninitialised tensors. A tied head is tied again: to_empty parts it."""
    model = model.to_empty(device=device)
    if getattr(model.config, "tie_word_embeddings", False):
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def tensor_parts(model):
    """Where every official tensor lies in the model: {official name: (tensor of the model, index into it)}.

    The index is () for a whole tensor and (expert, rows) in stacked experts. Adapters are left out; a tied head is stored once,
    as the embedding, as official files do.
    """
    tied, parts = getattr(model.config, "tie_word_embeddings", False), {}
    for name, value in model.state_dict().items():
        name = name.replace(".base_layer.", ".")
        if ".lora_" in name or (tied and name == "lm_head.weight"):
            continue
        stacked = {
            official: (value, (expert, rows))
            for official, expert, rows in expert_parts(name, value.shape)
        }
        parts |= stacked or {name: (value, ())}
    return parts


def tensor_names(model):
    """{official name: tensor}, views into stacked experts. For models that are not sharded."""
    return {
        name: value[index] if index else value
        for name, (value, index) in tensor_parts(model).items()
    }


def tensor_shapes(model):
    """{official name: shape} without touching a value; sharded models too."""
    rows = lambda value, index: len(range(value.shape[1])[index[1]])
    shape = lambda value, index: (
        (rows(value, index), *value.shape[2:]) if index else tuple(value.shape)
    )
    return {name: shape(*part) for name, part in tensor_parts(model).items()}


def local_rows(value):
    """A tensor or DTensor -> this rank's part of it and the rows that it is. FSDP2 shards dimension 0 as torch.chunk does."""
    if not isinstance(value, DTensor):
        return value, range(len(value))
    size = math.ceil(len(value) / value.device_mesh.size())
    first = min(value.device_mesh.get_local_rank() * size, len(value))
    return value.to_local(), range(first, min(first + size, len(value)))


def tensor_files(directory):
    """{tensor name: file} through model.safetensors.index.json, or from a single model.safetensors."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise SystemExit(f"{index} has no weight_map: it is damaged; copy it again")
        return {name: directory / file for name, file in weight_map.items()}
    if single.is_file():
        with open_tensors(single) as file:
            return dict.fromkeys(file.keys(), single)
    raise SystemExit(
        f"{directory} has neither model.safetensors nor model.safetensors.index.json: it holds no weights"
    )


def open_tensors(path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise SystemExit(
            f"{path} cannot be read ({error}): it is truncated or missing; download or copy it again"
        ) from error


@torch.no_grad()
def read_weights(model, directory):
    """Copy the tensors of the directory into the model; a rank of a sharded model reads its own rows alone.

    Strict: SystemExit lists missing, extra and misshapen tensors, and what is no floating tensor.
    """
    files, parts, want = tensor_files(directory), tensor_parts(model), tensor_shapes(model)
    problems = [f"missing {name}" for name in want.keys() - files.keys()] + [
        f"extra {name}" for name in files.keys() - want.keys()
    ]
    if absent := sorted({path.name for path in files.values() if not path.is_file()}):
        raise SystemExit(
            f"{directory} lacks {', '.join(absent)}, which its index names: download or copy them again"
        )
    for path in sorted(set(files.values())):
        with open_tensors(path) as file:
            held = set(file.keys())
            for name in (name for name, place in files.items() if place == path and name in want):
                if name not in held:
                    problems.append(f"missing {name} (the index places it in {path.name})")
                    continue
                view = file.get_slice(name)
                if (shape := tuple(view.get_shape())) != want[name]:
                    problems.append(
                        f"{name} is {list(shape)}, config.json makes it {list(want[name])}"
                    )
                if (kind := view.get_dtype()) not in ("F64", "F32", "F16", "BF16"):
                    problems.append(
                        f"{name} is {kind}: only unquantised floating weights can be loaded"
                    )
                if problems:
                    continue
                value, index = parts[name]
                local, rows = local_rows(value)
                if index and index[0] in rows:
                    local[index[0] - rows.start, index[1]].copy_(view[:])
                elif not index and rows:
                    local.copy_(view[rows.start : rows.stop])
    if problems:
        more = f" and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise SystemExit(
            f"{directory} does not fit its config.json: {'; '.join(sorted(problems)[:20])}{more}"
        )


def meta_model(name_or_dir, dtype=torch.float32):
    """A key of models.MODELS or a directory in HF layout -> the model on the meta device, for `load_weights`.

    In between come what needs no weights: add_lora, FSDP2. The model carries mask_token_id, pad_token_id, eos_token_ids (every
    id that ends a completion) and its config. `dtype` is that of the parameters; what must stay fp32 stays fp32.
    """
    adapters = []
    while Path(
        name_or_dir, "adapter_config.json"
    ).is_file():  # an adapter may have been trained on an adapter
        adapters, name_or_dir = [Path(name_or_dir), *adapters], adapter_base(Path(name_or_dir))
    config, directory = random_config(name_or_dir), None
    if config is None:
        directory = resolve(name_or_dir)
        config = read_json(directory / "config.json")
    model = build_model(config, dtype)
    model.sources = directory, adapters
    return set_special_tokens(model, directory)


def load_weights(model, device):
    """Allocate a meta_model on `device` and read its weights; sharded, each rank reads and holds its own rows alone.

    Adapters of a LoRA directory are merged in; those of add_lora are initialised. SystemExit, before anything is read, for an
    attention_backend that cannot do what the model needs on `device`. -> the model
    """
    directory, adapters = model.sources
    trains = any(p.requires_grad for p in model.parameters())
    check_backend(
        model.attention_backend,
        model.attention,
        torch.device(device).type,
        model.config.head_dim,
        trains,
    )
    materialize(model, device)
    if directory is None:
        from models.random_init import random_weights

        random_weights(model)
    else:
        read_weights(model, directory)
    for adapter in adapters:
        merge_adapter(model, adapter)
    return init_adapters(model) if has_lora(model) else model


def load_model(name_or_dir, device="cpu", dtype=torch.float32):
    """A key of models.MODELS or a directory in HF layout -> model on `device`, parameters in `dtype`, not sharded.

    A directory with a LoRA adapter in peft's format loads merged into its base model.
    """
    return load_weights(meta_model(name_or_dir, dtype), device)


def special_tokens(directory):
    """{token: id} of the added tokens that the tokenizer files state, without loading the tokenizer."""
    table = {}
    for file in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json"):
        content = read_json(directory / file) if (directory / file).is_file() else {}
        try:
            if file == "tokenizer.json":
                table |= {
                    token["content"]: token["id"] for token in content.get("added_tokens", [])
                }
            elif file == "tokenizer_config.json":
                table |= {
                    token["content"]: int(i)
                    for i, token in content.get("added_tokens_decoder", {}).items()
                }
            else:
                table |= content
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise SystemExit(
                f"{directory / file}: its added tokens are damaged ({error!r}); copy it again"
            ) from error
    return table


def set_special_tokens(model, directory=None):
    """End-of-text and padding ids: generation_config.json where it states them (SDAR ends at two ids), else config.json, else
    the model file's own. A single end id is joined by that of the family's turn end, which comes first. SystemExit for an id
    that the model has no row for.
    """
    generation = directory and directory / "generation_config.json"
    facts = model.checkpoint_config | (
        read_json(generation) if directory and generation.is_file() else {}
    )
    facts = {"eos_token_id": getattr(model, "eos_token_id", None)} | {
        k: v for k, v in facts.items() if v is not None
    }
    eos, named = facts["eos_token_id"], special_tokens(directory) if directory else {}
    if eos is None or eos == []:
        raise SystemExit(
            f"{directory}: neither generation_config.json nor config.json states eos_token_id"
        )
    if named and model.mask_token_id not in named.values():
        tokens = ", ".join(f"{token} {i}" for token, i in named.items())
        raise SystemExit(
            f"{directory}: mask_token_id {model.mask_token_id} is no special token of its tokenizer ({tokens})"
        )
    turn_end = [named[model.turn_end]] if model.turn_end in named else []
    model.eos_token_ids = eos if isinstance(eos, list) else [*turn_end, *({eos} - set(turn_end))]
    model.pad_token_id = facts.get("pad_token_id", model.eos_token_ids[-1])
    rows = model.lm_head.out_features
    for name, ids in (
        ("mask", [model.mask_token_id]),
        ("eos", model.eos_token_ids),
        ("pad", [model.pad_token_id]),
    ):
        if wrong := [i for i in ids if type(i) is not int or not 0 <= i < rows]:
            raise SystemExit(
                f"{directory or 'config.json'}: {name}_token_id {wrong[0]!r} is outside the vocabulary of {rows}"
            )
    return model


def load_tokenizer(name_or_dir):
    """The checkpoint's own tokenizer and chat template, without remote code."""
    from transformers import AutoTokenizer, PretrainedConfig

    if random_config(name_or_dir):
        from models.random_init import byte_tokenizer

        return byte_tokenizer()
    directory = resolve(name_or_dir)
    if not any(
        (directory / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")
    ):
        raise SystemExit(
            f"{directory} holds no tokenizer: copy the tokenizer files of the model into it"
        )
    files = [
        path
        for path in directory.glob("*.json")
        if path.stem in ("tokenizer", "vocab", "tokenizer_config")
    ]
    facts = {path.stem: read_json(path) for path in files}.get(
        "tokenizer_config", {}
    )  # read here: a damaged one is named
    kind = {"DreamTokenizer": "qwen2"}.get(
        facts.get("tokenizer_class")
    )  # Dream's class is Qwen2's under another name
    try:
        # An explicit config, because AutoTokenizer would look the model type up among its own and warn that it is not there.
        return AutoTokenizer.from_pretrained(
            directory, config=PretrainedConfig(), tokenizer_type=kind, trust_remote_code=False
        )
    except Exception as error:  # tokenizers raises plain Exception, transformers whatever nonsense in a file leads to
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise SystemExit(
            f"{directory}: its tokenizer cannot be loaded ({reason}); copy its tokenizer files again"
        ) from error


def prompt_text(tokenizer, messages):
    """messages [{"role", "content"}] -> the chat prompt, up to where the answer starts; tokenise without special tokens."""
    if tokenizer.chat_template is None:
        raise SystemExit(
            f"{tokenizer.name_or_path} has no chat template: copy the model's chat_template.jinja into it"
        )
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateSyntaxError as error:
        raise SystemExit(
            f"{tokenizer.name_or_path}: its chat template is damaged ({error}); copy it again"
        ) from error


def prompt_ids(tokenizer, messages):
    """messages [{"role", "content"}] -> token ids of the chat prompt, up to where the answer starts."""
    return tokenizer(prompt_text(tokenizer, messages), add_special_tokens=False)["input_ids"]


def export_weights(model, dtype=None, merge_lora=True):
    """Yield (official name, full tensor on the model's device), one at a time; dtype None keeps each tensor's own.

    Buffers always keep theirs: steps of an expert bias are smaller than bf16 resolves.
    merge_lora: add each adapter to its weight, in fp32 and from the frozen base, never from an earlier merge; False leaves the
    base as it is. Rounding a merged weight to bf16 eats early updates: export_adapter hands adapters over unmerged instead.
    Collective: with FSDP2 every rank must walk all of it, because gathering a tensor takes all ranks.
    """
    full = lambda value: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
    adapters = adapter_tensors(model) if merge_lora and has_lora(model) else {}
    buffers = dict(model.named_buffers())
    source = gathered = None
    for name, (value, index) in tensor_parts(model).items():
        if source is not value:  # stacked experts are gathered once for all of them
            source, gathered = value, full(value)
        value, layer = gathered[index] if index else gathered, name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" in adapters:
            a, b = (
                full(adapters[f"{layer}.{part}.default.weight"]).float()
                for part in ("lora_A", "lora_B")
            )
            value = value.float() + lora_scaling(model.lora_config) * (b @ a)
        yield name, value.to(dtype if dtype and name not in buffers else value.dtype)


def save_model(model, directory, tokenizer):
    """Write a checkpoint that load_model and the official code read: collective over all ranks, rank 0 writes.

    Tensors take the dtype that config.json names, expert biases stay fp32; adapters are merged. tokenizer: None writes no
    tokenizer files. SystemExit if the directory exists already or cannot be written: then nothing appears under its name.
    """
    save, config = AtomicDirectory(directory), model.checkpoint_config
    dtype = stored_dtype(config)
    shards, pending, total = plan_shards(model, dtype), {}, 0
    tensors_in = Counter(shards.values())
    for name, tensor in export_weights(model, dtype):
        total += tensor.nbytes
        if save.is_active:  # the others still take part in gathering
            pending[name] = tensor.contiguous().cpu().clone()
            if len(pending) == tensors_in[shards[name]]:
                save.attempt(save_file, pending, save.folder / shards[name], {"format": "pt"})
                pending = {}
    generation = {"eos_token_id": model.eos_token_ids, "pad_token_id": model.pad_token_id}
    if len(set(shards.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": shards}
        save.attempt(write_json, save.folder / "model.safetensors.index.json", index)
    save.attempt(write_json, save.folder / "config.json", config)
    save.attempt(write_json, save.folder / "generation_config.json", generation)
    if tokenizer:
        save.attempt(tokenizer.save_pretrained, save.folder)
    save.finish()


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def plan_shards(model, dtype):
    """{tensor name: file name}: tensors in order, up to SHARD_BYTES a file."""
    groups, size = [[]], 0
    for name, shape in tensor_shapes(model).items():
        nbytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and size + nbytes > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    if len(groups) == 1:
        return dict.fromkeys(groups[0], "model.safetensors")
    return {
        name: f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        for number, names in enumerate(groups, 1)
        for name in names
    }
