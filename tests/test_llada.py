"""models/llada.py against logits of the official code, log-probabilities against loops, checkpoints, config files, templates.

tests/golden/llada.safetensors holds inputs and logits of the official modelling code; its metadata says where they come from
and how the weights are drawn.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from test_models import HF, assert_same_weights, exits_with_one_line, grads, needs_hf

from models import add_lora, export_weights, llada, load_model, prompt_ids, save_adapter, save_model
from models.checkpoint import build_model, materialize, set_special_tokens, tensor_shapes
from models.lora import adapter_tensors
from models.random_init import TINY_LLADA, byte_tokenizer

GOLDEN = Path(__file__).parent / "golden" / "llada.safetensors"
with safe_open(GOLDEN, "pt") as file:
    CONFIG = json.loads(file.metadata()["config"])
    WANT = {name: file.get_tensor(name) for name in file.keys()}
IDS, PADDED, LONG = (WANT[name].long() for name in ("ids", "padded_ids", "long_ids"))
VALID = WANT["attention_mask"]
# The byte tokenizer's vocabulary at the smallest size.
SMALL = TINY_LLADA | {
    "d_model": 16,
    "mlp_hidden_size": 24,
    "n_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 2,
    "rope_theta": 500000.0,
}
MASK = SMALL["mask_token_id"]
LAYERS = ("q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out")


@torch.no_grad()
def model_of(config=CONFIG, dtype=torch.float32):
    """Weights by the rule of the golden file: norms are not 1, so that swapped ones show."""
    model, stream = materialize(build_model(config), "cpu"), np.random.RandomState(0)
    for _, value in sorted(model.state_dict().items()):
        draw = stream.standard_normal(tuple(value.shape))
        value.copy_(
            torch.from_numpy(1 + 0.2 * draw if draw.ndim == 1 else draw / math.sqrt(draw.shape[1]))
        )
    return set_special_tokens(model.to(dtype))


def largest(got, want):
    return (got.double() - want.double()).abs().max()


# --- the forward -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def golden_error(model, shared_heads):
    """Largest fp32 difference from the official logits: plain rows, padded rows, far positions, shared key heads."""
    return {
        "plain": largest(model.logits(IDS), WANT["logits"]),
        "padded": largest(model.logits(PADDED, VALID)[VALID], WANT["padded_logits"]),
        "far": largest(model.logits(LONG)[:, -16:], WANT["long_logits"]),
        "shared heads": largest(shared_heads.logits(IDS), WANT["gqa_logits"]),
    }


def models_of():
    return model_of(), model_of(CONFIG | {"n_kv_heads": 2})


def test_logits_are_the_official_ones():
    assert 0.9 < WANT["logits"].std() < 1.1 and WANT["logits"].abs().max() > 3
    for case, error in golden_error(*models_of()).items():
        assert error <= 1e-5, (case, error)


def swapped(a, b):
    """A change of a model: two parameters of each block change places."""

    def change(model, monkeypatch):
        for block in model.layers:
            x, y = block.get_submodule(a).weight, block.get_submodule(b).weight
            x.data, y.data = y.data, x.data

    return change


def half_precision_rope(model, monkeypatch):
    exact = llada.rope_tables
    monkeypatch.setattr(
        llada, "rope_tables", lambda *args: [table.bfloat16().float() for table in exact(*args)]
    )


def causal_attention(model, monkeypatch):
    causal = lambda layer, q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    monkeypatch.setattr(llada, "make_attend", lambda *_: causal)


def shifted_logits(model, monkeypatch):
    head = model.head
    model.head = lambda hidden: head(hidden).roll(1, 1)


@pytest.mark.parametrize(
    "change",
    [
        swapped("ff_proj", "up_proj"),
        swapped("attn_norm", "ff_norm"),
        half_precision_rope,
        causal_attention,
        shifted_logits,
    ],
    ids=["gate and up swapped", "norms swapped", "half-precision rope", "causal", "shifted"],
)
def test_the_golden_logits_see_mistakes(change, monkeypatch):
    """Negative controls: every case differs by far more than 1e-5."""
    pair = models_of()
    for model in pair:
        change(model, monkeypatch)
    for case, error in golden_error(*pair).items():
        assert error > 1e-3, (case, error)


@torch.no_grad()
def test_the_golden_logits_see_ignored_padding():
    """The first official files leave padding visible as keys: errors of order 1 on padded rows, none on the full one."""
    error = (model_of().logits(PADDED)[VALID] - WANT["padded_logits"]).abs().amax(1)
    full, left, right = error.split(VALID.sum(1).tolist())
    assert full.max() < 1e-5 and left.max() > 0.5 and right.max() > 0.5


@torch.no_grad()
def test_bf16_logits_stay_near_the_official_ones(monkeypatch):
    """Argmax equal at >= 97 % of 1000 positions, logits within 0.1; rotating in bf16, as other families do, is further away."""
    model = model_of(dtype=torch.bfloat16)
    got = model.logits(IDS)
    assert got.dtype == torch.bfloat16 and largest(got, WANT["bf16_logits"]) <= 0.1
    assert (model.logits(LONG).argmax(-1) == WANT["bf16_long_argmax"]).double().mean() >= 0.97
    error = (got.float() - WANT["bf16_logits"].float()).abs().mean()
    exact = llada.rope_tables
    monkeypatch.setattr(
        llada, "rope_tables", lambda *args: [table.bfloat16() for table in exact(*args)]
    )
    assert (model.logits(IDS).float() - WANT["bf16_logits"].float()).abs().mean() > max(
        2 * error, 1e-3
    )


@torch.no_grad()
def test_every_token_sees_every_other():
    """'Every token sees every other': changing any one, the last too, changes all logits."""
    model, ids = model_of(), IDS[:1]
    before = model.logits(ids)
    for t in range(ids.shape[1]):
        changed = ids.clone()
        changed[0, t] = 2 + (ids[0, t] - 1) % 150
        assert (model.logits(changed) != before).any(-1).all(), t


# --- padding, log-probabilities ----------------------------------------------------------------------------------------------


def ragged(lengths, side, seed=0):
    """Rows of random clean ids, noised at about half of the places -> clean, noisy, score (noised places), valid."""
    T, generator = max(lengths) + 2, torch.Generator().manual_seed(seed)
    clean, valid = (
        torch.zeros(len(lengths), T, dtype=torch.long),
        torch.zeros(len(lengths), T, dtype=torch.bool),
    )
    for i, length in enumerate(lengths):
        first = T - length if side == "left" else 0
        clean[i, first : first + length] = torch.randint(2, MASK, (length,), generator=generator)
        valid[i, first : first + length] = True
    score = (torch.rand(clean.shape, generator=generator) < 0.5) & valid
    return clean, clean.masked_fill(score, MASK), score, valid


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_a_padded_row_equals_the_row_alone(side):
    """Logits and log-probabilities depend neither on padding, nor on what stands on it, nor on other rows."""
    model = model_of(SMALL, torch.float64)
    clean, noisy, score, valid = ragged([17, 1, 9, 13], side)
    logits, logps = model.logits(noisy, valid), model.logps(clean, noisy, score, valid)
    assert logits.isfinite().all()
    for i, row in enumerate(valid):
        alone = model.logits(noisy[i, row][None])[0]
        torch.testing.assert_close(logits[i, row], alone, atol=1e-12, rtol=0)
        alone = model.logps(clean[i, row][None], noisy[i, row][None], score[i, row][None])[0]
        torch.testing.assert_close(logps[i, row], alone, atol=1e-12, rtol=0)
    junk = torch.where(valid, clean, 7), torch.where(valid, noisy, 9)
    assert torch.equal(model.logps(*junk, score, valid), logps)
    # Negative control: padding that is seen does change them.
    assert largest(model.logits(noisy)[valid], logits[valid]) > 0.1
    assert largest(model.logps(clean, noisy, score), logps) > 0.1


def test_positions_are_counted_over_valid_tokens():
    """'position_ids, counted over valid tokens, and block_ids, which are 0'."""
    valid = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    position_ids, block_ids = model_of(SMALL).grid(valid)
    assert (
        position_ids.tolist() == [[0, 0, 0, 1], [0, 1, 2, 2], [0, 1, 2, 3]] and not block_ids.any()
    )


def naive_logps(model, clean, noisy, score, valid, temperature):
    """Row by row: log softmax of all logits but the mask token's -> log-probabilities and entropies of the scored places."""
    out, entropies = [], []
    for i, row in enumerate(valid):
        logits = model.logits(noisy[i, row][None])[0] / temperature
        log_p = torch.cat([logits[:, :MASK], logits[:, MASK + 1 :]], -1).log_softmax(-1)[
            score[i, row]
        ]
        target = clean[i, score[i]]
        out.append(log_p.gather(-1, (target - (target > MASK).long())[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(out), torch.cat(entropies)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logps_and_their_gradients_are_those_of_the_full_logits(side, temperature):
    """'log softmax(logits / temperature), 0 where not scored', to 1e-12 in fp64; gradients of every parameter to 1e-10."""
    model = model_of(SMALL, torch.float64)
    clean, noisy, score, valid = ragged([10, 3, 7], side)
    clean[valid & (clean == 5)] = 260  # a target behind the mask token too
    clean[score & (score.cumsum(1) == 1)] = 261
    logps, entropies = model.logps(
        clean, noisy, score, valid, temperature=temperature, entropy=True
    )
    want, want_entropies = naive_logps(model, clean, noisy, score, valid, temperature)
    assert logps.shape == clean.shape and len(want) == score.sum() > 5
    torch.testing.assert_close(logps[score], want, atol=1e-12, rtol=0)
    torch.testing.assert_close(entropies[score], want_entropies, atol=1e-12, rtol=0)
    assert not logps[~score].any() and not entropies[~score].any() and (want < 0).all()
    a, b = torch.randn(
        2, len(want), generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    got = grads(model, (a * logps[score] + b * entropies[score]).sum())
    want = grads(model, (a * want + b * want_entropies).sum())
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=1e-10, rtol=1e-10, msg=name)
        assert want[name].abs().max() > 1e-4, name


@torch.no_grad()
def test_logps_see_the_noisy_sequence_alone():
    """'given the noisy sequence': a clean token is a target and no input; the mask token's row of the head changes nothing."""
    model = model_of(SMALL, torch.float64)
    clean, noisy, score, valid = ragged([12, 7], "left")
    before = model.logps(clean, noisy, score, valid)
    changed = torch.where(score, clean, 7)
    changed[0, score[0].nonzero()[0]] = 9
    same = model.logps(changed, noisy, score, valid) == before
    assert (~same).sum() == 1 and not same[0, score[0].nonzero()[0]]
    model.lm_head.weight[MASK] *= 50
    assert torch.equal(model.logps(clean, noisy, score, valid), before)


@torch.no_grad()
def test_logps_are_fp32():
    """'-> [B, T] fp32' whatever the weights; without valid_mask all tokens are valid."""
    clean, noisy, score, valid = ragged([20, 20], "left")
    clean, noisy, score, valid = (value[:, 2:] for value in (clean, noisy, score, valid))
    exact = model_of(SMALL, torch.float64).logps(clean, noisy, score, valid)
    single, half = (
        model_of(SMALL, dtype).logps(clean, noisy, score)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert single.dtype == half.dtype == torch.float32
    assert largest(single, exact) < 1e-5 and largest(half, exact) < 0.2


def test_activation_checkpointing_changes_no_gradient():
    model, rows = model_of(SMALL, torch.float64), ragged([10, 3, 7], "left")
    plain = grads(model, model.logps(*rows).sum())
    passes = []
    model.layers[0].attn_norm.register_forward_pre_hook(lambda *_: passes.append(1))
    model.activation_checkpointing = True
    again = grads(model, model.logps(*rows).sum())
    assert len(passes) == 2  # it did compute the layer again
    for name in plain:
        torch.testing.assert_close(again[name], plain[name], atol=1e-14, rtol=1e-12, msg=name)


@pytest.mark.parametrize("padded", [False, True])
def test_nothing_scored_keeps_the_graph(padded):
    """A rank without scored rows takes part in the backward pass: zero gradients, not an error."""
    model = model_of(SMALL)
    clean, noisy, score, valid = ragged([10, 3], "left")
    logps = model.logps(clean, noisy, torch.zeros_like(score), valid if padded else None)
    assert not logps.any()
    logps.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


# --- checkpoints, adapters ---------------------------------------------------------------------------------------------------


def test_a_saved_model_loads_bit_for_bit(tmp_path):
    model = model_of(SMALL)
    save_model(model, tmp_path / "a", byte_tokenizer())
    loaded = load_model(tmp_path / "a")
    assert_same_weights(loaded, model)
    assert load_file(tmp_path / "a/model.safetensors").keys() == model.state_dict().keys()
    assert loaded.checkpoint_config == SMALL
    assert (
        loaded.mask_token_id,
        loaded.eos_token_ids,
        loaded.pad_token_id,
        loaded.block_length,
    ) == (MASK, [256], 256, 4)
    assert torch.equal(loaded.logits(IDS), model.logits(IDS))


def test_the_block_length_is_32_unless_the_config_says_otherwise():
    assert (
        model_of(CONFIG).block_length == 32
        and model_of(CONFIG | {"block_length": 8}).block_length == 8
    )


def test_adapters_go_on_the_layers_of_blocks_and_not_on_the_head(tmp_path):
    """A block's down projection and the head are both called ff_out."""
    model = add_lora(model_of(SMALL), rank=4, alpha=8)
    names = {name.partition(".lora_")[0] for name in adapter_tensors(model)}
    assert names == {f"model.transformer.blocks.{i}.{layer}" for i in range(2) for layer in LAYERS}
    assert type(model.lm_head) is torch.nn.Linear
    assert torch.equal(model.logits(IDS), model_of(SMALL).logits(IDS))
    with torch.no_grad():
        for name, value in adapter_tensors(model).items():
            if "lora_B" in name:
                value.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    assert dict(export_weights(model)).keys() == model_of(SMALL).state_dict().keys()
    save_model(model_of(SMALL), tmp_path / "base", byte_tokenizer())
    save_adapter(model, tmp_path / "adapter", str(tmp_path / "base"), byte_tokenizer())
    merged = load_model(tmp_path / "adapter")
    assert (
        largest(merged.logits(IDS), model.logits(IDS))
        < 1e-5
        < 0.1
        < largest(merged.logits(IDS), model_of(SMALL).logits(IDS))
    )
    head = "model.transformer.ff_out.weight"
    assert torch.equal(merged.state_dict()[head], model_of(SMALL).state_dict()[head])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"activation_type": "swiglu"}, ["activation_type", "swiglu", "silu"]),
        ({"alibi": True}, ["alibi = True"]),
        ({"attention_layer_norm": True}, ["attention_layer_norm = True"]),
        ({"bias_for_layer_norm": True}, ["bias_for_layer_norm = True"]),
        ({"block_group_size": 2}, ["block_group_size = 2"]),
        ({"block_type": "sequential"}, ["block_type", "sequential", "llama"]),
        ({"include_bias": True}, ["include_bias = True"]),
        ({"include_qkv_bias": True}, ["include_qkv_bias = True"]),
        ({"input_emb_norm": True}, ["input_emb_norm = True"]),
        ({"layer_norm_type": "gemma_rms"}, ["layer_norm_type", "gemma_rms", "rms"]),
        ({"layer_norm_with_affine": False}, ["layer_norm_with_affine = False"]),
        ({"multi_query_attention": True}, ["multi_query_attention = True"]),
        ({"residual_dropout": 0.1}, ["residual_dropout = 0.1"]),
        ({"rope": False}, ["rope = False"]),
        ({"rope_full_precision": False}, ["rope_full_precision = False"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn"]),
        ({"scale_logits": True}, ["scale_logits = True"]),
        ({"weight_tying": True}, ["weight_tying = True"]),
        ({"clip_qkv": 8.0}, ["clip_qkv = 8.0"]),  # a key that nobody knows
        ({"n_heads": 3}, ["d_model = 16", "n_heads = 3", "multiple"]),
        ({"n_kv_heads": 4}, ["n_heads = 2", "n_kv_heads = 4", "multiple"]),
        ({"n_kv_heads": None}, ["lacks n_kv_heads"]),
    ],
)
def test_what_the_config_asks_and_we_lack_is_named(change, words):
    with exits_with_one_line(*words):
        build_model(SMALL | change)


SILENT = [
    "activation_type",
    "block_type",
    "layer_norm_type",
    "rope",
    "weight_tying",
]  # where silence means an older architecture
SIZES = ["embedding_size", "d_model", "mlp_hidden_size", "n_layers", "n_heads", "n_kv_heads"]


@pytest.mark.parametrize("key", [*SILENT, *SIZES, "rms_norm_eps", "rope_theta", "mask_token_id"])
def test_a_config_without_a_needed_key_is_named(key):
    with exits_with_one_line("llada", f"lacks {key}"):
        build_model({name: value for name, value in SMALL.items() if name != key})


# --- official files ----------------------------------------------------------------------------------------------------------


def official(name):
    return json.loads((Path(HF) / "LLaDA-8B-Instruct" / name).read_text())


@needs_hf
def test_names_and_sizes_are_those_of_the_official_index():
    """Names equal the weight_map, bf16 bytes equal total_size, shapes as listed."""
    shapes, index = (
        tensor_shapes(build_model(official("config.json"))),
        official("model.safetensors.index.json"),
    )
    assert shapes.keys() == index["weight_map"].keys() and len(shapes) == 291
    assert (
        2 * sum(map(math.prod, shapes.values()))
        == index["metadata"]["total_size"]
        == 2 * 8_015_581_184
    )
    square, gate, norm, end = (4096, 4096), (12288, 4096), (4096,), (126464, 4096)
    block = {name: square for name in ("q_proj", "k_proj", "v_proj", "attn_out")} | {
        "ff_proj": gate,
        "up_proj": gate,
    }
    block |= {"ff_out": gate[::-1], "attn_norm": norm, "ff_norm": norm}
    want = {f"blocks.{i}.{name}": shape for i in range(32) for name, shape in block.items()}
    want |= {"wte": end, "ln_f": norm, "ff_out": end}
    assert shapes == {f"model.transformer.{name}.weight": shape for name, shape in want.items()}


@needs_hf
def test_answers_end_at_the_turn_end_or_the_end_of_text():
    """126348 <|eot_id|> first, then 126081 <|endoftext|>; the mask token is in the tokenizer."""
    model = set_special_tokens(build_model(official("config.json")), Path(HF) / "LLaDA-8B-Instruct")
    assert (model.eos_token_ids, model.pad_token_id) == ([126348, 126081], 126081)
    assert (model.mask_token_id, model.block_length) == (126336, 32)


@needs_hf
def test_a_tokenizer_without_turn_end_or_mask(tmp_path):
    """The Base tokenizer may lack <|eot_id|>: end of text alone ends an answer. One without the mask token is refused."""
    tokens = official("tokenizer_config.json")["added_tokens_decoder"]
    write = lambda *ids: (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {i: token for i, token in tokens.items() if i in ids}})
    )
    write("126081", "126336")
    assert set_special_tokens(build_model(official("config.json")), tmp_path).eos_token_ids == [
        126081
    ]
    write("126081", "126348")
    with exits_with_one_line("mask_token_id 126336"):
        set_special_tokens(build_model(official("config.json")), tmp_path)


@needs_hf
def test_template_golden():
    """Content is trimmed, the text starts with BOS and ends with the header of the answer."""
    tokenizer, facts = byte_tokenizer(), official("tokenizer_config.json")
    tokenizer.chat_template, tokenizer.bos_token = facts["chat_template"], facts["bos_token"]
    render = lambda turns: bytes(
        prompt_ids(tokenizer, turns)
    ).decode()  # the text holds no token of the byte tokenizer
    header = "<|start_header_id|>{}<|end_header_id|>\n\n".format
    turns = [{"role": "user", "content": "Hi "}]
    text = f"<|startoftext|>{header('user')}Hi<|eot_id|>"
    assert render(turns) == text + header("assistant")
    turns += [{"role": "assistant", "content": " A"}, {"role": "user", "content": "B"}]
    text += f"{header('assistant')}A<|eot_id|>{header('user')}B<|eot_id|>"
    assert render(turns) == text + header("assistant")
