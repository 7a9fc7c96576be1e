"""The sampler of an autoregressive model, for evaluations alone: what a diffusion model is made
from (models/from_ar.py) is scored with the same prompts, and its answers become rows to train on
(data/own_samples.py).

lmdeploy's engine on CUDA where that package is installed, else transformers' generate. Equal seeds
give equal samples only for the same list of prompts: sums depend on who is in a batch, with
transformers the draws too.
"""

import asyncio
import atexit
import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from types import SimpleNamespace

import torch
from torch.nn.utils.rnn import pad_sequence

from distributed.disk import is_first_rank
from models.checkpoint import load_tokenizer
from models.names import checkpoint_config
from models.tensors import frozen_dtype, read_json
from rollout.engine import Engine
from rollout.sampling import keyed_uniform
from rollout.traces import Trace, scored

# the fields of SamplingSettings that an autoregressive model has
FIELDS = "gen_length", "temperature", "top_k", "top_p"
MEMORY_SHARE = 0.7  # of a GPU, of its ranks together, for the KV cache
SLOW = "transformers' generate serves this model; lmdeploy, on CUDA, is ten times as fast"


class AutoregressiveEngine(Engine):
    """name_or_dir: as load_model takes it, without adapters. backend: lmdeploy, transformers, or
    auto. max_batch_size: rows decoded together; lmdeploy refills them, for transformers a call must
    not have more.
    """

    title = "an autoregressive model"

    def __init__(self, name_or_dir, backend="auto", device="cpu", max_batch_size=256):
        config, directory, adapters = checkpoint_config(name_or_dir)
        if adapters:
            raise SystemExit(f"{name_or_dir}: adapters of {self.title} are not read: merge them")
        self.device, self.dtype = torch.device(device), frozen_dtype(device)
        has_lmdeploy = self.device.type == "cuda" and find_spec("lmdeploy")
        served = {"transformers": self._load, "lmdeploy": self._start}
        if backend == "auto":
            backend = "lmdeploy" if has_lmdeploy else "transformers"
        if backend not in served or backend == "lmdeploy" and not has_lmdeploy:
            choices = "give transformers, or lmdeploy on CUDA where it is installed"
            raise SystemExit(f"--rollout-backend {backend} does not serve {self.title}: {choices}")
        ends = end_tokens(directory, load_tokenizer(name_or_dir))
        self.model = SimpleNamespace(
            checkpoint_config=config, sources=(directory, []), attention="autoregressive",
            block_length=1, eos_token_ids=ends, pad_token_id=ends[0],
        )  # fmt: skip
        self.max_batch_size, self.refills = max_batch_size, backend == "lmdeploy"
        self.version = f"{backend} {version(backend)}"
        if backend == "transformers" and is_first_rank():
            print(SLOW, file=sys.stderr)
        self.decode = served[backend](directory)

    def full_settings(self, records, sampling):
        settings = super().full_settings(records, sampling)
        return {name: settings[name] for name in (*FIELDS, "eos_token_ids")}

    def validate(self, records=None, *, seed=0, **sampling):
        settings = self.full_settings(records, sampling)
        return f"up to {settings['gen_length']} tokens, one a forward"

    @torch.no_grad()
    def generate(self, prompt_ids, *, seed=0, sample_offset=0, **sampling):
        """One completion of each prompt. -> Trace without steps and log-probabilities"""
        settings = self.full_settings(None, sampling)
        sample_index = sample_offset + torch.arange(len(prompt_ids))
        seeds = (keyed_uniform(seed, sample_index) * 2**53).long().tolist()
        rows = self.decode(prompt_ids, seeds, settings)
        lengths = torch.tensor(list(map(len, rows)))
        completion_ids = pad_sequence(rows, True, self.model.pad_token_id)
        mask = scored(completion_ids, lengths, settings["eos_token_ids"])
        return Trace(
            prompt_ids, completion_ids, mask, lengths, None, None, sample_index, mask.sum(1),
            settings,
        )  # fmt: skip

    def _load(self, directory):
        """-> function of prompts, seeds and settings: the tokens of each row, by transformers"""
        from transformers import AutoModelForCausalLM, GenerationConfig

        network = AutoModelForCausalLM.from_pretrained(directory, dtype=self.dtype)
        network = network.to(self.device).eval()
        network.generation_config = GenerationConfig()  # no repetition penalty of the checkpoint

        def decode(prompts, seeds, settings):
            torch.manual_seed(seeds[0])
            prompts = [torch.tensor(ids, device=self.device) for ids in prompts]
            pad, valid = self.model.pad_token_id, [torch.ones_like(ids) for ids in prompts]
            ids = pad_sequence(prompts, True, pad, "left")
            names = FIELDS[1:] if settings["temperature"] else ()
            completed = network.generate(
                ids, attention_mask=pad_sequence(valid, True, 0, "left"), pad_token_id=pad,
                eos_token_id=settings["eos_token_ids"], max_new_tokens=settings["gen_length"],
                do_sample=bool(names), **{name: settings[name] for name in names},
            )  # fmt: skip
            return [*completed[:, ids.shape[1] :].cpu()]

        return decode

    def _start(self, directory):
        """-> the same function, by lmdeploy. Its tasks wait between two calls."""
        from lmdeploy.messages import GenerationConfig

        from rollout.lmdeploy import start

        sharing = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) / torch.cuda.device_count()
        engine = start(
            directory,
            max_batch_size=self.max_batch_size,
            cache_max_entry_count=MEMORY_SHARE / max(sharing, 1),
            hf_overrides={"pad_token_id": self.model.pad_token_id},
        )
        instance, sessions, runner = engine.create_instance(), count(1), asyncio.Runner()
        atexit.register(runner.close)

        async def complete(prompt, seed, settings):
            request = GenerationConfig(
                max_new_tokens=settings["gen_length"], top_k=settings["top_k"],
                top_p=settings["top_p"], stop_token_ids=settings["eos_token_ids"], random_seed=seed,
            )  # fmt: skip
            request.temperature = settings["temperature"]  # the constructor allows 2 at most
            ids = []
            async for output in instance.async_stream_infer(next(sessions), prompt, request):
                ids += output.token_ids
            if output.status.name != "FINISH":
                raise RuntimeError(f"lmdeploy ended a request with {output.status.name}")
            return torch.tensor(ids)

        async def complete_all(prompts, seeds, settings):
            rows = (complete(*row, settings) for row in zip(prompts, seeds, strict=True))
            return await asyncio.gather(*rows)

        return lambda *call: runner.run(complete_all(*call))


def end_tokens(directory, tokenizer):
    """Every id that one of the files states as an end: an answer in a chat may end at another token
    than a text. SystemExit if there is none.
    """
    ends = [tokenizer.eos_token_id]
    for file in directory / "config.json", directory / "generation_config.json":
        ends.append(read_json(file).get("eos_token_id") if file.is_file() else None)
    ends = [end for some in ends for end in (some if isinstance(some, list) else [some])]
    if not (ends := [*dict.fromkeys(end for end in ends if end is not None)]):
        raise SystemExit(f"{directory}: no file states eos_token_id")
    return ends
