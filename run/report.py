"""report.html: a run or an evaluation as one page that any browser opens, without a server or
network. Training and evaluation write it; this writes it anew.

    python run/report.py RUN          directory of a run, or of a task of an evaluation

It shows the curves, the settings, and completions with the denoising step and the probability of
each token. The page is the template report.html beside this file, with the records in it as JSON.
Its script makes text of them, never HTML.
"""

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.rows import json_object

TEMPLATE = Path(__file__).with_suffix(".html")
MAX_BYTES = 1_900_000  # of the page
MAX_ROWS, MAX_SAMPLES = 300, 200  # of metrics.jsonl and samples.jsonl
# what a sample tells of each of its tokens
OF_TOKENS = {"pieces": str, "blocks": int, "step_map": int, "logps": int | float}

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


def read_json(path):
    """The object that a JSON file holds. SystemExit if it is damaged."""
    return _object(path.read_bytes(), path)


def complete_lines(path):
    """The lines of a .jsonl as bytes, one after the other, none without the file. A last line
    without its end is dropped: it is being written, or its process was killed in the middle, even
    of a character."""
    if path.exists():
        with open(path, "rb") as file:
            yield from (line[:-1] for line in file if line.endswith(b"\n"))


def read_lines(path):
    """Yield (line, its object) of the complete lines of a .jsonl. SystemExit names one that is
    damaged."""
    for number, line in enumerate(complete_lines(path), 1):
        yield line, _object(line + b"\n", f"{path} line {number}")


def _object(raw, where):
    try:
        return json_object(raw)
    except ValueError as error:
        raise SystemExit(f"{where} is damaged: {error}") from error


def each_row(run_dir):
    """Yield the rows of metrics.jsonl, one after the other: a long run has many. SystemExit if a
    value is no number, or the step is missing."""
    path = run_dir / "metrics.jsonl"
    for _, row in read_lines(path):
        is_number = lambda v: isinstance(v, int | float) and abs(v) < 1e300
        wrong = {key: v for key, v in row.items() if v is not None and not is_number(v)}
        if wrong or row.get("step") is None:
            raise SystemExit(f"{path} is damaged: it has {str(wrong or row)[:100]}")
        yield row


def read_rows(run_dir):
    return [*each_row(run_dir)]


def write_report(folder):
    """Write folder/report.html, at most MAX_BYTES long. -> the samples that it shows, [dict]

    folder: of a run (config.json, metrics.jsonl, samples.jsonl) or of a task of an evaluation
    (samples.jsonl, result.json). What is missing is left out of the page.
    """
    every = math.ceil(sum(1 for _ in each_row(folder)) / MAX_ROWS)
    rows = enumerate(each_row(folder))
    kept = [row for i, row in rows if i % every == 0 or any(map(is_score, row))]
    page = {
        "title": folder.resolve().name,
        "panels": PANELS,
        "metrics": kept,
        "written": sum(1 for _ in complete_lines(folder / "samples.jsonl")),
    }
    # the tasks of evals/run.py share the config.json of the folder above
    for path in folder.parent / "config.json", folder / "config.json", folder / "result.json":
        if path.is_file():
            page[path.stem] = read_json(path)
    template = TEMPLATE.read_text(encoding="utf-8")
    room = MAX_BYTES - len(template.encode()) - len(embedded(page))
    page["samples"] = chosen(folder / "samples.jsonl", room)
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

    If only some tell the denoising steps of their tokens, as in an evaluation, those. SystemExit
    names a row that is damaged.
    """
    every = lambda: enumerate(complete_lines(path), 1)
    with_steps = lambda: (pair for pair in every() if b'"step_map": ' in pair[1])
    lines = with_steps if any(with_steps()) else every
    sizes = [len(line) for _, line in lines()]
    # the page has about half of a line
    count = min(len(sizes), MAX_SAMPLES, 3 * room * len(sizes) // (sum(sizes) + 1))
    while count > 0:
        places = {i * (len(sizes) - 1) // max(count - 1, 1) for i in range(count)}
        picked = (pair for i, pair in enumerate(lines()) if i in places)
        samples = [shown(line + b"\n", f"{path} line {number}") for number, line in picked]
        size = len(embedded(samples))
        if size <= room:
            return samples
        count = min(count - 1, count * room // size)
    return []


def shown(line, where):
    """A row of samples.jsonl without what the page does not need, and shorter numbers."""
    row = _object(line, where)
    row.pop("completion_ids", None)
    told = {name: row[name] for name in OF_TOKENS if name in row}
    are_lists = all(
        isinstance(parts, list) and all(isinstance(part, OF_TOKENS[name]) for part in parts)
        for name, parts in told.items()
    )
    try:
        if not are_lists or len({*map(len, told.values())}) > 1:
            raise ValueError
        row["percent"] = [round(100 * math.exp(logp)) for logp in row.pop("logps", [])]
    except (ValueError, OverflowError):  # a logp is NaN or far above 0
        wrong = f"{', '.join(told)} must be lists with a value for each token"
        raise SystemExit(f"{where} is damaged: {wrong}") from None
    return row


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write_report(Path(name))
