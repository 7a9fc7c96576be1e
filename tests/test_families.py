"""Every family through the same code: sharded loading, fp32 islands, and the scripts on one and two ranks."""

import json
import math
import os
import socket
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import readme_table
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

import runlog
from algos import bgpo, cj_grpo, coupled_grpo, d1, mdpo, sft, spg, vrpo
from bench.train import coin
from evals import countdown
from evals.rewards import REWARDS
from models import (
    MODELS,
    add_lora,
    export_weights,
    llada,
    load_model,
    load_tokenizer,
    load_weights,
    meta_model,
    save_adapter,
    save_model,
    source_of,
)
from models import checkpoint as checkpoint_module
from models.checkpoint import tensor_parts
from models.random_init import TINY_CONFIGS, byte_tokenizer, random_model

FAMILIES = list(TINY_CONFIGS)
ARGS = SimpleNamespace(activation_checkpointing=False, attention="auto", compile=False)
SCRIPTS = {
    "sft": sft, "d1": d1, "bgpo": bgpo, "cj_grpo": cj_grpo, "coupled_grpo": coupled_grpo, "spg": spg, "mdpo": mdpo,
    "vrpo": vrpo,
}  # fmt: skip
SMALL = {"max_steps": 2, "eval_limit": 0, "learning_rate": 1e-3, "micro_batch_size": 4}
FLAGS = {
    "sft": {"batch_size": 8, "eos_tail": 6},
    "vrpo": {"batch_size": 4, "mc_num": 2, "micro_batch_size": 3},
    "d1": {"prompts_per_step": 4, "num_generations": 4, "num_iterations": 2, "reward": "coin"},
    "bgpo": {"prompts_per_step": 4, "num_generations": 4, "mc_num": 2, "reward": "coin"},
    "cj_grpo": {
        "prompts_per_step": 4,
        "num_generations": 4,
        "num_iterations": 2,
        "reward": "coin",
        "micro_batch_size": 32,
    },
    "spg": {"prompts_per_step": 2, "num_generations": 4, "num_iterations": 2, "reward": "coin"},
    "mdpo": {
        "prompts_per_step": 4,
        "num_generations": 4,
        "train_steps": 3,
        "reward": "coin",
        "micro_batch_size": 16,
    }
    | {"remasking": "rcr", "denoising_steps": 4},
    "coupled_grpo": {
        "prompts_per_step": 2,
        "num_generations": 4,
        "reward": "coin",
        "ref_sync_steps": 2,
    },
}


def saved(family, directory):
    """A random checkpoint of the family on disk, biases and norms random too. -> the model"""
    model = random_model(TINY_CONFIGS[family])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.dim() == 1:
                value.add_(torch.randn(value.shape, generator=generator) * 0.1)
    model.eos_token_ids, model.pad_token_id = [256], 256
    save_model(model, directory, byte_tokenizer())
    return model


# --- loading -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_load_their_rows_alone(run_ranks, tmp_path, monkeypatch, family):
    """meta -> shard -> load: the gathered weights are the file's, bit for bit, and no rank read much more than its half."""
    whole = saved(family, tmp_path / "model")
    total = sum(value.numel() for value in whole.state_dict().values())
    real_open, read = checkpoint_module.safe_open, []

    class Slice:
        def __init__(self, view):
            self.view, self.get_shape, self.get_dtype = view, view.get_shape, view.get_dtype

        def __getitem__(self, rows):
            tensor = self.view[rows]
            read.append(tensor.numel())
            return tensor

    class File:
        def __init__(self, *args, **kwargs):
            self.file = real_open(*args, **kwargs)
            self.keys = self.file.keys

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def get_slice(self, name):
            return Slice(self.file.get_slice(name))

    monkeypatch.setattr(checkpoint_module, "safe_open", File)

    def body(rank, world_size):
        model = d1.parallelize(meta_model(str(tmp_path / "model")), ARGS)
        assert all(parameter.is_meta for parameter in model.parameters())
        load_weights(model, "cpu")
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        want = dict(export_weights(whole))
        for name, value in export_weights(model):
            assert torch.equal(value, want.pop(name)), name
        assert not want
        assert 0.4 * total < sum(read) < 0.55 * total

    run_ranks(2, body)


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_adapters_start_like_whole_ones(run_ranks, tmp_path, family):
    saved(family, tmp_path / "model")

    def body(rank, world_size):
        whole = add_lora(load_model(str(tmp_path / "model")), 4, 8, seed=3)
        model = d1.parallelize(add_lora(meta_model(str(tmp_path / "model")), 4, 8, seed=3), ARGS)
        load_weights(model, "cpu")
        assert {n for n, p in model.named_parameters() if p.requires_grad} == {
            n for n, p in whole.named_parameters() if p.requires_grad
        }
        for (name, a), b in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(a.full_tensor(), b), name

    run_ranks(2, body)


@pytest.mark.parametrize(
    "change", [{"num_experts": 2, "n_group": 1, "topk_group": 1}, {"intermediate_size": 40}]
)
def test_three_ranks_load_rows_that_do_not_divide(run_ranks, tmp_path, change):
    """FSDP2's shards are unequal: 265 tokens, 16 experts; of 2 experts the last rank has none. Weights and first adapters."""
    whole = random_model(
        TINY_CONFIGS["tiny-llada2"] | {"vocab_size": 265, "num_hidden_layers": 2} | change
    )
    whole.eos_token_ids, whole.pad_token_id = [256], 256
    save_model(whole, tmp_path / "model", byte_tokenizer())
    directory = str(tmp_path / "model")
    want, adapted = dict(export_weights(whole)), add_lora(load_model(directory), 4, 8, seed=3)

    def body(rank, world_size):
        model = load_weights(
            d1.parallelize(add_lora(meta_model(directory), 4, 8, seed=3), ARGS), "cpu"
        )
        assert len(model.lm_head.weight.to_local()) == (89, 89, 87)[rank]
        for name, value in export_weights(model):
            assert torch.equal(value, want[name]), name
        for (name, a), b in zip(model.named_parameters(), adapted.parameters(), strict=True):
            assert torch.equal(a.full_tensor(), b), name

    run_ranks(3, body)


def test_models_built_in_the_process(run_ranks):
    """`--model tiny-dream` needs no file: the same weights on every rank and sharding."""

    def body(rank, world_size):
        for name in MODELS:
            if not MODELS[name].startswith("random:"):
                continue
            whole, model = (
                load_model(name),
                load_weights(d1.parallelize(meta_model(name), ARGS), "cpu"),
            )
            adapted = load_weights(d1.parallelize(add_lora(meta_model(name), 4, 8), ARGS), "cpu")
            want = dict(export_weights(whole))
            for sharded in (model, adapted):
                assert all(
                    torch.equal(value, want[key])
                    for key, value in export_weights(sharded, merge_lora=False)
                )
            assert load_tokenizer(
                name
            ).mask_token_id == whole.mask_token_id and whole.eos_token_ids == [256]

    run_ranks(2, body)


# --- fp32 islands ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [f for f in FAMILIES if "num_experts" in TINY_CONFIGS[f]])
def test_fp32_islands_stay_fp32(run_ranks, family):
    """Router and selection bias: through .to(bf16), on meta, materialised, and inside FSDP2's bf16 compute."""

    def island(name):
        return name.endswith(("mlp.gate.weight", "expert_bias"))

    for model in (
        random_model(TINY_CONFIGS[family]),
        checkpoint_module.build_model(TINY_CONFIGS[family]),
    ):
        before = {name: value.clone() for name, value in model.state_dict().items() if island(name)}
        model.to(torch.bfloat16)
        for name, value in model.state_dict().items():
            assert value.dtype == (torch.float32 if island(name) else torch.bfloat16), name
            assert not island(name) or value.is_meta or torch.equal(value, before[name])
        assert before and model.fp32_modules

    def body(rank, world_size):
        model, seen = in_bf16(family), []
        for module in model.fp32_modules:
            module.register_forward_hook(
                lambda module, inputs, out: seen.append((module.weight.dtype, out.dtype))
            )
        linears = [
            module for module in model.layers[1].modules() if type(module) is torch.nn.Linear
        ]
        linears[0].register_forward_hook(
            lambda module, inputs, out: seen.append((module.weight.dtype, out.dtype))
        )
        model.logits(torch.zeros(1, 8, dtype=torch.long))
        assert seen.count((torch.float32, torch.float32)) == len(model.fp32_modules)
        assert (
            seen.count((torch.bfloat16, torch.bfloat16)) == 1 == len(seen) - len(model.fp32_modules)
        )

    run_ranks(1, body)


def in_bf16(family):
    """A model as parallelize makes it on a GPU: bf16 compute."""
    plain = d1.MixedPrecisionPolicy
    with pytest.MonkeyPatch.context() as patch:
        half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        patch.setattr(d1, "MixedPrecisionPolicy", lambda **given: plain(**half | given))
        return load_weights(d1.parallelize(meta_model(family), ARGS), "cpu")


def test_tables_reach_wrapped_blocks_unrounded(run_ranks, monkeypatch):
    """LLaDA rotates in fp32: FSDP2 would cast the tables with the other inputs of a block."""
    rotate, seen = llada.rotate, []
    monkeypatch.setattr(
        llada,
        "rotate",
        lambda x, cos, sin: seen.append((x.dtype, cos.dtype)) or rotate(x, cos, sin),
    )

    def body(rank, world_size):
        in_bf16("tiny-llada").logits(torch.zeros(1, 8, dtype=torch.long))
        assert len(seen) == 8 and set(seen) == {(torch.bfloat16, torch.float32)}

    run_ranks(1, body)


@pytest.mark.parametrize("family", ["llada", "dream", "sdar", "llada2"])
@torch.no_grad()
def test_norms_round_where_the_official_code_does(family):
    """In bf16: before the weight, but SDAR's once, behind it. Bit for bit; the other order is another result."""
    x = (3 * torch.randn(64, 16, generator=torch.Generator().manual_seed(0))).bfloat16()
    norm = import_module(f"models.{family}").RMSNorm(16, 1e-5).bfloat16()
    norm.weight.copy_(torch.linspace(0.5, 1.7, 16))
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    before, after = norm.weight * y.bfloat16(), (norm.weight.float() * y).bfloat16()
    want, other = (after, before) if family == "sdar" else (before, after)
    assert torch.equal(norm(x), want) and not torch.equal(norm(x), other)


@pytest.mark.parametrize("family", ["llada", "dream", "sdar", "llada2"])
def test_rope_angles_are_never_rounded(family):
    """Tables in bf16 are the rounded cosines of exact angles, far from the start too; cosines of rounded angles are noise."""
    rope_tables, like = (
        import_module(f"models.{family}").rope_tables,
        [] if family == "llada" else [torch.bfloat16],
    )
    position_ids = torch.tensor([[0, 1, 63, 257, 1023, 4095]])
    exact = torch.outer(position_ids[0].double(), 1e6 ** -(torch.arange(0, 64, 2).double() / 64))
    exact = torch.cat([exact, exact], -1)
    near = lambda got, want: (
        (got[0, 0].double() - want).abs().max() < (0.001 if family == "llada" else 0.004)
    )
    cos, sin = rope_tables(position_ids, 64, 1e6, *like)
    assert near(cos, exact.cos()) and near(sin, exact.sin())
    assert not near(exact.bfloat16().double().cos()[None, None], exact.cos())  # negative control


# --- scripts -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def imports():
    """What every child would otherwise import for itself."""
    import peft  # noqa: F401
    import torch._dynamo  # noqa: F401

    load_tokenizer("tiny-sdar")


def _script(rank, world_size, port, script, flags, out):
    torch.set_num_threads(1)
    runlog.RunLog.plot = lambda self: None
    load = countdown.load
    countdown.load = lambda split, path=None, limit=None: load(split, path, min(limit or 60, 60))
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }
    module = SCRIPTS[script]
    module.main(replace(module.Args(), **SMALL | FLAGS[script] | flags, out=str(out)))


def run_script(script, flags, ranks, out):
    """The script's own main in forked processes, as under torchrun. -> rows of metrics.jsonl"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(
        _script,
        args=(ranks, port, script, flags, out),
        nprocs=ranks,
        join=True,
        start_method="fork",
    )
    (directory,) = out.iterdir()
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


# Scripts that CI runs on these alone, because their rows are tested on every family; mdpo takes bidirectional models.
SOME = {
    "vrpo": ("tiny-llada", "tiny-dream", "tiny-llada2"),
    "cj_grpo": ("tiny-llada", "tiny-llada2"),
    "mdpo": ("tiny-dream",),
}
PAIRWISE = [
    (f, s, 4 * ((i + j) % 2))
    for i, f in enumerate(FAMILIES)
    for j, s in enumerate(SCRIPTS)
    if f in SOME.get(s, FAMILIES)
]
GRID = [
    pytest.param(f, s, rank, marks=[] if (f, s, rank) in PAIRWISE else pytest.mark.full)
    for f in FAMILIES
    for s in SCRIPTS
    for rank in (0, 4)
    if s not in readme_table.FAMILIES or f in ("tiny-llada", "tiny-dream")
]


@pytest.mark.parametrize("family, script, lora_rank", GRID)
def test_scripts_run_on_every_family(tmp_path, monkeypatch, imports, family, script, lora_rank):
    """Unchanged, on one rank and on two, full and LoRA: finite, moving, and two ranks with other micro-batches equal one."""
    monkeypatch.setitem(REWARDS, "coin", coin)  # random weights solve nothing
    flags = {"model": family, "lora_rank": lora_rank}
    one = run_script(script, flags, 1, tmp_path / "one")
    flags["micro_batch_size"] = (SMALL | FLAGS[script])[
        "micro_batch_size"
    ] // 2 + 1  # no divisor: 3 for 4
    two = run_script(script, flags, 2, tmp_path / "two")
    steps = [row for row in one if "loss/total" in row]
    assert len(steps) == 2 and any(row["optim/grad_norm"] > 0 for row in steps)
    experts = TINY_CONFIGS[family].get("num_experts")
    for row in steps + [row for row in two if "loss/total" in row]:
        assert ("router/entropy" in row) == ("router/max_over_mean" in row) == bool(experts)
        assert (
            not experts
            or 0 < row["router/entropy"] < math.log(experts)
            and 1 < row["router/max_over_mean"] < experts
        )
    for a, b in zip(one, two, strict=True):
        for name in a.keys() - {"probe/logp_gap_mean", "probe/logp_gap_max"}:
            if not name.startswith(
                ("time/", "speed/", "memory/", "router/")
            ):  # routing counts padding, and so the layout
                assert math.isfinite(a[name]) and a[name] == pytest.approx(
                    b[name], rel=1e-4, abs=1e-5
                ), (
                    name,
                    a[name],
                    b[name],
                )


def test_every_official_tensor_is_reached_once():
    for family in FAMILIES:
        parts = tensor_parts(random_model(TINY_CONFIGS[family]))
        assert len(parts) == len({(id(value), str(index)) for value, index in parts.values()})


# --- bad input ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "damage", ["dtype", "mask id", "missing shard", "rope scaling", "unknown key"]
)
def test_a_damaged_directory_is_refused_in_one_line(tmp_path, monkeypatch, family, damage):
    monkeypatch.setattr(checkpoint_module, "SHARD_BYTES", 300_000)
    directory = tmp_path / "model"
    saved(family, directory)
    config = json.loads((directory / "config.json").read_text())
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    name, file = list(index.items())[-1]
    if damage == "dtype":
        tensors = load_file(directory / file)
        save_file(tensors | {name: tensors[name].to(torch.int8)}, directory / file)
        words = [name, "I8"]
    elif damage == "mask id":
        config["mask_token_id"], words = 7, ["mask_token_id 7", "<|MASK|> 257"]
    elif damage == "missing shard":
        (directory / file).unlink()
        words = [file]
    elif damage == "rope scaling":
        config["rope_scaling"], words = {"type": "linear", "factor": 2.0}, ["rope_scaling"]
    else:
        config["attn_logit_softcapping"], words = 30.0, ["attn_logit_softcapping", "30.0"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as refused:
        load_model(str(directory))
    assert all(word in str(refused.value) for word in words) and "\n" not in str(refused.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_impossible_attention_backend_is_refused_before_weights_are_read(monkeypatch, family):
    """flex, which a model with frozen weights may use on CPU, and varlen, which does nothing there, stop a trained one."""
    monkeypatch.setattr(
        checkpoint_module, "materialize", lambda *_: pytest.fail("weights were allocated first")
    )
    for backend in ("flex", "varlen"):
        model = meta_model(family)
        model.attention_backend = backend
        with pytest.raises(SystemExit, match=f"--attention {backend} .* here: sdpa$"):
            load_weights(model, "cpu")
    monkeypatch.undo()
    frozen = meta_model(family).requires_grad_(False)
    frozen.attention_backend = "flex"
    load_weights(frozen, "cpu")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "change, words",
    [
        ({"rope_parameters": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}}, "12345"),
        ({"rope_parameters": {"rope_type": "default", "mscale": 0.7}}, "mscale"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"torch_dtype": "int8"}, "torch_dtype = 'int8'"),
        ({"torch_dtype": "auto"}, "torch_dtype = 'auto'"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
    ],
)
def test_facts_in_other_places_are_not_overlooked(family, change, words):
    with pytest.raises(SystemExit, match=words):
        checkpoint_module.build_model(TINY_CONFIGS[family] | change)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_whole_numbers(family):
    layers = "n_layers" if family == "tiny-llada" else "num_hidden_layers"
    for bad in (0, -1, 2.5, "4"):
        with pytest.raises(SystemExit, match=layers):
            checkpoint_module.build_model(TINY_CONFIGS[family] | {layers: bad})
    for bad in ("1e-5", True):
        with pytest.raises(SystemExit, match="rms_norm_eps"):
            checkpoint_module.build_model(TINY_CONFIGS[family] | {"rms_norm_eps": bad})
    own = "block_size" if "block_size" in TINY_CONFIGS[family] else "block_length"
    for bad in (0, -1, 2.5, True, "4"):
        with pytest.raises(SystemExit, match=f"{own} = {bad!r}"):
            checkpoint_module.build_model(TINY_CONFIGS[family] | {own: bad})
    for bad in (-1, 1.5, "257"):
        with pytest.raises(SystemExit, match=f"mask_token_id = {bad!r}"):
            checkpoint_module.build_model(TINY_CONFIGS[family] | {"mask_token_id": bad})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", ["eos_token_id", "pad_token_id", "mask_token_id"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_ids_are_tokens_of_the_model(tmp_path, family, key, file):
    """264 rows: 263 is a token; 264 and negative ids, which would fail at the first rollout, are refused."""
    if file == "generation_config.json" and key == "mask_token_id":
        return  # it states none
    saved(family, tmp_path / "model")
    (tmp_path / "model/tokenizer.json").unlink()  # which would refuse the mask id first
    (tmp_path / "model/tokenizer_config.json").unlink()
    if file == "config.json":
        (tmp_path / "model/generation_config.json").unlink()
    path = tmp_path / "model" / file
    good = json.loads(path.read_text())
    for value in (263, [263]) if key == "eos_token_id" else (263,):
        path.write_text(json.dumps(good | {key: value}))
        meta_model(str(tmp_path / "model"))
    for value in (264, -1, [256, 264], "256") if key == "eos_token_id" else (264, -1):
        path.write_text(json.dumps(good | {key: value}))
        with pytest.raises(SystemExit, match=key) as refused:
            meta_model(str(tmp_path / "model"))
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if MODELS[name].startswith("random:")]
)
def test_an_adapter_of_a_model_built_in_the_process_loads(run_ranks, tmp_path, family):
    def body(rank, world_size):
        model = add_lora(load_model(family), 4, 8, seed=2)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "lora_B" in name:
                    value.normal_(generator=torch.Generator().manual_seed(5))
        save_adapter(model, tmp_path / "adapter", source_of(family), load_tokenizer(family))
        want = dict(export_weights(model))
        for name, value in load_model(str(tmp_path / "adapter")).state_dict().items():
            if name in want:
                torch.testing.assert_close(value, want[name], atol=1e-6, rtol=1e-5)

    run_ranks(1, body)


@pytest.mark.parametrize(
    "family, change, words",
    [
        ("tiny-sdar-moe", {"num_experts": None}, "num_experts"),
        ("tiny-sdar-moe", {"norm_topk_prob": None}, "norm_topk_prob"),
        ("tiny-llada2", {"n_group": 3}, "n_group = 3"),
        ("tiny-llada2", {"topk_group": 5}, "topk_group = 5"),
        ("tiny-llada2", {"n_group": 16}, "n_group = 16"),
        ("tiny-llada2", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9"),
        ("tiny-llada2", {"rotary_dim": 9, "partial_rotary_factor": 0.3}, "partial_rotary_factor"),
        ("tiny-sdar-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9"),
    ],
)
def test_configs_that_would_mean_another_model(family, change, words):
    config = {
        key: value for key, value in (TINY_CONFIGS[family] | change).items() if value is not None
    }
    with pytest.raises(SystemExit, match=words):
        checkpoint_module.build_model(config)
