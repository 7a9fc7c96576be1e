"""Samplers: engines with a model of their own that generate completions and record how."""
# ruff: noqa: F401

from pathlib import Path

from models import add_lora, export_adapter, export_weights, load_weights, meta_model
from models.tensors import frozen_dtype, full_tensor, materialize
from rollout.autoregressive import autoregressive_engine
from rollout.block import BlockEngine
from rollout.masked import MaskedEngine
from rollout.probe import probe, warn
from rollout.sampling import keyed_uniform
from rollout.traces import Trace, gathered, rollout_metrics


def make_engine(
    model_or_dir, backend="auto", device="cpu", dtype=None, max_batch_size=256, request=None,
    lora=(),
):  # fmt: skip
    """The sampler of a model; on CUDA the fast one of kernels/.

    model_or_dir: a key of models.MODELS or a directory, loaded in `dtype` (default bf16 on GPU,
    fp32 on CPU), or a model instance, which becomes the engine's own: on CUDA its layers are
    replaced by fused ones. backend: "auto" follows the model's attention pattern: "block" is cached
    block-causal decoding, "masked" decodes bidirectional models. "lmdeploy" is that package's
    engine for SDAR on CUDA, which reads the directory itself, in bf16. Autoregressive models, which
    only evaluations run, have it and "transformers". max_batch_size: rows decoded together; the
    others wait, with the same tokens. request: (records, settings) of a run, whose model hands its
    weights over with `sync_engine`: before that the engine has none. lmdeploy, which reads weights
    all the same, refuses first what it cannot do. lora: arguments of add_lora, for adapters; the
    weights under them take no memory before they come.
    """
    is_named = isinstance(model_or_dir, (str, Path))
    if engine := is_named and autoregressive_engine(model_or_dir, backend, device, max_batch_size):
        return engine
    if backend == "lmdeploy":
        from rollout.lmdeploy import LmdeployEngine

        return LmdeployEngine(model_or_dir, device, max_batch_size, request)
    dtype = dtype or frozen_dtype(device)
    model = meta_model(model_or_dir, dtype) if is_named else model_or_dir
    is_block = model.attention == "block-causal"
    name, engine = ("block", BlockEngine) if is_block else ("masked", MaskedEngine)
    if backend not in ("auto", name):
        raise SystemExit(
            f"--rollout-backend {backend} cannot serve a {model.attention} model: use {name} or "
            "auto"
        )
    if request:
        materialize(add_lora(model, *lora, dtype) if lora else model, device)
        for value in model.parameters():
            if not value.requires_grad:  # the base under adapters: sync_engine brings it
                value.data = value.new_empty(()).expand_as(value)
    elif is_named:
        load_weights(model, device)
    if not model.lm_head.weight.is_cuda:
        return engine(model, max_batch_size)
    from kernels import speed_up_engine
    from kernels.block import FastBlockEngine
    from kernels.masked import FastMaskedEngine

    engine = (FastBlockEngine if is_block else FastMaskedEngine)(model, max_batch_size)
    speed_up_engine(engine)
    return engine


def sync_engine(engine, model, whole=False):
    """Hand the weights of a model that learns to the engine; if the engine has adapters of its own
    these alone, but with `whole` the frozen weights too. Collective.

    With `whole` the engine takes the frozen tensors themselves, if this rank holds them whole and
    in the engine's dtype; nobody writes to them.
    """
    if whole and engine.model.lora_config:
        engine.release()  # CUDA graphs hold addresses
        own = engine.model.state_dict(keep_vars=True)
        for name, value in model.state_dict().items():
            mine, value = own[name], full_tensor(value)
            if mine.requires_grad:  # adapters, of which kernels hold views
                mine.data.copy_(value)
            else:
                mine.data = value.to(mine)
    else:
        exported = export_adapter(model) if engine.model.lora_config else export_weights(model)
        engine.load_weights(exported)
