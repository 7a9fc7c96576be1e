"""Benchmarks, one file each: load, prompt, score. This file finds them and scores a model during
training."""

import math
import re
from collections import Counter
from functools import partial
from importlib import import_module
from itertools import repeat
from numbers import Real
from pathlib import Path

import torch.distributed as dist

from data.planning import split_of
from distributed.groups import gather
from evals.math_grader import MAX_LENGTH, MAX_TEXT, boxes
from evals.own import SECONDS, guarded, load_file
from evals.sandbox import in_threads
from models import is_tiny, prompt_ids
from rollout.traces import Completion

# scored once at the start of a command, so that a sandbox that does not work stops it before any
# work is done
TRIAL = Completion("```python\npass\n```", 1, False, 1)
KEPT = 32  # answers to held-out problems that a run keeps for its report

TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
OTHER_BOX = re.compile(r"(?:(?<![\\\w])boxed|\\fbox)\s*\{")
# a label in front of an answer, colour and size
DECORATION = re.compile(r"\\(?:text\{[^{}]*: *\}|color\{\w+\}|displaystyle\b|[lL]arge\b)")
WORDS = re.compile(
    r"\\(?:(?:text|math)(?:bf|it|rm|sf|tt|sc|normal)?|[hm]box|emph|bm|boldsymbol|underline)\{([^{}]*)\}"
)
PLACEHOLDER = re.compile(r"[\s.…]*|\\[lc]?dots|.*\\boxed\b.*", re.DOTALL)  # copied from a prompt
WRAPPED = re.compile(
    r"(\$\$?|\*\*|`{1,3})(?:(?<=```)\w+\n)?((?:(?!\1).)+)\1|\\[(\[]((?:(?!\\[)\]]).)+)\\[)\]]",
    re.DOTALL,
)
OPERATORS = str.maketrans(
    {"×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "−": "-"}
)


def load_task(name, instead=None):
    """--task NAME -> the module evals/NAME.py; or, for a path that ends in .py, that file as a
    module, which needs the functions of one. Its NAME is the file's, without the folder and .py.
    instead: see evals/own.py.

    SystemExit lists the tasks if it is unknown, or says what the file lacks.
    """
    if name.endswith(".py"):
        task = load_file(name, needed := ["load", "prompt", "extract", "score"])
        for part in vars(task).keys() & {*needed, "score_batch", "answer"}:
            limits = (SECONDS, instead) if part == "score" else ()
            setattr(task, part, guarded(name, getattr(task, part), *limits))
    else:
        files = Path(__file__).parent.glob("*.py")
        is_task = lambda file: "\n    import command" in file.read_text(encoding="utf-8")
        if name not in (tasks := sorted(file.stem for file in files if is_task(file))):
            raise SystemExit(f"unknown task {name!r}: use one of {', '.join(tasks)}")
        module = import_module(f"evals.{name}")
        task = getattr(module, "task", module)
    task.NAME, task.PRESETS = Path(name).stem, getattr(task, "PRESETS", ())
    return task


def load_examples(task, split, data, limit, divided=False):
    """`load` of a task; SystemExit if there are no examples. divided: the problems of `split` among
    those to train on, a tenth each for validation and test. Equal prompts are in one split."""
    examples = task.load("train" if divided else split, data, None if divided else limit)
    if divided:
        examples = [one for one in examples if split_of(task.prompt(one)) == split][:limit]
    if not examples:
        raise SystemExit(f"{data or task.NAME}: no problems in it for {split}")
    return examples


def load_problems(task, split, data, tokenizer, max_prompt_length, limit=None, divided=False):
    """-> [(example, prompt ids)] of load_examples, number of problems dropped because their prompt
    is too long.

    SystemExit if no problem is left, if a prompt is no list of messages, or if prompts without
    words are for a model that is not tiny.
    """
    examples = load_examples(task, split, data, limit, divided)
    if examples[0].get("style") == "compact" and not is_tiny(tokenizer.name_or_path):
        raise SystemExit(
            f"{data or 'default'}: prompts without words, for tiny models; "
            "for others countdown has cd3, sudoku sudoku4-tags"
        )
    if not isinstance(prompt := task.prompt(examples[0]), list | tuple):
        raise SystemExit(f"prompt(example) gives {prompt!r:.60}, not a list of messages")
    problems = [(example, prompt_ids(tokenizer, task.prompt(example))) for example in examples]
    kept = [problem for problem in problems if len(problem[1]) <= max_prompt_length]
    if not kept:
        flag = f"--max-prompt-length (or --max-length) {max_prompt_length}"
        raise SystemExit(f"{flag}: the shortest prompt has {min(len(ids) for _, ids in problems)}")
    return kept, len(problems) - len(kept)


def load_splits(task, data, eval_data, tokenizer, max_prompt_length, eval_limit):
    """-> {split: problems}, {split: number dropped}, both as of load_problems

    data: to train on; None: nothing. eval_data: for validation and test; "": splits of data; a file
    is divided. Of a split other than train at most eval_limit problems are loaded; if that is 0,
    the split is left out.
    """
    problems, dropped, own = {}, {}, data or ""
    divided = bool(eval_limit and not eval_data and Path(own.partition("@")[0]).is_file())
    for split, source in {"train": data, "validation": eval_data, "test": eval_data}.items():
        limit = None if split == "train" else eval_limit
        if source is not None and limit != 0:
            where = source or own, tokenizer, max_prompt_length, limit, divided
            problems[split], dropped[split] = load_problems(task, split, *where)
    return problems, dropped


def score_all(task, completions, examples):
    """-> [score], on all cores: by the task's own score_batch if it has one. SystemExit unless each
    is a number in [0, 1], up to rounding.
    """
    judge = getattr(task, "score_batch", None) or partial(in_threads, task.score)
    scores = [*judge(completions, examples)]
    valid = [score for score in scores if isinstance(score, Real) and -1e-6 <= score <= 1 + 1e-6]
    if not len(valid) == len(scores) == len(completions):
        needed = f"{len(completions)} numbers in [0, 1] are needed as scores"
        raise SystemExit(f"--task {task.NAME}: {needed}, not {scores!r:.200}")
    return [*map(float, scores)]


def mean_score(engine, task, tokenizer, problems, name, **settings):
    """Score one completion per problem; the ranks of a run share the problems. -> {name/task: mean
    exact score, and as of `standard_error` error/name, problems/name}, this rank's first KEPT
    completions as of Trace.describe

    problems: from load_problems; settings: for engine.generate.
    """
    share = math.ceil(len(problems) / dist.get_world_size())
    first = dist.get_rank() * share
    found, kept = [], []
    if mine := problems[first : first + share]:
        examples, prompts = zip(*mine, strict=True)
        trace = engine.generate(list(prompts), sample_offset=first, **settings)
        if engine.held is None:  # otherwise the next rollout makes room before the next update
            engine.release()
        found = score_all(task, trace.texts(tokenizer), examples)
        kept = [*map(trace.describe, range(KEPT), repeat(tokenizer), found, examples)]
    scores = sum(gather(found), [])
    error, distinct = standard_error(task, [one for one, _ in problems], scores)
    mean = {f"{name}/{task.NAME}": sum(scores) / len(scores)}
    return mean | {f"error/{name}": error, f"problems/{name}": distinct}, kept


def standard_error(task, examples, scores):
    """-> standard error of the mean score, number of distinct problems. Several answers to one
    problem are not independent: their deviations from the mean are summed before they are squared.

    Problems with the same prompt are one, or with the same `asks` of the task: countdown asks for a
    target with the same numbers in every order.
    """
    sums, mean = Counter(), sum(scores) / len(scores)
    asks = getattr(task, "asks", task.prompt)
    for example, score in zip(examples, scores, strict=True):
        sums[repr(asks(example))] += score - mean
    return math.hypot(*sums.values()) / len(scores), len(sums)


def tagged_answer(completion):
    """Stripped content of the last complete <answer>...</answer>; None if there is none."""
    found = TAGGED.findall(completion)
    return found[-1].strip() if found else None


def final_answer(completion):
    r"""The answer of a completion, without what models wrap it in; None if there is none.

    It is the last box in the last answer tag, or what is in that tag if it has no box, or the last
    box of all, of the last MAX_TEXT characters. The prompt's own \boxed{} and "...", and answers
    that are too long, are not looked at. A box may also be written boxed{ or \fbox{, or be ended by
    a line end, $, < or > instead of its bracket; one at the end of a completion may be cut off and
    does not count.
    """
    text = DECORATION.sub("", OTHER_BOX.sub(r"\\boxed{", completion[-MAX_TEXT:]))
    tagged = tagged_answer(text) or ""
    answers = [*boxes(text, unclosed=True), tagged, *boxes(tagged)]
    answers = (unwrapped(answer.partition("</")[0]) for answer in reversed(answers))
    is_good = lambda text: len(text) <= MAX_LENGTH and not PLACEHOLDER.fullmatch(text)
    return next(filter(is_good, answers), None)


def unwrapped(answer):
    r"""An answer without $...$, \(...\), \[...\], **...** and `...` around it, and with ×, ÷, · and
    − as LaTeX."""
    answer = answer.translate(OPERATORS).strip()
    while wrapped := WRAPPED.fullmatch(answer):
        answer = (wrapped[2] or wrapped[3]).strip()
    return answer
