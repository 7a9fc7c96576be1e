"""What a killed run needs to go on, bit for bit: parameters, optimizer moments, the step.

All else is keyed by the step.
"""

import json
import shutil
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from distributed.disk import from_first_rank, hold, is_first_rank, whole_directory, writing
from models import save_model, source_of
from models.lora import has_lora, save_adapter

# Frozen parameters (the base under adapters) come from the model that the run started from.
OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)
FACTS, CHECKSUMS = "facts.json", "checksums.json"  # of a state; the latter: {file: CRC-32}


class Saves:
    """Everything that a run writes besides its log. All ranks make the same calls.

    checkpoints/step-000050    weights in Hugging Face layout, or a LoRA adapter in peft's
    checkpoints/best           link to the weights with the best validation score
    resume/step-000050         the state that `load` reads
    """

    def __init__(self, run_dir, model, optimizer, tokenizer, args, scores=()):
        """args: RunFlags. scores: [(step, validation score)] so far"""
        self.checkpoints, self.resume = Path(run_dir) / "checkpoints", Path(run_dir) / "resume"
        self.pairs, self.tokenizer, self.args = [(model, optimizer)], tokenizer, args
        self.scores = dict(scores)
        self.newest = max(saves_in(self.checkpoints), default=(0, None))[1]
        self.tag_best()

    @property
    def best(self):
        """The step with the best validation score, the first of equals; 0: there is none"""
        return max(self.scores, key=self.scores.get, default=0)

    @staticmethod
    def load(run_dir, model, optimizer):
        """Fill both from the newest undamaged state, delete what was saved after it. -> its step

        run_dir: "" for a new run, which starts at step 0. SystemExit if a process works in it, or
        if the state is of another number of ranks or another model.
        """
        if not run_dir:
            return 0
        from_first_rank(lambda: hold(run_dir))
        states, weights = Path(run_dir) / "resume", Path(run_dir) / "checkpoints"
        state = from_first_rank(partial(newest_state, states))
        facts, ranks = json.loads((state / FACTS).read_text()), dist.get_world_size()
        if (saved := facts["world_size"]) != ranks:
            raise SystemExit(f"--resume: {state} was saved by {saved} ranks, this run has {ranks}")
        load_pair(state, model, optimizer, 0)
        for folder in states, weights:
            delete(path for step, path in saves_in(folder) if step > facts["step"])
        return facts["step"]

    def include(self, model, optimizer, step):
        """Save another pair with every state: a value model, or a reference that moves, which has
        no optimizer (None).

        step: > 0 in a resumed run; the pair is then loaded from that step's state.
        """
        if step:
            load_pair(self.resume / f"step-{step:06d}", model, optimizer, len(self.pairs))
        self.pairs.append((model, optimizer))

    def after_step(self, step, metrics, stopped=False):
        """Save weights and state every --save-every steps and when the run is stopped; the weights
        also after the last step and when the validation score, eval/..., is the best so far.
        """
        for name, value in metrics.items():
            if name.startswith("eval/"):
                self.scores[step] = value
        model, every = self.pairs[0][0], self.args.save_every
        is_due = stopped or (every and step % every == 0)
        if is_due or step in (self.best, self.args.max_steps):
            self.newest = self.checkpoints / f"step-{step:06d}"
            if has_lora(model):
                save_adapter(model, self.newest, source_of(self.args.model), self.tokenizer)
            else:
                save_model(model, self.newest, self.tokenizer)
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
                link.unlink(missing_ok=True)
                if self.best:
                    link.symlink_to(f"step-{self.best:06d}")

    def save_state(self, step):
        """Save into resume/step-<step>, delete older states than --keep-saves. Collective.

        The state takes its name only when all of it is on disk, its checksums too.
        """
        facts, parts = {"step": step, "world_size": dist.get_world_size()}, {}
        for number, pair in enumerate(self.pairs):
            parts |= pair_parts(*pair, number)
        with whole_directory(self.resume / f"step-{step:06d}") as folder:
            try:  # a full disk raises on every rank
                dcp.save(parts, checkpoint_id=folder / "state")
            except CheckpointException as error:
                raise OSError(first_cause(error)) from error
            if is_first_rank():
                (folder / FACTS).write_text(json.dumps(facts) + "\n")
                seal(folder)
        self.prune(self.resume)

    def prune(self, directory, spare=None):
        """Delete all saves but the newest --keep-saves (0: all) and that of the step `spare`"""
        if keep := self.args.keep_saves:
            delete(path for step, path in saves_in(directory)[:-keep] if step != spare)


def checksums(state):
    """-> {file: CRC-32}

    A core takes half a second for a GB. A CRC misses one damage in 4 billion, never a single byte.
    """
    files = {str(path.relative_to(state)): path for path in state.rglob("*") if path.is_file()}
    with ThreadPoolExecutor() as pool:
        return dict(zip(files, pool.map(crc32, files.values()), strict=True))


def crc32(path):
    value = 0
    with open(path, "rb") as file:
        while part := file.read(2**24):
            value = zlib.crc32(part, value)
    return value


def seal(state):
    """Write the checksums of its files."""
    (state / CHECKSUMS).write_text(json.dumps(checksums(state)) + "\n")


def damage(state):
    """-> names of the files that have changed since the state was saved. SystemExit if one cannot
    be read: it may be whole.
    """
    try:
        known, found = json.loads((state / CHECKSUMS).read_text()), checksums(state)
    except (FileNotFoundError, ValueError):
        return CHECKSUMS
    except OSError as error:
        raise SystemExit(f"--resume: cannot read {state}: {error}") from error
    return ", ".join(name for name, value in known.items() if found.get(name) != value)


def saves_in(directory):
    """-> [(step, path)] of its saves, the oldest first; a copy under another name is none"""
    named = ((path.name[5:], path) for path in Path(directory).glob("step-*"))
    return sorted((int(step), path) for step, path in named if step.isdecimal())


def newest_state(directory):
    """-> path of the newest state that is not damaged, after a line on each that is. SystemExit if
    there is none.
    """
    for _, state in reversed(saves_in(directory)):
        if not (wrong := damage(state)):
            return state
        line = f"--resume: {state} is damaged ({wrong}); trying the save before it"
        print(line, file=sys.stderr, flush=True)
    raise SystemExit(
        f"--resume: {directory} holds no undamaged save; runs make one every --save-every steps"
    )


def pair_parts(model, optimizer, number):
    """-> what a state holds of its pair of that number: the model's trained parameters and their
    moments; without optimizer (None) all of the model
    """
    if optimizer is None:
        return {f"model-{number}": model.state_dict()}
    parameters, moments = get_state_dict(model, optimizer, options=OPTIONS)
    return {f"model-{number}": parameters, f"optimizer-{number}": moments}


def load_pair(state, model, optimizer, number):
    """Fill a pair from a state. Collective."""
    parts = pair_parts(model, optimizer, number)
    try:
        dcp.load(parts, checkpoint_id=state / "state")
        if optimizer:
            parameters, moments = parts.values()
            set_state_dict(
                model,
                optimizer,
                model_state_dict=parameters,
                optim_state_dict=moments,
                options=OPTIONS,
            )
    except CheckpointException as error:
        raise SystemExit(f"--resume: {state} is of another model: {first_cause(error)}") from error


def first_cause(error):
    """A CheckpointException has one (exception, stack) per failed rank. -> the first, as a line"""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"{cause!r:.300} (rank {rank})"


def delete(saves):
    if is_first_rank():
        for save in saves:
            with writing(save):
                shutil.rmtree(save)
