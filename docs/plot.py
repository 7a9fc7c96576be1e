"""Redraw the figures and tables of the doc pages from the runs kept in docs/curves: `python docs/plot.py`.

docs/curves/<method>/<name>.jsonl holds the rows of a run's metrics.jsonl that have a score, reward or loss, without the clock.
docs/curves/comparison/<size>.jsonl holds one run a line, written by bench/curves.py. To keep a run of the first kind:

    python docs/plot.py RUN_DIR bgpo tiny-seed0
"""

import json
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

FOLDER = Path(__file__).parent / "curves"
KEPT = ("eval/", "test/", "reward/", "completion/", "optim/grad_norm", "policy/", "loss/")


def keep(run_dir, method, name):
    rows = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    rows = [
        {"step": row["step"]} | {key: value for key, value in row.items() if key.startswith(KEPT)}
        for row in rows
    ]
    rounded = [{key: round(value, 5) for key, value in row.items()} for row in rows if len(row) > 1]
    (FOLDER / method).mkdir(parents=True, exist_ok=True)
    (FOLDER / method / f"{name}.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rounded)
    )


def smooth(values, window=5):
    return [
        sum(values[max(0, i - window) : i + window + 1])
        / len(values[max(0, i - window) : i + window + 1])
        for i in range(len(values))
    ]


def draw(folder):
    """folder: curves/<method> -> curves/<method>.png: training reward, and scores on held-out problems.

    Of preference runs, which have no reward, the share of pairs ranked right: in training, and of held-out pairs. Of
    supervised runs the loss alone.
    """
    from matplotlib.figure import Figure

    runs = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("*.jsonl"))
    }
    if not any(key.startswith("reward/") for rows in runs.values() for row in rows for key in row):
        return draw_losses(folder, runs)
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    reward, score = figure.subplots(1, 2)
    preferences = any("reward/accuracy" in row for rows in runs.values() for row in rows)
    for number, (name, rows) in enumerate(runs.items()):
        color, key = f"C{number}", "reward/accuracy" if preferences else "reward/mean"
        points = [(row["step"], row[key]) for row in rows if key in row]
        if points:
            steps, values = zip(*points, strict=True)
            style = {"alpha": 0.35, "lw": 1} if preferences else {"label": name}
            reward.plot(steps, smooth(values), color=color, **style)
        for prefix, style, split in (("eval", ".-", "validation"), ("test", "*", "test")):
            size = {"color": color, "markersize": 10 if style == "*" else 6}
            points = [
                (row["step"], row[key])
                for row in rows
                for key in row
                if key.startswith(f"{prefix}/")
            ]
            if points:
                label = {} if preferences else {"label": f"{name}, {split}"}
                score.plot(*zip(*points, strict=True), style, **size, **label)
            points = [
                (row["step"], row[f"reward/{prefix}_accuracy"])
                for row in rows
                if f"reward/{prefix}_accuracy" in row
            ]
            if points:
                reward.plot(
                    *zip(*points, strict=True),
                    style,
                    **size,
                    label=name if split == "validation" else None,
                )
    titles = ["reward in training (mean over 11 steps)", "problems solved, held out"]
    if preferences:
        titles[0] = "pairs ranked right (faint: in training)"
    for axes, title in zip((reward, score), titles, strict=True):
        axes.set(
            title=title, xlabel="training step" if preferences else "rollout step", ylim=(0, None)
        )
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    reward.set_ylim(0.4 if preferences else 0, None)
    figure.suptitle(
        f"{folder.name} (dots: validation, stars: test)" if preferences else folder.name,
        fontweight="bold",
    )
    figure.savefig(folder.with_suffix(".png"), dpi=110)


def draw_losses(folder, runs):
    """runs: {name: rows} -> curves/<method>.png: the loss of every step, faint, and its mean over 21 steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, (name, rows) in enumerate(runs.items()):
        steps, losses = zip(
            *((row["step"], row["loss/total"]) for row in rows if "loss/total" in row), strict=True
        )
        axes.plot(steps, losses, color=f"C{number}", alpha=0.3, lw=0.8)
        axes.plot(steps, smooth(losses, 10), color=f"C{number}", label=name)
    axes.set(
        title="loss in training (mean over 21 steps)",
        xlabel="training step",
        ylabel="nats",
        ylim=(0, None),
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    figure.suptitle(folder.name, fontweight="bold")
    figure.savefig(folder.with_suffix(".png"), dpi=110)


# ---------------------------------------------------------------------------------------------------------------------
# the comparison of methods

METHODS = ("d1", "coupled_grpo", "spg", "bgpo", "cj_grpo", "mdpo")
FAMILIES = {"sdar": "SDAR", "llada": "LLaDA"}
PANELS = (("countdown", "rollouts"), ("countdown", "seconds"), ("sudoku", "rollouts"))


def comparison(size):
    """{(family, task, method): runs} of a comparison file, in the order of METHODS."""
    runs = [
        json.loads(line) for line in (FOLDER / f"comparison/{size}.jsonl").read_text().splitlines()
    ]
    grouped = defaultdict(list)
    for run in sorted(runs, key=lambda run: METHODS.index(run["method"])):
        grouped[run["family"], run["task"], run["method"]].append(run)
    return grouped


def draw_comparison(size):
    """Validation score against rollouts and against seconds: mean over seeds, and their range; stars: test score at the end."""
    from matplotlib.figure import Figure

    grouped = comparison(size)
    families = [family for family in FAMILIES if any(key[0] == family for key in grouped)]
    panels = [panel for panel in PANELS if any(key[1] == panel[0] for key in grouped)]
    figure = Figure(figsize=(4 * len(panels), 0.5 + 3.4 * len(families)), layout="constrained")
    axes_of = figure.subplots(len(families), len(panels), squeeze=False, sharey="row")
    for row, family in enumerate(families):
        for axes, (task, against) in zip(axes_of[row], panels, strict=True):
            for method in METHODS:
                runs = grouped.get((family, task, method), [])
                if not runs or against == "seconds" and runs[0]["seconds_per_step"] is None:
                    continue
                unit = (
                    runs[0]["rollouts_per_step"]
                    if against == "rollouts"
                    else runs[0]["seconds_per_step"]
                )
                steps = [step * unit for step, _ in runs[0]["validation"]]
                scores = list(
                    zip(*[[score for _, score in run["validation"]] for run in runs], strict=True)
                )
                color = f"C{METHODS.index(method)}"
                axes.plot(
                    steps, [statistics.mean(at) for at in scores], ".-", color=color, label=method
                )
                axes.fill_between(
                    steps,
                    [min(at) for at in scores],
                    [max(at) for at in scores],
                    color=color,
                    alpha=0.12,
                    lw=0,
                )
                axes.plot(
                    steps[-1:],
                    [statistics.mean(run["test"][1] for run in runs)],
                    "*",
                    color=color,
                    markersize=11,
                )
            seeds = max(
                (len(runs) for key, runs in grouped.items() if key[:2] == (family, task)), default=0
            )
            title = f"{FAMILIES[family]}: {task}, {seeds} seed{'s' if seeds > 1 else ''}"
            axes.set(
                title=title,
                xlabel="rollouts" if against == "rollouts" else "seconds, evaluations left out",
                xlim=(0, None),
            )
            axes.yaxis.set_major_formatter("{x:.0%}")
            axes.yaxis.set_tick_params(labelleft=True)
            axes.grid(alpha=0.25)
            axes.set_visible(axes.has_data())  # not timed, or a task that this family did not do
        axes_of[row][0].set_ylabel("solved, greedy")
    drawn = [
        dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)) for axes in figure.axes
    ]
    lines = {
        method: handles[method] for method in METHODS for handles in drawn if method in handles
    }
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=len(METHODS), frameon=False
    )
    figure.savefig(FOLDER / f"comparison-{size}.png", dpi=110)


def comparison_table(size):
    """Markdown: test scores before and after, seed by seed."""
    lines = [
        "| model | task | method | rate | test before | after, seed by seed | s a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for (family, task, method), runs in sorted(
        comparison(size).items(), key=lambda item: (item[0][0] != "sdar", item[0][1])
    ):
        after = ", ".join(
            f"{run['test'][1]:.1%}" for run in sorted(runs, key=lambda run: run["seed"])
        )
        seconds = (
            "" if runs[0]["seconds_per_step"] is None else f"{runs[0]['seconds_per_step']:.2f}"
        )
        rate, before = f"{runs[0]['rate']:g}", f"{runs[0]['test'][0]:.1%}"
        lines.append(f"| {family} | {task} | {method} | {rate} | {before} | {after} | {seconds} |")
    return "\n".join(lines)


def with_tables(text):
    """docs/curves.md with its generated tables made anew."""
    marks = re.compile(r"(<!-- comparison (\w+): [^>]*-->\n).*?(<!-- /comparison -->)", re.S)
    return marks.sub(lambda mark: f"{mark[1]}{comparison_table(mark[2])}\n{mark[3]}", text)


if __name__ == "__main__":
    if sys.argv[1:]:
        keep(*sys.argv[1:])
    for folder in sorted(
        path for path in FOLDER.iterdir() if path.is_dir() and path.name != "comparison"
    ):
        draw(folder)
    for file in sorted((FOLDER / "comparison").glob("*.jsonl")):
        draw_comparison(file.stem)
    page = Path(__file__).with_name("curves.md")
    page.write_text(with_tables(page.read_text()))
