"""HumanEval+: HumanEval with up to 1,100 inputs per problem (EvalPlus); prompt and reading of completions are humaneval.py's.

    python evals/humaneval_plus.py --model llada-8b --gen-length 512 --block-length 32 --denoising-steps 32
    python evals/humaneval_plus.py --completions FILE.jsonl --data test_humanevalplus_1.parquet

All tests of a problem have 20 seconds together; DARE gives 1 second for each input, up to 18 minutes. Its file lacks
HumanEval/32, and original solutions of HumanEval fail 16 of its 163 rows, because the tests here are stricter.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from evals import humaneval
from evals.programs import pass_or_fail

prompt, extract, answer = humaneval.prompt, humaneval.extract, humaneval.answer  # the same for both
VERSION = humaneval.VERSION
HUB = "evalplus/humanevalplus"
PRESETS = ()
TIMEOUT = 20.0  # seconds of wall time; the slowest reference that passes takes 11.5


def load(split: str, path: str | None = None, limit: int | None = None) -> list[dict]:
    """As humaneval.load, of HUB."""
    return humaneval.load(split, path, limit, HUB)


def score(completion: str, example: dict) -> float:
    """1.0 if the tests pass, else 0.0."""
    return score_batch([completion], [example])[0]


def score_batch(completions: list[str], examples: list[dict]) -> list[float]:
    """`score` of each, on all cores."""
    pairs = zip(completions, examples, strict=True)
    return pass_or_fail(
        [humaneval.job(completion, example, TIMEOUT) for completion, example in pairs]
    )


if __name__ == "__main__":
    from evals.run import main

    main("humaneval_plus")
