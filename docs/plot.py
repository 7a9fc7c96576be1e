"""Redraw the figures of the doc pages from the runs kept in docs/curves/<method>/<name>.jsonl: `python docs/plot.py`.

A curve file holds the rows of a run's metrics.jsonl that have a score or a reward, without the clock. To keep a run:

    python docs/plot.py RUN_DIR bgpo tiny-seed0
"""

import json
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "curves"
KEPT = ("eval/", "test/", "reward/", "completion/", "optim/grad_norm", "policy/", "loss/")


def keep(run_dir, method, name):
    rows = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    rows = [{"step": row["step"]} | {key: value for key, value in row.items() if key.startswith(KEPT)} for row in rows]
    rounded = [{key: round(value, 5) for key, value in row.items()} for row in rows if len(row) > 1]
    (FOLDER / method).mkdir(parents=True, exist_ok=True)
    (FOLDER / method / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rounded))


def smooth(values, window=5):
    return [
        sum(values[max(0, i - window) : i + window + 1]) / len(values[max(0, i - window) : i + window + 1])
        for i in range(len(values))
    ]


def draw(folder):
    """folder: curves/<method> -> curves/<method>.png: training reward, and scores on held-out problems."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    reward, score = figure.subplots(1, 2)
    for number, path in enumerate(sorted(folder.glob("*.jsonl"))):
        rows, color = [json.loads(line) for line in path.read_text().splitlines()], f"C{number}"
        points = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
        if points:
            steps, values = zip(*points, strict=True)
            reward.plot(steps, smooth(values), color=color, label=path.stem)
        for prefix, style in (("eval/", ".-"), ("test/", "*")):
            points = [(row["step"], row[key]) for row in rows for key in row if key.startswith(prefix)]
            if points:
                label = f"{path.stem}, {'validation' if prefix == 'eval/' else 'test'}"
                score.plot(*zip(*points, strict=True), style, color=color, label=label, markersize=10 if style == "*" else 6)
    for axes, title in ((reward, "reward in training (mean over 11 steps)"), (score, "problems solved, held out")):
        axes.set(title=title, xlabel="rollout step", ylim=(0, None))
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(folder.name, fontweight="bold")
    figure.savefig(folder.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    if sys.argv[1:]:
        keep(*sys.argv[1:])
    for folder in sorted(path for path in FOLDER.iterdir() if path.is_dir()):
        draw(folder)
