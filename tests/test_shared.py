"""`diff algos/d1.py algos/bgpo.py` is the method: what stands between shared markers is
byte-identical.
"""

import ast
import importlib
import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from run.defaults import TINY, training
from size import size
from sync_shared import EXCEPTIONS, METHODS, ONLINE, shared_blocks, source, sync

from models.config import architecture
from models.tensors import build_model
from models.tiny import TINY_CONFIGS
from rollout.engine import SamplingSettings
from run.flags import command_line

ROOT = Path(__file__).parents[1]
FOLDERS = ("models", "rollout", "kernels", "evals", "data")
FILES = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")]
FILES += [ROOT / f"algos/{script}.py" for script in METHODS]
FUNCTIONS = ["sample_masks", "estimate_logps", "compute_advantages", "policy_loss"]
# the most tokens that a method may have outside the markers beyond those of d1.py
MOST = {
    "bgpo": 60,
    "cj_grpo": 190,
    "coupled_grpo": 190,
    "spg": 420,
    "mdpo": 670,
    "espo": 155,
    "ebpo": 140,
    "wd1": -100,
    "justgrpo": 240,
    "dtreerpo": 530,
    "tracerl": 735,
    "tpg": 215,
}


def own(text):
    """Tokens of a script outside its shared blocks."""
    lines, blocks = text.splitlines(), list(shared_blocks(text, "script").values())
    for start, end in reversed(blocks):
        mark = lines[start - 1]
        lines[start:end] = [mark[: mark.index("#")] + "pass"]
    return size("\n".join(lines) + "\n") - len(blocks)


@pytest.mark.parametrize("script", METHODS)
def test_shared_blocks_are_identical(script):
    """Every script against every other; online scripts have all blocks of d1.py in its order."""
    for other in METHODS:
        skip = [block for name, block in EXCEPTIONS if name in (script, other)]
        same = sync(source(other), source(script), skip) == source(script)
        assert same, f"run python tests/sync_shared.py {other}"
    if script in ONLINE:
        extra = r"draws|reference\w*"  # of some methods
        names = shared_blocks(source(script), script)
        blocks = [name for name in names if not re.fullmatch(extra, name)]
        assert blocks == list(shared_blocks(source("d1"), "d1"))


def test_a_changed_shared_line_is_mended_and_a_methods_own_is_left_alone():
    text = source("bgpo").replace("A * (1 + d)", "A * (2 + d)")
    broken = text.replace("(scale * loss).backward()", "pass")
    assert broken != text != source("bgpo") and sync(source("d1"), broken) == text


UNPAIRED = {
    "# >>> shared: a\n": "never closed",
    "# <<< shared: a\n": "closes 'a'",
    "# >>> shared: a\n# >>> shared: b\n": "opens 'b' inside 'a'",
    "# >>> shared: a\n# <<< shared: b\n": "closes 'b'",
    "# >>> shared: a\n# <<< shared: a\n# >>> shared: a\n# <<< shared: a\n": "opens 'a' again",
}


@pytest.mark.parametrize("text", UNPAIRED)
def test_unpaired_markers_are_refused(text):
    with pytest.raises(ValueError, match=UNPAIRED[text]):
        shared_blocks(text, "script")


@pytest.mark.parametrize("script", METHODS)
def test_the_order_of_a_script(script):
    """The method's functions stand before the shared machinery; every flag has its help."""
    nodes = {node.name: node for node in ast.parse(source(script)).body if hasattr(node, "name")}
    names, expected = list(nodes), FUNCTIONS if script in ONLINE else ["sample_masks"]
    assert [name for name in names if name in FUNCTIONS] == expected
    assert names.index(expected[-1]) < names.index("parallelize") < names.index("main")
    args = nodes["Args"].body
    for field, text in zip(args[::2], args[1::2], strict=True):
        assert isinstance(field, ast.AnnAssign) and isinstance(text.value.value, str)
    if script in ONLINE:
        module = importlib.import_module(f"algos.{script}")
        assert {"RECORDS", "USES_OLD", "USES_REF", "DRAWS_TOGETHER"} <= set(vars(module))
        known = {field.name for field in fields(module.Args)}
        assert set(module.ROLLOUT.split()) <= known & {
            field.name for field in fields(SamplingSettings)
        }


WIDTH = {"llada": {"d_model": 4096}, "Dream": {"hidden_size": 3584}, "sdar": {"hidden_size": 4096}}
WIDTH |= {"lladamoe": {"hidden_size": 2048}}
WIDTH |= {"sdar_moe": {"hidden_size": 2048}, "llada2_moe": {"hidden_size": 2048}}
CONFIGS = {architecture(config): config for config in TINY_CONFIGS.values()}


@pytest.mark.parametrize("script", METHODS)
def test_defaults_of_models(tmp_path, monkeypatch, capsys, script):
    """Fields of a model or method exist; a flag wins; the printed line gives the same run."""
    module, parsed = importlib.import_module(f"algos.{script}"), {}
    args = [importlib.import_module(f"algos.{name}").Args for name in METHODS]
    known = {field.name for one in args for field in fields(one)}

    def parse(*flags):
        monkeypatch.setattr(sys, "argv", [f"algos/{script}.py", *flags])
        return command_line(module.Args, module.BY_SIZE)

    for kind in WIDTH if script == "d1" else ("llada", "sdar"):
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[kind] | WIDTH[kind]))
        for rank in (128, 0):
            chosen = training(str(tmp_path), "countdown", rank, module.BY_SIZE)
            assert chosen.keys() <= known
        lora, full = (parse("--model", str(tmp_path), *more) for more in ((), ("--lora-rank", "0")))
        parsed[kind], line = lora, capsys.readouterr().err.splitlines()[-2].split()
        assert parse(*line[2:]) == lora
        assert (lora.task, lora.lora_rank, lora.gen_length) == ("gsm8k", 128, 256)
        assert all(getattr(lora, name) == value for name, value in module.BY_SIZE["lora"].items())
        assert full.lora_rank == 0 and lora.learning_rate > full.learning_rate / 2
        assert parse("--model", str(tmp_path), "--gen-length", "64").gen_length == 64
        assert parse("--model", str(tmp_path), "--task", "countdown").data == "cd3"
    tiny = parse()
    assert tiny.model.startswith("tiny-") and tiny.lora_rank == 0
    assert TINY.keys() <= known and (tiny.warmup_steps, tiny.max_grad_norm) == (5, 1)
    assert tiny.learning_rate == module.BY_SIZE["tiny"]["learning_rate"]
    assert (
        parsed["sdar"].denoising_steps == 4
        and parsed["llada"].gen_length % parsed["llada"].block_length == 0
    )


def test_sizes():
    """A script is read in one sitting, and a method is a small diff."""
    d1 = source("d1")
    assert size(d1) - own(d1) <= 3020
    (main,) = [node for node in ast.parse(d1).body if getattr(node, "name", "") == "main"]
    assert main.end_lineno - main.lineno <= 60
    for script, most in MOST.items():
        assert own(source(script)) - own(d1) <= most, script


def test_services_know_neither_args_nor_scripts():
    """Functions take args only in a file with its own Args, a command line; scripts do not import
    each other.
    """
    for path in [ROOT / "run/plan.py", *FILES]:
        tree = ast.parse(path.read_text())
        has_args = any(getattr(node, "name", "") == "Args" for node in tree.body)
        for node in ast.walk(tree):
            names = (
                [getattr(node, "module", None) or ""] if isinstance(node, ast.ImportFrom) else []
            )
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] == "algos" for name in names), path
            if isinstance(node, ast.FunctionDef) and not has_args and node.name != "main":
                taken = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                assert "args" not in [arg.arg for arg in taken], f"{path}:{node.lineno}"


def test_slow_packages_are_imported_where_they_are_used():
    """`--help` and a refused command take little longer than `import torch`."""
    slow = r"transformers|peft|datasets|wandb|matplotlib|torch\.(_dynamo|distributed\.[ft])"
    for path in FILES:
        found = re.search(rf"^(import|from) ({slow}|.*training_state)\b", path.read_text(), re.M)
        assert not found, f"{path}: {found[0]}"


def test_models_without_weights_draw_no_normal_numbers(monkeypatch):
    """On the meta device these import torch._dynamo, which takes 1.3 s."""
    monkeypatch.setattr(torch.nn.init, "normal_", None)
    for config in TINY_CONFIGS.values():
        build_model(config)


def test_importing_a_script_has_no_effect():
    state = torch.random.get_rng_state()
    for script in METHODS:
        importlib.import_module(f"algos.{script}")
    assert torch.equal(state, torch.random.get_rng_state())
    assert not torch.distributed.is_initialized()


def test_scripts_that_no_test_runs_import_names_that_exist():
    """kernels/ apart, which needs Triton"""
    rooms = {path.parent.name for path in ROOT.glob("*/*.py")} - {"kernels"}
    rooms |= {path.stem for path in ROOT.glob("*.py")}
    for path in [*ROOT.glob("bench/*.py"), *ROOT.glob("soak/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in rooms:
                for alias in node.names:
                    exec(f"from {node.module} import {alias.name}")
