"""Fast-dLLM's own samplers (github.com/NVlabs/Fast-dLLM, v1), run from a copy of its folder on the tensors of our model.

Its code is imported as it is, but for what keeps it from sampling a batch: the canvas has one row, and the dual cache lists the
positions of a block once a row. Both are edited in memory. The mask token is never drawn, as by our samplers and by trained
models: its loops take a drawn mask for one that is still to be filled.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace

import torch

from models.tensors import tensor_names

ONE_ROW = {
    "llada": {
        "x = torch.full((1, prompt.shape[1]": "x = torch.full((prompt.shape[0], prompt.shape[1]",
        "replace_position = torch.zeros_like(x,": "replace_position = torch.zeros_like(x[:1],",
    },
    "Dream": {
        "replace_position = torch.zeros_like(x,": "replace_position = torch.zeros_like(x[:1],"
    },
}


def edited(path, edits):
    """A file of the peer as a module, with edits {old text: new text}, each of which must be there."""
    text = path.read_text(encoding="utf-8")
    for old, new in edits.items():
        if old not in text:
            raise RuntimeError(
                f"{path} has no {old!r}: another version than the one this was written for"
            )
        text = text.replace(old, new)
    module = ModuleType(f"{path.stem}_edited")
    sys.modules[module.__name__] = module  # where its dataclasses look for it
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


class FastDLLM:
    """folder: its llada/ or dream/, whichever is the family of `model`, with whose tensors it works (no second copy)."""

    def __init__(self, folder, model):
        self.folder, self.ours, raw = Path(folder).resolve(), model, model.checkpoint_config
        self.kind, self.device = raw["model_type"], model.lm_head.weight.device
        if self.kind not in ONE_ROW:
            raise RuntimeError(f"Fast-dLLM has no model of type {self.kind}")
        sys.path.insert(0, str(self.folder))
        if any(name == "model" or name.startswith("model.") for name in sys.modules):
            raise RuntimeError("one folder of the peer a process: both have a package named model")
        self.model = (self._llada if self.kind == "llada" else self._dream)(raw)
        self.model.load_state_dict(
            {k: v.detach() for k, v in tensor_names(model).items()}, strict=False, assign=True
        )
        if missing := [name for name, value in self.model.named_parameters() if value.is_meta]:
            raise RuntimeError(f"no weights for {missing[:5]}")
        self.model.eval().requires_grad_(False)
        self.forwards = 0
        self.model.register_forward_pre_hook(self._count)
        head = self.model.get_output_embeddings()
        head.register_forward_hook(
            lambda module, args, logits: logits.index_fill_(-1, self.mask, -torch.inf)
        )
        self.mask = torch.tensor([model.mask_token_id], device=self.device)

    def _count(self, *_):
        self.forwards += 1

    def _llada(self, raw):
        efficient = torch.backends.cuda.mem_efficient_sdp_enabled()
        from model import modeling_llada as code

        # flash_attention as its eval_llada.py sets it; no dropout, as in the real config.json.
        raw = raw | dict.fromkeys(
            ("attention_dropout", "embedding_dropout", "residual_dropout"), 0.0
        )
        config = code.LLaDAConfig(**raw | {"flash_attention": find_spec("flash_attn") is not None})
        config.use_cache = False  # transformers 5 no longer keeps what the configuration was given
        sizes = code.create_model_config_from_pretrained_config(config)
        sizes.init_device = "meta"
        model = code.LLaDAModelLM(config, code.LLaDAModel(sizes, init_params=False))
        torch.backends.cuda.enable_mem_efficient_sdp(
            efficient
        )  # which building it switches off for the whole process
        self.code = edited(self.folder / "generate.py", ONE_ROW["llada"])
        return model

    def _dream(self, raw):
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        # transformers 5 has no entry for what is no scaling at all
        ROPE_INIT_FUNCTIONS.setdefault("default", self._inverse_frequencies)
        from model import modeling_dream as code

        config = code.DreamConfig(**raw)
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = code.DreamModel(config).to(self.ours.lm_head.weight.dtype)
        for module in model.modules():  # its buffers were made on meta
            if isinstance(module, code.DreamRotaryEmbedding):
                module.register_buffer(
                    "inv_freq", self._inverse_frequencies(config, self.device)[0], persistent=False
                )
        self.code = edited(self.folder / "model" / "generation_utils_block.py", ONE_ROW["Dream"])
        return model

    @staticmethod
    def _inverse_frequencies(config, device=None, **_):
        size = config.hidden_size // config.num_attention_heads
        exponent = torch.arange(0, size, 2, device=device).float() / size
        return 1 / config.rope_theta**exponent, 1.0

    @torch.no_grad()
    def generate(self, prompts, cache, gen_length, block_length, denoising_steps, temperature):
        """prompts [B, P] on the device, cache "none", "prefix" or "dual" -> completions [B, gen_length], forwards"""
        self.forwards, efficient = 0, torch.backends.cuda.mem_efficient_sdp_enabled()
        steps = gen_length // block_length * denoising_steps
        try:
            torch.backends.cuda.enable_mem_efficient_sdp(
                self.kind != "llada" and efficient
            )  # as it runs alone
            sample = self._generate_llada if self.kind == "llada" else self._generate_dream
            return sample(prompts, cache, gen_length, block_length, steps, temperature)[
                :, prompts.shape[1] :
            ], self.forwards
        finally:
            torch.backends.cuda.enable_mem_efficient_sdp(efficient)

    def _generate_llada(self, prompts, cache, gen_length, block_length, steps, temperature):
        name = {
            "none": "generate",
            "prefix": "generate_with_prefix_cache",
            "dual": "generate_with_dual_cache",
        }[cache]
        sample, ours = getattr(self.code, name), self.ours
        canvas, _ = sample(
            self.model, prompts, steps=steps, gen_length=gen_length, block_length=block_length, temperature=temperature,
            mask_id=ours.mask_token_id,
        )  # fmt: skip
        return canvas

    def _generate_dream(self, prompts, cache, gen_length, block_length, steps, temperature):
        """Without cache it has no blocks: the same number of steps over the whole completion."""
        settings = SimpleNamespace(
            output_history=False, return_dict_in_generate=False, max_length=prompts.shape[1] + gen_length, steps=steps,
            eps=1e-3, mask_token_id=self.ours.mask_token_id, temperature=temperature, top_p=None, top_k=None, alg="entropy",
            alg_temp=None,
        )  # fmt: skip
        if cache == "none":
            from model import generation_utils as plain

            sample = MethodType(plain.DreamGenerationMixin._sample, self.model)
            return sample(
                prompts, None, settings, lambda step, x, logits: x, lambda step, x, logits: logits
            )
        sample = MethodType(self.code.DreamGenerationMixin._sample, self.model)
        return sample(
            prompts,
            None,
            settings,
            threshold=None,
            block_length=block_length,
            dual_cache=cache == "dual",
        )
