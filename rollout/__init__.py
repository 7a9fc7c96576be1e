"""Samplers: engines with their own weights that generate completions and record how."""
# ruff: noqa: F401

from pathlib import Path

from models import export_adapter, export_weights, has_lora, load_weights, meta_model
from models.tensors import frozen_dtype
from rollout.autoregressive import autoregressive_engine
from rollout.block import BlockEngine
from rollout.masked import MaskedEngine
from rollout.probe import probe, warn
from rollout.sampling import keyed_uniform
from rollout.traces import Trace, gathered, rollout_metrics


def make_engine(
    model_or_dir, backend="auto", device="cpu", dtype=None, max_batch_size=256, request=None
):
    """The sampler of a model; on CUDA the fast one of kernels/.

    model_or_dir: a key of models.MODELS or a directory, loaded in `dtype` (default bf16 on GPU,
    fp32 on CPU), or a model instance, which becomes the engine's own: on CUDA its layers are
    replaced by fused ones. backend: "auto" follows the model's attention pattern: "block" is cached
    block-causal decoding, "masked" decodes bidirectional models. "lmdeploy" is that package's
    engine for SDAR on CUDA, which reads the directory itself, in bf16. Autoregressive models, which
    only evaluations run, have it and "transformers". max_batch_size: rows decoded together; the
    others wait, with the same tokens. request: (records, settings) for the engine's `validate`,
    which refuses what it cannot do before weights are read.
    """
    is_named = isinstance(model_or_dir, (str, Path))
    if engine := is_named and autoregressive_engine(model_or_dir, backend, device, max_batch_size):
        return engine
    if backend == "lmdeploy":
        from rollout.lmdeploy import LmdeployEngine

        return LmdeployEngine(model_or_dir, device, max_batch_size, request)
    model = model_or_dir
    if is_named:
        model = meta_model(model_or_dir, dtype or frozen_dtype(device))
    is_block = model.attention == "block-causal"
    name, engine = ("block", BlockEngine) if is_block else ("masked", MaskedEngine)
    if backend not in ("auto", name):
        raise SystemExit(
            f"--rollout-backend {backend} cannot serve a {model.attention} model: use {name} or "
            "auto"
        )
    if request:
        engine(model, max_batch_size).validate(request[0], **request[1])
    model = load_weights(model, device) if is_named else model
    if model.lm_head.weight.is_cuda:
        from kernels import speed_up_engine
        from kernels.block import FastBlockEngine
        from kernels.masked import FastMaskedEngine

        speed_up_engine(model)
        engine = FastBlockEngine if is_block else FastMaskedEngine
    return engine(model, max_batch_size)


def sync_engine(engine, model):
    """Hand the weights of a model that learns to the engine; only the adapters if the engine has
    adapters of its own. Collective.
    """
    exported = export_adapter(model) if has_lora(engine.model) else export_weights(model)
    engine.load_weights(exported)
