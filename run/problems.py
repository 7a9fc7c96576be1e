"""The problems of a run: prompts and rewards of its rollouts, and scores on those held out."""

from dataclasses import fields

import torch

from data.stream import ShuffledStream
from distributed.groups import rank_share
from evals import TRIAL, load_splits, load_task, mean_score
from evals.rewards import load_reward
from models import load_tokenizer
from rollout import gathered, probe, rollout_metrics
from rollout.engine import SamplingSettings
from run.plan import fit


class HeldOut:
    """Problems that no training sees.

    splits {split: [(example, prompt ids)]}; facts: a line on them; sampling: how they are answered
    """

    def __init__(self, args, max_length, train=None):
        """train: --data of a split to train on, with `splits` of the same; None: there is none"""
        self.task, self.tokenizer = load_task(args.task), load_tokenizer(args.model)
        # of rollouts; refused here, before problems are fetched
        self.grade = load_reward(getattr(args, "reward", ""), self.task)
        is_preset = args.data.partition("@")[0] in self.task.PRESETS
        eval_data = args.eval_data or ("" if train is not None or not is_preset else args.data)
        self.splits, dropped = load_splits(
            self.task, train, eval_data, self.tokenizer, max_length, args.eval_limit
        )
        self.facts = f"problems with too long a prompt, dropped: {dropped}"
        greedy = {"temperature": 0.0, "remasking": "low_confidence_static"}
        self.sampling = greedy | sampling_of(args)

    def fit(self, rows, model, args, tail=0):
        """-> the micro-batch size, how many completions are decoded together: see run/plan.py

        rows: TokenRows of prompts and answers; the answers of a row share a forward. tail: tokens
        behind an answer. Flag pack_length: of rows that hold several answers.
        """
        prompt, *sides = rows.bounds.diff().unflatten(0, (-1, rows.parts)).T
        lengths = torch.stack([prompt, torch.stack(sides).amax(0) + tail], 1)
        if pack_length := getattr(args, "pack_length", 0):
            packed = pack_length * lengths.sum(0, keepdim=True) // lengths.sum()
            lengths = torch.cat([lengths, packed])
        return fit(model, args, lengths, self.splits, len(sides))

    def score(self, engine, split, name):
        """-> {name/task: mean exact score}, {} with --eval-limit 0. Collective."""
        if not (problems := self.splits.get(split)):
            return {}
        return mean_score(engine, self.task, self.tokenizer, problems, name, **self.sampling)


class Problems(HeldOut):
    """The problems of a script with rollouts, shared by its ranks.

    Stops the run here, before any work on a GPU, if the flags or the reward cannot train.
    mine: which prompts of a step are this rank's. rollout: what a rollout gives the sampler.
    """

    def __init__(self, args):
        self.mine = rank_share(args.prompts_per_step, "--prompts-per-step")
        super().__init__(args, args.max_prompt_length, args.data)
        self.train, self.per_step = self.splits["train"], args.prompts_per_step
        self.grade([TRIAL], [self.train[0][0]])
        self.stream = ShuffledStream(self.train, args.seed)
        self.facts = f"{len(self.train)} training problems; {self.facts}"
        self.rollout = dict(self.sampling)
        self.probed = self.sampling | {"seed": args.seed}
        self.sampling |= {"temperature": args.eval_temperature, "seed": -1 - args.seed}

    def fit(self, model, args, together, uses_old):
        """As of a HeldOut."""
        prompts = [ids for problems in self.splits.values() for _, ids in problems]
        lengths = [(len(ids), args.gen_length) for ids in prompts]
        return fit(model, args, lengths, self.splits, together, uses_old)

    def prompts(self, step):
        """-> this rank's prompts of the step [list of ids], their examples"""
        chosen = [self.stream[step * self.per_step + i] for i in self.mine]
        examples, prompts = zip(*chosen, strict=True)
        return list(prompts), list(examples)

    def reward(self, trace, examples, model):
        """examples: one for each G completions of the trace. Collective.

        -> trace and rewards [N] of all ranks that share rows, metrics of the rollout, examples [N]
        """
        G = len(trace.prompt_ids) // len(examples)
        examples = [example for example in examples for _ in range(G)]
        parts = self.grade(trace.texts(self.tokenizer), examples)
        trace, rewards, parts, examples = gathered(trace, parts, examples, model.pad_token_id)
        return trace, rewards, rollout_metrics(trace, rewards, parts, G), examples

    def check(self, engine, model):
        """-> metrics of `probe`: do sampler and learner agree? Collective."""
        return probe(engine, model, self.train[0][1], **self.probed)

    def validate(self, engine, model):
        """-> the score on the validation split, and `check`. Collective."""
        return self.score(engine, "validation", "eval") | self.check(engine, model)


def sampling_of(args):
    """-> the fields of a script's args that the sampler knows"""
    names = [field.name for field in fields(SamplingSettings)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}
