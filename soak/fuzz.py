"""Fuzzing: files and flags that no one meant to write, drawn by hypothesis.

    python soak/fuzz.py [WORD ...]    all checks, or those whose name has one of the words

Whatever a file holds and whatever a flag says, a command works or ends in one line that says why.
No case may end in a traceback or take longer than LIMIT. NaN, infinite and negative numbers are
refused. Hypothesis is no requirement of the project: pip install hypothesis
"""

import atexit
import csv
import importlib
import io
import json
import math
import multiprocessing
import os
import resource
import runpy
import shutil
import signal
import struct
import sys
import traceback
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

try:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
except ModuleNotFoundError:
    raise SystemExit("soak/fuzz.py needs hypothesis: pip install hypothesis") from None

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import conftest
import pyarrow.parquet
import table
import torch
from golden_runs import load_few_problems
from sync_shared import METHODS

from data import preferences, sft
from evals import load_problems, load_task, samples, score_all
from models import (
    add_lora,
    checkpoint,
    load_model,
    load_tokenizer,
    meta_model,
    prompt_ids,
    save_adapter,
    save_model,
)
from rollout import make_engine
from run import log as runlog

LIMIT, WAIT = 30, 600  # seconds of a case: of work, and on the clock of a busy machine
MEMORY = 8 << 30  # bytes of a case
FAMILIES = "sdar", "sdar-moe", "llada2", "llada", "dream", "llada-moe"

# --- the law --------------------------------------------------------------------------------------


def child(pipe, out, body, arguments):
    os.setsid()  # so that it can be killed with all that it started
    atexit._clear()  # of the parent
    for descriptor in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        body(*arguments)
        said = None
    except SystemExit as error:
        said = error.code
    except BaseException:
        said = ["Traceback", traceback.format_exc()]
    try:
        atexit._run_exitfuncs()
    except BaseException:
        said = ["Traceback at exit", traceback.format_exc()]
    sys.stderr.flush()
    pipe.send(said)


def end_of(folder, body, *arguments):
    """Calls body(*arguments) in a fork. -> None if it works, else the line of its SystemExit, or 2,
    of the parser of flags. AssertionError if it ends in anything else.
    """
    fork, (out, said) = multiprocessing.get_context("fork"), (folder / "output", None)
    out.unlink(missing_ok=True)
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=child, args=(there, out, body, arguments))
    process.start()
    there.close()
    is_done = here.poll(WAIT)
    if is_done:
        try:
            said = here.recv()
        except EOFError:
            process.join()
            said = [f"died: {process.exitcode}", out.read_text(errors="replace")[-2000:]]
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    text = out.read_text(errors="replace")
    assert is_done, f"no end in {WAIT} s\n{text[-2000:]}"
    assert not isinstance(said, list), "\n".join(said)
    assert "Traceback" not in text, text[-3000:]
    if said not in (None, 2):
        assert isinstance(said, str) and said.strip() and "\n" not in said.strip(), repr(said)
    return said


def fuzz(folder, strategy, body, count):
    """Draws `count` cases for body(folder, case) -> None, or words that it should have ended with.
    A generator for table.run.
    """
    tried = []

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(strategy)
    def check(case):
        tried.append(case)
        body(folder, case)

    check()
    yield from tried


# --- values, and JSON with one thing changed ------------------------------------------------------

TEXTS = *'x nan 0 -1 1e999 README.md / .. ä <|MASK|> [[1]] {} {"a":1 True ٣'.split(), "", " "
TEXTS += "a\nb", "\x00", "\ud800", "x" * 5000, "9" * 5000
SCALARS = None, True, False, 0, 1, -1, 7, 2**31, 2**70, 0.5, -0.5, 1e300, math.nan, math.inf
junk = st.recursive(
    st.sampled_from(SCALARS + TEXTS) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=4,
)


def places(value, place=()):
    """Where a JSON value can be changed: the paths of all its parts."""
    yield place
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(part, (*place, key))


def changed(value, place, new):
    """value with `new` at a place; dropped if new is Ellipsis."""
    if not place:
        return {} if new is ... else new
    copy, (key, *rest) = value.copy(), place
    if rest or new is not ...:
        copy[key] = changed(value[key], rest, new)
    else:
        del copy[key]
    return copy


@st.composite
def near(draw, value):
    """A list or an object with one to three parts replaced or dropped."""
    for _ in range(draw(st.integers(1, 3))):
        if not value:
            break
        place = draw(st.sampled_from([*places(value)][1:]))
        value = changed(value, place, draw(st.just(...) | junk | junk.map(lambda new: [new])))
    return value


@st.composite
def damaged(draw, raw):
    """The bytes with a piece dropped, doubled or replaced."""
    first = draw(st.integers(0, len(raw)))
    last = min(len(raw), first + draw(st.sampled_from([0, 1, 2, 8, 100, len(raw)])))
    new = draw(st.binary(max_size=9) | st.sampled_from([raw[first:last] * 2, b"[" * 10**5]))
    return raw[:first] + new + raw[last:]


# --- rows -----------------------------------------------------------------------------------------


def known_rows():
    """-> {task: rows that it reads}, of the tests"""
    rows = {}
    for line in (ROOT / "tests/golden/evals.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        if "row" in case and case["loaded"]:
            rows.setdefault(case["task"], []).append(case["row"])
    return rows


TURNS = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
CHATS = [{"messages": TURNS}, {"prompt": "1 + 1?", "response": "2"}]
CHATS.append({"prompt": TURNS[:1], "response": "2"})
PAIRS = [{"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}]
PAIRS.append({"chosen": TURNS, "rejected": [TURNS[0], TURNS[1] | {"content": "3"}]})
SAMPLES = [{"index": 0, "prompt": TURNS[:1], "completion": "2", "score": 1.0}]
SAMPLES.append(SAMPLES[0] | {"completion": "3", "score": 0.0})


def as_jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_csv(columns):
    text, cell = io.StringIO(), lambda value: value if isinstance(value, str) else json.dumps(value)
    rows = ([*map(cell, row)] for row in zip(*columns.values(), strict=True))
    csv.writer(text).writerows([columns, *rows])
    return text.getvalue().encode(errors="surrogatepass")


def as_parquet(columns):
    """A column that parquet cannot hold becomes one of bytes."""
    for name, values in columns.items():
        try:
            parquet_of({name: values})
        except Exception:
            columns[name] = [json.dumps(value).encode() for value in values]
    return parquet_of(columns)


def parquet_of(columns):
    raw = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), raw)
    return raw.getvalue()


@st.composite
def files(draw, rows, endings=(".jsonl", ".csv", ".parquet")):
    """-> ending and bytes of a file of one row or both, not as they should be; of none in a tenth
    of those with columns"""
    ending = draw(st.sampled_from(endings))
    rows = draw(near([draw(st.sampled_from(rows)), draw(st.sampled_from(rows))]))
    if ending == ".jsonl":
        raw = as_jsonl(rows)
    else:
        first = draw(st.sampled_from([0] * 9 + [2]))
        rows = [row for row in rows if isinstance(row, dict)]
        columns = {key: [row.get(key) for row in rows[first:]] for row in rows for key in row}
        raw = (as_csv if ending == ".csv" else as_parquet)(columns)
    return ending, draw(damaged(raw)) if draw(st.booleans()) else raw


def written(folder, case):
    ending, raw = case
    path = folder / f"rows{ending}"
    path.write_bytes(raw)
    return str(path)


COUNTDOWN, TOKENIZER = load_task("countdown"), load_tokenizer("tiny-sdar")
MODEL = meta_model("tiny-sdar")


def read_task(name, path):
    task = load_task(name)
    problems, _ = load_problems(task, "test", path, TOKENIZER, 10**6)
    examples = [example for example, _ in problems]
    if not hasattr(task, "score_batch"):  # those run programs: soak/sandbox.py
        score_all(task, ["\\boxed{7}"] * len(examples), examples)
        if hasattr(task, "answer"):
            sft.encode(sft.gold_answers(task, path), TOKENIZER, MODEL, 10**6)
    given = Path(f"{path}.given")
    given.write_text('{"index": 0, "completion": "7"}')
    samples.given(task, examples, given)


def read_sft(path):
    print(sft.encode(sft.training_rows(COUNTDOWN, path), TOKENIZER, MODEL, 64).report("rows"))


def read_pairs(path):
    pairs = preferences.training_pairs(COUNTDOWN, path, score_all)
    print(preferences.encode_pairs(pairs, TOKENIZER, MODEL, 64).at_least(1).report("pairs"))


def read_samples(path):
    command("data/preferences.py", "--samples", path, "--out", f"{path}.pairs")


def read_completions(path):
    examples = COUNTDOWN.load("test", "", 2)
    rows, _ = samples.given(COUNTDOWN, examples, path)
    samples.scored(COUNTDOWN, rows, examples)


def rows_check(folder, reader, rows, count, *endings):
    body = lambda folder, case: end_of(folder, reader, written(folder, case))
    yield from fuzz(folder, files(rows, *endings), body, count)


# --- directories of models, adapters and runs -----------------------------------------------------


def command(script, *flags):
    sys.argv = [script, *map(str, flags)]
    runpy.run_path(str(ROOT / script), run_name="__main__")


def copy_of(source, folder, file, raw):
    """A copy of a directory in which one file has other bytes (None: is missing)."""
    target = folder / "copy"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
    (target / file).unlink()
    if raw is not None:
        (target / file).write_bytes(raw)
    return target


@st.composite
def header(draw, raw):
    """A .safetensors file with something changed in its header, or anywhere."""
    length = struct.unpack("<Q", raw[:8])[0]
    held = json.loads(raw[8 : 8 + length])
    names = draw(st.lists(st.sampled_from(sorted(held)), min_size=1, max_size=2))
    new = held | draw(near({name: held[name] for name in names}))  # not of its hundred tensors
    text = json.dumps(new).encode()
    size = draw(st.sampled_from([len(text)] * 9 + [0, 1, 2**40, 2**63]))
    return struct.pack("<Q", size) + text + raw[8 + length :]


@st.composite
def changes(draw, source, names):
    """-> a file of the directory, and other bytes for it"""
    file = draw(st.sampled_from(names))
    raw = (source / file).read_bytes()
    kinds = [damaged(raw)] * 2 + [st.sampled_from([None, b"", b"null", b"[]", b"{}", b"\xff"])]
    if file.endswith(".json"):
        kinds += [near(json.loads(raw)).map(lambda value: json.dumps(value).encode())] * 5
    if file.endswith(".jsonl"):
        lines = [json.loads(line) for line in raw.splitlines()]
        kinds += [near(lines).map(as_jsonl)] * 5
    if file.endswith(".safetensors"):
        kinds += [header(raw)] * 3
    return file, draw(st.one_of(kinds))


def answer(directory):
    """All that a command does with a --model, in little: a rollout."""
    tokenizer, engine = load_tokenizer(directory), make_engine(str(directory))
    n, ids = engine.model.block_length, prompt_ids(tokenizer, TURNS[:1])
    engine.generate([ids], gen_length=n, denoising_steps=1, temperature=1.0)


def directories(folder, source, reader, names, count):
    said = end_of(folder, reader, source)
    assert said is None, f"the whole directory is refused: {said}"
    draws = changes(source, names)
    check = lambda folder, case: end_of(folder, reader, copy_of(source, folder, *case))
    yield from fuzz(folder, draws, check, count)


def model_check(folder, save, pattern, often, count):
    """The files of a pattern, one of them more often."""
    source = folder / "model"
    assert end_of(folder, save, source) is None
    names = [often] * 3 + [path.name for path in source.glob(pattern)]
    yield from directories(folder, source, answer, names, count)


def save_one(family, size, directory):
    checkpoint.SHARD_BYTES, name = size, f"tiny-{family}"
    save_model(load_model(name), directory, load_tokenizer(name))


def save_adapted(directory):
    model = add_lora(load_model("tiny-sdar"), 2, 4)
    save_adapter(model, directory, str(ROOT / "models/tiny-sdar"), TOKENIZER)


def evaluation_check(folder, count):
    source, script = folder / "evaluation", "evals/countdown.py"
    flags = "--model tiny-sdar --limit 2 --gen-length 4 --out".split()
    assert end_of(folder, train, script, *flags, source) is None
    names = [path.name for path in source.iterdir() if path.suffix != ".html"]
    reader = lambda directory: train(script, "--resume", directory)
    yield from directories(folder, source, reader, names + ["samples.jsonl"] * 3, count)


def resume_check(folder, script, flags, count):
    """Any file of a run directory, compared and resumed. Half of the saves are of a version without
    checksums, so that what is behind them is reached.
    """
    first = f"algos/{script}.py", *flags.split(), "--out", folder / "runs"
    assert end_of(folder, train, *first) is None, (folder / "output").read_text()
    (source,) = (folder / "runs").iterdir()
    state = "resume/step-000002"
    held = [path for path in (source / state).rglob("*") if path.is_file()]
    names = sorted(str(path.relative_to(source)) for path in held)
    names += ["samples.jsonl", *["config.json", "metrics.jsonl", f"{state}/facts.json"] * 2]
    draws = st.tuples(changes(source, names), st.booleans(), st.booleans())

    def check(folder, case):
        change, has_checksums, is_renewed = case
        target = copy_of(source, folder, *change)
        sums = target / state / "checksums.json"
        if sums.is_file() and not has_checksums:
            sums.unlink()
        elif is_renewed and change[0].startswith(state) and sums.name not in change[0]:
            known, name = json.loads(sums.read_text()), change[0].removeprefix(f"{state}/")
            if name in known and change[1] is not None:
                sums.write_text(json.dumps(known | {name: zlib.crc32(change[1])}))
        end_of(folder, command, "compare.py", target, "--out", folder / "compare.png")
        end_of(folder, train, f"algos/{script}.py", "--resume", target, "--max-steps", 3)

    yield from fuzz(folder, draws, check, count)


def train(script, *flags):
    load_few_problems()
    command(script, *flags)


# --- flags ----------------------------------------------------------------------------------------

NUMBERS = "0 1 2 3 7 -1 0.5 1.5 1e-30 1e30 nan inf -inf 1e999 -0.0 x".split()
NUMBERS += ["", str(2**40), str(10**30)]
NAMES = "x . / nan README.md runlog.py x.py none.jsonl a/b tiny-llada tiny-dream countdown sudoku"
NAMES = [*f"{NAMES} small x.py:f @ =".split(), "", "x" * 5000]
# flags that may be infinite or negative
MAY = dict.fromkeys(("max_grad_norm", "epsilon"), (["inf"], ["1e999"]))
SMALL = """max_steps=1 eval_limit=1 prompts_per_step=2 num_generations=2 gen_length=4
num_iterations=1 mc_num=2 batch_size=2 branches=2 limit=2 prompt=7 model=tiny-sdar tasks=countdown
repeats=1 max_length=64"""
SMALL = dict(pair.split("=") for pair in SMALL.split())


def values_of(kind):
    """-> strategy of the words behind a flag of this type"""
    if get_origin(kind) is Literal:
        return st.sampled_from([*map(str, get_args(kind)), "x", "", "0"]).map(lambda word: [word])
    if get_origin(kind) in (tuple, list):
        return st.lists(
            st.sampled_from(NUMBERS if str not in get_args(kind) else NAMES), max_size=3
        )
    is_text = kind is str or str in get_args(kind)
    return st.sampled_from(NAMES if is_text else NUMBERS).map(lambda word: [word])


@st.composite
def flags(draw, kinds, names):
    """kinds: {field: type} -> {field: words, or bool} of one or two flags of these names"""
    names, chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)), {}
    for name in names:
        chosen[name] = draw(st.booleans() if kinds[name] is bool else values_of(kinds[name]))
    return chosen


def line_of(chosen):
    words = []
    for name, values in chosen.items():
        words.append(f"--{'no-' * (values is False)}{name.replace('_', '-')}")
        words += [] if isinstance(values, bool) else map(str, values)
    return words


def must_refuse(name, kind, words):
    """Whether some number is NaN, infinite or negative."""
    if not {kind, *get_args(kind)} & {int, float} or words in MAY.get(name, ()):
        return False
    for word in words:
        with suppress(ValueError):
            if not 0 <= float(word) < math.inf:
                return True
    return False


def arguments_of(script):
    """-> the dataclass of a script's flags"""
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    if script == "evals/run.py":
        return module.ManyArgs
    return getattr(module, "Args", None) or importlib.import_module("evals.run").Args


def run_flags(folder, script, kinds, chosen):
    out = folder / "runs"
    shutil.rmtree(out, ignore_errors=True)
    base = {name: [value] for name, value in SMALL.items() if name in kinds}
    if script.startswith("algos/"):
        base["model"] = [f"tiny-{METHODS[Path(script).stem]['families'][0]}"]
    if "out" in kinds:
        base["out"] = [out]
    if "samples" in kinds:
        base |= {"samples": [folder / "samples.jsonl"], "out": [out / "pairs.jsonl"]}
        (folder / "samples.jsonl").write_bytes(as_jsonl(SAMPLES))
    said = end_of(folder, quiet, folder, script, *line_of(base | chosen))
    wrong = [name for name, words in chosen.items() if must_refuse(name, kinds[name], words)]
    assert said is not None or not wrong, f"{script} {chosen} is taken"
    for path in out.glob("*/metrics.jsonl") if said is None else ():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert not any(None in row.values() for row in rows), f"{script} {chosen}: {rows}"
    return said


def quiet(folder, script, *flags):
    """A command, without figures and the planning of thousands of prompts, in an empty folder."""
    runlog.RunLog.plot = lambda self: None
    (folder / "cwd").mkdir(exist_ok=True)
    os.chdir(folder / "cwd")
    train(script, *flags)


def flags_check(folder, script, count):
    kinds = get_type_hints(arguments_of(script))
    said = run_flags(folder, script, kinds, {})
    assert said is None, f"{script} is refused: {said}"
    names = [name for name in kinds if name != "track"]
    body = lambda folder, chosen: run_flags(folder, script, kinds, chosen)
    yield from fuzz(folder, flags(kinds, names), body, count)


SHORT = "--max-steps 2 --save-every 1 --eval-limit 0 --prompts-per-step 2 --num-generations 2 "
SCRIPTS = [f"algos/{script}.py" for script in METHODS]
SCRIPTS += ["evals/countdown.py", "evals/run.py", "evals/show.py", "data/preferences.py"]
CONFIG, INDEX, JSONL = "config.json", "model.safetensors.index.json", [".jsonl"]
CHECKS = [
    ("rows: chats, sft", rows_check, read_sft, CHATS, 200),
    ("rows: pairs, vrpo", rows_check, read_pairs, PAIRS, 200),
    ("rows: samples, preferences", rows_check, read_samples, SAMPLES, 200, JSONL),
    ("rows: completions", rows_check, read_completions, SAMPLES, 200, JSONL),
    *(
        (f"rows: {task}", rows_check, partial(read_task, task), rows, 60)
        for task, rows in known_rows().items()
    ),
    *(
        (f"model: {family}", model_check, partial(save_one, family, 1 << 40), "*", CONFIG, 100)
        for family in FAMILIES
    ),
    ("model: shards", model_check, partial(save_one, "sdar", 1 << 20), "model*", INDEX, 100),
    ("adapter", model_check, save_adapted, "adapter*", "adapter_config.json", 200),
    ("evaluation", evaluation_check, 100),
    ("run: bgpo", resume_check, "bgpo", SHORT + "--mc-num 2", 100),
    ("run: bgpo, LoRA", resume_check, "bgpo", SHORT + "--mc-num 2 --lora-rank 2", 60),
    *((f"flags: {script}", flags_check, script, 80) for script in SCRIPTS),
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    conftest.warm_up()
    sys.exit(table.run(CHECKS))
