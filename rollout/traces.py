"""What a rollout leaves behind: tokens, and the order in which they were revealed."""

from dataclasses import dataclass, field, fields

import torch

from models.ranks import all_reduce
from rollout.schedules import block_quotas


@dataclass
class Trace:
    """N completions (num_samples of each prompt, contiguous) of width L. Ids, never text, go from
    here to the learner.

    None where an engine does not tell: step_map, replay_map, logps, num_forwards of lmdeploy's.
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
    # [N, L] int64, equal numbers were revealed together: one forward replays them
    replay_map: torch.Tensor | None
    # [N, L] fp32, log-probability of the token when it was revealed, under settings["logps"]
    logps: torch.Tensor | None
    sample_index: torch.Tensor  # [N] int64, global index in this rollout: the key of the draws
    # [N] int64, forwards of this row: denoising and separate commits, without the prefill
    num_forwards: torch.Tensor | None
    settings: dict = field(default_factory=dict)
    # records="events": "events" [E, 4] int64, in order, each a change of a token: sample index,
    # number of the replay whose forward decided it, position in the completion, new token (the mask
    # token where it was masked again); "logps" [E] of the new tokens, 0 where masked again. The
    # maps and logps above are those of the last change.
    # records="states", for each of K = num_replays forwards: "masked" [N, K, L] bool, what it saw
    # masked, also after the current block; all False where the row made no such forward.
    # "predictions" [N, K, L] int32: the whole completion, with a drawn token at every masked
    # position; pad id where no forward was made. "confidences" [N, K, L] fp32: the probability of
    # each drawn token under settings["logps"], 0 elsewhere. 9 N K L bytes in all.
    records: dict | None = None

    @property
    def num_replays(self):
        """Forwards that replay this trace, numbered in replay_map: one for a step of one block;
        block models replay the step of all their blocks in one. The settings alone decide it, so it
        is equal on all ranks.
        """
        if self.settings["attention"] == "bidirectional":
            return sum(map(len, block_quotas(**self.settings)))
        return most_steps(self.settings)

    @property
    def truncated(self):
        """[N] bool: the budget ended before an EOS."""
        first_eos = torch.isin(
            self.completion_ids,
            torch.tensor(self.settings["eos_token_ids"], device=self.completion_ids.device),
        )
        return ~(first_eos & self.completion_mask).any(1)

    def completion(self, i):
        """Scored ids of completion i, the final EOS included. -> list[int]"""
        return self.completion_ids[i][self.completion_mask[i]].tolist()

    def sequences(self, pad_token_id):
        """Prompt (padded on the left) + completion. -> input_ids [N, T], valid_mask [N, T] bool: no
        padding, only the canvas
        """
        prompts, valid = left_padded(self.prompt_ids, pad_token_id, self.completion_ids.device)
        on_canvas = (
            torch.arange(self.completion_ids.shape[1], device=valid.device)
            < self.canvas_length[:, None]
        )
        return torch.cat([prompts, self.completion_ids], 1), torch.cat([valid, on_canvas], 1)

    def states(self, mask_token_id):
        """What the forward of each replay sees of the completions: num_replays tensors [N, L],
        masked where not revealed.
        """
        state, records = torch.full_like(self.completion_ids, mask_token_id), self.records or {}
        for replay in range(self.num_replays):
            if "masked" in records:
                yield (
                    records["predictions"][:, replay]
                    .long()
                    .masked_fill(records["masked"][:, replay], mask_token_id)
                )
                continue
            yield state
            state = torch.where(self.replay_map == replay, self.completion_ids, state)
            if "events" in records:  # tokens that were masked again as well
                sample, _, position, token = records["events"][
                    records["events"][:, 1] == replay
                ].unbind(1)
                state[torch.searchsorted(self.sample_index, sample.contiguous()), position] = token

    def blocks(self, i):
        """-> number of the block of each of the L positions of completion i, from 0"""
        if self.settings["attention"] == "bidirectional":
            return [
                block
                for block, quota in enumerate(block_quotas(**self.settings))
                for _ in range(sum(quota))
            ]
        n = self.settings["block_length"]
        start = len(self.prompt_ids[i]) % n  # the grid of blocks starts with the prompt
        return [(start + j) // n for j in range(self.step_map.shape[1])]

    def text(self, i, tokenizer):
        """Completion i as text, without special tokens: what is graded."""
        return tokenizer.decode(self.completion(i), skip_special_tokens=True)

    def texts(self, tokenizer):
        """All completions as text."""
        return [self.text(i, tokenizer) for i in range(len(self.prompt_ids))]

    def describe(self, i, tokenizer, reward):
        """Completion i and its reward for samples.jsonl. -> dict that JSON can hold"""
        scored, steps = self.completion_mask[i], {}
        if self.step_map is not None:
            steps["step_map"] = self.step_map[i][scored].tolist()
        if self.logps is not None:
            steps["logps"] = [round(value, 4) for value in self.logps[i][scored].tolist()]
        return {
            "prompt": tokenizer.decode(self.prompt_ids[i]),
            "completion": self.text(i, tokenizer),
            "reward": float(reward),
            "completion_ids": self.completion(i),
        } | steps

    def draw(self, i, tokenizer, width=110, max_lines=6):
        """Completion i for a terminal: each revealed token over the denoising step of its block
        that revealed it.

        Blocks are parted by bars and never broken; max_lines pairs of lines of about `width`
        columns.
        """
        if self.step_map is None:
            prompt, text = tokenizer.decode(self.prompt_ids[i]), self.text(i, tokenizer)
            return f"prompt   {prompt}\ntokens   {text!r}"
        block, revealed = self.blocks(i), (self.step_map[i] >= 0).nonzero().flatten().tolist()
        tops, bottoms = [""], [""]
        for j in revealed:
            token = repr(tokenizer.decode([int(self.completion_ids[i, j])]))[
                1:-1
            ]  # a newline is shown as \n
            step = str(int(self.step_map[i, j]) + 1)
            opens_block = j == 0 or block[j] != block[j - 1]
            if opens_block and len(tops[-1]) > width:
                tops, bottoms = [*tops, ""], [*bottoms, ""]
            edge = "| " if opens_block and tops[-1] else ""
            cell = max(len(token), len(step)) + 1
            tops[-1] += edge + token.ljust(cell)
            bottoms[-1] += " " * len(edge) + step.ljust(cell)
        lines = [f"prompt   {tokenizer.decode(self.prompt_ids[i])}"]
        for top, bottom in list(zip(tops, bottoms, strict=True))[:max_lines]:
            lines += [f"tokens   {top}", f"step     {bottom}"]
        if len(tops) > max_lines:
            lines.append(f"... {len(revealed)} tokens in all, see samples.jsonl")
        return "\n".join(lines)


def most_steps(settings):
    """Steps of a block that may change its tokens."""
    edits = settings["max_post_steps"] if settings["editing_threshold"] is not None else 0
    return settings["denoising_steps"] + edits


def left_padded(prompt_ids, pad_token_id, device):
    """Lists of ids -> input_ids [N, P] int64, valid_mask [N, P] bool"""
    P = max(map(len, prompt_ids))
    input_ids = torch.tensor(
        [[pad_token_id] * (P - len(ids)) + ids for ids in prompt_ids], device=device
    )
    start = torch.tensor([[P - len(ids)] for ids in prompt_ids], device=device)
    return input_ids, torch.arange(P, device=device) >= start


def scored(completion_ids, canvas_length, eos_token_ids):
    """What of completion_ids [N, L] is scored: up to and with the first EOS, on the canvas. -> [N,
    L] bool
    """
    on_canvas = (
        torch.arange(completion_ids.shape[1], device=completion_ids.device) < canvas_length[:, None]
    )
    is_eos = torch.isin(
        completion_ids, torch.tensor(eos_token_ids, device=completion_ids.device)
    ).long()
    return on_canvas & (is_eos.cumsum(1) - is_eos == 0)


def rollout_sums(trace, rewards, components, num_generations):
    """Health of a rollout: sums over this rank's N sequences, so that sums over ranks divided by
    all sequences are means.

    rewards [N]; components: one dict of floats a sequence, whose sum is its reward; groups of
    num_generations are contiguous. -> {metric name: 0-d tensor or number}; reward/square gives the
    spread.
    """
    lengths, groups = trace.completion_mask.sum(1), rewards.view(-1, num_generations)
    ids = [tuple(trace.completion(i)) for i in range(len(rewards))]
    names, forwards = components[0] if len(components[0]) > 1 else (), trace.num_forwards
    return {
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


def rollout_means(sums, num_sequences):
    """rollout_sums of all ranks added up -> {metric name: float}, means over sequences, and the
    spread reward/std
    """
    means = {name: value / num_sequences for name, value in sums.items()}
    return means | {
        "reward/std": max(means.pop("reward/square") - means["reward/mean"] ** 2, 0.0) ** 0.5
    }


def rollout_metrics(trace, rewards, components, num_generations):
    """rollout_means over the sequences of all ranks; arguments as of rollout_sums. Collective."""
    sums = rollout_sums(trace, rewards, components, num_generations)
    sums = all_reduce(sums | {"sequences": len(rewards)})
    return rollout_means(sums, sums.pop("sequences"))


def concatenate(traces, pad_token_id):
    """Traces of one rollout, generated in parts -> one Trace, padded to the widest."""
    width = max(trace.completion_ids.shape[1] for trace in traces)
    filler = {
        "completion_ids": pad_token_id,
        "completion_mask": False,
        "step_map": -1,
        "replay_map": -1,
        "logps": 0.0,
    }
    values = {}
    for f in fields(Trace):
        parts = [getattr(trace, f.name) for trace in traces]
        if f.name in filler and parts[0] is not None:
            parts = [
                torch.nn.functional.pad(part, (0, width - part.shape[1]), value=filler[f.name])
                for part in parts
            ]
        if f.name == "prompt_ids":
            values[f.name] = [ids for part in parts for ids in part]
        elif f.name == "records":
            values[f.name] = parts[0] and {
                key: torch.cat([part[key] for part in parts]) for key in parts[0]
            }
        else:
            values[f.name] = torch.cat(parts) if isinstance(parts[0], torch.Tensor) else parts[0]
    return Trace(**values)
