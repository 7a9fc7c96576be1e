"""evals/show.py: frames of hand-made traces to the letter, of both engines against their step maps,
and the command.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evals import load_task
from evals.show import CLEAR, frames, play
from models import load_tokenizer, prompt_ids
from rollout import Trace, make_engine

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
    """A prompt of 6 leaves two places in its last block; a replay forwards a step of all blocks,
    frames go block by block.
    """
    order = [1, 0, 0, 1, 1, 0]
    given = {
        "ids": [7, 4, 11, 11, 14, 25],
        "prompt": [0] * 6,
        "scored": 6,
        "p": [0.55, 1.0, 0.9, 0.25, 0.9, 0.9],
    } | changes
    return hand_made("block-causal", step_map=order, replay_map=order, **given)


def early_exit():
    """The first of two blocks holds the EOS, one token lies behind it, and the second block is
    never denoised.
    """
    steps = [0, 0, 1, 1, -1, -1, -1, -1]
    return hand_made(
        "bidirectional", [7, 8, 25, 3, 25, 25, 25, 25], steps, steps, scored=3, num_forwards=2
    )


SPELL = (LETTERS[:25] + ".").__getitem__


def test_frames_of_a_block_causal_trace():
    assert list(frames(block_causal(), 0, SPELL)) == [
        ("step 1/4  tokens 1/6  1 new, probability 1.00 to 1.00", "│░[e]│░░░░"),
        ("step 2/4  tokens 2/6  1 new, probability 0.55 to 0.55", "│[h]e│░░░░"),
        ("step 3/4  tokens 4/6  2 new, probability 0.90 to 0.90", "│he│[l]░░[.]"),
        ("step 4/4  tokens 6/6  2 new, probability 0.25 to 0.90", "│he│l[l][o]."),
    ]


def test_early_exit_leaves_the_rest_of_a_bidirectional_canvas_masked():
    assert list(frames(early_exit(), 0, SPELL)) == [
        ("step 1/2  tokens 2/8  2 new, probability 0.50 to 0.50", "│[h][i]░░│░░░░"),
        ("step 2/2  tokens 4/8  2 new, probability 0.50 to 0.50", "│hi[.][d]│░░░░"),
    ]


def test_tokens_that_are_masked_again_or_replaced_are_shown():
    """Every change of the event log: written, masked again, written anew, replaced. Other samples'
    events are not read.
    """
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
        ("step 1/4  tokens 2/4  2 new, probability 0.25 to 0.50", "│[h]░[b]░"),
        (
            "step 2/4  tokens 2/4  1 new, probability 0.75 to 0.75, 1 masked again",
            "│h[e]░░",
        ),
        ("step 3/4  tokens 4/4  2 new, probability 0.50 to 1.00", "│he[l][.]"),
        ("step 4/4  tokens 4/4  1 new, probability 0.90 to 0.90", "│[i]el."),
    ]


def test_colours():
    """The colour of a token is its probability; new tokens are inverted."""
    *_, (_, line) = frames(early_exit(), 0, SPELL, colour=True)
    shown = [("22", "h"), ("22", "i"), ("7", "."), ("7", "d")]
    painted = [f"\x1b[38;5;172;{style}m{text}\x1b[0m" for style, text in shown]
    assert line == "│" + "".join(painted) + "│░░░░"


def test_a_terminal_is_redrawn_and_gets_no_codes_of_the_model(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    play(block_causal(), 0, Letters([*LETTERS[:11], "\n\x1b[2J", *LETTERS[12:25], "."]))
    out = capsys.readouterr().out
    assert CODES.findall(out) == re.findall(CODES, CLEAR) * 4 and "│he│[\\n\\x1b[2J]░░[.]" in out
    assert out.endswith(
        "\n6 tokens in 4 forwards: 1.50 tokens per forward\nhe\n\\x1b[2J\n\\x1b[2Jo\n"
    )


def command(*flags, **streams):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    return subprocess.run(
        [sys.executable, "evals/show.py", *flags], cwd=ROOT, env=env, timeout=300, **streams
    )


@pytest.mark.parametrize("model", ["tiny-llada"])
def test_the_command(model):
    done = command(
        "--model", model, "--task", "countdown", "--index", "3", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    task, tokenizer = load_task("countdown"), load_tokenizer(model)
    example = task.load("test", "", 4)[3]
    ids = prompt_ids(tokenizer, task.prompt(example))
    settings = {
        "gen_length": 12,
        "denoising_steps": 2,
        "remasking": "low_confidence_static",
        "temperature": 0.0,
    }
    trace = make_engine(model).generate([ids], **settings)
    lines = done.stdout.splitlines()
    text = trace.text(0, tokenizer)
    assert lines[2] == tokenizer.decode(ids) and lines[-2] == text != ""
    assert lines[-1] == ("right" if task.score(text, example) else "wrong")
    assert "\x1b" not in done.stdout and sum(line.startswith("step ") for line in lines) == 4
