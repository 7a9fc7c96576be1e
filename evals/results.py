"""The numbers of an evaluation: result.json of each task, and a table of them all."""

import math
from statistics import mode

import pandas as pd

from evals import standard_error

NUMBERS = "index sample score truncated tokens forwards seconds".split()  # of a row


def table(results, skipped):
    """Results in Markdown, then the tasks that were not evaluated."""
    more = ["accuracies", "reward", "settings"]
    frame = pd.DataFrame(results.values()).drop(columns=more, errors="ignore")
    lines = frame.to_csv(sep="|", index=False, float_format="%.5g").splitlines()
    lines.insert(1, "|".join("-" * len(frame.columns)))
    lines += [f"\n{name}: not evaluated: {why}" for name, why in skipped.items()]
    return "\n".join(lines)


def summary(evaluation, rows):
    """-> what result.json has of the rows of a task.

    distinct, stderr: see `standard_error`. majority: the score of the most frequent answer of a
    problem, none at all being one too, character by character; of several the first that was given.
    tokens_per_s: of one rank, without scoring.
    """
    task, examples, settings = evaluation.task, evaluation.examples, evaluation.settings
    numbers = pd.DataFrame(rows, columns=NUMBERS, dtype=float)
    score = lambda groups: numbers.groupby(groups)["score"].mean()
    means, asked = numbers.mean(), [examples[row["index"]] for row in rows]
    n, by_problem = settings["samples"], numbers.groupby("index")["score"]
    error, distinct = standard_error(task, asked, numbers["score"].tolist())
    result = {
        "task": task.NAME,
        "n": len(by_problem),
        "samples": n,
        "accuracy": means["score"],
        "stderr": error,
        "distinct": distinct,
    }
    if n > 1:
        result["accuracies"] = score("sample").tolist()
        ks = sorted({*(2**i for i in range(n.bit_length())), n})
        found = {f"pass@{k}": by_problem.agg(best_of, k).dropna() for k in ks}
        if not hasattr(task, "job"):  # programs that do the same are written differently
            votes = pd.Series([(repr(row["answer"]), row["score"]) for row in rows])
            found["majority"] = votes.groupby(numbers["index"]).agg(lambda votes: mode(votes)[1])
        for name, values in found.items():
            if len(values):  # a file may lack samples
                problems = [examples[int(index)] for index in values.index]
                error, _ = standard_error(task, problems, values.tolist())
                result |= {name: values.mean(), f"{name}_stderr": error}
    if "subject" in examples[0]:  # subjects count alike, however many questions they have
        result["macro_accuracy"] = score([example["subject"] for example in asked]).mean()
    result["answered"] = sum(row["answer"] is not None for row in rows) / len(rows)
    known = means[["truncated", "tokens"]]
    known["tokens_per_forward"] = means.tokens / means.forwards
    known["tokens_per_s"] = means.tokens / means.seconds
    result |= known.dropna()  # a file tells none of them
    if paid := [row["reward"] for row in rows if "reward" in row]:
        parts, name = pd.DataFrame(paid).mean(), settings["reward"]
        result["reward"] = {"name": name, "mean": parts.sum(), "components": parts.to_dict()}
    result["failed"] = sum("failed" in row for row in rows)
    return result | evaluation.counts | {"settings": settings}


def best_of(scores, k):
    """The mean, over all subsets of k scores, of the best one, which is unbiased for the best of k
    samples: 1 - C(n - c, k) / C(n, k) if c of n are right. NaN if there are fewer than k."""
    ways = [math.comb(i, k - 1) * score for i, score in enumerate(sorted(scores))]
    return sum(ways) / (math.comb(len(scores), k) or math.nan)
