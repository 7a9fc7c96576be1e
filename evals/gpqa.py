"""GPQA diamond: 198 graduate-level questions, four options. Gated: accept its terms on the hub, and
publish no rows.

    python evals/gpqa.py --model llada-8b  Idavidrein/gpqa
    python evals/gpqa.py --model llada-8b --data gpqa_diamond.csv@gpqa_fewshot_gen.py
    python evals/gpqa.py --completions FILE.jsonl --data gpqa_diamond.csv

Prompt and order of options are those of OpenCompass' gpqa_gen_4baadb (no worked examples; the right
option is D, C, B, A in turn), as in DARE's lmdeploy runs of SDAR (4,096 tokens, 41.40 in its
table). For LLaDA (128 tokens in blocks of 64), Dream and LLaDA2 (128) DARE puts five questions of
the authors in front and shuffles the options: LLaDA-8B-Instruct 31.82 (63 of 198),
Dream-7B-Instruct 26.77, LLaDA2.0-mini 34.34. The authors ask not to publish their questions, so the
five are read from the file that has them, opencompass/configs/datasets/gpqa/gpqa_fewshot_gen.py of
ML-GSAI/LLaDA and yjyddq/DARE. One question is half a point; the standard error is 3.3 points.
"""

if __name__ == "__main__":
    import command  # noqa: F401

import re
from pathlib import Path
from random import Random

from evals.choices import LETTERS, Choices, Form

COLUMNS = [
    "Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"
]  # fmt: skip
ANSWER = "The correct answer is ({gold})"


class Gpqa(Choices):
    HUB, parts, splits = "Idavidrein/gpqa", ("gpqa_diamond",), {"test": "train"}
    needs = ", ".join(COLUMNS)
    forms = {
        "": Form(  # OpenCompass gpqa_gen_4baadb
            "What is the correct answer to this question: {question}\nChoices:\n{options}\n"
            'Format your response as follows: "The correct answer is (insert answer here)"',
            ANSWER,
            option="({}){}",
        ),
        "shown": Form(  # OpenCompass gpqa_fewshot_gen (DARE)
            "{worked}\nQuestion:\n{question}\nChoices:\n{options}\n"
            "When you're ready to answer, please use the format 'The correct answer is (X)' where "
            "X is the correct letter choice from 'ABCD'.",
            ANSWER,
        ),
    }

    def load(self, split, path=None, limit=None):
        """As Choices.load. With @FILE.py behind the path DARE's prompt, in the style "shown", whose
        five worked questions are read from that file."""
        path, file = re.fullmatch(r"(.*?)(?:@(.*\.py))?", path or "").groups()
        examples, shuffle = super().load(split, path, limit), Random(0).shuffle
        for number, example in enumerate(examples, 1):
            options, first = example["options"], number % 4
            right = options[0]
            if file:
                shuffle(options)
                example |= {"style": "shown", "worked": worked(file)}
            else:  # the options rotate: B C D A in row 1, then C D A B
                options[:] = options[first:] + options[:first]
            example["gold"] = LETTERS[options.index(right)]
        return examples

    def read(self, row):
        question, *options = map(row.get, COLUMNS)
        return {"question": question, "options": options, "gold": "A"}


def worked(path):
    """The text `five_shot_prompt` in a configuration of OpenCompass, which is not run. SystemExit
    if there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        return re.search(r'five_shot_prompt = """(.*?)"""', text, re.DOTALL)[1]
    except (OSError, TypeError) as error:
        raise SystemExit(f'--data @{path}: no five_shot_prompt = """...""" there') from error


task = Gpqa()
