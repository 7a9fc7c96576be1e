"""The pages of docs/algos say what the scripts do: functions, metrics, defaults and commands are held against the code."""

import ast
import json
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import tyro

from evals import load_task
from models import MODELS, random_init
from runlog import check_numbers

ROOT = Path(__file__).parents[1]
METHODS = ("d1", "coupled_grpo", "spg", "bgpo", "cj_grpo", "mdpo", "sft", "vrpo")
OFFLINE = ("sft", "vrpo")  # no rollout, other functions
HEADINGS = [
    "Paper and official code",
    "Objective",
    "Equation -> function table",
    "Implementation details",
    "Hyper-parameters",
    "Logged metrics",
    "Commands",
    "Results",
    "Curves",
    "What did not work / not tested",
]
GROUPS = "loss policy optim reward completion speed time memory eval test probe router".split()
KEY = re.compile(rf"({'|'.join(GROUPS)})/[a-z_<>]+")
USED_UP = {
    "policy/weight",
    "reward/square",
}  # the loop turns them into means and reward/std before it logs


def page(method):
    return (ROOT / f"docs/algos/{method}.md").read_text()


def section(method, heading):
    return page(method).split(f"\n## {heading}\n")[1].split("\n## ")[0]


def table(method, heading):
    """Cells of the rows of the first table under a heading, without its head."""
    rows = [line for line in section(method, heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows[2:]]


def code(text):
    """`words` in backticks."""
    return re.findall(r"`([^`]+)`", text)


def script(method):
    return import_module(f"algos.{method}")


def tree(path, function=None):
    """Syntax tree of a file, or of one function of it."""
    parsed = ast.parse((ROOT / path).read_text())
    if function is None:
        return parsed
    return next(
        node
        for node in ast.walk(parsed)
        if isinstance(node, ast.FunctionDef) and node.name == function
    )


def text_of(node):
    """A string, or an f-string whose fields are written <name>; None for all else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        last = lambda value: (
            value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "?")
        )
        return "".join(
            part.value if isinstance(part, ast.Constant) else f"<{last(part.value)}>"
            for part in node.values
        )


def keys_in(node):
    """Metric keys that a piece of code names; `with clock("x")` writes time/x."""
    found = {text for child in ast.walk(node) if (text := text_of(child)) and KEY.fullmatch(text)}
    calls = [child for child in ast.walk(node) if isinstance(child, ast.Call)]
    clocks = [
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "clock"
    ]
    return found | {f"time/{phase}" for phase in clocks}


def written_keys(method):
    parts = [tree(f"algos/{method}.py"), tree("models/experts.py", "routing_extremes")]
    if method not in OFFLINE:
        parts += [
            tree("rollout/traces.py", "rollout_sums"),
            tree("rollout/traces.py", "rollout_means"),
        ]
        parts += [tree("rollout/probe.py", "probe")]
    return set().union(*map(keys_in, parts)) - USED_UP


def commands(method, program):
    """Flags of every command of a page that starts the program, continuation lines joined."""
    lines = re.sub(r"\\\n\s*", "", page(method)).splitlines()
    words = [
        shlex.split(line, comments=True)
        for line in lines
        if line.startswith("    ") and program in line
    ]
    return [line[line.index(program) + 1 :] for line in words if program in line]


@pytest.mark.parametrize("method", METHODS)
def test_pages_have_the_same_headings(method):
    assert re.findall(r"^## (.+)$", page(method), re.M) == HEADINGS


@pytest.mark.parametrize("method", METHODS)
def test_links_lead_somewhere(method):
    links = [
        link
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page(method))
        if not link.startswith("https://")
    ]
    assert links
    for link in links:
        assert (ROOT / "docs/algos" / link).exists(), link


PAGES = ["README.md", "docs/models.md", "docs/change.md", "docs/evals.md"]
FOLDERS = "algos models rollout kernels evals data bench docs tests".split()


@pytest.mark.parametrize("name", PAGES)
def test_other_pages_name_files_that_exist(name):
    """Links, and every path in the text but the reader's own script."""
    text = (ROOT / name).read_text()
    links = [
        link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if not link.startswith("https://")
    ]
    for link in links:
        assert ((ROOT / name).parent / link).exists(), link
    paths = set(re.findall(rf"(?<![\w/.])(?:{'|'.join(FOLDERS)})/[\w/-]+\.(?:py|md|png)", text)) - {
        "algos/mine.py"
    }
    assert paths and not [path for path in paths if not (ROOT / path).is_file()]


@pytest.mark.parametrize("name", PAGES)
def test_commands_of_other_pages_parse(name):
    """Flags and their values, models and tasks; a copy of d1.py takes what d1.py takes."""
    lines = re.sub(r"\\\n\s*", "", (ROOT / name).read_text()).splitlines()
    words = [
        shlex.split(line, comments=True)
        for line in lines
        if re.match(r"    (python|torchrun) ", line)
    ]
    for line in words:
        program = next(i for i, word in enumerate(line) if word.endswith(".py"))
        module = (
            line[program].removesuffix(".py").replace("/", ".").replace("algos.mine", "algos.d1")
        )
        module = "evals.run" if module.startswith("evals.") else module
        if module.startswith("tests."):
            continue
        many = line[program] == "evals/run.py"
        args = tyro.cli(
            import_module(module).ManyArgs if many else import_module(module).Args,
            args=line[program + 1 :],
        )
        assert not many or all(map(load_task, filter(None, args.tasks.split(",")))), line
        assert not getattr(args, "model", "") or args.model in MODELS, line
        assert (ROOT / f"evals/{getattr(args, 'task', 'countdown')}.py").is_file(), line
    assert bool(words) == (name != "docs/models.md")


@pytest.mark.parametrize("name", ["tiny-sdar", "tiny-llada"])
def test_commands_of_the_tiny_checkpoints_make_such_a_model(name):
    """They start from random weights of the shipped configuration, and the learning rate ends at 0."""
    text = re.sub(r"\\\n\s*", "", (ROOT / f"models/{name}/README.md").read_text())
    flags = lambda program: shlex.split(
        re.search(rf"^    (?:OMP_NUM_THREADS=1 )?python {program} (.+)$", text, re.M)[1]
    )
    start = tyro.cli(random_init.Args, args=flags("models/random_init.py"))
    args = tyro.cli(script("sft").Args, args=flags("algos/sft.py"))
    assert args.model == start.out and args.task == "countdown"
    shipped = json.loads((ROOT / f"models/{name}/config.json").read_text())
    assert random_init.TINY_CONFIGS[start.config].items() <= shipped.items()
    assert (
        script("sft").lr_at(args.max_steps - 1, args)
        > 0
        == script("sft").lr_at(args.max_steps, args)
    )
    if name == "tiny-sdar":
        assert flags("algos/sft.py") in commands("sft", "algos/sft.py")


@pytest.mark.parametrize(
    "folder", ["models", "rollout", "kernels", "evals", "data", "bench", "algos"]
)
def test_the_list_of_files_is_whole(folder):
    listed = (ROOT / "README.md").read_text().split("\n## Files\n")[1].split("\n## ")[0]
    rows = re.search(rf"^    {folder}/.*\n(?:      .*\n)*", listed, re.M)[0]
    names = [
        path.name
        for path in (ROOT / folder).glob("*.py")
        if path.stem != "__init__" and "_triton" not in path.stem
    ]
    assert names and not [
        name for name in names if name not in rows.split() and f"{name}," not in rows
    ]


@pytest.mark.parametrize("method", METHODS)
def test_functions_of_the_equation_table_exist(method):
    defined = {
        node.name
        for node in ast.walk(tree(f"algos/{method}.py"))
        if isinstance(node, ast.FunctionDef)
    }
    named = {name for *_, functions in table(method, HEADINGS[2]) for name in code(functions)}
    assert named and named <= defined, named - defined
    if method not in OFFLINE:
        assert {"sample_masks", "estimate_logps", "compute_advantages", "policy_loss"} <= named


@pytest.mark.parametrize("method", METHODS)
def test_every_metric_is_explained_once_and_nothing_else_is(method):
    rows = table(method, "Logged metrics")
    explained = [code(key)[0] for key, meaning in rows if meaning]
    assert len(explained) == len(rows) == len(set(explained))
    assert set(explained) == written_keys(method)


@pytest.mark.parametrize("method", ["d1", "bgpo", "vrpo"])
def test_kept_runs_hold_no_other_metric(method):
    """What the parser of this file may miss: keys of runs that were really made."""
    explained = {code(key)[0] for key, _ in table(method, "Logged metrics")}
    curves = sorted((ROOT / f"docs/curves/{method}").glob("*.jsonl"))
    rows = [json.loads(line) for path in curves for line in path.read_text().splitlines()]
    seen = {re.sub("^(eval|test)/.*", r"\1/<task>", key) for row in rows for key in row} - {"step"}
    assert seen and seen <= explained, seen - explained


@pytest.mark.parametrize("method", METHODS)
def test_defaults_are_those_of_the_script(method):
    default, rows = script(method).Args(), table(method, "Hyper-parameters")
    for flag, value, source in rows:
        (flag,) = code(flag)
        name = flag.removeprefix("--").replace("-", "_")
        assert source and hasattr(default, name), flag
        words = [] if value == "on" else shlex.split(value)  # a switch
        assert getattr(tyro.cli(script(method).Args, args=[flag, *words]), name) == getattr(
            default, name
        ), flag
    source = (ROOT / f"algos/{method}.py").read_text()
    own = re.findall(r"^    (\w+): ", source.split("    # method\n")[1].split("\n\n\n")[0], re.M)
    assert {f"--{name.replace('_', '-')}" for name in own} <= {code(row[0])[0] for row in rows}


@pytest.mark.parametrize("method", METHODS)
def test_commands_parse(method):
    lines = commands(method, f"algos/{method}.py")
    assert len(lines) == (
        5 if method == "sft" else 4
    )  # CPU, one GPU (a small model too), eight GPUs, resume
    for flags in lines:
        args = check_numbers(tyro.cli(script(method).Args, args=flags))
        assert args.model in MODELS or args.model.startswith("runs/"), args.model
        assert (ROOT / f"evals/{args.task}.py").is_file(), args.task
    assert [flag for flag in lines[-1] if flag.startswith("--")] == ["--resume"]
