"""lmdeploy's PyTorch engine (InternLM/lmdeploy 0.18) as a sampler: SDAR, dense or MoE, on CUDA.

The engine runs inside this process, on this rank's GPU. docs/lmdeploy.md lists what it can do and
what was found wrong with it. This file adds what training needs: samples that differ, weights
copied in place, token ids in and out. Its sampling is repaired at run time (`repair_sampling`).

Three limits remain: logits and probabilities of a draw are bf16; bf16 sums depend on who is in a
batch, so equal seeds give equal samples only for the same list of requests; logits that are not
finite go unnoticed.
"""

import asyncio
import atexit
import logging
import os
import threading
from dataclasses import fields
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count, islice

import torch
from torch.nn.utils.rnn import pad_sequence

from distributed.groups import TIMEOUT
from models.checkpoint import export_weights, load_model, meta_model
from rollout.engine import Engine
from rollout.sampling import GOLDEN, keyed_uniform
from rollout.traces import Trace, scored

FLAG = "--rollout-backend lmdeploy"
MASK_TOKEN_ID = 151669  # in lmdeploy's configuration of SDAR, whatever config.json says
MEMORY_SHARE = 0.3  # of what the weights leave free, for the KV cache; the learner needs the rest
# Tensors that are gathered before they are handed over: once for each lot lmdeploy walks over all
# of its own.
TOGETHER = 32


class LmdeployEngine(Engine):
    """name_or_dir: as load_model takes it; lmdeploy reads the directory itself, and `model` stays
    on the meta device. max_batch_size: rows decoded together by lmdeploy's scheduler, which refills
    them.
    """

    choices = Engine.choices | {
        "remasking": ("low_confidence_static", "sequential", "low_confidence_dynamic")
    }
    records, title, refills = (None,), "lmdeploy", True

    def __init__(self, name_or_dir, device="cuda", max_batch_size=256, request=None):
        self.model, self.dtype = meta_model(name_or_dir, torch.bfloat16), torch.bfloat16
        self.max_batch_size, self.sessions = max_batch_size, count(1)
        directory, adapters = self.model.sources
        refuse_unsupported(self.model, torch.device(device))
        if request:
            self.validate(request[0], **request[1])
        self.device = torch.empty(0, device=device).device  # with its index
        torch.cuda.set_device(self.device)  # lmdeploy works on the current one
        # transformers 5 leaves both empty where config.json has rope_theta and no pad_token_id
        rope = {"rope_type": "default", "rope_theta": self.model.config.rope_theta}
        self.engine = start(
            directory,
            max_batch_size=max_batch_size,
            cache_max_entry_count=MEMORY_SHARE,
            dllm_block_length=self.model.block_length,
            hf_overrides={"pad_token_id": self.model.pad_token_id, "rope_parameters": rope},
        )
        repair_sampling(self.engine.sampling_strategy, self.model.block_length)
        self.agent = self.engine.executor.model_agent
        # A thread of its own: between two steps lmdeploy's tasks stay in inference mode and on
        # their own CUDA stream, which would otherwise be those of the learner too.
        self.loop, self.closed = asyncio.new_event_loop(), asyncio.Event()
        self.thread = threading.Thread(target=self._serve, name="lmdeploy", daemon=True)
        self.thread.start()
        atexit.register(self.close)
        if adapters:
            self.load_weights(export_weights(load_model(name_or_dir, self.device, self.dtype)))

    def _serve(self):
        torch.cuda.set_device(self.device)
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self.closed.wait())  # then the runner cancels lmdeploy's tasks

    def close(self):
        """End lmdeploy's tasks."""
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.closed.set)
        self.thread.join(20)

    def check(self, settings):
        rule, n, steps = (settings[k] for k in ("remasking", "block_length", "denoising_steps"))
        # the dynamic rule reveals at least one token a step, however many steps there are
        is_dynamic = rule == "low_confidence_dynamic"
        if n % steps or steps < n and is_dynamic:
            served = n if is_dynamic else f"a divisor of the block length {n}"
            raise SystemExit(f"--denoising-steps {steps}: with lmdeploy's {rule} give {served}")

    @torch.no_grad()
    def load_weights(self, weights):
        """weights: all pairs (official name, full tensor) of export_weights, copied in place.

        lmdeploy splits them into its fused projections; the addresses in its graphs stay valid.
        """
        torch.cuda.synchronize(self.device)  # no forward reads the old weights any more
        served, weights = self.agent.patched_model.get_model(), iter(weights)
        while lot := list(islice(weights, TOGETHER)):
            with self.agent.all_context():  # inference mode: the parameters were made in it
                served.load_weights(lot)
            lot.clear()  # before the next ones are gathered
        torch.cuda.synchronize(self.device)  # the forwards run on a stream of their own

    def _generate(self, prompt_ids, owner, sample_index, settings, stop_at_eos, canvas):
        from lmdeploy.pytorch.config import UnmaskingStrategy

        # read at every step, the same for all requests
        unmasking = self.agent.agent_strategy.unmasking_processor.dllm_config
        unmasking.unmasking_strategy = UnmaskingStrategy.from_str(settings["remasking"])
        unmasking.denoising_steps = settings["denoising_steps"]
        unmasking.confidence_threshold = settings["confidence_threshold"]
        prompts, eos = [prompt_ids[i] for i in owner.tolist()], settings["eos_token_ids"]
        seeds = (keyed_uniform(settings["seed"], sample_index) * 2**53).long().tolist()
        work = self._decode(prompts, seeds, settings, eos if stop_at_eos else [])
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        rows = future.result(TIMEOUT.total_seconds())  # a loop that hangs ends the run
        canvas_length = torch.tensor(list(map(len, rows)), device=self.device)
        completion_ids = pad_sequence(rows, True, self.model.pad_token_id).to(self.device)
        return Trace(
            prompts, completion_ids, scored(completion_ids, canvas_length, eos), canvas_length,
            None, None, sample_index, None, settings,  # what it does not tell
        )  # fmt: skip

    async def _decode(self, prompts, seeds, settings, stops):
        """-> for each prompt the token ids after it, through the terminal block"""
        from lmdeploy.messages import GenerationConfig

        instance, n = self.engine.create_instance(), settings["block_length"]
        mask = self.model.mask_token_id

        async def complete(prompt, seed):
            P, session, ids = len(prompt), next(self.sessions), []
            length = -(-(P + settings["gen_length"]) // n) * n - P
            request = GenerationConfig(
                max_new_tokens=length, top_k=settings["top_k"], top_p=settings["top_p"],
                stop_token_ids=stops, bad_token_ids=[mask], random_seed=seed,
            )  # fmt: skip
            request.temperature = settings["temperature"]  # the constructor allows 2 at most
            async for output in instance.async_stream_infer(session, prompt, request):
                if output.status.name == "FINISH":  # its own token_ids end with the EOS
                    # the generator ends the session next
                    (sequence,) = self.engine.scheduler.get_session(session).sequences.values()
                    ids = sequence.all_ids[P:].tolist()
            # lmdeploy does not stop at an EOS in the block that the prompt ends in
            if ends := [i for i, token in enumerate(ids[:length]) if token in stops]:
                length = ((P + ends[0]) // n + 1) * n - P
            if len(ids) < length or mask in ids[:length]:
                raise RuntimeError(
                    f"{FLAG}: a request ended with {output.status.name}, {len(ids)} of {length} "
                    "tokens; lmdeploy logs the cause"
                )
            return torch.tensor(ids[:length])

        return await asyncio.gather(*map(complete, prompts, seeds))


def start(directory, **config):
    """-> lmdeploy's Engine, warmed up. config: for PytorchEngineConfig"""
    # Its check would run the script's top level in another process.
    os.environ.setdefault("LMDEPLOY_ENABLE_CHECK_ENV", "0")
    from lmdeploy.messages import PytorchEngineConfig
    from lmdeploy.pytorch.engine import Engine as PytorchEngine

    logging.getLogger("lmdeploy").setLevel(logging.ERROR)
    # cached prompts would outlive the weights behind them
    config = PytorchEngineConfig(dtype="bfloat16", enable_prefix_caching=False, **config)
    return PytorchEngine.from_pretrained(str(directory), engine_config=config)


def refuse_unsupported(model, device):
    """SystemExit with one line if lmdeploy cannot serve this model here."""
    package = version("lmdeploy") if find_spec("lmdeploy") else "missing"
    kind, head_dim, mask = (
        model.checkpoint_config["model_type"], model.config.head_dim, model.mask_token_id
    )  # fmt: skip
    is_served = kind in ("sdar", "sdar_moe") and head_dim >= 64 and mask == MASK_TOKEN_ID
    if not (is_served and device.type == "cuda" and package.startswith("0.18.")):
        raise SystemExit(
            f"{FLAG} serves sdar and sdar_moe with heads of 64 or more and the mask token "
            f"{MASK_TOKEN_ID} by version 0.18 on CUDA, not {kind} with heads of {head_dim} and the "
            f"mask token {mask} by version {package} on {device.type}: leave it at auto"
        )


def repair_sampling(strategy, n):
    """Make lmdeploy's dLLM sampling strategy, this object only, give every row its own sequence's
    values and its own random stream. n: tokens per block

    Row r draws token r % n of the block of sequence r // n, but 0.18 orders the values of sequences
    a, b as a b a b ... and not as a a ... b b .... The kernel draws one uniform number from (seed,
    offset) of each row, so n equal seeds would give all tokens of a block the same one: each
    position gets its own seed, derived from the request's.
    """
    original = strategy.make_sampling_inputs

    def make_sampling_inputs(seqs):
        inputs = original(seqs)
        for field in fields(inputs):
            value = getattr(inputs, field.name)
            if isinstance(value, torch.Tensor) and value.dim() == 1:
                setattr(inputs, field.name, value.view(n, len(seqs)).t().flatten())
        if inputs.random_seeds is not None:
            seeds = torch.tensor([seq.sampling_param.random_seed for seq in seqs])
            inputs.random_seeds = (seeds[:, None] + torch.arange(n) * GOLDEN).flatten()
        return inputs

    strategy.make_sampling_inputs = make_sampling_inputs
