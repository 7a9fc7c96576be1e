"""lmdeploy's PyTorch engine (InternLM/lmdeploy 0.18) as a sampler: SDAR, dense or MoE, on CUDA.

The engine runs inside this process, on this rank's GPU. docs/lmdeploy.md lists what it can do and
what was found wrong with it. This file adds what training needs: samples that differ, weights
copied in place, token ids in and out, errors with their cause. Its sampling is repaired at run time
(`repair_sampling`).

Three limits remain: logits and probabilities of a draw are bf16; bf16 sums depend on who is in a
batch, so equal seeds give equal samples only for the same list of requests; logits that are not
finite go unnoticed.
"""

import asyncio
import atexit
import logging
import os
import threading
import time
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import fields
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import torch

from models.checkpoint import export_weights, load_model, meta_model, tensor_shapes
from rollout.block import BlockEngine
from rollout.engine import Engine
from rollout.sampling import GOLDEN
from rollout.traces import Trace, scored

FLAG = "--rollout-backend lmdeploy"
MASK_TOKEN_ID = 151669  # in lmdeploy's configuration of SDAR, whatever config.json says
CACHE_BLOCK = 64  # positions
POSITIONS_PER_ROW = 1024  # of the cache, for each of the rows that are decoded together,
MEMORY_SHARE = 0.3  # and at most this share of the memory that the weights leave free
BUCKET_BYTES = 2**30  # of weights that are gathered before they are handed over


class LmdeployEngine(Engine):
    """name_or_dir: as load_model takes it; lmdeploy reads the directory itself, and `model` stays
    on the meta device. max_batch_size: rows decoded together by lmdeploy's scheduler, which refills
    them. stall_seconds: without a new token for so long, the engine counts as hung and the run
    ends.
    """

    static = ("low_confidence_static", "sequential")
    choices = Engine.choices | {"remasking": (*static, "low_confidence_dynamic")}
    records, title, refills = (None,), "lmdeploy", True
    block_length = BlockEngine.block_length
    stall_seconds = 300.0

    def __init__(self, name_or_dir, device="cuda", dtype=None, max_batch_size=256, asked=None):
        self.device, self.dtype = torch.device(device), dtype or torch.bfloat16
        if not isinstance(name_or_dir, (str, os.PathLike)):
            raise SystemExit(f"{FLAG} reads its model from a directory, not from an instance")
        self.model = meta_model(name_or_dir, self.dtype)
        directory, adapters = self.model.sources
        refuse_unsupported(self.model, directory, self.device, self.dtype)
        if asked:
            self.plan(asked[0], **asked[1])
        self.version = installed_version()
        if self.device.index is None:
            self.device = torch.device(self.device.type, torch.cuda.current_device())
        torch.cuda.set_device(self.device)  # lmdeploy works on the current one
        self.max_batch_size, self.sessions, self.is_asleep = max_batch_size, 0, False
        self.engine = self._start(str(directory))
        repair_sampling(self.engine.sampling_strategy, self.model.block_length)
        self.agent = self.engine.executor.model_agent
        # A thread of its own: between two steps lmdeploy's tasks stay in inference mode and on
        # their own CUDA stream, which would otherwise be those of the learner too.
        self.loop = asyncio.new_event_loop()
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
        rope = {"rope_type": "default", "rope_theta": self.model.config.rope_theta}
        overrides = {"pad_token_id": self.model.pad_token_id, "rope_parameters": rope}
        config = PytorchEngineConfig(
            dtype=str(self.dtype).removeprefix("torch."),
            max_batch_size=self.max_batch_size,
            block_size=CACHE_BLOCK,
            num_gpu_blocks=cache_blocks(self.model, self.device, self.dtype, self.max_batch_size),
            enable_prefix_caching=False,  # cached prompts would outlive the weights behind them
            distributed_executor_backend="uni",
            dllm_block_length=self.model.block_length,
            dllm_unmasking_strategy="low_confidence_static",
            enable_metrics=False,
            hf_overrides=overrides,
        )
        try:
            return PytorchEngine.from_pretrained(directory, engine_config=config)
        except torch.OutOfMemoryError as error:
            raise SystemExit(f"{FLAG}: out of memory at its start: {error}") from error

    def _serve(self):
        torch.cuda.set_device(self.device)
        with suppress(SystemExit):  # of lmdeploy's checks; `_run` sees that the thread has ended
            self.loop.run_forever()
        for task in (tasks := asyncio.all_tasks(self.loop)):
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=10))
        self.loop.close()

    def close(self):
        """End lmdeploy's tasks and free its memory."""
        atexit.unregister(self.close)
        stop = lambda: (self.loop.stop(), self.engine.close())
        with suppress(RuntimeError):  # the loop is closed already
            self.loop.call_soon_threadsafe(stop)
        self.thread.join(20)

    def check(self, settings):
        rule, n, steps = (settings[k] for k in ("remasking", "block_length", "denoising_steps"))
        if rule == "low_confidence_dynamic" and steps < n:
            at_most = "lmdeploy's low_confidence_dynamic reveals at least one token a step"
            raise SystemExit(f"--denoising-steps {steps}: {at_most}: give {n}")
        if steps < n and n % steps:
            divides = f"with lmdeploy it must divide the block length {n}"
            raise SystemExit(f"--denoising-steps {steps}: {divides}")

    def plan(self, records=None, **sampling):
        limit = "; lmdeploy tells no log-probabilities: the probe compares greedy tokens"
        return super().plan(records, **sampling) + limit

    # Weights

    def load_weights(self, weights):
        """weights: all pairs (official name, full tensor) of export_weights, copied in place; wakes
        a sleeping engine. ValueError names what does not fit or is missing.

        lmdeploy splits them into its fused projections; the addresses in its graphs stay valid.
        """
        wanted, bucket = tensor_shapes(self.model), []
        if self.is_asleep:
            self._run(self._wake("weights"))
        torch.cuda.synchronize(self.device)  # no forward reads the old weights any more
        served = self.agent.patched_model.get_model()

        def hand_over():
            with self.agent.all_context():  # inference mode: the parameters were made in it
                served.load_weights(iter(bucket))
            bucket.clear()

        for name, value in weights:
            if ".lora_" in name:
                raise SystemExit(f"{FLAG} needs merged weights: add --lora-merged-rollout")
            if wanted.pop(name, None) != tuple(value.shape):
                unknown = f"{name} {list(value.shape)} is no tensor of this model, or came twice"
                raise ValueError(unknown)
            bucket.append((name, value))
            # lmdeploy walks over all its parameters once per bucket
            if sum(value.nbytes for _, value in bucket) >= BUCKET_BYTES:
                hand_over()
        hand_over()
        if wanted:
            raise ValueError(f"weights did not come for {', '.join(list(wanted)[:5])}")
        if self.is_asleep:
            from lmdeploy.pytorch.weight_loader import model_weight_loader

            # Experts take the memory layout of their kernel; then graphs capture the new addresses.
            model_weight_loader.process_weights_after_loading(served)
            self._run(self._wake("kv_cache"))
            self.is_asleep = False
        torch.cuda.synchronize(self.device)  # the forwards run on a stream of their own

    async def _wake(self, what):
        self.engine.wakeup([what])

    def sleep(self):
        """Free weights, cache and graphs until the next load_weights, as between two rollouts."""
        self._run(self.engine.sleep(2))
        self.is_asleep = True

    # Rollout

    def _generate(self, prompt_ids, owner, sample_index, settings, stop_at_eos):
        from lmdeploy.messages import GenerationConfig
        from lmdeploy.pytorch.config import UnmaskingStrategy

        if self.is_asleep:
            raise SystemExit("lmdeploy's engine sleeps: load weights before a rollout")
        n, eos, model = settings["block_length"], settings["eos_token_ids"], self.model
        # read at every step, the same for all requests
        unmasking = self.agent.agent_strategy.unmasking_processor.dllm_config
        unmasking.unmasking_strategy = UnmaskingStrategy.from_str(settings["remasking"])
        unmasking.denoising_steps = min(settings["denoising_steps"], n)
        unmasking.confidence_threshold = settings["confidence_threshold"]
        prompts, temperature = [prompt_ids[i] for i in owner.tolist()], settings["temperature"]
        room = [-(-(len(ids) + settings["gen_length"]) // n) * n - len(ids) for ids in prompts]
        longest = max(len(ids) + length for ids, length in zip(prompts, room, strict=True))
        if longest > (capacity := self.engine.max_session_len):
            needs = f"a prompt and its completion take {longest} positions"
            raise SystemExit(f"{needs}, lmdeploy's cache holds {capacity}: lower --gen-length")
        requests = [
            GenerationConfig(
                max_new_tokens=length,
                do_sample=temperature > 0,
                top_k=settings["top_k"] if temperature else 1,
                top_p=settings["top_p"],
                stop_token_ids=list(eos) if stop_at_eos else [],
                bad_token_ids=[model.mask_token_id],
                random_seed=sample_seed(settings["seed"], index),
            )
            for length, index in zip(room, sample_index.tolist(), strict=True)
        ]
        for request in requests:
            request.temperature = temperature or 1.0  # the constructor allows 2 at most
        completions = self._run(self._decode(prompts, requests))
        kept = []
        for ids, prompt, length in zip(completions, prompts, room, strict=True):
            if stop_at_eos:  # lmdeploy does not stop at an EOS in the block that the prompt ends in
                first = next((i for i, token in enumerate(ids) if token in eos), length - 1)
                length = min(length, ((len(prompt) + first) // n + 1) * n - len(prompt))
            if len(ids) < length or model.mask_token_id in ids[:length]:
                unfinished = f"an unfinished block ({len(ids)} of {length} tokens)"
                raise SystemExit(f"lmdeploy {self.version} returned {unfinished}")
            kept.append(ids[:length])
        return self._trace(prompts, kept, sample_index, settings)

    def _trace(self, prompts, completions, sample_index, settings):
        canvas_length = torch.tensor([len(ids) for ids in completions], device=self.device)
        width, pad, n = int(canvas_length.max()), self.model.pad_token_id, settings["block_length"]
        padded = [ids + [pad] * (width - len(ids)) for ids in completions]
        completion_ids = torch.tensor(padded, device=self.device)
        num_forwards = None
        if settings["remasking"] in self.static:
            a_step = n // min(settings["denoising_steps"], n)
            lengths = torch.tensor([len(ids) for ids in prompts], device=self.device)
            first = n - lengths % n  # masks of the block that the prompt ends in
            later = (canvas_length - first) // n  # blocks, each with the commit of the one before
            num_forwards = (first + a_step - 1) // a_step + later * (n // a_step + 1)
        return Trace(
            prompts, completion_ids,
            scored(completion_ids, canvas_length, settings["eos_token_ids"]), canvas_length,
            step_map=None, replay_map=None, logps=None, sample_index=sample_index,
            num_forwards=num_forwards,
            settings=settings | {"engine": f"lmdeploy {self.version}", "logps": None},
        )  # fmt: skip

    async def _decode(self, prompts, requests):
        """-> completions through their terminal block, lists of ids"""
        instance, pairs = self.engine.create_instance(), zip(prompts, requests, strict=True)
        tasks = [asyncio.ensure_future(self._complete(instance, *pair)) for pair in pairs]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _complete(self, instance, ids, request):
        """One request. -> ids after the prompt, with those of the terminal block after the EOS"""
        self.sessions += 1
        session, streamed, completion, status = self.sessions, [], None, None
        async for output in instance.async_stream_infer(session, ids, request):
            self.progress, status = time.monotonic(), output.status.name
            streamed += output.token_ids
            if status == "FINISH":  # the generator ends the session next
                (sequence,) = self.engine.scheduler.get_session(session).sequences.values()
                completion = sequence.all_ids[len(ids) :].tolist()
            elif status != "SUCCESS":
                break
        if completion is None or completion[: len(streamed)] != streamed:
            raise RuntimeError(f"a request ended with {status}" + self._cause())
        return completion

    def _cause(self):
        """Why lmdeploy's own loop has ended, or ''."""
        task = getattr(self.engine.req_manager, "_loop_task", None)
        if task is None or not task.done():
            return ""
        if task.cancelled() or (error := task.exception()) is None:
            return ": its loop was cancelled"
        return f": its loop was ended by {type(error).__name__}: {error}"

    def _run(self, work):
        """Run a coroutine in lmdeploy's thread -> its result. SystemExit if it fails or hangs."""
        future, self.progress = asyncio.run_coroutine_threadsafe(work, self.loop), time.monotonic()
        try:
            while not wait([future], timeout=1).done:
                if (idle := time.monotonic() - self.progress) > self.stall_seconds:
                    future.cancel()
                    raise RuntimeError(f"nothing came for {idle:.0f} s" + self._cause())
            if future.cancelled():
                raise RuntimeError("its thread has ended" + self._cause())
            return future.result()
        except RuntimeError as error:  # out of memory is one too
            with suppress(Exception):
                self.close()
            raise SystemExit(f"{FLAG}: the engine failed: {error}") from error


def refuse_unsupported(model, directory, device, dtype):
    """SystemExit with one line if lmdeploy cannot serve this model here."""
    kind, head_dim = model.checkpoint_config["model_type"], model.config.head_dim
    if kind not in ("sdar", "sdar_moe"):
        raise SystemExit(f"{FLAG} serves SDAR, not a model of type {kind}: leave it at auto")
    if directory is None or head_dim < 64:
        raise SystemExit(
            f"{FLAG} has no kernels for heads of {head_dim}: leave it at auto for a tiny model"
        )
    if model.mask_token_id != MASK_TOKEN_ID:
        ours = f"that of this model is {model.mask_token_id}"
        raise SystemExit(f"{FLAG} takes {MASK_TOKEN_ID} for the mask token; {ours}")
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        raise SystemExit(f"{FLAG} needs a CUDA GPU and bf16 or fp16, not {device.type} and {dtype}")


def installed_version():
    try:
        found = version("lmdeploy")
    except PackageNotFoundError:
        missing = "the package is missing: pip install -r requirements-gpu.txt"
        raise SystemExit(f"{FLAG}: {missing}") from None
    if tuple(int(part) for part in found.split(".")[:2]) < (0, 18):
        raise SystemExit(f"{FLAG} needs lmdeploy 0.18 or newer, {found} is installed")
    return found


def cache_blocks(model, device, dtype, rows):
    """Blocks of lmdeploy's cache; bounded, because the learner needs memory on the same GPU."""
    config, weights = model.config, sum(x.numel() for x in model.parameters()) * dtype.itemsize
    a_layer = 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
    memory = int(MEMORY_SHARE * (torch.cuda.mem_get_info(device)[0] - weights))
    positions = min(rows * POSITIONS_PER_ROW, memory // (config.num_hidden_layers * a_layer))
    if positions < 32 * CACHE_BLOCK:
        size = f"({weights / 2**30:.1f} GiB)"
        raise SystemExit(f"{FLAG}: no memory for its weights {size} and a cache")
    return positions // CACHE_BLOCK + 1  # one is lmdeploy's own


def sample_seed(seed, sample_index):
    """63 bits keyed by (seed, number of the sample in the rollout)."""
    digest = blake2b(f"{seed} {sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def is_tiled(strategy, n):
    """Whether make_sampling_inputs orders the values of sequences a, b as a b a b ... for rows that
    are a a ... b b ..., the bug of lmdeploy 0.11 to 0.18. SystemExit if it does neither. n: tokens
    per block
    """
    from lmdeploy.pytorch.messages import SamplingParam

    facts = {"session": SimpleNamespace(session_id=0)}
    facts |= dict.fromkeys(("num_valid_ids", "num_new_tokens", "seq_id"), 0)
    params = [SamplingParam(top_k=0, random_seed=seed) for seed in (1, 2)]
    seqs = [SimpleNamespace(sampling_param=param, **facts) for param in params]
    rows = strategy.make_sampling_inputs(seqs).random_seeds.tolist()
    right = [1] * n + [2] * n
    if rows not in (right, [1, 2] * n):
        orders = f"it orders the seeds of two requests as {rows}"
        raise SystemExit(f"rollout/lmdeploy.py does not know this lmdeploy: {orders}")
    return rows != right


def repair_sampling(strategy, n):
    """Make lmdeploy's dLLM sampling strategy, this object only, give every row its own sequence's
    values and its own random stream. n: tokens per block

    Row r draws token r % n of the block of sequence r // n. The kernel draws one uniform number
    from (seed, offset) of each row, so n equal seeds would give all tokens of a block the same one:
    each position gets its own seed, derived from the request's.
    """
    original, tiled = strategy.make_sampling_inputs, is_tiled(strategy, n)

    def make_sampling_inputs(seqs):
        inputs = original(seqs)
        for field in fields(inputs):
            value = getattr(inputs, field.name)
            if tiled and isinstance(value, torch.Tensor) and value.dim() == 1:
                setattr(inputs, field.name, value.view(n, len(seqs)).t().flatten())
        if inputs.random_seeds is not None:
            seeds = torch.tensor([seq.sampling_param.random_seed for seq in seqs])
            inputs.random_seeds = (seeds[:, None] + torch.arange(n) * GOLDEN).flatten()
        return inputs

    strategy.make_sampling_inputs = make_sampling_inputs
