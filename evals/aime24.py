r"""AIME 2024 and 2025: 30 problems each, whose answers are integers from 0 to 999.

    python evals/aime24.py --model sdar-8b --temperature 1.0 --samples 8
    python evals/aime24.py --completions FILE.jsonl --data test_aime2024.parquet

The metric is exact: the final answer, in practice the last box, as an integer; 033 is 33. One
problem is 3.3 points. Published values are means of eight runs: --samples 8, at the published
temperature above 0; at 0 all eight are the same. There is no train split. evals/aime25.py asks the
problems of 2025, with another prompt, as in DARE.
"""

if __name__ == "__main__":
    import command  # noqa: F401

from dataclasses import dataclass
from fractions import Fraction

from evals.examples import read_examples, user
from evals.gsm8k import INSTRUCTION, normalised
from evals.math500 import COLUMNS, extract, problem
from evals.math_grader import number


@dataclass
class Aime:
    HUB: str
    hub_split: str  # the hub's name of the only split
    instruction: str
    extract = staticmethod(extract)

    def load(self, split, path=None, limit=None):
        """The first `limit` examples {"question", "gold": integer as text, "solution": worked, ""
        if unknown}.

        path: empty for the hub's rows, which are "test" only; a .jsonl, .csv or .parquet file,
        which gives the same rows for every split; or a hub id.
        """
        needs = f"{COLUMNS}, with an integer from 0 to 999 as answer"
        return read_examples(self.read, needs, path, split, limit, self.HUB, self.hub_split)

    def read(self, row):
        example = problem(row)
        value = number(example["gold"])  # one gold of AIME 2025 is 336^\circ
        if value not in range(1000):
            raise ValueError(f"answer {example['gold']!r:.40}")
        question = example["question"].removesuffix(self.instruction).strip()
        return example | {"question": question, "gold": str(value)}

    def prompt(self, example):
        """One user message, no examples, as in DARE."""
        return user(f"{example['question']}\n{self.instruction}")

    def score(self, completion, example):
        """Whether the final answer is the gold integer. Never raises."""
        found = normalised(extract(completion, example) or "")
        return found is not None and Fraction(found) == int(example["gold"])


# prompts: OpenCompass aime2024 and aime2025, DARE
task = Aime("HuggingFaceH4/aime_2024", "train", INSTRUCTION)
aime25 = Aime(
    "math-ai/aime25",
    "test",
    r"Remember to put your final answer within \boxed{}.",
)
