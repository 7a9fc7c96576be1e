"""The law of the scripts: `diff algos/d1.py algos/bgpo.py` is the method, what you read is what
runs, and rooms import downwards.
"""

import ast
import importlib
import json
import re
import shlex

import pytest
import torch
from golden_runs import GOLDEN, all_values, parsed
from size import size
from sync_shared import EXCEPTIONS, METHODS, ONLINE, ROOT, shared_blocks, source, sync, without

from models.tensors import build_model
from models.tiny import TINY_CONFIGS
from run.flags import flags_of, values_for

ROOMS = ["distributed", "models", "rollout", "data", "evals", "run", "algos"]  # none imports later
UPWARDS = "rollout/__init__.py", "kernels"
TREES = {
    path.relative_to(ROOT): ast.parse(path.read_text())
    for room in (*ROOMS, "kernels", "bench")
    for path in sorted((ROOT / room).glob("*.py"))
}
FUNCTIONS = ["sample_masks", "estimate_logps", "compute_advantages", "policy_loss"]
scripts = pytest.mark.parametrize("script", METHODS)


def imports_of(tree):
    """-> [(node, module, names)] of all imports, those inside functions too"""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.append((node, node.module or "", [alias.name for alias in node.names]))
        elif isinstance(node, ast.Import):
            found += [(node, alias.name, [alias.name]) for alias in node.names]
    return found


def own(text):
    """Tokens of a script outside its shared blocks."""
    blocks = shared_blocks(text)
    return size(without(text, blocks)) - len(blocks)


@scripts
def test_a_script(script):
    """Shared blocks are those of all others, a method's functions stand first, every flag has its
    help, and what is its own stays small.
    """
    text = source(script)
    for other in METHODS:
        skip = [block for name, block in EXCEPTIONS if name in (script, other)]
        same = sync(source(other), text, skip) == text
        assert same, f"run python tests/sync_shared.py {other}"
    assert own(text) <= METHODS[script].own, f"{own(text)} tokens are its own"
    nodes = {node.name: node for node in ast.parse(text).body if hasattr(node, "name")}
    names, expected = list(nodes), FUNCTIONS if script in ONLINE else ["sample_masks"]
    assert [name for name in names if name in FUNCTIONS] == expected
    assert names.index(expected[-1]) < names.index("parallelize") < names.index("main")
    args = [node for node in nodes["Args"].body if isinstance(node, (ast.AnnAssign, ast.Expr))]
    for field, help_text in zip(args[::2], args[1::2], strict=True):
        assert isinstance(field, ast.AnnAssign) and isinstance(help_text.value.value, str)
    assert not [node for node in ast.walk(nodes["main"]) if isinstance(node, ast.Lambda)]
    imported = [names for _, room, names in imports_of(ast.parse(text)) if is_ours(room)]
    assert len(sum(imported, [])) <= 21  # start, and 20 to understand


@pytest.mark.parametrize("script", ONLINE)
def test_an_online_script(script):
    """All blocks of d1.py in its order, but those that are parts of a method."""
    is_of_all = lambda name: not name.startswith(("reference", "method"))
    mine, d1 = (filter(is_of_all, shared_blocks(source(one))) for one in (script, "d1"))
    assert [*mine] == [*d1]


def is_ours(module):
    return module.split(".")[0] in (*ROOMS, "kernels")


def test_d1_is_read_in_one_sitting():
    """And its method starts on the first screens."""
    d1 = source("d1")
    assert d1[: d1.index("\ndef ")].count("\n") < 80 and d1.count("\n") <= 290
    assert d1[d1.index("\ndef main") :].count("\n") <= 50


def test_a_changed_shared_line_is_mended_and_a_methods_own_is_left_alone():
    text = source("bgpo").replace("A * (1 + d)", "A * (2 + d)")
    broken = text.replace("optimizer.step()", "pass")
    assert broken != text != source("bgpo") and sync(source("d1"), broken) == text
    for mark in "# >>> shared: learn\n", "# <<< shared: learn\n":
        with pytest.raises(ValueError, match="no partner"):
            sync(source("d1"), text.replace(mark, ""))


def test_values_of_every_flag():
    """On the tiny models, and on others of either attention with LoRA and with all weights."""
    got = all_values()
    assert got == json.loads((GOLDEN / "values.json").read_text()), "python tests/golden_runs.py -h"


@scripts
def test_the_printed_line_and_the_help_have_the_values_of_the_run(script, capsys):
    """A given flag wins over what is known of a model, and the task's data follow the model."""
    given = "--gen-length", 64, "--task", "countdown", "--model", "llada-8b"
    args = parsed(script, *given)
    line = shlex.split(capsys.readouterr().err.splitlines()[-1])
    assert parsed(script, *line[2:]) == args and (args.gen_length, args.data) == (64, "cd3")
    module = importlib.import_module(f"algos.{script}")
    capsys.readouterr()
    with pytest.raises(SystemExit, match="^0$"):
        parsed(script, "--help", "--model", "llada-8b")
    shown = capsys.readouterr().out
    flags = re.findall("^  --(?:no-)?([a-z][a-z0-9-]+)", shown, re.M)
    assert sorted(flag.replace("-", "_") for flag in flags) == sorted(vars(args))
    for name, (value, where) in values_for(module.Args("llada-8b"), module.BY_SIZE).items():
        assert f"  {' '.join(flags_of({name: value}))} ({where})\n" in shown
    with pytest.raises(SystemExit):
        parsed(script, "--help", *given)
    assert "  --gen-length 64 \n" in capsys.readouterr().out


def test_rooms_import_downwards():
    """But make_engine takes kernels/. No script is imported."""
    for path, tree in TREES.items():
        room = path.parts[0]
        for _, module, _ in imports_of(tree):
            other = module.split(".")[0]
            if room in ROOMS and is_ours(other) and (path.as_posix(), other) != UPWARDS:
                assert other in ROOMS[: ROOMS.index(room) + 1], f"{path} imports {module}"
            assert other != "algos" or room == "bench", path


def test_services_below_run_know_no_args():
    """Functions take them only in a file with its own command line."""
    for path, tree in TREES.items():
        has_args = any(getattr(node, "name", "") == "Args" for node in tree.body)
        if path.parts[0] in ("run", "algos", "bench") or has_args:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name != "main":
                taken = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                assert "args" not in [arg.arg for arg in taken], f"{path}:{node.lineno}"


def test_slow_packages_are_imported_where_they_are_used():
    """`--help` and a refused command take little longer than `import torch`."""
    slow = r"(transformers|peft|datasets|wandb|matplotlib|torch\.(_dynamo|distributed\.[ft]))"
    for path, tree in TREES.items():
        for node, module, _ in imports_of(tree):
            allowed = node not in tree.body or path.parts[0] == "bench"
            assert allowed or not re.match(rf"{slow}\b", module), f"{path} imports {module}"


def test_importing_and_building_have_no_effect(monkeypatch):
    """No normal numbers on the meta device: these import torch._dynamo, which takes 1.3 s."""
    state = torch.random.get_rng_state()
    for script in METHODS:
        importlib.import_module(f"algos.{script}")
    assert torch.equal(state, torch.random.get_rng_state())
    assert not torch.distributed.is_initialized()
    monkeypatch.setattr(torch.nn.init, "normal_", None)
    for config in TINY_CONFIGS.values():
        build_model(config)


def test_benchmarks_can_be_imported():
    for path in TREES:
        if path.parts[0] == "bench":
            importlib.import_module(f"bench.{path.stem}")
