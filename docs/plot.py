"""Redraw the figures and tables of the docs from the runs kept in docs/curves: `python
docs/plot.py`.

docs/curves/<method>/<name>.jsonl is the metrics.jsonl of a run (here without the timings),
docs/curves/tiny-sdar/<method>.jsonl that of a method's plain command,
docs/curves/comparison/<size>.jsonl holds one run per line, written by bench/curves.py, and
docs/curves/alignment.jsonl a row per method, pair and temperatures, by bench/alignment.py.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

FOLDER = Path(__file__).parent / "curves"
# title: metrics in training (smoothed line), on the validation split (dots), on the test split
PANELS = {
    "pairs ranked right": ("reward/accuracy", "reward/eval_accuracy", "reward/test_accuracy"),
    "reward in training": ("reward/mean", "", ""),
    "loss in training, nats": ("loss/total", "", ""),
    "problems solved, held out": ("", "eval/.*", "test/.*"),
}
# C0, C1, ... of a method in all figures
METHODS = (
    "d1 coupled_grpo spg bgpo cj_grpo mdpo wd1 tpg espo ebpo justgrpo dtreerpo tracerl".split()
)
# temperature of the rollouts, of the exact gradient: mark, filled or not, its place in the line
MARKS = {(1, 1): ("o", "full", -0.2), (1, 0.3): ("s", "none", 0), (0.3, 0.3): ("D", "full", 0.2)}
MEASURED = 0.4  # a larger error, or NaN: noise drowns the cosine
COMPARED = (("countdown", "rollouts"), ("countdown", "seconds"), ("sudoku", "rollouts"))
HEAD = """| model | task | method | rate | test before | after, seed by seed | s a step |
|---|---|---|---|---|---|---|
"""


def finish(figure, name):
    for axes in figure.axes:
        if "loss" not in axes.get_title():
            axes.yaxis.set_major_formatter("{x:.0%}")
        axes.grid(alpha=0.25)
        axes.set(xlim=(0, None), ylim=(0, None), visible=axes.has_data())
    figure.savefig(FOLDER / f"{name}.png", dpi=110)


def draw(folder):
    """curves/<method>.png: what the runs of a method learned, in training and held out."""
    paths = sorted(folder.glob("*.jsonl"))
    runs = {path.stem: pd.read_json(path, lines=True).set_index("step") for path in paths}
    keys = set().union(*runs.values())
    # One panel of training: a preference run also logs a loss, an online run both others.
    training = [title for title, patterns in PANELS.items() if patterns[0] in keys][:1]
    titles = training + ["problems solved, held out"] * any(k.startswith("eval/") for k in keys)
    figure = Figure((4.75 * len(titles), 3.8), layout="constrained")
    for axes, title in zip(figure.subplots(1, len(titles), squeeze=False)[0], titles, strict=True):
        axes.set(title=title, xlabel="step")
        for place, (name, run) in enumerate(runs.items()):
            color = METHODS.index(name) if name in METHODS else place
            axes.plot([], [], f"C{color}", label=name)
            for style, pattern in zip(("-", ".-", "*"), PANELS[title], strict=True):
                for _, values in run.filter(regex=f"^({pattern})$").items():
                    mean = values.dropna().rolling(11 if style == "-" else 1, center=True).mean()
                    axes.plot(mean, style, color=f"C{color}", markersize=8)
        place = "lower center" if len(runs) > 3 else "best"  # a long list would cover stars
        axes.legend(loc=place, frameon=False, fontsize=8)
    figure.suptitle(f"{folder.name}\n(lines: mean over 11 steps; dots: validation; stars: test)")
    finish(figure, folder.name)


def comparison(size):
    """-> {(family, task, method): runs}"""
    grouped = defaultdict(list)
    lines = (FOLDER / f"comparison/{size}.jsonl").read_text().splitlines()
    order = lambda run: (run["family"] != "sdar", run["task"])
    for run in sorted(map(json.loads, lines), key=order):
        grouped[run["family"], run["task"], run["method"]].append(run)
    return grouped


def draw_comparison(size):
    """Validation score against rollouts and seconds: mean and range over seeds; stars: test."""
    grouped, lines = comparison(size), {}
    families = ("sdar", "llada")
    panels = COMPARED if size == "small" else COMPARED[:2]
    figure = Figure((4 * len(panels), 7.3), layout="constrained")
    grid = figure.subplots(2, len(panels), sharey="row")
    for (family, task, method), runs in grouped.items():
        for axes, (shown, unit) in zip(grid[families.index(family)], panels, strict=True):
            if shown != task or not (scale := runs[0][f"{unit}_per_step"]):
                continue
            steps = [step * scale for step, _ in runs[0]["validation"]]
            scores = np.array([[score for _, score in run["validation"]] for run in runs])
            color = f"C{METHODS.index(method)}"
            (lines[method],) = axes.plot(steps, scores.mean(0), ".-", color=color)
            axes.fill_between(steps, scores.min(0), scores.max(0), color=color, alpha=0.12, lw=0)
            test = np.mean([run["test"][1] for run in runs])
            axes.plot(steps[-1], test, "*", color=color, markersize=11)
            axes.set(title=f"{family}: {task}, seeds: {len(runs)}", xlabel=unit, ylabel="solved")
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=6, frameon=False)
    finish(figure, f"comparison-{size}")


def comparison_table(size):
    """-> Markdown: test scores before and after"""
    table = HEAD
    for names, runs in comparison(size).items():
        after = [f"{run['test'][1]:.1%}" for run in sorted(runs, key=lambda run: run["seed"])]
        rate, test, seconds = (runs[0][key] for key in ("rate", "test", "seconds_per_step"))
        seconds = "" if seconds is None else f"{seconds:.2f}"
        cells = *names, f"{rate:g}", f"{test[0]:.1%}", ", ".join(after), seconds
        table += f"| {' | '.join(cells)} |\n"
    return table


def alignment():
    """-> {(task, family): {(method, temperature of the rollouts, of the exact gradient): row}}"""
    grouped = defaultdict(dict)
    for row in map(json.loads, (FOLDER / "alignment.jsonl").read_text().splitlines()):
        key = row["method"], row["temperature"], row["exact_at"]
        grouped[row["task"], row["family"]][key] = row
    return dict(sorted(grouped.items()))


def draw_alignment():
    """Cosine with the exact gradient and its standard error: a line per method."""
    panels, shown = alignment(), {}
    figure = Figure((3.1 * len(panels), 6.6), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (panel, rows) in zip(grid, panels.items(), strict=True):
        for (method, *key), row in rows.items():
            # error 0: the exact gradient with itself
            if 0 < row["error"] < MEASURED:
                place, (mark, fill, shift) = METHODS.index(method), MARKS[tuple(key)]
                style = {"fmt": mark, "fillstyle": fill, "ms": 5, "color": f"C{place}"}
                axes.errorbar(row["cosine"], place + shift, xerr=row["error"], **style)
                shown[tuple(key)] = Line2D([], [], ls="", marker=mark, fillstyle=fill, color="0.3")
        axes.axvline(0, color="0.6", lw=0.8)
        axes.set(title=": ".join(panel), xlabel="cosine", xlim=(-0.4, 1.2))
        axes.set_ylim(len(METHODS) - 0.5, -0.5)
        axes.set_yticks(range(len(METHODS)), METHODS)
        axes.label_outer()
        axes.grid(alpha=0.25)
    labels = [f"rollouts at {here:g}, exact gradient at {there:g}" for here, there in shown]
    figure.legend(
        shown.values(), labels, loc="outside lower center", ncols=len(shown), frameon=False
    )
    figure.savefig(FOLDER / "alignment.png", dpi=110)


def alignment_table(name):
    """name: "cosine" or "noise", temperature of the rollouts, of the exact gradient -> Markdown"""
    panels, (quantity, *at) = alignment(), name.split()
    table = f"| method | {' | '.join(map(': '.join, panels))} |\n|{'---|' * (len(panels) + 1)}\n"
    shown = {"cosine": "{cosine:.2f} ± {error:.2f}", "noise": "{noise:,.0f}"}[quantity]
    text = lambda row: shown.format(**row) if row["error"] < MEASURED else "?"
    for method in METHODS:
        rows = [panel.get((method, *map(float, at))) for panel in panels.values()]
        cells = [text(row) if row else "" for row in rows]
        table += f"| {method} | {' | '.join(cells)} |\n"
    return table


TABLES = {"comparison": comparison_table, "alignment": alignment_table}


def with_tables(text):
    """A page with its generated tables made anew"""
    marks = re.compile(r"(<!-- (\w+) ([^:]+): [^>]*-->\n).*?(<!-- /\2 -->)", re.S)
    return marks.sub(lambda mark: f"{mark[1]}{TABLES[mark[2]](mark[3])}{mark[4]}", text)


if __name__ == "__main__":
    for file in FOLDER.glob("*/*.jsonl"):
        if file.parent.name == "comparison":
            draw_comparison(file.stem)
        else:
            draw(file.parent)
    draw_alignment()
    for name in ("curves", "alignment"):
        page = Path(__file__).with_name(f"{name}.md")
        page.write_text(with_tables(page.read_text()))
