"""evals/show.py: frames of hand-made traces to the letter, of both engines against their step maps,
and the command.
"""

import re
import sys

import torch
from test_resume import Run

from evals import load_task
from evals.show import CLEAR, frames, play
from models import load_tokenizer, prompt_ids
from rollout import Trace, make_engine

SPELL = "abcdefghijklmnopqrstuvwxy."
CODES = r"\x1b\[[0-9;]*[A-Za-z]"


class Letters:
    """Token i is the i-th of `texts`; the last is special."""

    def __init__(self, texts):
        self.texts = texts

    def decode(self, ids, skip_special_tokens=False):
        special = len(self.texts) - 1 if skip_special_tokens else None
        return "".join(self.texts[i] for i in ids if i != special)


def hand_made(attention, ids, steps, prompt=(0,), p=None):
    """A trace; its events are those of `steps`, the replay of each token, -1 where it is masked."""
    logps, steps = torch.tensor(p or [0.5] * len(ids)).log(), torch.tensor(steps)
    now = steps == torch.arange(max(steps) + 1)[:, None]
    return Trace(
        prompt_ids=[list(prompt)],
        completion_ids=torch.tensor([ids]),
        completion_mask=torch.ones(1, len(ids), dtype=torch.bool),
        canvas_length=torch.tensor([len(ids)]),
        step_map=steps[None],
        logps=logps[None],
        sample_index=torch.tensor([0]),
        num_forwards=torch.tensor([4]),
        settings={
            "attention": attention,
            "block_length": 4,
            "gen_length": len(ids),
            "denoising_steps": 2,
        },
        records={"tokens": torch.tensor(ids).where(now, -1)[None], "logps": (logps * now)[None]},
    )


def test_tokens_that_are_masked_again_or_replaced_are_shown():
    """Every change of the event log: written, masked again, written anew, replaced; positions that
    are never revealed stay masked.
    """
    trace = hand_made("bidirectional", [7, 4, 25, 25, 25], [0, 1, 1, -1, -1])
    steps = "h b", " ey", "  .", "i"  # y is the mask
    tokens = [[SPELL.find(letter) for letter in text.ljust(5)] for text in steps]
    p = [[0.5, 1, 0.25], [1, 0.75, 1], [1, 1, 0.5], [0.9, 1, 1]]
    logps = torch.nn.functional.pad(torch.tensor(p).log(), (0, 2))
    trace.records = {"tokens": torch.tensor([tokens]), "logps": logps[None]}
    assert list(frames(trace, 0, SPELL.__getitem__, 24)) == [
        ("step 1/4  tokens 2/5  2 new, probability 0.25 to 0.50", "│[h]░[b]░│░"),
        ("step 2/4  tokens 2/5  1 new, probability 0.75 to 0.75", "│h[e]░░│░"),
        ("step 3/4  tokens 3/5  1 new, probability 0.50 to 0.50", "│he[.]░│░"),
        ("step 4/4  tokens 3/5  1 new, probability 0.90 to 0.90", "│[i]e.░│░"),
    ]


def test_frames_of_a_block_causal_trace(monkeypatch, capsys):
    """A terminal is redrawn and gets no codes of the model. A prompt of 6 leaves two places in its
    last block; a replay forwards a step of all blocks, frames go block by block.
    """
    ids, steps, p = [7, 4, 11, 11, 14, 25], [1, 0, 0, 1, 1, 0], [0.55, 1.0, 0.9, 0.25, 0.9, 0.9]
    trace = hand_made("block-causal", ids, steps, prompt=[0] * 6, p=p)
    assert list(frames(trace, 0, SPELL.__getitem__, 24)) == [
        ("step 1/4  tokens 1/6  1 new, probability 1.00 to 1.00", "│░[e]│░░░░"),
        ("step 2/4  tokens 2/6  1 new, probability 0.55 to 0.55", "│[h]e│░░░░"),
        ("step 3/4  tokens 4/6  2 new, probability 0.90 to 0.90", "│he│[l]░░[.]"),
        ("step 4/4  tokens 6/6  2 new, probability 0.25 to 0.90", "│he│l[l][o]."),
    ]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    play(trace, Letters([*SPELL[:11], "\n\x1b[2J", *SPELL[12:]]), 24)
    out = capsys.readouterr().out
    assert re.findall(CODES, out) == re.findall(CODES, CLEAR) * 4
    assert "│he│[\\n\\x1b[2J]░░[.]" in out
    assert out.endswith(
        "\n6 tokens in 4 forwards: 1.50 tokens per forward\nhe\n\\x1b[2J\n\\x1b[2Jo\n"
    )


def test_the_command(warm, tmp_path):
    flags = "--model tiny-llada --task countdown --index 3".split()
    said = Run(tmp_path / "said", 1, "evals/show.py", *flags).finish()
    task, tokenizer = load_task("countdown"), load_tokenizer("tiny-llada")
    example = task.load("test", "", 4)[3]
    ids = prompt_ids(tokenizer, task.prompt(example))
    settings = {"gen_length": 12, "denoising_steps": 2, "remasking": "low_confidence_static"}
    trace = make_engine("tiny-llada").generate([ids], temperature=0.0, **settings)
    lines = said.splitlines()
    text = trace.text(0, tokenizer)
    assert tokenizer.decode(ids) in lines and lines[-2] == text != ""
    assert lines[-1] == ("right" if task.score(text, example) else "wrong")
    assert "\x1b" not in said and sum(line.startswith("step ") for line in lines) == 4
