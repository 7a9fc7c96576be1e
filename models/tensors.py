"""Tensors of a model under their official names, in memory and in safetensors files.

Sharded models too: each rank reads and holds its own rows alone.
"""

import math
from dataclasses import fields
from importlib import import_module

import torch
from safetensors import SafetensorError, safe_open

from distributed.disk import progress, read_json
from models.config import ARCHITECTURES, architecture, stored_dtype
from models.experts import expert_parts

PIECE = 1 << 25  # bytes of a file that are in pinned memory together


def build_model(config, dtype=torch.float32):
    """config: content of config.json -> the model on the meta device, without weights

    Parameters are of `dtype`, except those that always stay fp32 (routers).
    """
    model_type = architecture(config)
    module, name = ARCHITECTURES[model_type].split(".")
    module = import_module(f"models.{module}")
    try:
        with torch.device("meta"):
            model = getattr(module, name)(checked(module.Config.from_dict(config))).to(dtype)
    except Exception as error:  # such as heads that divide nothing
        raise SystemExit(f"config.json describes no {model_type} model: {error}") from error
    model.checkpoint_config = config
    stored_dtype(config)  # a wrong one would show only when the trained model is saved
    return model


def checked(config):
    """config: of a model file -> the same. SystemExit names the first value that is no number of
    its field's kind, below 1 (floats, and what may be 0: below 0), or too large.
    """
    for field in fields(config):
        name, value, kind = field.name, getattr(config, field.name), field.type
        if kind not in (bool, int, float):
            continue
        may_be_0 = "mask_token_id", "first_k_dense_replace", "num_shared_experts"
        low = kind is int and field.default != 0 and name not in may_be_0
        # a module is built for each layer, a name is made for each expert
        high = 10_000 if name.endswith(("layers", "experts")) else 10**12
        if type(value) not in (kind, int) or not low <= value <= high:
            raise SystemExit(
                f"config.json has {name} = {value!r:.60}: no {kind.__name__}, {low:d} to {high}"
            )
    return config


def frozen_dtype(device):
    """-> the dtype of weights that are not trained, those of a sampler too"""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def materialize(model, device):
    """A model from the meta device to real, uninitialised tensors; to_empty unties a tied head."""
    model.to_empty(device=device)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def tensor_parts(model):
    """Where every official tensor lies in the model: {official name: (model tensor, index into
    it)}.

    The index is () for a whole tensor and (expert, rows) in stacked experts. Adapters and a value
    head are left out. A tied head is listed once, as the embedding, as in official files.
    """
    parts = {}
    for name, value in model.state_dict().items():
        name = name.replace(".base_layer.", ".")
        if ".lora_" in name or "value_head" in name:
            continue
        if model.config.tie_word_embeddings and name == "lm_head.weight":
            continue
        for official, index in expert_parts(name, value.shape):
            parts[official] = value, index
    return parts


def tensor_names(model):
    """{official name: tensor}, views into stacked experts. For models that are not sharded."""
    return {name: value[index] for name, (value, index) in tensor_parts(model).items()}


def tensor_shapes(model):
    """{official name: shape} without touching a value; sharded models too."""
    return {
        name: tuple(torch.empty(value.shape, device="meta")[index].shape)
        for name, (value, index) in tensor_parts(model).items()
    }


def local_rows(value):
    """A tensor or DTensor -> this rank's part of it and the rows that it is.

    FSDP2 shards dimension 0 as torch.chunk does, over the last dimension of the mesh: the ranks of
    a node.
    """
    if not hasattr(value, "full_tensor"):  # the class DTensor takes half a second to import
        return value, range(len(value))
    size = math.ceil(len(value) / value.device_mesh.size(-1))
    first = min(value.device_mesh.get_local_rank(-1) * size, len(value))
    return value.to_local(), range(first, min(first + size, len(value)))


def full_tensor(value):
    """The whole of a tensor or DTensor; collective."""
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()


def json_if_there(path):
    """What read_json gives; {} if there is no such file."""
    return read_json(path) if path.is_file() else {}


def open_tensors(path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        problem = "it is truncated or missing; download or copy it again"
        raise SystemExit(f"{path} cannot be read ({error}): {problem}") from error


def fitting_weights(model, directory):
    """-> {tensor name: the open file that holds it} of a directory that fits the model, which may
    be on the meta device

    SystemExit lists missing, extra and misshapen tensors. Some files also hold copies: of a tied
    head, of rotary frequencies.
    """
    opened = map(open_tensors, directory.glob("model*.safetensors"))
    files = {name: file for file in opened for name in file.keys()}
    found, needed = {}, tensor_shapes(model)
    for name, file in files.items():
        if name not in needed and name.endswith(("inv_freq", "lm_head.weight")):
            continue
        view = file.get_slice(name)
        is_float = view.get_dtype() in ("F64", "F32", "F16", "BF16")
        found[name] = tuple(view.get_shape()) if is_float else view.get_dtype()
    if wrong := sorted({name for name, _ in found.items() ^ needed.items()}):
        shapes = lambda n: f"is {found.get(n, 'missing')}, needed {needed.get(n, 'nowhere')}"
        said = (f"{name} {shapes(name)}" for name in wrong[:5])
        raise SystemExit(
            f"{directory} does not fit its model in {len(wrong)} tensors: {'; '.join(said)}"
        )
    return files


@torch.no_grad()
def read_weights(model, files):
    """Copy the tensors of `fitting_weights` into the model; each rank reads its own rows alone. On
    a terminal a bar shows the progress of loads that take over 10 s.
    """
    for name, (value, index) in progress(tensor_parts(model).items(), "weights"):
        view, (local, rows) = files[name].get_slice(name), local_rows(value)
        if index and index[0] in rows:
            read_into(local[index[0] - rows.start, index[1]], view[:])
        elif not index and rows:
            read_into(local, view[rows.start : rows.stop])


def read_into(target, mapped):
    """Copy part of a mapped file. A GPU gets it through pinned memory: while one piece travels, all
    cores read the next one. In pageable memory both would wait for each other.
    """
    pieces = mapped.nbytes // PIECE + 1
    for part, piece in zip(target.chunk(pieces), mapped.chunk(pieces), strict=True):
        if part.is_cuda:
            piece = piece.pin_memory().to(part.device, non_blocking=True)
        part.copy_(piece)
