"""What a killed run needs to go on, bit for bit: parameters, optimizer moments, the step. All else is keyed by the step."""

import json
import shutil
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from models.atomic import AtomicDirectory
from models.checkpoint import save_model, source_of
from models.lora import has_lora, save_adapter

# Frozen parameters (the base under adapters) come from the model that the run started from.
OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


def save_state(directory, model, optimizer, step, keep, also=None):
    """Save into directory/step-<step>, then delete all but the newest `keep` states (0 keeps all). Collective over all ranks.
    also: a second model whose parameters belong to the state.

    The state takes its name only when all of it is on disk: what newest_state finds is complete.
    """
    save = AtomicDirectory(Path(directory) / f"step-{step:06d}")
    dist.barrier()  # rank 0 has made the folder
    parameters, moments = get_state_dict(model, optimizer, options=OPTIONS)
    error = None
    try:  # a full disk raises on every rank
        second = {"also": also.state_dict()} if also else {}
        dcp.save(
            {"model": parameters, "optimizer": moments} | second,
            checkpoint_id=save.folder / "state",
        )
    except CheckpointException as problem:
        error = OSError(first_cause(problem))
    save.error = save.error or error
    facts = {"step": step, "world_size": dist.get_world_size()}
    save.attempt((save.folder / "facts.json").write_text, json.dumps(facts) + "\n")
    save.finish()
    prune(directory, keep)


def first_cause(error):
    """A CheckpointException holds one (exception, stack) per failed rank. -> the first, as one line"""
    rank, (cause, _) = next(iter(error.failures.items()))
    text = str(cause).splitlines()[0]
    if "unexpected pos" in text:  # all that torch's writer says when a write was cut short
        text = f"No space left, or a limit on file size ({text})"
    return f"{text} (rank {rank})"


class Saves:
    """Everything that a run writes besides its log: weights, the tag of the best, states to resume from. All ranks call alike.

    checkpoints/step-000050    weights in HF layout, or a LoRA adapter in peft's
    checkpoints/best           link to the weights with the best validation score
    resume/step-000050         what load needs
    """

    def __init__(self, run_dir, model, optimizer, tokenizer, base, keep, scores=()):
        """base: --model of the run; keep: newest saves that stay (0: all); scores: [(step, validation score)] so far."""
        self.run_dir, self.model, self.optimizer, self.tokenizer = (
            Path(run_dir),
            model,
            optimizer,
            tokenizer,
        )
        self.base, self.keep, self.best = (
            source_of(base),
            keep,
            max(scores, key=lambda s: s[1], default=None),
        )
        self.newest, self.also = (
            max((self.run_dir / "checkpoints").glob("step-*"), default=None),
            None,
        )
        self.tag_best()

    @staticmethod
    def load(run_dir, model, optimizer):
        """Fill model and optimizer from the newest complete state; weights saved after it are deleted. -> its step"""
        step = load_state(newest_state(Path(run_dir) / "resume"), model, optimizer)
        if dist.get_rank() == 0:
            for path in (Path(run_dir) / "checkpoints").glob("step-*"):
                if int(path.name.removeprefix("step-")) > step:
                    shutil.rmtree(path)
        dist.barrier()
        return step

    def include(self, model, step):
        """Save the parameters of a second model that moves, a reference, with every state; at step > 0, where a run goes on,
        take those of that step's state.
        """
        self.also = model
        if step:
            state = self.run_dir / "resume" / f"step-{step:06d}" / "state"
            try:
                dcp.load({"also": model.state_dict()}, checkpoint_id=state)
            except CheckpointException as error:
                raise SystemExit(
                    f"--resume: {state} has no reference that fits: {first_cause(error)}"
                ) from error

    def after_step(self, step, score=None, weights=False, state=False):
        """Save what is asked for, and the weights too if `score` (validation, None: not evaluated) is the best so far."""
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
        if state:
            save_state(
                self.run_dir / "resume", self.model, self.optimizer, step, self.keep, self.also
            )
        if (
            state or not (self.run_dir / "resume").exists()
        ):  # a run that goes back to its last state must find its best there
            prune(
                self.run_dir / "checkpoints",
                self.keep,
                spare=[f"step-{self.best[0]:06d}"] if self.best else [],
            )

    def tag_best(self):
        link = self.run_dir / "checkpoints" / "best"
        if dist.get_rank() == 0 and self.best:
            temporary = link.with_name(".best.tmp")
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(f"step-{self.best[0]:06d}")
            temporary.replace(link)
        elif dist.get_rank() == 0:
            link.unlink(missing_ok=True)


def prune(directory, keep, spare=()):
    """Delete all but the newest `keep` of directory/step-* (0 keeps all), and those named in spare. Rank 0 acts."""
    if keep and dist.get_rank() == 0:
        for old in sorted(Path(directory).glob("step-*"))[:-keep]:
            if old.name not in spare:
                shutil.rmtree(old)


def states(directory):
    """Complete states, oldest first."""
    return sorted(path.parent for path in Path(directory).glob("step-*/facts.json"))


def newest_state(directory):
    """-> path of the newest complete state. SystemExit if there is none."""
    found = states(directory)
    if not found:
        raise SystemExit(
            f"--resume: {directory} holds no complete state; runs save one every --save-every steps"
        )
    return found[-1]


def load_state(state, model, optimizer):
    """Fill model and optimizer from a state directory. -> the step. Collective. SystemExit on another world size or model."""
    facts = json.loads((state / "facts.json").read_text())
    if facts["world_size"] != dist.get_world_size():
        raise SystemExit(
            f"--resume: {state} was saved by {facts['world_size']} ranks, this run has {dist.get_world_size()}"
        )
    parameters, moments = get_state_dict(model, optimizer, options=OPTIONS)
    held = dcp.FileSystemReader(state / "state").read_metadata().state_dict_metadata
    if extra := [
        name
        for name in held
        if name.startswith("model.") and name.removeprefix("model.") not in parameters
    ]:
        raise SystemExit(
            f"--resume: {state} does not fit this model: it also holds {', '.join(sorted(extra)[:3])}"
        )
    loaded = {"model": parameters, "optimizer": moments}
    try:
        dcp.load(loaded, checkpoint_id=state / "state")
    except CheckpointException as error:
        raise SystemExit(
            f"--resume: {state} does not fit this model: {first_cause(error)}"
        ) from error
    set_state_dict(
        model,
        optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=OPTIONS,
    )
    return facts["step"]
