"""report.html: a run or an evaluation as one page that any browser opens, without a server or
network. Training and evaluation write it; this writes it anew.

    python evals/report.py RUN        directory of a run, or of a task of an evaluation

It begins with the scores before and after, and with what is wrong. Then come the settings, the
curves, and completions with the denoising step and the probability of each token. The page is the
template report.html beside this file, with the records in it as JSON. Its script makes text of
them, never HTML.
"""

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, __file__.rpartition("/evals/")[0])
import distributed.start  # noqa: F401

# isort: split
from data.rows import complete_lines, read_lines
from distributed.disk import read_json, writing

TEMPLATE = Path(__file__).with_suffix(".html")
MAX_ROWS, MAX_SAMPLES = 300, 100  # of metrics.jsonl and samples.jsonl, evenly spaced

# title: keys that match. The page opens the first six of PANELS that are there and not flat.
PANELS = {
    "Score on held-out problems": "(eval|test)/.*",
    "Mean reward in training": "reward/mean",
    "Chosen answers preferred": "reward/accuracy",
    "Different completions of a prompt": "completion/distinct_frac",
    "Mismatch of the scored tokens": "mismatch/(surprisal|entropy)",
    "Tokens of a completion": "completion/length",
    "Gradient norm": "optim/grad_norm",
    "Loss": "loss/total",
    "Groups with equal rewards": "reward/zero_std_frac",
    "Completions cut off": "completion/truncated_frac",
    "Likelihood of the completions": "policy/elbo",
    "Change of the policy": "policy/(ratio|clip_frac)",
    "Margin of chosen answers": "reward/margin",
    "Tokens per second": "speed/tokens_per_s",
    "Seconds of a step": "time/.*",
    "Learning rate": "optim/lr",
}


def is_score(key):
    return key.startswith(("eval/", "test/"))


def read_rows(run_dir):
    """-> rows of metrics.jsonl"""
    return [row for _, row in read_lines(run_dir / "metrics.jsonl")]


def write_report(folder):
    """Write folder/report.html.

    folder: of a run (config.json, metrics.jsonl, samples.jsonl, heldout.jsonl) or of a task of an
    evaluation (samples.jsonl, result.json). What is missing is left out of the page.
    """
    rows, path = read_rows(folder), folder / "samples.jsonl"
    every = math.ceil(len(rows) / MAX_ROWS)
    page = {
        "title": folder.resolve().name,
        "panels": PANELS,
        "seconds": sum(row.get("time/step") or 0 for row in rows),
        "heldout": [*map(shown, complete_lines(folder / "heldout.jsonl"))],
        "metrics": [row for i, row in enumerate(rows) if i % every == 0 or any(map(is_score, row))],
    }
    # the tasks of evals/run.py share the config.json of the folder above
    for file in folder.parent / "config.json", folder / "config.json", folder / "result.json":
        if file.is_file():
            page[file.stem] = read_json(file)
    written = sum(1 for _ in complete_lines(path))
    # of an evaluation problems with all of their samples, which follow when all problems have been
    # answered once
    problems = page.get("result", {}).get("n") or written
    every, lines = math.ceil(problems / MAX_SAMPLES), complete_lines(path)
    samples = [shown(line) for i, line in enumerate(lines) if i % problems % every == 0]
    samples.sort(key=lambda row: row.get("index", 0))
    # browsers read no NaN and Infinity; no text may end the <script> element
    page = json.loads(
        json.dumps(page | {"written": written, "samples": samples}), parse_constant=str
    )
    text = json.dumps(page, separators=(",", ":")).replace("<", "\\u003c")
    text = TEMPLATE.read_text(encoding="utf-8").replace("DATA", text)
    (folder / "report.html").write_text(text, encoding="utf-8")


def shown(line):
    """A row of samples.jsonl without what the page does not need, and shorter numbers."""
    row = json.loads(line)
    row.pop("completion_ids", None)
    return row | {"percent": [round(100 * math.exp(logp)) for logp in row.pop("logps", [])]}


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        if not any(folder.glob("*.jsonl")):
            raise SystemExit(f"{folder}: no directory with metrics.jsonl or samples.jsonl")
        with writing(folder):
            write_report(folder)
