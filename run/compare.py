"""Compare runs, as an ablation needs it: a table on the screen, curves in compare.png (--out).

    python run/compare.py runs/bgpo-*         runs whose flags differ only in the seed are a group
    python run/compare.py runs/sft-* --metric loss/total

Values are the last ones of the runs. A difference is that to the first group: where both groups
have two or more seeds in common, the mean difference between runs of one seed, with its standard
error; otherwise (pairs 0) the difference of the means, with Welch's standard error. Curves are
means over the seeds that have reached a step.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.rows import read_json
from evals.report import is_score, read_rows

# flags that do not change what a run learns
FREE = "seed out resume track save_every keep_saves".split()
UNITS = ["rollouts", "tokens", "seconds"]
TRAINED = "time/update", "speed/tokens_per_s"  # keys of every training step


def read_runs(folders):
    """folders: directories of runs -> a frame of the rows of metrics.jsonl and UNITS, with the
    index group, seed, row

    A group is called by the flags in which the runs differ, and by a number where the checksums of
    their files do. Prints which directories are left out.
    SystemExit if none is left, or if two runs of a group have the same seed.
    """
    runs, told = [], []
    for folder in map(Path, folders):
        config = read_json(folder / "config.json")
        rows = pd.DataFrame(read_rows(folder), dtype=float)
        if {*TRAINED} <= {*rows}:
            runs.append(with_units(rows))
            told.append({"script": config["script"], "code": config.get("code")} | config["args"])
        else:
            print(f"left out, as metrics.jsonl has no whole training step: {folder}")
    if not runs:
        raise SystemExit("no run to compare")
    # a terminal obeys escape sequences
    told = pd.DataFrame(told, dtype=object).map(lambda value: repr(str(value))[1:-1])
    told["code"] = told.groupby("script")["code"].transform(lambda code: code.factorize()[0] + 1)
    flags = told.drop(columns=FREE, errors="ignore")
    flags = flags.loc[:, flags.nunique() > 1].to_dict("records")
    names = [", ".join(f"{flag} {own[flag]}" for flag in own) or "all" for own in flags]
    keys = pd.MultiIndex.from_arrays([names, told["seed"]])
    for group, seed in keys[keys.duplicated()]:
        raise SystemExit(f"two runs of seed {seed} in the group {group!r}; leave one out")
    return pd.concat(runs, keys=keys, names=["group", "seed"])


def with_units(rows):
    """Add to the rows of a run what it has taken so far: rollouts (offline: steps), tokens of
    completions (of answers), and seconds without evaluations.
    """
    times = rows.filter(regex="^time/(?!step|eval)")
    making = times.get("time/rollout", times.get("time/update"))
    tokens = (rows["speed/tokens_per_s"] * making).fillna(0).cumsum()
    seconds = times.sum(axis=1).cumsum()
    return rows.assign(rollouts=rows["step"], tokens=tokens, seconds=seconds)


def table(runs, metric):
    """-> frame, a row for each group: the last value of a metric and its difference to the first
    group, with standard errors, and what the runs cost; NaN where there is none. A value of step 0
    is no result.
    """
    trained = runs[runs["step"] > 0].dropna(subset=metric)
    last = trained.groupby(["group", "seed"], sort=False).last()
    values = last[metric].unstack("group", sort=False)  # [seed, group]
    values = values.reindex(columns=runs.index.unique("group"))  # a group without values too
    paired = values.sub(values.iloc[:, 0], axis=0)
    mean, error, pairs = values.mean(), values.sem(), paired.count()
    is_paired, welch = pairs > 1, np.hypot(error, error.iloc[0])
    columns = {
        "runs": values.count(),
        metric: mean,
        "±": error,
        "difference": paired.mean().where(is_paired, mean - mean.iloc[0]),
        "± ": paired.sem().where(is_paired, welch),
        "pairs": pairs.where(is_paired, 0),
    }
    return pd.DataFrame(columns).join(last[UNITS].groupby("group").mean().round())


def draw(runs, metric, path):
    """Curves of a metric over UNITS."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["text.parse_math"] = False  # a flag may hold dollars
    figure = Figure((12, 4.2), layout="constrained")
    panels = figure.subplots(1, len(UNITS), sharey=True)
    for name, rows in runs.dropna(subset=metric).groupby("group", sort=False):
        means = rows.groupby("step").mean()
        for axes, unit in zip(panels, UNITS, strict=True):
            means.plot(unit, metric, ax=axes, style=".-", label=name, ylabel=metric)
    figure.savefig(path)


def main(runs: tuple[str, ...], /, metric: str = "", out: str = "compare.png"):
    """Compare runs: a table, and curves over rollouts, tokens and seconds.

    Args:
        runs: directories of runs
        metric: key of metrics.jsonl; empty: held-out scores, else the mean reward
        out: file of the curves
    """
    rows = read_runs(runs)
    known = sorted(rows[rows["step"] > 0].dropna(axis=1, how="all"))
    metrics = [metric] if metric else [*filter(is_score, known)] or ["reward/mean"]
    if not {*metrics} <= {*known}:
        raise SystemExit(f"no {metrics[0]}; --metric may be {', '.join(known)}")
    for name in metrics:
        print(table(rows, name).to_string(float_format="{:.4g}".format), end="\n\n")
    draw(rows, metrics[0], out)
    print(f"curves: {Path(out).resolve()}")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
