"""Differences, standard errors and p values of docs/curves.md: python docs/curves/tables.py"""

import sys
from pathlib import Path

import pandas as pd

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[1]))
from bench.significance import rank_correlation, show

INDEPENDENT = {"countdown": 113, "sudoku": 200}  # problems as noisy as the 512 of the test split
ON_STATES = "cj_grpo", "dtreerpo", "justgrpo", "mdpo", "tpg", "tracerl"
PAIR = ["family", "task"]


def noise(scores):
    return scores * (1 - scores) / scores.index.get_level_values("task").map(INDEPENDENT)


rows = pd.read_json(FOLDER / "comparison/runs.jsonl", lines=True)
rows = rows[rows["seed"] < 1000]  # the others try learning rates
rows["before"], rows["after"] = rows["test"].str[0], rows["test"].str[1].fillna(0)  # stopped: 0
groups = rows.groupby(["variant", *PAIR, "method"])
start, end, spread = groups["before"].mean(), groups["after"].mean(), groups["after"].var()
# three seeds tell little of their spread: it is at least the usual one
usual = spread[""].mean()
variance = noise(end) + spread.clip(usual).fillna(usual) / groups.size()
for variant in end.index.unique("variant"):
    than, its = (end, variance) if variant else (start, noise(start))
    change, error = end[variant] - than[""], (variance[variant] + its[""]) ** 0.5
    show(variant or "gain", 100 * pd.DataFrame({"points": change, "error": error}).dropna())

gain = (end - start)[""].unstack(PAIR)
kinds = gain.index.isin(ON_STATES)
for tasks in ["countdown", "sudoku"], "countdown", "sudoku":  # states of the rollout and the gain
    some = gain.loc[:, (slice(None), tasks)]
    print(tasks, rank_correlation(some * 0 + kinds[:, None], some, 0 * kinds))
rows["mismatch"] = rows["points"].map(lambda at: abs(at["entropy"][0] - at["surprisal"][0]))
mismatch = rows[rows["variant"] == ""].pivot_table("mismatch", "method", PAIR)
rows = pd.read_json(FOLDER / "alignment.jsonl", lines=True)
rows = rows.query("temperature == 1 and exact_at == 1 and error < 0.4")
for values in -mismatch, rows.pivot_table("cosine", "method", PAIR):
    # with the gain: of a low mismatch at the start, then of the cosine
    print(*(rank_correlation(values, gain, of) for of in (0 * kinds, kinds)))
