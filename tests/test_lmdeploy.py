"""rollout/lmdeploy.py against a stand-in for what it calls of lmdeploy 0.18, and against lmdeploy's
own code where it is there.

The stand-in keeps what was seen of the real engine: per-request values tiled over the rows of a
block, one uniform a row from (seed, offset), tokens cut off behind the EOS, no stop in the block
that the prompt ends in, fused weights, a loop whose tasks leave the thread in inference mode,
temperatures up to 2. `pytest -m lmdeploy` with lmdeploy on the path runs its own code.
"""

import asyncio
import contextlib
import json
import sys
import time
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from test_models import exits_with_one_line
from torch import nn
from transformers import PreTrainedTokenizerFast

import rollout.lmdeploy as backend
from models import export_weights, save_model
from models.tiny import TINY_SDAR, byte_tokenizer, random_model
from rollout import make_engine, probe
from rollout.lmdeploy import is_tiled, repair_sampling
from rollout.probe import greedy_agreement
from rollout.sampling import keyed_uniform

pytestmark = [pytest.mark.fast]
V, MASK, EOS, PAD, N = 60, 50, [1, 2], 0, 4


CONFIG = TINY_SDAR | {"vocab_size": V, "hidden_size": 64, "intermediate_size": 96}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
CONFIG |= {"head_dim": 64, "mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": PAD}


STATIC = {"denoising_steps": 2, "remasking": "low_confidence_static"}


@dataclass
class SamplingParam:
    top_k: int = 1
    random_seed: int = None
    temperature: float = 1.0


@dataclass
class SamplingInputs:
    temperature: torch.Tensor
    top_k: torch.Tensor
    bad_words: torch.Tensor
    random_seeds: torch.Tensor | None
    random_offsets: torch.Tensor
    max_top_k: int = 0


class Tiled:
    """DLLMSamplingStrategy as it is in 0.18: a b a b ... where the rows are a a ... b b ..."""

    order = staticmethod(lambda values: values[None].repeat(N, 1).flatten())

    def make_sampling_inputs(self, seqs):
        params = [seq.sampling_param for seq in seqs]
        row = lambda name: self.order(torch.tensor([getattr(param, name) for param in params]))
        greedy = max(param.top_k for param in params) == 1
        return SamplingInputs(
            temperature=row("temperature"),
            top_k=row("top_k"),
            bad_words=torch.arange(len(seqs))[:, None, None].repeat(1, N, 1).flatten(0, 1),
            random_seeds=None
            if greedy
            else self.order(torch.tensor([param.random_seed & 0xFFFFFFFF for param in params])),
            random_offsets=self.order(torch.tensor([seq.num_valid_ids for seq in seqs])),
        )


class Mended(Tiled):
    order = staticmethod(lambda values: values.repeat_interleave(N))


class Reversed(Tiled):
    order = staticmethod(lambda values: values.flip(0).repeat_interleave(N))


class Fused(nn.Module):
    """lmdeploy's SDAR: q, k, v in one matrix, gate and up in another."""

    parts = {".q_proj": (".qkv_proj", 0), ".k_proj": (".qkv_proj", 1), ".v_proj": (".qkv_proj", 2)}
    parts |= {".gate_proj": (".gate_up_proj", 0), ".up_proj": (".gate_up_proj", 1)}

    def __init__(self):
        super().__init__()
        self.values, self.sizes = {}, {}
        for name, value in export_weights(random_model(CONFIG)):
            fused, shard = self.place(name)
            self.sizes.setdefault(fused, {})[shard] = len(value)
        for name, value in export_weights(random_model(CONFIG)):
            fused, _ = self.place(name)
            with torch.inference_mode():
                self.values[fused] = torch.zeros(sum(self.sizes[fused].values()), *value.shape[1:])
        self.load_weights(export_weights(random_model(CONFIG)))

    def place(self, name):
        for part, (fused, shard) in self.parts.items():
            if part in name:
                return name.replace(part, fused), shard
        return name, 0

    @torch.inference_mode()
    def load_weights(self, weights):
        for name, value in weights:
            fused, shard = self.place(name)
            start = sum(size for other, size in self.sizes[fused].items() if other < shard)
            self.values[fused][start : start + self.sizes[fused][shard]].copy_(value)

    def checksum(self):
        """A number of all weights, in which each has its own factor."""
        factors = torch.Generator().manual_seed(0)
        total = sum(
            (value.double() * torch.rand(value.shape, generator=factors)).sum()
            for value in self.values.values()
        )
        return int(total * 2**30)


class Sequence:
    def __init__(self, ids, request):
        self.ids, self.prompt_length, self.request = list(ids), len(ids), request
        self.sampling_param = SamplingParam(request.top_k, request.random_seed, request.temperature)
        self.num_valid_ids, self.valid, self.finished, self.steps = len(ids), len(ids), False, 0
        self.new = asyncio.Event()

    @property
    def all_ids(self):
        return np.array(self.ids)


@dataclass
class GenerationConfig:
    max_new_tokens: int = 512
    do_sample: bool = False
    top_p: float = 1.0
    top_k: int = 50
    temperature: float = 0.8
    random_seed: int = None
    stop_token_ids: list = None
    bad_token_ids: list = None

    def __post_init__(self):
        assert 0 <= self.temperature <= 2


@dataclass
class PytorchEngineConfig:
    dtype: str
    max_batch_size: int
    block_size: int
    num_gpu_blocks: int
    enable_prefix_caching: bool
    distributed_executor_backend: str
    dllm_block_length: int
    dllm_unmasking_strategy: str
    enable_metrics: bool
    hf_overrides: dict


class FakeEngine:
    """lmdeploy.pytorch.engine.Engine as far as rollout/lmdeploy.py uses it. fault(step) may raise
    or wait.
    """

    strategy, fault = Tiled, None

    @classmethod
    def from_pretrained(cls, directory, engine_config):
        return cls(engine_config)

    def __init__(self, config):
        self.config, self.cache_config = (
            config,
            SimpleNamespace(num_gpu_blocks=config.num_gpu_blocks),
        )
        self.max_session_len = (config.num_gpu_blocks - 2) * config.block_size
        self.sampling_strategy, self.model, self.log = self.strategy(), Fused(), []
        unmasking = SimpleNamespace(
            unmasking_strategy=None, denoising_steps=None, confidence_threshold=None
        )
        agent = SimpleNamespace(
            agent_strategy=SimpleNamespace(
                unmasking_processor=SimpleNamespace(dllm_config=unmasking)
            ),
            all_context=torch.inference_mode,
            patched_model=SimpleNamespace(get_model=lambda: self.model),
        )
        self.unmasking, self.executor = unmasking, SimpleNamespace(model_agent=agent)
        self.sessions, self.asleep = {}, set()
        self.scheduler = SimpleNamespace(
            get_session=lambda i: SimpleNamespace(sequences={0: self.sessions[i]})
        )
        self.req_manager = SimpleNamespace(_loop_task=None)

    def create_instance(self):
        return self

    async def async_stream_infer(self, session, ids, request):
        assert session not in self.sessions and not self.asleep
        self.sessions[session] = sequence = Sequence(ids, request)
        if self.req_manager._loop_task is None:
            self.req_manager._loop_task = asyncio.get_running_loop().create_task(self.main_loop())
        told = len(ids)
        try:
            while True:
                while not sequence.new.is_set():  # as RequestSender.async_recv
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(sequence.new.wait(), 0.1)
                    if self.req_manager._loop_task.done():
                        yield SimpleNamespace(
                            status=SimpleNamespace(name="ENGINE_STOP_ERROR"), token_ids=[]
                        )
                        return
                sequence.new.clear()
                status = SimpleNamespace(name="FINISH" if sequence.finished else "SUCCESS")
                tokens, told = sequence.ids[told : sequence.valid], sequence.valid
                yield SimpleNamespace(status=status, token_ids=tokens)
                if sequence.finished:
                    return
        finally:
            self.sessions.pop(session, None)

    async def main_loop(self):
        with torch.inference_mode():  # the real one stays in it, and on its stream, while it waits
            while True:
                await asyncio.sleep(0.001)
                if live := [
                    sequence for sequence in self.sessions.values() if not sequence.finished
                ]:
                    if self.fault:
                        await self.fault(live)
                    self.step(live)

    def step(self, live):
        inputs, checksum = self.sampling_strategy.make_sampling_inputs(live), self.model.checksum()
        self.log.append(inputs)
        for i, sequence in enumerate(live):
            start = len(sequence.ids) // N * N
            for j in range(len(sequence.ids) - start, N):
                if inputs.random_seeds is None:
                    key = (checksum, *sequence.ids[-3:], start + j)
                else:
                    key = (
                        checksum,
                        int(inputs.random_seeds[i * N + j]),
                        int(inputs.random_offsets[i * N + j]) + sequence.steps,
                    )
                token = int(keyed_uniform(*key, torch.tensor(0)) * V)
                sequence.ids.append(token + 3 if token in sequence.request.bad_token_ids else token)
            sequence.steps += 1
            done, request = len(sequence.ids) - sequence.prompt_length, sequence.request
            ends = [k for k in range(start, start + N) if sequence.ids[k] in request.stop_token_ids]
            if start < sequence.prompt_length:
                ends = []  # output_start_pos lies behind the block that the prompt ends in
            sequence.finished = bool(ends) or done >= request.max_new_tokens
            sequence.valid = min(
                ends[0] + 1 if ends else len(sequence.ids),
                sequence.prompt_length + request.max_new_tokens,
            )
            sequence.new.set()

    async def sleep(self, level):
        assert level == 2
        self.asleep = {"weights", "kv_cache"}
        for value in self.model.values.values():
            value.fill_(float("nan"))

    def wakeup(self, tags):
        assert asyncio.get_running_loop()  # in lmdeploy's own thread: it wakes its tasks
        self.asleep -= set(tags)

    def close(self):
        if self.req_manager._loop_task:
            self.req_manager._loop_task.cancel()


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def fake(monkeypatch):
    """lmdeploy's modules with the names that rollout/lmdeploy.py imports from them, and no GPU."""
    engine = type("Engine", (FakeEngine,), {})
    strategies = SimpleNamespace(from_str=lambda name: name.upper())
    contents = {
        "lmdeploy": {},
        "lmdeploy.messages": {
            "GenerationConfig": GenerationConfig,
            "PytorchEngineConfig": PytorchEngineConfig,
        },
        "lmdeploy.pytorch": {},
        "lmdeploy.pytorch.engine": {"Engine": engine},
        "lmdeploy.pytorch.config": {"UnmaskingStrategy": strategies},
        "lmdeploy.pytorch.messages": {"SamplingParam": SamplingParam},
        "lmdeploy.pytorch.weight_loader": {},
        "lmdeploy.pytorch.weight_loader.model_weight_loader": {
            "process_weights_after_loading": lambda model: None
        },
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(backend, "refuse_unsupported", lambda *facts: None)
    monkeypatch.setattr(backend, "installed_version", lambda: "0.18.0")
    for name, result in {
        "set_device": None,
        "synchronize": None,
        "current_device": 0,
        "mem_get_info": (2**40, 2**40),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *given, result=result: result)
    return engine


@pytest.fixture
def engine(fake, directory):
    engine = make_engine(directory, "lmdeploy", "cpu", torch.float32, max_batch_size=8)
    yield engine
    engine.close()


def rows_of(trace):
    return [tuple(ids) for ids in trace.completion_ids.tolist()]


def seqs_of(params):
    session = SimpleNamespace(session_id=0)
    more = dict(num_new_tokens=0, seq_id=0, session=session)
    return [
        SimpleNamespace(sampling_param=param, num_valid_ids=5 + i, **more)
        for i, param in enumerate(params)
    ]


@pytest.mark.parametrize("strategy, tiled", [(Tiled, True), (Mended, False)])
def test_rows_have_the_values_of_their_sequence_and_a_stream_of_their_own(fake, strategy, tiled):
    """A version that is mended already is not turned into the wrong order; without the repair, the
    tiled one is wrong.
    """
    params = [
        SamplingParam(top_k, seed, temperature)
        for top_k, seed, temperature in [(0, 7, 0.5), (9, 2**62, 1.5), (3, 5, 1.0)]
    ]
    strategy = strategy()
    before = strategy.make_sampling_inputs(seqs_of(params)).temperature.tolist()
    assert (before == [0.5] * N + [1.5] * N + [1.0] * N) is not tiled
    assert is_tiled(strategy, N) is tiled
    repair_sampling(strategy, N)
    inputs = strategy.make_sampling_inputs(seqs_of(params))
    assert inputs.temperature.tolist() == [0.5] * N + [1.5] * N + [1.0] * N
    assert inputs.top_k.tolist() == [0] * N + [9] * N + [3] * N
    assert inputs.random_offsets.tolist() == [5] * N + [6] * N + [7] * N
    assert inputs.bad_words.flatten().tolist() == [0] * N + [1] * N + [2] * N
    seeds = inputs.random_seeds.tolist()
    assert len(set(seeds)) == 3 * N and seeds[::N] == [7, 2**62, 5]
    alone = strategy.make_sampling_inputs(seqs_of(params)[1:2]).random_seeds.tolist()
    assert alone == seeds[N : 2 * N]  # whoever else is in the batch
    assert (
        strategy.make_sampling_inputs(seqs_of([SamplingParam(1, 3)] * 2)).random_seeds is None
    )  # greedy


def test_an_unknown_order_is_refused(fake):
    with exits_with_one_line("does not know this lmdeploy", r"\[2, 2, 2, 2, 1"):
        repair_sampling(Reversed(), N)


def test_samples_differ_and_repeat(engine, monkeypatch):
    """16 of 16, the same again with the seed; without the repair 4, as the real engine gave."""
    settings = {"num_samples": 16, "gen_length": 8, "stop_at_eos": False, **STATIC}
    prompts = [[3, 4, 5, 6, 7, 8]]
    first, again, other = (
        rows_of(engine.generate(prompts, seed=seed, **settings)) for seed in (1, 1, 2)
    )
    assert len(set(first)) == 16 and first == again and not set(first) & set(other)
    moved = engine.generate(prompts, seed=1, sample_offset=4, **settings | {"num_samples": 12})
    assert rows_of(moved) == first[4:] and moved.sample_index.tolist() == list(range(4, 16))
    repaired = engine.engine.sampling_strategy.__dict__.pop("make_sampling_inputs")
    assert len(set(rows_of(engine.generate(prompts, seed=1, **settings)))) == N
    engine.engine.sampling_strategy.make_sampling_inputs = repaired
    tokens = torch.tensor(first)[
        :, 2:6
    ]  # one block: with one stream for all of it, its tokens would be equal
    assert (tokens == tokens[:, :1]).all(1).sum() < 3


def test_a_trace_is_that_of_the_block_engine_without_its_maps(engine):
    """Canvas, mask, forwards and settings for prompts of every length against the grid, beside
    rollout/block.py.
    """
    ours = make_engine(random_model(CONFIG))
    ours.model.eos_token_ids, ours.model.pad_token_id = EOS, PAD
    prompts = [list(range(3, 3 + length)) for length in (1, 3, 4, 5, 6, 7, 8)]
    for steps in (1, 2, 4, 9):
        settings = {
            "gen_length": 7,
            "denoising_steps": steps,
            "remasking": "low_confidence_static",
            "stop_at_eos": False,
        }
        a, b = (sampler.generate(prompts, num_samples=2, **settings) for sampler in (engine, ours))
        assert a.prompt_ids == b.prompt_ids and torch.equal(a.sample_index, b.sample_index)
        assert (
            torch.equal(a.canvas_length, b.canvas_length)
            and a.completion_ids.shape == b.completion_ids.shape
        )
        assert torch.equal(a.num_forwards, b.num_forwards), steps
        assert a.step_map is a.replay_map is a.logps is a.records is None
        differing = {name for name in b.settings if a.settings[name] != b.settings[name]}
        assert differing == {"logps"} and a.settings["engine"] == "lmdeploy 0.18.0"
    dynamic = engine.generate(
        prompts, gen_length=4, denoising_steps=4, remasking="low_confidence_dynamic"
    )
    assert dynamic.num_forwards is None


def first_eos(ids):
    return next((i for i, token in enumerate(ids) if token in EOS), None)


def test_completions_end_with_the_block_of_their_first_eos(engine):
    """The rest of that block comes too; one in the block that the prompt ends in, where lmdeploy
    goes on, ends it as well.
    """
    prompts, seen = [list(range(3, 3 + length)) for length in (5, 6, 8)], set()
    long = engine.generate(prompts, num_samples=30, gen_length=24, stop_at_eos=False, **STATIC)
    cut = engine.generate(prompts, num_samples=30, gen_length=24, **STATIC)
    for i, whole in enumerate(rows_of(long)):
        P, length, end = (
            len(cut.prompt_ids[i]),
            int(cut.canvas_length[i]),
            first_eos(whole[: int(long.canvas_length[i])]),
        )
        want = int(long.canvas_length[i]) if end is None else ((P + end) // N + 1) * N - P
        assert length == want and rows_of(cut)[i][:length] == whole[:length]
        assert (cut.completion_ids[i, length:] == PAD).all()
        scored = want if end is None else end + 1
        assert cut.completion_mask[i].tolist() == [
            j < scored for j in range(cut.completion_ids.shape[1])
        ]
        assert bool(cut.truncated[i]) == (end is None)
        if end is not None:
            seen.add(
                (
                    "in the block of the prompt" if P % N and end < N - P % N else "later",
                    scored == length,
                )
            )
    assert len(seen) == 4, seen
    assert not torch.isin(cut.completion_ids, torch.tensor(MASK)).any()


def test_unmasking_is_set_for_a_rollout_and_restricted_to_what_is_the_same(engine):
    config = engine.engine.unmasking
    engine.generate([[3]], gen_length=4, **STATIC)
    assert (config.unmasking_strategy, config.denoising_steps) == ("LOW_CONFIDENCE_STATIC", 2)
    dynamic = {
        "denoising_steps": 8,
        "remasking": "low_confidence_dynamic",
        "confidence_threshold": 0.7,
    }
    engine.generate([[3]], gen_length=4, **dynamic)
    assert (config.unmasking_strategy, config.denoising_steps, config.confidence_threshold) == (
        "LOW_CONFIDENCE_DYNAMIC",
        4,
        0.7,
    )
    for wrong, words in [
        ({"remasking": "random"}, ("--remasking random", "lmdeploy has low_confidence_static")),
        ({"denoising_steps": 3}, ("--denoising-steps 3", "divide the block length 4")),
        ({"remasking": "low_confidence_dynamic"}, ("--denoising-steps 2", "give 4")),
        ({"block_length": 8}, ("--block-length 8", "give 4")),
    ]:
        with exits_with_one_line(*words):
            engine.generate([[3]], gen_length=4, **STATIC | wrong)
    for steps in (3, 0):
        with exits_with_one_line(f"--denoising-steps {steps}"):
            engine.plan(gen_length=4, **STATIC | {"denoising_steps": steps})
    with exits_with_one_line("--alg-temp 0.5 must be 0 for lmdeploy"):
        engine.plan(gen_length=4, **STATIC | {"alg_temp": 0.5})


def test_a_method_that_needs_more_than_tokens_is_refused_at_the_start(engine):
    """plan is called with the script's RECORDS before anything is sampled."""
    for records in ("steps", "events", "states"):
        with exits_with_one_line(f"lmdeploy keeps no records of kind '{records}'"):
            engine.plan(records, gen_length=4, **STATIC)
    plan = engine.plan(None, gen_length=4, **STATIC)
    assert "2 steps each" in plan and "no log-probabilities" in plan


@pytest.mark.parametrize(
    "change, words",
    [
        ({"name": "tiny-llada"}, ("serves SDAR, not a model of type llada",)),
        ({"name": "tiny-dream"}, ("serves SDAR, not a model of type Dream",)),
        ({"name": "tiny-llada2"}, ("serves SDAR, not a model of type llada2_moe",)),
        ({"name": "tiny-sdar"}, ("no kernels for heads of 32",)),
        ({"mask_token_id": 49}, ("takes 151669 for the mask token", "this model is 49")),
        ({}, ("needs a CUDA GPU", "not cpu")),
    ],
)
def test_what_lmdeploy_cannot_serve_is_refused(directory, monkeypatch, change, words):
    if "mask_token_id" not in change:
        monkeypatch.setattr(backend, "MASK_TOKEN_ID", MASK)
    (directory / "config.json").write_text(
        json.dumps(CONFIG | {k: v for k, v in change.items() if k != "name"})
    )
    with exits_with_one_line("--rollout-backend lmdeploy", *words):
        make_engine(change.get("name", directory), "lmdeploy")


def test_new_weights_change_the_outputs_and_the_first_ones_bring_them_back(engine):
    """In place, through the fused layout, in one bucket or many."""
    served, sampling = (
        engine.engine.model,
        {"num_samples": 4, "gen_length": 8, "temperature": 0.0, **STATIC},
    )
    addresses = {name: value.data_ptr() for name, value in served.values.items()}
    prompts = [[3, 4, 5], [6, 7, 8, 9, 10]]
    first = rows_of(engine.generate(prompts, **sampling))
    learner = random_model(CONFIG, seed=1)
    engine.load_weights(export_weights(learner))
    own = dict(export_weights(learner))
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    fused = torch.cat([own[f"{attention}{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(served.values[f"{attention}qkv_proj.weight"], fused)
    fused = torch.cat([own[f"{mlp}{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(served.values[f"{mlp}gate_up_proj.weight"], fused)
    changed = rows_of(engine.generate(prompts, **sampling))
    assert changed != first
    with torch.no_grad():
        learner.layers[0].mlp.up_proj.weight[3, 3] += 0.5  # one entry of one matrix is seen
    engine.load_weights(export_weights(learner))
    assert rows_of(engine.generate(prompts, **sampling)) not in (changed, first)
    engine.load_weights(export_weights(random_model(CONFIG)))
    assert rows_of(engine.generate(prompts, **sampling)) == first
    assert addresses == {name: value.data_ptr() for name, value in served.values.items()}


def test_weights_that_do_not_fit_are_named(engine):
    weights = list(export_weights(random_model(CONFIG)))
    with pytest.raises(ValueError, match=f"weights did not come for {weights[-1][0]}"):
        engine.load_weights(iter(weights[:-1]))
    with pytest.raises(ValueError, match="norm.weight.*no tensor of this model, or came twice"):
        engine.load_weights([*weights, ("model.norm.weight", torch.ones(64))])
    with pytest.raises(ValueError, match=r"model.norm.weight \[63\] is no tensor"):
        engine.load_weights([("model.norm.weight", torch.ones(63))])
    adapter = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    with exits_with_one_line("needs merged weights", "--lora-merged-rollout"):
        engine.load_weights([(adapter, torch.ones(2, 64))])


def test_the_learner_stays_out_of_inference_mode(engine):
    """lmdeploy's tasks wait inside inference mode; in the caller's thread, its parameters could not
    be trained any more.
    """
    engine.generate([[3, 4, 5]], gen_length=8, **STATIC)
    engine.load_weights(export_weights(random_model(CONFIG)))
    engine.generate([[3, 4, 5]], gen_length=8, **STATIC)
    assert not torch.is_inference_mode_enabled()
    model = random_model(CONFIG)
    model.logits(torch.tensor([[3, 4, 5]])).sum().backward()
    # the control: in one thread it does leak
    loop, other = asyncio.new_event_loop(), FakeEngine(engine.engine.config)
    request = GenerationConfig(random_seed=1, stop_token_ids=[], bad_token_ids=[], max_new_tokens=4)

    async def drive():
        return [output async for output in other.async_stream_infer(1, [3], request)]

    assert loop.run_until_complete(drive())[-1].status.name == "FINISH"
    leaked = torch.is_inference_mode_enabled()
    other.close()
    loop.run_until_complete(asyncio.wait(asyncio.all_tasks(loop), timeout=5))
    loop.close()
    assert leaked and not torch.is_inference_mode_enabled()


def test_a_failing_loop_ends_the_run_with_its_cause(engine, fake):
    async def fault(live):
        if len(live[0].ids) > 8:
            raise RuntimeError("CUDA error: an illegal memory access")

    engine.engine.fault = fault
    start = time.monotonic()
    with exits_with_one_line(
        "the engine failed",
        "ENGINE_STOP_ERROR",
        "RuntimeError: CUDA error: an illegal memory access",
    ):
        engine.generate(
            [[3, 4, 5], [6, 7]], num_samples=3, gen_length=24, stop_at_eos=False, **STATIC
        )
    assert time.monotonic() - start < 60 and not engine.thread.is_alive()


def test_a_standing_engine_ends_the_run(engine):
    async def fault(live):
        await asyncio.sleep(3600)

    engine.engine.fault, engine.stall_seconds = fault, 0.5
    with exits_with_one_line("the engine failed", "nothing came for"):
        engine.generate([[3, 4, 5]], gen_length=8, **STATIC)


def test_the_probe_finds_an_engine_that_repeats_itself(engine):
    metrics = probe(engine, random_model(CONFIG), [3, 4, 5], gen_length=24, **STATIC)
    assert metrics["probe/distinct_frac"] == 1
    del engine.engine.sampling_strategy.__dict__["make_sampling_inputs"]
    with exits_with_one_line("drew 2 different completions of 8"):
        probe(engine, random_model(CONFIG), [3, 4, 5], gen_length=24, **STATIC)


@pytest.fixture
def real():
    """The installed lmdeploy, whatever the fixture `fake` has put in its place before."""
    pytest.importorskip("lmdeploy.pytorch.engine")


def tokenizer_with_the_mask():
    """The byte tokenizer, with a mask token of the id that lmdeploy takes for it."""
    from tokenizers import AddedToken, Tokenizer

    content = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    content["added_tokens"] = []
    content["model"]["vocab"] |= {"<|endoftext|>": 256, "<|mask|>": backend.MASK_TOKEN_ID}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<|endoftext|>", "<|mask|>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", mask_token="<|mask|>"
    )


@pytest.mark.cuda
@pytest.mark.lmdeploy
def test_the_real_engine_on_a_gpu(real, tmp_path):
    """Samples, stops, the rules, weights there and back, sleep; and a learner can be trained in the
    same process afterwards.
    """
    config = CONFIG | {
        "vocab_size": 151936,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
    }
    config |= {"num_key_value_heads": 2, "head_dim": 128, "mask_token_id": backend.MASK_TOKEN_ID}
    config |= {"bos_token_id": 1, "max_position_embeddings": 1024, "torch_dtype": "bfloat16"}
    config |= {
        "attention_bias": False,
        "sliding_window": None,
        "use_sliding_window": False,
    }  # as official files have them
    first, other = (
        random_model(config, seed=seed, device="cuda", dtype=torch.bfloat16) for seed in (0, 1)
    )
    first.eos_token_ids, first.pad_token_id = EOS, PAD
    save_model(first, tmp_path / "model", tokenizer_with_the_mask())
    engine = make_engine(tmp_path / "model", "lmdeploy", "cuda", max_batch_size=32)
    prompts, settings = (
        [list(range(3, 3 + length)) for length in (5, 8, 70)],
        {"gen_length": 24, **STATIC},
    )
    samples = lambda seed: engine.generate(
        prompts, num_samples=16, seed=seed, stop_at_eos=False, **settings
    )
    a, b, c = rows_of(samples(1)), rows_of(samples(1)), rows_of(samples(2))
    assert (
        all(len(set(a[i : i + 16])) == 16 for i in (0, 16, 32)) and a == b and not set(a) & set(c)
    )

    greedy = settings | {"temperature": 0.0, "stop_at_eos": False}
    before = rows_of(engine.generate(prompts, **greedy))
    assert before == rows_of(engine.generate(prompts, **greedy))
    agreement = lambda model: greedy_agreement(engine, model, prompts[2], **settings)
    assert agreement(first) > 0.8 > agreement(other)
    engine.load_weights(export_weights(other))
    assert rows_of(engine.generate(prompts, **greedy)) != before
    assert agreement(other) > 0.8 > agreement(first)
    engine.sleep()
    engine.load_weights(export_weights(first))
    assert rows_of(engine.generate(prompts, **greedy)) == before

    engine.model.eos_token_ids = list(range(0, 151936, 20))  # one token of twenty
    for rule, steps in (
        ("low_confidence_static", 4),
        ("low_confidence_dynamic", 4),
        ("sequential", 2),
    ):
        unmasking = {"remasking": rule, "denoising_steps": steps, "confidence_threshold": 1e-4}
        trace = engine.generate(prompts, num_samples=16, **settings | unmasking)
        ends = 0
        for i, ids in enumerate(rows_of(trace)):
            P, length = len(trace.prompt_ids[i]), int(trace.canvas_length[i])
            end = next((j for j, token in enumerate(ids[:length]) if token % 20 == 0), None)
            assert (P + length) % N == 0 and backend.MASK_TOKEN_ID not in ids[:length]
            assert length == (
                -(-(P + 24) // N) * N - P if end is None else ((P + end) // N + 1) * N - P
            )
            assert int(trace.completion_mask[i].sum()) == (length if end is None else end + 1)
            ends += end is not None
        assert ends > 24
    assert not torch.is_inference_mode_enabled()
    first.requires_grad_(True).logits(
        torch.tensor([[3, 4, 5]], device="cuda")
    ).float().sum().backward()
    engine.close()
    assert not engine.thread.is_alive()
