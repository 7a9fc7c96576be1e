"""report.py: a page holds what was recorded, whatever it says. compare.py: differences by hand."""

import json
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure

from evals.report import write_report
from run.compare import draw, main, read_runs, table

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x> \u2028\0 שלום 👩‍👧 \udfff"


def test_page(tmp_path):
    """Hostile texts stay texts; samples are evenly spaced; a line that is cut off is left out."""
    row = {"prompt": HOSTILE, "pieces": [*HOSTILE], "step_map": [1] * len(HOSTILE)}
    line = json.dumps(row | {"logps": [-0.1054] * len(HOSTILE), "completion_ids": [0]})
    # of an evaluation only some tell their denoising steps
    lines = f"{line}\n" + '{"prompt": ""}\n' * 4
    (tmp_path / "samples.jsonl").write_text(lines * 100 + line[:50])
    rows = (
        '{"step": 1, "loss/total": null, "time/step": 0.5}\n' * 3000
        + '{"step": 2, "test/x": 1.0}\n{"st'
    )
    (tmp_path / "metrics.jsonl").write_text(rows)
    (tmp_path / "heldout.jsonl").write_text(f"{line}\n{line[:50]}")
    (tmp_path / "config.json").write_text('{"args": {"max_grad_norm": Infinity}}')
    write_report(tmp_path)
    seen, parser = [], HTMLParser()
    parser.handle_starttag = lambda name, _: seen.append(name)
    parser.handle_data = seen.append
    parser.feed((tmp_path / "report.html").read_text())
    assert seen.count("script") == 2 and "img" not in seen
    # as a browser reads it
    page = json.loads(seen[seen.index("script") + 1], parse_constant=pytest.fail)
    assert page["metrics"][-1]["test/x"] == 1 and len(page["metrics"]) < 302
    assert page["samples"] == [row | {"percent": [90] * len(HOSTILE)}] * 100
    assert page["written"] == 500 and page["seconds"] == 1500
    assert page["heldout"] == page["samples"][:1]
    (tmp_path / "result.json").write_text('{"n": 250}')  # two answers each
    write_report(tmp_path)
    assert (tmp_path / "report.html").read_text().count('"prompt":"') == 1 + 2 * 84


def test_differences_and_their_errors(tmp_path, monkeypatch, capsys):
    """Paired over the common seeds, 0 and 1; unpaired against a group with other seeds. A run that
    is cut off before a score hides nothing. Names are short, and panels have six lines.
    """

    def run(name, args, *rows, **more):
        (folder := tmp_path / name).mkdir()
        (folder / "config.json").write_text(json.dumps({"script": "d1", "args": args} | more))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(folder)

    step = {"time/rollout": 2, "time/update": 1, "time/eval": 50, "speed/tokens_per_s": 10}
    steps, caps = (
        [{"step": 1, "test/x": 0} | step, {"step": 2} | step],
        {"a": None, "b": 2, "c": "$\\frac{\x1b[2J$"},
    )
    scores = {"a0": 1, "a1": 2, "a2": 6, "b0": 2, "b1": 5, "c8": 4, "c9": 6}
    names = [
        run(
            name, {"seed": int(name[1]), "cap": caps[name[0]]}, *steps, {"step": 2, "test/x": score}
        )
        for name, score in scores.items()
    ]
    runs = read_runs(names)
    found = table(runs, "test/x").reset_index().values.tolist()
    assert [row[:5] for row in found] == [
        ["d1, cap None", 3, "3 ± 1.5", "0 ± 0", 3],
        ["d1, cap 2", 2, "3.5 ± 1.5", "2 ± 1", 2],
        ["d1, cap $\\\\frac{\\x1b[2J$", 2, "5 ± 1", "2 ± 1.8", 0],
    ]
    assert {tuple(row[-3:]) for row in found} == {(2, 40, 6)}
    capsys.readouterr()
    early = run("early", {"seed": 0}, {"step": 0, "test/x": 1})
    # its only score is that of step 0
    cut = run("a7", {"seed": 7, "cap": None}, {"step": 0, "test/x": 0}, {"step": 1} | step)
    main((*names, early, cut), out=str(tmp_path / "it.png"))
    left_out, *lines, last = capsys.readouterr().out.splitlines()
    assert left_out == f"left out, as metrics.jsonl has no whole training step: {early}"
    assert lines[3].split()[:6] == "d1, cap None 3 3 ±".split()  # 1, 2, 6: without seed 7
    assert last == f"curves: {tmp_path}/it.png" and (tmp_path / "it.png").exists()
    with pytest.raises(SystemExit, match="^two runs of seed 0 in the group 'd1"):
        read_runs([names[0], names[0]])
    edited = [run(f"code{i}", {"seed": i}, *steps, code=[i]) for i in range(2)]
    groups = read_runs(edited).index.unique("group")  # the script was edited between seeds
    assert [*groups] == ["d1, code [0]", "d1, code [1]"]
    noisy = [step | {"step": i, "loss": i} for i in range(1, 26)]
    first, *others = [{"seed": 0, "data": "/a/x.csv", "rate": rate} for rate in range(6)]
    others += first | {"data": "/b/y.csv"}, first | {"seed": 1, "compile": True}
    runs = read_runs([run(f"{i}", args, *noisy) for i, args in enumerate([first, *others])])
    found = table(runs, "loss")["loss"]
    assert {"d1, data x.csv, rate 0", "d1, data x.csv, rate 1", "d1, data y.csv"} <= {*found.index}
    assert [*found[:2]] == ["15.5 ± 0", "15.5 (one seed)"]
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda *saved: figures.extend(saved))
    draw(runs, "loss", "")
    assert [len(axes.texts) for axes in figures[0].axes] == [6, 1] * 3
