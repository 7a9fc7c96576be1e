"""From rows of text to token ids. Rank 0 reads and tokenises; every rank receives the result.

A row is {"prompt": messages, "response": text}, or a pair, {"prompt", "chosen", "rejected"}. A row
that is left out is a Dropped; rows are never cut.
"""

from array import array
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from distributed.disk import from_first_rank, progress
from models.checkpoint import prompt_text
from rollout.rows import Batch
from rollout.traces import Trace

# names of a role, ShareGPT's too; a template may leave out a turn of another role without a word
ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
ROLES |= {"human": "user", "gpt": "assistant"}
CHUNK = 1024  # rows per tokenizer call: keeps all cores busy, and little text in memory


class Dropped(NamedTuple):
    """A row that is left out."""

    reason: str  # rows are counted by it
    detail: object  # its beginning is shown for the first row with this reason


class TokenRows:
    """rows[i] -> tuple of lists of ids, one per part: prompt, answer; or prompt, chosen, rejected.

    An answer may hold several turns; a token between them, which is not scored, is ~id.
    rows: the same as arrays; Python ints would take ten times the memory. dropped: lines, one for
    each reason.
    """

    def __init__(self, rows, dropped):
        self.rows, self.dropped = rows, dropped

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return tuple(part.tolist() for part in self.rows[i])

    @property
    def lengths(self):
        """[rows, parts]"""
        return torch.tensor([[len(part) for part in row] for row in self.rows])

    def report(self, name):
        """-> lines: the number of rows, and how many were dropped for each reason."""
        lengths = [sum(map(len, row)) for row in self.rows] or [0]
        facts = f"{len(self):,} {name}, {sum(lengths):,} tokens, the longest has {max(lengths)}"
        return "\n  dropped: ".join([facts, *self.dropped])

    def at_least(self, batch_size):
        """-> self; SystemExit if there are too few rows for one step, with the reasons."""
        if len(self) < batch_size:
            problem = f"{len(self)} rows to train on, fewer than --batch-size {batch_size}"
            raise SystemExit("; dropped: ".join([f"--data holds {problem}", *self.dropped]))
        return self


def batch_of(rows, index, seed, model, device):
    """rows: [(prompt, canvas, of each of its tokens the number of the forward that revealed it, -1
    of none)], with their numbers in the step -> Batch, of which what was revealed may be scored
    """
    table = [torch.tensor(row[1:], device=device).T for row in rows]
    lengths, index = torch.tensor([[*map(len, table)], index], device=device)
    canvas, reveals = pad_sequence(table, True, -1).unbind(2)
    settings = {"seed": seed, "attention": model.attention}
    facts = canvas.clamp(min=0), reveals >= 0, lengths, reveals, None, index, None, settings
    batch = Batch(Trace([row[0] for row in rows], *facts), model)
    batch.advantages = lengths  # there are none; Rows.for_update leaves out rows where they are 0
    return batch


def encode(rows, tokenizer, model, max_length, asked=(), joins=False):
    """Tokenise rows on rank 0. -> TokenRows on every rank. Collective; other ranks read no row.

    model: with eos_token_ids, the first of which closes an answer, and mask_token_id. asked: the
    prompts that the run is scored on; rows that ask the same are left out. joins: a row whose
    prompt begins with the row before it continues that one, unless its answer begins in the block
    where that ended. A SystemExit raised by `rows` ends all ranks.
    """
    asked = set(map(question, asked))

    def tokenise():
        kept, dropped, source = [], {}, progress(rows, "tokenising")
        turn = [-1]  # prompt and answer of the row before; none yet
        for number, row in enumerate(encode_rows(source, tokenizer, model, max_length, asked), 1):
            if isinstance(row, Dropped):
                dropped.setdefault(row.reason, [0, number, row.detail])[0] += 1
            else:
                (prompt, answer, *_), n = row, len(turn)
                starts_block = joins and n + -n % model.block_length <= len(prompt)
                if starts_block and prompt[:n] == turn:
                    kept[-1][1].extend([~token for token in prompt[n:]] + answer)
                else:
                    kept.append([array("i", part) for part in row])
                turn = prompt + answer
        lines = [
            f"{count:,} {reason}; the first: row {number}, {str(detail)[:200]}"
            for reason, (count, number, detail) in dropped.items()
        ]
        return TokenRows(kept, lines)

    return from_first_rank(tokenise)


def encode_rows(rows, tokenizer, model, max_length, asked):
    """For each row a tuple of ids (prompt, then each answer with the end of turn) or Dropped.

    The prompt is rendered by the chat template up to where the answer starts, and the answer's ids
    follow. Rendering the finished dialogue would be wrong: SDAR's template puts an empty think
    block before the last answer. In an answer, what looks like a special token (<|MASK|>) stays
    ordinary text. In a prompt it becomes that token, as in a rollout, and the row is dropped: a
    mask in clean text would never be revealed.
    """
    rows = iter(rows)
    while chunk := list(islice(rows, CHUNK)):
        texts = [render(row, tokenizer, asked) for row in chunk]
        kept = [text for text in texts if not isinstance(text, Dropped)]
        # prompts, then answers, or chosen and rejected ones
        columns = [
            tokenizer(list(part), add_special_tokens=False, split_special_tokens=i > 0)["input_ids"]
            for i, part in enumerate(zip(*kept, strict=True))
        ]
        encoded = zip(*columns, strict=True)
        for row, text in zip(chunk, texts, strict=True):
            if isinstance(text, Dropped):
                yield text
                continue
            prompt, *answers = next(encoded)
            if model.mask_token_id in chain(prompt, *answers):
                yield Dropped("hold a mask token", row)
            elif len(prompt) + max(map(len, answers)) >= max_length:
                yield Dropped(f"exceed --max-length {max_length}", row)
            else:
                yield prompt, *(ids + model.eos_token_ids[:1] for ids in answers)


def render(row, tokenizer, asked):
    """-> the prompt as text, then the answers of a row; or Dropped."""
    if isinstance(row, Dropped):
        return row
    messages, *answers = row.values()
    if question(messages) in asked:
        return Dropped("ask what the run is scored on", row)
    if not all(map(str.strip, answers)):
        return Dropped("have an empty answer", row)
    try:
        "".join(answers).encode()  # no half of a character, a surrogate
        return [prompt_text(tokenizer, messages), *answers]
    except (UnicodeEncodeError, SystemExit) as error:
        return Dropped("cannot be rendered as a dialogue", f"{error}: {row}")


def question(messages):
    """What two prompts share if they ask the same: the last turn but for case and white space."""
    return " ".join(messages[-1]["content"].split()).casefold()


def answers_of(row, column, every=False):
    """-> [(messages before it, text)]: the answer in a column of a row; every: those of all turns
    of the assistant but a first message. [] if there is none or a message cannot be read.

    The column is text that answers `prompt`, text or messages; or messages that end with the
    answer: turns before it are the prompt, which may hold more than that column.
    """
    try:
        messages = messages_of(row.get(column))
        if len(messages) < 2:
            messages = messages_of(row.get("prompt"), "user") + messages
        "".join(turn["content"] for turn in messages)  # TypeError if one is no text
    except (AttributeError, KeyError, TypeError):  # other values, keys, roles
        return []
    return [
        (messages[:k], messages[k]["content"])
        for k in range(1 if every else max(len(messages) - 1, 1), len(messages))
        if messages[k]["role"] == "assistant"
    ]


def messages_of(cell, role="assistant"):
    """Text of that role, or messages, also with ShareGPT's names -> messages"""
    if isinstance(cell, str):
        cell = [{"role": role, "content": cell}]
    return [
        turn
        | {
            "role": ROLES[turn.get("from") or turn["role"]],
            "content": turn.get("value", turn.get("content")),
        }
        for turn in cell
    ]
