"""Watch a model denoise in the terminal: one frame per denoising step.

    python evals/show.py --model tiny-sdar --task countdown --index 3   a problem of its test split
    python evals/show.py --model tiny-llada --prompt " 7 12  8 =   3"
    python evals/show.py --model tiny-sdar --prompt "..." --colour | less -R

A masked position is one ░, bars separate blocks. Tokens revealed in this step are inverted (without
colour: [in brackets]). The colour is the probability that a token had when it was revealed; tokens
after the first EOS are dim. Where tokens are revised (rcr, editing) every version is shown. Frames
come from the Trace only, whichever engine made it. The last lines are the completion as text and,
with --task, whether it is right.
"""

import math
import os
import signal
import sys
import time
from dataclasses import dataclass

import torch
import tyro

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from evals import decoding, load_task
from evals.examples import user
from models import load_tokenizer, prompt_ids
from models.config import architecture
from rollout import make_engine
from run.flags import check_numbers

# red to green for equal sixths of 0..1; legible on dark and light backgrounds
PROBABILITY = (160, 166, 172, 142, 106, 34)
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
    colour: bool = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    """on by default on a terminal, unless NO_COLOR is set"""


def printable(text, keep=""):
    """Escapes control and format characters, and every separator but the space."""
    escaped = lambda character: character.encode("unicode_escape").decode()
    return "".join(c if c.isprintable() or c in keep else escaped(c) for c in text)


def changes_of(trace, i):
    """-> one dict per step of completion i, {position: (token id, probability when it was drawn)};
    the block of each position"""
    block, events, changes = trace.blocks(i), trace.records["events"], {}
    mine = events[:, 0] == trace.sample_index[i]
    columns = *events[mine].T[1:].tolist(), trace.records["logps"][mine].tolist()
    for step, j, token_id, logp in zip(*columns, strict=True):
        # blocks are decoded in turn; a replay of a block model has a step of all of them
        step_changes = changes.setdefault((block[j], step), {})
        step_changes[j] = token_id, min(math.exp(logp), 1.0)
    return [changes[step] for step in sorted(changes)], block


def frames(trace, i, spell, mask_token_id, colour=False):
    """Yields completion i after each denoising step: a header, and a line of all positions.

    spell(token id) -> printable text
    """
    changes, block = changes_of(trace, i)
    length, scored = int(trace.canvas_length[i]), trace.completion_mask[i].tolist()
    known = {}  # position: (token id, probability)
    for now, changed in enumerate(changes):
        known = {j: new for j, new in (known | changed).items() if new[0] != mask_token_id}
        line = ""
        for j in range(length):
            text = spell(known[j][0]) if j in known else "░"
            if j in known and colour:
                hue = PROBABILITY[min(int(known[j][1] * 6), 5)]
                style = "7" if j in changed else "22" if scored[j] else "2"
                text = f"\x1b[38;5;{hue};{style}m{text}\x1b[0m"
            elif j in known and j in changed:
                text = f"[{text}]"
            line += "│" * (j == 0 or block[j] != block[j - 1]) + text
        header = f"step {now + 1}/{len(changes)}  tokens {len(known)}/{length}"
        if new := [known[j][1] for j in changed if j in known]:
            header += f"  {len(new)} new, probability {min(new):.2f} to {max(new):.2f}"
        yield header, line


def play(trace, i, tokenizer, mask_token_id, delay=0.0, colour=False):
    """Prints the prompt, the frames (in place on a terminal), tokens per forward, and the text."""
    in_place = sys.stdout.isatty()
    spell = lambda token_id: printable(tokenizer.decode([token_id])) or f"<{token_id}>"
    prompt = printable(tokenizer.decode(trace.prompt_ids[i]), keep="\n\t")
    print(prompt, end="\n\n")
    for frame in frames(trace, i, spell, mask_token_id, colour):
        if in_place:
            print(CLEAR + prompt, end="\n\n")
        print(*frame, sep="\n", end="\n\n", flush=True)
        time.sleep(delay * in_place)
    scored, forwards = int(trace.completion_mask[i].sum()), int(trace.num_forwards[i])
    print(f"{scored} tokens in {forwards} forwards: {scored / forwards:.2f} tokens per forward")
    print(printable(trace.text(i, tokenizer), keep="\n\t"))


def main(args):
    check_numbers(args)
    if bool(args.prompt) == bool(args.task):
        raise SystemExit("give either --prompt or --task")
    example, messages = {}, user(args.prompt)
    if args.task:
        task = load_task(args.task)
        examples = task.load("test")
        if not 0 <= args.index < len(examples):
            raise SystemExit(f"--index {args.index}: {args.task} has {len(examples)}, from 0")
        example = examples[args.index]
        messages = task.prompt(example)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, engine = load_tokenizer(args.model), make_engine(args.model, device=device)
    model_type, style = architecture(engine.model.checkpoint_config), example.get("style", "")
    known = decoding.settings(args.model, model_type, args.task, style)
    settings = decoding.chosen(args, known)
    print(engine.validate(**settings), end="\n\n")
    trace = engine.generate([prompt_ids(tokenizer, messages)], records="events", **settings)
    play(trace, 0, tokenizer, engine.model.mask_token_id, DELAY, args.colour)
    if args.task:
        print("right" if task.score(trace.text(0, tokenizer), example) == 1 else "wrong")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    main(tyro.cli(Args, description="Watch a model denoise a completion, step by step."))
