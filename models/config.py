"""config.json -> the dataclass of an architecture. Refuses, by key, what a model file lacks."""

from dataclasses import MISSING, asdict, dataclass, fields

import torch


@dataclass(frozen=True)
class Objective:
    """How a family is trained on answers; algos/sft.py computes it (docs/algos/sft.md).

    Each answer gets one t ~ U(t_min, t_max). Each of its tokens is masked with probability t, and
    masked tokens are scored. The defaults are those of most families.
    """

    # "answers": mean over answers, each the mean of its tokens; "tokens": over answer tokens;
    # "masked"
    mean: str = "tokens"
    t_min: float = 1e-3
    t_max: float = 1.0
    # of a masked token: "1/t"; "1"; "1/n", for blocks: the mean of 1/t given that n of its block's
    # answer tokens are masked, (their number + 1) / n, which varies less
    weight: str = "1/t"
    has_cart: bool = False  # offers context-adaptive weights in place of 1/t (Dream)


class Keys:
    """A dataclass of the keys of config.json that an architecture reads.

    fixed: keys with a single supported value, or a list of it; no_effect: keys that may hold
    anything; needed: keys that must be stated, besides the fields without a default. Any other key
    must be empty (None, False, 0, "" or []).
    """

    fixed, no_effect, needed = {}, "", ()
    tie_word_embeddings = False
    # Norms round to the model's dtype before they multiply with their weight, or once, after it.
    round_first = True

    def to_dict(self):
        """As transformers' configurations have it, which peft 0.14 calls."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw):
        """raw: content of config.json. SystemExit names missing keys and everything that is not
        implemented.
        """
        raw = {name: value for name, value in raw.items() if value is not None}  # null: the default
        fixed = {"layer_types": "full_attention"} | cls.fixed
        # transformers 5 writes rope_theta, rope_scaling and the rotary width into rope_parameters.
        family, rope = architecture(raw), raw.pop("rope_parameters", {})
        rope = rope or raw.pop("rope_scaling", {})
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raw[f"rope_{kind}"], rope = rope, {k: rope[k] for k in rope if k == "rope_theta"}
        raw |= {name: value for name, value in rope.items() if name not in ("rope_type", "type")}
        own = {f.name: f for f in fields(cls)}
        needed = [*(name for name, f in own.items() if f.default is MISSING), *cls.needed]
        if missing := [name for name in needed if name not in raw]:
            raise SystemExit(f"config.json of a {family} model lacks {', '.join(missing)}")
        allowed = {*own, *NO_EFFECT.split(), *cls.no_effect.split()}
        for name, value in raw.items():
            if name in fixed:
                values = value if isinstance(value, list) else [value]
                if any(one != fixed[name] for one in values):
                    only = f"{family} models are implemented with {fixed[name]!r}"
                    raise SystemExit(f"config.json has {name} = {value!r}; {only}")
            elif value and name not in allowed:
                lacking = f"which is not implemented for {family} models"
                raise SystemExit(f"config.json has {name} = {value!r}, {lacking}")
        return cls(**{name: raw[name] for name in own if name in raw})


@dataclass(frozen=True)
class DecoderKeys(Keys):
    """Those of Hugging Face's decoders: all families but LLaDA. head_dim: hidden_size / heads where
    config.json states none.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float
    rope_theta: float

    fixed = {"hidden_act": "silu"}

    def __post_init__(self):
        if not getattr(self, "head_dim", 0):
            head_dim = self.hidden_size // self.num_attention_heads
            object.__setattr__(self, "head_dim", head_dim)


# model_type of models that only evaluations run (rollout/autoregressive.py)
AUTOREGRESSIVE = "qwen2", "qwen3", "llama"
# Keys of any config.json that change no logit.
NO_EFFECT = (
    "_name_or_path architectures attention_dropout attn_implementation auto_map bos_token_id dtype "
    "eos_token_id initializer_range max_position_embeddings max_window_layers model_type "
    "pad_token_id sliding_window torch_dtype transformers_version use_cache"
)


# model_type of config.json, or what `architecture` calls it -> file and class
ARCHITECTURES = {
    "llada": "llada.LLaDA",
    "lladamoe": "llada_moe.LLaDAMoE",
    "Dream": "dream.Dream",
    "sdar": "sdar.SDAR",
    "sdar_moe": "sdar.SDAR",
    "llada2_moe": "llada2.LLaDA2",
    "a2d-masked": "a2d.A2DMasked",
    "a2d-block": "a2d.A2DBlock",
}
A2D = tuple(f"a2d-{kind}" for kind in AUTOREGRESSIVE)
MODEL_TYPES = [*(kind for kind in ARCHITECTURES if "a2d" not in kind), *A2D]


def architecture(raw):
    """raw: content of config.json -> its model_type; "lladamoe" for LLaDA-MoE, whose official files
    say "llada" too; of an a2d model its attention. SystemExit for others than MODEL_TYPES.
    """
    kind = raw.get("model_type")
    if kind not in MODEL_TYPES:  # a damaged one may be no string
        advice = f"supported are {', '.join(MODEL_TYPES)}"
        if kind in AUTOREGRESSIVE:
            advice = "it is autoregressive: python models/from_ar.py converts it"
        if "script" in raw:
            advice = "it is that of a run, whose weights are in its checkpoints/"
        raise SystemExit(f"config.json has model_type {kind!r}; {advice}")
    if kind in A2D:
        if type(size := raw.get("block_size")) is not int or size < 0:
            add = "block_size: 0 if its attention is bidirectional, else the length of its blocks"
            raise SystemExit(f"config.json of an {kind} model has block_size {size}; add {add}")
        return "a2d-block" if size else "a2d-masked"
    return "lladamoe" if kind == "llada" and "num_experts" in raw else kind


def stored_dtype(raw):
    """raw: content of config.json -> dtype of its weights. SystemExit if it is no floating
    dtype.
    """
    name = raw.get("torch_dtype") or raw.get("dtype") or "float32"
    if name not in ("float64", "float32", "float16", "bfloat16"):
        allowed = "weights are kept in float32, bfloat16, float16 or float64"
        raise SystemExit(f"config.json has torch_dtype = {name!r}; {allowed}")
    return getattr(torch, name)
