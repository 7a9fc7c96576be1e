"""models/dream.py against logits of the official code, its shift, its likelihoods, its files and its tokenizer.

tests/golden/dream.safetensors was written by the official modelling code (modeling_dream.py as in yjyddq/DARE 83ae8a3, SDPA;
that of ZHZisZZ/dllm ca17675, which takes the masks of padded rows, is equal bit for bit on full rows) with transformers 4.57.1,
torch 2.13 on CPU, CONFIG and `golden_weights`. It holds input_ids, logits and bf16_logits of full rows, and for left and right
padding SIDE.input_ids, SIDE.valid and SIDE.logits; logits are those after the official shift, cat([z[:, :1], z[:, :-1]], 1).
CLEANDLLM_HF names a directory with the configs, index files and tokenizers of the official checkpoints.
"""

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import models.dream
from models import add_lora, load_model, load_tokenizer, prompt_ids, save_adapter, save_model
from models.checkpoint import build_model, materialize, set_special_tokens, tensor_shapes
from models.random_init import TINY_CONFIGS, byte_tokenizer

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HF = os.environ.get("CLEANDLLM_HF")
needs_hf = pytest.mark.skipif(not HF, reason="CLEANDLLM_HF is not set")
OFFICIAL = Path(HF or "") / "Dream-v0-Instruct-7B"
GOLDEN = Path(__file__).parent / "golden" / "dream.safetensors"

CONFIG = TINY_CONFIGS["tiny-dream"] | {
    **{
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    **{
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "mask_token_id": 151,
        "eos_token_id": 150,
        "pad_token_id": 150,
    },
}
SMALL = CONFIG | {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 24,
    "mask_token_id": 257,
}
SMALL |= {"eos_token_id": 256, "pad_token_id": 256}
MASK = SMALL["mask_token_id"]


def golden_weights(shapes):
    """{name: shape} -> fp32 tensors, drawn in fp64 in the order of the sorted names with seed 0.

    Norms 1 + 0.2 N(0, 1), biases 0.2 N(0, 1), embedding N(0, 1), head N(0, 4 / fan_in), other matrices N(0, 1 / fan_in): no
    norm and no bias is neutral, and logits are of a trained model's scale.
    """
    generator, weights = torch.Generator().manual_seed(0), {}
    for name in sorted(shapes):
        noise = torch.randn(shapes[name], generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight"):
            value = 1 + 0.2 * noise
        elif name.endswith("bias"):
            value = 0.2 * noise
        elif "embed" in name:
            value = noise
        else:
            value = noise * (2 if "head" in name else 1) / math.sqrt(noise.shape[1])
        weights[name] = value.float()
    return weights


def model_of(config=CONFIG, dtype=torch.float32):
    model = materialize(build_model(config, dtype), "cpu")
    model.load_state_dict(golden_weights(tensor_shapes(model)), strict=True)
    return set_special_tokens(model)


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN)


# --- parity ------------------------------------------------------------------------------------------------------------------


def distance_to_golden(model, golden):
    return (model.logits(golden["input_ids"]) - golden["logits"]).abs().max()


@torch.no_grad()
def test_fp32_logits_are_the_official_ones(golden):
    assert 1 < golden["logits"].std() < 10 and len(golden["logits"].argmax(-1).unique()) > 20
    assert distance_to_golden(model_of(), golden) <= 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_rows_are_the_official_ones(golden, side):
    """Except at the first token of a left-padded row: there the official code takes the hidden state of padding."""
    valid = golden[f"{side}.valid"].bool()
    error = (
        (model_of().logits(golden[f"{side}.input_ids"], valid) - golden[f"{side}.logits"])
        .abs()
        .amax(-1)
    )
    first = valid & (valid.cumsum(1) == 1)
    assert error[valid & ~first].max() <= 1e-5
    assert (error[first] > 1e-2).tolist() == [
        side == "left" and not row[0] for row in valid.tolist()
    ]


@torch.no_grad()
def test_bf16_logits_are_the_official_ones(golden):
    want, got = golden["bf16_logits"], model_of().bfloat16().logits(golden["input_ids"])
    assert got.dtype == want.dtype == torch.bfloat16
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() >= 0.97
    assert (
        got.float() - want.float()
    ).abs().max() <= 0.2  # bf16 steps by 0.06 there: the largest logits are above 8


def swap_norms(model):
    for layer in model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = (
            layer.post_attention_layernorm,
            layer.input_layernorm,
        )


MISTAKES = {
    "no shift": lambda model: setattr(model, "align", lambda hidden, *rest: hidden),
    "double shift": lambda model: setattr(
        model, "align", lambda h, *rest, once=model.align: once(once(h, *rest), *rest)
    ),
    "no q bias": lambda model: [layer.self_attn.q_proj.bias.zero_() for layer in model.layers],
    "no k bias": lambda model: [layer.self_attn.k_proj.bias.zero_() for layer in model.layers],
    "no v bias": lambda model: [layer.self_attn.v_proj.bias.zero_() for layer in model.layers],
    "gate and up swapped": lambda model: [
        setattr(layer.mlp, "gate_proj", up) or setattr(layer.mlp, "up_proj", gate)
        for layer, gate, up in [
            (layer, layer.mlp.gate_proj, layer.mlp.up_proj) for layer in model.layers
        ]
    ],
    "norms swapped": swap_norms,
    "no positions": lambda model: setattr(
        model, "grid", lambda valid: (torch.zeros_like(valid).long(), None)
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@torch.no_grad()
def test_the_golden_logits_see_mistakes(golden, mistake):
    """Negative controls: each is off by a thousand tolerances."""
    model = model_of()
    MISTAKES[mistake](model)
    assert distance_to_golden(model, golden) > 1e-2


@torch.no_grad()
def test_the_golden_logits_see_a_causal_mask(golden, monkeypatch):
    causal = lambda layer, q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    monkeypatch.setattr(models.dream, "make_attend", lambda *_: causal)
    assert distance_to_golden(model_of(), golden) > 1e-2


# --- rows, padding, shift ----------------------------------------------------------------------------------------------------


def ragged(lengths, side, T=None, seed=0):
    """Rows of random clean ids, noised at about half of the places -> clean, noisy, score (noised places), valid."""
    T = T or max(lengths)
    clean, valid = (
        torch.zeros(len(lengths), T, dtype=torch.long),
        torch.zeros(len(lengths), T, dtype=torch.bool),
    )
    generator = torch.Generator().manual_seed(seed)
    for i, length in enumerate(lengths):
        place = {
            "left": range(T - length, T),
            "right": range(length),
            "middle": range((T - length) // 2, (T + length) // 2),
        }
        scattered = torch.randperm(T, generator=generator)[:length].sort().values
        place = torch.tensor(place[side]) if side in place else scattered
        clean[i, place[:length]] = torch.randint(2, MASK, (length,), generator=generator)
        valid[i, place[:length]] = True
    noised = (torch.rand(clean.shape, generator=generator) < 0.5) & valid
    return clean, clean.masked_fill(noised, MASK), noised, valid


SIDES = ["left", "right", "middle", "scattered"]


@pytest.mark.parametrize("side", SIDES)
@torch.no_grad()
def test_padded_rows_equal_single_rows(side):
    """'padding never shifts it', at the first valid token too; what stands on padding does not matter."""
    model = model_of(SMALL, torch.float64)
    clean, noisy, score, valid = ragged([22, 1, 9, 16, 13], side, T=25)
    logits, logps = model.logits(noisy, valid), model.logps(clean, noisy, score, valid)
    assert logits.isfinite().all()
    for i in range(len(clean)):
        row = lambda x, i=i: x[i, valid[i]][None]
        torch.testing.assert_close(
            logits[i, valid[i]], model.logits(row(noisy))[0], atol=1e-12, rtol=0
        )
        torch.testing.assert_close(
            logps[i, valid[i]],
            model.logps(row(clean), row(noisy), row(score))[0],
            atol=1e-12,
            rtol=0,
        )
    junk = torch.where(valid, noisy, 9)
    assert torch.equal(model.logits(junk, valid)[valid], logits[valid])
    assert torch.equal(model.logps(torch.where(valid, clean, 7), junk, score, valid), logps)
    assert (
        model.logits(noisy)[1, valid[1]] - logits[1, valid[1]]
    ).abs().max() > 1e-3  # and the mask does its work


@torch.no_grad()
def test_every_token_reaches_every_row():
    """'Every token sees every other', the last token the logits of the first one."""
    model = model_of(SMALL, torch.float64)
    ids = ragged([11], "right")[0]
    before = model.logits(ids)
    for t in range(11):
        changed = ids.clone()
        changed[0, t] = 2 + ids[0, t] % 200
        assert ((model.logits(changed) - before).abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("side", SIDES)
def test_align_against_a_loop(side):
    """'Row i is that of the last valid token before i; the first valid token keeps its own.' Parts align as the whole does."""
    valid = ragged([12, 1, 5, 9], side, T=12)[3]
    hidden = torch.arange(4 * 12).view(4, 12, 1).expand(4, 12, 2).double()
    model = build_model(SMALL)
    aligned = model.align(hidden, valid)
    for b in range(4):
        place = valid[b].nonzero()[:, 0].tolist()
        for before, here in zip([place[0], *place], place, strict=False):
            assert torch.equal(aligned[b, here], hidden[b, before])
    for start in range(1, 12):
        part = model.align(hidden[:, start - 1 :], valid[:, start - 1 :])[:, 1:]
        exact = (
            valid[:, start:] & valid[:, start - 1 : start]
        )  # rows whose column before is a token
        assert torch.equal(part[exact], aligned[:, start:][exact])


class Identity(models.dream.Dream):
    """Its hidden row i is the one-hot code of token i, and its head turns the code of token x into 30 at token x + 1."""

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = torch.nn.Linear(config.vocab_size, config.vocab_size, bias=False)
        self.lm_head.weight = torch.nn.Parameter(30 * torch.eye(config.vocab_size).roll(1, 0))

    def hidden(self, input_ids, position_ids, attend):
        return F.one_hot(input_ids, self.config.vocab_size).float()


@pytest.mark.parametrize("side", SIDES)
@torch.no_grad()
def test_the_shift_is_applied_exactly_once(side):
    """Tokens count upwards, so that the right row predicts each with certainty; no shift or two of them, hardly any."""
    model = Identity(models.dream.Config.from_dict(SMALL))
    valid = ragged([14, 2, 6, 9], side, T=14)[3]
    ids = 40 + valid.long().cumsum(1)
    later = valid & (valid.long().cumsum(1) > 1)
    assert (model.logits(ids, valid).argmax(-1)[later] == ids[later]).all()
    assert (
        model.logits(ids, valid).argmax(-1)[valid & ~later] == ids[valid & ~later] + 1
    ).all()  # their own row
    assert (model.logps(ids, ids, later, valid)[later] > -1e-3).all()
    for wrong in (
        lambda hidden, *_: hidden,
        lambda hidden, *rest: model.align(model.align(hidden, *rest), *rest),
    ):
        other = Identity(model.config)
        other.align = wrong
        assert (other.logps(ids, ids, later, valid)[later] < -20).float().mean() > 0.5


# --- logps -------------------------------------------------------------------------------------------------------------------


def naive_logps(model, clean, noisy, valid, temperature):
    """log softmax of the full logits of the noisy row without the mask token -> logps, entropies [B, T]"""
    logits = model.logits(noisy, valid) / temperature
    banned = torch.arange(logits.shape[-1]) == MASK
    log_p = logits.masked_fill(banned, -1e30).log_softmax(-1)
    return log_p.gather(-1, clean[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("kind", ["noised", "valid", "one", "first row"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@torch.no_grad()
def test_logps_are_the_log_softmax_of_logits(kind, temperature):
    """'log softmax(logits / temperature), 0 where not scored', 'the mask token has probability 0'."""
    model = model_of(SMALL, torch.float64)
    clean, noisy, noised, valid = ragged([22, 3, 9], "left")
    rows = torch.arange(3)[:, None]
    score = {
        "noised": noised,
        "valid": valid,
        "one": (rows == 1) & (torch.arange(22) == 19),
        "first row": noised & (rows == 0),
    }
    score = score[kind] & valid
    want, want_entropies = naive_logps(model, clean, noisy, valid, temperature)
    logps, entropies = model.logps(
        clean, noisy, score, valid, temperature=temperature, entropy=True
    )
    torch.testing.assert_close(logps, want * score, atol=1e-12, rtol=0)
    torch.testing.assert_close(entropies, want_entropies * score, atol=1e-12, rtol=0)
    assert score.any() and (logps[score] < 0).all()
    model.lm_head.weight[MASK] *= 50
    assert torch.equal(model.logps(clean, noisy, score, valid, temperature=temperature), logps)


def test_one_pass_and_the_head_on_scored_rows(monkeypatch):
    """Masked families do one pass over noisy_ids, and 'the head sees scored rows alone'."""
    model, seen = model_of(SMALL), []
    clean, noisy, score, valid = ragged([10, 3, 7], "left")
    hidden, linear_logps = model.hidden, models.dream.linear_logps
    model.hidden = lambda ids, *rest: seen.append(ids) or hidden(ids, *rest)
    rows_of = lambda rows, *rest, **kwargs: seen.append(rows) or linear_logps(rows, *rest, **kwargs)
    monkeypatch.setattr(models.dream, "linear_logps", rows_of)
    logps = model.logps(clean, noisy, score, valid)
    assert len(seen) == 2 and torch.equal(seen[0], noisy) and seen[1].shape == (score.sum(), 32)
    assert logps.dtype == model.bfloat16().logps(clean, noisy, score, valid).dtype == torch.float32


def grads(model, loss):
    return dict(
        zip(
            dict(model.named_parameters()),
            torch.autograd.grad(loss, list(model.parameters())),
            strict=True,
        )
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_of_logps_against_full_logits(checkpointing):
    """Of a weighted sum of log-probabilities and entropies, to 1e-10 of autograd in fp64, for every parameter."""
    model = model_of(SMALL, torch.float64)
    clean, noisy, score, valid = ragged([10, 3, 7], "left")
    a, b = (
        torch.randn(
            2, *clean.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64
        )
        * score
    )
    want, want_entropies = naive_logps(model, clean, noisy, valid, 0.8)
    want = grads(model, (a * want + b * want_entropies).sum())
    passes = []
    model.layers[0].register_forward_pre_hook(lambda *_: passes.append(1))
    model.activation_checkpointing = checkpointing
    logps, entropies = model.logps(clean, noisy, score, valid, temperature=0.8, entropy=True)
    got = grads(model, (a * logps + b * entropies).sum())
    assert len(passes) == 1 + checkpointing
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=1e-10, rtol=1e-10, msg=name)
        assert want[name].abs().max() > 1e-4, name


@pytest.mark.parametrize("padded", [False, True])
def test_nothing_scored_keeps_the_graph(padded):
    """A rank without scored rows takes part in the backward pass: zero gradients, not an error."""
    model = model_of(SMALL)
    clean, noisy, score, valid = ragged([10, 3], "left")
    logps = model.logps(clean, noisy, torch.zeros_like(score), valid if padded else None)
    assert torch.equal(logps, torch.zeros(2, 10))
    logps.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


# --- configs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, words",
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.*yarn"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"use_mrope": True}, "use_mrope"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ({"head_dim": 128}, "head_dim.*128"),
        ({"num_attention_heads": 5}, "hidden_size = 64.*num_attention_heads = 5"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4.*num_key_value_heads = 3"),
        ({"num_experts": 8}, "num_experts"),
    ],
)
def test_what_the_config_asks_and_we_lack_is_named(change, words):
    with pytest.raises(SystemExit, match=words):
        build_model(CONFIG | change)


@pytest.mark.parametrize(
    "key", ["rope_theta", "mask_token_id", "num_key_value_heads", "rms_norm_eps"]
)
def test_a_config_without_a_needed_key_is_named(key):
    with pytest.raises(SystemExit, match=f"Dream.*lacks {key}"):
        build_model({name: value for name, value in CONFIG.items() if name != key})


def test_config_facts():
    model = build_model({key: value for key, value in CONFIG.items() if key != "block_length"})
    assert (model.attention, model.mask_token_id, model.block_length, model.turn_end) == (
        "bidirectional",
        151,
        32,
        "<|im_end|>",
    )
    assert build_model(CONFIG | {"block_length": 8}).block_length == 8
    assert (model.fp32_modules, len(model.layers), model.config.head_dim) == ([], 2, 16)
    position_ids, block_ids = model.grid(torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 1, 0]]).bool())
    assert position_ids.tolist() == [[0, 0, 0, 1, 2], [0, 1, 1, 2, 2]] and not block_ids.any()


# --- official files ----------------------------------------------------------------------------------------------------------


@needs_hf
def test_names_shapes_and_bytes_are_those_of_the_official_index():
    """Key set, shapes, byte total."""
    index = json.loads((OFFICIAL / "model.safetensors.index.json").read_text())
    shapes = tensor_shapes(build_model(json.loads((OFFICIAL / "config.json").read_text())))
    assert shapes.keys() == index["weight_map"].keys() and len(shapes) == 339
    assert (
        sum(map(math.prod, shapes.values())) == 7_615_616_512 == index["metadata"]["total_size"] / 2
    )
    d, kv, f, vocab = 3584, 512, 18944, 152064
    attention = {"q_proj": (d, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, d)}
    want = {
        "model.embed_tokens.weight": (vocab, d),
        "lm_head.weight": (vocab, d),
        "model.norm.weight": (d,),
    }
    for i in range(28):
        block = f"model.layers.{i}."
        want |= {f"{block}self_attn.{name}.weight": shape for name, shape in attention.items()}
        want |= {
            f"{block}self_attn.{name}.bias": attention[name][:1]
            for name in ("q_proj", "k_proj", "v_proj")
        }
        want |= {f"{block}mlp.{name}.weight": (f, d) for name in ("gate_proj", "up_proj")}
        want |= {f"{block}mlp.down_proj.weight": (d, f)}
        want |= {
            f"{block}{name}.weight": (d,)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
    assert shapes == want


@needs_hf
def test_official_special_tokens():
    model = set_special_tokens(
        build_model(json.loads((OFFICIAL / "config.json").read_text())), OFFICIAL
    )
    assert (model.eos_token_ids, model.pad_token_id, model.mask_token_id) == (
        [151645, 151643],
        151643,
        151666,
    )


@pytest.fixture(scope="module")
def dream_tokenizer():
    return load_tokenizer(OFFICIAL)


TEXTS = {  # ids of the official slow tokenizer, tokenization_dream.py as in yjyddq/DARE 83ae8a3
    "": [],
    "Hello world": [9707, 1879],
    " Hello  world\n\n\t 12345.6": [21927, 220, 1879, 271, 197, 220, 16, 17, 18, 19, 20, 13, 21],
    "e\u0301te\u0301 漢字 🙂 don't": [38783, 6567, 120, 95, 18600, 27484, 1513, 944],
    "a<|mask|><|mask|> <|im_end|>\n<|endoftext|>b": [
        64,
        151666,
        151666,
        220,
        151645,
        198,
        151643,
        65,
    ],
    "def f(x):\n    return x**2  # ok\n": [
        750,
        282,
        2075,
        982,
        262,
        470,
        856,
        334,
        17,
        220,
        671,
        5394,
        198,
    ],
    "<tool_call>{}</tool_call>": [151657, 6257, 151658],
}


@needs_hf
def test_dream_tokens(dream_tokenizer, tmp_path):
    """Loaded without remote code, from the official files and from those that we save; ids are the official tokenizer's."""
    ids = {
        "<|mask|>": 151666,
        "<|beginoftext|>": 151665,
        "<|im_end|>": 151645,
        "<|im_start|>": 151644,
        "<|endoftext|>": 151643,
    }
    (tmp_path / "config.json").write_text((OFFICIAL / "config.json").read_text())
    dream_tokenizer.save_pretrained(tmp_path)
    for tokenizer in (dream_tokenizer, load_tokenizer(tmp_path)):
        assert {token: tokenizer.convert_tokens_to_ids(token) for token in ids} == ids
        assert (tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
            151666,
            151643,
            151643,
        )
        assert len(tokenizer) == 151667
        for text, want in TEXTS.items():
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == want
        assert tokenizer.decode([9707, 1879, 151666]) == "Hello world<|mask|>"


@needs_hf
def test_dream_template_golden(dream_tokenizer):
    """A default system turn, no token before it, 'Hi ' keeps its space."""
    ids = prompt_ids(dream_tokenizer, [{"role": "user", "content": "Hi "}])
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    assert (
        dream_tokenizer.decode(ids)
        == system + "<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 151644 and ids[-3:] == [151644, 77091, 198]
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B"},
    ]
    assert dream_tokenizer.decode(prompt_ids(dream_tokenizer, turns)) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n<|im_start|>assistant\n"
    )


# --- checkpoints and LoRA ----------------------------------------------------------------------------------------------------


def test_a_saved_model_loads_bit_for_bit(tmp_path):
    model = model_of(SMALL)
    save_model(model, tmp_path / "a", byte_tokenizer())
    loaded = load_model(tmp_path / "a")
    held = load_file(tmp_path / "a/model.safetensors")
    assert (
        held.keys() == loaded.state_dict().keys() == tensor_shapes(model).keys()
        and len(held) == 3 + 2 * 12
    )
    assert all(
        torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items()
    )
    assert loaded.checkpoint_config == SMALL and (loaded.eos_token_ids, loaded.pad_token_id) == (
        [256],
        256,
    )
    held["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(32)
    del held["model.layers.0.self_attn.k_proj.bias"]
    models.checkpoint.save_file(held, tmp_path / "a/model.safetensors", {"format": "pt"})
    with pytest.raises(SystemExit, match="extra .*o_proj.bias.*missing .*k_proj.bias"):
        load_model(tmp_path / "a")


def test_tiny_dream_is_built_in_the_process():
    model, tokenizer = load_model("tiny-dream"), load_tokenizer("tiny-dream")
    logits = model.logits(torch.tensor([tokenizer("1+1")["input_ids"]]))
    assert (
        logits.shape == (1, 3, 264)
        and logits.isfinite().all()
        and tokenizer.mask_token_id == model.mask_token_id
    )


def test_lora(tmp_path):
    """Adapters on all seven linear layers of every block, none on the head; biases stay frozen; saved adapters load merged."""
    save_model(model_of(SMALL), tmp_path / "base", byte_tokenizer())
    model = load_model(tmp_path / "base", dtype=torch.float64)
    clean, noisy, score, valid = ragged([10, 3, 7], "left")
    before = model.logps(clean, noisy, score, valid)
    add_lora(model, rank=2, alpha=4, dtype=torch.float64)
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    assert len(adapted) == 7 * 2 and all(name.startswith("model.layers.") for name in adapted)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        f"{name}.lora_{part}.default.weight" for name in adapted for part in "AB"
    }
    assert torch.equal(model.logps(clean, noisy, score, valid), before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    after = model.logps(clean, noisy, score, valid)
    after.sum().backward()
    assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.requires_grad)
    save_adapter(model, tmp_path / "adapter", str(tmp_path / "base"), byte_tokenizer())
    merged = load_model(tmp_path / "adapter", dtype=torch.float64).logps(clean, noisy, score, valid)
    torch.testing.assert_close(merged, after, atol=1e-5, rtol=0)  # merged in fp32
    assert (after - before).abs().max() > 0.01
