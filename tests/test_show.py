"""evals/show.py: frames of hand-made traces to the letter, of both engines against their step maps, and the command."""

import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_masked import model_of as masked_model_of
from test_models import exits_with_one_line
from test_rollout import EOS, prompts_of
from test_rollout import model_of as block_model_of

from evals import load_task, show
from models import MODELS, load_tokenizer, prompt_ids
from rollout import Trace, make_engine
from evals.show import Args, frames, main, play, printable, token_text, width

ROOT = Path(__file__).parents[1]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Letters:
    """Token i is the i-th of `texts`; the last is special."""

    def __init__(self, texts=LETTERS):
        self.texts = texts

    def decode(self, ids, skip_special_tokens=False):
        return "".join(
            self.texts[i] for i in ids if not (skip_special_tokens and i == len(self.texts) - 1)
        )


def hand_made(
    attention, ids, step_map, replay_map, prompt=(0,), scored=None, p=None, num_forwards=4
):
    revealed = torch.tensor([step_map]) >= 0
    mask = revealed if scored is None else torch.arange(len(ids))[None] < scored
    return Trace(
        prompt_ids=[list(prompt)],
        completion_ids=torch.tensor([ids]),
        completion_mask=mask,
        canvas_length=torch.tensor([len(ids)]),
        step_map=torch.tensor([step_map]),
        replay_map=torch.tensor([replay_map]),
        logps=torch.tensor([p or [0.5] * len(ids)]).log(),
        sample_index=torch.tensor([0]),
        num_forwards=torch.tensor([num_forwards]),
        settings={
            "attention": attention,
            "block_length": 4,
            "gen_length": len(ids),
            "denoising_steps": 2,
            "eos_token_ids": [25],
            "logps": "softmax",
        },
    )


def block_causal(**changes):
    """A prompt of 6 leaves two places in its last block; a replay forwards a step of all blocks, frames go block by block."""
    order = [1, 0, 0, 1, 1, 0]
    given = {
        "ids": [7, 4, 11, 11, 14, 25],
        "prompt": [0] * 6,
        "scored": 6,
        "p": [0.55, 1.0, 0.9, 0.25, 0.9, 0.9],
    } | changes
    return hand_made("block-causal", step_map=order, replay_map=order, **given)


def early_exit():
    """The first of two blocks holds the EOS, one token lies behind it, and the second block is never denoised."""
    steps = [0, 0, 1, 1, -1, -1, -1, -1]
    return hand_made(
        "bidirectional", [7, 8, 25, 3, 25, 25, 25, 25], steps, steps, scored=3, num_forwards=2
    )


SPELL = (LETTERS[:25] + ".").__getitem__


def test_frames_of_a_block_causal_trace():
    assert list(frames(block_causal(), 0, SPELL)) == [
        ["step 1/4  block 1/2  tokens 1/6  1 new, probability 1.00 to 1.00", "│░e│░░░░", "  ^"],
        ["step 2/4  block 1/2  tokens 2/6  1 new, probability 0.55 to 0.55", "│he│░░░░", " ^"],
        [
            "step 3/4  block 2/2  tokens 4/6  2 new, probability 0.90 to 0.90",
            "│he│l░░.",
            "    ^  ^",
        ],
        ["step 4/4  block 2/2  tokens 6/6  2 new, probability 0.25 to 0.90", "│he│llo.", "     ^^"],
    ]


def test_early_exit_leaves_the_rest_of_a_bidirectional_canvas_masked():
    assert list(frames(early_exit(), 0, SPELL)) == [
        ["step 1/2  block 1/2  tokens 2/8  2 new, probability 0.50 to 0.50", "│hi░░│░░░░", " ^^"],
        ["step 2/2  block 1/2  tokens 4/8  2 new, probability 0.50 to 0.50", "│hi.d│░░░░", "   ^^"],
    ]


def test_bidirectional_frames_follow_the_replay_map():
    """An engine that works on two blocks at once numbers its forwards so."""
    trace = hand_made(
        "bidirectional",
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 0, 1, 1, 0, 0, 1, 1],
        [0, 0, 5, 5, 0, 2, 5, 5],
    )
    canvas = [lines[1] for lines in frames(trace, 0, SPELL)]
    assert canvas == ["│ab░░│e░░░", "│ab░░│ef░░", "│abcd│efgh"]


def test_tokens_that_are_masked_again_or_replaced_are_shown():
    """Every change of the event log: written, masked again, written anew, replaced. Other samples' events are not read."""
    trace = hand_made("bidirectional", [7, 4, 11, 25], [0, 1, 1, 2], [0, 1, 1, 2], scored=4)
    events = [
        [0, 0, 0, 7],
        [3, 0, 1, 9],
        [0, 0, 2, 1],
        [0, 1, 1, 4],
        [0, 1, 2, 24],
        [0, 2, 2, 11],
        [0, 2, 3, 25],
        [0, 3, 0, 8],
    ]
    logps = torch.tensor([0.5, 1.0, 0.25, 0.75, 1.0, 0.5, 1.0, 0.9]).log()
    trace.records = {"events": torch.tensor(events), "logps": logps}
    assert list(frames(trace, 0, SPELL, mask_token_id=24)) == [
        ["step 1/4  block 1/1  tokens 2/4  2 new, probability 0.25 to 0.50", "│h░b░", " ^ ^"],
        [
            "step 2/4  block 1/1  tokens 2/4  1 new, probability 0.75 to 0.75, 1 masked again",
            "│he░░",
            "  ^",
        ],
        ["step 3/4  block 1/1  tokens 4/4  2 new, probability 0.50 to 1.00", "│hel.", "   ^^"],
        ["step 4/4  block 1/1  tokens 4/4  1 new, probability 0.90 to 0.90", "│iel.", " ^"],
    ]


def test_frames_of_rcr_are_the_states_of_the_trace():
    model = masked_model_of("llada")
    options = {
        "gen_length": 12,
        "block_length": 6,
        "denoising_steps": 4,
        "remasking": "rcr",
        "temperature": 1.5,
        "stop_at_eos": False,
    }
    trace, again = (
        make_engine(model).generate(prompts_of([1, 4, 7, 2], seed=3), num_samples=4, **options),
        0,
    )
    M = model.mask_token_id
    states = [*trace.states(M), trace.completion_ids.where(trace.step_map >= 0, M)][1:]
    for i in range(16):
        canvas = ["".join("░" if t == M else LETTERS[t] for t in state[i]) for state in states]
        want = [
            text
            for text, before in zip(canvas, ["░" * 12, *canvas], strict=False)
            if text != before
        ]
        seen = list(frames(trace, i, LETTERS.__getitem__, columns=200, mask_token_id=M))
        assert [lines[1].replace("│", "") for lines in seen] == want
        again += sum("masked again" in lines[0] for lines in seen)
    assert again


@pytest.mark.parametrize("family", ["block", "masked"])
@pytest.mark.parametrize("remasking", ["low_confidence_static", "low_confidence_dynamic", "random"])
def test_every_token_appears_exactly_in_its_frame(family, remasking):
    engine = make_engine(block_model_of() if family == "block" else masked_model_of("llada"))
    settings = {
        "gen_length": 24,
        "block_length": 4,
        "denoising_steps": 3,
        "remasking": remasking,
        "confidence_threshold": 0.3,
    }
    trace = engine.generate(prompts_of([3, 4, 6, 9]), num_samples=4, seed=2, **settings)
    lengths = set()
    for i in range(16):
        length, step = int(trace.canvas_length[i]), trace.step_map[i].tolist()
        tail = len(trace.prompt_ids[i]) % 4 if family == "block" else 0
        moments = [
            ((j + tail) // 4, step[j]) if step[j] >= 0 else (math.inf, 0) for j in range(length)
        ]
        in_order = sorted({moment for moment in moments if moment[0] < math.inf})
        seen = list(frames(trace, i, LETTERS.__getitem__, columns=200))
        assert len(seen) == len(in_order)
        for now, (header, canvas, marks) in zip(in_order, seen, strict=True):
            bars = [k for k, c in enumerate(canvas) if c == "│"]
            assert bars == sorted(
                {0} | {j + (j + tail) // 4 for j in range(1, length) if (j + tail) % 4 == 0}
            )
            cells = [
                (c, marks.ljust(len(canvas))[k]) for k, c in enumerate(canvas) if k not in bars
            ]
            letters = [LETTERS[t] for t in trace.completion_ids[i, :length]]
            assert cells == [
                (letters[j] if moments[j] <= now else "░", "^" if moments[j] == now else " ")
                for j in range(length)
            ]
            assert (
                f"step {in_order.index(now) + 1}/{len(in_order)} " in header
                and f"block {now[0] + 1}/" in header
            )
        unmarked = seen[-1][1].replace("│", "")
        assert unmarked[: int(trace.completion_mask[i].sum())] == "".join(
            LETTERS[t] for t in trace.completion(i)
        )
        assert ("░" in unmarked) == (family == "masked" and moments[-1][0] == math.inf)
        lengths.add((length, len(seen)))
    assert len(lengths) > 1 and trace.settings["eos_token_ids"] == list(EOS)


def test_colours():
    trace = block_causal(scored=5)
    plain = list(frames(trace, 0, SPELL))
    coloured = list(frames(trace, 0, SPELL, colour=True))
    assert [[CODES.sub("", line) for line in lines] for lines in coloured] == [
        lines[:2] for lines in plain
    ]
    assert not any("\x1b" in line for lines in plain for line in lines)
    bar, mask, gray_dot = "\x1b[2m│\x1b[0m", "\x1b[2m░\x1b[0m", "\x1b[38;5;34;2m.\x1b[0m"
    assert coloured[0][1] == bar + mask + "\x1b[38;5;34;1;7me\x1b[0m" + bar + mask * 4
    old = "\x1b[38;5;142;22mh\x1b[0m\x1b[38;5;34;22me\x1b[0m"
    new = "\x1b[38;5;166;1;7ml\x1b[0m\x1b[38;5;34;1;7mo\x1b[0m"
    assert (
        coloured[3][1] == bar + old + bar + "\x1b[38;5;34;22ml\x1b[0m" + new + gray_dot
    )  # behind the end


@pytest.mark.parametrize("columns", [3, 7, 10, 33])
def test_lines_keep_to_the_terminal(columns):
    texts = [
        "\n",
        "\x1b[2J",
        "日本語",
        " " * 50,
        "e\u0301",
        "\u0301",
        "\u200b",
        "word",
        "語" * 40,
        "",
        "z",
        ".",
    ]
    tokens = [token_text(Letters(texts), t) for t in range(12)]
    assert (
        tokens[:2] == ["\\n", "\\x1b[2J"]
        and tokens[4:7] == ["e\u0301", "\\u0301", "\\u200b"]
        and tokens[9] == "<9>"
    )
    assert [width(text) for text in tokens] == [2, 7, 6, 50, 1, 6, 6, 4, 80, 3, 1, 1]
    steps = [0, 1] * 6
    trace = hand_made(
        "bidirectional", list(range(12)), steps, [j // 4 * 2 + s for j, s in enumerate(steps)]
    )
    seen = list(frames(trace, 0, tokens.__getitem__, columns))
    assert all(width(line) <= columns for lines in seen for line in lines)
    canvas = "".join(line for line in seen[-1][1:] if not re.fullmatch(r"[ ^]*\^", line))
    assert canvas.replace("│", "") == "".join(tokens)


def test_a_short_terminal_shows_the_newest_tokens():
    steps = [0] * 400
    trace = hand_made("bidirectional", [3] * 400, steps, [j // 4 for j in range(400)])
    whole, seen = (
        list(frames(trace, 0, lambda token_id: "abc", 40, height)) for height in (None, 6)
    )
    assert max(map(len, whole)) > 30 and {len(lines) for lines in seen} == {7}
    assert all(sum(line.count("^") for line in lines) == 12 for lines in seen)


def test_a_terminal_is_redrawn_in_place(monkeypatch, capsys):
    monkeypatch.setattr(show, "on_terminal", lambda: True)
    play(block_causal(), 0, Letters(LETTERS[:25] + "."), delay=0.0, colour=False)
    out = capsys.readouterr().out
    assert CODES.findall(out) == ["\x1b[3F", "\x1b[J"] * 3
    assert out.endswith("\n6 tokens in 4 forwards: 1.50 tokens per forward\nhello\n")


def test_interrupting_goes_on_to_the_text(monkeypatch, capsys):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(show.time, "sleep", interrupt)
    play(early_exit(), 0, Letters())
    out = capsys.readouterr().out
    assert out.count("step ") == 1 and out.endswith(
        "\n3 tokens in 2 forwards: 1.50 tokens per forward\nhi\n"
    )


def test_colour_is_for_terminals_without_no_color(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert not Args().colour
    monkeypatch.setattr(
        show.sys, "stdout", terminal := type("Terminal", (), {"isatty": lambda self: True})()
    )
    assert terminal.isatty() and Args().colour
    for name, value, expected in (
        ("NO_COLOR", "", True),
        ("TERM", "dumb", False),
        ("TERM", "xterm", True),
        ("NO_COLOR", "1", False),
    ):
        monkeypatch.setenv(name, value)
        assert Args().colour == expected, (name, value)


def test_texts_keep_their_lines_and_lose_their_escape_codes():
    assert printable("a\n\tb\x1b[31m\r\x9b", keep="\n\t") == "a\n\tb\\x1b[31m\\r\\x9b"


def command(*flags, **streams):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    return subprocess.run(
        [sys.executable, "evals/show.py", *flags], cwd=ROOT, env=env, timeout=300, **streams
    )


@pytest.mark.parametrize("model", ["tiny-sdar", "tiny-llada"])
def test_the_command(model):
    done = command(
        "--model", model, "--task", "countdown", "--index", "3", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    task, tokenizer = load_task("countdown"), load_tokenizer(model)
    ids = prompt_ids(tokenizer, task.prompt(task.load("test", "", 4)[3]))
    settings = {
        "gen_length": 12,
        "denoising_steps": 2,
        "remasking": "low_confidence_static",
        "temperature": 0.0,
    }
    trace = make_engine(model).generate([ids], **settings)
    lines = done.stdout.splitlines()
    assert lines[2] == tokenizer.decode(ids) and lines[-1] == trace.text(0, tokenizer) != ""
    assert "\x1b" not in done.stdout and sum(line.startswith("step ") for line in lines) == 4


@pytest.mark.parametrize("model, inside", [("tiny-sdar", (0, 1, 3)), ("tiny-llada", ())])
def test_a_prompt_that_ends_inside_a_block_is_said(model, inside, capsys):
    """There the completion has a block and some tokens more than was asked for."""
    for more in (0, 1, 3):
        main(
            Args(model=model, prompt="1" * (2 + more), gen_length=8, colour=False)
        )  # two tokens of the template
        lines = capsys.readouterr().out.splitlines()
        note = f"; the prompt fills {more} of 4 tokens of a block, which is completed first"
        assert lines[0].endswith(note if more and more in inside else "tokens a step")
        blocks, tokens = re.search(r"block \d+/(\d+)  tokens \d+/(\d+)", lines[4]).groups()
        assert (int(blocks), int(tokens)) == ((3, 12 - more) if more and more in inside else (2, 8))


def test_the_command_on_a_terminal():
    ours, theirs = pty.openpty()
    done = command(
        "--prompt", " 5  1  9 =  13", "--delay", "0", stdout=theirs, stderr=subprocess.PIPE
    )
    os.close(theirs)
    out = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0, done.stderr[-3000:]
    assert out.count("\x1b[J") == 3 and "\x1b[38;5;" in out and "\x1b" not in out.splitlines()[-1]


@pytest.mark.parametrize("model", [name for name in MODELS if name.startswith("tiny")])
def test_every_rule_of_every_tiny_model_plays(model, capsys):
    rules = make_engine(model).choices["remasking"]
    for remasking in rules if model in ("tiny-sdar", "tiny-llada") else rules[-2:]:
        main(
            Args(
                model=model,
                prompt="1 2 =",
                gen_length=8,
                denoising_steps=3,
                remasking=remasking,
                colour=False,
            )
        )
        out = capsys.readouterr().out
        numbers = [
            tuple(map(int, pair)) for pair in re.findall(r"^step (\d+)/(\d+)  block", out, re.M)
        ]
        assert [number for number, _ in numbers] == list(range(1, numbers[0][1] + 1))
        assert re.search(r"tokens (\d+)/\1  ", out) or "<|endoftext|>" in out, (
            "all of the canvas, or up to the end"
        )


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, ["--prompt", "--task"]),
        ({"prompt": "a", "task": "countdown"}, ["--prompt", "--task"]),
        ({"task": "chess"}, ["chess", "countdown"]),
        ({"task": "countdown", "index": 10**6}, ["--index 1000000", "problems"]),
        ({"task": "countdown", "index": -1}, ["--index -1"]),
        ({"prompt": "a", "delay": -1.0}, ["--delay -1.0"]),
        ({"prompt": "a", "remasking": "best"}, ["--remasking best"]),
        ({"prompt": "a", "gen_length": 13}, ["--gen-length 13", "give 12 or 16"]),
        ({"prompt": "a<|MASK|>"}, ["prompt 0", "mask token"]),
    ],
)
def test_unusable_flags_end_in_one_line(changes, words):
    with exits_with_one_line(*words):
        main(Args(**changes))
