"""Run Fast-dLLM's samplers for LLaDA (github.com/NVlabs/Fast-dLLM, v1) on the tensors of our model.

Its files are imported unchanged except for what restricts them to one row, which is edited in
memory. The mask token's logits are set to -inf, as in our samplers: its loops would take a sampled
mask for a position that is still to be filled.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from models import export_weights

BATCHED = {
    "x = torch.full((1, prompt.shape[1]": "x = torch.full((prompt.shape[0], prompt.shape[1]",
    "replace_position = torch.zeros_like(x,": "replace_position = torch.zeros_like(x[:1],",
}
SAMPLERS = {"none": "", "prefix": "_with_prefix_cache", "dual": "_with_dual_cache"}


class FastDLLM:
    """folder: its llada/; model: a LLaDA, whose tensors it uses."""

    def __init__(self, folder, model):
        sys.path.insert(0, str(folder))
        from model import modeling_llada as code

        self.ours, self.device = model, model.lm_head.weight.device
        # No dropout, as in the released config.json; flash_attention as eval_llada.py sets it.
        kinds = ("attention_dropout", "embedding_dropout", "residual_dropout")
        raw = model.checkpoint_config | dict.fromkeys(kinds, 0.0)
        config = code.LLaDAConfig(**raw | {"flash_attention": find_spec("flash_attn") is not None})
        config.use_cache = False  # transformers 5 drops the value passed to the constructor
        sizes = code.create_model_config_from_pretrained_config(config)
        sizes.init_device = "meta"
        self.efficient = torch.backends.cuda.mem_efficient_sdp_enabled()
        self.model = code.LLaDAModelLM(config, code.LLaDAModel(sizes, init_params=False))
        # The constructor turned efficient attention off for the whole process.
        torch.backends.cuda.enable_mem_efficient_sdp(self.efficient)
        self.model.load_state_dict(dict(export_weights(model)), strict=False, assign=True)
        self.model.eval().requires_grad_(False).register_forward_pre_hook(self._count)
        mask = torch.tensor([model.mask_token_id], device=self.device)
        ban = lambda module, args, logits: logits.index_fill_(-1, mask, -torch.inf)
        self.model.get_output_embeddings().register_forward_hook(ban)
        self.code, text = ModuleType("generate"), Path(folder, "generate.py").read_text()
        for old, new in BATCHED.items():
            if old not in text:
                raise RuntimeError(f"{folder}/generate.py has no {old!r}: unknown version")
            text = text.replace(old, new)
        exec(text, self.code.__dict__)

    def _count(self, *_):
        self.forwards += 1

    @torch.no_grad()
    def generate(
        self, prompts, num_samples, seed, block_length, denoising_steps, cache, **settings
    ):
        """prompts: token ids of one length -> completion_mask [N, L], num_forwards [N]"""
        torch.manual_seed(seed)
        prompts = torch.tensor(prompts, device=self.device).repeat_interleave(num_samples, 0)
        sizes = {name: settings[name] for name in ("gen_length", "temperature")}
        sizes |= {"block_length": block_length, "mask_id": self.ours.mask_token_id}
        sizes["steps"] = sizes["gen_length"] // block_length * denoising_steps
        self.forwards = 0
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        canvas, _ = getattr(self.code, f"generate{SAMPLERS[cache]}")(self.model, prompts, **sizes)
        torch.backends.cuda.enable_mem_efficient_sdp(self.efficient)
        eos = torch.tensor(self.ours.eos_token_ids, device=self.device)
        is_eos = torch.isin(canvas[:, prompts.shape[1] :], eos).long()
        forwards = torch.full((len(canvas),), self.forwards)
        mask = is_eos.cumsum(1) - is_eos == 0
        return SimpleNamespace(completion_mask=mask, num_forwards=forwards)
