"""What a rollout returns: tokens, and the order in which they were revealed."""

from dataclasses import dataclass
from itertools import repeat

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only

from distributed.groups import all_reduce
from distributed.sequence import gather_objects
from rollout.schedules import block_quotas


class Completion(str):
    """A completion as text. tokens: how many it has, with the EOS; truncated: it has no EOS;
    forwards: that revealed its tokens, None where the sampler does not tell
    """

    def __new__(cls, text, tokens=None, truncated=None, forwards=None):
        self = super().__new__(cls, text)
        self.tokens, self.truncated, self.forwards = tokens, truncated, forwards
        return self


@dataclass
class Trace:
    """N completions (num_samples of each prompt, contiguous) of width L. Ids, never text, go from
    here to the learner.

    None where an engine does not tell: step_map, logps, num_forwards of lmdeploy's.
    """

    prompt_ids: list[list[int]]  # N, each prompt repeated for its samples
    completion_ids: torch.Tensor  # [N, L] int64; pad id where nothing was revealed
    # [N, L] bool, up to and with the first EOS: what is scored and graded
    completion_mask: torch.Tensor
    # [N] int64, positions that the sampler's model saw. Block models: through the terminal block,
    # all of them revealed. Bidirectional models: all L; after the terminal block they stayed
    # masked, and a replay must mask them.
    canvas_length: torch.Tensor
    # [N, L] int64, denoising step inside the position's own block; -1 where never revealed
    step_map: torch.Tensor | None
    # [N, L] fp32, log-probability with which the token was drawn: of softmax(logits / temperature)
    # after bans, top-k and top-p; at temperature 0 of softmax(logits)
    logps: torch.Tensor | None
    sample_index: torch.Tensor  # [N] int64, global index in this rollout: the key of the draws
    # [N] int64, forwards of this row: denoising and separate commits, without the prefill
    num_forwards: torch.Tensor | None
    settings: dict
    # [N, K, L] of each of K = num_replays forwards: some "tokens" int32, -1 elsewhere, and their
    # "logps", 0 elsewhere. Of kind "draws": those drawn at the masks of the block in work, revealed
    # or not. "states": also those drawn at the masks behind it, so that they tell what the forward
    # saw masked. "events": those that it wrote, the mask token with 0 where it masked again; the
    # maps and logps above are those of the last change.
    records: dict | None = None

    @property
    def num_replays(self):
        """Forwards that replay this trace, numbered in replay_map: one for a step of one block;
        block models replay the step of all their blocks in one. The settings alone decide it, so it
        is equal on all ranks.
        """
        return num_replays(self.settings)

    @property
    def replay_map(self):
        """Number of the forward that replays each token. [N, L], -1 where never revealed"""
        if self.settings["attention"] == "block-causal":
            return self.step_map
        lengths = self.step_map.new_tensor([0, *map(len, block_quotas(**self.settings))])
        return torch.where(self.step_map >= 0, lengths.cumsum(0)[self.blocks] + self.step_map, -1)

    @property
    def blocks(self):
        """Number of the block of each position of the completions, from 0. [N, L]"""
        place = torch.arange(self.completion_ids.shape[1], device=self.completion_ids.device)
        if self.settings["attention"] == "bidirectional":
            ends = place.new_tensor([*map(sum, block_quotas(**self.settings))]).cumsum(0)
            return torch.bucketize(place, ends, right=True).expand_as(self.completion_ids)
        n = self.settings["block_length"]  # the grid of blocks starts with the prompt
        return (place.new_tensor([[len(ids) % n] for ids in self.prompt_ids]) + place) // n

    @property
    def truncated(self):
        """[N] bool: the budget ended before an EOS."""
        is_eos = among(self.completion_ids, self.settings["eos_token_ids"])
        return ~(is_eos & self.completion_mask).any(1)

    @property
    def reveal_map(self):
        """replay_map without gaps: forwards that revealed nothing are not counted. [N, L], -1 where
        never revealed
        """
        numbers = torch.stack([row.unique(return_inverse=True)[1] for row in self.replay_map])
        return numbers - (self.replay_map < 0).any(1, keepdim=True).long()  # -1 is the lowest

    def completion(self, i):
        """Scored ids of completion i, the final EOS included. -> list[int]"""
        return self.completion_ids[i][self.completion_mask[i]].tolist()

    def completions(self):
        """The same of all. -> N lists of int"""
        return [self.completion(i) for i in range(len(self.prompt_ids))]

    def sequences(self, pad_token_id):
        """Prompt (padded on the left) + completion. -> input_ids [N, T], valid_mask [N, T] bool: no
        padding, only the canvas
        """
        device = self.completion_ids.device
        prompts = [torch.tensor(ids, device=device) for ids in self.prompt_ids]
        P, prompts = max(map(len, prompts)), pad_sequence(prompts, True, pad_token_id, "left")
        valid = ~below(torch.tensor([P - len(ids) for ids in self.prompt_ids], device=device), P)
        canvas = below(self.canvas_length, self.completion_ids.shape[1])
        return torch.cat([prompts, self.completion_ids], 1), torch.cat([valid, canvas], 1)

    def replayed(self, replay=None, K=None):
        """What each forward of a replay reveals, and what it sees masked. replay [N, L]: number of
        the one that reveals a token, of K, -1: none; without them those of `replay_map`

        -> two [N, K, L] bool
        """
        if replay is None:
            replay, K = self.replay_map, self.num_replays
        now = replay[:, None] - torch.arange(K, device=replay.device)[:, None]
        return now == 0, (now >= 0) | (replay[:, None] < 0)

    def states(self, mask_token_id):
        """What the forward of each replay sees of the completions: num_replays tensors [N, L],
        masked where not revealed. Not for records of kind "states", which tell them already.
        """
        replay_map, state = self.replay_map, torch.full_like(self.completion_ids, mask_token_id)
        for replay in range(self.num_replays):
            yield state
            new = torch.where(replay_map == replay, self.completion_ids, -1)
            if self.settings["records"] == "events":  # they also tell what was masked again
                new = self.records["tokens"][:, replay].long()
            state = torch.where(new >= 0, new, state)

    def write_to(self, canvas, first):
        """Write what is revealed into a canvas: tokens, step map, logps [N, S], in which the
        completions begin at columns first [N]. -> num_forwards
        """
        i, j = revealed = (self.step_map >= 0).nonzero(as_tuple=True)
        known = self.completion_ids, self.step_map, self.logps
        for values, new in zip(canvas, known, strict=True):
            values[i, first[i] + j] = new[revealed]
        return self.num_forwards

    def select(self, rows):
        """-> the Trace of these rows, a list of numbers"""
        taken = tree_map_only(torch.Tensor, lambda x: x[rows], vars(self))
        return Trace(**taken | {"prompt_ids": [self.prompt_ids[i] for i in rows]})

    def text(self, i, tokenizer):
        """Completion i as text, without special tokens: what is graded."""
        return tokenizer.decode(self.completion(i), skip_special_tokens=True)

    def texts(self, tokenizer):
        """All as Completion."""
        ids, forwards = self.completions(), repeat(None)
        if self.step_map is not None:
            # num_forwards depends on the batch: a small one saves commits
            steps = ((self.blocks << 20) + self.step_map).where(self.step_map >= 0, -1)
            forwards = [len({*row} - {-1}) for row in steps.tolist()]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [*map(Completion, texts, map(len, ids), self.truncated.tolist(), forwards)]

    def describe(self, i, tokenizer, reward, example):
        """Completion i, its reward, and the gold answer of its example for samples.jsonl. -> dict
        that JSON can hold
        """
        return {
            "prompt": tokenizer.decode(self.prompt_ids[i]),
            "completion": self.text(i, tokenizer),
            "gold": gold(example),
            "reward": float(reward),
            **self.unmasking(i, tokenizer),
        }

    def unmasking(self, i, tokenizer):
        """The scored tokens of completion i for samples.jsonl: ids and texts, and as far as the
        engine tells the block of each, its step there, and its log-probability. -> dict of lists
        """
        ids, scored = self.completion(i), self.completion_mask[i]
        row = {"completion_ids": ids, "pieces": pieces(ids, tokenizer)}
        if self.step_map is not None:
            row["blocks"] = self.blocks[i][scored].tolist()
            row["step_map"] = self.step_map[i][scored].tolist()
            row["logps"] = [round(value, 4) for value in self.logps[i][scored].tolist()]
        return row

    def draw(self, i, tokenizer):
        """The first scored tokens of completion i, about 100 columns for a terminal, each over the
        denoising step of its block that revealed it. Bars separate blocks.
        """
        prompt = f"prompt   {tokenizer.decode(self.prompt_ids[i])}"
        if self.step_map is None:
            return f"{prompt}\ntokens   {self.text(i, tokenizer)!r}"
        row, top, bottom = self.unmasking(i, tokenizer), "tokens   ", "step     "
        before = row["blocks"][0]
        for piece, block, step in zip(row["pieces"], row["blocks"], row["step_map"], strict=True):
            if len(top) <= 100:
                bar, before = "| " * (block != before), block
                cells = repr(piece)[1:-1], str(step + 1)  # newlines as \n
                width = max(map(len, cells)) + 1
                top += bar + cells[0].ljust(width)
                bottom += " " * len(bar) + cells[1].ljust(width)
        return f"{prompt}\n{top}\n{bottom}"


def gold(example):
    """What an example of evals/ calls its gold answer, solution, target or answers, as text; else
    empty.
    """
    names = "gold", "solution", "target", "answers"
    found = next((example[name] for name in names if name in example), "")
    return " | ".join(map(str, found)) if isinstance(found, list) else str(found)


def pieces(ids, tokenizer):
    """The text of each token, special tokens included. -> list[str]; joined they are the whole text

    A character that several tokens make up is the text of the last of them; the others are empty.
    """
    texts, first = [], 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[first:end])
        # UTF-8 has at most four bytes for a character: what is not whole then is no character
        is_part = text.endswith("\ufffd") and end < min(first + 4, len(ids))
        texts.append("" if is_part else text)
        first = first if is_part else end
    return texts


def num_replays(settings):
    """See `Trace.num_replays`. settings: of a trace"""
    if settings["attention"] == "bidirectional":
        return sum(map(len, block_quotas(**settings)))
    edits = settings["max_post_steps"] if settings["editing_threshold"] is not None else 0
    return settings["denoising_steps"] + edits


def below(lengths, width):
    """lengths [N] -> [N, width] bool: the first lengths[i] columns of row i"""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def among(ids, some):
    """Which ids are in the list `some` -> bool"""
    return torch.isin(ids, torch.tensor(some, device=ids.device))


def scored(completion_ids, canvas_length, eos_token_ids):
    """What of completion_ids [N, L] is scored: up to and with the first EOS, on the canvas. -> [N,
    L] bool
    """
    is_eos = among(completion_ids, eos_token_ids).long()
    return below(canvas_length, completion_ids.shape[1]) & (is_eos.cumsum(1) - is_eos == 0)


def rollout_metrics(trace, rewards, components, num_generations):
    """Health of a rollout: means over the sequences of all ranks, and the spread reward/std.
    Collective.

    Of this rank's N sequences: rewards [N]; components: one dict of floats a sequence, whose sum is
    its reward; groups of num_generations are contiguous. -> {metric name: float}
    """
    lengths, groups = trace.completion_mask.sum(1), rewards.view(-1, num_generations)
    ids = list(map(tuple, trace.completions()))
    names, forwards = components[0] if len(components[0]) > 1 else (), trace.num_forwards
    sums = {
        "sequences": len(rewards),
        "reward/mean": rewards.sum(),
        "reward/square": rewards.square().sum(),
        "reward/zero_std_frac": (groups == groups[:, :1]).all(1).sum() * num_generations,
        "completion/length": lengths.sum(),
        "completion/truncated_frac": trace.truncated.sum(),
        "completion/empty_frac": (lengths - (~trace.truncated).long() == 0).sum(),
        "completion/distinct_frac": sum(
            len(set(ids[i : i + num_generations])) for i in range(0, len(ids), num_generations)
        ),
        **({} if forwards is None else {"speed/tokens_per_forward": (lengths / forwards).sum()}),
        **{f"reward/{name}": sum(parts[name] for parts in components) for name in names},
    }

    sums = all_reduce(sums)
    count = sums.pop("sequences")
    means = {name: value / count for name, value in sums.items()}
    variance = means.pop("reward/square") - means["reward/mean"] ** 2
    return means | {"reward/std": max(variance, 0.0) ** 0.5}


def concatenate(traces, pad_token_id):
    """Traces of one rollout, generated in parts -> one Trace, padded to the widest."""
    width = max(trace.completion_ids.shape[1] for trace in traces)
    fills = {"completion_ids": pad_token_id, "completion_mask": False, "logps": 0.0}
    fills |= {"step_map": -1, "tokens": -1}

    def joined(some):
        return {name: join(name, [one[name] for one in some]) for name in some[0]}

    def join(name, parts):
        first = parts[0]
        if isinstance(first, list):
            return sum(parts, [])
        if name == "records" and first:
            return joined(parts)
        if not isinstance(first, torch.Tensor):
            return first
        if name in fills:
            parts = [F.pad(x, (0, width - x.shape[-1]), value=fills[name]) for x in parts]
        return torch.cat(parts)

    return Trace(**joined([*map(vars, traces)]))


def predictions_of(tokens):
    """What each step makes of the whole completion: its own draws at the masks, elsewhere the last
    ones. tokens [B, S, L], records of kind "states" -> [B, S, L] int64
    """
    step = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
    last = torch.where(tokens >= 0, step, 0).cummax(1).values
    return tokens.long().gather(1, last)


def gathered(trace, components, examples, pad_token_id):
    """This rank's rollout, what its completions earn, and their examples -> trace, rewards [N],
    components and examples of all ranks with which it shares rows. Collective.
    """
    device = trace.completion_ids.device
    traces, *lists = zip(*gather_objects((trace, components, examples), device), strict=True)
    components, examples = (sum(some, []) for some in lists)
    rewards = torch.tensor([sum(parts.values()) for parts in components], device=device)
    trace = concatenate(traces, pad_token_id) if len(traces) > 1 else trace
    return trace, rewards, components, examples
