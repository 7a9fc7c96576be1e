"""Documentation: links lead somewhere, commands parse, generated tables are current."""

import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from string import Template
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro
from bench.curves import FILES, RATE_SEED
from readme_table import readme_with_table

from evals import load_task, score_all
from evals.rewards import load_reward
from models.names import MODELS
from rollout import BlockEngine, MaskedEngine
from run import defaults, plan
from run.flags import command_line

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("models/*/*.md")),
]
METHODS = [path.stem for path in sorted(ROOT.glob("docs/algos/*.md"))]
FOLDERS = "algos|models|rollout|kernels|evals|data|bench|docs|tests"
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def parse(program, flags):
    """What the script's command line makes of the flags, without running it"""
    if program == "bench/train.py" and not flags[0].startswith("-"):
        program, flags = f"algos/{flags[0]}.py", flags[1:]
    module = program.removesuffix(".py").replace("/", ".").replace("algos.mine", "algos.d1")
    if module.startswith("evals.") and module != "evals.show":
        run = import_module("evals.run")
        return tyro.cli(run.Args, args=flags)
    return tyro.cli(import_module(module).Args, args=flags)


@by_page
def test_links_and_named_files_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    links = [link for link in links if not link.startswith("https://")]
    assert not [link for link in links if not (page.parent / link).exists()]
    paths = set(re.findall(rf"(?<![\w/.])(?:{FOLDERS})/[\w/-]+\.(?:py|md|png)\b", text))
    is_file = lambda path: (ROOT / path).is_file() or (page.parent / path).is_file()
    assert not [path for path in paths - {"algos/mine.py"} if not is_file(path)]


@by_page
def test_commands_parse(page):
    """`python` and `torchrun` lines, and those in backticks."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    command = r"(?:\w+=\S+ )*(?:python|torchrun) "
    for line in re.findall(rf"^ {{4}}(?:  )?({command}.+)$", text, re.M) + re.findall(
        rf"`({command}[^`]+)`", text
    ):
        words = shlex.split(" ".join(line.split(" && ")[0].split()), comments=True)
        scripts = [word for word in words if re.fullmatch(r"\w+/\w+\.py", word)]
        if not scripts or "--help" in words or scripts[0].startswith(("tests/", "docs/")):
            continue
        assert (ROOT / scripts[0]).is_file() or scripts[0] == "algos/mine.py", line
        args = parse(scripts[0], words[words.index(scripts[0]) + 1 :])
        tasks = getattr(args, "tasks", None) or getattr(args, "task", None) or "countdown"
        tasks = [task for task in tasks.split(",") if not task.endswith(".py")]
        known = {path.stem for path in ROOT.glob("evals/*.py")} | {*FILES}
        assert {*tasks} <= known, line


def test_the_task_and_the_reward_of_a_page_work(tmp_path):
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/change.md").read_text(), re.S)
    assert [len(re.findall("^.", text, re.M)) for text in code] == [10, 4]
    (tmp_path / "shout.py").write_text("".join(code))
    (tmp_path / "words.csv").write_text("text\napple\n")
    task = load_task(f"{tmp_path}/shout.py")
    examples = task.load("train", f"{tmp_path}/words.csv")
    assert score_all(task, [" APPLE", "apple"], examples * 2) == [1.0, 0.0]
    reward = load_reward(f"{tmp_path}/shout.py:close", task)
    assert reward(["APPLY "], examples) == [{"same": 0.8, "length": 0.0}]


def test_commands_of_the_training_tables_parse():
    train = import_module("bench.train")
    words = {"llada": "DIR", "sdar": "DIR", "peer": "DIR", "one": train.ONE, "eight": train.EIGHT}
    commands = f"{train.COMMANDS.strip()}\n{train.MIXTURE}"
    for line in commands.format(**words, model="DIR").splitlines():
        program, *flags = line.split()
        parse(program, flags)


def test_a_line_of_the_training_tables_runs(tmp_path):
    """Every step and the mean; groups of different rewards, though the model is random."""
    flags = "--model tiny-sdar --max-steps 2 --eval-limit 0 --gen-length 4 --prompts-per-step 1"
    command = [sys.executable, "bench/train.py", "d1", *flags.split(), "--out", str(tmp_path)]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    first, second, mean = map(json.loads, re.findall("^{.*}$", text, re.M))
    assert second == mean and min(first["time/estimate"], mean["time/update"]) > 0
    assert "grad   0.00" not in text


def test_generated_tables_are_current():
    plot = import_module("docs.plot")
    pages = [(ROOT / "README.md", readme_with_table)]
    for page, renew in pages + [(page, plot.with_tables) for page in plot.PAGES]:
        assert renew(page.read_text()) == page.read_text(), f"{page.name}: rewrite its tables"


def test_figures_of_runs_of_different_length(tmp_path, monkeypatch):
    """A mismatch below 0 is in sight in every column, and no line runs back where a seed ends."""
    plot, figures = import_module("docs.plot"), []
    monkeypatch.setattr(plot, "FOLDER", tmp_path)
    monkeypatch.setattr(plot.Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    names, rows = ("greedy", "reward", "distinct", "surprisal", "tokens"), []
    for task, seed in product(("countdown", "sudoku"), (0, 1)):
        steps = [*range(20, 201 + 100 * seed, 20)]
        points = {name: [step / 1000 for step in steps] for name in names}
        points |= {"rollout": steps, "entropy": [1.0] * len(steps)}
        run = {"family": "sdar", "method": "cj_grpo", "task": task, "seed": seed, "variant": ""}
        run |= {
            "start": 7,
            "seconds": 2 - seed,
            "points": points,
            "test": [0.1, 0.5],
            "rollouts": steps[-1],
        }
        start = {"method": "start", "greedy": 0.0, "seed": RATE_SEED, "points": None}
        rows += [run, run | start]
    (tmp_path / "comparison").mkdir()
    (tmp_path / "comparison/two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for figure_name in plot.COMPARED:
        plot.draw_comparison(figure_name, "two")
    plain, more = ([axes for axes in figure.axes if axes.lines] for figure in figures)
    assert all(axes.get_ylim()[0] < -0.9 for axes in plain[2:])  # of the mismatch
    for axes in plain + more:
        assert (np.diff(axes.lines[0].get_xdata()) > 0).all()
    assert plot.scores_after(rows[::2]) == "50.0%+, 50.0%+, 50.0%+, 50.0%+"
    rows[0]["points"]["greedy"] = [0.5] * 10
    assert plot.scores_after(rows[:1]) == "50.0%"


@pytest.mark.parametrize(
    "groups, clear",
    [
        ([[0.6] * 3], 1),
        ([[0.4, 0.6, 0.8]], 0),
        ([[0.465, 0.5, 0.535], [0.6]], 0),
        ([[0.5] * 3, [0.6]], 1),
    ],
)
def test_a_difference_is_clear_above_two_errors(groups, clear):
    """0.5 and 0.6 on 512 problems are 3.2 errors apart, fewer with the spread of the seeds. A
    single seed takes that of the other method.
    """
    plot = import_module("docs.plot")
    assert plot.is_clear(np.array([0.5, 0.6]), "sudoku", *groups) == clear
    assert not plot.is_clear(np.array([0.5, 0.6]), "countdown", *groups)


def table(method, heading):
    """-> cells of the first table under a heading, without its head"""
    section = (
        (ROOT / f"docs/algos/{method}.md")
        .read_text()
        .split(f"\n## {heading}\n")[1]
        .split("\n## ")[0]
    )
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


@pytest.mark.parametrize("method", METHODS)
def test_pages_of_methods_name_functions_and_defaults_of_their_script(method):
    script = import_module(f"algos.{method}")
    named = [re.findall(r"`(\w+)`", row[-1]) for row in table(method, "Equation -> function table")]
    assert all(hasattr(script, name) or hasattr(script.Batch, name) for name in sum(named, []))
    for flag, value, source in table(method, "Hyper-parameters"):
        words = [flag.strip("`")] + ([] if value == "on" else shlex.split(value))
        name = words[0].removeprefix("--").replace("-", "_")
        default, given = script.Args(), tyro.cli(script.Args, args=words)
        assert source and getattr(given, name) == getattr(default, name), flag


@pytest.mark.skipif("CLEANDLLM_HF" not in os.environ, reason="CLEANDLLM_HF is not set")
def test_recipes_parse_and_fit_the_gpus_that_they_name(monkeypatch):
    """Planned for 80 GB, prompts and answers of the greatest length, with the defaults of the
    model; the sampler takes its settings.
    """
    page, names = (ROOT / "docs/recipes.md").read_text(), {"RUN": ""}
    for name, value in re.findall(r'^    ([A-Z0-9]+)=("[^"]*"|\S+)', page, re.M):
        names[name] = Template(value.strip('"')).substitute(names)
    rows = re.findall(r"^\|[^|]+\| `\$RUN ([^`]+)` \| (\d) \|", page, re.M)
    assert len(rows) == page.count("`$RUN ") > 60
    build, adapt = plan.meta_model, plan.add_lora

    @cache
    def network(name, rank, targets):
        net = build(name, torch.bfloat16 if rank else torch.float32)
        if rank:
            adapt(net, rank, 1, targets)
        for module in (net, net.layers, net.layers[-1]):  # plans walk through them often
            module.parameters = partial(iter, tuple(module.parameters()))
        return net

    monkeypatch.setattr(plan, "add_lora", lambda *_: None)
    # counted, it is 74,000 to 107,000 bytes, and takes seconds
    monkeypatch.setattr(plan, "kept_per_token", lambda *_: 1e5)
    for name in list(MODELS):
        if (folder := Path(os.environ["CLEANDLLM_HF"]) / Path(MODELS[name]).name).is_dir():
            monkeypatch.setitem(MODELS, name, str(folder))
    monkeypatch.setitem(MODELS, "DiffuCoder-7B-Instruct", MODELS["dream-7b"])  # is a Dream
    monkeypatch.setattr(defaults, "is_tiny", lambda _: False)
    for command, ranks in rows:
        words = shlex.split(Template(command).substitute(names))
        script = import_module(words[0][:-3].replace("/", "."))
        monkeypatch.setattr(sys, "argv", words)
        args = command_line(script.Args, script.BY_SIZE)
        net = network(args.model, args.lora_rank, args.lora_targets)
        monkeypatch.setattr(plan, "meta_model", lambda *_, net=net: net)
        make = partial(plan.Plan, room=85e9, gpu="H100", ranks=int(ranks))
        flags = vars(args)
        numbers = {name: flags[name] for name in plan.FLAGS if name in flags}
        make = partial(make, **numbers)
        monkeypatch.setattr(plan, "fit", lambda cpu, flags, make=make, **rest: make(**rest))
        if "prompts_per_step" in flags:
            engine = BlockEngine if net.attention == "block-causal" else MaskedEngine
            sampling = {name: flags[name] for name in script.ROLLOUT.split()}
            engine(net, 1).validate(script.RECORDS, **sampling)
            row = None, range(args.max_prompt_length)
            run = script.plan_run({"train": [row], "test": [row] * 128}, args)
        else:
            sides, draws = (2, args.mc_num) if "mc_num" in flags else (1, 1)
            bounds = args.max_length // 2 * torch.arange(2 + sides)
            answers = SimpleNamespace(bounds=bounds, parts=1 + sides)
            run = plan.fit_answers(answers, {"test": range(128)}, flags, draws)
        assert run.fitting, command
