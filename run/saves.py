"""What a killed run needs to go on, bit for bit: parameters, optimizer moments, the step.

All else is keyed by the step.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from distributed.disk import hold, is_first_rank, whole_directory, writing
from models import save_model, source_of
from models.lora import save_adapter
from run.flags import CHANGEABLE

# Frozen parameters (the base under adapters) come from the model that the run started from.
OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)
FACTS = "facts.json"  # of a state: sizes of its files; flags, versions, number of ranks


class Saves:
    """Everything that a run writes besides its log. All ranks make the same calls.

    checkpoints/step-000050    weights in Hugging Face layout, or a LoRA adapter in peft's
    checkpoints/best           link to the weights with the best validation score
    resume/step-000050         the state that `include` reads
    """

    def __init__(self, run_dir, model, optimizer, tokenizer, args, scores, step):
        """args: RunFlags. scores: [(step, validation score)] so far. step: see `include`"""
        self.checkpoints, self.resume = run_dir / "checkpoints", run_dir / "resume"
        self.model, self.tokenizer, self.args = model, tokenizer, args
        self.scores, self.parts, self.saved = dict(scores), {}, step
        self.newest = max(saves_in(self.checkpoints), default=(0, None))[1]
        self.include(model, optimizer, step)
        self.tag_best()

    @property
    def best(self):
        """The step with the best validation score, the first of equals; 0: there is none"""
        return max(self.scores, key=self.scores.get, default=0)

    def include(self, model, optimizer, step):
        """Save a pair with every state, the policy or a value model; without optimizer (None) a
        reference that moves. step: > 0 in a resumed run; the pair is filled from that step's state.
        """
        part = {f"part-{len(self.parts)}": Trained(model, optimizer) if optimizer else model}
        if step:
            dcp.load(part, checkpoint_id=self.resume / f"step-{step:06d}/state")
        self.parts |= part

    def after_step(self, step, metrics, stopped=False):
        """Save weights and state every --save-every steps and when the run is stopped; the weights
        also after the last step and when the validation score, eval/..., is the best so far.
        """
        for name, value in metrics.items():
            if name.startswith("eval/"):
                self.scores[step] = value
        every = self.args.save_every
        is_due = stopped or (every and step % every == 0)
        if is_due or step in (self.best, self.args.max_steps):
            self.newest = self.checkpoints / f"step-{step:06d}"
            if self.model.lora_config:
                save_adapter(self.model, self.newest, source_of(self.args.model), self.tokenizer)
            else:
                save_model(self.model, self.newest, self.tokenizer)
        if step == self.best:
            self.tag_best()
        if is_due:
            self.save_state(step)
        # A run that goes back to its last state must find that state's best weights.
        if is_due or not self.resume.exists():
            self.prune(self.checkpoints, self.best)

    def tag_best(self):
        link = self.checkpoints / "best"
        if is_first_rank():
            with writing(link):
                shutil.rmtree(link, ignore_errors=True)  # a copy of a run holds a folder
                link.unlink(missing_ok=True)
                if (self.checkpoints / (name := f"step-{self.best:06d}")).exists():
                    link.symlink_to(name)

    def save_state(self, step):
        """Save into resume/step-<step>, delete older states than --keep-saves. Collective.

        The state takes its name only when all of it is on disk.
        """
        if step == self.saved:
            return
        with whole_directory(self.resume / f"step-{step:06d}") as folder:
            try:  # a full disk raises on every rank
                dcp.save(self.parts, checkpoint_id=folder / "state")
            except CheckpointException as error:
                rank, (cause, _) = next(iter(error.failures.items()))
                raise OSError(f"{cause!r:.300} (rank {rank})") from error
            if is_first_rank():
                facts = {"sizes": sizes(folder), "about": about(self.args)}
                (folder / FACTS).write_text(json.dumps(facts) + "\n")
        self.saved = step
        self.prune(self.resume)

    def prune(self, directory, spare=None):
        """Delete all saves but the newest --keep-saves (0: all) and that of the step `spare`"""
        if keep := self.args.keep_saves:
            delete(path for step, path in saves_in(directory)[:-keep] if step != spare)


class Trained:
    """A model and its optimizer, as `dcp` saves and fills them: trained parameters and moments."""

    def __init__(self, model, optimizer):
        self.pair = model, optimizer

    def state_dict(self):
        parameters, moments = get_state_dict(*self.pair, options=OPTIONS)
        return {"model": parameters, "optimizer": moments}

    def load_state_dict(self, state):
        set_state_dict(
            *self.pair,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=OPTIONS,
        )


def sizes(state):
    return {path.name: path.stat().st_size for path in (state / "state").glob("*")}


def saves_in(directory):
    """-> [(step, path)] of its saves, the oldest first; a copy under another name is none"""
    named = ((path.name[5:], path) for path in directory.glob("step-*"))
    return sorted((int(step), path) for step, path in named if step.isdecimal())


def facts_of(state):
    """-> what a state says of itself; None: it is damaged, as a copy that was cut off is"""
    try:
        facts = json.loads((state / FACTS).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return facts if facts.get("sizes") == sizes(state) else None


def about(args):
    """-> {name: value} of what a resumed run should have as it was, as JSON has it"""
    others = {"torch": torch.__version__, "ranks": dist.get_world_size()}
    return json.loads(json.dumps(vars(args) | others))


def newest_step(run_dir, args):
    """-> step of the newest whole state of a run, after a line on each that is not, and on what is
    not as it was at the save: config.json can be edited. What was saved after it is deleted. 0 for
    a new run, "". Call it on the first rank.

    SystemExit if there is none, or if a process works there.
    """
    if not run_dir:
        return 0
    hold(run_dir)
    folders = [Path(run_dir) / name for name in ("resume", "checkpoints")]
    (last, path), state = (max(saves_in(folder), default=(0, "")) for folder in folders[::-1])
    # not with a state due that never came: the run broke off between weights and state
    is_due = args.save_every and args.max_steps % args.save_every == 0
    if last == args.max_steps > state[0] and not is_due:
        raise SystemExit(f"--resume: the run is finished, its weights are {path}")
    for step, state in reversed(saves_in(folders[0])):
        if facts := facts_of(state):
            now = about(args)
            for name, had in facts["about"].items():
                if name not in CHANGEABLE and now.get(name) != had:
                    print(f"--resume: {name} was {had!r}, now {now.get(name)!r}", file=sys.stderr)
            delete(path for folder in folders for at, path in saves_in(folder) if at > step)
            return step
        print(f"--resume: {state} is damaged; trying the save before it", file=sys.stderr)
    kept = f": it kept only weights, {path}" if last else ""
    raise SystemExit(f"--resume: no undamaged save in {folders[0]} (--save-every){kept}")


def delete(saves):
    if is_first_rank():
        for save in saves:
            with writing(save):
                shutil.rmtree(save)
