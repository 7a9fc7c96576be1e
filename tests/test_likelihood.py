"""evals/likelihood.py: bounds against an enumeration of all orders, texts, ranks."""

import json
import math
import sys
from contextlib import redirect_stdout
from itertools import permutations

import pytest
import torch
from golden_runs import rows_of
from oracles import OneBlock, exact_elbo, tiny_model
from test_evals import write
from test_methods import COMPLETION, PROMPT

from evals import likelihood, load_task, run

ORDERS = [*permutations([0.2, 0.4, 0.6, 0.8])]


def keyed(order, word, *rest):
    """One level, which the draws shift, and an order of the tokens of each block."""
    place = rest[-1].double()
    return 0.01 + 0 * place if word == "level" else torch.tensor(order)[rest[-1] % 4] + 0 * place


def spaces():
    """Models, prompts, completions and their exact bounds: one block, several, a single token."""
    for family in "sdar", "llada", "dream":
        space = OneBlock(family)
        wants = zip(space.completions.tolist(), space.by_order().mean(0).tolist(), strict=True)
        yield from ((space.model, space.prompt, *pair) for pair in list(wants)[99::400])
    for P, L in (6, 9), (4, 1), (0, 5):
        where = tiny_model(), PROMPT[:P], COMPLETION[:L]
        yield *where, exact_elbo(*where)


def test_bounds_by_enumeration(monkeypatch):
    """All orders, with 12 levels, which 1 to 4 tokens divide evenly; then many real draws."""
    for model, prompt, completion, want in spaces():
        given = model, len(prompt), prompt + completion
        assert likelihood.elbo(*given, 400, 100, 0) == pytest.approx(want, abs=0.2)
        with monkeypatch.context() as patch:
            patch.setattr(likelihood, "keyed_uniform", keyed)
            bounds = [likelihood.elbo(*given, 12, 5, order) for order in ORDERS]
        assert sum(bounds) / 24 == pytest.approx(want, abs=1e-6)


def test_texts_for_base_models():
    """As lm-eval asks mmlu."""
    one = {"question": "Why?", "options": ["b", "c"], "gold": "B", "subject": "a_b"}
    text, follow = load_task("mmlu").choices(one | {"shots": [one]})
    assert text == (
        "The following are multiple choice questions (with answers) about a b.\n\n"
        "Why?\nA. b\nB. c\nAnswer: B\n\nWhy?\nA. b\nB. c\nAnswer:"
    )
    assert follow == {"A": " A", "B": " B"}


def on_ranks(rank, world_size, flags, out):
    for flag in flags:
        sys.argv = (
            f"evals/run.py --model tiny-dream --mc-num 4 --out {out}/{world_size} {flag}".split()
        )
        with open(out / f"{world_size}-{rank}", "w") as file, redirect_stdout(file):
            run.main()
        run.elbo = lambda *given: -8.0 * given[-1]  # of the text: the number of the chunk


def test_choices_and_texts_on_two_ranks_are_those_of_one(tmp_path, run_ranks):
    """The likeliest choice per character; perplexity of chunks and its error."""
    labels = {"text": ["2", "17 or so"], "label": ["A", "B"]}
    rows = [{"question": f"{i} + 1?", "choices": labels, "answerKey": "A"} for i in range(3)]
    text, rows = tmp_path / "text.txt", write(tmp_path / "rows.jsonl", rows)
    text.write_text("1 + 2 = 3; 4 * 5 = 20")
    for ranks in 1, 2:
        flags = f"--likelihood --tasks arc_c --data {rows}", f"--text {text} --length 8"
        run_ranks(ranks, on_ranks, flags, tmp_path)
        value, found = math.exp(0.5), json.loads((tmp_path / f"{ranks}-0").read_text())
        assert found["n"] == 2 and found["perplexity"] == pytest.approx(value)
        assert found["stderr"] == pytest.approx(value * 0.5 / 2**0.5)
    one, two = (rows_of(tmp_path / f"{ranks}", "samples") for ranks in (1, 2))
    assert one == two and all(row["completion"] == max("AB", key=row["nats"].get) for row in one)
