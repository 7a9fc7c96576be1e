"""models/lora.py against peft itself, against brute-force merges, and on two FSDP2 ranks."""

import math
import shutil

import pytest
import torch
from oracles import TINY_SDAR
from test_models import (
    MASK,
    SMALLS,
    edit,
    exits_with_one_line,
    model_of,
    random_ids,
    tensors,
)

from models import (
    add_lora,
    export_weights,
    load_model,
    load_tokenizer,
    save_adapter,
    save_model,
)
from models.lora import adapter_tensors
from models.tensors import tensor_shapes
from models.tiny import byte_tokenizer

RANK, ALPHA = 4, 10  # scale 2.5
IDS = random_ids(3, 11, MASK)


@torch.no_grad()
def fill_b(model, size=0.1, seed=1):
    """As if trained: B is no longer 0. -> the model"""
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            value.copy_(size * torch.randn(value.shape, generator=generator, dtype=torch.float64))
    return model


def adapted(rank=RANK, size=0.1, base=None, dtype=torch.float32):
    """-> model with adapters that matter"""
    return fill_b(add_lora(base or model_of(TINY_SDAR), rank, ALPHA, dtype=dtype), size)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """-> directory of the base, directory of an adapter, the adapted model"""
    folder, model = tmp_path_factory.mktemp("lora"), adapted()
    save_model(model_of(TINY_SDAR), folder / "base", byte_tokenizer())
    save_adapter(model, folder / "adapter", str(folder / "base"), byte_tokenizer())
    return folder / "base", folder / "adapter", model


@pytest.fixture
def adapter(saved, tmp_path):
    """A copy of the adapter that a test may damage."""
    return shutil.copytree(saved[1], tmp_path / "adapter")


def close(a, b, tolerance=1e-5):
    """fp32: relative to the largest value."""
    return (a - b).abs().max().item() <= tolerance * b.abs().max().item()


# --- adapters in place ---------------------------------------------------------------------------


def test_the_draws_are_keyed_by_the_seed():
    """'A is drawn from a generator keyed by seed, the same on every rank'; peft's distribution,
    Kaiming uniform; B is 0.
    """
    wide = TINY_SDAR | {"hidden_size": 256}
    drawn = lambda seed: adapter_tensors(add_lora(model_of(wide), 32, ALPHA, seed=seed))
    first, again, other = drawn(0), drawn(0), drawn(1)
    for name, value in first.items():
        is_a = "lora_A" in name
        assert torch.equal(value, again[name]) and torch.equal(value, other[name]) != is_a
        assert value.any() == is_a
        if "q_proj.lora_A" in name:  # U(-b, b), b = 1 / sqrt(fan in) = 1 / 16
            assert value.abs().max() <= 1 / 16
            assert value.std().item() == pytest.approx(1 / 16 / math.sqrt(3), rel=0.03)


INSIDE = {"sdar": 28, "sdar_moe": 8, "llada2": 2 * 2 + 3 + 3, "llada": 28, "dream": 28}
INSIDE |= {"llada_moe": 8, "a2d_block": 28, "a2d_masked": 28}


@pytest.mark.parametrize("family", SMALLS)
def test_adapters_go_on_the_linear_layers_of_blocks(family):
    """Not on the head (LLaDA's bears the name of a block's layer), routers or stacked experts; all
    learn, and nothing else does.
    """
    model = add_lora(model_of(SMALLS[family]), RANK, ALPHA)
    held = {name.split(".lora_")[0] for name in adapter_tensors(model)}
    assert len(held) == INSIDE[family]
    assert all(".layers." in name or ".blocks." in name for name in held)
    assert not any(word in name for name in held for word in ("gate.", "mlp.experts", "lm_head"))
    assert dict(export_weights(model)).keys() == tensor_shapes(model_of(SMALLS[family])).keys()
    ids = IDS[:, None]
    model.logps(IDS, torch.full_like(ids, MASK), ids >= 0).sum().backward()
    for name, value in model.named_parameters():
        assert value.requires_grad == (value.grad is not None) == (".lora_" in name)


# --- files ---------------------------------------------------------------------------------------


def test_peft_alone_reads_a_saved_adapter(saved):
    """'PeftModel.from_pretrained reads the directory': same logits; merge_and_unload equals our
    load_model(adapter), and what a sampler gets.
    """
    from peft import PeftModel

    base, directory, model = saved
    wrapped = PeftModel.from_pretrained(model_of(TINY_SDAR), directory)
    assert close(wrapped.base_model.model.logits(IDS), model.logits(IDS))
    assert wrapped.peft_config["default"].base_model_name_or_path == str(base)
    merged = wrapped.merge_and_unload().state_dict()
    for ours in load_model(directory).state_dict(), dict(export_weights(model)):
        assert merged.keys() == ours.keys()
        assert all(close(merged[name], ours[name]) for name in ours)


def test_an_adapter_on_an_adapter_loads(saved, tmp_path):
    """RL on an adapter directory 'merges it and adds a fresh adapter': the chain of both loads,
    without copies of the base, also of its tokenizer.
    """
    first = shutil.copytree(saved[1], tmp_path / "first")
    model = fill_b(add_lora(load_model(first), 2, 6, ["v_proj"], seed=5), seed=7)
    save_adapter(model, tmp_path / "second", str(first), byte_tokenizer())
    assert close(load_model(tmp_path / "second").logits(IDS), model.logits(IDS))
    assert not close(load_model(first).logits(IDS), model.logits(IDS), 1e-2)
    for file in [*tmp_path.glob("*/*token*"), *tmp_path.glob("*/*.jinja")]:
        file.unlink()
    tokenizer = load_tokenizer(tmp_path / "second")
    assert tokenizer.name_or_path == str(saved[0]) and tokenizer.chat_template


def test_every_export_starts_from_the_pristine_base():
    """'never from an earlier merge': with B of 0 again, it is the base."""
    base, model = dict(export_weights(model_of(TINY_SDAR))), adapted()
    merged = dict(export_weights(model))
    fill_b(model, size=0)
    again = dict(export_weights(model))
    assert all(torch.equal(again[name], base[name]) for name in base)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not close(merged[name], base[name], 1e-2)


# --- what does not fit ---------------------------------------------------------------------------


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


PLAIN, CONFIG, WEIGHTS = "only plain LoRA", "adapter_config.json", "adapter_model.safetensors"
OTHER = {  # what is wrong -> (what to do to the adapter, words of the message)
    "rank": (edit(CONFIG, r=8), ["of rank 8, does not fit its model at"]),
    "names": (edit(CONFIG, base_model_name_or_path="tiny-llada"), ["does not fit its model at"]),
    "empty": (tensors(dict.clear, WEIGHTS), ["holds no adapters"]),
    "half a pair": (tensors(lambda t: t.pop(Q + "B.weight"), WEIGHTS), ["q_proj"]),
    "rsLoRA": (edit(CONFIG, use_rslora=True), [PLAIN, "use_rslora"]),
    "unknown base": (
        edit(CONFIG, base_model_name_or_path="unknown"),
        ["unknown model .unknown"],
    ),
    "its own base": (
        lambda d: edit(CONFIG, base_model_name_or_path=str(d))(d),
        ["config.json is missing or damaged"],
    ),
}


@pytest.mark.parametrize("change, words", OTHER.values(), ids=list(OTHER))
def test_an_adapter_that_does_not_fit_is_refused(adapter, change, words):
    change(adapter)
    with exits_with_one_line(*words):
        load_model(adapter)
