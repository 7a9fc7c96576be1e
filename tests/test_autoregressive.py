"""rollout/autoregressive.py with transformers, and rows of data/own_samples.py from its samples."""

import json

import pytest
import torch
from golden_runs import rows_of
from test_evals import one_line, write
from test_runs import cli  # noqa: F401

from data import own_samples, sft
from evals import countdown
from models.tiny import byte_tokenizer
from rollout.autoregressive import AutoregressiveEngine

EOS = 256


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A random Qwen2 whose generation_config.json has what evaluations must not take over"""
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, set_seed

    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 260}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5}
    network = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, eos_token_id=7))
    network.generation_config = GenerationConfig(
        repetition_penalty=9.0, do_sample=True, top_k=2, eos_token_id=[7, 9]
    )
    directory = tmp_path_factory.mktemp("qwen2")
    network.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def test_greedy_rows_of_a_batch_are_those_of_single_prompts(directory):
    """The argmax of each prefix, however much padding the batch has, up to the first end."""
    from transformers import AutoModelForCausalLM

    engine, network = (
        AutoregressiveEngine(directory),
        AutoModelForCausalLM.from_pretrained(directory),
    )
    prompts = [[1, 2, 3, 4, 5, 6], [11], [20, 21, 22], [9, 5]] * 4
    prompts = [[*ids, i] for i, ids in enumerate(prompts, 30)]
    trace = engine.generate(prompts, gen_length=24, temperature=0.0)
    lengths = []
    for i, ids in enumerate(prompts):
        found = []
        while len(found) < 24 and not {*found} & {7, 9, EOS}:
            found.append(int(network(torch.tensor([ids + found])).logits[0, -1].argmax()))
        assert trace.completion(i) == found
        assert bool(trace.truncated[i]) == (len(found) == 24 and found[-1] not in (7, 9, EOS))
        lengths.append(len(found))
    assert len({*lengths}) > 1 and trace.num_forwards.tolist() == lengths


def test_samples_of_an_evaluation_become_rows(directory, tmp_path, cli):  # noqa: F811
    flags = "--model", directory, "--limit", 6, "--repeats", 2, "--gen-length", 40
    flags += "--temperature", 0.8, "--batch-size", 4
    said = [cli(*flags, "--out", tmp_path / name) for name in "ab"]
    a, b = (rows_of(tmp_path / name, "samples") for name in "ab")
    texts = [row["completion"] for row in a]
    assert texts == [row["completion"] for row in b] and len({*texts}) == 12
    assert said[0]["settings"].keys() >= {"gen_length", "top_p"}
    assert "denoising_steps" not in said[0]["settings"]
    for flag, value in (("block-length", 4), ("cache", "dual"), ("rollout-backend", "block")):
        assert f"--{flag}" in one_line(cli, *flags, f"--{flag}", value)

    right = {i: countdown.answer(countdown.load("test", limit=6)[i]) for i in range(3)}
    rows = [row | {"completion": right.get(row["index"], row["completion"])} for row in a]
    rows = [row | {"truncated": row["index"] == 5, "score": row["index"] < 3} for row in rows]
    samples = write(tmp_path / "samples.jsonl", [row | {"step_map": [0]} for row in rows])
    for share, number in ((0.0, 3), (1.0, 6), (9.0, 7)):
        own_samples.main([samples], f"{tmp_path}/own.jsonl", share)
        made = [*sft.training_rows(countdown, f"{tmp_path}/own.jsonl")]
        assert len(made) == number and {row["response"] for row in made} >= {*right.values()}
        assert all(row.keys() == {"prompt", "response"} for row in made)
    assert json.dumps(made[0]["prompt"]) in {json.dumps(row["prompt"]) for row in a}
