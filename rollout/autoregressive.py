"""Autoregressive models, for evaluations alone: what a diffusion model is made from is scored with
the same prompts, and its answers become rows to train on (data/own_samples.py).

To a sampler such a model is a block-causal one with blocks of one token and no mask.
"""

from importlib.util import find_spec
from types import SimpleNamespace

import torch
from torch.nn.utils.rnn import pad_sequence

from models.checkpoint import set_special_tokens
from models.config import AUTOREGRESSIVE
from models.names import checkpoint_config
from models.tensors import frozen_dtype
from rollout.engine import Engine
from rollout.sampling import keyed_uniform
from rollout.traces import Trace, scored


def autoregressive_engine(name_or_dir, backend, device, max_batch_size):
    """-> the sampler of an autoregressive model, None for others. backend: lmdeploy, transformers,
    or auto, which is lmdeploy on CUDA where it is installed
    """
    config, directory, adapters = checkpoint_config(name_or_dir)
    if config.get("model_type") not in AUTOREGRESSIVE:
        return
    fast = "cuda" in str(device) and find_spec("lmdeploy") and "lmdeploy"
    if adapters or backend not in ("auto", "transformers", fast):
        raise SystemExit(
            f"{name_or_dir}, --rollout-backend {backend}: an autoregressive model needs its "
            "adapters merged, and has transformers, or lmdeploy on CUDA where that is installed"
        )
    from transformers import AutoModelForCausalLM, GenerationConfig

    is_fast = fast and backend != "transformers"
    if is_fast:
        model = SimpleNamespace(lm_head=SimpleNamespace(out_features=config["vocab_size"]))
    else:
        print("transformers decodes, in whole batches; lmdeploy, on CUDA, refills them")
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=frozen_dtype(device))
        model.to(device)
    vars(model).update(
        checkpoint_config=config, sources=(directory, adapters), attention="block-causal",
        block_length=1, mask_token_id=None, eos_token_id=None, turn_end="<|im_end|>",
        generation_config=GenerationConfig()  # no repetition penalty of the checkpoint
    )  # fmt: skip
    set_special_tokens(model, directory)
    if is_fast:
        from rollout.lmdeploy import LmdeployEngine

        return LmdeployEngine(model, device, max_batch_size)
    return TransformersEngine(model, max_batch_size)


class TokenEngine(Engine):
    """One that tells tokens alone, neither steps nor log-probabilities.

    A subclass has tokens(prompts, seeds, settings, stops) -> a tensor of ids for each prompt.
    """

    choices = Engine.choices | {
        "remasking": ("low_confidence_static", "sequential", "low_confidence_dynamic")
    }
    records = (None,)

    def check(self, settings):
        rule, n, steps = (settings[k] for k in ("remasking", "block_length", "denoising_steps"))
        # the dynamic rule reveals at least one token a step, however many steps there are
        is_dynamic = rule == "low_confidence_dynamic"
        if n % steps or steps < n and is_dynamic:
            served = n if is_dynamic else f"a divisor of the block length {n}"
            raise SystemExit(f"--denoising-steps {steps}: with {rule} give {served}")

    def _generate(self, prompt_ids, owner, sample_index, settings, canvas):
        prompts, eos = [prompt_ids[i] for i in owner.tolist()], settings["eos_token_ids"]
        seeds = (keyed_uniform(settings["seed"], sample_index) * 2**53).long().tolist()
        rows = self.tokens(prompts, seeds, settings, eos if settings["stop_at_eos"] else [])
        canvas_length = torch.tensor(list(map(len, rows)), device=self.device)
        completion_ids = pad_sequence(rows, True, self.model.pad_token_id).to(self.device)
        return Trace(
            prompts, completion_ids, scored(completion_ids, canvas_length, eos), canvas_length,
            None, None, sample_index, None, settings,
        )  # fmt: skip


class TransformersEngine(TokenEngine):
    """Its generate. Equal seeds give equal samples only for the same batches."""

    def tokens(self, prompts, seeds, settings, stops):
        torch.manual_seed(seeds[0])
        ids = pad_sequence(map(torch.tensor, prompts), True, -1, "left").to(self.device)
        names = ("temperature", "top_k", "top_p") if settings["temperature"] else ()
        rows = self.model.generate(
            ids.clamp(min=0), attention_mask=ids >= 0, do_sample=bool(names),
            max_new_tokens=settings["gen_length"], pad_token_id=self.model.pad_token_id,
            eos_token_id=stops, **{name: settings[name] for name in names}
        )  # fmt: skip
        return rows[:, ids.shape[1] :]
