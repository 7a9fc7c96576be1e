"""The names that --model takes, and the directory or configuration that each of them stands for."""

import os
from pathlib import Path

from distributed.disk import one_line, read_json
from models.config import AUTOREGRESSIVE, architecture
from models.tensors import build_model, json_if_there
from models.tiny import HERE, TINY_CONFIGS

# `architecture`, name for --model, hub id. Other hub ids work as well.
NAMED = """
    llada        llada-8b                 GSAI-ML/LLaDA-8B-Instruct
    llada        llada-8b-base            GSAI-ML/LLaDA-8B-Base
    llada        llada-1.5                GSAI-ML/LLaDA-1.5
    lladamoe     llada-moe-7b             inclusionAI/LLaDA-MoE-7B-A1B-Instruct
    Dream        dream-7b                 Dream-org/Dream-v0-Instruct-7B
    Dream        dream-7b-base            Dream-org/Dream-v0-Base-7B
    Dream        dream-coder-7b           Dream-org/Dream-Coder-v0-Instruct-7B
    Dream        diffucoder-7b            apple/DiffuCoder-7B-Instruct
    sdar         sdar-1.7b                JetLM/SDAR-1.7B-Chat
    sdar         sdar-4b                  JetLM/SDAR-4B-Chat
    sdar         sdar-8b                  JetLM/SDAR-8B-Chat
    sdar         trado-4b                 Gen-Verse/TraDo-4B-Instruct
    sdar         trado-8b                 Gen-Verse/TraDo-8B-Instruct
    sdar         dirl-8b                  OpenMOSS-Team/DiRL-8B-Instruct
    sdar_moe     sdar-30b-a3b             JetLM/SDAR-30B-A3B-Chat
    llada2_moe   llada2-mini              inclusionAI/LLaDA2.0-mini
    llada2_moe   llada2.1-mini            inclusionAI/LLaDA2.1-mini
    a2d-block    qwen3-0.6b-bd3lm         dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1
    a2d-block    qwen2.5-coder-0.5b-bd3lm dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-bd3lm-v0.1
    a2d-masked   qwen3-0.6b-mdlm          dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1
    a2d-masked   qwen2.5-coder-0.5b-mdlm  dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1
"""
# of the same, or "tiny" -> {name for --model: hub id, or directory in the repository}
CHECKPOINTS = {"tiny": {name: str(HERE / name) for name in TINY_CONFIGS}}
for kind, name, hub_id in map(str.split, NAMED.strip().splitlines()):
    CHECKPOINTS.setdefault(kind, {})[name] = hub_id
# a key of CHECKPOINTS -> what the config.json of its models leaves out (dllm, examples/a2d)
STATED = {"a2d-block": {"block_size": 32}, "a2d-masked": {"block_size": 0}}
MODELS = {name: source for group in CHECKPOINTS.values() for name, source in group.items()}

# What a model states about its sampling, as fields of the scripts. Lengths of evaluations stand in
# evals/decoding.py. Masked diffusion: 256 tokens, two of a block in each step (d1's train.yaml),
# Fast-dLLM's cache
MASKED = {"gen_length": 256, "block_length": 32, "denoising_steps": 16, "cache": "dual"}
# 256 tokens, one of a block in each step: `sampling_facts` adds their number (SDAR as DARE trains
# it; a2d as dllm evaluates it)
BLOCKS = {"gen_length": 256}
# all tokens above 0.95, at least one of a block in each step (model card)
LLADA2 = {"gen_length": 256, "denoising_steps": 32}
LLADA2 |= {"remasking": "low_confidence_dynamic", "confidence_threshold": 0.95}
# a key of CHECKPOINTS -> fields
SAMPLING = {
    "tiny": {"gen_length": 12, "denoising_steps": 2},
    "llada": MASKED, "lladamoe": MASKED, "Dream": MASKED, "a2d-masked": MASKED,
    "sdar": BLOCKS, "sdar_moe": BLOCKS, "a2d-block": BLOCKS, "llada2_moe": LLADA2,
}  # fmt: skip
TINY_SIZE = 10_000_000  # parameters that a tiny model stays below
# files of a repository: all but the weights, all
SMALL = ["*.json", "*.txt", "*.jinja"]
FILES = [*SMALL, "*.safetensors", "*.py"]


def known(model):
    """model: as --model -> the key of CHECKPOINTS that has it as a name or a hub id, or None"""
    name = pinned(model)[0]
    has = (kind for kind, group in CHECKPOINTS.items() if name in (*group, *group.values()))
    return next(has, None)


def kind_of(model):
    """model: as --model -> the key of SAMPLING that it has, and what is known of its config.json;
    of a name or a hub id without reading anything. An adapter counts as its base.
    """
    if kind := known(model):
        return kind, STATED.get(kind, {})
    config = checkpoint_config(model, SMALL)[0]
    size = sum(value.numel() for value in build_model(config).parameters())
    return "tiny" if size < TINY_SIZE else architecture(config), config


def is_tiny(model):
    """model: as --model -> whether it is a shipped tiny model, or one of fewer than TINY_SIZE
    parameters
    """
    return kind_of(model)[0] == "tiny"


def sampling_facts(model):
    """model: as --model -> {field: value} of its sampling"""
    kind, config = kind_of(model)
    return {"denoising_steps": config.get("block_size", 4)} | SAMPLING[kind]


def checkpoint_config(name_or_dir, patterns=FILES):
    """A key of MODELS, a hub id or a directory -> content of config.json, directory of the weights
    (None: to be drawn), directories of the adapters on them

    patterns: of the files to download. A model that is not implemented is refused before its
    weights are.
    """
    adapters, source = [], source_of(name_or_dir)
    # adapters trained on adapters too; one of itself is no base
    while (file := Path(source, "adapter_config.json")).is_file() and file.parent not in adapters:
        adapters.insert(0, file.parent)
        config = read_json(file)
        base, revision = config.get("base_model_name_or_path"), config.get("revision")
        source = source_of(f"{base}@{revision}" if revision else f"{base}")
    directory = resolve(source, SMALL)
    config = STATED.get(known(source), {}) | read_json(directory / "config.json")
    if config.get("model_type") not in AUTOREGRESSIVE and "a2d" in architecture(config):
        # dllm names the mask token in the tokenizer alone
        config = {"mask_token_id": mask_token_id(directory)} | config
    directory = resolve(source, patterns)
    # a tiny model may come without weights
    is_drawn = directory.parent == HERE and not (directory / "model.safetensors").is_file()
    return config, None if is_drawn else directory, adapters


def special_tokens(directory):
    """{token: id} of the added tokens in the tokenizer files, without loading the tokenizer"""
    tokens = json_if_there(directory / "tokenizer.json").get("added_tokens", [])
    config = json_if_there(directory / "tokenizer_config.json")
    decoder = config.get("added_tokens_decoder", {}).items()
    named = {token["content"]: token["id"] for token in tokens}
    return named | {token["content"]: int(number) for number, token in decoder}


def mask_token_id(directory):
    """-> by the tokenizer files, or None"""
    token = json_if_there(directory / "tokenizer_config.json").get("mask_token")
    return special_tokens(directory).get(token["content"] if isinstance(token, dict) else token)


def resolve(name_or_dir, patterns=FILES):
    """A key of MODELS, a hub id or a directory -> directory on this machine; hub ids are
    downloaded, at the revision behind an @ if there is one.

    SystemExit for an unknown name.
    """
    source = source_of(name_or_dir)
    if Path(source).is_dir():
        return Path(source)
    hub_id, revision = pinned(source)
    if hub_id.count("/") != 1:
        choices = f"one of {', '.join(MODELS)}, a hub id, or a directory that holds config.json"
        raise SystemExit(f"unknown model {source!r}: use {choices}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # no network, a gated repository
        problem = f"{source} is no directory here and cannot be downloaded ({one_line(error)})"
        raise SystemExit(f"{problem}: give --model a directory that holds it") from error


def source_of(name_or_dir):
    """A name that works on other machines too: a hub id, with its revision if one is named, or the
    absolute path of a directory.
    """
    name, revision = pinned(name_or_dir)
    source = MODELS.get(name, name) + (f"@{revision}" if revision else "")
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def whole_name(name):
    """as --model -> the whole path of a directory, unless its name is a key of MODELS; or itself"""
    return os.path.abspath(name) if name not in MODELS and os.path.isdir(name) else name


def pinned(name_or_dir):
    """ "sdar-8b@v1.0" -> "sdar-8b", "v1.0"; a directory, or a name without a revision -> itself,
    None
    """
    name, _, revision = str(name_or_dir).partition("@")
    return (str(name_or_dir), None) if Path(name_or_dir).is_dir() else (name, revision or None)
