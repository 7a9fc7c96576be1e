"""report.html: a run or an evaluation as one page that any browser opens, without a server or
network. Training and evaluation write it; this writes it anew.

    python evals/report.py RUN        directory of a run, or of a task of an evaluation

It shows the curves, the settings, and completions with the denoising step and the probability of
each token. The page is the template report.html beside this file, with the records in it as JSON.
Its script makes text of them, never HTML.
"""

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.rows import complete_lines, read_json, read_lines

TEMPLATE = Path(__file__).with_suffix(".html")
MAX_BYTES = 1_900_000  # of the page
MAX_ROWS, MAX_SAMPLES = 300, 200  # of metrics.jsonl and samples.jsonl

# title; left axis: keys that match; right axis: key
PANELS = [
    ("Score on problems not trained on", "(eval|test)/.*", ""),
    ("Reward in training", "reward/mean", "reward/std"),
    ("Loss", "loss/total", ""),
    ("Chosen answers preferred", "reward/accuracy", "reward/margin"),
    ("Likelihood of the completions", "policy/elbo", ""),
    ("Change of the policy", "policy/ratio", "policy/clip_frac"),
    ("Mismatch of the scored tokens", "mismatch/(surprisal|entropy)", ""),
    ("Length of the answers", "completion/length", "completion/truncated_frac"),
    ("Gradient", "optim/grad_norm", "optim/lr"),
    ("Speed", "speed/tokens_per_s", ""),
    ("Seconds per step", "time/.*", ""),
]


def is_score(key):
    return key.startswith(("eval/", "test/"))


def read_rows(run_dir):
    """-> rows of metrics.jsonl. SystemExit if a value is no number, or the step is missing."""
    path = run_dir / "metrics.jsonl"
    rows = [row for _, row in read_lines(path)]
    for row in rows:
        if not all(isinstance(row[key], int | float | None) for key in row) or "step" not in row:
            raise SystemExit(f"{path} is damaged: it has {str(row)[:100]}")
    return rows


def write_report(folder):
    """Write folder/report.html, at most MAX_BYTES long. -> the samples that it shows, [dict]

    folder: of a run (config.json, metrics.jsonl, samples.jsonl) or of a task of an evaluation
    (samples.jsonl, result.json). What is missing is left out of the page.
    """
    rows, samples = read_rows(folder), folder / "samples.jsonl"
    every = math.ceil(len(rows) / MAX_ROWS)
    page = {
        "title": folder.resolve().name,
        "panels": PANELS,
        "metrics": [row for i, row in enumerate(rows) if i % every == 0 or any(map(is_score, row))],
        "written": sum(1 for _ in complete_lines(samples)),
    }
    # the tasks of evals/run.py share the config.json of the folder above
    for path in folder.parent / "config.json", folder / "config.json", folder / "result.json":
        if path.is_file():
            page[path.stem] = read_json(path)
    template = TEMPLATE.read_text(encoding="utf-8")
    room = MAX_BYTES - len(template.encode()) - len(embedded(page))
    page["samples"] = chosen(samples, room)
    text = template.replace("DATA", embedded(page).decode())
    (folder / "report.html").write_text(text, encoding="utf-8")
    return page["samples"]


def embedded(data):
    """-> JSON in UTF-8 that ends no <script> element, whatever its texts say"""
    data = json.loads(json.dumps(data), parse_constant=str)  # browsers read no NaN and Infinity
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return text.encode(errors="replace")  # half a surrogate pair has no UTF-8


def chosen(path, room):
    """Evenly spaced rows of samples.jsonl, as many as fit into `room` bytes. -> [dict]

    If only some tell the denoising steps of their tokens, as in an evaluation, those.
    """
    with_steps = lambda line: b'"step_map": ' in line
    fit = with_steps if any(map(with_steps, complete_lines(path))) else None
    lines = lambda: filter(fit, complete_lines(path))
    total = sum(1 for _ in lines())
    count = min(total, MAX_SAMPLES)
    while count > 0:
        places = {i * (total - 1) // max(count - 1, 1) for i in range(count)}
        samples = [shown(line) for i, line in enumerate(lines()) if i in places]
        if (size := len(embedded(samples))) <= room:
            return samples
        count = min(count - 1, count * room // size)
    return []


def shown(line):
    """A row of samples.jsonl without what the page does not need, and shorter numbers."""
    row = json.loads(line)
    row.pop("completion_ids", None)
    return row | {"percent": [round(100 * math.exp(logp)) for logp in row.pop("logps", [])]}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write_report(Path(name))
