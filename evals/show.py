"""Watch a model denoise in the terminal: one frame per denoising step.

    python evals/show.py --model tiny-sdar --task countdown --index 3   a problem of its test split
    python evals/show.py --model tiny-llada --prompt " 7 12  8 =   3"
    python evals/show.py --model tiny-sdar --prompt "..." --colour | less -R

A masked position is one ░, bars separate blocks. Tokens revealed in this step are inverted (without
colour: marked ^). The colour is the probability that a token had when it was revealed; tokens after
the first EOS are dim. Where tokens are revised (rcr, editing) every version is shown. Frames come
from the Trace only, whichever engine made it. The last line is the completion as text.
"""

import math
import os
import signal
import sys
import time
import unicodedata
from dataclasses import dataclass, field
from shutil import get_terminal_size

import torch
import tyro

sys.path.insert(0, __file__.rpartition("/evals/")[0])
from evals import load_task
from evals.examples import user
from models import load_tokenizer, prompt_ids
from rollout import make_engine

NEW, OLD, DIM = "1;7", "22", "2"
# red to green for equal parts of 0..1; legible on dark and light backgrounds
PROBABILITY = (160, 166, 172, 142, 106, 34)


def on_terminal():
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


@dataclass
class Args:
    model: str = "tiny-sdar"
    """key of models.MODELS, or a directory in HF layout"""
    prompt: str = ""
    """a user message, formatted by the chat template. The tiny models only know countdown: --task
    """
    task: str = ""
    """instead of --prompt: a problem of this task of evals/"""
    index: int = 0
    """which problem of the task's test split"""
    gen_length: int = 12
    """tokens to generate: whole blocks"""
    block_length: int | None = None
    """tokens per block; None: the model's own"""
    denoising_steps: int = 2
    """denoising steps per block"""
    remasking: str = "low_confidence_static"
    """how positions are chosen; an unknown name prints those that the engine has"""
    temperature: float = 0.0
    """sampling temperature; 0 is greedy"""
    seed: int = 0
    """sampling seed"""
    delay: float = 0.4
    """seconds between frames, on a terminal only"""
    colour: bool = field(default_factory=lambda: on_terminal() and not os.environ.get("NO_COLOR"))
    """on by default on a terminal, unless NO_COLOR is set"""


def escape(character):
    return character.encode("unicode_escape").decode()


def printable(text, keep=""):
    """Escapes control and format characters, and every separator but the space."""
    return "".join(c if c.isprintable() or c in keep else escape(c) for c in text)


def token_text(tokenizer, token_id):
    """One token, printable and never empty. A combining mark at its start is escaped, because it
    would alter the token before."""
    text = tokenizer.decode([token_id]) or f"<{token_id}>"
    if unicodedata.category(text[0])[0] == "M":
        text = escape(text[0]) + text[1:]
    return printable(text)


def width(text):
    """Columns of printable text in a terminal: wide characters take two, combining marks none."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.category(c) in ("Mn", "Me") for c in text)


def changes_of(trace, i):
    """-> one dict per step of completion i, {position: (token id, probability when it was drawn)};
    the block of each position"""
    block, records = trace.blocks(i), trace.records or {}
    if "events" in records:  # also tokens that were revised or masked again
        mine = records["events"][:, 0] == trace.sample_index[i]
        _, step, position, token = records["events"][mine].T
        logps = records["logps"][mine]
    else:
        position = (trace.replay_map[i] >= 0).nonzero().flatten()
        values = trace.replay_map, trace.completion_ids, trace.logps
        step, token, logps = (x[i, position] for x in values)
    in_turn, changes = trace.settings["attention"] == "block-causal", {}
    columns = (x.tolist() for x in (step, position, token, logps))
    for now, j, token_id, logp in zip(*columns, strict=True):
        # One forward replays a step of all blocks of a block model, which were decoded in turn.
        moment = block[j] if in_turn else 0, now
        changes.setdefault(moment, {})[j] = token_id, min(math.exp(logp), 1.0)
    return [changes[moment] for moment in sorted(changes)], block


def layout(texts, block, columns):
    """Wraps the texts of all positions. -> lines of pairs (position, text); None: a block's bar"""
    lines, used = [[]], 0
    most = max(columns // 2 - 1, 1)  # characters that fit after a bar even if all are wide
    for j, text in enumerate(texts):
        bar = [(None, "│")] if j == 0 or block[j] != block[j - 1] else []
        for k in range(0, len(text), most):
            parts = [*bar, (j, text[k : k + most])]
            bar, wide = [], sum(width(part) for _, part in parts)
            if used + wide > columns:
                lines, used = [*lines, []], 0
            lines[-1] += parts
            used += wide
    return lines


def frames(trace, i, spell, columns=80, height=None, colour=False, mask_token_id=None):
    """Yields completion i after each denoising step: a header, then lines of `columns` columns.

    spell(token id) -> printable text. height: at most so many lines, around the newest token.
    """
    changes, block = changes_of(trace, i)
    length, scored = int(trace.canvas_length[i]), trace.completion_mask[i].tolist()
    paint = lambda text, style: f"\x1b[{style}m{text}\x1b[0m" if colour else text
    known = {}  # position: (token id, probability)
    for now, changed in enumerate(changes):
        new = {j: change for j, change in changed.items() if change[0] != mask_token_id}
        again = changed.keys() - new
        known = {j: change for j, change in (known | new).items() if j not in again}
        texts, styles = ["░"] * length, {None: DIM} | dict.fromkeys(range(length), DIM)
        for j, (token_id, p) in known.items():
            hue = PROBABILITY[min(int(p * len(PROBABILITY)), len(PROBABILITY) - 1)]
            shade = NEW if j in new else OLD if scored[j] else DIM
            texts[j], styles[j] = spell(token_id), f"38;5;{hue};{shade}"
        lines, newest = [], 0
        for line in layout(texts, block, columns):
            lines.append("".join(paint(text, styles[j]) for j, text in line))
            if marks := "".join(" ^"[j in new] * width(text) for j, text in line).rstrip():
                newest = len(lines)
                lines += [] if colour else [marks]
        shown = height or len(lines)
        top = max(0, min(newest - shown // 2, len(lines) - shown))
        blocks = f"block {block[min(changed)] + 1}/{block[length - 1] + 1}"
        header = f"step {now + 1}/{len(changes)}  {blocks}  tokens {len(known)}/{length}"
        if new:
            chances = [p for _, p in new.values()]
            header += f"  {len(new)} new, probability {min(chances):.2f} to {max(chances):.2f}"
        if again:
            header += f", {len(again)} masked again"
        yield [header[:columns], *lines[top : top + shown]]


def play(trace, i, tokenizer, delay=0.0, colour=False, mask_token_id=None):
    """Prints the prompt, the frames (in place on a terminal), tokens per forward, and the text."""
    in_place, size, shown = on_terminal(), get_terminal_size(), 0
    height = max(size.lines - 3, 1) if in_place else None
    spell = lambda token_id: token_text(tokenizer, token_id)
    print(printable(tokenizer.decode(trace.prompt_ids[i]), keep="\n\t"), end="\n\n")
    if colour:
        scale = "".join(f"\x1b[38;5;{hue}m██\x1b[0m" for hue in PROBABILITY)
        print(f"probability 0 {scale} 1, {trace.settings['logps']}", end="\n\n")
    try:
        for lines in frames(trace, i, spell, size.columns - 1, height, colour, mask_token_id):
            up = f"\x1b[{shown}F\x1b[J" * (shown > 0)
            print(up + "\n".join(lines), end="\n" if in_place else "\n\n", flush=True)
            shown = len(lines) * in_place
            time.sleep(delay * in_place)
    except KeyboardInterrupt:
        print()  # skip the other frames
    scored, forwards = int(trace.completion_mask[i].sum()), int(trace.num_forwards[i])
    rate = f"{scored / forwards:.2f} tokens per forward"
    print("\n" * in_place + f"{scored} tokens in {forwards} forwards: {rate}")
    print(printable(trace.text(i, tokenizer), keep="\n\t"))


def main(args):
    if bool(args.prompt) == bool(args.task):
        raise SystemExit("give either --prompt or --task")
    if args.delay < 0 or args.index < 0:
        raise SystemExit(f"--delay {args.delay} and --index {args.index} must be at least 0")
    messages = user(args.prompt)
    if args.task:
        task = load_task(args.task)
        examples = task.load("test", "", args.index + 1)
        if len(examples) <= args.index:
            have = f"the test split of {args.task} has {len(examples)} problems"
            raise SystemExit(f"--index {args.index}: {have}, from 0")
        messages = task.prompt(examples[args.index])
    names = "gen_length block_length denoising_steps remasking temperature seed".split()
    settings = {name: getattr(args, name) for name in names}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, engine = load_tokenizer(args.model), make_engine(args.model, device=device)
    plan, ids = engine.plan(**settings), prompt_ids(tokenizer, messages)
    n = engine.model.block_length
    if engine.model.attention == "block-causal" and len(ids) % n:
        within = f"the prompt fills {len(ids) % n} of {n} tokens of a block"
        plan += f"; {within}, which is completed first"
    print(plan, end="\n\n")
    trace = engine.generate([ids], **settings)
    play(trace, 0, tokenizer, args.delay, args.colour, engine.model.mask_token_id)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    main(tyro.cli(Args, description="Watch a model denoise a completion, step by step."))
