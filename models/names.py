"""The names that --model takes, and the directory or configuration that each of them stands for."""

import math
from pathlib import Path

from models.config import architecture
from models.tensors import open_weights, read_json
from models.tiny import HERE, TINY_CONFIGS

# model_type of config.json, or "tiny" -> {name for --model: hub id, or directory in the repository}
CHECKPOINTS = {
    "tiny": {name: str(HERE / name) for name in TINY_CONFIGS},
    "llada": {
        "llada-8b": "GSAI-ML/LLaDA-8B-Instruct",
        "llada-8b-base": "GSAI-ML/LLaDA-8B-Base",
        "llada-1.5": "GSAI-ML/LLaDA-1.5",
    },
    "lladamoe": {"llada-moe-7b": "inclusionAI/LLaDA-MoE-7B-A1B-Instruct"},
    "Dream": {
        "dream-7b": "Dream-org/Dream-v0-Instruct-7B",
        "dream-7b-base": "Dream-org/Dream-v0-Base-7B",
    },
    "sdar": {
        "sdar-1.7b": "JetLM/SDAR-1.7B-Chat",
        "sdar-4b": "JetLM/SDAR-4B-Chat",
        "sdar-8b": "JetLM/SDAR-8B-Chat",
    },
    "sdar_moe": {"sdar-30b-a3b": "JetLM/SDAR-30B-A3B-Chat"},
    "llada2_moe": {
        "llada2-mini": "inclusionAI/LLaDA2.0-mini",
        "llada2.1-mini": "inclusionAI/LLaDA2.1-mini",
    },
}
MODELS = {name: source for group in CHECKPOINTS.values() for name, source in group.items()}

# What a model states about its sampling, as fields of the scripts. Lengths of evaluations stand in
# evals/decoding.py. Masked diffusion: 256 tokens, two of a block in each step (d1's train.yaml),
# Fast-dLLM's cache
MASKED = {"gen_length": 256, "block_length": 32, "denoising_steps": 16, "cache": "dual"}
# 256 tokens, one of a block in each step (DARE's training of SDAR)
SDAR = {"gen_length": 256, "denoising_steps": 4}
# all tokens above 0.95, at least one of a block in each step (model card)
LLADA2 = {"gen_length": 256, "denoising_steps": 32}
LLADA2 |= {"remasking": "low_confidence_dynamic", "confidence_threshold": 0.95}
# a key of CHECKPOINTS -> fields
SAMPLING = {"tiny": {"gen_length": 12, "denoising_steps": 2}}
SAMPLING |= {"llada": MASKED, "lladamoe": MASKED, "Dream": MASKED}
SAMPLING |= {"sdar": SDAR, "sdar_moe": SDAR, "llada2_moe": LLADA2}
FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]  # to download
TINY_SIZE = 10_000_000  # parameters that a tiny model stays below


def is_tiny(model):
    """model: as --model -> whether it is a shipped tiny model, or a directory with fewer than
    TINY_SIZE parameters. An adapter counts as its base; a directory without weights is not tiny.
    """
    if (name := pinned(model)[0]) in MODELS:
        return name in TINY_CONFIGS
    if (directory := checkpoint_config(model)[1]) is None:
        return True
    files = open_weights(directory)
    sizes = (math.prod(file.get_slice(name).get_shape()) for name, file in files.items())
    return 0 < sum(sizes) < TINY_SIZE


def sampling_facts(model):
    """model: as --model -> {field: value} of its sampling; of a name without reading anything"""
    kinds = [kind for kind, names in CHECKPOINTS.items() if pinned(model)[0] in names]
    if not kinds:
        kinds = ["tiny"] if is_tiny(model) else [architecture(checkpoint_config(model)[0])]
    return SAMPLING[kinds[0]]


def checkpoint_config(name_or_dir):
    """A key of MODELS or a directory -> content of config.json, directory of the weights (None: to
    be drawn), directories of the adapters on them
    """
    adapters, source = [], source_of(name_or_dir)
    # adapters trained on adapters too; one of itself is no base
    while (file := Path(source, "adapter_config.json")).is_file() and file.parent not in adapters:
        adapters.insert(0, file.parent)
        config = read_json(file)
        base, revision = config.get("base_model_name_or_path"), config.get("revision")
        source = source_of(f"{base}@{revision}" if revision else f"{base}")
    directory = resolve(source)
    config = read_json(directory / "config.json")
    return config, None if is_drawn(directory) else directory, adapters


def is_drawn(directory):
    """Whether it is one of a tiny model that comes without weights."""
    return directory.parent == HERE and not (directory / "model.safetensors").is_file()


def resolve(name_or_dir):
    """A key of MODELS or a directory -> directory on this machine; hub ids are downloaded, at the
    revision behind an @ if there is one.

    SystemExit for an unknown name.
    """
    source = source_of(name_or_dir)
    if Path(source).is_dir():
        return Path(source)
    hub_id, revision = pinned(source)
    if hub_id not in MODELS.values():
        choices = f"one of {', '.join(MODELS)}, or a directory that holds config.json"
        raise SystemExit(f"unknown model {source!r}: use {choices}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=FILES))
    except (OSError, ValueError) as error:  # no network, a gated repository
        reason = " ".join(str(error).split())[:200]
        hint = "give --model a directory that holds it"
        raise SystemExit(f"{source} cannot be downloaded ({reason}): {hint}") from error


def source_of(name_or_dir):
    """A name that works on other machines too: a hub id, with its revision if one is named, or the
    absolute path of a directory.
    """
    name, revision = pinned(name_or_dir)
    source = MODELS.get(name, name) + (f"@{revision}" if revision else "")
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def pinned(name_or_dir):
    """ "sdar-8b@v1.0" -> "sdar-8b", "v1.0"; a directory, or a name without a revision -> itself,
    None
    """
    name, _, revision = str(name_or_dir).partition("@")
    return (str(name_or_dir), None) if Path(name_or_dir).is_dir() else (name, revision or None)
