"""rollout/lmdeploy.py against a stand-in for what it calls of lmdeploy 0.18, and on a GPU against
lmdeploy itself.

The stand-in keeps what was seen of the real engine: per-request values tiled over the rows of a
block, no stop in the block that the prompt ends in, weights that can only be changed in inference
mode, a thread that stays in that mode, temperatures up to 2.
"""

import json
import sys
import zlib
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from oracles import TINY_SDAR
from test_models import exits_with_one_line
from transformers import PreTrainedTokenizerFast

import rollout.lmdeploy as backend
from models import export_weights, save_model
from models.tiny import byte_tokenizer, random_model
from rollout import make_engine
from rollout.probe import greedy_agreement
from rollout.sampling import keyed_uniform

pytestmark = [pytest.mark.fast]
V, MASK, EOS, PAD, N = 60, 50, [1, 2], 0, 4
CONFIG = TINY_SDAR | {"vocab_size": V, "hidden_size": 64, "intermediate_size": 96}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
CONFIG |= {"head_dim": 64, "mask_token_id": MASK, "eos_token_id": EOS, "pad_token_id": PAD}
STATIC = {"denoising_steps": 2, "remasking": "low_confidence_static"}


def generation_config(temperature=0.8, **values):
    assert 0 <= temperature <= 2
    return SimpleNamespace(temperature=temperature, **values)


@dataclass
class SamplingInputs:
    temperature: torch.Tensor
    bad_words: torch.Tensor
    random_seeds: torch.Tensor


class DLLMSamplingStrategy:
    """a b a b ... where the rows are a a ... b b ..."""

    def make_sampling_inputs(self, seqs):
        params = [seq.sampling_param for seq in seqs]
        tiled = lambda values: torch.tensor(values)[None].repeat(N, 1).flatten()
        return SamplingInputs(
            temperature=tiled([param.temperature for param in params]),
            bad_words=torch.tensor([param.bad_token_ids for param in params for _ in range(N)]),
            random_seeds=tiled([param.random_seed & 0xFFFFFFFF for param in params]),
        )


class Engine:
    """lmdeploy.pytorch.engine.Engine as far as rollout/lmdeploy.py uses it. What it draws follows
    from the weights, the prompt and, above temperature 0, the seed.
    """

    status = "FINISH"

    @classmethod
    def from_pretrained(cls, directory, engine_config):
        assert not engine_config.enable_prefix_caching
        return cls()

    def __init__(self):
        self.sampling_strategy, self.sessions = DLLMSamplingStrategy(), {}
        with torch.inference_mode():
            weights = export_weights(random_model(CONFIG))
            self.weights = {name: value.clone() for name, value in weights}
        self.unmasking = SimpleNamespace()
        processor = SimpleNamespace(dllm_config=self.unmasking)
        agent = SimpleNamespace(
            agent_strategy=SimpleNamespace(unmasking_processor=processor),
            all_context=torch.inference_mode,
            patched_model=SimpleNamespace(get_model=lambda: self),
        )
        self.executor, self.scheduler = SimpleNamespace(model_agent=agent), self

    def load_weights(self, weights):
        for name, value in weights:
            self.weights[name].copy_(value)

    def create_instance(self):
        return self

    def get_session(self, session):
        return SimpleNamespace(sequences={0: self.sessions[session]})

    async def async_stream_infer(self, session, ids, request):
        assert session not in self.sessions
        torch.inference_mode().__enter__()
        weights = zlib.crc32(b"".join(v.numpy().tobytes() for v in self.weights.values()))
        key = (weights, *ids[-3:], *[request.random_seed] * (request.temperature > 0))
        tokens = (keyed_uniform(*key, torch.arange(request.max_new_tokens)) * V).long().tolist()
        tokens = [token + 3 if token in request.bad_token_ids else token for token in tokens]
        for end in range(-len(ids) % N + N, len(tokens), N):
            if set(tokens[end - N : end]) & set(request.stop_token_ids):
                del tokens[end:]
        self.request, self.sessions[session] = (
            request,
            SimpleNamespace(all_ids=np.array(ids + tokens)),
        )
        for status in ("SUCCESS", self.status):
            yield SimpleNamespace(status=SimpleNamespace(name=status))
        del self.sessions[session]


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def engine(monkeypatch, directory):
    """With lmdeploy's modules as far as rollout/lmdeploy.py imports them, and no GPU."""
    messages = {"GenerationConfig": generation_config, "PytorchEngineConfig": SimpleNamespace}
    unmasking = {"UnmaskingStrategy": SimpleNamespace(from_str=str.upper)}
    contents = {"": {}, ".messages": messages, ".pytorch": {}}
    contents |= {".pytorch.engine": {"Engine": Engine}, ".pytorch.config": unmasking}
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, f"lmdeploy{name}", module)
    monkeypatch.setattr(backend, "refuse_unsupported", lambda *facts: None)
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    engine = make_engine(directory, "lmdeploy", "cpu", max_batch_size=8)
    yield engine
    engine.close()
    assert not engine.thread.is_alive()


def rows_of(trace):
    return [tuple(ids) for ids in trace.completion_ids.tolist()]


def test_rows_have_the_values_of_their_sequence_and_a_stream_of_their_own():
    params = [(5, 7, [], [10], 0.5), (6, 2**62, [], [11], 1.5), (7, 5, [], [12], 1.0)]
    names = "num_valid_ids", "random_seed", "stop_token_ids", "bad_token_ids", "temperature"
    sequence = lambda param: SimpleNamespace(sampling_param=SimpleNamespace(**param))
    of = lambda *param: sequence(dict(zip(names, param, strict=True)))
    strategy = DLLMSamplingStrategy()
    backend.repair_sampling(strategy, N)
    inputs = strategy.make_sampling_inputs([of(*param) for param in params])
    assert inputs.temperature.tolist() == [0.5] * N + [1.5] * N + [1.0] * N
    assert inputs.bad_words.flatten().tolist() == [10] * N + [11] * N + [12] * N
    seeds = inputs.random_seeds.tolist()
    assert len(set(seeds)) == 3 * N and seeds[::N] == [7, 2**62, 5]
    alone = strategy.make_sampling_inputs([of(*params[1])]).random_seeds.tolist()
    assert alone == seeds[N : 2 * N]  # whoever else is in the batch


def test_completions_end_with_the_block_of_their_first_eos(engine):
    """The rest of that block comes too; one in the block that the prompt ends in, where lmdeploy
    goes on, ends it as well. Without a stop the canvas is that of rollout/block.py.
    """
    ours = make_engine(random_model(CONFIG))
    ours.model.eos_token_ids, ours.model.pad_token_id = EOS, PAD
    prompts, seen = [list(range(3, 3 + length)) for length in (5, 6, 8)], set()
    settings = {"num_samples": 60, "gen_length": 23, **STATIC}
    long, want = (e.generate(prompts, **settings, stop_at_eos=False) for e in (engine, ours))
    assert len(set(rows_of(long))) == 180 and long.settings == want.settings
    assert torch.equal(long.canvas_length, want.canvas_length)
    cut = engine.generate(prompts, **settings)
    for i, whole in enumerate(rows_of(long)):
        P, length = len(cut.prompt_ids[i]), int(cut.canvas_length[i])
        full = int(long.canvas_length[i])
        ends = [j for j, token in enumerate(whole[:full]) if token in EOS]
        assert length == (((P + ends[0]) // N + 1) * N - P if ends else full)
        assert rows_of(cut)[i][:length] == whole[:length]
        assert (cut.completion_ids[i, length:] == PAD).all()
        scored = ends[0] + 1 if ends else length
        assert cut.completion_mask[i].nonzero().flatten().tolist() == list(range(scored))
        if ends:
            seen.add((ends[0] < -P % N, scored == length))  # in the block of the prompt
    assert len(seen) == 4, seen


DYNAMIC = {"remasking": "low_confidence_dynamic", "denoising_steps": 4}


def test_unmasking_is_set_for_a_rollout_and_what_is_not_the_same_is_refused(engine):
    how = {"temperature": 100.0, "top_k": 3, "top_p": 0.5, "confidence_threshold": 0.7}
    engine.generate([[3]], gen_length=4, **how, **DYNAMIC)
    request = engine.engine.request
    assert (request.temperature, request.top_k, request.top_p) == (100.0, 3, 0.5)
    assert list(vars(engine.engine.unmasking).values()) == ["LOW_CONFIDENCE_DYNAMIC", 4, 0.7]
    for wrong, words in (
        ({"remasking": "random"}, "--remasking random: lmdeploy has low_confidence_static"),
        ({"denoising_steps": 3}, "--denoising-steps 3: .* give a divisor of the block length 4"),
        (DYNAMIC | {"denoising_steps": 2}, "--denoising-steps 2: .* give 4"),
        ({"records": "steps"}, "lmdeploy keeps no records of kind 'steps'"),
    ):
        with exits_with_one_line(words):
            engine.validate(**{"gen_length": 4, **STATIC} | wrong)


@pytest.mark.parametrize(
    "name, mask, package, device, words",
    [
        (None, 49, "0.18.3", "cuda", "not sdar .* mask token 49"),
        ("tiny-sdar", MASK, "0.18.3", "cuda", "heads of 32"),
        ("tiny-llada2", MASK, "0.18.3", "cuda", "not llada2_moe with"),
        (None, MASK, "0.18.3", "cpu", "on cpu: leave it at auto"),
        (None, MASK, "", "cuda", "by version missing"),
    ],
)
def test_what_lmdeploy_cannot_serve_is_refused(
    directory, monkeypatch, name, mask, package, device, words
):
    monkeypatch.setattr(backend, "MASK_TOKEN_ID", MASK)
    for look_up in ("find_spec", "version"):
        monkeypatch.setattr(backend, look_up, lambda name: package)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"mask_token_id": mask}))
    with pytest.raises(SystemExit, match=f"^--rollout-backend lmdeploy serves sdar .*{words}"):
        make_engine(name or directory, "lmdeploy", device)


@pytest.mark.parametrize("size", [1, 2**30])
def test_new_weights_change_the_outputs_and_the_first_ones_bring_them_back(
    engine, monkeypatch, size
):
    """In place, in one lot or many; the learner stays out of inference mode, in which lmdeploy's
    tasks wait.
    """
    monkeypatch.setattr(backend, "TOGETHER", size)
    served = engine.engine.weights
    addresses = {name: value.data_ptr() for name, value in served.items()}
    settings = {"num_samples": 4, "gen_length": 8, "temperature": 0.0, **STATIC}
    greedy = lambda: rows_of(engine.generate([[3, 4, 5], [6, 7, 8, 9, 10]], **settings))
    first, learner = greedy(), random_model(CONFIG, seed=1)
    engine.load_weights(export_weights(learner))
    assert all(torch.equal(served[name], value) for name, value in export_weights(learner))
    assert greedy() != first
    engine.load_weights(export_weights(random_model(CONFIG)))
    assert greedy() == first
    assert addresses == {name: value.data_ptr() for name, value in served.items()}
    learner.logits(torch.tensor([[3, 4, 5]])).sum().backward()


def test_an_engine_that_stops_ends_the_run(engine):
    engine.engine.status = "ENGINE_STOP_ERROR"
    words = "^--rollout-backend lmdeploy: a request ended with ENGINE_STOP"
    with pytest.raises(RuntimeError, match=words):
        engine.generate([[3, 4, 5]], num_samples=3, gen_length=24, **STATIC)


def tokenizer_with_the_mask():
    """The byte tokenizer, with a mask token of the id that lmdeploy takes for it."""
    from tokenizers import AddedToken, Tokenizer

    special = {"<|endoftext|>": 256, "<|mask|>": backend.MASK_TOKEN_ID}
    content = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    content["added_tokens"] = []
    content["model"]["vocab"] |= special
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    names = dict(zip(("eos_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@pytest.mark.cuda
@pytest.mark.lmdeploy
def test_the_real_engine_on_a_gpu(tmp_path):
    """Samples, stops, the rules, weights there and back; and a learner can be trained in the same
    process afterwards.
    """
    sizes = dict(vocab_size=151936, hidden_size=256, intermediate_size=512, head_dim=128)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    official = dict(bos_token_id=1, max_position_embeddings=1024, attention_bias=False)
    official |= dict(sliding_window=None, use_sliding_window=False, torch_dtype="bfloat16")
    config = CONFIG | sizes | heads | official | {"mask_token_id": backend.MASK_TOKEN_ID}
    build = lambda seed: random_model(config, seed=seed, device="cuda", dtype=torch.bfloat16)
    first, other = build(0), build(1)
    first.eos_token_ids, first.pad_token_id = EOS, PAD
    save_model(first, tmp_path / "model", tokenizer_with_the_mask())
    engine = make_engine(tmp_path / "model", "lmdeploy", "cuda", max_batch_size=32)
    prompts = [list(range(3, 3 + length)) for length in (5, 8, 70)]
    settings = {"gen_length": 24, **STATIC}
    draw = lambda **how: rows_of(engine.generate(prompts, stop_at_eos=False, **settings | how))
    a, b, c = (draw(num_samples=16, seed=seed) for seed in (1, 1, 2))
    assert len(set(a)) == 48 and a == b and not set(a) & set(c)
    before = draw(temperature=0.0)
    agreement = lambda model: greedy_agreement(engine, model, prompts[2], **settings)
    assert agreement(first) > 0.8
    engine.load_weights(export_weights(other))
    assert agreement(other) > 0.8 > agreement(first)
    engine.load_weights(export_weights(first))
    assert draw(temperature=0.0) == before

    engine.model.eos_token_ids = list(range(0, 151936, 20))  # one token of twenty
    for rule in "low_confidence_dynamic", "sequential":
        how = {"remasking": rule, "denoising_steps": 4, "confidence_threshold": 1e-4}
        trace, stopped = engine.generate(prompts, num_samples=16, **settings | how), 0
        for i, ids in enumerate(rows_of(trace)):
            P, length = len(trace.prompt_ids[i]), int(trace.canvas_length[i])
            ends = [j for j, token in enumerate(ids[:length]) if token % 20 == 0]
            assert length == ((P + (ends or [23])[0]) // N + 1) * N - P
            stopped += bool(ends)
        assert stopped > 24
    assert not torch.is_inference_mode_enabled()
    ids = torch.tensor([[3, 4, 5]], device="cuda")
    first.requires_grad_(True).logits(ids).float().sum().backward()
    engine.close()
    assert not engine.thread.is_alive()
