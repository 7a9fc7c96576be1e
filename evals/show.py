"""Watch a model denoise in the terminal: one frame per denoising step.

    python evals/show.py --model tiny-sdar --task countdown --index 3   a problem of its test split
    python evals/show.py --model tiny-llada --prompt " 7 12  8 =   3"

A masked position is one ░, bars separate blocks, and tokens revealed in this step are in brackets.
Where tokens are revised (rcr, editing) every version is shown. Frames come from the Trace only,
whichever engine made it. The last lines are the completion as text and, with --task, whether it is
right. Sampling flags left out take the values of evals/decoding.py.
"""

import math
import signal
import sys
import time
from dataclasses import dataclass

import tyro

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from distributed.groups import own_device
from evals import decoding, load_examples, load_task
from evals.examples import user
from models import load_tokenizer, prompt_ids
from rollout import make_engine

CLEAR = "\x1b[2J\x1b[H"  # an empty terminal
DELAY = 0.4  # seconds between frames, on a terminal only


@dataclass
class Args(decoding.SamplerFlags):
    model: str = "tiny-sdar"
    """key of models.MODELS, or a directory in HF layout"""
    prompt: str = ""
    """a user message, formatted by the chat template. The tiny models only know countdown: --task
    """
    task: str = ""
    """instead of --prompt: a problem of this task of evals/"""
    index: int = 0
    """which problem of the task's test split"""


def printable(text, keep=""):
    """Escapes control and format characters, and every separator but the space."""
    escaped = lambda character: character.encode("unicode_escape").decode()
    return "".join(c if c.isprintable() or c in keep else escaped(c) for c in text)


def frames(trace, i, spell, mask_token_id):
    """Yields completion i after each denoising step: a header, and a line of all positions.

    spell(token id) -> printable text
    """
    block, changes, known = trace.blocks[i].tolist(), {}, {}  # position: (token, probability)
    tokens, logps = (trace.records[name][i].tolist() for name in ("tokens", "logps"))
    for step, j in (trace.records["tokens"][i] >= 0).nonzero().tolist():
        # blocks are decoded in turn; a replay of a block model has a step of all of them
        changes.setdefault((block[j], step), {})[j] = (
            tokens[step][j],
            min(math.exp(logps[step][j]), 1.0),
        )
    length = int(trace.canvas_length[i])
    for now, moment in enumerate(sorted(changes), 1):
        changed, line = changes[moment], ""
        known = {j: new for j, new in (known | changed).items() if new[0] != mask_token_id}
        for j in range(length):
            text = spell(known[j][0]) if j in known else "░"
            text = f"[{text}]" if j in known and j in changed else text
            line += "│" * (j == 0 or block[j] != block[j - 1]) + text
        header = f"step {now}/{len(changes)}  tokens {len(known)}/{length}"
        if new := [known[j][1] for j in changed if j in known]:
            header += f"  {len(new)} new, probability {min(new):.2f} to {max(new):.2f}"
        yield header, line


def play(trace, tokenizer, mask_token_id):
    """Prints the prompt, the frames (in place on a terminal), tokens per forward, and the text."""
    in_place = sys.stdout.isatty()
    spell = lambda token_id: printable(tokenizer.decode([token_id])) or f"<{token_id}>"
    prompt = printable(tokenizer.decode(trace.prompt_ids[0]), keep="\n\t")
    print(prompt, end="\n\n")
    for frame in frames(trace, 0, spell, mask_token_id):
        if in_place:
            time.sleep(DELAY)
            print(CLEAR + prompt, end="\n\n")
        print(*frame, sep="\n", end="\n\n", flush=True)
    scored, forwards = int(trace.completion_mask[0].sum()), int(trace.num_forwards[0])
    print(f"{scored} tokens in {forwards} forwards: {scored / forwards:.2f} tokens per forward")
    print(printable(trace.text(0, tokenizer), keep="\n\t"))


def main(args):
    if bool(args.prompt) == bool(args.task):
        raise SystemExit("give either --prompt or --task")
    example, messages = {}, user(args.prompt)
    if args.task:
        task = load_task(args.task)
        examples = load_examples(task, "test", "")
        if args.index >= len(examples):
            raise SystemExit(f"--index {args.index}: {args.task} has {len(examples)}, from 0")
        example = examples[args.index]
        messages = task.prompt(example)
    tokenizer, engine = load_tokenizer(args.model), make_engine(args.model, device=own_device())
    style = example.get("style", "")
    settings, _ = decoding.chosen(args, engine.model, args.task, style)
    print(engine.validate(**settings), end="\n\n")
    trace = engine.generate([prompt_ids(tokenizer, messages)], records="events", **settings)
    play(trace, tokenizer, engine.model.mask_token_id)
    if args.task:
        print("right" if task.score(trace.text(0, tokenizer), example) == 1 else "wrong")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    main(tyro.cli(Args, description="Watch a model denoise a completion, step by step."))
