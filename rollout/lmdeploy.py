"""lmdeploy's PyTorch engine (InternLM/lmdeploy 0.18) as a sampler: SDAR, dense or MoE, on CUDA;
for evaluations also autoregressive models (rollout/autoregressive.py), which have no mask.

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

from distributed.groups import TIMEOUT
from models.checkpoint import export_weights, load_model, meta_model
from rollout.autoregressive import TokenEngine
from rollout.sampling import GOLDEN

FLAG = "--rollout-backend lmdeploy"
MASK_TOKEN_ID = 151669  # in lmdeploy's configuration of SDAR, whatever config.json says
MEMORY_SHARE = 0.3  # of what the weights leave free, for the KV cache; the learner needs the rest
# Tensors that are gathered before they are handed over: once for each lot lmdeploy walks over all
# of its own.
TOGETHER = 32


class LmdeployEngine(TokenEngine):
    """name_or_dir: as load_model takes it, or the facts of an autoregressive model; lmdeploy reads
    the directory itself, and `model` stays on the meta device. max_batch_size: rows decoded
    together by lmdeploy's scheduler, which refills them.
    """

    title, refills = "lmdeploy", True
    banned = []  # the mask; an autoregressive model has none

    def __init__(self, name_or_dir, device, max_batch_size, request=None):
        self.model, self.dtype = name_or_dir, torch.bfloat16
        if not hasattr(name_or_dir, "sources"):
            self.model = meta_model(name_or_dir, self.dtype)
            refuse_unsupported(self.model, torch.device(device))
            self.banned = [self.model.mask_token_id]
        self.max_batch_size, self.sessions = max_batch_size, count(1)
        directory, adapters = self.model.sources
        if request:
            self.validate(request[0], **request[1])
        self.device = torch.empty(0, device=device).device  # with its index
        torch.cuda.set_device(self.device)  # lmdeploy works on the current one
        self.engine = self._start(str(directory))
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

    def _start(self, directory):
        """-> lmdeploy's Engine, warmed up"""
        # Its check would run the script's top level in another process.
        os.environ.setdefault("LMDEPLOY_ENABLE_CHECK_ENV", "0")
        from lmdeploy.messages import PytorchEngineConfig
        from lmdeploy.pytorch.engine import Engine as PytorchEngine

        logging.getLogger("lmdeploy").setLevel(logging.ERROR)
        # transformers 5 leaves both empty where config.json has rope_theta and no pad_token_id
        overrides = {"pad_token_id": self.model.pad_token_id}
        if self.banned:
            overrides["rope_parameters"] = {
                "rope_type": "default",
                "rope_theta": self.model.config.rope_theta,
            }
        # ranks of an evaluation may share a GPU
        sharing = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) / max(torch.cuda.device_count(), 1)
        config = PytorchEngineConfig(
            dtype="bfloat16",
            max_batch_size=self.max_batch_size,
            cache_max_entry_count=MEMORY_SHARE / max(sharing, 1),
            enable_prefix_caching=False,  # cached prompts would outlive the weights behind them
            dllm_block_length=self.model.block_length,
            hf_overrides=overrides,
        )
        return PytorchEngine.from_pretrained(directory, engine_config=config)

    def _serve(self):
        torch.cuda.set_device(self.device)
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self.closed.wait())  # then the runner cancels lmdeploy's tasks

    def close(self):
        """End lmdeploy's tasks."""
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.closed.set)
        self.thread.join(20)

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

    def tokens(self, *request):
        settings = request[2]
        if self.banned:
            from lmdeploy.pytorch.config import UnmaskingStrategy

            # read at every step, the same for all requests
            unmasking = self.agent.agent_strategy.unmasking_processor.dllm_config
            unmasking.unmasking_strategy = UnmaskingStrategy.from_str(settings["remasking"])
            unmasking.denoising_steps = settings["denoising_steps"]
            unmasking.confidence_threshold = settings["confidence_threshold"]
        future = asyncio.run_coroutine_threadsafe(self._decode(*request), self.loop)
        return future.result(TIMEOUT.total_seconds())  # a loop that hangs ends the run

    async def _decode(self, prompts, seeds, settings, stops):
        """-> for each prompt the token ids after it, through the terminal block"""
        from lmdeploy.messages import GenerationConfig

        instance, n = self.engine.create_instance(), settings["block_length"]

        async def complete(prompt, seed):
            P, session, ids = len(prompt), next(self.sessions), []
            length = -(-(P + settings["gen_length"]) // n) * n - P
            request = GenerationConfig(
                max_new_tokens=length, top_k=settings["top_k"], top_p=settings["top_p"],
                stop_token_ids=stops, bad_token_ids=self.banned, random_seed=seed,
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
            if len(ids) < length or self.model.mask_token_id in ids[:length]:
                raise RuntimeError(
                    f"{FLAG}: a request ended with {output.status.name}, {len(ids)} of {length} "
                    "tokens; lmdeploy logs the cause"
                )
            return torch.tensor(ids[:length])

        return await asyncio.gather(*map(complete, prompts, seeds))


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
