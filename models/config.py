"""config.json -> the dataclass of an architecture. What a file does not implement is refused by name, never ignored."""

from dataclasses import MISSING, fields

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
    rope = raw.get("rope_parameters") or {}  # where transformers 5 writes rope_theta and rope_scaling
    raw = {key: value for key, value in raw.items() if key != "rope_parameters"}
    if "rope_theta" in rope:
        raw = {"rope_theta": rope["rope_theta"]} | raw
    if rope.get("rope_type", "default") != "default":
        raw["rope_scaling"] = rope
    required = [f.name for f in fields(cls) if f.default is MISSING]
    if missing := [name for name in required if raw.get(name) is None]:
        raise SystemExit(f"config.json of a {family} model lacks {', '.join(missing)}")
    own = {f.name for f in fields(cls)}
    for name, value in raw.items():
        if name in fixed and value != fixed[name]:
            raise SystemExit(f"config.json has {name} = {value!r}; {family} models are implemented with {fixed[name]!r}")
        if name not in own and name not in fixed and name not in NO_EFFECT and name not in no_effect and value:
            raise SystemExit(f"config.json has {name} = {value!r}, which is not implemented for {family} models")
    return cls(**{name: raw[name] for name in own if name in raw})
