"""Which methods differ, by the rows of bench/runs.py:

    python bench/significance.py rows.jsonl bgpo,bgpo-pos d1,d1-no-kl

of evaluations named TASK.METHOD.START.SEED; the METHOD "start" is the start itself. Holm's
correction is over the pairs given, which are the claims that were written down before the runs;
over all where none is given.
"""

from itertools import combinations

import numpy as np
import pandas as pd

RUN = ["method", "start", "seed"]


def holm(p):
    """p: Series of a table's p values -> corrected for their number, the lowest first"""
    p = p.sort_values()
    return (p * np.arange(len(p), 0, -1)).cummax().clip(upper=1)


def show(title, found, free=10**9):
    """found: frame with points and error; free: degrees of freedom of the errors"""
    drawn = np.random.default_rng(0).standard_t(free, 1_000_000) ** 2
    # 1 where all runs are equal, 0 / 0
    p = 1 - ((found.points / found.error) ** 2).map(lambda ratio: (drawn <= ratio).mean())
    print(title, found.assign(holm=holm(p)).to_string(), sep="\n")


def differences(scores):
    """-> frame [method, other method]: points, that is the difference of the means, and standard
    error; degrees of freedom of the latter

    scores: frame [RUN, problem], each method from the same starts. Drawn are the problems, and
    what a start does to a method beyond what it does to all; of a single start, what a seed does.
    This spread is that of all methods, or the method's own where it is larger: two starts tell
    little of it, so one that varies three times as much has intervals of 86 instead of 95 %.
    """
    unit = "start" if scores.index.unique("start")[1:].size else "seed"
    cells = scores.mean(axis=1).groupby(["method", unit]).mean().unstack()
    number, means, found = cells.count(axis=1), scores.groupby("method").mean(), {}
    free = (number - 1).sum()
    if unit == "start":  # what it does to all is in no difference
        free -= cells.shape[1] - 1
        cells = cells - cells.mean()
    own = cells.var(axis=1) * (number - 1).sum() / free
    spread = own.clip(own.mean()).fillna(own.mean()) / number
    spread["start"] = 0  # no training
    for a, b in combinations(means.index, 2):
        change = means.loc[a] - means.loc[b]
        found[a, b] = change.mean(), (change.var() / change.size + spread[a] + spread[b]) ** 0.5
    return 100 * pd.DataFrame(found, ["points", "error"]).T, free


def rank_correlation(x, y, kinds):
    """-> mean rank correlation over the pairs; share of the orders that reach it, if methods change
    places, in all pairs alike, with those of their kind that have values in the same pairs

    x, y: frames [method, pair], NaN where there is no value; kinds: a label for each method
    """
    x, y = x + 0 * y, y + 0 * x
    a, b = (np.nan_to_num(rank - rank.mean()) for rank in (x.rank(), y.rank()))
    a /= ((a**2).sum(0) * (b**2).sum(0)) ** 0.5 * len(x.T)
    random, missing = np.random.default_rng(0).random, x.isna().T.to_numpy()
    order = lambda: np.lexsort([random(len(x)), kinds, *missing])
    found = (a * b).sum()
    drawn = [(a[order()] * b[order()]).sum() for _ in range(9_999)]
    return found, np.greater([found, *drawn], found - 1e-9).mean()


def main(path: str, claims: tuple[str, ...] = (), /):
    """Differences between the methods of a file of rows: see the head of bench/significance.py.

    Args:
        path: rows.jsonl
        claims: METHOD,OTHER as a table without claims names them
    """
    rows = pd.read_json(path, lines=True)
    rows[["task", *RUN]] = rows["name"].str.split(".", expand=True)
    for task, mine in rows.dropna(subset=RUN).set_index(RUN).groupby("task"):
        found, free = differences(mine["scores"].str[0].str["each"].apply(pd.Series))
        some = [tuple(sorted(claim.split(","))) for claim in claims] or found.index
        show(task, found.loc[some], free) if free > 0 else print(f"{task} has too few runs")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
