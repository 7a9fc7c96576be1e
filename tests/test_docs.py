"""Documentation: links lead somewhere, names exist, commands parse, tables are current."""

import os
import re
import shlex
from importlib import import_module
from pathlib import Path
from string import Template
from types import SimpleNamespace

import pytest
import torch
import tyro
from golden_runs import parsed
from readme_table import readme_with_table
from sync_shared import ROOT

from evals import load_task, score_all
from evals.rewards import REWARDS, load_reward, reward_names
from models.names import MODELS
from rollout import make_engine
from rollout.rows import Batch
from run import plan, problems
from run.flags import RunFlags, check_numbers
from run.problems import sampling_of

PAGES = ["README.md", "docs/**/*.md", "models/*/*.md"]
PAGES = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
METHODS = [page.stem for page in PAGES if page.parent.name == "algos"]
WORDS = {
    word
    for file in ROOT.glob("[!t.]*/**/*.*")  # not of tests/
    if file.suffix in (".py", ".txt", ".html")
    for word in re.findall(r"\w+", file.read_text())
}
WORDS |= {"nproc_per_node", "WANDB_MODE", "test_cases", "maskgit_plus"}  # of others
TASKS = {file.stem for file in ROOT.glob("evals/*.py")}
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@by_page
def test_links_and_names_lead_somewhere(page):
    """Links with their anchors, files, and in backticks the names of code and flags; a method's
    page also names those of the authors' code.
    """
    text = page.read_text()
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if "://" not in target:
            path = page.parent / target if target else page
            assert path.exists() and (not anchor or anchor in anchors(path)), (target, anchor)
    folders = "algos|models|rollout|kernels|distributed|run|evals|data|bench|docs|tests"
    paths = set(re.findall(rf"(?<![\w/.])(?:{folders})/[\w/-]+\.(?:py|md|png)\b", text))
    places = ROOT, page.parent
    lost = [path for path in paths if not any((place / path).exists() for place in places)]
    assert lost in ([], ["algos/mine.py"])
    spans = " ".join(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S)))
    if page.stem not in METHODS:
        names = re.findall(r"--(?:no-)?([a-z][\w-]+)|(?<!\w)([A-Za-z]\w*_\w+)(?!\w*\.\w)", spans)
        assert {(flag or name).replace("-", "_") for flag, name in names} <= WORDS


def commands(text):
    """-> [(script, its flags)] of the `python` and `torchrun` lines, and of those in backticks"""
    text, command = re.sub(r"\\\n\s*", "", text), r"(?:\w+=\S+ )*(?:python|torchrun) "
    lines = re.findall(rf"^ {{4,6}}({command}.+)$", text, re.M)
    for line in lines + re.findall(rf"`({command}[^`]+)`", text):
        words = shlex.split(" ".join(line.split(" && ")[0].split()), comments=True)
        scripts = [word for word in words if re.fullmatch(r"\w+/\w+\.py", word)]
        if scripts and "--help" not in words:
            yield scripts[0], words[words.index(scripts[0]) + 1 :]


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("[!et.]*/*.py")], ids=str)
def test_commands_parse(page):
    """Of pages and scripts. With the script's own parser; models, tasks and rewards are known."""
    for program, words in commands(page.read_text()):
        program = program.replace("mine", "d1")
        assert (ROOT / program).is_file()
        if program.split("/")[0] == "tests" or program == "evals/report.py":
            continue
        is_task = program in {f"evals/{task}.py" for task in TASKS}
        module = import_module("evals.run" if is_task else program[:-3].replace("/", "."))
        if not hasattr(module, "Args"):
            tyro.extras.get_parser(module.main).parse_args(words)
            continue
        args = tyro.cli(module.Args, args=words)
        if isinstance(args, RunFlags):
            check_numbers(args)
        tasks = getattr(args, "tasks", "") or getattr(args, "task", "")
        assert {task for task in tasks.split(",") if "." not in task} <= TASKS | {""}
        model = getattr(args, "model", "")
        assert model in (*MODELS, "") or re.match("[A-Z]|runs/|tiny-", model)
        reward = getattr(args, "reward", "")
        assert {*reward_names(reward)} <= {*REWARDS, "score", ""} or ":" in reward


def test_the_task_and_the_reward_of_a_page_work(tmp_path):
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/change.md").read_text(), re.S)
    (tmp_path / "shout.py").write_text("".join(code))
    (tmp_path / "words.csv").write_text("text\napple\n")
    task = load_task(f"{tmp_path}/shout.py")
    examples = task.load("train", f"{tmp_path}/words.csv")
    assert score_all(task, [" APPLE", "apple"], examples * 2) == [1.0, 0.0]
    reward = load_reward(f"{tmp_path}/shout.py:close", task)
    assert reward(["APPLY "], examples) == [{"same": 0.8, "length": 0.0}]


def test_the_table_of_the_readme_is_current():
    text = (ROOT / "README.md").read_text()
    assert readme_with_table(text) == text, "run tests/readme_table.py"


def cells(method, heading):
    """-> cells of the first table under a heading, without its head"""
    section = (ROOT / f"docs/algos/{method}.md").read_text().split(f"\n## {heading}\n")[1]
    rows = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


@pytest.mark.parametrize("method", METHODS)
def test_pages_of_methods_name_functions_and_defaults_of_their_script(method):
    script = import_module(f"algos.{method}")
    for *_, functions in cells(method, "Equation -> function table"):
        for name in re.findall(r"`(\w+)`", functions):
            found = script, Batch, getattr(script, "Batch", None)
            assert any(hasattr(one, name) for one in found)
    for flag, value, source in cells(method, "Hyper-parameters"):
        words = [flag.strip("`")] + ([] if value == "on" else shlex.split(value))
        name = words[0].removeprefix("--").replace("-", "_")
        given = tyro.cli(script.Args, args=words)
        assert source and getattr(given, name) == getattr(script.Args(), name), flag


@pytest.mark.skipif("CLEANDLLM_HF" not in os.environ, reason="CLEANDLLM_HF is not set")
def test_recipes_parse_and_fit_the_gpus_that_they_name(monkeypatch):
    """Planned for 80 GB, prompts and answers of the greatest length; the sampler takes its
    settings.
    """
    page, names = (ROOT / "docs/recipes.md").read_text(), {"RUN": ""}
    for name, value in re.findall(r'^    ([A-Z0-9]+)=("[^"]*"|\S+)', page, re.M):
        names[name] = Template(value.strip('"')).substitute(names)
    rows = re.findall(r"^\|[^|]+\| `\$RUN ([^`]+)` \| (\d) \|", page, re.M)
    assert len(rows) == page.count("`$RUN ") > 60
    for name in list(MODELS):
        if (folder := Path(os.environ["CLEANDLLM_HF"]) / Path(MODELS[name]).name).is_dir():
            monkeypatch.setitem(MODELS, name, str(folder))
    monkeypatch.setitem(MODELS, "diffucoder-7b", MODELS["dream-7b"])  # is a Dream
    machine, networks = {"room": 85e9, "gpu": "H100"}, {}
    planned = lambda model, args, lengths, splits, coupled, has_old=False: plan.Plan(
        model, args, lengths, 128, coupled, has_old, **machine
    )
    monkeypatch.setattr(problems, "fit", planned)
    # counted, it is 74,000 to 107,000 bytes, and takes seconds
    monkeypatch.setattr(plan, "kept_per_token", lambda *_: 1e5)
    for command, ranks in rows:
        words, machine["ranks"] = shlex.split(Template(command).substitute(names)), int(ranks)
        script = import_module(words[0][:-3].replace("/", "."))
        args = parsed(Path(words[0]).stem, *words[1:])
        kind = args.model, args.lora_rank, args.lora_targets
        if kind not in networks:
            networks[kind] = script.build_policy(torch.device("cuda"), args)
        net = networks[kind]
        if hasattr(script, "RECORDS"):
            assert {*reward_names(args.reward)} <= {*REWARDS, "score", ""}
            make_engine(net).validate(script.RECORDS, **sampling_of(args))
            lengths = [(args.max_prompt_length, args.gen_length)]
            made = planned(net, args, lengths, {}, script.DRAWS_TOGETHER, script.USES_OLD)
        else:
            sides = 2 if "mc_num" in vars(args) else 1
            answers = SimpleNamespace(lengths=torch.full((1, 1 + sides), args.max_length // 2))
            made = problems.HeldOut.fit(SimpleNamespace(splits={}), answers, net, args)
        assert made.fitting, command
