"""The record of a run: config.json, metrics.jsonl, metrics.csv, samples.jsonl, curves.png and
report.html; heldout.jsonl with answers to held-out problems.

    log = RunLog(__file__, args, task, step=0)
    log.write(step, {"reward/mean": 0.3, "loss/total": loss})
    log.close()

The .jsonl files are the state of the log: table, figure and page are made from them.
"""

import atexit
import json
import math
import os
import platform
import resource
import shlex
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist

from data.rows import read_lines
from distributed.disk import (
    from_first_rank,
    hold,
    is_first_rank,
    new_directory,
    read_json,
    write_atomically,
    write_json,
    writing,
)
from distributed.groups import all_reduce
from evals.report import PANELS, is_score, read_rows, write_report
from run.flags import flags_of

# What the line of a step shows of a row, behind its scores (docs/metrics.md).
SHOWN = """
    reward/mean           reward {:6.3f}
    loss/total            loss {:8.4f}
    policy/elbo           elbo {:8.3f}
    reward/accuracy       accuracy {:4.0%}
    reward/eval_accuracy  held out {:4.0%}
    reward/test_accuracy  held out {:4.0%}
    optim/grad_norm       grad {:6.2f}
    completion/length     len {:6.1f}
    speed/tokens_per_s    {:6.0f} tok/s
    time/step             {:6.2f} s
"""
SHOWN = dict(line.split(maxsplit=1) for line in SHOWN.strip().splitlines())
NO_LOSS = 1e-6  # rounding: with one update per rollout the advantages cancel
SAME_SIGNAL = 2  # seconds: torchrun passes on what the terminal has sent already
DEAD_STATUS = 3  # exit status of a run that ends because it is dead
DEAD_STEPS = 5  # steps in a row without an advantage that a line warns of
# metrics that tell the reasons apart
WHY_DEAD = """reward/mean reward/std completion/truncated_frac completion/empty_frac
completion/distinct_frac""".split()


class RunLog:
    """All ranks construct it and know `run_dir`; only rank 0 writes, others do nothing."""

    def __init__(self, script, args, task, step):
        """script: its file. args: flags of a run. task: its name.

        With --resume rows of steps after `step` are dropped from the files, and config.json gets
        the flags that changed, and the command.
        SystemExit if the run is beyond --max-steps already.
        """
        if step > args.max_steps:
            raise SystemExit(f"--resume: the run is at step {step}, beyond --max-steps")
        self.is_writer, self.max_steps, self.wandb_run = is_first_rank(), args.max_steps, None
        self.started = self.next_plot = time.perf_counter()
        name = f"{Path(script).stem}-{Path(args.model).name}-{task}-s{args.seed}"
        name += f"-{datetime.now():%m%d-%H%M%S}"
        made = lambda: new_directory(f"{args.out}/{name}")
        self.run_dir = Path(args.resume) if args.resume else from_first_rank(made)
        if not self.is_writer:
            return
        path, config = self.run_dir / "config.json", describe_run(script, args)
        if args.resume:
            for file in ("metrics.jsonl", "samples.jsonl")[: 1 + hasattr(args, "reward")]:
                truncate_rows(self.run_dir / file, step)
            now, config = config, read_json(path)
            if now["code"] != config["code"]:
                print("--resume: the script, task or reward has been edited", file=sys.stderr)
            config["args"] = now["args"]
            config["chosen"] |= now["chosen"]
            config.setdefault("resumed", {})[str(step)] = now["command"]
        else:
            hold(self.run_dir)
        write_json(path, config)
        if args.track:
            self.wandb_run = follow(self.run_dir, vars(args))
        # A run that stops with an error leaves its table and figure too. Registered behind wandb's
        # own handler, which ends its run: the last one is called first.
        atexit.register(self.close, 1)

    def write(self, step, metrics):
        """One row, if there are metrics: numbers, 0-d tensors. step: training steps finished, 0
        before training.

        JSON has no NaN: non-finite values become null. A row of a step with a score also redraws
        curves.png and report.html, unless that has just been done.
        """
        if not (self.is_writer and metrics):
            return
        row = {key: float(value) for key, value in metrics.items()}
        finite = {key: value if math.isfinite(value) else None for key, value in row.items()}
        self.append("metrics.jsonl", step, [finite])
        if shown := summary(row):
            place = f"step {step:{len(str(self.max_steps))}}/{self.max_steps}"
            self.say("  ".join([place, *shown]))
        if self.wandb_run:
            self.wandb_run.log(row | {"step": step})
        # It takes seconds, more in a long run: not before the first step, nor after every score.
        if step and any(map(is_score, row)) and time.perf_counter() >= self.next_plot:
            self.plot()
            self.next_plot = time.perf_counter() + 60

    def append(self, name, step, rows):
        """Append rows (dicts) of a step to a .jsonl file."""
        if not self.is_writer:
            return
        path = self.run_dir / name
        with writing(path), open(path, "a", encoding="utf-8") as file:
            for row in rows:
                line = json.dumps({"step": step} | row, ensure_ascii=False, allow_nan=False)
                file.write(line + "\n")

    def history(self, *keys):
        """[(step, value, ...)] of the rows so far that have the first key, on every rank.
        Collective.
        """
        rows = from_first_rank(lambda: read_rows(self.run_dir))
        return [(row["step"], *map(row.get, keys)) for row in rows if row.get(keys[0]) is not None]

    def say(self, text):
        if self.is_writer:
            print(text, flush=True)  # otherwise a pipe shows it late

    def plot(self):
        """Rewrite metrics.csv (a column for every key of any row), curves.png and report.html."""
        import pandas as pd

        if not (rows := read_rows(self.run_dir)):
            return
        with writing(self.run_dir):
            table = pd.DataFrame(rows).set_index("step").astype(float)
            table.to_csv(self.run_dir / "metrics.csv")
            draw_curves(table, self.run_dir)
            write_report(self.run_dir)
        if self.wandb_run:
            self.wandb_run.save(self.run_dir / "report.html", self.run_dir, "now")

    def close(self, status=0):
        """Draw the last plot, end the wandb run. status: of the process; unless it is 0, where the
        record of the run is goes to stderr.
        """
        if not self.is_writer:
            return
        atexit.unregister(self.close)
        if status:
            print(f"run directory: {self.run_dir}", file=sys.stderr)
        try:
            self.plot()
        except SystemExit:
            if not status:  # otherwise the full disk has been named
                raise
        finally:
            if self.wandb_run:
                self.wandb_run.finish(exit_code=status)


def summary(row):
    """-> texts of what the line of a step shows: scores, then SHOWN"""
    texts = {key: f"{key.split('/')[0]} {row[key]:.3f}" for key in row if is_score(key)}
    texts |= {key: text.format(row[key]) for key, text in SHOWN.items() if key in row}
    if abs(row.get("loss/total", 1)) < NO_LOSS:
        del texts["loss/total"]
    return [*texts.values()]


def follow(run_dir, config):
    """-> a new run of wandb, or the one that the run in this directory has had before"""
    import wandb

    kept = run_dir / "wandb-id"
    ours = {"WANDB_PROJECT": "cleandllm", "WANDB_NAME": run_dir.name, "WANDB_DIR": str(run_dir)}
    os.environ |= ours | os.environ  # the user's own variables stay
    known = kept.read_text() if kept.exists() else None
    try:
        run = wandb.init(config=config, id=known, resume="allow")
    except wandb.Error as error:
        raise SystemExit(f"--track: {error} (or set WANDB_MODE=offline)") from error
    # wandb's own counter would drop the steps that a killed run repeats
    run.define_metric("*", step_metric="step")
    kept.write_text(run.id)
    return run


class Stop:
    """Whether the loop has to end between two steps, and the `reason`: SIGTERM (a scheduler's
    notice) or Ctrl-C came, of which a second one ends the process at once; or the run is dead,
    because no completion has had an advantage for many steps. `status`: exit status of the process,
    DEAD_STATUS for a dead run
    """

    def __init__(self, dead_steps):
        """dead_steps: so many steps in a row without an advantage end the run; 0: they do not."""
        self.received, self.dead_steps, self.dead = 0.0, dead_steps, 0
        self.reason, self.status = "stopped by a signal", 0
        for number in signal.SIGTERM, signal.SIGINT:
            signal.signal(number, self.receive)

    def receive(self, *_):
        if self.received and time.monotonic() > self.received + SAME_SIGNAL:
            os._exit(1)
        # print() may be at work
        os.write(2, b"stopping after this step; a second signal aborts it\n")
        self.received = time.monotonic()

    def is_set(self, advantages, metrics):
        """On any rank. advantages: of this rank's completions; metrics: with those of the rollout,
        which say after DEAD_STEPS dead steps why. Collective.
        """
        is_alive = advantages is None or advantages.any()
        received, alive = all_reduce({"received": self.received, "alive": is_alive}).values()
        self.dead = 0 if alive else self.dead + 1
        dead = f"for {self.dead} steps no completion had an advantage"
        if self.dead == DEAD_STEPS and is_first_rank():
            facts = ", ".join(f"{name} {metrics[name]:.3g}" for name in WHY_DEAD)
            why = "in every group all rewards were equal, or the group was left out"
            ends = f"the run ends after {self.dead_steps} (--dead-steps)" * bool(self.dead_steps)
            print(f"warning: {dead}: {why}; {facts}; {ends}", file=sys.stderr)
        if 0 < self.dead_steps <= self.dead:
            self.reason, self.status = f"stopped: {dead}", DEAD_STATUS
        return bool(received or self.status)


class Stopwatch(Counter):
    """Seconds per phase, and their sum, to be merged into the metrics: `with clock("rollout"): ...`
    adds to clock["time/rollout"]. A phase that runs out of GPU memory ends the run with one line.
    """

    @contextmanager
    def __call__(self, phase):
        start = time.perf_counter()
        try:
            yield
        except torch.OutOfMemoryError as error:
            less = "a smaller --micro-batch-size, or --activation-checkpointing"
            raise SystemExit(f"out of GPU memory in the {phase}: try {less}") from error
        if torch.cuda.is_initialized():  # otherwise the next phase would pay for kernels in flight
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        for key in (f"time/{phase}", "time/step"):
            self[key] += seconds


def machine_metrics():
    """Most memory that this process has held, in 10^9 bytes: allocated on GPU, resident on CPU"""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"memory/peak_gb": (torch.cuda.max_memory_allocated() or resident) / 1e9}


def describe_run(script, args):
    """-> what one needs to repeat the run; code: checksums of the script and of the user's files"""
    names = script, args.task, getattr(args, "reward", "")
    files = [Path(name.partition(":")[0]) for name in names]
    return {
        "script": Path(script).stem,
        "args": vars(args),
        "chosen": args.chosen,
        "command": shlex.join(sys.orig_argv),
        "complete": shlex.join([script, *flags_of(vars(args))]),
        "git": describe_git(),
        "code": [zlib.crc32(file.read_bytes()) for file in files if file.is_file()],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": describe_device(),
        "world_size": dist.get_world_size(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def describe_git():
    """-> commit, with -dirty behind it if files differ from it; "" outside a repository"""
    here = shlex.quote(str(Path(__file__).resolve().parent))
    command = f"git -C {here} describe --always --dirty --abbrev=40 --exclude=* 2>/dev/null"
    return subprocess.getoutput(command)


def describe_device():
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {os.cpu_count()} cores"


def truncate_rows(path, step):
    """Keep the rows of a .jsonl up to `step`, without a last test score, which is made again. Says
    how many steps have none.
    """
    kept, lost = [], {*range(1, step + 1)}
    for line, row in read_lines(path):
        is_last_test = row["step"] and any(key.startswith("test/") for key in row)
        if row["step"] <= step and not is_last_test:
            kept.append(line.decode())
            lost.discard(row["step"])
    write_atomically(path, "".join(kept))
    if lost:
        print(f"--resume: {path} lacks {len(lost)} of {step} steps", file=sys.stderr)


def draw_curves(table, run_dir):
    """curves.png: those of PANELS whose keys the run has. table: metrics over steps"""
    from matplotlib import rcParams
    from matplotlib.figure import Figure  # not pyplot: needs no display and keeps no global state

    rcParams["text.parse_math"] = False  # a name may hold dollars
    table = table.round({"loss/total": 6})
    figure = Figure((20, 16), layout="constrained")
    figure.suptitle(f"{run_dir.resolve().name}\nmoving averages of 5 % of the steps")
    for title, keys in PANELS.items():
        curves = table.filter(regex=f"^({keys})$").dropna(how="all")
        if curves.size:
            axes = figure.add_subplot(4, 4, len(figure.axes) + 1, title=title)
            mean = curves.rolling(len(curves) // 20 + 1, center=True, min_periods=1).mean()
            mean.plot(ax=axes, style=".-", ms=4)
    figure.savefig(run_dir / "curves.png", bbox_inches="tight")
