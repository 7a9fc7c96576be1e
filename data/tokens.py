"""From rows of text to token ids. Rank 0 reads and tokenises; every rank receives the result.

A row is {"prompt": messages, "response": text}, or a pair, {"prompt", "chosen", "rejected"}. A row
that is left out is a Dropped; rows are never cut.
"""

from array import array
from collections.abc import Sequence
from itertools import chain, islice, pairwise
from typing import NamedTuple

import numpy as np
import torch
from jinja2 import TemplateError
from tqdm import tqdm

from data.rows import describe_columns, one_line
from distributed.disk import from_first_rank
from models.checkpoint import prompt_text

CHUNK = 1024  # rows per tokenizer call: keeps all cores busy, and little text in memory


class Dropped(NamedTuple):
    """A row that is left out."""

    reason: str  # rows are counted by it
    detail: str  # shown for the first row with this reason


class TokenRows(Sequence):
    """rows[i] -> tuple of lists of ids, one per part: prompt, answer; or prompt, chosen, rejected.

    tokens: [total] int32. bounds: [rows * parts + 1] int64, where parts begin and end in tokens.
    dropped: {reason: {"rows": count, "first": text}}. Lists of Python ints would take ten times
    the memory of these arrays.
    """

    def __init__(self, tokens, bounds, parts, dropped):
        self.tokens, self.bounds, self.parts, self.dropped = tokens, bounds, parts, dropped
        self.num_dropped = sum(count["rows"] for count in dropped.values())
        self.reasons = [
            f"{count['rows']:,} {reason}; the first: {count['first']}"
            for reason, count in dropped.items()
        ]

    def __len__(self):
        return (len(self.bounds) - 1) // self.parts

    def __getitem__(self, i):
        if not 0 <= i < len(self):
            raise IndexError(i)
        bounds = self.bounds[i * self.parts : (i + 1) * self.parts + 1].tolist()
        return tuple(self.tokens[a:b].tolist() for a, b in pairwise(bounds))

    def report(self, name):
        """-> lines: the number of rows, and how many were dropped for each reason."""
        lengths, N = self.bounds[:: self.parts].diff(), len(self)
        longest = f", the longest has {lengths.max()}" if N else ""
        lost = f"{self.num_dropped:,} of {N + self.num_dropped:,} dropped:"
        what = f"{N:,} {name}, {len(self.tokens):,} tokens{longest}"
        return "\n  ".join([f"{what}; {lost if self.reasons else 'none dropped'}", *self.reasons])

    def at_least(self, batch_size):
        """-> self; SystemExit if there is no row, or not enough for one step, with the reasons."""
        if len(self) < max(batch_size, 1):
            few = f", fewer than --batch-size {batch_size}: give a smaller one" if len(self) else ""
            lost = ": ".join([f"; {self.num_dropped} were dropped", *self.reasons])
            raise SystemExit(f"--data holds {len(self) or 'no'} rows to train on{few}{lost}")
        return self


def token_rows(rows, tokenizer, model, max_length, sides):
    """Tokenise rows on rank 0. -> TokenRows on every rank. Collective; other ranks read no row.

    model: with eos_token_ids, the first of which closes an answer, and mask_token_id. sides: keys
    of the answers. A SystemExit raised by `rows` ends all ranks.
    """

    def tokenise():
        tokens, bounds, dropped = array("i"), array("q", [0]), {}
        source = iter(tqdm(rows, "tokenising", unit=" rows", leave=False, disable=None))
        chunks = iter(lambda: list(islice(source, CHUNK)), [])
        encoded = (encode_rows(chunk, tokenizer, model, max_length, sides) for chunk in chunks)
        for number, row in enumerate(chain.from_iterable(encoded), 1):
            if isinstance(row, Dropped):
                count = {"rows": 0, "first": f"row {number}, {row.detail}"}
                dropped.setdefault(row.reason, count)["rows"] += 1
                continue
            for part in row:
                tokens.extend(part)
                bounds.append(len(tokens))
        tokens, bounds = (torch.from_numpy(np.array(values)) for values in (tokens, bounds))
        return TokenRows(tokens, bounds, 1 + len(sides), dropped)

    return from_first_rank(tokenise)


def encode_rows(rows, tokenizer, model, max_length, sides):
    """-> for each row a tuple of ids (prompt, then each side with the end of turn) or Dropped.

    The prompt is rendered by the chat template up to where the answer starts, and the answer's ids
    follow. Rendering the finished dialogue would be wrong: SDAR's template puts an empty think
    block before the last answer. In an answer, what looks like a special token (<|MASK|>) stays
    ordinary text. In a prompt it becomes that token, as in a rollout, and the row is dropped: a
    mask in clean text would never be revealed.
    """
    encoded = [render(row, tokenizer, sides) for row in rows]
    kept = [i for i, text in enumerate(encoded) if isinstance(text, str)]
    if not kept:
        return encoded
    prompts = tokenizer([encoded[i] for i in kept], add_special_tokens=False)["input_ids"]
    texts = [rows[i][side] for i in kept for side in sides]
    texts = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    answers = iter(texts)
    for i, prompt in zip(kept, prompts, strict=True):
        ids = [next(answers) for _ in sides]
        length = len(prompt) + max(map(len, ids)) + 1
        if len(ids) == 2 and ids[0] == ids[1]:
            encoded[i] = Dropped("have two equal sides", excerpt(rows[i]))
        elif any(model.mask_token_id in part for part in [prompt, *ids]):
            encoded[i] = Dropped("hold a mask token", excerpt(rows[i]))
        elif length > max_length:
            why = f"exceed --max-length {max_length}"
            encoded[i] = Dropped(why, f"{length} tokens: {excerpt(rows[i])}")
        else:
            encoded[i] = prompt, *(part + model.eos_token_ids[:1] for part in ids)
    return encoded


def render(row, tokenizer, sides):
    """-> the prompt of a row as text, or Dropped."""
    if isinstance(row, Dropped):
        return row
    answers = [row[side] for side in sides]
    if not all(map(str.strip, answers)):
        return Dropped("have an empty answer", excerpt(row))
    try:
        text = prompt_text(tokenizer, row["prompt"])
        "".join([text, *answers]).encode()
        return text
    except (UnicodeEncodeError, TemplateError, TypeError) as error:
        reason = "are refused by the chat template"
        if isinstance(error, UnicodeEncodeError):
            reason = "hold half of a character (a surrogate)"
        return Dropped(reason, f"{excerpt(row)}, {one_line(error)}")


def without_questions(rows, asked):
    """Drop rows that ask one of the prompts `asked`, those that the run is scored on."""
    asked = set(map(question, asked))
    for row in rows:
        if not isinstance(row, Dropped) and question(row["prompt"]) in asked:
            row = Dropped("ask what the run is scored on", excerpt(row))
        yield row


def question(messages):
    """What two prompts share if they ask the same: the last turn but for case and white space."""
    return " ".join(messages[-1]["content"].split()).casefold()


def as_messages(prompt):
    """A prompt that may be text, as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def is_dialogue(messages):
    """Whether a value is a list of turns, at least one, each with role and content as text."""
    try:
        texts = [turn[key] for turn in messages for key in ("role", "content")]
        return bool(texts) and all(isinstance(text, str) for text in texts)
    except (TypeError, LookupError):
        return False


def unreadable(row, reason):
    return Dropped(reason, f"with {describe_columns(row)}: {str(row)[:120]}")


def excerpt(row):
    texts = [repr(text[:60]) for key, text in row.items() if key != "prompt"]
    return f"{row['prompt'][-1]['content'][:60]!r} -> {' rather than '.join(texts)}"
