"""The problems of a run: prompts and rewards of its rollouts, and scores on those held out."""

import torch

from data.preferences import held_out_pairs, pairs_of
from data.rows import is_own
from data.stream import ShuffledStream
from data.tokens import encode
from distributed.groups import gather, over_ranks, rank_share
from distributed.sequence import data_rank
from evals import TRIAL, load_splits, load_task, mean_score, score_all
from evals.own import FAILED
from evals.rewards import load_reward, reward_names, sum_of_parts
from models import load_tokenizer
from models.layers import uncompiled
from rollout import gathered, make_engine, probe, rollout_metrics, sync_engine
from rollout.engine import ADAPTIVE, SamplingSettings
from rollout.rows import Batch
from rollout.traces import concatenate
from run.plan import fit


class HeldOut:
    """Problems that no training sees.

    splits {split: [(example, prompt ids)]}; facts: a line on them; sampling: how they are answered;
    answers: the last that were scored, some of them, for the report;
    train: what a script trains on, `stream` the order of it; a step takes per_step, over all ranks,
    of which `mine` are this rank's; keep: Run.keep, where there is a run
    """

    keep = str
    compare = lambda *_: {}  # (split, name) -> further scores; those of pairs in vrpo.py

    def __init__(self, args, max_length, train=None):
        """train: --data of a split to train on, with `splits` of the same; None: there is none"""
        if train is None:
            self.per_step = args.batch_size
            self.mine = rank_share(args.batch_size, "--batch-size", data_rank())
        instead = getattr(args, "reward_errors", None)
        self.task, self.tokenizer = load_task(args.task, instead), load_tokenizer(args.model)
        self.max_length = max_length
        # of rollouts; refused here, before problems are fetched
        self.pay = load_reward(getattr(args, "reward", ""), self.task, instead)
        eval_data = args.eval_data or (args.data if is_own(self.task, args.data) else "")
        self.splits, dropped = load_splits(
            self.task, train, eval_data, self.tokenizer, max_length, args.eval_limit
        )
        cut = f"\n  dropped for too long a prompt: {dropped}"
        self.cut = cut if any(dropped.values()) else ""
        greedy = {"temperature": 0.0, "remasking": "low_confidence_static"}
        self.sampling = greedy | sampling_of(args)

    def fit(self, rows, model, args, tail=0):
        """-> the micro-batch size, how many completions are decoded together: see run/plan.py

        rows: TokenRows of prompts and answers; the answers of a row share a forward. tail: tokens
        behind an answer. Flag pack_length: of rows that hold several answers.
        """
        prompt, *sides = rows.lengths.T
        lengths = torch.stack([prompt, torch.stack(sides).amax(0) + tail], 1)
        if len(sides) > 1:  # prompts are padded to the longest, and answers: not in sft.py
            lengths = torch.cat([lengths, lengths.amax(0, keepdim=True)])
        if pack_length := getattr(args, "pack_length", 0):
            packed = pack_length * lengths.sum(0, keepdim=True) // lengths.sum()
            lengths = torch.cat([lengths, packed])
        return fit(model, args, lengths, self.splits, len(sides))

    def prompts(self):
        """-> those that the run is scored on; rows that ask the same are not trained on"""
        return [self.task.prompt(one) for problems in self.splits.values() for one, _ in problems]

    def encode(self, rows, model, *how):
        """-> TokenRows of rows of text. how: `asked`, `joins` of data.tokens.encode"""
        return encode(rows, self.tokenizer, model, self.max_length, *how)

    def pairs(self, data, limit):
        """-> preference pairs to train on, {split: at most `limit` held-out ones}"""
        compared = {s: held_out_pairs(self.task, s, data, limit, score_all) for s in self.splits}
        return pairs_of(self.task, data, "train", score_all), compared

    def train_on(self, rows, model, device, args, tail=0):
        """Train on TokenRows; see `fit`. -> the sampler of evaluations, None with --eval-limit 0"""
        for flag in {"eos_tail", "blocks"} & args.chosen.keys():
            if model.attention == "block-causal":
                raise SystemExit(f"--{flag.replace('_', '-')} does nothing with a block model")
        args.micro_batch_size, at_once = self.fit(rows.at_least(args.batch_size), model, args, tail)
        self.train, self.stream, engine = rows, ShuffledStream(rows, args.seed), None
        self.facts = f"{rows.report('rows to train on')}{self.cut}"
        if args.eval_limit:
            engine = make_engine(args.model, "auto", device, None, at_once, (None, self.sampling))
            how = engine.validate(**self.sampling)
            self.facts += f"\nscored on {self.task.NAME} (--task), not with --eval-limit 0: {how}"
        return engine

    def chosen(self, step):
        """-> what this rank trains on in a step: rows, or (example, prompt ids)"""
        return [self.stream[step * self.per_step + i] for i in self.mine]

    def score(self, engine, split, name, model=None):
        """-> metrics of `mean_score`, not with --eval-limit 0, and `compare`. Collective. model:
        whose weights the sampler gets first; None: it has them"""
        compared = self.compare(split, name)
        if not (problems := self.splits.get(split)):
            return compared
        if model:
            sync_engine(engine, model)
        metrics, self.answers = mean_score(
            engine, self.task, self.tokenizer, problems, name, **self.sampling
        )
        return metrics | compared

    def validate(self, engine, model):
        """-> the score on the validation split. Collective."""
        return self.score(engine, "validation", "eval", model)


class Problems(HeldOut):
    """The problems of a script with rollouts, shared by its ranks.

    Stops the run here, before weights are read, if flags, reward or memory do not allow it.
    Where --micro-batch-size is 0, it becomes what fits.
    """

    def __init__(self, args, model, records, together, uses_old):
        """records: what the sampler must keep; together, uses_old: see run/plan.py"""
        self.per_step = args.prompts_per_step
        self.mine = rank_share(args.prompts_per_step, "--prompts-per-step")
        is_lmdeploy = args.rollout_backend == "lmdeploy"
        if is_lmdeploy and args.lora_rank and not args.lora_merged_rollout:
            needed = "needs merged weights: add --lora-merged-rollout"
            raise SystemExit(f"--rollout-backend lmdeploy {needed}")
        names = reward_names(args.reward)
        self.several, is_fast = len(names) > 1, "tokens_per_forward" in names
        if args.one_reward and (self.several or is_fast or args.refill):
            raise SystemExit("this script takes one --reward, none of speed, and no --refill")
        if is_fast and (is_lmdeploy or args.remasking not in ADAPTIVE):
            needed = "--remasking low_confidence_dynamic, and a --rollout-backend of ours"
            raise SystemExit(f"--reward tokens_per_forward needs {needed}: others have one rate")
        super().__init__(args, args.max_prompt_length, args.data)
        self.args, self.records, self.train = args, records, self.splits["train"]
        self.grade([TRIAL], [self.train[0][0]])
        self.stream = ShuffledStream(self.train, args.seed)
        prompts = [ids for problems in self.splits.values() for _, ids in problems]
        lengths = [(len(ids), args.gen_length) for ids in prompts]
        args.micro_batch_size, self.at_once = fit(
            model, args, lengths, self.splits, together, uses_old
        )
        self.facts = f"{len(self.train)} training problems"
        self.rollout = dict(self.sampling)
        self.sampling |= {"temperature": args.eval_temperature, "seed": -1 - args.seed}

    def make_engine(self, device):
        """-> the sampler; with LoRA it gets adapters of its own, unless they are merged"""
        args, request = self.args, (self.records, self.rollout)
        lora = args.lora if args.lora_rank and not args.lora_merged_rollout else ()
        self.engine = make_engine(
            args.model, args.rollout_backend, device, None, self.at_once, request, lora
        )
        how = self.engine.validate(self.records, **self.rollout)
        self.facts += f"; rollouts: {how}{self.cut}"
        return self.engine

    def request(self, step, G):
        """-> arguments of engine.generate for G completions of each of this rank's prompts"""
        return self.rollout | {
            "prompt_ids": [ids for _, ids in self.chosen(step)],
            "num_samples": G,
            "records": self.records,
            "seed": (self.args.seed << 32) + step,
            "sample_offset": self.mine.start * G,
        }

    def grade(self, completions, examples):
        """-> what they are paid, [{part: value}]. If that fails on a rank, all save what they have
        and end. Collective.
        """
        error = None
        try:
            paid = self.pay(completions, examples)
        except SystemExit as caught:
            error = str(caught)
        if errors := [*filter(None, gather(error))]:
            raise SystemExit(f"{errors[0]}{self.keep()}")
        return paid

    def graded(self, trace, step):
        """-> [(what a completion is paid, its example)] of a rollout. Collective."""
        G = trace.settings["num_samples"]
        examples = [example for example, _ in self.chosen(step) for _ in range(G)]
        return [*zip(self.grade(trace.texts(self.tokenizer), examples), examples, strict=True)]

    def reward(self, trace, step, model):
        """Grade the rollout of a step. Collective.

        -> Batch of all ranks that share rows, with rewards [B] and examples; what the advantages
        are made of: these rewards, or of --reward a+b (where they are those of a) `sum_of_parts`;
        metrics
        """
        G, N, pad = trace.settings["num_samples"], len(trace.prompt_ids), model.pad_token_id
        FAILED.clear()
        graded = self.graded(trace, step)
        for extra in range(1, self.args.refill + 1):
            values = torch.tensor([[*parts.values()] for parts, _ in graded]).view(N // G, G, -1)
            totals = sum_of_parts(values) if self.several else values.sum(2)
            is_dead = (totals == totals[:, :1]).all(1)
            if not over_ranks(is_dead.sum()):
                break
            later = step + (extra << 24)  # where no step gets to
            fresh = self.engine.generate(**self.request(later, G))
            self.engine.make_room()
            graded += self.graded(fresh, later)
            rows = (torch.arange(N) + N * is_dead.repeat_interleave(G)).tolist()
            trace, graded = concatenate([trace, fresh], pad).select(rows), [graded[i] for i in rows]
        parts, examples = map(list, zip(*graded, strict=True))
        failed = over_ranks(len(FAILED)) / over_ranks(len(parts))
        trace, rewards, parts, examples = gathered(trace, parts, examples, pad)
        batch = Batch(trace, model)
        batch.rewards, batch.examples = rewards, examples
        if self.several:
            values = rewards.new_tensor([[*paid.values()] for paid in parts])
            batch.rewards = values[:, 0]
            rewards = sum_of_parts(values.view(-1, G, values.shape[1])).flatten()
        metrics = rollout_metrics(trace, rewards, parts, G)
        if self.args.reward_errors is not None:
            metrics["reward/error_frac"] = failed
        return batch, rewards, metrics

    def check(self, engine, model):
        """-> metrics of `probe`: do sampler and learner agree? Collective."""
        with uncompiled(model):
            return probe(engine, model, self.train[0][1], **self.rollout | {"seed": self.args.seed})

    def validate(self, engine, model):
        """-> the score on the validation split, and `check`. Collective."""
        return self.score(engine, "validation", "eval") | self.check(engine, model)


def sampling_of(args):
    """-> the fields of a script's args that the sampler knows"""
    names = vars(SamplingSettings())
    return {name: getattr(args, name) for name in names if hasattr(args, name)}
