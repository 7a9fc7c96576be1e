"""Differences, standard errors and p values of docs/curves.md: python docs/curves/tables.py"""

import math
import sys
from pathlib import Path

import pandas as pd

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[1]))
from bench.significance import holm, rank_correlation

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
spread = spread.clip(spread[""].mean()).fillna(spread[""].mean()) / groups.size()
variance = noise(end) + spread
for variant in end.index.unique("variant"):
    than, its = (end, variance) if variant else (start, noise(start))
    change, error = end[variant] - than[""], (variance[variant] + its[""]) ** 0.5
    p = (change.abs() / error / 2**0.5).dropna().map(math.erfc)
    columns = {"points": 100 * change, "error": 100 * error, "holm": holm(p)}
    print(variant or "gain", pd.DataFrame(columns).dropna().round(3).to_string(), sep="\n")

gain = (end - start)[""].unstack(PAIR)
rows = pd.read_json(FOLDER / "alignment.jsonl", lines=True)
rows = rows.query("temperature == 1 and exact_at == 1 and error < 0.4")
cosine, kinds = rows.pivot_table("cosine", "method", PAIR), gain.index.isin(ON_STATES)
for tasks in ["countdown", "sudoku"], "countdown", "sudoku":
    some = gain.loc[:, (slice(None), tasks)]
    print("states", tasks, rank_correlation(some * 0 + kinds[:, None], some, 0 * kinds))
print("cosine", *(rank_correlation(cosine, gain, of) for of in (0 * kinds, kinds)))
