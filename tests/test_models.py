"""models/: every family against its official code, and against loops over rows and blocks.

tests/golden/*.safetensors hold inputs and outputs of official modelling code; their metadata, or
`draw` below, says how the weights are drawn. CLEANDLLM_HF names a directory with configs, index
files and tokenizers of the official checkpoints (SDAR-4B-Chat, ...); tests that need it are skipped
without.
"""

import json
import math
import os
import resource
import shutil
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from oracles import A2D, TINY_SDAR, log_p_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import models
from models import checkpoint as checkpoint_module
from models import (
    from_ar,
    load_model,
    load_tokenizer,
    random_init,
    save_model,
)
from models.checkpoint import prompt_text, set_special_tokens
from models.layers import RMSNorm
from models.tensors import build_model, materialize, tensor_names, tensor_shapes
from models.tiny import TINY_CONFIGS, byte_tokenizer, random_model

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HF = os.environ.get("CLEANDLLM_HF")
needs_hf = pytest.mark.skipif(not HF, reason="CLEANDLLM_HF is not set")


def golden(family):
    """-> (content of config.json, {name: tensor}) of the official run"""
    with safe_open(Path(__file__).parent / "golden" / f"{family}.safetensors", "pt") as file:
        config = (file.metadata() or {}).get("config", "null")
        return json.loads(config), {name: file.get_tensor(name) for name in file.keys()}


FAMILIES = ("llada", "llada_moe", "dream", "llada2", "sdar_moe")
FAMILIES += ("a2d_qwen2", "a2d_qwen3", "a2d_llama")
GOLDEN = {family: golden(family) for family in FAMILIES}
CONFIGS = {family: config for family, (config, _) in GOLDEN.items()}
CONFIGS["dream"] = TINY_CONFIGS["tiny-dream"] | dict(
    vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, rope_theta=1000000.0,
    mask_token_id=151, eos_token_id=150, pad_token_id=150
)  # fmt: skip
MASK = 257
SMALLS = TINY_CONFIGS | A2D
SMALLS = {n.removeprefix("tiny-").replace("-", "_"): config for n, config in SMALLS.items()}
each_family = pytest.mark.parametrize("family", SMALLS)
BLOCK_CAUSAL = ("sdar", "sdar_moe", "llada2", "a2d_block")


def draw(model, rule):
    """{official name: tensor}, fp64; norms and biases are not neutral, so that swapped ones
    show.
    """
    stream, generator = np.random.RandomState(0), torch.Generator().manual_seed(0)
    for name, value in sorted(tensor_names(model).items()):
        shape = tuple(value.shape)
        if rule == "dream":
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        else:
            source = stream if rule == "llada" else np.random.RandomState(zlib.crc32(name.encode()))
            noise = torch.from_numpy(np.asarray(source.standard_normal(shape)))
        if name.endswith("bias"):
            yield name, 0.2 * noise
        elif noise.dim() == 1:
            yield name, 1 + 0.2 * noise
        elif rule == "dream" and "embed" in name:
            yield name, noise
        else:
            is_head = rule == "dream" and "head" in name
            yield name, noise * (2 if is_head else 1) / math.sqrt(shape[1])


@torch.no_grad()
def model_of(config=TINY_SDAR, dtype=torch.float32, rule=None, is_rounded=False):
    """A model with the weights of `draw`; is_rounded: to bf16, as official files, except
    the bias.
    """
    model = materialize(build_model(config), "cpu")
    for name, value in draw(model, rule):
        value = value.float()
        if is_rounded and not name.endswith("expert_bias"):
            value = value.bfloat16()
        tensor_names(model)[name].copy_(value)
    return set_special_tokens(model.to(dtype))


def small(family, dtype=torch.float64):
    return model_of(SMALLS[family], dtype)


def random_ids(B, T, vocab, seed=0):
    return torch.randint(2, vocab - 1, (B, T), generator=torch.Generator().manual_seed(seed))


def exits_with_one_line(*words):
    """SystemExit whose message is one line that holds all of the words."""
    return pytest.raises(SystemExit, match="^" + "".join(f"(?=.*{word})" for word in words) + ".*$")


def assert_same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


# --- the official code ---------------------------------------------------------------------------


@torch.no_grad()
def golden_pairs(family):
    """-> {case: our outputs, the official ones} in fp32"""
    config, want = CONFIGS[family], GOLDEN[family][1]
    model = model_of(config, rule=family)
    if family == "dream":
        pairs = {"plain": (model.logits(want["input_ids"]), want["logits"])}
        for side in ("left", "right"):
            # At the first token of a left-padded row the official code takes the state of padding.
            valid = want[f"{side}.valid"].bool()
            late = valid & (valid.cumsum(1) > 1)
            got = model.logits(want[f"{side}.input_ids"], valid)
            pairs[side] = got[late], want[f"{side}.logits"][late]
        return pairs
    ids = want["ids"].long()
    pairs = {"plain": (model.logits(ids), want["logits"])}
    if "attention_mask" in want:
        valid = want["attention_mask"]
        padded = model.logits(want["padded_ids"].long(), valid)
        pairs["padded"] = padded[valid], want["padded_logits"]
    if family == "llada":
        grouped = model_of(config | {"n_kv_heads": 2}, rule="llada")  # shared key heads
        pairs["grouped"] = grouped.logits(ids), want["gqa_logits"]
        pairs["far"] = model.logits(want["long_ids"].long())[:, -16:], want["long_logits"]
    if "mdlm_logits" in want:
        free, plain = config | {"block_size": 0}, want["mdlm_logits"]
        mdlm = model_of(free, rule=family)
        pairs["mdlm"] = mdlm.logits(ids), plain
        padded = mdlm.logits(want["padded_ids"].long(), valid)
        pairs["mdlm, padded"] = padded[valid], want["mdlm_padded_logits"]
        shifted = model_of(free | {"shift": True}, rule=family)
        pairs["shift"] = shifted.logits(ids), torch.cat([plain[:, :1], plain[:, :-1]], 1)
    if "noisy_ids" in want:  # [clean | noisy]
        noisy = want["noisy_ids"][:, None]
        logps = model.logps(ids, noisy, torch.ones_like(noisy, dtype=torch.bool))[:, 0]
        pairs["logps"] = logps, want["logps"]
    return pairs


@pytest.mark.parametrize("family", GOLDEN)
def test_outputs_are_the_official_ones(family):
    assert 0.9 < GOLDEN[family][1]["logits"].std() < 10
    for case, pair in golden_pairs(family).items():
        torch.testing.assert_close(*pair, atol=1e-5, rtol=0, msg=case)


@pytest.mark.parametrize("family", GOLDEN)
@torch.no_grad()
def test_bf16_outputs_agree_with_the_official_ones(family):
    """Argmax of at least 97 %"""
    config, want = GOLDEN[family]
    rounded = "moe" in family or family == "llada2"
    model = model_of(CONFIGS[family], torch.bfloat16, family, is_rounded=rounded)
    ids = want["input_ids" if family == "dream" else "ids"].long()
    got, want = model.logits(ids), want["logits_bf16" if rounded else "bf16_logits"]
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() >= 0.97
    assert (got.float() - want.float()).abs().quantile(0.97) <= 0.1


def block_causal(T, n):
    return torch.tensor([[k // n <= q // n for k in range(T)] for q in range(T)])


def qwen3(directory):
    """transformers' Qwen3, loaded strictly from a directory of save_model -> function"""
    from transformers import Qwen3ForCausalLM

    raw = json.loads((directory / "config.json").read_text())
    raw |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(raw))
    reference, report = Qwen3ForCausalLM.from_pretrained(
        directory, output_loading_info=True, attn_implementation="sdpa"
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return lambda ids, seen: reference(input_ids=ids, attention_mask=seen[None, None]).logits


def in_shards(monkeypatch, size):
    """Weights are written into files of at most so many bytes."""
    split = partial(huggingface_hub.split_torch_state_dict_into_shards, max_shard_size=size)
    monkeypatch.setattr(checkpoint_module, "split_torch_state_dict_into_shards", split)


@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": True}, {"block_size": 5}])
@torch.no_grad()
def test_transformers_qwen3_reads_what_we_save(tmp_path, change, monkeypatch):
    """Strictly, from shards; under a block-causal mask its logits equal SDAR's."""
    in_shards(monkeypatch, 90000)
    model = model_of(TINY_SDAR | change)
    save_model(model, tmp_path / "a", None)
    assert len(list((tmp_path / "a").glob("model-*.safetensors"))) >= 3
    reference, n = qwen3(tmp_path / "a"), model.block_length
    for T in (22, 61):
        ids = random_ids(2, T, 150, seed=T)
        want = reference(ids, block_causal(T, n))
        torch.testing.assert_close(model.logits(ids), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("round_first", [False, True])
@torch.no_grad()
def test_norms_round_where_the_official_code_does(round_first):
    """In bf16 a norm rounds before the weight, or once, after it (SDAR)."""
    x = (3 * torch.randn(64, 16, generator=torch.Generator().manual_seed(0))).bfloat16()
    norm = RMSNorm(16, SimpleNamespace(rms_norm_eps=1e-5, round_first=round_first)).bfloat16()
    norm.weight.copy_(torch.linspace(0.5, 1.7, 16))
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    before, after = norm.weight * y.bfloat16(), (norm.weight.float() * y).bfloat16()
    assert torch.equal(norm(x), before if round_first else after) and not torch.equal(before, after)
    assert not small("sdar").model.norm.round_first and small("llada2").model.norm.round_first


# --- log-probabilities ---------------------------------------------------------------------------


def ragged(lengths, side="left", T=None, seed=0, mask=MASK):
    """Rows of random ids, about half of them noised in each of three copies -> clean, noisy, score
    (noised places; none in one or two copies of a row), valid
    """
    T, generator = T or max(lengths), torch.Generator().manual_seed(seed)
    valid = torch.zeros(len(lengths), T, dtype=torch.bool)
    for row, length in zip(valid, lengths, strict=True):
        first = {"left": T - length, "right": 0, "middle": (T - length) // 2}.get(side)
        scattered = torch.randperm(T, generator=generator)[:length]
        row[scattered if first is None else torch.arange(first, first + length)] = True
    clean = torch.randint(2, mask, valid.shape, generator=generator) * valid
    score = (torch.rand(len(valid), 3, T, generator=generator) < 0.5) & valid[:, None]
    noisy = torch.where(score, mask, clean[:, None])
    score[::2, 1], score[1, :2] = False, False
    return clean, noisy, score, valid


def naive_logps(model, clean, noisy, score, valid, temperature=1.0):
    """Log-probabilities and entropies, of each copy of each row alone; 0 where not scored"""
    log_p = log_p_of(model, clean, noisy, valid, temperature)
    targets = clean[:, None, :, None].expand(*noisy.shape, 1)
    values = log_p.gather(3, targets)[..., 0], torch.special.entr(log_p.exp()).sum(3)
    return [torch.where(score, value, 0.0) for value in values]


def score_masks(noised, valid):
    """The kinds of places that methods score."""
    one, first_row = torch.zeros_like(noised), noised.clone()
    one[-1, 1, valid[-1].nonzero()[-1]] = True
    first_row[1:] = False
    late = noised & (torch.arange(valid.shape[1]) >= valid.shape[1] // 2)
    valid = valid[:, None].expand_as(noised)
    return [valid, valid & ~noised, one, late, first_row, noised]


@each_family
@pytest.mark.parametrize("side", ["left", "scattered"])
@torch.no_grad()
def test_logps_are_those_of_a_pass_over_the_clean_past(family, side):
    """Of every row alone, whatever padding lies between its tokens."""
    model = small(family)
    clean, noisy, noised, valid = ragged([22, 3, 9, 16], side)
    clean[0, valid[0].nonzero()[-1]] = 260  # a target after the mask token
    for number, score in enumerate(score_masks(noised, valid)):
        rows, options = (clean, noisy, score, valid), {"temperature": 1.0 if number % 2 else 0.6}
        logps, entropies = model.logps(*rows, **options, entropy=True)
        want = naive_logps(model, *rows, **options)
        torch.testing.assert_close([logps, entropies], want, atol=1e-11, rtol=0)
        assert score.any() and not logps[~score].any() and not entropies[~score].any()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # not tied
    model.lm_head.weight[MASK] *= 50  # the mask token has probability 0
    assert torch.equal(model.logps(*rows, **options), logps)


@each_family
@torch.no_grad()
def test_only_blocks_or_copies_with_a_scored_token_are_computed(monkeypatch, family):
    """And the clean blocks before the last of them; no column that is padding in all rows."""
    model, (clean, noisy, score, valid) = small(family), ragged([24, 20], T=27)
    hidden, shapes = model.hidden, []
    watch = lambda ids, *others: shapes.append(tuple(ids.shape)) or hidden(ids, *others)
    monkeypatch.setattr(model, "hidden", watch)
    score[:] = False
    score[0, 0, 3 + 5] = score[0, 2, 3 + 15] = score[1, 2, 7 + 6] = True  # blocks 1, 3 and 1
    model.logps(clean, noisy, score, valid)
    model.logps(clean, noisy, score & False, valid)
    assert shapes == ([(2, 12 + 8), (2, 1)] if family in BLOCK_CAUSAL else [(3, 24), (1, 24)])


def gradients(model, loss):
    names = dict(model.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))


@each_family
def test_gradients_of_logps_are_those_of_full_logits(family):
    """Of a weighted sum of log-probabilities and entropies, fp64; checkpointing changes nothing."""
    model = small(family)
    rows = ragged([10, 3, 7])
    generator = torch.Generator().manual_seed(4)
    a = torch.randn(rows[1].shape, generator=generator, dtype=torch.float64)
    want = gradients(model, (a * naive_logps(model, *rows, temperature=0.8)[0]).sum())
    passes = []
    model.layers[0].register_forward_pre_hook(lambda *_: passes.append(1))
    for model.activation_checkpointing in (False, True):
        passes.clear()
        got = gradients(model, (a * model.logps(*rows, temperature=0.8)).sum())
        assert len(passes) == 1 + model.activation_checkpointing
        for name in want:
            torch.testing.assert_close(got[name], want[name], atol=1e-9, rtol=1e-9, msg=name)
            assert want[name].abs().max() > 1e-5, name
    # a rank without scored rows takes part in the backward pass: zeros, not an error
    clean, noisy, score, valid = rows
    model.logps(clean, noisy, torch.zeros_like(score), valid).sum().backward()
    used = [p for name, p in model.named_parameters() if ".experts." not in name]
    assert all(p.grad is not None and not p.grad.any() for p in used)


# --- checkpoints ---------------------------------------------------------------------------------


@each_family
def test_a_saved_model_loads_bit_for_bit(tmp_path, monkeypatch, family):
    """From shards with their index."""
    in_shards(monkeypatch, 17000)
    model, directory = small(family, torch.float32), tmp_path / "a"
    model.eos_token_ids, model.pad_token_id = [5, 1], 1
    save_model(model, directory, byte_tokenizer())
    held = {file.name: load_file(file) for file in directory.glob("*.safetensors")}
    files = {name: file for file, tensors in held.items() for name in tensors}
    assert files.keys() == tensor_shapes(model).keys() and len(held) > 1
    assert json.loads((directory / INDEX).read_text())["weight_map"] == files
    loaded = load_model(directory)
    assert_same_weights(loaded, model)
    assert (loaded.eos_token_ids, loaded.pad_token_id, loaded.mask_token_id) == ([5, 1], 1, MASK)
    assert loaded.checkpoint_config == SMALLS[family] and loaded.block_length == 4
    is_tied = loaded.lm_head.weight is loaded.get_submodule(loaded.embedding).weight
    assert is_tied == loaded.config.tie_word_embeddings
    assert load_tokenizer(directory).get_vocab() == byte_tokenizer().get_vocab()


def test_bf16_on_disk_and_in_memory(tmp_path):
    """Tensors are bf16 as config.json says, but expert biases fp32."""
    config = SMALLS["llada2"] | {"torch_dtype": None, "dtype": "bfloat16"}
    model = model_of(config, is_rounded=True)
    save_model(model, tmp_path / "a", None)
    held, gate = load_file(tmp_path / "a/model.safetensors"), model.layers[1].mlp.gate
    wide = [name for name, value in held.items() if value.dtype != torch.bfloat16]
    assert wide == ["model.layers.1.mlp.gate.expert_bias"]
    assert not torch.equal(gate.expert_bias, gate.expert_bias.bfloat16().float())
    assert_same_weights(load_model(tmp_path / "a"), model)
    half = load_model(tmp_path / "a", dtype=torch.bfloat16)
    assert_same_weights(half.layers[1].mlp.gate, gate)
    assert half.lm_head.weight.dtype == half.layers[1].mlp.experts.down.dtype == torch.bfloat16


@pytest.fixture
def saved(tmp_path):
    """Directory of a checkpoint."""
    save_model(model_of(), tmp_path / "checkpoint", byte_tokenizer())
    return tmp_path / "checkpoint"


NORM = "model.layers.1.self_attn.q_norm.weight"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def tensors(change, file=WEIGHTS):
    """A damage: change(tensors of the file)."""

    def damage(directory):
        held = load_file(directory / file)
        change(held)
        save_file(held, directory / file, {"format": "pt"})

    return damage


def edit(file="config.json", **changes):
    def damage(directory):
        content = json.loads((directory / file).read_text())
        (directory / file).write_text(json.dumps(content | changes))

    return damage


def cut_off(directory):
    (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:-1])


DAMAGES = {
    "missing": (tensors(lambda t: t.pop(NORM)), f"checkpoint.* {NORM} is missing"),
    "extra": (tensors(lambda t: t.update(x=torch.zeros(2))), r"x is \(2,\), needed nowhere"),
    "shape": (tensors(lambda t: t.update({NORM: torch.zeros(1)})), NORM + r".*\(1,\).*\(32,\)"),
    "integers": (tensors(lambda t: t.update({NORM: t[NORM].to(torch.int8)})), f"{NORM}.*I8"),
    "cut off": (cut_off, "safetensors.*truncated"),
    "mask id": (edit(mask_token_id=7), r"mask_token_id 7 is no special.*'<\|MASK\|>': 257"),
    "no end": (
        lambda d: [(d / "generation_config.json").unlink(), edit(eos_token_id=None)(d)],
        "no config file states eos_token_id",
    ),
    "text": (
        lambda d: (d / "config.json").write_text('{"a": '),
        "config.json .*damaged.*not JSON",
    ),
}


@pytest.mark.parametrize("damage, words", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_checkpoint_is_refused_in_one_line(saved, damage, words):
    damage(saved)
    with exits_with_one_line(words):
        load_model(saved)


TEMPLATES = [  # and what it raises
    ("{% if", "TemplateSyntaxError"),
    ("{{ 1 / (messages[0].content|length - 5) }}", "ZeroDivisionError"),
    ("{{ messages[0].content }}", "UnicodeEncodeError"),
]


@pytest.mark.parametrize("template, words", TEMPLATES)
def test_what_a_template_raises_is_one_line(saved, template, words):
    (saved / "chat_template.jinja").write_text(template)
    with exits_with_one_line("checkpoint", words):
        models.prompt_ids(load_tokenizer(saved), [{"role": "user", "content": "2 + \ud800"}])


@pytest.mark.parametrize("there", [False, True])
def test_code_is_saved_along_or_not_named(saved, tmp_path, there):
    """auto_map asks for it; code in another repository needs no file."""
    named = {"AutoModel": ["modeling_a.A", None], "AutoConfig": "me/b--configuration_b.B"}
    edit(auto_map=named if there else named | {"AutoModel": "modeling_c.C"})(saved)
    for name in ("modeling_a.py", "blocks.py"):
        (saved / name).write_text("import torch")
    save_model(load_model(saved), tmp_path / "b", None)
    raw = json.loads((tmp_path / "b/config.json").read_text())
    assert (
        raw.get("auto_map") == (named if there else None) and (tmp_path / "b/blocks.py").is_file()
    )


def test_tiny_is_shipped_or_small(saved, tmp_path, monkeypatch):
    """Below 10 million parameters, whatever the width; known names are answered without a file."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    assert [models.is_tiny(name) for name in ("tiny-dream", "sdar-8b", "sdar-8b@v1")] == [1, 0, 0]
    adapted = models.add_lora(load_model(saved), 2, 4)
    models.save_adapter(adapted, tmp_path / "a", str(saved), byte_tokenizer())
    assert models.sampling_facts(tmp_path / "a") == {"gen_length": 12, "denoising_steps": 2}
    steps = lambda name: models.sampling_facts(name)["denoising_steps"]
    assert [steps(name) for name in ("JetLM/SDAR-4B-Chat", "qwen3-0.6b-bd3lm")] == [4, 32]
    large = SMALLS["llada"] | {"mlp_hidden_size": 20_000, "torch_dtype": "bfloat16"}
    save_model(random_model(large), tmp_path / "large", None)
    assert models.sampling_facts(tmp_path / "large")["cache"] == "dual"


NAMES = {
    "sdar-8b": "JetLM/SDAR-8B-Chat",
    "me/sdar": "me/sdar",
    "qwen3-0.6b-bd3lm": "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1",
}


@pytest.mark.parametrize("name, hub_id", NAMES.items())
def test_a_revision_reaches_every_file(saved, tmp_path, monkeypatch, name, hub_id):
    """Config, weights and tokenizer of a model, and of the base of its adapter. Weights come last,
    and none of a model that is not implemented.
    """
    asked, name = [], f"{name}@v1.0"
    if "qwen3" in name:  # its config.json states neither
        config = {k: v for k, v in SMALLS["a2d_block"].items() if k not in ("block_size", "shift")}
        shutil.rmtree(saved)
        save_model(model_of(config | models.names.STATED["a2d-block"]), saved, byte_tokenizer())
        del config["mask_token_id"]
        (saved / "config.json").write_text(json.dumps(config))

    def download(hub_id, revision, allow_patterns):
        asked.append((hub_id, revision, "*.safetensors" in allow_patterns))
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert models.sampling_facts(name)["gen_length"] == (12 if "me/" in name else 256)
    assert not any(weights for *_, weights in asked)
    model = models.add_lora(load_model(name), 2, 4)
    tokenizer, base = load_tokenizer(name), models.source_of(name)
    models.save_adapter(model, tmp_path / "adapter", base, tokenizer)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (hub_id, "v1.0")
    load_model(tmp_path / "adapter")
    assert {(hub_id, "v1.0")} == {(name, revision) for name, revision, _ in asked}
    assert sum(weights for *_, weights in asked) == 2
    asked.clear()
    load_model(hub_id)
    assert asked == [(hub_id, None, False), (hub_id, None, True)]
    (folder := tmp_path / "folder" / name).parent.mkdir(parents=True)
    folder.symlink_to(models.names.MODELS["tiny-sdar"])
    monkeypatch.chdir(tmp_path / "folder")
    load_model(name)  # a directory
    assert len(asked) == 2
    edit(model_type="gpt2")(saved)
    with exits_with_one_line("model_type 'gpt2'.* sdar, .*a2d-qwen2"):
        load_model(hub_id)
    assert len(asked) == 3


# --- config files --------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0}
REFUSED = [
    ("sdar", {"rope_scaling": YARN}, "rope_yarn"),
    ("sdar", {"rope_parameters": YARN}, "rope_yarn"),
    ("sdar", {"torch_dtype": "auto"}, "torch_dtype = 'auto'"),
    ("sdar", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping.*30.0"),
    ("sdar", {"rms_norm_eps": None}, "lacks rms_norm_eps"),
    ("sdar", {"model_type": "qwen3"}, "qwen3.*models/from_ar.py"),
    ("sdar", {"model_type": None, "script": "d1"}, "None; .* of a run.* checkpoints/"),
    ("a2d_block", {"block_size": None}, "block_size None; add block_size: 0"),
    ("a2d_block", {"shift": True}, "shift = true.*block_size = 0"),
    ("sdar", {"block_size": 0}, "block_size = 0: no int, 1 to"),
    ("sdar", {"rope_theta": math.nan}, "rope_theta = nan: no float"),
    ("sdar", {"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false': no bool"),
    ("llada2", {"num_experts": 10**400}, "num_experts = 1000"),
    ("llada", {"n_heads": True}, "n_heads = True"),
    ("sdar_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ("llada", {"activation_type": "swiglu"}, "activation_type.*swiglu.*silu"),
    ("llada_moe", {"moe_layer_freq": [0, 1]}, r"moe_layer_freq = \[0, 1\]"),
    ("dream", {"tie_word_embeddings": True}, "tie_word_embeddings"),
]


@pytest.mark.parametrize("family, change, words", REFUSED)
def test_what_a_config_asks_and_we_lack_is_refused(family, change, words):
    build_model(SMALLS[family])
    with exits_with_one_line("config.json", words):
        raw = (SMALLS[family] | change).items()
        build_model({key: value for key, value in raw if value is not None})


def test_what_config_files_leave_out():
    """Family defaults"""
    silent = ("mask_token_id", "eos_token_id", "pad_token_id", "block_size", "block_length")
    quiet = lambda family: {k: v for k, v in SMALLS[family].items() if k not in silent}
    for family in ("llada2", "llada_moe"):
        model = set_special_tokens(build_model(quiet(family)))
        facts = model.mask_token_id, model.eos_token_ids, model.block_length
        assert facts == (156895, [156892], 32)
    model = build_model(quiet("sdar_moe"))
    assert (model.mask_token_id, model.block_length) == (151669, 4)


# --- saving under adversity ----------------------------------------------------------------------


def test_a_failed_save_leaves_the_earlier_checkpoint(tmp_path):
    """'SystemExit if the directory exists or cannot be written: then nothing appears under its
    name.'
    """
    model, limits = model_of(), resource.getrlimit(resource.RLIMIT_FSIZE)
    save_model(model, tmp_path / "step-1", byte_tokenizer())
    for target, limit in ("step-1", limits[0]), ("step-2", 1500):  # which acts as a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with exits_with_one_line(f"could not save .*{target}"):
                save_model(random_model(TINY_SDAR), tmp_path / target, byte_tokenizer())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_same_weights(load_model(tmp_path / "step-1"), model)
    assert os.listdir(tmp_path) == ["step-1"]  # its own remains are removed


# --- official files ------------------------------------------------------------------------------

OFFICIAL = {  # bytes beyond bf16; mask, block length, end ids, padding
    "LLaDA-8B-Instruct": (0, 126336, 32, [126348, 126081], 126081),
    "Dream-v0-Instruct-7B": (0, 151666, 32, [151645, 151643], 151643),
    "SDAR-4B-Chat": (0, 151669, 4, [151645, 151643], 151643),
    "SDAR-30B-A3B-Chat": (0, 151669, 4, [151645, 151643], 151643),
    "LLaDA2.0-mini": (0, 156895, 32, [156892], 156892),
    # only the biases are fp32
    "LLaDA2.1-mini": (19 * 256 * 2, 156895, 32, [156892], 156892),
}


def official(name, file):
    return json.loads((Path(HF) / name / file).read_text())


@needs_hf
@pytest.mark.parametrize("name", OFFICIAL)
def test_names_sizes_and_ids_are_those_of_the_official_files(name):
    more, *facts = OFFICIAL[name]
    model, index = build_model(official(name, "config.json")), official(name, INDEX)
    shapes = tensor_shapes(model)
    assert shapes.keys() == index["weight_map"].keys()
    size = 2 * sum(map(math.prod, shapes.values())) + more
    assert size == index["metadata"]["total_size"]
    set_special_tokens(model, Path(HF) / name)
    got = [model.mask_token_id, model.block_length, model.eos_token_ids, model.pad_token_id]
    assert got == facts


@needs_hf
def test_the_turn_end_is_found_by_name(tmp_path):
    """In the tokenizer file that is there; a tokenizer without the mask token is refused."""
    model = build_model(official("LLaDA2.0-mini", "config.json"))
    tokens = {"<|endoftext|>": 156892, "<|role_end|>": 156894}
    for mask in (156895, 156896):
        added = [{"content": t, "id": i} for t, i in (tokens | {"<|mask|>": mask}).items()]
        (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
        if mask == 156895:
            assert set_special_tokens(model, tmp_path).eos_token_ids == [156894, 156892]
    with exits_with_one_line("mask_token_id 156895"):
        set_special_tokens(model, tmp_path)


TEXTS = {  # ids of Dream's official slow tokenizer, tokenization_dream.py as in yjyddq/DARE 83ae8a3
    "Hello world": [9707, 1879],
    "e\u0301te\u0301 漢字 🙂 don't": [38783, 6567, 120, 95, 18600, 27484, 1513, 944],
    "a<|mask|><|im_end|>\n<|endoftext|>b": [64, 151666, 151645, 198, 151643, 65],
}


@needs_hf
def test_official_tokens(tmp_path):
    """Without remote code, from official files and from those that we save."""
    dream = load_tokenizer(Path(HF) / "Dream-v0-Instruct-7B")
    shutil.copy(Path(HF) / "Dream-v0-Instruct-7B/config.json", tmp_path)
    dream.save_pretrained(tmp_path)
    for tokenizer in (dream, load_tokenizer(tmp_path)):
        assert len(tokenizer) == 151667 and tokenizer.mask_token_id == 151666
        for text, ids in TEXTS.items():
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    sdar = load_tokenizer(Path(HF) / "SDAR-8B-Chat")
    assert len(sdar) == 151670 and sdar.convert_tokens_to_ids("<|MASK|>") == 151669
    assert len(sdar("<MASK>", add_special_tokens=False)["input_ids"]) == 3  # it is no token


# --- autoregressive models -----------------------------------------------------------------------


@pytest.fixture
def autoregressive(tmp_path):
    """Directory of a Qwen2 with a tied head; files of others hold these copies."""
    config = SMALLS["a2d_block"] | {"torch_dtype": "bfloat16", "vocab_size": 260}
    save_model(model_of(config, is_rounded=True), tmp_path / "old", byte_tokenizer())
    edit(model_type="qwen2", mask_token_id=None, block_size=None, shift=None)(tmp_path / "old")
    tensors(lambda t: t.update(COPIES))(tmp_path / "old")
    return tmp_path / "old"


COPIES = {"lm_head.weight": torch.zeros(260, 96), "a.rotary_emb.inv_freq": torch.zeros(4)}


CONVERTED = [  # flags; attention, length of blocks
    ({}, ("block-causal", 4)),
    ({"block_length": 8}, ("block-causal", 8)),
    ({"bidirectional": True, "shift": True}, ("bidirectional", 32)),
]


@pytest.mark.parametrize("flags, facts", CONVERTED)
def test_an_autoregressive_model_is_converted(autoregressive, tmp_path, flags, facts):
    """Its tensors bit for bit; the row of the mask token is the mean. Without a mask token one is
    added, behind the last row.
    """
    has_mask, new = bool(flags), str(tmp_path / "new")
    if not has_mask:
        for name in "tokenizer.json", "tokenizer_config.json":
            text = (autoregressive / name).read_text().replace("<|MASK|>", "<|none|>")
            (autoregressive / name).write_text(text.replace('"mask_token"', '"no_token"'))
    from_ar.main(str(autoregressive), new, **flags)
    old, held = load_file(autoregressive / WEIGHTS), load_file(tmp_path / "new" / WEIGHTS)
    row, name = MASK if has_mask else 260, "model.embed_tokens.weight"
    want, got = old.pop(name), held.pop(name)
    assert len(got) == (260 if has_mask else 320) and got.dtype == torch.bfloat16
    assert torch.equal(got[:row], want[:row]) and torch.equal(got[row + 1 : 260], want[row + 1 :])
    torch.testing.assert_close(got[row], want[:row].float().mean(0).bfloat16())
    assert held.keys() | COPIES.keys() == old.keys()
    assert all(torch.equal(value, old[name]) for name, value in held.items())
    model, tokenizer = load_model(new), load_tokenizer(new)
    assert (model.attention, model.block_length) == facts and model.eos_token_ids == [256]
    assert model.config.shift == ("shift" in flags)
    assert model.mask_token_id == tokenizer.mask_token_id == row


def test_qwen3_answers_without_thinking(saved):
    edit(model_type="a2d-qwen3")(saved)
    template = "{{ enable_thinking is defined and enable_thinking is false }}"
    (saved / "chat_template.jinja").write_text(template)
    for _ in range(2):
        tokenizer = load_tokenizer(saved)
        assert prompt_text(tokenizer, [{}]) == "True"
        tokenizer.save_pretrained(saved)
    assert tokenizer.chat_template.count("set ") == 1


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'; .* are qwen2, qwen3, llama"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_a_model_that_cannot_be_converted_is_refused(autoregressive, tmp_path, change, words):
    edit(**change)(autoregressive)
    with exits_with_one_line(words):
        from_ar.main(str(autoregressive), str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


# --- tiny models ---------------------------------------------------------------------------------


def test_the_command_writes_a_model_with_random_weights(tmp_path):
    random_init.main(str(tmp_path / "one"), "tiny-llada")
    want = random_model(TINY_CONFIGS["tiny-llada"])
    assert_same_weights(load_model(tmp_path / "one"), want)
    assert load_tokenizer(tmp_path / "one").mask_token_id == MASK
