"""Compare runs, as an ablation needs it: a table on the screen, curves in compare.png (--out).

    python run/compare.py runs/bgpo-*         runs whose flags differ only in the seed are a group
    python run/compare.py runs/sft-* --metric loss/total
    python run/compare.py rows.jsonl          the training runs of a table (bench/runs.py)

A score is the last one of a run; of what is logged at every step the mean over the last 20 steps
counts. A difference is that to the first group: where both groups have two or more seeds in common,
the mean difference between runs of one seed, with its standard error; otherwise (pairs 0) the
difference of the means, with Welch's standard error. Curves are means over the seeds that have
reached a step and over the 20 steps before it, of scores over the seeds alone; dots: single steps.
"""

import io
import sys
from pathlib import Path

sys.path.insert(0, __file__.rpartition("/run/")[0])
import distributed.start  # noqa: F401

# isort: split
import numpy as np
import pandas as pd

from data.rows import read_lines
from distributed.disk import read_json
from evals.report import is_score, read_rows

# flags that do not change what a run learns
FREE = """seed out resume track save_every keep_saves plan dead_steps micro_batch_size attention
compile activation_checkpointing sync_every_backward sequence_parallel""".split()
UNITS = ["rollouts", "tokens", "seconds"]
TRAINED = "time/update", "speed/tokens_per_s"  # keys of every training step
LINES = 6  # of a panel


def recorded(path):
    """-> [(place, config, metrics)] of a directory of a run, or of a file of rows"""
    if path.suffix != ".jsonl":
        return [(path, read_json(path / "config.json"), pd.DataFrame(read_rows(path), dtype=float))]
    return [
        (row["name"], row["config"], pd.read_csv(io.StringIO(row["curves"])))
        for _, row in read_lines(path)
        if "curves" in row
    ]


def read_runs(paths):
    """paths: of `recorded` -> a frame of the rows of metrics.jsonl and UNITS, with the index
    group, seed, row

    A group is named by its script and the first flags that tell it from others of that script;
    code: checksums of the script's files. Prints all that differ, and which directories are left
    out.
    SystemExit if none is left, or if two runs of a group have the same seed.
    """
    runs, told = [], []
    for place, config, rows in sum(map(recorded, map(Path, paths)), []):
        if {*TRAINED} <= {*rows}:
            runs.append(with_units(rows))
            told.append({"script": config["script"], "code": config.get("code")} | config["args"])
        else:
            print(f"left out, as metrics.jsonl has no whole training step: {place}")
    if not runs:
        raise SystemExit("no run to compare: give directories of runs/")
    # a terminal obeys escape sequences
    told = pd.DataFrame(told, dtype=object).map(lambda value: repr(str(value))[1:-1] or "none")
    differ = told.drop(columns=FREE, errors="ignore").loc[:, lambda flags: flags.nunique() > 1]
    print("the groups differ in", ", ".join(differ))
    names = told["script"]
    for flag, values in differ.items():
        apart = values.groupby(names).transform("nunique") > 1
        names += (f", {flag} " + values).where(apart, "")
    short = names.str.replace("[^ ]*/", "", regex=True)  # without folders
    names = short if short.nunique() == names.nunique() else names
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


def smoothed(runs, metric):
    """-> the rows that have a metric, with its "mean" over the last 20 steps, of a score itself"""
    steps = 1 if is_score(metric) else 20
    means = runs.groupby(["group", "seed"])[metric].transform(lambda x: x.rolling(steps, 1).mean())
    return runs.assign(mean=means).dropna(subset=metric)


def table(runs, metric):
    """-> frame, a row for each group: the last value of a metric and its difference to the first
    group, as texts with standard errors, and what the runs cost. A value of step 0 is no result.
    """
    last = smoothed(runs[runs["step"] > 0], metric).groupby(["group", "seed"]).last()
    values = last["mean"].unstack("group")  # [seed, group]
    values = values.reindex(columns=runs.index.unique("group"))  # a group without values too
    paired = values.sub(values.iloc[:, 0], axis=0)
    mean, error, pairs = values.mean(), values.sem(), paired.count()
    is_paired, welch = pairs > 1, np.hypot(error, error.iloc[0])
    difference = paired.mean().where(is_paired, mean - mean.iloc[0])
    columns = {
        "runs": values.count(),
        metric: with_errors(mean, error),
        "difference": with_errors(difference, paired.sem().where(is_paired, welch)),
        "pairs": pairs.where(is_paired, 0),
    }
    return pd.DataFrame(columns).join(last[UNITS].groupby("group").mean())


def with_errors(values, errors):
    """-> texts; one seed has no error"""
    texts = values.map("{:.4g}".format) + errors.map(" ± {:.2g}".format)
    return texts.str.replace("± nan", "(one seed)").replace("nan (one seed)", "none")


def draw(runs, metric, path):
    """Curves of a metric over UNITS, named at their ends; dots are single steps. The LINES lowest
    share the first panels.
    """
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    # a flag may hold dollars; a name stands where the frame would
    rcParams["text.parse_math"] = rcParams["axes.spines.right"] = False
    means = smoothed(runs, metric).groupby(["group", "step"]).mean()
    ends = means["mean"].groupby("group").last().sort_values()
    columns, gap, height = -(-len(ends) // LINES), 0.06 * np.ptp(means[metric]), 0
    figure = Figure((9 * columns, 10), layout="constrained")
    panels = figure.subplots(len(UNITS), columns, sharey=True, squeeze=False)
    for place, (name, end) in enumerate(ends.items()):
        curve, color = means.loc[name], f"C{place}"
        height = max(height + gap, end) if place % LINES else end
        for axes, unit in zip(panels[:, place // LINES], UNITS, strict=True):
            curve.plot(unit, "mean", ax=axes, color=color, legend=False)
            axes.text(curve[unit].iloc[-1], height, f" {name}", color=color, va="center")
            curve.plot.scatter(unit, metric, s=1, ax=axes, color=color)
    figure.suptitle("lines: means, of other values than scores over 20 steps; dots: single steps")
    figure.savefig(path)


def main(runs: tuple[str, ...], /, metric: str = "", out: str = "compare.png"):
    """Compare runs: a table, and curves over rollouts, tokens and seconds.

    Args:
        runs: directories of runs, or rows.jsonl of bench/runs.py
        metric: key of metrics.jsonl; empty: held-out scores, else the mean reward
        out: file of the curves, in the current directory
    """
    rows = read_runs(runs)
    known = sorted(rows[rows["step"] > 0].dropna(axis=1, how="all"))
    metrics = [metric] if metric else [*filter(is_score, known)] or ["reward/mean"]
    if not {*metrics} <= {*known}:
        raise SystemExit(f"no {metrics[0]}; --metric may be {', '.join(known)}")
    for name in metrics:
        print(table(rows, name).to_string(float_format="{:,.0f}".format, na_rep=""))
        print("scores: last; others: mean of the last 20 steps; ±: standard error over seeds\n")
    draw(rows, metrics[0], out)
    print(f"curves: {Path(out).resolve()}")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
