"""What a killed run needs to resume bit for bit: parameters, optimizer moments, the step.

Everything else is keyed by the step.
"""

import json
import shutil
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from models.atomic import AtomicDirectory
from models.checkpoint import save_model
from models.lora import has_lora, save_adapter
from models.names import source_of

# Frozen parameters (the base under adapters) come from the model that the run started from.
OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


def save_state(directory, model, optimizer, step, keep, also=None):
    """Save into directory/step-<step>, then delete all but the newest `keep` states (0 keeps all).

    also: a second model whose parameters belong to the state. Collective. The state takes its name
    only when all of it is on disk, so what newest_state finds is complete.
    """
    save = AtomicDirectory(Path(directory) / f"step-{step:06d}")
    dist.barrier()  # until rank 0 has made the folder
    parameters, moments = get_state_dict(model, optimizer, options=OPTIONS)
    content = {"model": parameters, "optimizer": moments}
    if also:
        content["also"] = also.state_dict()
    try:
        dcp.save(content, checkpoint_id=save.folder / "state")
    except CheckpointException as problem:  # a full disk raises on every rank
        save.error = save.error or OSError(first_cause(problem))
    facts = {"step": step, "world_size": dist.get_world_size()}
    save.attempt((save.folder / "facts.json").write_text, json.dumps(facts) + "\n")
    save.finish()
    prune(directory, keep)


def first_cause(error):
    """CheckpointException, which holds one (exception, stack) per failed rank -> the first, in one
    line
    """
    rank, (cause, _) = next(iter(error.failures.items()))
    text = str(cause).splitlines()[0]
    if "unexpected pos" in text:  # all that torch's writer says when a write was cut short
        text = f"No space left, or a limit on file size ({text})"
    return f"{text} (rank {rank})"


def read_state(state, content, problem):
    """Fill the tensors of `content` from a state directory. SystemExit: `problem`, and the
    cause.
    """
    try:
        dcp.load(content, checkpoint_id=state / "state")
    except CheckpointException as error:
        raise SystemExit(f"--resume: {state} {problem}: {first_cause(error)}") from error


class Saves:
    """All that a run writes besides its log: weights, a link to the best, states to resume from.

    checkpoints/step-000050    weights in HF layout, or a LoRA adapter in peft's
    checkpoints/best           link to the weights with the best validation score
    resume/step-000050         what load needs
    All ranks call every method alike.
    """

    def __init__(self, run_dir, model, optimizer, tokenizer, base, keep, scores=()):
        """base: --model of the run. keep: how many of the newest saves stay, 0: all.

        scores: [(step, validation score)] so far.
        """
        self.run_dir, self.keep, self.base = Path(run_dir), keep, source_of(base)
        self.model, self.optimizer, self.tokenizer = model, optimizer, tokenizer
        self.best = max(scores, key=lambda score: score[1], default=None)
        self.newest = max((self.run_dir / "checkpoints").glob("step-*"), default=None)
        self.also = None
        self.tag_best()

    @staticmethod
    def load(run_dir, model, optimizer):
        """Fill model and optimizer from the newest complete state; delete weights saved after it.
        -> its step
        """
        step = load_state(newest_state(Path(run_dir) / "resume"), model, optimizer)
        if dist.get_rank() == 0:
            for path in (Path(run_dir) / "checkpoints").glob("step-*"):
                if int(path.name.removeprefix("step-")) > step:
                    shutil.rmtree(path)
        dist.barrier()
        return step

    def include(self, model, step):
        """Save the parameters of a second model, a reference that moves, with every state.

        step > 0, in a resumed run: first read them from that step's state.
        """
        self.also = model
        if step:
            state = self.run_dir / "resume" / f"step-{step:06d}"
            read_state(state, {"also": model.state_dict()}, "has no reference that fits")

    def after_step(self, step, score=None, weights=False, state=False):
        """Save weights or state as told, and the weights too if `score` is the best so far.

        score: of validation, None where it was not evaluated.
        """
        is_best = score is not None and (self.best is None or score > self.best[1])
        if weights or is_best:
            self.newest = self.run_dir / "checkpoints" / f"step-{step:06d}"
            if has_lora(self.model):
                save_adapter(self.model, self.newest, self.base, self.tokenizer)
            else:
                save_model(self.model, self.newest, self.tokenizer)
        if is_best:
            self.best = step, score
            self.tag_best()
        resume = self.run_dir / "resume"
        if state:
            save_state(resume, self.model, self.optimizer, step, self.keep, self.also)
        # A run that resumes from its last state must find that state's best weights: prune with it.
        if state or not resume.exists():
            spare = [f"step-{self.best[0]:06d}"] if self.best else []
            prune(self.run_dir / "checkpoints", self.keep, spare)

    def tag_best(self):
        if dist.get_rank() == 0:
            link = self.run_dir / "checkpoints" / "best"
            temporary = link.with_name(".best.tmp")
            (temporary if self.best else link).unlink(missing_ok=True)
            if self.best:
                temporary.symlink_to(f"step-{self.best[0]:06d}")
                temporary.replace(link)


def prune(directory, keep, spare=()):
    """Delete all but the newest `keep` of directory/step-* (0 keeps all) and those named in
    spare.
    """
    if keep and dist.get_rank() == 0:
        for old in sorted(Path(directory).glob("step-*"))[:-keep]:
            if old.name not in spare:
                shutil.rmtree(old)


def newest_state(directory):
    """-> path of the newest complete state. SystemExit if there is none."""
    found = sorted(path.parent for path in Path(directory).glob("step-*/facts.json"))
    if not found:
        hint = "runs save one every --save-every steps"
        raise SystemExit(f"--resume: {directory} holds no complete state; {hint}")
    return found[-1]


def load_state(state, model, optimizer):
    """Fill model and optimizer from a state directory. -> the step. Collective.

    SystemExit for a state of another world size or another model.
    """
    facts = json.loads((state / "facts.json").read_text())
    saved, ranks = facts["world_size"], dist.get_world_size()
    if saved != ranks:
        raise SystemExit(f"--resume: {state} was saved by {saved} ranks, this run has {ranks}")
    parameters, moments = get_state_dict(model, optimizer, options=OPTIONS)
    held = dcp.FileSystemReader(state / "state").read_metadata().state_dict_metadata
    own = {f"model.{name}" for name in parameters}
    if extra := sorted(name for name in held if name.startswith("model.") and name not in own):
        also = f"it also holds {', '.join(extra[:3])}"
        raise SystemExit(f"--resume: {state} does not fit this model: {also}")
    loaded = {"model": parameters, "optimizer": moments}
    read_state(state, loaded, "does not fit this model")
    parameters, moments = loaded.values()
    set_state_dict(
        model, optimizer, model_state_dict=parameters, optim_state_dict=moments, options=OPTIONS
    )
    return facts["step"]
