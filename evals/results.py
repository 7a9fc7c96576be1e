"""The numbers of an evaluation: result.json of each task, and a table of them all."""

import pandas as pd

from evals import standard_error

NUMBERS = "index repeat score truncated tokens forwards seconds".split()  # of a row
# of the table
COLUMNS = (
    "task n repeats accuracy stderr distinct macro_accuracy answered truncated tokens_per_forward "
    "tokens_per_s failed"
).split()


def table(results, skipped):
    """Results in Markdown, then the tasks that were not evaluated."""
    frame = pd.DataFrame(results.values()).reindex(columns=COLUMNS)
    lines = frame.to_csv(sep="|", index=False, float_format="%.4g").splitlines()
    lines.insert(1, "|".join("-" * len(COLUMNS)))
    lines += [f"\n{name}: not evaluated: {why}" for name, why in skipped.items()]
    return "\n".join(lines)


def summary(evaluation, rows):
    """-> what result.json has of the rows of a task.

    distinct, stderr: see `standard_error`. tokens_per_s: of one rank, without scoring.
    """
    examples, settings = evaluation.examples, evaluation.settings
    numbers = pd.DataFrame(rows, columns=NUMBERS, dtype=float)
    score = lambda groups: numbers.groupby(groups)["score"].mean()
    means, asked = numbers.mean(), [examples[row["index"]] for row in rows]
    result = {"task": evaluation.task.NAME, "n": numbers["index"].nunique()}
    error, distinct = standard_error(evaluation.task, asked, numbers["score"].tolist())
    result |= {"distinct": distinct, "accuracy": means["score"], "stderr": error}
    if settings["repeats"] > 1:
        result |= {"repeats": settings["repeats"], "accuracies": score("repeat").tolist()}
    if "subject" in examples[0]:  # subjects count alike, however many questions they have
        result["macro_accuracy"] = score([example["subject"] for example in asked]).mean()
    result["answered"] = sum(row["answer"] is not None for row in rows) / len(rows)
    known = {
        "truncated": means["truncated"],
        "tokens": means["tokens"],
        "tokens_per_forward": means["tokens"] / means["forwards"],
        "tokens_per_s": means["tokens"] / means["seconds"],
    }
    result |= pd.Series(known).dropna()  # a file tells none of them
    if paid := [row["reward"] for row in rows if "reward" in row]:
        parts = pd.DataFrame(paid).mean()
        parts = {"mean": parts.sum(), "components": parts.to_dict()}
        result["reward"] = {"name": settings["reward"]} | parts
    result["failed"] = sum("failed" in row for row in rows)
    return result | evaluation.counts | {"settings": settings}
