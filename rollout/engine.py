"""What all samplers share: settings and their checks, the rules that choose which tokens to reveal,
the loops over blocks and denoising steps, loading of weights.
"""

import math
import sys
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter

import torch

from distributed.disk import progress
from distributed.sharding import cuda_bytes
from models.logps import at_least_fp32
from models.lora import adapter_tensors
from models.tensors import tensor_names
from rollout.sampling import keyed_state, keyed_uniform, sample_categorical
from rollout.schedules import block_quotas, eoser_weight, reveal_shares
from rollout.traces import Trace, among, below, concatenate, num_replays, scored

# what the training scripts offer
REMASKING = "low_confidence_static", "low_confidence_dynamic", "random"
RULES = (
    *REMASKING, "low_confidence_factor", "entropy", "entropy_bounded", "topk_margin", "sequential",
)  # fmt: skip
# rules for which the model decides how many tokens a step reveals
ADAPTIVE = "low_confidence_dynamic", "low_confidence_factor", "entropy_bounded"
ENTROPIES = "entropy", "entropy_bounded"
# lowest and highest value of fields of SamplingSettings; of others 0 and any finite one
LIMITS = {"gen_length": (1, sys.maxsize), "denoising_steps": (1, sys.maxsize), "top_p": (1e-6, 1)}
LIMITS |= {"confidence_threshold": (0, 1), "editing_threshold": (0, 1)}
BROKEN = "logits are not finite at samples {}: the weights are damaged or have diverged"
LOWER = "lower --batch-size (evals), --prompts-per-step (training) or --gen-length"
# share of the memory below which an engine keeps its caches during an update
KEPT_BELOW = 0.9
HEAD_ROWS = 512  # tokens whose logits exist at the same time


@dataclass
class SamplingSettings:
    """How completions are drawn: keyword arguments of `Engine.generate` and `Engine.validate`,
    recorded in Trace.settings, and flags of evals/run.py.
    """

    gen_length: int = 256
    """tokens per completion, a multiple of the block length"""
    block_length: int | None = None
    """tokens per block; 0 or None: the model's own, the only one of a block-causal model"""
    denoising_steps: int = 4
    """denoising steps per block; under the schedule "ascending" of the first block. With as
    many as a block has tokens, a rule with a threshold alone decides what more than one is revealed
    """
    temperature: float = 1.0
    """sampling temperature; 0 is greedy"""
    # The learner's log-probabilities are those of the full distribution.
    top_k: int = 0
    """sample only from this many most probable tokens; 0: from all"""
    top_p: float = 1.0
    """sample from the fewest tokens whose probabilities add up to this"""
    remasking: str = "low_confidence_dynamic"
    """rule that chooses the positions to reveal; an unknown name prints the engine's rules"""
    confidence_threshold: float = 0.9
    """low_confidence_dynamic reveals every position above this confidence"""
    factor: float = 1.0
    """low_confidence_factor: Fast-dLLM's f; larger values reveal more per step"""
    eb_threshold: float = 0.35
    """entropy_bounded: nats revealed per step; SDAR's default"""
    editing_threshold: float | None = None
    """LLaDA2.1: replace a revealed token by one more probable than this (its authors: 0.5, or 0 for
    speed); None: never"""
    max_post_steps: int = 16
    """LLaDA2.1: maximum number of steps that only edit a block"""
    schedule: str = "uniform"
    """bidirectional models: tokens per step, uniform, timesteps (Dream) or ascending (ASS)"""
    # The logps of a trace are then approximate too.
    cache: str = "none"
    """bidirectional models: none, or Fast-dLLM's approximate prefix or dual cache"""
    # suppress: EOS has probability 0 (but not in the learner's log-probabilities); demote: EOS is
    # revealed last in its block; eoser: the confidence of EOS is lowered, see `eoser_weight`
    eos_policy: str = "none"
    """bidirectional models: none, suppress, demote or eoser, which keep answers from ending early
    """
    alg_temp: float = 0.0
    """bidirectional models: Dream's temperature for a random order; 0: most confident first"""

    def flag(self, name):
        """-> the flag of a field and its value, for messages"""
        return f"--{name.replace('_', '-')} {getattr(self, name)}"


def select(confidence, masked, quota, remasking, confidence_threshold, factor, eb_threshold, **_):
    """Which masked tokens of a block to reveal: the most confident ones; at equal confidence those
    at lower positions. "sequential" takes the lowest positions, whatever the confidence.

    confidence [N, n] fp32; masked [N, n] bool; quota: how many to reveal, if there are as many
    masks. -> [N, n] bool

    The adaptive rules may reveal more than the quota, never fewer:
        low_confidence_dynamic  all above confidence_threshold
        low_confidence_factor   the k best, for the largest k for which (k + 1)(1 - confidence of
                                the k-th best) < factor (Fast-dLLM, arXiv 2505.22618)
        entropy_bounded         as many as have entropies (the negative confidences) that add up to
                                at most eb_threshold nats. This is the rule of SDAR's generate.py
                                and JetEngine; the paper (EB-Sampler, arXiv 2505.24857) leaves the
                                largest of these entropies out of the sum
    """
    rank = torch.arange(masked.shape[1], device=masked.device)
    if remasking == "sequential":
        confidence = -rank.float().expand_as(masked)
    # a block that begins with prompt tokens may have fewer masks
    number = masked.sum(1, keepdim=True).clamp(max=quota)
    score = confidence.masked_fill(~masked, -math.inf)
    score, order = score.sort(dim=1, descending=True, stable=True)
    if remasking == "low_confidence_dynamic":
        number = torch.maximum(number, (score > confidence_threshold).sum(1, keepdim=True))
    elif remasking == "low_confidence_factor":
        few = (rank + 2) * (1 - score) < factor
        number = torch.maximum(number, few.sum(1, keepdim=True))
    elif remasking == "entropy_bounded":
        number = torch.maximum(number, ((-score).cumsum(1) <= eb_threshold).sum(1, keepdim=True))
    return torch.empty_like(masked).scatter_(1, order, rank < number)


def truncate(logits, temperature, top_k=0, top_p=1.0):
    """Keep the top_k most probable tokens (0: all), then of these the fewest whose probabilities
    under softmax(logits / temperature) reach top_p; tokens as probable as the last one kept stay
    too.

    logits [M, V], -inf where banned -> [M, V], -inf where removed
    """
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    if top_p < 1:
        ordered = logits.sort(dim=-1, descending=True).values
        # At least fp32: a running sum in bf16 stops growing at terms below 2^-9 of it, and the
        # whole tail would stay.
        p = (ordered.to(at_least_fp32(ordered)) / temperature).softmax(-1)
        needed = p.cumsum(-1) - p < top_p  # the tokens before it fall short of top_p
        least = ordered.masked_fill(~needed, math.inf).amin(-1, keepdim=True)
        logits = logits.masked_fill(logits < least, -math.inf)
    return logits


@dataclass
class CurrentBlock:
    """One block in each of R rows that are denoised together."""

    tokens: torch.Tensor  # [R, S] int64, prompts padded on the left and completions
    positions: torch.Tensor  # [R, S] int64, 0 on padding
    offset: torch.Tensor  # [R, S] int64, places in the completion, below 0 in the prompt
    bias: torch.Tensor  # [R, 1, 1, S], added to attention scores: -inf on padding, else 0
    sample_index: torch.Tensor  # [R] int64
    first: int  # first column of the block
    quota: list  # tokens to reveal at each step
    first_step: int  # number of steps in earlier blocks
    # keys and values [R, K, S, h] of each layer; of a bidirectional model those of the block's
    # first forward, by layer, or None where it keeps none
    cache: list | dict | None


def unused_by_graphs():
    """-> bytes in the pools of CUDA graphs that no tensor holds. memory_allocated() leaves them
    out, and while the graphs exist nobody else gets them. Free segments of the allocator's other
    pool need no count: it returns them before it runs out.
    """
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_initialized() else []
    return sum(
        some["total_size"] - some["allocated_size"]
        for some in segments
        if tuple(some["segment_pool_id"]) != (0, 0)
    )


class Engine:
    """Sampler with a `model` of its own; the base under adapters may be a learner's.

    A subclass knows the attention pattern. It defines:
        _prefill(prompts, pads, owner, width) -> cache, keys and values [N, ...] per layer
        _forward(block, first, width, window) -> hidden states [R, width, D] for the columns from
            `first` on; window: see rollout/masked.py
    """

    is_block = True  # of a block-causal model, not a bidirectional one
    # The values that an engine accepts; these are those of a block-causal model.
    choices = {
        "remasking": RULES,
        "schedule": ("uniform",),
        "cache": ("none",),
        "eos_policy": ("none",),
        "alg_temp": (0,),
    }
    # Kinds of records that a method may request. "steps": step maps and log-probabilities, which
    # every trace has.
    records = (None, "steps", "events", "draws")
    # Rules under which a block may have no mask left before its last step: `_denoise` looks. Under
    # others the quota of a step says whether it reveals anything. All: a block that begins with
    # prompt tokens has fewer masks.
    adaptive = RULES
    # True: _generate takes all samples at once and decodes max_batch_size of them at a time
    refills = False
    # bytes on the GPU after the last make_room, None: there was none; most that an update took more
    held, need = None, 0
    # tokens of the longest row of the last rollout, and of those that were trained on
    row = longest = 1
    # a Triton kernel on CUDA
    sample_categorical = staticmethod(sample_categorical)

    def __init__(self, model, max_batch_size):
        self.model, self.max_batch_size = model, max_batch_size
        self.device, self.dtype = model.lm_head.weight.device, model.lm_head.weight.dtype

    @torch.no_grad()
    def load_weights(self, weights):
        """weights: pairs (name, full tensor), copied in place; all those of export_weights, or for
        an engine whose model has adapters all those of export_adapter. ValueError names what does
        not fit or is missing.
        """
        own = adapter_tensors(self.model) or tensor_names(self.model)
        for name, value in weights:
            if name not in own or own[name].shape != value.shape:
                unknown = f"{name} {list(value.shape)} is no tensor of this model, or came twice"
                raise ValueError(unknown)
            own.pop(name).copy_(value)
        if own:
            raise ValueError(f"weights did not come for {', '.join(list(own)[:5])}")

    def release(self):
        """Free the GPU memory that generate keeps between calls."""

    def make_room(self):
        """Call it before a model on the same GPU is updated: `release`, unless what generate keeps
        fits beside the largest update so far; longer rows than in that one take more. Before the
        first one nothing is known.
        """
        held, is_first = torch.cuda.memory_allocated(), self.held is None
        if not is_first:  # what the last update took is at most this
            self.need = max(self.need, torch.cuda.max_memory_allocated() - self.held)
        longest = max(self.longest, self.row)
        need = self.need * longest / self.longest
        if is_first or need + held + unused_by_graphs() > KEPT_BELOW * cuda_bytes():
            self.release()
            held = torch.cuda.memory_allocated()
        self.held, self.longest = held, longest

    def block_length(self, given):
        """given: tokens per block, 0 or None for the model's own. -> tokens per block"""
        n = self.model.block_length
        if self.is_block and given not in (None, 0, n):
            raise SystemExit(f"--block-length {given}: this model was trained with blocks of {n}")
        return given or n

    def check(self, settings):
        """SystemExit names settings that this engine cannot combine, each of them a choice."""

    @property
    def title(self):
        return f"the sampler of a {self.model.attention} model"

    def full_settings(self, records, sampling):
        """Fields of SamplingSettings -> settings of a trace. SystemExit names what is
        impossible.
        """
        s = SamplingSettings(**sampling)
        n = self.block_length(s.block_length)
        for name, value in asdict(s).items():
            low, high = LIMITS.get(name, (0, sys.maxsize))
            if value not in self.choices.get(name, (value,)):
                choices = ", ".join(map(str, self.choices[name]))
                raise SystemExit(f"{s.flag(name)}: {self.title} has {choices}")
            if isinstance(value, (int, float)) and not low <= value <= high:
                raise SystemExit(f"{s.flag(name)} must be from {low} to {high}")
        edits = s.editing_threshold is not None
        is_revised = edits or s.remasking == "rcr"
        revises = s.flag("editing_threshold" if edits else "remasking")
        if edits and not getattr(self.model, "is_edited", False):
            name = type(self.model).__name__
            raise SystemExit(f"{revises}: {name} was not trained to edit tokens")
        if records not in self.records:
            raise SystemExit(f"{self.title} keeps no records of kind {records!r}")
        if records in ("steps", "draws") and is_revised:
            raise SystemExit(
                f"{revises} revises tokens, so there is no single step at which a token was "
                "revealed: not for a method that reads step maps"
            )
        if s.schedule == "ascending" and not s.block_length:
            n = sum(block_quotas(**asdict(s))[0])
        if records != "states" and is_revised:
            records = "events"  # without them the trace could not be replayed
        settings = asdict(s) | {"block_length": n, "attention": self.model.attention}
        settings["records"] = None if records == "steps" else records
        settings["eos_token_ids"] = self.model.eos_token_ids
        self.check(settings)
        return settings

    def validate(self, records=None, **sampling):
        """Check what a run requests before its first rollout. sampling: fields of
        `SamplingSettings`. -> one line on what a rollout costs, for the log

        SystemExit where a value is out of range, gen_length is not made of whole blocks, this
        sampler cannot do what is requested, or it keeps no such records. With records the cache
        must be exact, because records are replayed.
        """
        settings = self.full_settings(records, sampling)
        n, gen_length, cache = (settings[name] for name in ("block_length", "gen_length", "cache"))
        if records and cache != "none":
            raise SystemExit(
                f"--cache {cache} is approximate: what a method replays would not be what was "
                "sampled; leave it at none"
            )
        if gen_length % n and settings["schedule"] != "ascending":  # which makes its own blocks
            raise SystemExit(f"--gen-length {gen_length} is no multiple of the block length {n}")
        quotas = block_quotas(**settings)
        tokens, steps = sum(map(sum, quotas)), sum(sum(map(bool, quota)) for quota in quotas)
        at_least = "at least " if settings["remasking"] in ADAPTIVE else ""
        rate = f"{at_least}{tokens / steps:.3g} tokens a step"
        return f"{tokens} tokens in {len(quotas)} blocks and {steps} steps, {rate}"

    @torch.no_grad()
    def generate(
        self, prompt_ids, *, num_samples=1, seed=0, sample_offset=0, stop_at_eos=True,
        records=None, canvas=None, until=None, **sampling,
    ):  # fmt: skip
        """Sample num_samples completions of each prompt (ragged lists of token ids). -> Trace

        sampling: fields of `SamplingSettings`. Generation ends with the block that holds an EOS
        unless stop_at_eos is False. records: "steps" needs nothing; the others: see Trace.records.
        Where tokens are revised (rcr, editing), which no step map can tell, a trace always has one
        of these.

        Sample i of prompt p has the number sample_offset + p * num_samples + i, and every draw is
        keyed by (seed, that number, position, step): batch size, other prompts and ranks do not
        change it.

        A rollout may be made in parts. until: the step before which this one stops; the steps of
        block b begin with number b * denoising_steps. What is not yet revealed then has step_map
        -1. canvas: such a Trace of the same prompts, made under the same settings: its rows,
        instead of masks alone, are what the samples continue, an equal number each row. Parts keep
        no records.
        """
        settings = self.full_settings("steps" if canvas or until else records, sampling)
        rows, mask_id = range(self.model.lm_head.out_features), self.model.mask_token_id
        if not prompt_ids or not all(prompt_ids):
            raise SystemExit("every rollout needs a prompt, and every prompt at least one token")
        for i, ids in enumerate(prompt_ids):
            if not {min(ids), max(ids)}.issubset(rows) or mask_id in ids:
                raise SystemExit(
                    f"prompt {i} holds the mask token (id {mask_id}) or an id outside of the "
                    f"model's {len(rows)}: is the tokenizer the model's?"
                )
        self.row = settings["gen_length"] + max(map(len, prompt_ids))
        start = canvas.settings["steps"].stop if canvas else 0
        settings |= {"num_samples": num_samples, "seed": seed, "stop_at_eos": stop_at_eos}
        settings["steps"] = range(start, until or sys.maxsize)
        samples, parts = torch.arange(len(prompt_ids) * num_samples, device=self.device), []
        prompt_ids = canvas.prompt_ids if canvas else prompt_ids
        each = len(samples) // len(prompt_ids)
        batches = [samples] if self.refills else samples.split(self.max_batch_size)
        for batch in progress(batches, "batches of completions"):
            some = slice(int(batch[0]) // each, int(batch[-1]) // each + 1)
            rows = batch // each - some.start, sample_offset + batch, settings
            known = canvas and canvas.select((batch // each).tolist())
            try:
                parts.append(self._generate(prompt_ids[some], *rows, known))
            except torch.OutOfMemoryError:
                self.release()
                size = min(len(batch), self.max_batch_size)
                raise SystemExit(
                    f"a rollout of {size} rows ran out of GPU memory: {LOWER}"
                ) from None
        return concatenate(parts, self.model.pad_token_id)

    def _generate(self, prompt_ids, owner, sample_index, settings, canvas):
        """Decode one batch, in which row i continues prompt_ids[owner[i]], one block after the
        other. -> Trace

        owner, sample_index [N]. settings["steps"]: the range of steps to make, counted over all
        blocks. canvas: the Trace of N rows that these continue, or None.
        """
        N, device, quotas = len(owner), self.device, block_quotas(**settings)
        n = self.model.block_length if self.is_block else 1
        length = settings["gen_length"] if self.is_block else sum(map(sum, quotas))
        # Rows are padded on the left by whole blocks, so that their blocks share columns:
        #     padding | whole blocks of the prompt | rest of the prompt, masks | masks ... |
        #             pads[i]                      prefilled                               end[i]
        # Position p of row i is column pads[i] + p. Its completion begins at column first[i].
        # Blocks of a bidirectional model begin there too.
        lengths = torch.tensor([len(ids) for ids in prompt_ids])
        prefilled = int(lengths.max()) // n * n
        pads = prefilled - lengths // n * n
        first = pads + lengths
        end = pads + (lengths + length + n - 1) // n * n
        width = int(end.max())
        tokens = torch.full((len(prompt_ids), width), self.model.mask_token_id)
        for i, ids in enumerate(prompt_ids):
            tokens[i, pads[i] : first[i]] = torch.tensor(ids)
        tokens, pads, first, end = (values.to(device) for values in (tokens, pads, first, end))
        cache = self._prefill(tokens[:, :prefilled], pads, owner, width)

        # from a row per prompt to a row per sample
        tokens, pads, first, end = (values[owner] for values in (tokens, pads, first, end))
        column = torch.arange(width, device=device)
        offset = column - first[:, None]
        positions = column - pads[:, None]
        bias = (positions >= 0)[:, None, None].to(self.dtype).log()
        samples = tokens, positions.clamp(min=0), offset, bias, sample_index
        step_map, num_forwards = torch.full_like(tokens, -1), torch.zeros_like(sample_index)
        logps = torch.zeros_like(tokens, dtype=torch.promote_types(self.dtype, torch.float32))
        if canvas:  # a part of a rollout
            num_forwards = canvas.write_to((tokens, step_map, logps), first)
        replays = num_replays(settings) if settings["records"] else 0
        history = [values.repeat(replays, 1, 1) for values in (step_map, logps)]

        row = torch.arange(N, device=device)  # rows that are still generating
        start, first_step = prefilled, 0
        blocks = quotas[:1] * ((width - prefilled) // n) if self.is_block else quotas
        for quota in progress(blocks, "blocks"):
            if first_step >= settings["steps"].stop:
                break
            stop = start + sum(quota)
            here = row, slice(start, stop)
            live = [values[row] for values in samples]
            kept = cache if settings["cache"] == "none" else {}  # a new one
            block = CurrentBlock(*live, start, quota, first_step, kept)
            tokens[here], steps, new_logps, forwards, changes = self._denoise(block, settings)
            # a token is revealed in one part only: elsewhere its step is -1 and its logp 0
            step_map[here] = torch.maximum(steps, step_map[here])
            logps[here] += new_logps
            num_forwards[row] += forwards
            for number, *made in changes:
                for kept, values in zip(history, made, strict=True):
                    kept[number, row, start : start + values.shape[1]] = values

            # Finish the rows that are complete or hold an EOS: the rest cannot change the text.
            is_eos = among(tokens[here], settings["eos_token_ids"]) & (offset[here] >= 0)
            goes_on = (end[row] > stop) & ~(is_eos.any(1) & settings["stop_at_eos"])
            if self.is_block:
                end[row[~goes_on]] = stop
            if not goes_on.any():
                break
            # commit; with editing, the last forward of _denoise was the commit
            if self.is_block and settings["editing_threshold"] is None:
                self._forward(block, start, stop - start, None)
                num_forwards[row] += goes_on
            if not goes_on.all():
                row = row[goes_on]
                cache = cache and [(keys[goes_on], values[goes_on]) for keys, values in cache]
            start, first_step = stop, first_step + len(quota)
        canvas = tokens, step_map, logps
        return self._finish(
            prompt_ids, owner, canvas, history, first, end, sample_index, num_forwards, settings
        )

    def _denoise(self, block, settings):
        """Denoise one block: at each step of its schedule run the model, draw a token for every
        mask, reveal some. Steps with nothing to reveal are left out. With token editing
        (rollout/block.py) more steps follow, until a forward changes nothing.

        rcr (running confidence remasking, MDPO, arXiv 2508.13148): a step draws a token for every
        mask of the block. The most confident tokens of the block stay, as many as the schedule has
        revealed up to this step; all others are masked again, earlier reveals too. A token keeps
        the confidence of its own draw.
        -> tokens, step map, logps [R, n]; num_forwards [R]; for the records, of each step the
        number of the forward that replays it (Trace.num_replays), tokens, -1 where none, and
        log-probabilities
        """
        remasking, kind, n = settings["remasking"], settings["records"], sum(block.quota)
        ids = block.tokens[:, block.first : block.first + n]  # a view, which the forwards read
        step_map, num_forwards = torch.full_like(ids, -1), torch.zeros_like(block.sample_index)
        masked, logps, history = ids == self.model.mask_token_id, 0.0 * ids, []
        # rcr: confidences of the block's tokens, and how many of them stay after this step
        running, due = logps, 0
        # places in the completion: of the block, and of the masks behind it
        places = block.offset[:, block.first :]
        key = keyed_state(settings["seed"], block.sample_index[:, None], places)
        inside, behind = (partial(keyed_uniform, state=some) for some in key.tensor_split([n], 1))
        window = None  # the first forward of a block runs all columns
        edits = settings["editing_threshold"] is not None
        working, post_steps = masked.any(1), 0  # rows that need more forwards
        later = [0] * (settings["max_post_steps"] + 1) if edits else []  # steps that only edit
        for number, quota in enumerate(block.quota + later, block.first_step):
            step = number - block.first_step
            if not (working.any() if remasking in self.adaptive else quota):
                continue  # no mask is left, or this step of the schedule reveals nothing
            if number not in settings["steps"]:
                continue  # another part of the rollout
            drawing, draws = masked, inside(step, "token")
            if kind == "states":  # also predict the masks behind the block, for the record alone
                more = behind(number, "guess")
                drawing = torch.cat([masked, masked.any(1, keepdim=True).expand(more.shape)], 1)
                draws = torch.cat([draws, more], 1)
            hidden = self._forward(block, block.first, draws.shape[1], window)
            window = {"none": None, "prefix": places.shape[1], "dual": n}[settings["cache"]]
            drawn = self._sample(hidden, draws, settings)
            replay = step if self.is_block else number
            if kind in ("draws", "states"):
                history.append((replay, drawn[0].where(drawing, -1), drawn[1]))
            token, token_logps, confidence = (values[:, :n] for values in drawn)
            order = partial(inside, step, "order")
            score = self._score(confidence, token, number, order, settings)
            due += quota
            num_forwards += working
            if remasking == "rcr":
                running = torch.where(masked, score, running)
                stays = select(running, torch.ones_like(masked), due, **settings)
            elif remasking == "origin":  # Dream: reveal each mask with the probability `share`
                share = reveal_shares(block.quota, settings["schedule"])[step]
                stays = ~masked | (order() < share)
            else:  # the most confident masks, `quota` of them or more
                stays = ~masked | select(score, masked, quota, **settings)
            new, again = masked & stays, ~(masked | stays)  # revealed, and masked again (rcr)
            if edits:  # what earlier steps revealed; the prompt's tokens are never edited
                is_noisy = masked.any(1)
                may_edit = working & (is_noisy | (post_steps < settings["max_post_steps"]))
                is_sure = token_logps.exp() > settings["editing_threshold"]
                new |= may_edit[:, None] & ~masked & (places[:, :n] >= 0) & (token != ids) & is_sure
                post_steps += ~is_noisy
            ids.copy_(torch.where(new, token, ids).masked_fill(again, self.model.mask_token_id))
            logps = torch.where(new, token_logps, logps).masked_fill(again, 0.0)
            step_map, masked = step_map.masked_fill(new, step), ~stays
            working = working & new.any(1) if edits else masked.any(1)
            if kind == "events":
                history.append((replay, ids.where(new | again, -1), logps))
        # with editing the last forward may be the commit, which changes nothing
        return ids, step_map, logps, num_forwards, history[: num_replays(settings)]

    def _score(self, score, token, step, order, settings):
        """Confidences of drawn tokens -> scores; the highest are revealed first. All [R, n]

        step: counted over the whole completion. order() -> uniform numbers [R, n]. alg_temp (Dream)
        adds Gumbel noise, so that the positions to reveal are drawn without replacement from
        softmax(score / alg_temp).
        """
        if settings["remasking"] == "random":
            score = order().to(score.dtype)
        is_eos = lambda: among(token, self.model.eos_token_ids)
        if settings["eos_policy"] == "eoser":
            weight = eoser_weight(step, num_replays(settings), settings["schedule"])
            score = torch.where(is_eos(), weight * score, score)
        if settings["alg_temp"]:
            gumbel = -(-order().clamp(min=2**-54).log()).log()
            score = score / settings["alg_temp"] + gumbel.to(score.dtype)
        if settings["eos_policy"] == "demote":  # finite: revealed when nothing else is left
            score = score.masked_fill(is_eos(), torch.finfo(score.dtype).min)
        return score

    def _finish(
        self, prompt_ids, owner, canvas, history, first, end, sample_index, num_forwards, settings
    ):
        """Cut the completions out of the columns, [N, S] -> [N, L]. -> Trace

        canvas: tokens, step_map, logps [N, S]; history: tokens, -1 where none, and their logps
        [K or more, N, S], where there are records; first, end [N]: columns of the completions
        """
        # NaN counts as the highest confidence, so it has been revealed and is found here.
        if (broken := ~canvas[2].isfinite().all(1)).any():
            self.release()  # the cache may hold NaN
            raise SystemExit(BROKEN.format(sample_index[broken].tolist()[:8]))
        canvas_length = end - first
        on_canvas = below(canvas_length, int(canvas_length.max()))  # [N, L]
        offset = torch.arange(on_canvas.shape[1], device=self.device)
        at = torch.where(on_canvas, first[:, None] + offset, 0)
        completion_ids, step_map, logps = (values.gather(1, at) for values in canvas)
        step_map = step_map.where(on_canvas, -1)
        # before masks become padding, which may be an EOS
        completion_mask = scored(completion_ids, canvas_length, settings["eos_token_ids"])
        completion_ids = completion_ids.where(step_map >= 0, self.model.pad_token_id)
        trace = Trace(
            [prompt_ids[i] for i in owner.tolist()], completion_ids, completion_mask, canvas_length,
            step_map, logps.where(step_map >= 0, 0.0), sample_index, num_forwards, settings,
        )  # fmt: skip
        if settings["records"]:  # behind the canvas those of column 0: none
            drawn, logps = (
                values[: trace.num_replays].take_along_dim(at[None], 2).transpose(0, 1)
                for values in history
            )
            trace.records = {"tokens": drawn.int(), "logps": logps.where(drawn >= 0, 0.0)}
        return trace

    def _sample(self, hidden, uniform, settings):
        """hidden [R, n, D], uniform [R, n] -> tokens, logps, confidence [R, n]. The mask is never
        drawn.

        Confidence, how sure the model is of each token, decides the order of reveals. entropy,
        entropy_bounded: the negative entropy in nats of softmax(logits / temperature) before top-k
        and top-p. topk_margin: its best probability minus the second best. Neither depends on the
        draw, so the sum of a trace's logps is the exact log-likelihood of its trajectory. Every
        other rule: the probability with which the drawn token was sampled.
        """
        parts, temperature, rule = [], settings["temperature"], settings["remasking"]
        split = hidden.flatten(0, 1).split(HEAD_ROWS), uniform.flatten().split(HEAD_ROWS)
        for some, u in zip(*split, strict=True):
            logits = self.model.lm_head(some)
            logits[:, self.model.mask_token_id] = -math.inf
            if settings["eos_policy"] == "suppress":
                logits[:, settings["eos_token_ids"]] = -math.inf
            kept = logits
            if temperature:
                kept = truncate(logits, temperature, settings["top_k"], settings["top_p"])
            token, logps, entropies = self.sample_categorical(kept, u, temperature)
            confidence = logps.exp()
            if rule in ENTROPIES:
                if kept is not logits:
                    entropies = self.sample_categorical(logits, u, temperature)[2]
                confidence = -entropies
            elif rule == "topk_margin":
                p = (logits.to(logps.dtype) / (temperature or 1.0)).softmax(-1)
                best, second = p.topk(2).values.unbind(-1)
                confidence = best - second
            parts.append((token, logps, confidence))
        join = torch.cat if len(parts) > 1 else itemgetter(0)  # at few rows a copy counts
        return [join(values).view(uniform.shape) for values in zip(*parts, strict=True)]
