"""config.json -> the dataclass of an architecture. What a file does not implement is refused by name, never ignored."""

from dataclasses import MISSING, dataclass, fields
from typing import Literal

import torch


@dataclass(frozen=True)
class Objective:
    """How a family is trained on answers, as model files state it and algos/sft.py computes it (docs/algos/sft.md).

    Each answer gets one t ~ U(t_min, t_max); each of its tokens is masked with probability t, and scored where it is masked.
    """

    t_min: float
    t_max: float
    weight: Literal["1/t", "1"]  # of a masked token
    mean: Literal[
        "answers", "tokens", "masked"
    ]  # over answers, each the mean of its tokens; over answer tokens; over masked ones
    tail: Literal[
        "drawn", "block"
    ]  # end tokens behind an answer, part of it: a drawn number; up to the end of its block
    has_cart: bool = False  # context-adaptive weights may stand in for 1/t (Dream)


# Keys of any config.json that change no logit.
NO_EFFECT = {
    "_name_or_path", "architectures", "attention_dropout", "attn_implementation", "auto_map", "bos_token_id", "dtype",
    "eos_token_id", "initializer_range", "max_position_embeddings", "max_window_layers", "model_type", "pad_token_id",
    "sliding_window", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


def read_config(cls, raw, fixed, no_effect=()):
    """raw: content of config.json -> cls, whose fields are the keys that the architecture reads.

    fixed {key: value}: keys that have one supported value; no_effect: keys that may hold anything. Any other key must be empty
    (None, False, 0, "" or []). SystemExit names missing keys and everything that is not implemented.
    """
    family = raw.get("model_type")
    rope = (
        raw.get("rope_parameters") or {}
    )  # where transformers 5 writes rope_theta, rope_scaling and the rotary width
    if not isinstance(rope, dict):
        raise SystemExit(f"config.json has rope_parameters = {rope!r}, which is no object")
    raw = {key: value for key, value in raw.items() if key != "rope_parameters"}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raw["rope_scaling"] = rope
    for name, value in rope.items():
        if name not in ("rope_type", "type") and raw.setdefault(name, value) != value:
            raise SystemExit(
                f"config.json has {name} = {raw[name]!r} and, in rope_parameters, {value!r}"
            )
    required = [f.name for f in fields(cls) if f.default is MISSING]
    if missing := [name for name in required if raw.get(name) is None]:
        raise SystemExit(f"config.json of a {family} model lacks {', '.join(missing)}")
    own = {f.name for f in fields(cls)}
    for name, value in raw.items():
        if name in fixed and value != fixed[name]:
            raise SystemExit(
                f"config.json has {name} = {value!r}; {family} models are implemented with {fixed[name]!r}"
            )
        if (
            name not in own
            and name not in fixed
            and name not in NO_EFFECT
            and name not in no_effect
            and value
        ):
            raise SystemExit(
                f"config.json has {name} = {value!r}, which is not implemented for {family} models"
            )
    raw = {
        name: value for name, value in raw.items() if value is not None
    }  # null: the default, as if it were not there
    for f in fields(cls):
        value, least = (
            raw.get(f.name, f.default),
            0 if f.default == 0 or f.name.endswith("_id") else 1,
        )
        if f.type in ("int", int) and (type(value) is not int or value < least):
            raise SystemExit(
                f"config.json has {f.name} = {value!r}: {family} models need a whole number of at least {least}"
            )
        if f.type in ("float", float) and type(value) not in (int, float):
            raise SystemExit(f"config.json has {f.name} = {value!r}, which is no number")
    if raw.get("layer_types") and set(raw["layer_types"]) != {"full_attention"}:
        raise SystemExit(
            f"config.json has layer_types = {raw['layer_types']!r}; {family} models have full attention alone"
        )
    return cls(**{name: raw[name] for name in own if name in raw})


def stored_dtype(raw):
    """raw: content of config.json -> the dtype in which its weights are kept. SystemExit if it is no floating type of torch."""
    name = raw.get("torch_dtype") or raw.get("dtype") or "float32"
    if name not in ("float64", "float32", "float16", "bfloat16"):
        raise SystemExit(
            f"config.json has torch_dtype = {name!r}; weights are kept in float32, bfloat16, float16 or float64"
        )
    return getattr(torch, name)
