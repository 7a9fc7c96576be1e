"""lmdeploy's PyTorch engine (InternLM/lmdeploy 0.18) behind the contract of rollout/engine.py: SDAR, dense or MoE, on CUDA.

Scheduler, paged cache, kernels and CUDA graphs are lmdeploy's own, in the calling process and on this rank's GPU. What training
needs around them is here: samples that differ, weights handed over in place, ids in and out, an end that names its cause.

Its sampling is repaired at run time, without touching its files (`repair_sampling`). Three things remain its own: logits and
probabilities of a draw are bf16; bf16 sums depend on who is in a batch, so that equal seeds give equal samples only for equal
requests together; logits that are not finite are not noticed.
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
from rollout.engine import Engine
from rollout.sampling import GOLDEN
from rollout.traces import Trace, scored

# What a script may ask of this engine, and what not. docs/lmdeploy.md shows it; a request for what is missing is refused.
CAPABILITIES = {
    "token ids, completion mask, canvas": "yes, the whole terminal block included",
    "step map, log-probabilities": "no: a method that sets `RECORDS` is refused at the start; forwards by static alone",
    "models": "sdar and sdar_moe, blocks of the model's own length, mask id 151669, heads of 64 or more",
    "`--remasking`": "low_confidence_static, low_confidence_dynamic, sequential; one rule for all requests of a rollout",
    "`--denoising-steps`": "what divides the block length; dynamic: the block length, at least one token a step",
    "`--temperature`, `--top-k`, `--top-p`": "yes, the mask token banned; confidences are those before the cut",
    "`--lora-rank`": "merged weights alone: `--lora-merged-rollout`",
    "seeds": "per sample and position in the block; repeatable for the same list of requests",
    "weight update": "in place from the learner's tensors, no files; `sleep()` frees the memory, the next weights wake it",
    "LLaDA, Dream, LLaDA2": "no: `--rollout-backend auto`",
}

MASK_TOKEN_ID = 151669  # in lmdeploy's configuration of SDAR, whatever config.json says
CACHE_BLOCK = 64  # positions
POSITIONS_PER_ROW = 1024  # of the cache, for each of the rows that are decoded together,
MEMORY_SHARE = 0.3  # and at most so much of the memory that is free beside the weights
BUCKET_BYTES = 2**30  # of weights that are gathered before they are handed over


class LmdeployError(RuntimeError):
    """lmdeploy's engine failed, stopped or stands still."""


class LmdeployEngine(Engine):
    """name_or_dir: as load_model takes it; lmdeploy reads the directory itself. `model` is on the meta device, without weights.

    max_batch_size: rows decoded together by lmdeploy's scheduler, which refills them as they end. stall_seconds: without a new
    token for so long the engine counts as hung and the run ends.
    """

    choices = Engine.choices | {
        "remasking": ("low_confidence_static", "low_confidence_dynamic", "sequential")
    }
    records, title, refills = (None,), "lmdeploy", True
    stall_seconds = 300.0

    def __init__(self, name_or_dir, device="cuda", dtype=None, max_batch_size=256, asked=None):
        self.device, self.dtype = torch.device(device), dtype or torch.bfloat16
        if not isinstance(name_or_dir, (str, os.PathLike)):
            raise SystemExit(
                "--rollout-backend lmdeploy reads its model from a directory, not from an instance"
            )
        self.model = meta_model(name_or_dir, self.dtype)
        directory, adapters = self.model.sources
        refuse_unsupported(self.model, directory, self.device, self.dtype)
        if asked:
            self._plan(asked[0], **asked[1])
        self.version = installed_version()
        if self.device.index is None:
            self.device = torch.device(self.device.type, torch.cuda.current_device())
        torch.cuda.set_device(self.device)  # lmdeploy works on the current one
        self.max_batch_size, self.sessions, self.progress, self.is_asleep = (
            max_batch_size,
            0,
            time.monotonic(),
            False,
        )
        self.engine = self._start(
            str(directory), cache_blocks(self.model, self.device, self.dtype, max_batch_size)
        )
        repair_sampling(self.engine.sampling_strategy, self.model.block_length)
        self.agent = self.engine.executor.model_agent
        # A thread of its own: lmdeploy's tasks stay in inference mode and on their own stream between two steps, which would
        # otherwise be those of the learner too.
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._serve, name="lmdeploy", daemon=True)
        self.thread.start()
        atexit.register(self.close)
        if adapters:
            self.load_weights(export_weights(load_model(name_or_dir, self.device, self.dtype)))

    def _start(self, directory, num_blocks):
        """-> lmdeploy's Engine, warmed up"""
        os.environ.setdefault(
            "LMDEPLOY_ENABLE_CHECK_ENV", "0"
        )  # its check runs the script's top level in another process
        from lmdeploy.messages import PytorchEngineConfig
        from lmdeploy.pytorch.engine import Engine as PytorchEngine

        logging.getLogger("lmdeploy").setLevel(logging.ERROR)
        config = PytorchEngineConfig(
            dtype=str(self.dtype).removeprefix("torch."),
            max_batch_size=self.max_batch_size,
            block_size=CACHE_BLOCK,
            num_gpu_blocks=num_blocks,
            enable_prefix_caching=False,  # cached prompts would outlive the weights that made them
            distributed_executor_backend="uni",
            dllm_block_length=self.model.block_length,
            dllm_unmasking_strategy="low_confidence_static",
            enable_metrics=False,
            hf_overrides={  # transformers 5 leaves both empty where config.json has rope_theta and no pad_token_id
                "pad_token_id": self.model.pad_token_id,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": self.model.config.rope_theta,
                },
            },
        )
        try:
            return PytorchEngine.from_pretrained(directory, engine_config=config)
        except torch.OutOfMemoryError as error:
            raise SystemExit(
                f"--rollout-backend lmdeploy: out of memory at its start: {error}"
            ) from error

    def _serve(self):
        torch.cuda.set_device(self.device)
        with suppress(
            SystemExit
        ):  # of lmdeploy's checks: whoever waits sees that the thread has ended
            self.loop.run_forever()
        for task in (tasks := asyncio.all_tasks(self.loop)):
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=10))
        self.loop.close()

    def close(self):
        """End lmdeploy's tasks and free its memory."""
        atexit.unregister(self.close)

        def finish():
            self.loop.stop()
            self.engine.close()

        with suppress(RuntimeError):  # the loop is closed already
            self.loop.call_soon_threadsafe(finish)
        self.thread.join(20)

    def block_length(self, asked):
        n = self.model.block_length
        if asked not in (None, 0, n):
            raise SystemExit(
                f"--block-length {asked}: this model was trained with blocks of {n}; leave it out or give {n}"
            )
        return n

    def _plan(self, records=None, **settings):
        """What can be told, and refused, before the engine runs"""
        plan = super().plan(records, **settings)
        self._unmasking(
            settings | {"block_length": self.block_length(settings.get("block_length"))}
        )
        return plan

    def plan(self, records=None, **settings):
        plan, tokens = (
            self._plan(records, **settings),
            (self.engine.cache_config.num_gpu_blocks - 1) * CACHE_BLOCK,
        )
        return (
            f"{plan}; lmdeploy {self.version}: {self.max_batch_size} rows, a cache of {tokens} positions, no "
            "log-probabilities: the probe compares greedy tokens alone"
        )

    # Weights

    def load_weights(self, weights):
        """weights: pairs (official name, full tensor) of export_weights, all of them, copied in place; wakes a sleeping engine.

        lmdeploy splits them into its fused projections; its captured graphs hold the addresses and stay valid. ValueError names
        what does not fit or did not come.
        """
        wanted = tensor_shapes(self.model)
        if self.is_asleep:
            self._run(self._wake("weights"))
        torch.cuda.synchronize(self.device)  # no forward reads the old weights any more
        for bucket in buckets(checked(weights, wanted), BUCKET_BYTES):
            with self.agent.all_context():  # inference mode: the parameters were made in it
                self._served().load_weights(iter(bucket))
        if wanted:
            raise ValueError(f"weights did not come for {', '.join(list(wanted)[:5])}")
        if self.is_asleep:
            from lmdeploy.pytorch.weight_loader.model_weight_loader import (
                process_weights_after_loading,
            )

            process_weights_after_loading(
                self._served()
            )  # experts take the memory layout of their kernel
            self._run(self._wake("kv_cache"))  # captures the graphs of the new addresses
            self.is_asleep = False
        torch.cuda.synchronize(self.device)  # the forwards run on a stream of their own

    async def _wake(self, what):
        self.engine.wakeup([what])

    def _served(self):
        return self.agent.patched_model.get_model()

    def sleep(self):
        """Free weights, cache and graphs until the next load_weights, as between rollout and update."""
        self._run(self.engine.sleep(2))
        self.is_asleep = True

    # Rollout

    def _generate(self, prompt_ids, owner, sample_index, settings, stop_at_eos):
        from lmdeploy.messages import GenerationConfig
        from lmdeploy.pytorch.config import UnmaskingStrategy

        if self.is_asleep:
            raise SystemExit("lmdeploy's engine sleeps: hand weights over before a rollout")
        n, eos, model = settings["block_length"], settings["eos_token_ids"], self.model
        strategy, steps, threshold = self._unmasking(settings)
        unmasking = (
            self.agent.agent_strategy.unmasking_processor.dllm_config
        )  # read at every step, by all requests alike
        unmasking.unmasking_strategy = UnmaskingStrategy.from_str(strategy)
        unmasking.denoising_steps, unmasking.confidence_threshold = steps, threshold
        prompts, temperature = [prompt_ids[i] for i in owner.tolist()], settings["temperature"]
        room = [-(-(len(ids) + settings["gen_length"]) // n) * n - len(ids) for ids in prompts]
        longest = max(len(ids) + length for ids, length in zip(prompts, room, strict=True))
        if longest > (capacity := self.engine.max_session_len):
            raise SystemExit(
                f"a prompt and its completion take {longest} positions, lmdeploy's cache here holds {capacity}"
            )
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
            request.temperature = (
                temperature or 1.0
            )  # set afterwards: its constructor takes no more than 2
        completions = self._run(self._decode(prompts, requests))
        kept = []
        for ids, prompt, length in zip(completions, prompts, room, strict=True):
            if stop_at_eos:  # lmdeploy does not stop at an EOS in the block that the prompt ends in
                first = next((i for i, token in enumerate(ids) if token in eos), None)
                length = (
                    length if first is None else ((len(prompt) + first) // n + 1) * n - len(prompt)
                )
            if len(ids) < length or model.mask_token_id in ids[:length]:
                raise SystemExit(
                    f"lmdeploy {self.version} returned an unfinished block ({len(ids)} of {length} tokens)"
                )
            kept.append(ids[:length])
        return self._trace(prompts, kept, sample_index, settings)

    def _unmasking(self, settings):
        """-> strategy, steps and threshold of lmdeploy's configuration. SystemExit for what it does differently."""
        n, rule, steps = (
            settings["block_length"],
            settings["remasking"],
            settings["denoising_steps"],
        )
        if rule == "low_confidence_dynamic" and steps < n:
            at_most = (
                f"lmdeploy's low_confidence_dynamic reveals at least one token a step: give {n}"
            )
            raise SystemExit(f"--denoising-steps {steps}: {at_most}")
        if steps < n and n % steps:
            raise SystemExit(
                f"--denoising-steps {steps}: with lmdeploy it must divide the block length {n}"
            )
        return rule, min(steps, n), settings.get("confidence_threshold", 0.9)

    def _trace(self, prompts, completions, sample_index, settings):
        canvas_length = torch.tensor([len(ids) for ids in completions], device=self.device)
        width, pad, n = int(canvas_length.max()), self.model.pad_token_id, settings["block_length"]
        padded = [ids + [pad] * (width - len(ids)) for ids in completions]
        completion_ids = torch.tensor(padded, device=self.device)
        num_forwards = None
        if settings["remasking"] != "low_confidence_dynamic":
            a_step = n // min(settings["denoising_steps"], n)
            lengths = torch.tensor([len(ids) for ids in prompts], device=self.device)
            in_first = n - lengths % n  # masks of the block that the prompt ends in
            blocks = (canvas_length - in_first) // n  # after it
            num_forwards = (
                (in_first + a_step - 1) // a_step + blocks * (n // a_step) + blocks
            )  # all but the last are committed
        return Trace(
            prompt_ids=prompts,
            completion_ids=completion_ids,
            completion_mask=scored(completion_ids, canvas_length, settings["eos_token_ids"]),
            canvas_length=canvas_length,
            step_map=None,
            replay_map=None,
            logps=None,
            sample_index=sample_index,
            num_forwards=num_forwards,
            settings=settings | {"engine": f"lmdeploy {self.version}", "logps": None},
        )

    async def _decode(self, prompts, requests):
        """-> completions through their terminal block, lists of ids"""
        instance = self.engine.create_instance()
        pairs = zip(prompts, requests, strict=True)
        tasks = [
            asyncio.ensure_future(self._complete(instance, ids, request)) for ids, request in pairs
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _complete(self, instance, ids, request):
        """One request. -> ids after the prompt, with those of the terminal block that lmdeploy cuts off behind the EOS"""
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
            raise LmdeployError(f"a request ended with {status}" + self._cause())
        return completion

    def _cause(self):
        """Why lmdeploy's own loop has ended, or ''."""
        task = getattr(self.engine.req_manager, "_loop_task", None)
        if task is None or not task.done():
            return ""
        error = None if task.cancelled() else task.exception()
        return (
            f": its loop was ended by {type(error).__name__}: {error}"
            if error
            else ": its loop was cancelled"
        )

    def _run(self, work):
        """Run a coroutine in lmdeploy's thread. -> its result. SystemExit with the cause if it fails or stands still."""
        future, self.progress = asyncio.run_coroutine_threadsafe(work, self.loop), time.monotonic()
        try:
            while not wait([future], timeout=1).done:
                if (idle := time.monotonic() - self.progress) > self.stall_seconds:
                    future.cancel()
                    raise LmdeployError(f"nothing came for {idle:.0f} s" + self._cause())
            if future.cancelled():
                raise LmdeployError("its thread has ended" + self._cause())
            return future.result()
        except (LmdeployError, torch.OutOfMemoryError) as error:
            with suppress(Exception):
                self.close()
            raise SystemExit(f"--rollout-backend lmdeploy: the engine failed: {error}") from error


def refuse_unsupported(model, directory, device, dtype):
    """SystemExit with one line if lmdeploy cannot serve this model here."""
    kind, backend = model.checkpoint_config["model_type"], "--rollout-backend lmdeploy"
    if kind not in ("sdar", "sdar_moe"):
        raise SystemExit(f"{backend} serves SDAR, not a model of type {kind}: leave it at auto")
    if directory is None or model.config.head_dim < 64:
        raise SystemExit(
            f"{backend} has no kernels for heads of {model.config.head_dim}: leave it at auto for a tiny model"
        )
    if model.mask_token_id != MASK_TOKEN_ID:
        raise SystemExit(
            f"{backend} takes {MASK_TOKEN_ID} for the mask token; that of this model is {model.mask_token_id}"
        )
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        raise SystemExit(
            f"{backend} needs a CUDA GPU and bf16 or fp16, not {device.type} and {dtype}"
        )


def installed_version():
    try:
        found = version("lmdeploy")
    except PackageNotFoundError:
        raise SystemExit(
            "--rollout-backend lmdeploy: the package is missing: pip install -r requirements-gpu.txt"
        ) from None
    if tuple(int(part) for part in found.split(".")[:2]) < (0, 18):
        raise SystemExit(
            f"--rollout-backend lmdeploy needs lmdeploy 0.18 or newer, {found} is installed"
        )
    return found


def cache_blocks(model, device, dtype, rows):
    """Blocks of lmdeploy's cache, of CACHE_BLOCK positions: bounded, because a learner is to follow on the same GPU."""
    config = model.config
    a_position = (
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    )
    weights = sum(value.numel() for value in model.parameters()) * dtype.itemsize
    memory = MEMORY_SHARE * (torch.cuda.mem_get_info(device)[0] - weights)
    positions = min(rows * POSITIONS_PER_ROW, int(memory) // a_position)
    if positions < 32 * CACHE_BLOCK:
        raise SystemExit(
            f"--rollout-backend lmdeploy: no memory for its weights ({weights / 2**30:.1f} GiB) and a cache"
        )
    return positions // CACHE_BLOCK + 1  # one is lmdeploy's own


def checked(weights, wanted):
    """Pass weights on, and take them out of wanted {name: shape}. ValueError for what is not there."""
    for name, value in weights:
        if ".lora_" in name:
            raise SystemExit(
                "--rollout-backend lmdeploy serves no adapters beside its weights: add --lora-merged-rollout"
            )
        if wanted.get(name) != tuple(value.shape):
            raise ValueError(
                f"{name} {list(value.shape)} is no tensor of this model, or came twice"
            )
        del wanted[name]
        yield name, value


def buckets(weights, size):
    """Lists of weights of about `size` bytes: each list is one walk over the names of lmdeploy's parameters."""
    bucket, held = [], 0
    for name, value in weights:
        bucket.append((name, value))
        held += value.nbytes
        if held >= size:
            yield bucket
            bucket, held = [], 0
    if bucket:
        yield bucket


def sample_seed(seed, sample_index):
    """63 bits keyed by (seed, number of the sample in the rollout)."""
    return (
        int.from_bytes(blake2b(f"{seed} {sample_index}".encode(), digest_size=8).digest(), "little")
        >> 1
    )


def is_tiled(strategy, block_length):
    """Does make_sampling_inputs lay the values of sequences a, b out as a b a b ... for rows that are a a ... b b ...?

    That is the error of lmdeploy 0.11 to 0.18: rows get the seed, temperature and top-k of other sequences. SystemExit if the
    rows are in neither order.
    """
    from lmdeploy.pytorch.messages import SamplingParam

    a, b = (
        SimpleNamespace(
            sampling_param=SamplingParam(top_k=0, random_seed=seed), num_valid_ids=0, num_new_tokens=0, seq_id=0,
            session=SimpleNamespace(session_id=0),
        )
        for seed in (1, 2)
    )  # fmt: skip
    rows = strategy.make_sampling_inputs([a, b]).random_seeds.tolist()
    if sorted(rows) != [1] * block_length + [2] * block_length or rows not in (
        [1, 2] * block_length,
        sorted(rows),
    ):
        raise SystemExit(
            f"rollout/lmdeploy.py does not know this lmdeploy: it lays the seeds of two requests out as {rows}"
        )
    return rows != sorted(rows) and block_length > 1


def repair_sampling(strategy, block_length):
    """Make lmdeploy's dLLM sampling strategy, this object alone, give every row its own sequence's values and its own stream.

    Row r draws token r % n of the block of sequence r // n. Values are put into that order where lmdeploy has them in the other
    (`is_tiled`). Its kernel draws one uniform from (seed, offset) of each row, so that n equal seeds would give all tokens of a
    block the same uniform: each position gets a seed of its own, made from the request's seed.
    """
    original, n, tiled = (
        strategy.make_sampling_inputs,
        block_length,
        is_tiled(strategy, block_length),
    )

    def make_sampling_inputs(seqs):
        inputs = original(seqs)
        if tiled:
            for field in fields(inputs):
                value = getattr(inputs, field.name)
                if isinstance(value, torch.Tensor) and value.dim() == 1:
                    setattr(inputs, field.name, value.view(n, len(seqs)).t().flatten())
        if inputs.random_seeds is not None:
            seeds = torch.tensor([seq.sampling_param.random_seed for seq in seqs])
            inputs.random_seeds = (seeds[:, None] + torch.arange(n) * GOLDEN).flatten()
        return inputs

    strategy.make_sampling_inputs = make_sampling_inputs
