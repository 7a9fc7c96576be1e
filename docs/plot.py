"""Redraw the figures and tables of the docs from the runs kept in docs/curves: `python
docs/plot.py`.

docs/curves/<method>/<name>.jsonl is the metrics.jsonl of a run (here without the timings),
docs/curves/tiny-sdar/<method>.jsonl that of a method's plain command,
docs/curves/comparison/<name>.jsonl holds one run per line, written by bench/curves.py, and
docs/curves/alignment*.jsonl a row per method, pair and temperatures, by bench/alignment.py.
"""

import json
import math
import re
import sys
from collections import defaultdict
from itertools import product, zip_longest
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))
from bench.curves import METHODS, RATE_SEED, VARIANTS, is_level, last_score

FOLDER = DOCS / "curves"
PAGES = DOCS / "curves.md", DOCS / "alignment.md", *sorted(DOCS.glob("algos/*.md"))
# title: metrics in training (smoothed line), on the validation split (dots), on the test split
PANELS = {
    "pairs ranked right": ("reward/accuracy", "reward/eval_accuracy", "reward/test_accuracy"),
    "reward in training": ("reward/mean", "", ""),
    "loss in training, nats": ("loss/total", "", ""),
    "problems solved, held out": ("", "eval/.*", "test/.*"),
}
# of a method in all figures; told apart by the colour-blind too. Dashed: random masks
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#000000", "#56B4E9")
RANDOM_MASKS = "d1", "coupled_grpo", "spg", "bgpo", "wd1", "espo", "ebpo"
STYLES = dict(zip(RANDOM_MASKS, product(["--"], COLOURS), strict=True))
ON_STATES = [method for method in METHODS if method not in STYLES]
STYLES |= dict(zip(ON_STATES, product(["-"], COLOURS), strict=False))
# temperature of the rollouts, of the exact gradient: mark, filled or not, its place in the line
MARKS = {(1, 1): ("o", "full", -0.2), (1, 0.3): ("s", "none", 0), (0.3, 0.3): ("D", "full", 0.2)}
PROBLEMS = {"countdown": 113, "sudoku": 512, "sums": 512}  # that differ, in the test split
MEASURED = 0.4  # a larger error, or NaN: noise drowns the cosine
# figure: y axis, value of the points, x axis
COMPARED = {
    "": (("solved, greedy", "greedy", "rollouts"), ("mismatch, nats", "mismatch", "rollouts")),
    "-more": (
        ("solved, greedy", "greedy", "million tokens"),
        ("solved, greedy", "greedy", "minutes"),
        ("reward, sampled", "reward", "rollouts"),
        ("distinct completions", "distinct", "rollouts"),
    ),
}
BEST = """| model | task | rate | rollouts | test before | after, seed by seed |
|---|---|---|---|---|---|
"""
LEARNING = """| gain and | pair | methods | rank correlation |
|---|---|---|---|
"""


def finish(figure, name):
    for axes in figure.axes:
        axes.set(xlim=(0, None), visible=axes.has_data())
        if "nats" not in axes.get_title() + axes.get_ylabel():
            axes.yaxis.set_major_formatter("{x:.0%}")
            axes.set_ylim(0)
        axes.grid(alpha=0.25)
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
            ls, color = STYLES[name] if name in STYLES else ("-", COLOURS[place % len(COLOURS)])
            axes.plot([], [], ls=ls, color=color, label=name)
            for marker, pattern in zip(("", ".", "*"), PANELS[title], strict=True):
                style = {"marker": marker, "ls": "" if marker == "*" else ls, "color": color}
                for _, values in run.filter(regex=f"^({pattern})$").items():
                    mean = values.dropna().rolling(1 if marker else 11, center=True).mean()
                    axes.plot(mean, ms=8, **style)
        place = "lower center" if len(runs) > 3 else "best"  # a long list would cover stars
        axes.legend(loc=place, frameon=False, fontsize=8)
    figure.suptitle(f"{folder.name}\n(lines: mean over 11 steps; dots: validation; stars: test)")
    finish(figure, folder.name)


def comparison(name):
    """-> {(family, task, method, variant): runs, one per seed}, {(family, task): {start: score}}"""
    lines = (FOLDER / f"comparison/{name}.jsonl").read_text().splitlines()
    rows, grouped, starts = list(map(json.loads, lines)), defaultdict(list), defaultdict(dict)
    order = "task", "variant", "seed"
    for row in sorted(rows, key=lambda row: (row["family"] != "sdar", *map(row.get, order))):
        pair = row["family"], row["task"]
        if row["method"] == "start":
            starts[pair][row["start"]] = row["greedy"]
        elif row["seed"] != RATE_SEED:
            grouped[*pair, row["method"], row["variant"]].append(row)
    return grouped, starts


def evaluations(run, start):
    """-> table of a run's points by rollout, from the start's score on"""
    points = pd.DataFrame(run["points"])
    points = pd.concat([pd.DataFrame({"rollout": [0], "greedy": start}), points])
    points["rollouts"] = points["rollout"]
    points["minutes"] = points["rollout"] * run["seconds"] / 60
    points["million tokens"] = points["tokens"].fillna(0) / 1e6
    points["mismatch"] = points["surprisal"] - points["entropy"]
    return points.set_index("rollout")


def draw_comparison(figure_name, *names, variant=""):
    """A column per pair of the comparisons. Mean over the seeds, shaded from the lowest to the
    highest; stars: test. A run that ends before others keeps its last value.
    """
    lines, drawn, grouped, starts = {}, defaultdict(list), {}, {}
    for name in names:
        runs, scores = comparison(name)
        grouped, starts = grouped | runs, starts | scores
    for (*pair, method, changed), runs in grouped.items():
        if changed == variant:
            # JustGRPO's sampler, a token a step, starts elsewhere
            mine = {} if method == "justgrpo" else starts[tuple(pair)]
            tables = [evaluations(run, mine.get(run["start"], math.nan)) for run in runs]
            for panel in COMPARED[figure_name]:
                drawn[panel].append((tuple(pair), method, tables, runs))
    figure = Figure((4 * len(starts), 0.8 + 2.8 * len(drawn)), layout="constrained")
    grid = figure.subplots(len(drawn), len(starts), sharey="row", squeeze=False)
    for row, ((label, key, unit), curves) in zip(grid, drawn.items(), strict=True):
        for pair, method, tables, runs in curves:
            axes, (ls, color) = row[list(starts).index(pair)], STYLES[method]
            values = pd.concat([table[key] for table in tables], axis=1).ffill().dropna()
            # of the seeds that go on, so that x never falls
            steps = pd.concat([table[unit].fillna(0).diff() for table in tables], axis=1)
            x = steps.mean(axis=1).fillna(0).cumsum()[values.index]
            (lines[method],) = axes.plot(x, values.mean(axis=1), ls=ls, color=color)
            low, high = values.min(axis=1), values.max(axis=1)
            axes.fill_between(x, low, high, color=color, alpha=0.12, lw=0)
            if key == "greedy":
                test = np.mean([score for run in runs for score in run["test"][1:]])
                fill = "full" if ls == "-" else "none"
                axes.plot(x.iloc[-1], test, "*", color=color, ms=11, fillstyle=fill)
            if key == "mismatch":
                axes.set_yscale("symlog", linthresh=0.1)
                axes.yaxis.set_major_formatter("{x:g}")
            axes.set(title=": ".join(pair), xlabel=unit, ylabel=label)
            axes.yaxis.label.set_visible(axes is row[0])
    kinds = zip_longest(RANDOM_MASKS, ON_STATES)  # the legend is filled column by column
    methods = [method for column in kinds for method in column if method in lines]
    shown = [lines[method] for method in methods]
    figure.legend(shown, methods, loc="outside lower center", ncols=7, frameon=False)
    name = "-".join((*names, variant)).removesuffix("-")
    finish(figure, f"comparison-{name}{figure_name}")


def rate_runs(name):
    """-> {(family, task, method): {rate: run}} of the runs that tried a rate and did not diverge"""
    grouped = defaultdict(dict)
    lines = (FOLDER / f"comparison/{name}.jsonl").read_text().splitlines()
    for row in sorted(map(json.loads, lines), key=lambda row: row["family"] != "sdar"):
        is_plain = row["seed"] == RATE_SEED and not row["variant"]
        if is_plain and row.get("points") and not row["diverged"]:
            grouped[row["family"], row["task"], row["method"]][row["rate"]] = row
    return grouped


def rates_table(name):
    """-> Markdown: validation score by learning rate"""
    grouped = rate_runs(name)
    rates = sorted({rate for runs in grouped.values() for rate in runs})
    heads = "model", "task", "start", "method", *(f"{rate:g}" for rate in rates)
    table = f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n"
    for (pair, starts), method in product(comparison(name)[1].items(), METHODS):
        if runs := grouped.get((*pair, method)):
            scores = [last_score(runs[rate]) if rate in runs else None for rate in rates]
            cells = ["" if x is None else f"{x:.1%}" for x in scores]
            # of the starts of its runs; JustGRPO, a token a step, starts elsewhere
            used = {run["start"] for run in runs.values()} if method != "justgrpo" else ()
            before = ", ".join(f"{score:.1%}" for key, score in starts.items() if key in used)
            table += f"| {' | '.join([*pair, before, method, *cells])} |\n"
    return table


def best_table(method):
    """-> Markdown: test scores of a method at the best of the rates tried, as it is, without its KL
    and without negative advantages
    """
    table = BEST
    for (family, task, name, variant), runs in comparison("runs")[0].items():
        if name == method and variant in ("", "no-kl", "no-negatives"):
            rollouts = ", ".join(str(run["rollouts"]) for run in runs)
            before = f"{runs[0]['test'][0]:.1%}"
            task += f", {variant}" if variant else ""
            cells = family, task, f"{runs[0]['rate']:g}", rollouts, before
            table += f"| {' | '.join(cells)} | {scores_after(runs)} |\n"
    return table


def scores_after(runs):
    """-> text: test scores at the end, "+": still rising; none of a run that diverged or in which
    no completion had an advantage at last
    """
    score = lambda run: f"{run['test'][1]:.1%}{'+' * is_rising(run)}"
    return ", ".join(score(run) if run["test"][1:] else "stopped" for run in runs)


def is_rising(run):
    """Whether a long run ended before its plateau (bench/curves.py)"""
    return run["rollouts"] >= 200 and not is_level(run["points"]["greedy"])


def variants_table(names):
    """names: "<comparison> <method>" -> Markdown: what every variant of a method ends with, on the
    pairs that have some; reward, distinct completions and mismatch are those of the samples, means
    over the seeds
    """
    name, method = names.split()
    heads = "pair", "variant", "before", "after, seed by seed", "mean", "reward", "distinct"
    table = f"| {' | '.join(heads)} | mismatch |\n|{'---|' * (len(heads) + 1)}\n"
    grouped, starts = comparison(name)
    for pair, variant in product(starts, ("", *VARIANTS[method])):
        runs = grouped.get((*pair, method, variant))
        if runs and any((*pair, method, changed) in grouped for changed in VARIANTS[method]):
            before, after = tests(runs)
            last = pd.DataFrame([run["points"] for run in runs]).map(lambda values: values[-1])
            cells = [": ".join(pair), variant or "unchanged", f"{before:.1%}", scores_after(runs)]
            cells += [f"{after:.1%}", f"{last['reward'].mean():.2f}"]
            cells += [f"{last['distinct'].mean():.2f}", shown_mismatch(runs)]
            table += f"| {' | '.join(cells)} |\n"
    return table


def alignment(changed=""):
    """-> {(task, family): {(method, temperature of the rollouts, of the exact gradient): row}}

    changed: end of the file's name
    """
    grouped = defaultdict(dict)
    for row in map(json.loads, (FOLDER / f"alignment{changed}.jsonl").read_text().splitlines()):
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
                style = {"fmt": mark, "fillstyle": fill, "ms": 5, "color": STYLES[method][1]}
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
    """name: "cosine" or "noise", temperature of the rollouts, of the exact gradient, then possibly
    what was changed -> Markdown, in this case "as the methods are -> changed"
    """
    quantity, here, there, *changed = name.split()
    files = [alignment(), *(alignment(f"-{change}") for change in changed)]
    table = (
        f"| method | {' | '.join(map(': '.join, files[0]))} |\n|{'---|' * (len(files[0]) + 1)}\n"
    )
    shown = {"cosine": "{cosine:.2f} ± {error:.2f}", "noise": "{noise:,.0f}"}[quantity]
    text = lambda row: shown.format(**row) if row["error"] < MEASURED else "?"
    for method in METHODS:
        key = method, float(here), float(there)
        rows = [[file[pair].get(key) for file in files] for pair in files[0]]
        cells = [" -> ".join(map(text, row)) if all(row) else "" for row in rows]
        table += f"| {method} | {' | '.join(cells)} |\n"
    return table


def ends(runs):
    """-> test score of every run at the end; 0 of one that was stopped with hardly a reward"""
    return [run["test"][1] if run["test"][1:] else 0.0 for run in runs]


def tests(runs):
    """-> test scores of the start and the end, means over the seeds"""
    return np.array([np.mean([run["test"][0] for run in runs]), np.mean(ends(runs))])


def mismatch(runs):
    """-> nats, of the rollouts before the first evaluation and before the last, means over seeds"""
    tables = (evaluations(run, math.nan)["mismatch"].dropna() for run in runs)
    return np.mean([table.iloc[[0, -1]] for table in tables if len(table)], axis=0)


def by_method(name, cell):
    """cell((family, task, method), runs) -> text; Markdown: a line per method, a column per pair"""
    grouped, starts = comparison(name)
    table = f"| method | {' | '.join(map(': '.join, starts))} |\n|{'---|' * (len(starts) + 1)}\n"
    for method in METHODS:
        keys = [(*pair, method) for pair in starts]
        cells = [cell(key, runs) if (runs := grouped.get((*key, ""))) else "" for key in keys]
        table += f"| {method} | {' | '.join(cells)} |\n" if any(cells) else ""
    return table


def is_clear(scores, task, *groups):
    """Whether two scores differ by two standard errors, as if they were of other problems, with the
    spread of the seeds

    groups: scores of the seeds whose mean is one of the two
    """
    spreads = [np.var(group, ddof=1) for group in groups if group[1:]]
    seeds = np.mean(spreads or 0) * sum(1 / len(group) for group in groups)
    variance = (scores * (1 - scores)).sum() / PROBLEMS[task] + seeds
    return abs(np.diff(scores)[0]) > 2 * math.sqrt(variance)


def gains_table(name):
    """-> Markdown: test score of the start and of each seed's end, bold where it rose by two
    errors
    """

    def cell(key, runs):
        scores = tests(runs)
        text = f"{scores[0]:.1%} -> {scores_after(runs)}"
        is_higher = scores[1] > scores[0] and is_clear(scores, key[1], ends(runs))
        return f"**{text}**" if is_higher else text

    return by_method(name, cell)


def variant_table(names):
    """names: "<comparison> <variant>" -> Markdown: test score at the end, mean over the seeds ->
    that of each seed of the variant; bold where the means differ by two errors
    """
    name, variant = names.split()
    grouped = comparison(name)[0]

    def cell(key, runs):
        if not (changed := grouped.get((*key, variant))):
            return ""
        scores = np.array([np.mean(ends(runs)), np.mean(ends(changed))])
        text = f"{scores[0]:.1%} -> {scores_after(changed)}"
        return f"**{text}**" if is_clear(scores, key[1], ends(runs), ends(changed)) else text

    return by_method(name, cell)


def shown_mismatch(runs):
    return "{:.2f} -> {:.2f}".format(*mismatch(runs).round(2) + 0.0)  # no -0.00


def mismatch_table(name):
    return by_method(name, lambda key, runs: shown_mismatch(runs))


def learning_table(name):
    """-> Markdown: rank correlation of the gain with the cosine at temperature 1, and with a
    mismatch near 0 at the start, over the methods of a pair whose cosine was measured; how often
    random orders have as high a mean
    """
    found, panels = defaultdict(lambda: defaultdict(list)), alignment()
    for (*pair, method, variant), runs in comparison(name)[0].items():
        row, gain = panels[pair[1], pair[0]][method, 1, 1], np.diff(tests(runs))[0]
        if not variant and row["error"] < MEASURED:
            found["high cosine"][tuple(pair)].append((row["cosine"], gain))
            near = -abs(mismatch(runs)[0])
            found["mismatch near 0"][tuple(pair)].append((near, gain))
    table = LEARNING
    for measure, pairs in found.items():
        ranks = [pd.DataFrame(rows).rank().to_numpy().T for rows in pairs.values()]
        for pair, (x, y) in zip(pairs, ranks, strict=True):
            correlation = np.corrcoef(x, y)[0, 1]
            table += f"| {measure} | {': '.join(pair)} | {len(x)} | {correlation:.2f} |\n"
        chance = np.random.default_rng(0)
        seen, *others = (
            np.mean([np.corrcoef(order(x), y)[0, 1] for x, y in ranks])
            for order in [lambda x: x] + [chance.permutation] * 10_000
        )
        higher = sum(other >= seen for other in others)
        at_random = f"mean; {higher} of 10,000 random orders reach it"
        table += f"| {measure} | {at_random} | | {seen:.2f} |\n"
    return table


TABLES = {
    "rates": rates_table,
    "gains": gains_table,
    "variant": variant_table,
    "mismatch": mismatch_table,
    "best": best_table,
    "variants": variants_table,
    "alignment": alignment_table,
    "learning": learning_table,
}


def with_tables(text):
    """A page with its generated tables made anew"""
    marks = re.compile(r"(<!-- (\w+) ([^:]+): [^>]*-->\n).*?(<!-- /\2 -->)", re.S)
    return marks.sub(lambda mark: f"{mark[1]}{TABLES[mark[2]](mark[3])}{mark[4]}", text)


if __name__ == "__main__":
    for figure_name in COMPARED:
        draw_comparison(figure_name, "runs")
    draw_comparison("", "runs", variant="no-negatives")
    draw_comparison("", "sums", "large")
    for folder in {file.parent for file in FOLDER.glob("*/*.jsonl")} - {FOLDER / "comparison"}:
        draw(folder)
    draw_alignment()
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
