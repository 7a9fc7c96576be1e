"""report.py: a page holds what was recorded, whatever it says. compare.py: differences by hand."""

import json
from html.parser import HTMLParser

import pytest

from run import compare
from run.compare import main, read_runs, table
from run.report import MAX_BYTES, write_report

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x> \u2028\0 שלום 👩‍👧 \udfff"


@pytest.mark.parametrize("count, repeats, shown", [(400, 4, 200), (300, 40, 50), (1, 4000, 0)])
def test_page(tmp_path, count, repeats, shown):
    """Hostile texts stay texts; as many completions as fit."""
    text = HOSTILE * repeats
    row = {"prompt": HOSTILE, "completion": text, "pieces": [*text], "step_map": [1] * len(text)}
    line = json.dumps(row | {"logps": [-0.1054] * len(text)})
    # the run was killed while it wrote the last line
    (tmp_path / "samples.jsonl").write_text(f"{line}\n" * count + line[:50])
    rows = '{"step": 1, "loss/total": null}\n' * 3000 + '{"step": 2, "test/x": 1.0}\n{"st'
    (tmp_path / "metrics.jsonl").write_text(rows)
    (tmp_path / "config.json").write_text('{"args": {"max_grad_norm": Infinity}}')
    write_report(tmp_path)
    content, seen, parser = (tmp_path / "report.html").read_bytes(), [], HTMLParser()
    parser.handle_starttag = lambda name, _: seen.append(name)
    parser.handle_data = seen.append
    parser.feed(content.decode())
    assert len(content) <= MAX_BYTES and seen.count("script") == 2 and "img" not in seen
    # as a browser reads it
    page = json.loads(seen[seen.index("script") + 1], parse_constant=pytest.fail)
    assert page["metrics"][-1]["test/x"] == 1 and len(page["samples"]) >= shown
    want = json.loads(json.dumps(row).replace("\\udfff", "?")) | {"percent": [90] * len(text)}
    assert all(sample == want for sample in page["samples"])


ODD = "null", '"x"', "0", "[]", "[[0]]", "[null]", "[NaN]", "[Infinity]", "[0, 0]", '{"0": 0}'


@pytest.mark.parametrize("name", ["pieces", "blocks", "step_map", "logps"])
@pytest.mark.parametrize("odd", ODD)
def test_odd_tokens_of_a_sample_are_refused_with_their_line(tmp_path, name, odd):
    row = {"pieces": ["x"], "blocks": [0], "step_map": [0], "logps": [-0.5]}
    whole = json.dumps(row)
    (tmp_path / "samples.jsonl").write_text(f'{whole}\n{whole[:-1]}, "{name}": {odd}}}\n')
    with pytest.raises(SystemExit, match="samples.jsonl line 2 is damaged: pieces, blocks, step_m"):
        write_report(tmp_path)


def test_differences_and_their_errors(tmp_path, capsys, monkeypatch):
    """Paired over the common seeds, 0 and 1; unpaired against a group with other seeds."""
    step = {"time/rollout": 2, "time/update": 1, "time/eval": 50, "speed/tokens_per_s": 10}
    caps = {"a": None, "b": 2, "c": 3}
    names, scores = [], {"a0": 1, "a1": 2, "a2": 6, "b0": 2, "b1": 5, "c8": 4, "c9": 6}
    for (group, seed), score in scores.items():
        folder = tmp_path / f"{group}{seed}"
        folder.mkdir()
        config = {"script": "d1", "args": {"seed": int(seed), "cap": caps[group]}}
        (folder / "config.json").write_text(json.dumps(config))
        rows = {"step": 1} | step, {"step": 2} | step, {"step": 2, "test/x": score}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        names.append(str(folder))
    runs = read_runs(names)
    found = table(runs, "test/x").reset_index().values.tolist()
    assert [row[0] for row in found] == ["cap None", "cap 2", "cap 3"]
    assert [row[4:7] for row in found[1:]] == [[2, 1, 2], [2, pytest.approx((7 / 3 + 1) ** 0.5), 0]]
    assert {tuple(row[-3:]) for row in found} == {(2, 40, 6)}
    runs.loc[runs.index.get_level_values("group") == "cap None", "test/x"] = None
    # it is still the first group
    assert table(runs, "test/x")["difference"].isna().all()
    (tmp_path / "early").mkdir()
    (tmp_path / "early/metrics.jsonl").write_text('{"step": 0, "test/x": 1}\n')
    folder = tmp_path / "a7"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"script": "d1", "args": {"seed": 7, "cap": None}})
    )
    start, row = {"step": 0, "test/x": 0}, {"step": 1, "reward/mean": None} | step  # interrupted
    (folder / "metrics.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(row)}\n")
    drawn, draw = [], compare.draw
    monkeypatch.setattr(
        compare, "draw", lambda runs, *more: drawn.append(runs) or draw(runs, *more)
    )
    main((*names, f"{tmp_path}/early", str(folder)), out=str(tmp_path / "it.png"))
    assert set(drawn[0].loc["cap None"].index.unique("seed")) == {0, 1, 2}  # 7 would hide the rest
    first, early, *lines, lost, last = capsys.readouterr().out.splitlines()
    assert early == f"{folder} ends at step 1, others at 2"
    assert lines[2].split()[:5] == ["cap", "None", "3", "3", "1.528"]  # 1, 2, 6: without seed 7
    assert first == f"left out, as metrics.jsonl has no whole training step: {tmp_path}/early"
    assert lost == "left out, as they have no test/x after step 0: cap None seed 7"
    assert last == f"curves: {tmp_path}/it.png"
    with pytest.raises(SystemExit, match="^no reward/mean; --metric may be rollouts, seconds, "):
        main((str(folder),), out=str(tmp_path / "it.png"))  # it has no number of this name
    for text in "{", '{"script": "d1", "args": {}}':
        (folder / "config.json").write_text(text)
        with pytest.raises(SystemExit, match=f"^{folder}/config.json is .*damaged: "):
            read_runs([str(folder)])
    with pytest.raises(
        SystemExit, match=f"^{names[0]} and {names[0]}: .*of seed 0 in the group 'all"
    ):
        read_runs([names[0], names[0]])
    for code, name in enumerate(names[:2]):  # the script was edited between seeds
        path = tmp_path / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"code": {"d1.py": code}}))
    assert len(read_runs(names[:2]).index.unique("group")) == 2
    assert len(read_runs(names[1:3]).index.unique("group")) == 1  # an older run does not say
    with pytest.raises(SystemExit, match="^typo: no such directory"):
        read_runs(["typo"])
