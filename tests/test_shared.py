"""`diff algos/d1.py algos/bgpo.py` is the method: what stands between shared markers is byte-identical."""

import ast
import difflib
import importlib
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest
import torch
from readme_table import added_lines, readme_with_table
from sync_shared import EXCEPTIONS, SIBLINGS, shared_blocks, sync

from rollout.engine import Engine

ROOT = Path(__file__).parents[1]
SERVICES = ["models", "rollout", "kernels", "evals", "data"]
ONLINE = ["d1", *(name for name, blocks in SIBLINGS["d1"].items() if blocks is None)]
METHOD_FUNCTIONS = ["sample_masks", "estimate_logps", "compute_advantages", "policy_loss"]


def text_of(script):
    return (ROOT / f"algos/{script}.py").read_text()


def differences(reference, sibling, names=None, skip=()):
    """Shared blocks of two script texts that are not byte-identical, as a readable diff; '' if all are."""
    want, got = shared_blocks(reference, "reference"), shared_blocks(sibling, "sibling")
    if names is None and list(want) != list(got):
        return f"blocks are {list(got)}, not {list(want)}"
    lines = lambda text, blocks, name: text.splitlines()[slice(*blocks[name])]
    report = []
    for name in names or want:
        if name not in skip:
            a, b = lines(reference, want, name), lines(sibling, got, name)
            report += difflib.unified_diff(
                a, b, f"reference:{name}", f"sibling:{name}", lineterm=""
            )
    return "\n".join(report)


@pytest.mark.parametrize(
    "reference, sibling", [(one, other) for one, others in SIBLINGS.items() for other in others]
)
def test_shared_blocks_are_identical(reference, sibling):
    skip = [block for name, block in EXCEPTIONS if name == sibling]
    assert not differences(text_of(reference), text_of(sibling), SIBLINGS[reference][sibling], skip)


def test_a_changed_shared_line_is_found_and_sync_mends_it():
    reference, changed = (
        text_of("d1"),
        text_of("bgpo").replace("(scale * (slope[:, k] * logps).sum()).backward()", "pass"),
    )
    assert changed != text_of("bgpo")
    assert "-        (scale * (slope[:, k] * logps).sum()).backward()" in differences(
        reference, changed
    )
    assert sync(reference, changed) == text_of("bgpo")


def test_method_code_may_differ():
    changed = text_of("bgpo").replace("A * (1 + d)", "A * (2 + d)")
    assert changed != text_of("bgpo") and not differences(text_of("d1"), changed)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("# >>> shared: a\n", "never closed"),
        ("# <<< shared: a\n", "closes 'a'"),
        ("# >>> shared: a\n# >>> shared: b\n", "opens 'b' inside 'a'"),
        ("# >>> shared: a\n# <<< shared: b\n", "closes 'b'"),
        ("# >>> shared: a\n# <<< shared: a\n# >>> shared: a\n# <<< shared: a\n", "opens 'a' again"),
    ],
)
def test_unpaired_markers_are_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        shared_blocks(text, "script")


@pytest.mark.parametrize("path", sorted(ROOT.glob("algos/*.py")), ids=lambda path: path.name)
def test_scripts_do_not_import_each_other(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [getattr(node, "module", None) or ""]
        )
        assert not any(name.split(".")[0] == "algos" for name in names), (
            f"{path.name}:{node.lineno}"
        )


@pytest.mark.parametrize(
    "path", sorted(path for folder in SERVICES for path in (ROOT / folder).glob("*.py")), ids=str
)
def test_services_do_not_know_args_or_scripts(path):
    """Only a command line's own main(args) takes args."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name != "main":
            names = [x.arg for x in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
            assert "args" not in names, f"{path}:{node.lineno}"
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
            assert not any(name.split(".")[0] == "algos" for name in names), f"{path}:{node.lineno}"


@pytest.mark.parametrize("script", ONLINE)
def test_online_scripts_have_the_four_functions_in_order_and_the_fields_that_shared_code_reads(
    script,
):
    functions = [
        node.name for node in ast.parse(text_of(script)).body if isinstance(node, ast.FunctionDef)
    ]
    assert [name for name in functions if name in METHOD_FUNCTIONS] == METHOD_FUNCTIONS
    module = importlib.import_module(f"algos.{script}")
    assert {"ROLLOUT", "RECORDS", "USES_OLD", "USES_REF"} <= set(vars(module))
    assert set(module.ROLLOUT) <= {f.name for f in fields(module.Args)} & set(
        signature(Engine.generate).parameters
    )
    needed = "learning_rate betas weight_decay max_grad_norm temperature num_generations num_iterations beta".split()
    assert set(needed) <= {f.name for f in fields(module.Args)}


@pytest.mark.parametrize("script", [*ONLINE, "sft", "vrpo"])
def test_every_flag_is_documented(script):
    """A docstring stands under each field: it is the text of --help."""
    (args,) = (
        n
        for n in ast.parse(text_of(script)).body
        if isinstance(n, ast.ClassDef) and n.name == "Args"
    )
    for field, text in zip(args.body[::2], args.body[1::2], strict=True):
        assert (
            isinstance(field, ast.AnnAssign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value.value, str)
        )


def test_sizes():
    """A script is read in one sitting, and a method is a small diff."""
    assert len(text_of("d1").splitlines()) <= 530
    assert max(map(added_lines, ("coupled_grpo", "bgpo", "cj_grpo"))) <= 60
    assert added_lines("spg") <= 80
    assert added_lines("mdpo") <= 100
    assert len(text_of("sft").splitlines()) <= 410 and len(text_of("vrpo").splitlines()) <= 480


def test_the_table_in_the_readme_is_up_to_date():
    text = (ROOT / "README.md").read_text()
    assert readme_with_table(text) == text, "run python tests/readme_table.py"


def test_no_module_shadows_the_standard_library_or_a_dependency():
    import sys

    taken = set(sys.stdlib_module_names) | {
        "torch",
        "transformers",
        "datasets",
        "tokenizers",
        "peft",
        "wandb",
        "tyro",
        "tqdm",
    }
    names = {path.stem for folder in [*SERVICES, "algos"] for path in (ROOT / folder).glob("*.py")}
    assert not names & taken


def test_importing_a_script_has_no_effect():
    state = torch.random.get_rng_state()
    for script in [*ONLINE, "sft", "vrpo"]:
        importlib.import_module(f"algos.{script}")
    assert (
        torch.equal(state, torch.random.get_rng_state()) and not torch.distributed.is_initialized()
    )
