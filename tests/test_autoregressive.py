"""rollout/autoregressive.py with transformers, and data/own_samples.py."""

import pytest
import torch
from golden_runs import rows_of
from test_evals import one_line, write
from test_runs import cli  # noqa: F401

from data import own_samples
from evals import gsm8k
from models.tiny import byte_tokenizer
from rollout import make_engine


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A random Qwen2 whose generation_config.json has what evaluations must not take over"""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config, path = Qwen2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=260,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.5,
    ), tmp_path_factory.mktemp("ar")  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    (path / "generation_config.json").write_text(
        '{"repetition_penalty": 9.0, "do_sample": true, "top_k": 2, "eos_token_id": [7, 9]}'
    )
    return path


def test_greedy_rows_of_a_padded_batch_are_the_argmax_of_each_prefix(directory):
    engine, prompts = make_engine(directory), [[*range(i, 2 * i)] for i in range(20, 32)]
    one = {"remasking": "low_confidence_static", "denoising_steps": 1, "temperature": 0.0}
    trace = engine.generate(prompts, gen_length=24, **one)
    for i, ids in enumerate(prompts):
        found = []
        while len(found) < 24 and not {*found} & {7, 9}:
            logits = engine.model(torch.tensor([ids + found])).logits
            found.append(int(logits[0, -1].argmax()))
        assert trace.completion(i) == found
    assert {*trace.truncated.tolist()} == {False, True}


def test_samples_of_an_evaluation_become_rows(directory, tmp_path, cli):  # noqa: F811
    flags = f"--model {directory} --limit 6 --samples 2 --gen-length 40 --temperature 0.8".split()
    for name in "ab":
        cli(*flags, "--out", tmp_path / name)
    rows, again = (rows_of(tmp_path / name, "samples") for name in "ab")
    texts = [row["completion"] for row in rows]
    assert texts == [row["completion"] for row in again] and len({*texts}) == 12
    for flag in "--block-length 4", "--denoising-steps 2", "--rollout-backend block":
        assert flag in one_line(cli, *flags, *flag.split())
    text = "--model", directory, "--text", __file__
    assert "not for autoregressive models" in one_line(lambda: cli(*text, task=""))

    for row in rows:  # three right answers and two wrong ones, each twice; others are cut off
        i = row["index"]
        row |= {"score": i < 3, "completion": f"{i}", "truncated": i == 5}
    rows[0]["score"] = False
    samples, mixed = write(tmp_path / "samples.jsonl", rows), f"{tmp_path}/mixed.jsonl"
    for share, number in ((0.4, 4), (9.0, 5)):
        own_samples.main([samples], f"{tmp_path}/own.jsonl", share, mixed)
        made = [row["response"] for row in rows_of(tmp_path, "own")]
        assert len(made) == number and {*made} >= {*"012"}
    (problem,) = gsm8k.load("train", mixed)
    assert problem["question"] == rows[0]["prompt"][-1]["content"].strip()
    wrong = write(tmp_path / "wrong.jsonl", [row for row in rows if row["index"] > 2])
    with pytest.raises(SystemExit, match="is right and whole"):
        own_samples.main([wrong], f"{tmp_path}/own.jsonl")
