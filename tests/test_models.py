"""models/: SDAR against transformers' Qwen3, masks and log-probabilities against loops, checkpoints in and out, templates.

CLEANDLLM_HF names a directory with the configs, index files and tokenizers of the official checkpoints (SDAR-4B-Chat, ...);
tests that need it are skipped without it.
"""

import json
import math
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import models.checkpoint
from models import (
    attention,
    export_weights,
    load_model,
    load_tokenizer,
    prompt_ids,
    random_init,
    save_model,
)
from models.checkpoint import build_model, tensor_names
from models.random_init import SPECIAL_TOKENS, TINY_SDAR, byte_tokenizer, random_model

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HF = os.environ.get("CLEANDLLM_HF")
needs_hf = pytest.mark.skipif(not HF, reason="CLEANDLLM_HF is not set")

# head_dim is not hidden / heads
CONFIG = TINY_SDAR | {
    **{
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    **{
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_theta": 1000000,
        "mask_token_id": 151,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
}
SMALL = CONFIG | {
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 24,
    "head_dim": 8,
    "mask_token_id": 257,
}
MASK = SMALL["mask_token_id"]


@torch.no_grad()
def model_of(config=CONFIG, dtype=torch.float32, seed=0):
    """Weights: matrices N(0, 1 / fan_in), norms 1 + 0.2 N(0, 1), so that swapped norms show."""
    model = random_model(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for value in model.state_dict().values():
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        value.copy_(1 + 0.2 * noise if value.dim() == 1 else noise / math.sqrt(value.shape[1]))
    embedding = model.state_dict()["model.embed_tokens.weight"]
    embedding.mul_(math.sqrt(config["hidden_size"]))
    if not config["tie_word_embeddings"]:
        model.state_dict()["lm_head.weight"].mul_(2)
    model.eos_token_ids, model.pad_token_id = [1], 0
    return model


def random_ids(B, T, vocab, seed=0):
    return torch.randint(2, vocab - 1, (B, T), generator=torch.Generator().manual_seed(seed))


# --- the forward -------------------------------------------------------------------------------------------------------------


def qwen3(model, attention="eager", **changes):
    """transformers' Qwen3 with the same weights, loaded strictly by name."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    keys = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    raw = model.checkpoint_config
    config = {
        key: raw[key]
        for key in [*keys.split(), "rms_norm_eps", "rope_theta", "tie_word_embeddings"]
    }
    reference = Qwen3ForCausalLM(
        Qwen3Config(**config | changes, attn_implementation=attention)
    ).eval()
    weights = model.state_dict()
    assert weights.keys() == reference.state_dict().keys()
    reference.load_state_dict(weights, strict=True)
    return reference


def additive(visible):
    """[T, T] bool -> 4-D additive mask."""
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[
        None, None
    ]


def block_causal(T, n):
    return torch.tensor([[k // n <= q // n for k in range(T)] for q in range(T)])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"block_size": 5}, {"num_key_value_heads": 4}, {"num_attention_heads": 6, "head_dim": 16}],
)
@torch.no_grad()
def test_logits_equal_those_of_qwen3_under_a_block_causal_mask(attention, changes):
    """fp32 logits within 1e-5 of Qwen3's, at lengths that are and are not multiples of the block."""
    model = model_of(CONFIG | changes)
    reference, n = qwen3(model, attention), model.block_length
    for T in (1, 3, n, 22, 24, 61):
        ids = random_ids(2, T, 150, seed=T)
        want = reference(
            input_ids=ids, attention_mask=additive(block_causal(T, n)).expand(2, 1, T, T)
        ).logits
        got = model.logits(ids)
        assert got.dtype == torch.float32 and 1 < want.std() < 10
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_comparison_with_qwen3_sees_mistakes():
    """Negative controls: a causal mask, another block length, another theta and swapped norms differ by far more than 1e-5."""
    model, ids = model_of(), random_ids(2, 22, 150)
    logits, causal = model.logits(ids), torch.ones(22, 22, dtype=torch.bool).tril()
    far = lambda reference, visible: (
        (reference(input_ids=ids, attention_mask=additive(visible)).logits - logits).abs().max()
        > 1e-2
    )
    reference, right = qwen3(model), block_causal(22, 4)
    assert not far(reference, right)
    assert (
        far(reference, causal)
        and far(reference, block_causal(22, 8))
        and far(reference, torch.ones_like(right))
    )
    assert far(qwen3(model, rope_theta=10000), right)
    for a, b in [
        ("self_attn.q_norm", "self_attn.k_norm"),
        ("input_layernorm", "post_attention_layernorm"),
    ]:
        reference = qwen3(model)
        for layer in reference.model.layers:
            x, y = layer.get_submodule(a).weight, layer.get_submodule(b).weight
            (
                x.copy_(y),
                y.copy_(
                    dict(model.named_parameters())[
                        f"model.layers.{layer.self_attn.layer_idx}.{a}.weight"
                    ]
                ),
            )
        assert far(reference, right), (a, b)


@torch.no_grad()
def test_a_token_sees_its_own_block_and_earlier_ones_only():
    """'A token sees every token of its own block ... and of the blocks before it': changing one changes no earlier block."""
    model, ids = model_of(), random_ids(1, 14, 150)
    before = model.logits(ids)
    for t in range(14):
        changed = ids.clone()
        changed[0, t] = (changed[0, t] + 1) % 150
        after = model.logits(changed)
        touched = (after != before).any(-1)[0]
        assert touched.tolist() == [q // 4 >= t // 4 for q in range(14)]


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_does_not_change_logits(side):
    """'positions and block grid follow valid_mask, so padding never shifts them': padded rows equal unpadded ones."""
    model, T = model_of(CONFIG, torch.float64), 23
    ids, valid = torch.zeros(4, T, dtype=torch.long), torch.zeros(4, T, dtype=torch.bool)
    rows = [random_ids(1, length, 150, seed=length)[0] for length in (1, 6, 13, T)]
    for i, row in enumerate(rows):
        place = slice(T - len(row), T) if side == "left" else slice(0, len(row))
        ids[i, place], valid[i, place] = row, True
    padded = model.logits(ids, valid)
    assert padded.isfinite().all()
    for i, row in enumerate(rows):
        torch.testing.assert_close(
            padded[i, valid[i]], model.logits(row[None])[0], atol=1e-12, rtol=0
        )
    shifted = model.logits(ids)  # negative control: without the mask it does change
    assert (
        shifted[1, valid[1]] - model.logits(rows[1][None])[0]
    ).abs().max() > 1e-3 or side == "right"


@torch.no_grad()
def test_bf16_models_compute_in_bf16_with_fp32_norms_and_angles():
    """Logits come 'in the dtype of the model' and stay near fp32 at far positions, where a rounded angle would be noise."""
    model, half = model_of(), model_of().bfloat16()
    ids = random_ids(1, 600, 150)
    want, got = model.logits(ids), half.logits(ids)
    assert got.dtype == torch.bfloat16
    error = (got.float() - want).abs()
    assert error[0, -100:].mean() < 2 * error[0, :100].mean() < 0.2


# --- masks -------------------------------------------------------------------------------------------------------------------


def grids():
    """(block numbers, validity, block length) of left-padded, right-padded and full rows, most lengths not multiples of n."""
    for n in (1, 3, 4):
        for T in (1, 4, 10, 11):
            lengths = [T, max(1, T - 3), max(1, T // 2), 1]
            left = torch.tensor([[t >= T - length for t in range(T)] for length in lengths])
            for valid in (left, left.flip(1)):
                yield ((valid.long().cumsum(1) - 1).clamp(min=0)) // n, valid, n


def test_block_causal_mask_against_loops():
    """'a query sees the valid keys of its own block and of earlier ones'; padding sees something, never nothing."""
    for block, valid, _ in grids():
        mask = attention.block_causal(block, valid).dense()
        B, T = block.shape
        for b in range(B):
            for q in range(T):
                for k in range(T):
                    if valid[b, q]:
                        assert mask[b, q, k] == bool(valid[b, k] and block[b, k] <= block[b, q]), (
                            b,
                            q,
                            k,
                        )
        assert mask.any(-1).all()


def test_two_copy_mask_against_loops():
    """'noisy sees noisy keys of its own block and clean keys of earlier blocks; clean sees clean keys up to its own block'."""
    for block, valid, _ in grids():
        B, T = block.shape
        for start in sorted({0, 1, T // 2, T - 1} & set(range(T))):
            mask = attention.two_copy(block, valid, start).dense()
            columns = [(True, t) for t in range(start, T)] + [(False, t) for t in range(T)]
            assert mask.shape == (B, len(columns), len(columns)) and mask.any(-1).all()
            for b in range(B):
                for i, (q_noisy, q) in enumerate(columns):
                    for j, (k_noisy, k) in enumerate(columns):
                        if not valid[b, q]:
                            continue
                        if q_noisy and k_noisy:
                            want = block[b, q] == block[b, k]
                        elif q_noisy:
                            want = block[b, k] < block[b, q]
                        else:
                            want = not k_noisy and block[b, k] <= block[b, q]
                        assert mask[b, i, j] == bool(want and valid[b, k]), (
                            b,
                            start,
                            columns[i],
                            columns[j],
                        )


def test_two_copy_mask_row_sums():
    """A noised row of block b sees min(N, L - bN) + bN keys, a clean row min((b + 1)N, L)."""
    for L, n in [(22, 4), (3, 4), (12, 4), (7, 3)]:
        block = (torch.arange(L) // n)[None]
        sums = (
            attention.two_copy(block, torch.ones(1, L, dtype=torch.bool), 0)
            .dense()[0]
            .sum(-1)
            .tolist()
        )
        noisy = [min(n, L - t // n * n) + t // n * n for t in range(L)]
        assert sums == noisy + [min((t // n + 1) * n, L) for t in range(L)]


# --- logps -------------------------------------------------------------------------------------------------------------------


def ragged(lengths, side, T=None, seed=0):
    """Rows of random clean ids, noised at about half of the places -> clean, noisy, score (noised places), valid."""
    T = T or max(lengths)
    clean, valid = (
        torch.zeros(len(lengths), T, dtype=torch.long),
        torch.zeros(len(lengths), T, dtype=torch.bool),
    )
    generator = torch.Generator().manual_seed(seed)
    for i, length in enumerate(lengths):
        first = {"left": T - length, "right": 0, "ragged": (T - length) // 2}[side]
        clean[i, first : first + length] = torch.randint(2, MASK, (length,), generator=generator)
        valid[i, first : first + length] = True
    noised = (torch.rand(clean.shape, generator=generator) < 0.5) & valid
    return clean, clean.masked_fill(noised, MASK), noised, valid


def naive_logps(model, clean, noisy, score, valid, temperature=1.0):
    """Block by block: a block-causal pass over [clean earlier blocks, noised block], softmax of all logits but the mask's."""
    n, out, entropies = model.block_length, {}, {}
    for b in range(len(clean)):
        place = valid[b].nonzero()[:, 0].tolist()
        for start in range(0, len(place), n):
            here = place[start : start + n]
            if not score[b, here].any():
                continue
            logits = (
                model.logits(torch.cat([clean[b, place[:start]], noisy[b, here]])[None])[0, start:]
                / temperature
            )
            logits = torch.cat(
                [logits[:, :MASK], logits[:, MASK:] * 0 - 1e30, logits[:, MASK + 1 :]], -1
            )
            log_p = logits.log_softmax(-1)
            for j, t in enumerate(here):
                if score[b, t]:
                    out[b, t], entropies[b, t] = (
                        log_p[j, clean[b, t]],
                        -(log_p[j].exp() * log_p[j]).sum(),
                    )
    return out, entropies


def score_masks(noised, valid):
    """The kinds of places that methods score."""
    one = torch.zeros_like(valid)
    one[-1, valid[-1].nonzero()[-1]] = True
    late = noised & (torch.arange(valid.shape[1]) >= valid.shape[1] // 2)
    first_row = noised.clone()
    first_row[1:] = False
    return {
        "noised": noised,
        "all valid": valid,
        "clean": valid & ~noised,
        "one": one,
        "late": late,
        "first row": first_row,
    }


KINDS = ["noised", "all valid", "clean", "one", "late", "first row"]


@pytest.mark.parametrize("side", ["left", "right", "ragged"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logps_of_a_block_are_those_of_a_pass_over_its_clean_past(side, kind):
    """'Log-probabilities of clean tokens where a block is noised, given its noisy self and the clean blocks before it'."""
    model = model_of(SMALL, torch.float64)
    clean, noisy, noised, valid = ragged([22, 3, 9, 16, 13], side)
    score = score_masks(noised, valid)[kind]
    for temperature in (1.0, 0.6):
        logps, entropies = model.logps(
            clean, noisy, score, valid, temperature=temperature, entropy=True
        )
        want, want_entropies = naive_logps(model, clean, noisy, score, valid, temperature)
        assert len(want) == score.sum() > 0
        for place in want:
            torch.testing.assert_close(logps[place], want[place], atol=1e-12, rtol=0)
            torch.testing.assert_close(entropies[place], want_entropies[place], atol=1e-12, rtol=0)
        assert (
            (logps[~score] == 0).all()
            and (entropies[~score] == 0).all()
            and (logps[score] < 0).all()
        )


@torch.no_grad()
def test_logps_are_fp32_and_bf16_weights_stay_close():
    """'-> [B, T] fp32' whatever the weights; without valid_mask all tokens are valid."""
    clean, noisy, score, valid = ragged([22, 22], "right")
    exact = model_of(SMALL, torch.float64).logps(clean, noisy, score)
    single, half = (
        model_of(SMALL).logps(clean, noisy, score),
        model_of(SMALL, torch.bfloat16).logps(clean, noisy, score, valid),
    )
    assert single.dtype == half.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, atol=1e-4, rtol=0)
    assert (half - exact).abs().mean() < 0.2


@pytest.mark.parametrize("side", ["left", "right", "ragged"])
@torch.no_grad()
def test_logps_do_not_depend_on_padding_or_other_rows(side):
    """'padding never shifts them': a row alone gives the same as inside a padded batch."""
    model = model_of(SMALL, torch.float64)
    clean, noisy, score, valid = ragged([22, 1, 9, 16, 13], side, T=25)
    together = model.logps(clean, noisy, score, valid)
    for i in range(len(clean)):
        alone = model.logps(*(x[i, valid[i]][None] for x in (clean, noisy, score)))
        torch.testing.assert_close(together[i, valid[i]], alone[0], atol=1e-12, rtol=0)
    junk = torch.where(valid, clean, 7), torch.where(valid, noisy, 9)
    assert torch.equal(
        model.logps(*junk, score, valid), together
    )  # what stands on padding does not matter


@torch.no_grad()
def test_logps_leak_nothing():
    """A clean token of block b reaches later blocks alone, and a noisy token of block b reaches block b alone, bit for bit."""
    model, T, n = model_of(SMALL, torch.float64), 18, 4
    clean, noisy, _, _ = ragged([T], "right")
    score = torch.ones_like(clean, dtype=torch.bool)
    before = model.logps(clean, noisy, score)[0]
    block = torch.arange(T) // n
    for t in range(T):
        changed = clean.clone()
        changed[0, t] = 2 + (clean[0, t] - 1) % (MASK - 2)
        same = model.logps(changed, noisy, score)[0] == before
        assert same[
            (block <= block[t]) & (torch.arange(T) != t)
        ].all()  # t itself is another target
        assert not same[block > block[t]].any()
        changed = noisy.clone()
        changed[0, t] = MASK if noisy[0, t] != MASK else clean[0, t]
        if noisy[0, t] == MASK:
            changed[0, t] = clean[0, t]
        same = model.logps(clean, changed, score)[0] == before
        assert same[block != block[t]].all() and not same[block == block[t]].any()


@torch.no_grad()
def test_the_mask_token_has_no_probability():
    """'The mask token has probability 0': its row of the head changes nothing."""
    model = model_of(SMALL, torch.float64)
    clean, noisy, score, valid = ragged([12, 7], "left")
    before = model.logps(clean, noisy, score, valid)
    model.lm_head.weight[MASK] *= 50
    assert torch.equal(model.logps(clean, noisy, score, valid), before)


def grads(model, loss):
    return dict(
        zip(
            dict(model.named_parameters()),
            torch.autograd.grad(loss, list(model.parameters())),
            strict=True,
        )
    )


def test_gradient_of_logps_against_full_logits():
    """Gradients of a weighted sum of log-probabilities and entropies, to 1e-10 of naive passes in fp64, for every parameter."""
    model = model_of(SMALL, torch.float64)
    clean, noisy, score, valid = ragged([10, 3, 7], "left")
    a, b = torch.randn(
        2, *clean.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    logps, entropies = model.logps(clean, noisy, score, valid, temperature=0.8, entropy=True)
    got = grads(model, (a * logps + b * entropies).sum())
    want, want_entropies = naive_logps(model, clean, noisy, score, valid, temperature=0.8)
    want = grads(model, sum(a[p] * want[p] + b[p] * want_entropies[p] for p in want))
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=1e-10, rtol=1e-10, msg=name)
        assert want[name].abs().max() > 1e-4, name


def test_activation_checkpointing_changes_no_gradient():
    model = model_of(SMALL, torch.float64)
    clean, noisy, score, valid = ragged([10, 3, 7], "right")
    plain = grads(model, model.logps(clean, noisy, score, valid).sum())
    passes = []
    hook = model.layers[0].input_layernorm.register_forward_pre_hook(lambda *_: passes.append(1))
    model.activation_checkpointing = True
    again = grads(model, model.logps(clean, noisy, score, valid).sum())
    hook.remove()
    assert len(passes) == 2  # it did compute the layer again
    for name in plain:
        torch.testing.assert_close(again[name], plain[name], atol=1e-14, rtol=1e-12, msg=name)


@pytest.mark.parametrize("padded", [False, True])
def test_nothing_scored_keeps_the_graph(padded):
    """A rank without scored rows takes part in the backward pass: zero gradients, not an error."""
    model = model_of(SMALL, torch.float64)
    clean, noisy, score, valid = ragged([10, 3], "left")
    logps = model.logps(clean, noisy, torch.zeros_like(score), valid if padded else None)
    assert torch.equal(logps, torch.zeros(2, 10, dtype=torch.float64))
    logps.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


# --- checkpoints -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def saved(tmp_path, tokenizer):
    """(model, directory of its checkpoint)"""
    model = model_of(SMALL)
    save_model(model, tmp_path / "checkpoint", tokenizer)
    return model, tmp_path / "checkpoint"


def assert_same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        same = a[name].dtype == b[name].dtype and torch.equal(a[name], b[name])
        assert same, name


def exits_with_one_line(*words):
    """SystemExit whose message is one line that holds all of the words."""
    return pytest.raises(SystemExit, match="^" + "".join(f"(?=.*{word})" for word in words) + ".*$")


def test_a_saved_model_loads_bit_for_bit(saved):
    model, directory = saved
    loaded = load_model(directory)
    assert_same_weights(model, loaded)
    assert (
        loaded.checkpoint_config == SMALL
        and loaded.eos_token_ids == [1]
        and loaded.pad_token_id == 0
    )
    assert (loaded.mask_token_id, loaded.block_length) == (MASK, 4)
    assert load_tokenizer(directory).get_vocab() == byte_tokenizer().get_vocab()
    ids = random_ids(2, 9, MASK)
    assert torch.equal(loaded.logits(ids), model.logits(ids))
    assert load_model(directory, dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16
    assert sorted(os.listdir(directory.parent)) == ["checkpoint"]  # nothing temporary is left


def test_tensors_keep_the_dtype_of_the_config(tmp_path, tokenizer):
    """'Tensors keep the dtype that config.json names', fp32 masters included."""
    model = model_of(SMALL | {"torch_dtype": "bfloat16"})
    save_model(model, tmp_path / "a", tokenizer)
    held = load_file(tmp_path / "a/model.safetensors")
    assert {value.dtype for value in held.values()} == {torch.bfloat16}
    assert_same_weights(load_model(tmp_path / "a", dtype=torch.bfloat16), model.bfloat16())


def test_several_end_tokens_survive(tmp_path, tokenizer):
    model = model_of(SMALL)
    model.eos_token_ids, model.pad_token_id = [5, 1], 1
    save_model(model, tmp_path / "a", tokenizer)
    loaded = load_model(tmp_path / "a")
    assert (loaded.eos_token_ids, loaded.pad_token_id) == ([5, 1], 1)


def qwen3_config(directory, config):
    """The config.json of a Qwen3 with the same weights."""
    raw = json.loads((directory / "config.json").read_text())
    raw |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]} | config
    (directory / "config.json").write_text(json.dumps(raw))


@torch.no_grad()
def test_bf16_argmax_agrees_with_qwen3():
    model = model_of(CONFIG)
    reference, n = qwen3(model, "sdpa"), model.block_length
    ids = random_ids(40, 24, CONFIG["vocab_size"])
    mask = additive(block_causal(24, n)).expand(40, 1, 24, 24)
    want = reference.bfloat16()(input_ids=ids, attention_mask=mask.bfloat16()).logits
    agreement = (want.argmax(-1) == model.bfloat16().logits(ids).argmax(-1)).float().mean()
    assert agreement >= 0.97, agreement


@pytest.mark.parametrize("shard_bytes", [1 << 32, 17000])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_what_we_save(tmp_path, tokenizer, monkeypatch, shard_bytes, tied):
    """Names strict both ways; one file or shards with an index; with a tied head too. And ours reads its own."""
    from transformers import Qwen3ForCausalLM

    monkeypatch.setattr(models.checkpoint, "SHARD_BYTES", shard_bytes)
    directory = tmp_path / "checkpoint"
    model = model_of(SMALL | {"tie_word_embeddings": tied})
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    save_model(model, directory, tokenizer)
    assert_same_weights(load_model(directory), model)
    if shard_bytes < 1 << 32:
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        held = {
            file.name: set(safe_open(file, "pt").keys()) for file in directory.glob("*.safetensors")
        }
        assert len(held) >= 3 and not (directory / "model.safetensors").exists()
        assert {name: file for file, names in held.items() for name in names} == index["weight_map"]
        assert index["metadata"]["total_size"] == sum(
            4 * value.numel() for value in tensor_names(model).values()
        )
        assert all(
            sum(4 * tensor_names(model)[name].numel() for name in names) <= shard_bytes
            for names in held.values()
        )
    qwen3_config(directory, {})
    reference, report = Qwen3ForCausalLM.from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_weights(reference, model)


def test_we_read_what_transformers_saves(tmp_path, tokenizer):
    """The other way: safetensors written by Qwen3ForCausalLM.save_pretrained, in shards, load strictly."""
    model = model_of(SMALL)
    qwen3(model).save_pretrained(tmp_path, max_shard_size="5KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert_same_weights(load_model(tmp_path), model)


def test_a_tied_head_is_one_parameter(tmp_path, tokenizer):
    """tie_word_embeddings: the head is the embedding, in a fresh model and in a loaded one, and is stored once."""
    config = SMALL | {"tie_word_embeddings": True}
    model = random_model(config)
    model.eos_token_ids, model.pad_token_id = [1], 0
    save_model(model, tmp_path / "a", tokenizer)
    assert "lm_head.weight" not in load_file(tmp_path / "a/model.safetensors")
    loaded = load_model(tmp_path / "a")
    fresh_is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    loaded_is_tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert (fresh_is_tied, loaded_is_tied) == (True, True)
    ids = random_ids(1, 9, MASK)
    assert torch.equal(loaded.logits(ids), model.logits(ids))


def test_export_weights_gives_official_names_and_full_tensors():
    model = model_of(SMALL)
    exported = dict(export_weights(model))
    assert exported.keys() == model.state_dict().keys()
    assert all(
        torch.equal(exported[name], value) and not exported[name].requires_grad
        for name, value in model.state_dict().items()
    )
    assert {value.dtype for _, value in export_weights(model, torch.bfloat16)} == {torch.bfloat16}


def rewrite(directory, change):
    """Apply a function to the tensors of a checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


NORM = "model.layers.1.self_attn.q_norm.weight"


def test_a_missing_tensor_stops_loading(saved):
    rewrite(saved[1], lambda tensors: tensors.pop(NORM))
    with exits_with_one_line(f"missing {NORM}", "checkpoint"):
        load_model(saved[1])


def test_a_missing_head_stops_loading(saved):
    rewrite(saved[1], lambda tensors: tensors.pop("lm_head.weight"))
    with exits_with_one_line("missing lm_head.weight"):
        load_model(saved[1])


def test_an_extra_tensor_stops_loading(saved):
    rewrite(
        saved[1],
        lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(2)}),
    )
    with exits_with_one_line("extra model.layers.2.mlp.up_proj.weight"):
        load_model(saved[1])


def test_a_misshapen_tensor_stops_loading(saved):
    rewrite(
        saved[1], lambda tensors: tensors.update({NORM: torch.zeros(1)})
    )  # copy_ would broadcast it
    with exits_with_one_line(NORM, r"\[1\]", r"\[8\]"):
        load_model(saved[1])


@pytest.mark.parametrize("size", [0, 5, 200, -1])
def test_a_truncated_file_stops_loading(saved, size):
    path = saved[1] / "model.safetensors"
    path.write_bytes(path.read_bytes()[: size if size >= 0 else -1])
    with exits_with_one_line("model.safetensors", "truncated"):
        load_model(saved[1])


def test_no_weights_at_all_stops_loading(saved):
    (saved[1] / "model.safetensors").unlink()
    with exits_with_one_line("checkpoint", "no weights"):
        load_model(saved[1])


@pytest.fixture
def sharded(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(models.checkpoint, "SHARD_BYTES", 17000)
    save_model(model_of(SMALL), tmp_path / "checkpoint", tokenizer)
    return tmp_path / "checkpoint"


def test_a_missing_shard_stops_loading(sharded):
    path = sorted(sharded.glob("model-*.safetensors"))[1]
    path.unlink()
    with exits_with_one_line(path.name, "missing"):
        load_model(sharded)


def test_a_shard_without_the_tensor_of_the_index_stops_loading(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file, other = index["weight_map"][NORM], index["weight_map"]["lm_head.weight"]
    index["weight_map"][NORM] = other
    path.write_text(json.dumps(index))
    assert file != other
    with exits_with_one_line(f"missing {NORM}", other):
        load_model(sharded)


def test_an_index_without_a_weight_map_is_named(sharded):
    path = sharded / "model.safetensors.index.json"
    for content in ({}, {"weight_map": 3}):
        path.write_text(json.dumps(content))
        with exits_with_one_line("index.json has no weight_map"):
            load_model(sharded)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "vocab.json"])
def test_a_truncated_tokenizer_file_is_named(sharded, file):
    (sharded / file).write_text('{"added_tokens": [')
    with exits_with_one_line(f"{file} is not JSON", "copy it again"):
        load_tokenizer(sharded)


NONSENSE = {  # file, content, what the line says; None: only the tokenizer reads it
    "no tokenizer": ("tokenizer.json", {}, "its tokenizer cannot be loaded .KeyError", None),
    "another model": (
        "tokenizer.json",
        {"added_tokens": [], "model": {"type": "Nope"}},
        "cannot be loaded",
        None,
    ),
    "tokens of text": (
        "tokenizer.json",
        {"added_tokens": ["x"]},
        "cannot be loaded",
        "tokenizer.json: its added tokens are",
    ),
    "no text": (
        "tokenizer.json",
        b"\xff\xfe{}",
        "tokenizer.json is not JSON",
        "tokenizer.json is not JSON",
    ),
    "ids of text": (
        "tokenizer_config.json",
        {"added_tokens_decoder": {"x": {"content": "y"}}},
        "be loaded",
        "_config.json: its",
    ),
    "a number as token": ("tokenizer_config.json", {"eos_token": 3}, "eos_token has to be", None),
    "template": (
        "chat_template.jinja",
        b"{% for x",
        "its chat template is damaged .unexpected end",
        None,
    ),
}


@pytest.mark.parametrize("file, content, message, of_model", NONSENSE.values(), ids=list(NONSENSE))
def test_nonsense_in_a_tokenizer_file_gets_one_line(tmp_path, file, content, message, of_model):
    directory = shutil.copytree(models.MODELS["tiny-sdar"], tmp_path / "model")
    (directory / file).write_bytes(
        content if isinstance(content, bytes) else json.dumps(content).encode()
    )
    with exits_with_one_line(message, "copy "):
        prompt_ids(load_tokenizer(directory), [{"role": "user", "content": "x"}])
    if of_model:
        with exits_with_one_line(of_model, "copy it again"):
            load_model(directory)


@pytest.mark.parametrize(
    "kind", ["GatedRepoError", "RepositoryNotFoundError", "LocalEntryNotFoundError"]
)
def test_a_hub_id_that_cannot_be_had_ends_in_one_line(monkeypatch, kind):
    """Gated, not there, no network: the hub's own reason, many lines of it, becomes a part of one."""
    import huggingface_hub
    from huggingface_hub import errors

    error = type(
        kind,
        (getattr(errors, kind),),
        {"__init__": lambda self, text: Exception.__init__(self, text)},
    )

    def fail(*_, **__):
        raise error("Cannot access it\n\nbecause of this")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    for call in (load_model, load_tokenizer):
        with exits_with_one_line(
            "^JetLM/SDAR-8B-Chat cannot be downloaded .Cannot access it because of this", "--model"
        ):
            call("sdar-8b")


def test_a_model_without_files_is_named():
    with exits_with_one_line(
        "tiny-dream is made in the process", "random_init.py --config tiny-dream --out"
    ):
        models.checkpoint.resolve("tiny-dream")


def test_an_unknown_model_is_named():
    with exits_with_one_line("sdar-9b", "sdar-8b", "tiny-sdar"):
        load_model("sdar-9b")


def test_a_directory_without_config_is_named(tmp_path):
    with exits_with_one_line("is no model directory", "config.json"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "qwen3"}, ["model_type", "qwen3", "sdar"]),
        ({"model_type": None}, ["model_type"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
    ],
)
def test_what_the_config_asks_and_we_lack_is_named(saved, change, words):
    (saved[1] / "config.json").write_text(json.dumps(SMALL | change))
    with exits_with_one_line(*words):
        load_model(saved[1])


@pytest.mark.parametrize("key", ["rope_theta", "head_dim", "mask_token_id", "block_size"])
def test_a_config_without_a_needed_key_is_named(saved, key):
    """head_dim above all: hidden_size / heads is wrong for SDAR-4B."""
    (saved[1] / "config.json").write_text(json.dumps({k: v for k, v in SMALL.items() if k != key}))
    with exits_with_one_line(f"lacks {key}"):
        load_model(saved[1])


def test_rope_parameters_that_scale_are_refused(saved):
    """transformers 5 writes rope_parameters where older versions write rope_scaling: a scaled one is not read as unscaled."""
    raw = SMALL | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000000}}
    (saved[1] / "config.json").write_text(json.dumps(raw))
    with exits_with_one_line("yarn"):
        load_model(saved[1])


def test_no_end_token_is_named(saved):
    (saved[1] / "generation_config.json").unlink()
    (saved[1] / "config.json").write_text(json.dumps(SMALL | {"eos_token_id": None}))
    with exits_with_one_line("eos_token_id"):
        load_model(saved[1])


# --- saving under adversity --------------------------------------------------------------------------------------------------


def in_child(function):
    """Run a function in a forked process -> (exit status, what it wrote through the pipe: the repr of what it raised)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = ""
        try:
            function()
        except BaseException as error:
            text = repr(error)
        finally:
            os.write(write, text.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def limit_file_size(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def assert_untouched(directory, model):
    """The earlier checkpoint loads, nothing stands under the later name."""
    assert_same_weights(load_model(directory / "step-1"), model)
    assert not (directory / "step-2").exists()


def test_saving_over_something_is_refused(saved, tokenizer):
    """'SystemExit if it exists already': a checkpoint is never overwritten."""
    model, directory = saved
    with exits_with_one_line("checkpoint", "exists already"):
        save_model(model_of(SMALL, seed=1), directory, tokenizer)
    assert_same_weights(load_model(directory), model)
    assert sorted(os.listdir(directory.parent)) == ["checkpoint"]


@pytest.mark.parametrize("fails", ["first", "second"])
def test_an_error_in_writing_leaves_the_earlier_checkpoint(tmp_path, tokenizer, monkeypatch, fails):
    model, calls = model_of(SMALL), []
    save_model(model, tmp_path / "step-1", tokenizer)

    def broken(tensors, path, metadata):
        calls.append(path)
        if len(calls) == ("first", "second").index(fails) + 1:
            raise OSError(28, "No space left on device")
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(models.checkpoint, "SHARD_BYTES", 17000)
    monkeypatch.setattr(models.checkpoint, "save_file", broken)
    with exits_with_one_line("step-2", "No space left on device"):
        save_model(model_of(SMALL, seed=1), tmp_path / "step-2", tokenizer)
    assert_untouched(tmp_path, model)
    assert os.listdir(tmp_path) == ["step-1"]  # its own remains are removed


@pytest.mark.parametrize("stage", ["tensors", "tokenizer"])
def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, tokenizer, monkeypatch, stage):
    """A limit on file size stands for the full disk, at the tensors, and at tokenizer.json, which a Rust library writes."""
    model = model_of(SMALL)
    save_model(model, tmp_path / "step-1", tokenizer)
    biggest = os.path.getsize(tmp_path / "step-1/tokenizer.json")
    monkeypatch.setattr(models.checkpoint, "SHARD_BYTES", 1)  # one tensor a file

    def child():
        limit_file_size(1500 if stage == "tensors" else biggest - 500)
        save_model(model_of(SMALL, seed=1), tmp_path / "step-2", tokenizer)

    status, raised = in_child(child)
    assert_untouched(tmp_path, model)
    assert status == 0 and raised.startswith("SystemExit") and "step-2" in raised, raised
    assert os.listdir(tmp_path) == ["step-1"]


@pytest.mark.parametrize("where", ["save_file", "sync_to_disk"])
def test_a_killed_process_leaves_the_earlier_checkpoint(tmp_path, tokenizer, monkeypatch, where):
    """'The directory appears under its name only when complete': killed amid the tensors, and just before the end."""
    model = model_of(SMALL)
    save_model(model, tmp_path / "step-1", tokenizer)

    def killed(*args, **kwargs):
        if where == "save_file":
            args[1].write_bytes(b"half a file")
        os._exit(9)

    def child():
        monkeypatch.setattr(
            models.atomic if where == "sync_to_disk" else models.checkpoint, where, killed
        )
        save_model(model_of(SMALL, seed=1), tmp_path / "step-2", tokenizer)

    assert in_child(child)[0] == 9
    assert_untouched(tmp_path, model)
    save_model(
        model_of(SMALL, seed=1), tmp_path / "step-2", tokenizer
    )  # and the next attempt succeeds
    assert_same_weights(load_model(tmp_path / "step-2"), model_of(SMALL, seed=1))


# --- official files ----------------------------------------------------------------------------------------------------------


@needs_hf
@pytest.mark.parametrize("name, count", [("SDAR-4B-Chat", 399), ("SDAR-8B-Chat", 399)])
def test_names_and_sizes_are_those_of_the_official_index(name, count):
    """The set of names equals the weight_map, bytes equal total_size."""
    config = json.loads((Path(HF) / name / "config.json").read_text())
    index = json.loads((Path(HF) / name / "model.safetensors.index.json").read_text())
    names = tensor_names(build_model(config))
    assert names.keys() == index["weight_map"].keys() and len(names) == count
    assert 2 * sum(value.numel() for value in names.values()) == index["metadata"]["total_size"]


@needs_hf
@pytest.mark.parametrize(
    "name, parameters",
    [
        ("SDAR-1dot7B-Chat", 2_031_739_904),
        ("SDAR-4B-Chat", 4_411_424_256),
        ("SDAR-8B-Chat", 8_190_735_360),
    ],
)
def test_official_configs_build_models_of_the_official_size(name, parameters):
    """Mask, end and padding ids, as the official files have them."""
    model = build_model(json.loads((Path(HF) / name / "config.json").read_text()))
    models.checkpoint.set_special_tokens(model, Path(HF) / name)
    assert sum(value.numel() for value in model.parameters()) == parameters
    assert (model.mask_token_id, model.block_length, model.config.head_dim) == (151669, 4, 128)
    assert (model.eos_token_ids, model.pad_token_id) == ([151645, 151643], 151643)


@pytest.fixture(scope="module")
def sdar_tokenizer():
    return load_tokenizer(Path(HF) / "SDAR-8B-Chat")


@needs_hf
def test_sdar_tokens_by_name(sdar_tokenizer):
    """Ids by name; the mask token is not spelled <MASK>."""
    ids = {
        "<|MASK|>": 151669,
        "<|im_end|>": 151645,
        "<|endoftext|>": 151643,
        "<|im_start|>": 151644,
    }
    assert {token: sdar_tokenizer.convert_tokens_to_ids(token) for token in ids} == ids
    assert len(sdar_tokenizer) == 151670
    assert len(sdar_tokenizer("<MASK>", add_special_tokens=False)["input_ids"]) == 3  # not a token


@needs_hf
def test_sdar_template_goldens(sdar_tokenizer):
    """'Hi ' keeps its space, no system turn, no think block; the answer starts after a newline."""
    turn = [{"role": "user", "content": "Hi "}]
    ids = prompt_ids(sdar_tokenizer, turn)
    assert sdar_tokenizer.decode(ids) == "<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\n"
    assert ids == [151644, 872, 198, 13048, 220, 151645, 198, 151644, 77091, 198]
    text = sdar_tokenizer.apply_chat_template(
        turn, add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    assert text == "<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    turns = [
        {"role": "system", "content": "S"},
        *turn,
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "B"},
    ]
    assert sdar_tokenizer.decode(prompt_ids(sdar_tokenizer, turns)) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"
    )


# --- the byte tokenizer ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded_tokenizer(tmp_path_factory, tokenizer):
    """The byte tokenizer after a trip through a checkpoint directory."""
    directory = tmp_path_factory.mktemp("bytes") / "a"
    save_model(model_of(SMALL), directory, tokenizer)
    return load_tokenizer(directory)


@pytest.mark.parametrize(
    "text",
    ["", "plain", "  two  spaces\n\ttab \r\n", "größer 漢字 🙂 e\u0301", "1+(2*3)=7", "\x00\x7f"],
)
def test_byte_tokens_are_the_bytes_of_the_text(tokenizer, loaded_tokenizer, text):
    """'One token a byte': ids equal UTF-8, and decode to the same text, before and after saving."""
    for one in (tokenizer, loaded_tokenizer):
        ids = one(text, add_special_tokens=False)["input_ids"]
        assert ids == list(text.encode()) and one.decode(ids) == text


def test_every_byte_has_its_token(loaded_tokenizer):
    """Ids 0..255 are the bytes: every character of two bytes or fewer goes there and back, so do all 256 values."""
    text = "".join(map(chr, range(0x800)))
    ids = loaded_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode()) and loaded_tokenizer.decode(ids) == text
    tokens = loaded_tokenizer.convert_ids_to_tokens(range(256))
    assert len(set(tokens)) == 256 and loaded_tokenizer.convert_tokens_to_ids(tokens) == list(
        range(256)
    )
    for byte in range(256):  # a lone byte above 127 is no character
        assert loaded_tokenizer.decode([byte]) == bytes([byte]).decode(errors="replace")


def test_special_tokens_are_single_ids(loaded_tokenizer):
    assert SPECIAL_TOKENS == ["<|endoftext|>", "<|MASK|>", "<|user|>", "<|assistant|>"]
    for i, token in enumerate(SPECIAL_TOKENS):
        assert loaded_tokenizer(f"a{token}b", add_special_tokens=False)["input_ids"] == [
            97,
            256 + i,
            98,
        ]
    assert loaded_tokenizer.decode([97, 256, 257, 98], skip_special_tokens=True) == "ab"
    assert len(loaded_tokenizer) == 260 <= TINY_SDAR["vocab_size"]
    assert (loaded_tokenizer.mask_token_id, loaded_tokenizer.eos_token_id) == (
        TINY_SDAR["mask_token_id"],
        TINY_SDAR["eos_token_id"],
    )


def test_byte_template(loaded_tokenizer):
    turns = [{"role": "user", "content": "Hi "}]
    assert prompt_ids(loaded_tokenizer, turns) == [258, *b"Hi ", 259]
    turns += [{"role": "assistant", "content": "A"}, {"role": "user", "content": "B"}]
    assert prompt_ids(loaded_tokenizer, turns) == [258, *b"Hi ", 259, *b"A", 256, 258, *b"B", 259]


def test_random_models_repeat_and_are_scaled():
    """random_model: the seed decides, 'matrices N(0, 0.5 / fan_in), embedding and head N(0, 0.02^2), norms 1'."""
    a, b, c = random_model(TINY_SDAR), random_model(TINY_SDAR), random_model(TINY_SDAR, seed=1)
    assert_same_weights(a, b)
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)
    assert abs(a.lm_head.weight.std() - 0.02) < 1e-3 and (a.model.norm.weight == 1).all()
    assert abs(a.layers[0].mlp.up_proj.weight.std() - math.sqrt(0.5 / 96)) < 2e-3
    assert F.softmax(a.logits(torch.arange(8)[None]), -1).max() < 0.05  # starts close to uniform


@needs_hf
@pytest.mark.parametrize("config", ["small-sdar", "small-llada"])
def test_small_models_take_a_real_vocabulary(config):
    """20 to 60 million parameters with the 151,936 rows of SDAR's, its mask token and its ends, in either family."""
    content = random_init.with_vocabulary(
        random_init.SMALL_CONFIGS[config], Path(HF) / "SDAR-8B-Chat"
    )
    model = models.checkpoint.set_special_tokens(build_model(content))
    assert (
        20e6 < sum(p.numel() for p in model.parameters()) < 60e6
        and model.lm_head.out_features == 151936
    )
    assert (model.mask_token_id, model.eos_token_ids, model.pad_token_id) == (
        151669,
        [151645, 151643],
        151643,
    )


def test_a_random_model_with_the_tokenizer_of_another_is_whole(tmp_path):
    """Keys of --config take the vocabulary too; weights, ids and tokenizer come back from the directory."""
    random_init.main(
        random_init.Args(str(tmp_path / "one"), "tiny-llada", models.MODELS["tiny-sdar"])
    )
    model, tokenizer = load_model(tmp_path / "one"), load_tokenizer(tmp_path / "one")
    ids = prompt_ids(tokenizer, [{"role": "user", "content": "1+1"}])
    assert model.eos_token_ids == [256] and model.logits(torch.tensor([ids])).shape == (
        1,
        len(ids),
        264,
    )
    with exits_with_one_line("is no model directory"):
        random_init.main(random_init.Args(str(tmp_path / "two"), "small-sdar", str(tmp_path)))
