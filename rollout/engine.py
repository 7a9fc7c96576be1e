"""What every engine does alike: checks, keyed draws, the choice of tokens to reveal, and the hand-over of weights."""

import math

import torch

from models.lora import adapter_tensors
from models.tensors import tensor_names
from rollout.sampling import keyed_uniform, sample_categorical  # noqa: F401 (both samplers draw with engine.keyed_uniform)
from rollout.schedules import block_quotas
from rollout.traces import concatenate

REMASKING = (
    "low_confidence_static",
    "low_confidence_dynamic",
    "random",
)  # what the training scripts offer
RULES = (
    *REMASKING,
    "low_confidence_factor",
    "entropy",
    "entropy_bounded",
    "topk_margin",
    "sequential",
)
LOWER = "lower --batch-size, max_batch_size of make_engine (the tokens stay) or --gen-length"


def select(confidence, masked, quota, remasking, threshold, factor=1.0, eb_threshold=0.35):
    """Which masked tokens of a block to reveal: the most confident ones, and of equals those at lower positions; sequential:
    those at the lowest positions, whatever the confidence.

    confidence [N, n] fp32; masked [N, n] bool; quota: at least this many, as far as that many are masked. More only by
    low_confidence_dynamic, all above the threshold; low_confidence_factor (Fast-dLLM, arXiv 2505.22618), the largest number k
    for which (k + 1)(1 - confidence of the k-th best) < factor; and entropy_bounded, the largest number whose entropies (the
    negative confidences) add up to eb_threshold nats at most: the rule of SDAR's generate.py and JetEngine, where the paper
    (EB-Sampler, arXiv 2505.24857) leaves the largest of these entropies out of the sum. -> [N, n] bool
    """
    if remasking == "sequential":
        confidence = -torch.arange(
            masked.shape[1], dtype=torch.float32, device=masked.device
        ).expand(masked.shape)
    number = masked.sum(1, keepdim=True).clamp(
        max=quota
    )  # a block that began with prompt tokens has fewer masks
    score, order = confidence.masked_fill(~masked, float("-inf")).sort(
        dim=1, descending=True, stable=True
    )
    if remasking == "low_confidence_dynamic":
        number = torch.maximum(number, (score > threshold).sum(1, keepdim=True))
    elif remasking == "low_confidence_factor":
        above = torch.arange(2, score.shape[1] + 2, device=score.device)
        number = torch.maximum(number, (above * (1 - score) < factor).sum(1, keepdim=True))
    elif remasking == "entropy_bounded":
        number = torch.maximum(number, ((-score).cumsum(1) <= eb_threshold).sum(1, keepdim=True))
    return order.argsort(dim=1) < number


def confidence_of(logits, logps, temperature, remasking):
    """How sure the model is of each row: what decides the order of reveals.

    logits [M, V], -inf where banned, before top-k and top-p; logps [M] of the drawn tokens. entropy and entropy_bounded: the
    negative entropy in nats of softmax(logits / temperature), topk_margin: its best probability minus the second best; neither
    depends on the draw, so that the sum of a trace's logps is the exact log-likelihood of its trajectory. Every other rule:
    the probability that the drawn token was sampled with. -> [M]
    """
    if remasking not in ("entropy", "entropy_bounded", "topk_margin"):
        return logps.exp()
    p = (logits.to(logps.dtype) / (temperature or 1.0)).softmax(-1)
    if remasking != "topk_margin":
        return -torch.special.entr(p).sum(-1)
    best, second = p.topk(2).values.unbind(-1)
    return best - second


def truncate(logits, temperature, top_k=0, top_p=1.0):
    """Leave the top_k most probable tokens (0: all), then of these the fewest whose probabilities under
    softmax(logits / temperature) reach top_p; tokens as probable as the last one left stay too.

    logits [M, V], -inf where banned -> [M, V], -inf where left out
    """
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    if top_p < 1:
        ordered = logits.sort(dim=-1, descending=True).values
        # At least fp32: sums of bf16 stand still at terms below 2^-9 of them, and the whole tail would stay.
        p = (ordered.to(torch.promote_types(ordered.dtype, torch.float32)) / temperature).softmax(
            -1
        )
        needed = p.cumsum(-1) - p < top_p  # the mass before it falls short
        logits = logits.masked_fill(
            logits < ordered.masked_fill(~needed, float("inf")).amin(-1, keepdim=True),
            float("-inf"),
        )
    return logits


class Engine:
    """Sampler whose `model` is its own copy of the weights.

    A subclass knows the attention pattern: its _generate(prompt_ids, owner, sample_index, settings, stop_at_eos) -> Trace
    decodes one batch, in which row i continues prompt_ids[owner[i]]; owner, sample_index [N].
    """

    # Of generate's arguments: what this engine can do.
    choices = {
        "remasking": RULES,
        "schedule": ("uniform",),
        "cache": ("none",),
        "eos_policy": ("none",),
    }
    records = (
        None,
        "steps",
    )  # that a method may ask for; steps: step maps and log-probabilities, which are always kept
    refills = False  # _generate takes all samples at once and keeps max_batch_size of them at work

    def __init__(self, model, max_batch_size):
        self.model, self.max_batch_size = model, max_batch_size
        self.device, self.dtype = model.lm_head.weight.device, model.lm_head.weight.dtype

    @torch.no_grad()
    def load_weights(self, weights):
        """weights: pairs (name, full tensor), copied in place, all of them: those of export_weights, or those of export_adapter
        for an engine whose model has the same adapters. ValueError names what does not fit or did not come.
        """
        own = None
        for name, value in weights:
            if own is None:
                own = adapter_tensors(self.model) if ".lora_" in name else tensor_names(self.model)
            if name not in own or own[name].shape != value.shape:
                raise ValueError(
                    f"{name} {list(value.shape)} is no tensor of this model, or came twice"
                )
            own.pop(name).copy_(value)
        if own or own is None:
            raise ValueError(
                f"weights did not come for {', '.join(list(own or ['any tensor'])[:5])}"
            )

    def release(self):
        """Give back the memory that generate keeps on a GPU from one call to the next; the next call takes it again."""

    def block_length(self, asked):
        """asked: tokens in a block, 0 or None for the model's own. -> tokens in a block"""
        return asked or self.model.block_length

    def check(self, settings):
        """SystemExit names settings that this engine cannot take together; each alone is one of its choices."""
        if settings["alg_temp"]:
            raise SystemExit(
                f"--alg-temp {settings['alg_temp']}: {self.title} draws no orders; leave it at 0"
            )

    @property
    def title(self):
        return f"the sampler of a {self.model.attention} model"

    def _check_choices(self, given):
        for name, choices in self.choices.items():
            if given[name] not in choices:
                raise SystemExit(
                    f"--{name.replace('_', '-')} {given[name]}: {self.title} has {', '.join(choices)}"
                )

    def _check_records(self, records, remasking, editing_threshold=None):
        if records not in self.records:
            raise SystemExit(f"{self.title} keeps no records of kind {records!r}")
        if records == "steps" and (remasking == "rcr" or editing_threshold is not None):
            what = (
                f"--remasking {remasking}"
                if editing_threshold is None
                else f"--editing-threshold {editing_threshold}"
            )
            raise SystemExit(
                f"{what} revises tokens, which no step map can tell: not for a method that reads step maps"
            )

    def _check_values(
        self, remasking, eos_policy="none", temperature=1.0, top_k=0, top_p=1.0, confidence_threshold=0.9, factor=1.0,
        eb_threshold=0.35, editing_threshold=None, max_post_steps=16, **_,
    ):  # fmt: skip
        if not 0 <= temperature < math.inf:
            raise SystemExit(f"--temperature {temperature} must be at least 0 and finite")
        if eos_policy == "eoser" and remasking in ("entropy", "entropy_bounded"):
            raise SystemExit(
                f"--eos-policy eoser scales confidences of at least 0: those of --remasking {remasking} are negative"
            )
        if eos_policy in ("demote", "eoser") and remasking in ("sequential", "origin"):
            raise SystemExit(
                f"--eos-policy {eos_policy} changes confidences, which --remasking {remasking} does not look at"
            )
        if editing_threshold is not None and not getattr(self.model, "is_edited", False):
            raise SystemExit(
                f"--editing-threshold {editing_threshold}: {type(self.model).__name__} was not trained to edit tokens"
            )
        if top_k < 0 or not 0 < top_p <= 1:
            raise SystemExit(
                f"--top-k {top_k} must be at least 0, --top-p {top_p} above 0 and at most 1"
            )
        if not 0 <= confidence_threshold <= 1:
            raise SystemExit(
                f"--confidence-threshold {confidence_threshold} is no probability: give 0 to 1"
            )
        if not factor > 0:
            raise SystemExit(f"--factor {factor} must be above 0")
        if not eb_threshold >= 0:
            raise SystemExit(
                f"--eb-threshold {eb_threshold} is a sum of entropies: give at least 0"
            )
        if max_post_steps < 0 or not 0 <= (editing_threshold or 0) <= 1:
            raise SystemExit(
                f"--editing-threshold {editing_threshold} must lie in 0 to 1, {max_post_steps=} be at least 0"
            )

    def plan(
        self, records=None, *, gen_length, denoising_steps, remasking, block_length=None, **settings
    ):
        """One line on what a rollout costs, for the log. SystemExit where gen_length is not made of whole blocks, a value is
        out of its range, this sampler cannot do what is asked, or records of that kind are not kept: a command asks here before
        its first rollout. Who asks for records replays them, and gets no approximate cache.
        """
        self._check_records(records, remasking, settings.get("editing_threshold"))
        n, given = (
            self.block_length(block_length),
            {"schedule": "uniform", "cache": "none", "eos_policy": "none"} | settings,
        )
        self._check_choices(given | {"remasking": remasking})
        self._check_values(remasking, **given)
        schedule = given["schedule"]
        if records and given["cache"] != "none":
            what = "is approximate: what a method replays would not be what was sampled"
            raise SystemExit(f"--cache {given['cache']} {what}; leave it at none")
        if min(n, gen_length, denoising_steps) < 1:
            shape = f"--block-length {n}, --gen-length {gen_length} and --denoising-steps {denoising_steps}"
            raise SystemExit(f"{shape} must be at least 1")
        if gen_length % n and schedule != "ascending":  # which makes its own blocks
            nearest = " or ".join(
                str(length) for length in (gen_length // n * n, -(-gen_length // n) * n) if length
            )
            raise SystemExit(
                f"--gen-length {gen_length} is no multiple of the block length {n}: give {nearest}"
            )
        given |= {
            "gen_length": gen_length,
            "block_length": n,
            "denoising_steps": denoising_steps,
            "remasking": remasking,
        }
        quotas = block_quotas(**given)
        if schedule == "ascending" and not block_length:
            given["block_length"] = sum(quotas[0])
        self.check({"alg_temp": 0.0, "records": records} | given)
        sizes, steps = (
            [sum(quota) for quota in quotas],
            sum(sum(map(bool, quota)) for quota in quotas),
        )
        at_least = (
            "at least "
            if remasking in ("low_confidence_dynamic", "low_confidence_factor", "entropy_bounded")
            else ""
        )
        blocks = f"{len(quotas)} blocks of {n} tokens, {sum(map(bool, quotas[0]))} steps each"
        if len(set(sizes)) > 1:
            blocks = f"blocks of {', '.join(map(str, sizes))} tokens"
        return f"{blocks}: {steps} steps, {at_least}{sum(sizes) / steps:.3g} tokens a step"

    @torch.no_grad()
    def generate(
        self, prompt_ids, *, num_samples=1, gen_length=256, block_length=None, denoising_steps=4, temperature=1.0,
        top_k=0, top_p=1.0, remasking="low_confidence_dynamic", confidence_threshold=0.9, factor=1.0, eb_threshold=0.35,
        editing_threshold=None, max_post_steps=16, schedule="uniform", cache="none", eos_policy="none",
        alg_temp=0.0, seed=0, sample_offset=0, stop_at_eos=True, records=None,
    ):  # fmt: skip
        """Sample num_samples completions of each prompt (list of token ids, ragged, not empty). -> Trace

        gen_length tokens each, rounded up so that the last block is whole; generation ends at the block that holds an EOS
        unless stop_at_eos is False. denoising_steps: per block. block_length: 0 or None for the model's own, which is the only
        one of a block-causal model. temperature 0: greedy. top_k, top_p: see `truncate`; 0 and 1 leave all tokens, and the
        learner's log-probabilities know neither. remasking: the rule of `select` and `confidence_of`. With as many
        denoising_steps as a block has tokens, confidence_threshold, factor or eb_threshold alone decides how many are revealed,
        at least one. editing_threshold, max_post_steps: token editing, see rollout/block.py, of models trained for it.
        cache: of bidirectional models, "prefix" or "dual": faster and approximate, and so are the logps of the trace, which
        are those of the forwards that were made.
        schedule: see rollout/schedules.py; under ascending, denoising_steps are those of the first block.
        eos_policy: none; suppress: an EOS has probability 0, which the learner's log-probabilities do not know; demote: of its
        block an EOS is revealed last; eoser: its confidence is damped, see `eoser_weight`. alg_temp (Dream): the order is drawn
        from softmax(confidence / alg_temp); 0: the most confident first. records: "steps" needs
        nothing; "events", "states": see Trace.records; where tokens are revised (rcr, editing), which no step map can tell, a
        trace always has one of these.
        Sample i of prompt p is number sample_offset + p * num_samples + i, and every draw is keyed by
        (seed, that number, position, step): batch size, other prompts and ranks do not change it.
        """
        n = self.block_length(block_length)
        self._check_choices(
            {"remasking": remasking, "schedule": schedule, "cache": cache, "eos_policy": eos_policy}
        )
        if min(n, denoising_steps, gen_length, num_samples) < 1:
            raise SystemExit(
                f"block_length={n}, {denoising_steps=}, {gen_length=}, {num_samples=} must be at least 1"
            )
        self._check_values(
            remasking, eos_policy, temperature, top_k, top_p, confidence_threshold, factor, eb_threshold, editing_threshold,
            max_post_steps,
        )  # fmt: skip
        self._check_records(records, remasking, editing_threshold)
        if records != "states" and (remasking == "rcr" or editing_threshold is not None):
            records = "events"  # without them a trace could not be replayed
        prompt_ids = [
            ids.tolist() if isinstance(ids, torch.Tensor) else list(ids) for ids in prompt_ids
        ]
        if not prompt_ids or not all(prompt_ids):
            raise SystemExit(
                "there are no prompts, or one has no tokens: every prompt needs at least one"
            )
        if with_mask := [i for i, ids in enumerate(prompt_ids) if self.model.mask_token_id in ids]:
            mask = f"the mask token (id {self.model.mask_token_id})"
            raise SystemExit(
                f"prompt {with_mask[0]} holds {mask}: a learner would take it for a token to predict; remove it"
            )
        V = self.model.lm_head.weight.shape[0]
        if unknown := [i for i, ids in enumerate(prompt_ids) if not 0 <= min(ids) <= max(ids) < V]:
            raise SystemExit(
                f"prompt {unknown[0]} holds an id outside of the model's 0 to {V - 1}: is the tokenizer the model's?"
            )
        settings = {
            "num_samples": num_samples,
            "gen_length": gen_length,
            "attention": self.model.attention,
            "block_length": n,
            "denoising_steps": denoising_steps,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "remasking": remasking,
            "confidence_threshold": confidence_threshold,
            "factor": factor,
            "eb_threshold": eb_threshold,
            "editing_threshold": editing_threshold,
            "max_post_steps": max_post_steps,
            "schedule": schedule,
            "cache": cache,
            "eos_policy": eos_policy,
            "alg_temp": alg_temp,
            "records": None if records == "steps" else records,
            "seed": seed,
            "eos_token_ids": self.model.eos_token_ids,
            "logps": ("softmax(logits / temperature)" if temperature else "softmax(logits)")
            + (", EOS banned" if eos_policy == "suppress" else "")
            + (f", top-k {top_k}" if temperature and top_k else "")
            + (f", top-p {top_p}" if temperature and top_p < 1 else ""),
        }
        if schedule == "ascending" and not block_length:
            settings["block_length"] = sum(block_quotas(**settings)[0])
        self.check(settings)
        parts, total = [], len(prompt_ids) * num_samples
        size = total if self.refills else self.max_batch_size
        for first in range(0, total, size):
            samples = torch.arange(first, min(first + size, total), device=self.device)
            owner = samples // num_samples
            prompts = prompt_ids[int(owner[0]) : int(owner[-1]) + 1]
            parts.append(
                self._generate(
                    prompts, owner - owner[0], sample_offset + samples, settings, stop_at_eos
                )
            )
        return concatenate(parts, self.model.pad_token_id)

    def _sample(self, hidden, uniform, settings, chunk_rows=512):
        """hidden [M, D], uniform [M] -> tokens, logps, confidence [M], chunk_rows rows at a time. The mask is never drawn."""
        parts, temperature = [], settings["temperature"]
        for rows in (
            slice(first, first + chunk_rows) for first in range(0, max(len(hidden), 1), chunk_rows)
        ):
            logits = self.model.head(hidden[rows])
            logits[:, self.model.mask_token_id] = float("-inf")
            if settings["eos_policy"] == "suppress":
                logits[:, settings["eos_token_ids"]] = float("-inf")
            left = (
                truncate(logits, temperature, settings["top_k"], settings["top_p"])
                if temperature
                else logits
            )
            if (
                settings["remasking"] in ("entropy", "entropy_bounded") and left is logits
            ):  # both in the same passes
                tokens, logps, _, entropies = sample_categorical(
                    logits, uniform[rows], temperature, statistics=True
                )
                parts.append((tokens, logps, -entropies))
                continue
            tokens, logps = sample_categorical(left, uniform[rows], temperature)
            parts.append(
                (tokens, logps, confidence_of(logits, logps, temperature, settings["remasking"]))
            )
        return (
            parts[0]
            if len(parts) == 1
            else tuple(torch.cat(values) for values in zip(*parts, strict=True))
        )
