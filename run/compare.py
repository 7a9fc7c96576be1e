"""Compare runs, as an ablation needs it: a table on the screen, curves in compare.png (--out).

    python run/compare.py runs/bgpo-*         runs whose flags differ only in the seed are a group
    python run/compare.py runs/sft-* --metric loss/total

Values are the last ones of the runs. A difference is that to the first group: where both groups
have two or more seeds in common, the mean difference between runs of one seed, with its standard
error; otherwise (pairs 0) the difference of the means, with Welch's standard error. Curves are
means over seeds, shaded from the lowest to the highest.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from run.report import is_score, read_json, read_rows

# flags that do not change what a run learns
FREE = "seed out resume track save_every keep_saves".split()
UNITS = ["rollouts", "tokens", "seconds"]
TRAINED = "time/update", "speed/tokens_per_s"  # keys of every training step


def read_runs(folders):
    """folders: directories of runs -> a frame of the rows of metrics.jsonl and UNITS, with the
    index group, seed, row

    A group is called by the flags in which the runs differ, and by a number where the checksums of
    their files do. Prints which directories are left out, and runs that end early.
    SystemExit if none is left, or if two runs of a group have the same seed.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            raise SystemExit(f"{folder}: no such directory")
    found = {folder: pd.DataFrame(read_rows(Path(folder)), dtype=float) for folder in folders}
    if early := [folder for folder in found if not {*TRAINED} <= {*found[folder]}]:
        print(f"left out, as metrics.jsonl has no whole training step: {', '.join(early)}")
    if not (folders := [folder for folder in folders if folder not in early]):
        raise SystemExit("no run to compare")
    configs = [read_config(Path(folder, "config.json")) for folder in folders]
    # before pandas takes None for a flag that a script does not have
    as_text = lambda args: {flag: str(value) for flag, value in args.items()}
    told = pd.DataFrame([{"script": c["script"], **as_text(c["args"])} for c in configs])
    told = told.drop(columns=FREE, errors="ignore")
    versions = {c["script"]: [] for c in configs}  # where a file was edited between two runs
    for c in configs:
        known, code = versions[c["script"]], c.get("code")
        known += [code] * bool(code and code not in known)  # older runs do not say
    number = lambda c: versions[c["script"]].index(c["code"]) + 1 if c.get("code") else 1
    told["version"] = list(map(number, configs))
    told, runs, places = told.loc[:, told.nunique() > 1], {}, {}
    for folder, c, (_, own) in zip(folders, configs, told.iterrows(), strict=True):
        seed = c["args"]["seed"]
        key = ", ".join(f"{flag} {value}" for flag, value in own.items()) or "all", seed
        if key in runs:
            both = f"{places[key]} and {folder}"
            raise SystemExit(
                f"{both}: two runs of seed {seed} in the group {key[0]!r}; leave one out"
            )
        runs[key], places[key] = with_units(found[folder]), folder
    ends = {key: int(rows["step"].max()) for key, rows in runs.items()}
    for key, end in ends.items():
        if end < max(ends.values()):
            print(f"{places[key]} ends at step {end}, others at {max(ends.values())}")
    return pd.concat(runs, names=["group", "seed"])


def read_config(path):
    match read_json(path) if path.is_file() else None:
        case {"script": str(), "args": {"seed": int()}} as config:
            return config
    raise SystemExit(f"{path} is missing or damaged: it must have a script, and args with a seed")


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
    """Curves of a metric over UNITS, at the steps that all runs of a group have."""
    from matplotlib import style
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    with style.context("tableau-colorblind10"):
        figure = Figure((12, 4.2), layout="constrained")
        panels = figure.subplots(1, len(UNITS), sharey=True)
    for name, rows in runs.dropna(subset=metric).groupby("group", sort=False):
        steps = rows.groupby("step")
        common = steps.size() == rows.index.unique("seed").size
        mean, low, high = (frame[common] for frame in (steps.mean(), steps.min(), steps.max()))
        for axes, unit in zip(panels, UNITS, strict=True):
            axes.plot(mean[unit], mean[metric], ".-", label=name)
            axes.fill_between(mean[unit], low[metric], high[metric], alpha=0.15, linewidth=0)
            axes.set(xlabel=unit)
            axes.grid(alpha=0.25)
    panels[0].set(ylabel=metric)
    panels[UNITS.index("tokens")].xaxis.set_major_formatter(EngFormatter(sep=""))  # 1.2M
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=110)


def main(runs: tuple[str, ...], /, metric: str = "", out: str = "compare.png"):
    """Compare runs: a table, and curves over rollouts, tokens and seconds.

    Args:
        runs: directories of runs
        metric: key of metrics.jsonl; empty: held-out scores, else the mean reward
        out: file of the curves
    """
    rows = read_runs(runs)
    known = {*rows[rows["step"] > 0].dropna(axis=1, how="all")}
    metrics = [metric] if metric else sorted(filter(is_score, known)) or ["reward/mean"]
    if not {*metrics} <= known:
        raise SystemExit(f"no {metrics[0]}; --metric may be {', '.join(sorted(known))}")
    for name in metrics:
        print(table(rows, name).to_string(float_format="{:.4g}".format), end="\n\n")
        counts = rows[name].where(rows["step"] > 0).groupby(["group", "seed"], sort=False).count()
        if lost := [f"{group} seed {seed}" for group, seed in counts.index[counts == 0]]:
            print(f"left out, as they have no {name} after step 0: {'; '.join(lost)}")
        if name == metrics[0]:
            whole = counts.index[counts > 0]
    draw(rows[rows.index.droplevel(-1).isin(whole)], metrics[0], out)
    print(f"curves: {Path(out).resolve()}")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
