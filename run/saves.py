"""What a killed run needs to go on, bit for bit: parameters, optimizer moments, the step.

All else is keyed by the step.
"""

import json
import re
import shutil
import sys
import zlib
from functools import partial
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from distributed.disk import AtomicDirectory, from_first_rank, hold, is_first_rank, writing
from models import save_model, source_of
from models.lora import has_lora, save_adapter
from models.tensors import read_json

# Frozen parameters (the base under adapters) come from the model that the run started from.
OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)
CHECKSUMS = "checksums.json"  # in a state: {file: CRC-32}


class Saves:
    """Everything that a run writes besides its log. All ranks make the same calls.

    checkpoints/step-000050    weights in Hugging Face layout, or a LoRA adapter in peft's
    checkpoints/best           link to the weights with the best validation score
    resume/step-000050         the state that `load` reads
    """

    def __init__(self, run_dir, model, optimizer, tokenizer, base, keep, every, last, scores=()):
        """base: --model of the run. keep: how many of the newest saves stay (0: all). every: steps
        between saves (0: none). last: step of the run's end. scores: [(step, validation score)] so
        far.
        """
        self.checkpoints, self.resume = Path(run_dir) / "checkpoints", Path(run_dir) / "resume"
        self.model, self.optimizer, self.tokenizer = model, optimizer, tokenizer
        self.base, self.keep, self.more = source_of(base), keep, []
        self.every, self.last = every, last
        self.best = max(scores, key=lambda score: score[1], default=None)
        self.newest = max(saves_in(self.checkpoints), default=None)
        self.tag_best()

    @staticmethod
    def load(run_dir, model, optimizer):
        """Fill both from the newest undamaged state, delete what was saved after it. -> its step

        run_dir: "" for a new run, which starts at step 0. SystemExit if a process works in it.
        """
        if not run_dir:
            return 0
        from_first_rank(lambda: hold(run_dir))
        step = load_state(newest_state(Path(run_dir) / "resume"), model, optimizer)
        if is_first_rank():
            for folder in (Path(run_dir) / "checkpoints", Path(run_dir) / "resume"):
                for path in saves_in(folder):
                    if step_of(path) > step:
                        with writing(path):
                            shutil.rmtree(path)
        dist.barrier()
        return step

    def include(self, model, optimizer, step):
        """Save another pair with every state: a value model, or a reference that moves, which has
        no optimizer (None).

        step: > 0 in a resumed run; the pair is then loaded from that step's state.
        """
        self.more.append((model, optimizer))
        if step:
            load_pair(self.resume / f"step-{step:06d}", model, optimizer, len(self.more))

    def after_step(self, step, metrics, stopped=False):
        """Save weights and state every `every` steps and when the run is stopped; the weights also
        after the last step and when the validation score, eval/..., is the best so far.
        """
        score = next((value for name, value in metrics.items() if name.startswith("eval/")), None)
        state = stopped or (self.every and step % self.every == 0)
        weights = state or step == self.last
        is_best = score is not None and (self.best is None or score > self.best[1])
        if weights or is_best:
            self.newest = self.checkpoints / f"step-{step:06d}"
            if has_lora(self.model):
                save_adapter(self.model, self.newest, self.base, self.tokenizer)
            else:
                save_model(self.model, self.newest, self.tokenizer)
        if is_best:
            self.best = step, score
            self.tag_best()
        if state:
            save_state(self.resume, self.model, self.optimizer, step, self.keep, self.more)
        # A run that goes back to its last state must find that state's best weights.
        if state or not self.resume.exists():
            best = [f"step-{self.best[0]:06d}"] if self.best else []
            prune(self.checkpoints, self.keep, spare=best)

    def tag_best(self):
        link = self.checkpoints / "best"
        if is_first_rank():
            with writing(link):
                link.unlink(missing_ok=True)
                if self.best:
                    link.symlink_to(f"step-{self.best[0]:06d}")


def save_state(directory, model, optimizer, step, keep, more=()):
    """Save into directory/step-<step>, then delete all but the newest `keep` states. Collective.

    keep: 0 keeps all. more: further pairs of a model and its optimizer that belong to the state.
    The state takes its name only when all of it is on disk, its checksums too.
    """
    save = AtomicDirectory(Path(directory) / f"step-{step:06d}")
    dist.barrier()  # rank 0 has made the folder
    parts = {}
    for number, pair in enumerate([(model, optimizer), *more]):
        parts |= pair_parts(*pair, number)
    try:  # a full disk raises on every rank
        dcp.save(parts, checkpoint_id=save.folder / "state")
    except CheckpointException as error:
        save.error = save.error or OSError(first_cause(error))
    facts = {"step": step, "world_size": dist.get_world_size()}
    save.attempt((save.folder / "facts.json").write_text, json.dumps(facts) + "\n")
    files = checksums(save.folder)
    if None in files.values():
        save.error = save.error or OSError("what was written cannot be read")
    save.attempt((save.folder / CHECKSUMS).write_text, json.dumps(files) + "\n")
    save.finish()
    prune(directory, keep)


def checksums(state):
    """-> {file: CRC-32 of its bytes, None if it cannot be read}, but for checksums.json itself.
    Collective: every rank reads the files that it has written.

    A core takes half a second for a GB. A CRC misses one damage in 4 billion, never a single byte.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    files, every = {}, [None] * ranks
    for path in filter(Path.is_file, sorted(state.rglob("*"))):
        writer = re.match(r"__(\d+)_", path.name)  # how torch names what a rank has written
        if path.name != CHECKSUMS and int(writer[1] if writer else 0) % ranks == rank:
            files[str(path.relative_to(state))] = crc32(path)
    dist.all_gather_object(every, files)
    return {name: value for part in every for name, value in part.items()}


def crc32(path):
    value = 0
    try:
        with open(path, "rb") as file:
            while part := file.read(2**24):
                value = zlib.crc32(part, value)
    except OSError:
        return None
    return value


def damage(state, found):
    """found: its checksums now -> names of the files that have changed since, "": none, or an older
    version saved it, without checksums. SystemExit if a file cannot be read: it may be whole.
    """
    if unread := [name for name, value in found.items() if value is None]:
        raise SystemExit(f"--resume: cannot read {state / unread[0]}")
    try:
        known = json.loads((state / CHECKSUMS).read_text())
        changed = [name for name, value in known.items() if found.get(name) != value]
    except FileNotFoundError:
        known, changed = found, []
        print(f"--resume: {state} has no {CHECKSUMS}; it is not checked", file=sys.stderr)
    except OSError as error:
        raise SystemExit(f"--resume: cannot read {state / CHECKSUMS}: {error.strerror}") from error
    except (ValueError, AttributeError):
        return CHECKSUMS
    return ", ".join(changed) if "facts.json" in known else "facts.json"


def saves_in(directory):
    """-> paths of its saves, the oldest first; a copy under another name is none"""
    names = Path(directory).glob("step-*")
    return sorted((path for path in names if path.name[5:].isdecimal()), key=step_of)


def step_of(save):
    return int(save.name.removeprefix("step-"))


def newest_state(directory):
    """-> path of the newest state that is not damaged, after a line on each that is. SystemExit if
    there is none. Collective.
    """
    for state in from_first_rank(lambda: saves_in(directory)[::-1]):
        found = checksums(state)
        wrong = from_first_rank(partial(damage, state, found))
        if not wrong:
            return state
        if is_first_rank():
            line = f"--resume: {state} is damaged ({wrong}); trying the save before it"
            print(line, file=sys.stderr, flush=True)
    raise SystemExit(
        f"--resume: {directory} holds no undamaged save; runs make one every --save-every steps"
    )


def load_state(state, model, optimizer):
    """Fill model and optimizer from a state directory. -> the step. Collective.

    SystemExit on another world size or model.
    """
    world_size, saved = dist.get_world_size(), read_json(state / "facts.json").get("world_size")
    if saved != world_size:
        raise SystemExit(f"--resume: {state} was saved by {saved} ranks, this run has {world_size}")
    load_pair(state, model, optimizer, 0)
    return step_of(state)


def pair_parts(model, optimizer, number):
    """-> what a state holds of its pair of that number: the model's trained parameters and their
    moments; without optimizer (None) all of the model
    """
    if optimizer is None:
        return {f"model-{number}": model.state_dict()}
    parameters, moments = get_state_dict(model, optimizer, options=OPTIONS)
    return {f"model-{number}": parameters, f"optimizer-{number}": moments}


def load_pair(state, model, optimizer, number):
    """Fill a pair from a state directory. Collective."""
    parts = pair_parts(model, optimizer, number)
    try:  # dcp.load would print the traceback of a damaged file before it raises
        dcp.FileSystemReader(state / "state").read_metadata()
    except Exception as error:  # whatever pickle makes of it
        raise SystemExit(f"--resume: {state} is damaged: its .metadata cannot be read") from error
    try:
        dcp.load(parts, checkpoint_id=state / "state")
        if optimizer:
            names = "model_state_dict", "optim_state_dict"
            loaded = dict(zip(names, parts.values(), strict=True))
            set_state_dict(model, optimizer, **loaded, options=OPTIONS)
    except CheckpointException as error:
        raise SystemExit(
            f"--resume: {state} is damaged or of another model: {first_cause(error)}"
        ) from error


def first_cause(error):
    """A CheckpointException has one (exception, stack) per failed rank. -> the first, as a line"""
    rank, (cause, _) = next(iter(error.failures.items()))
    text = (str(cause) or type(cause).__name__).splitlines()[0]
    return f"{text} (rank {rank})"


def prune(directory, keep, spare=()):
    """Delete all but the newest `keep` (0: all) of directory/step-* and those named in spare."""
    if keep and is_first_rank():
        for old in saves_in(directory)[:-keep]:
            if old.name not in spare:
                with writing(old):
                    shutil.rmtree(old)
