"""The record of a run: config.json, metrics.jsonl, metrics.csv, samples.jsonl, curves.png and
report.html.

    name = f"bgpo-{model}-{task}-s{args.seed}"
    log = RunLog(args.out, name, asdict(args), args.max_steps, args.track)
    log.write(step, {"reward/mean": 0.3, "loss/total": loss})
    log.end(weights)

The files are the only state: table, figure and page are made from them, so that
`draw_curves(run_dir)` redraws any run.
"""

import atexit
import csv
import gc
import json
import math
import os
import platform
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zlib
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from distributed.disk import (
    check_letters,
    from_first_rank,
    hold,
    is_first_rank,
    new_directory,
    write_atomically,
    writing,
)
from distributed.groups import all_reduce
from run.report import PANELS, each_row, is_score, read_lines, read_rows, write_report

# What the progress bar and the plain line show of a row, behind its scores (docs/metrics.md).
SUMMARY = {
    "reward/mean": "reward {:6.3f}",
    "loss/total": "loss {:8.4f}",
    "policy/elbo": "elbo {:8.3f}",
    "reward/accuracy": "pairs ranked right {:4.0%}",
    "reward/eval_accuracy": "held out {:4.0%}",
    "reward/test_accuracy": "pairs ranked right, held out {:4.0%}",
    "optim/grad_norm": "grad {:6.2f}",
    "probe/distinct_frac": "distinct samples {:.0%}",
    "probe/logp_gap_mean": "engine and learner differ by {:.1e} nats a token",
    "probe/greedy_agreement": "{:.0%} of its greedy tokens are the learner's",
    "completion/length": "len {:6.1f}",
    "speed/tokens_per_s": "{:6.0f} tok/s",
    "time/step": "{:6.2f} s",
}
# values of the start-up check that need no word
GOOD = {
    "probe/distinct_frac": (0.25, 1),
    "probe/logp_gap_mean": (0, 0.05),
    "probe/greedy_agreement": (0.9, 1),
}
NO_LOSS = 1e-6  # rounding: with one update per rollout the advantages cancel


def summary(row):
    """-> {key: text} of what the line shows of a row"""
    is_null = abs(row.get("loss/total", 1)) < NO_LOSS and "policy/elbo" in row
    hidden = {"loss/total" if is_null else "policy/elbo"}
    hidden |= {key for key, (low, high) in GOOD.items() if low <= row.get(key, low) <= high}
    scores = {key: f"{key.split('/')[0]} {row[key]:.3f}" for key in row if is_score(key)}
    shown = {key: text for key, text in SUMMARY.items() if key in row and key not in hidden}
    return scores | {key: text.format(row[key]) for key, text in shown.items()}


COLUMNS = "step prompt completion gold reward".split()  # of the table of samples in wandb
DEAD_STATUS = 3  # exit status: no script may take a dead run for a finished one
DEAD_STEPS = 5  # steps in a row without an advantage that a line warns of


class RunLog:
    """All ranks construct it and know `run_dir`; only rank 0 writes, others do nothing."""

    def __init__(self, out, name, config, max_steps, track=False, resume="", step=0):
        """config: dict that JSON can hold. max_steps: length of the bar. track: copy rows to wandb.

        resume: run directory to go on in; rows of steps after `step` are dropped from its files,
        config.json stays. SystemExit if the run is beyond max_steps already.
        """
        if step > max_steps:
            beyond = f"at step {step} already, beyond --max-steps {max_steps}"
            raise SystemExit(f"--resume {resume}: the run is {beyond}")
        self.is_writer, self.max_steps, self.latest = is_first_rank(), max_steps, {}
        self.started, self.compiled = time.perf_counter(), False
        self.bar = self.metrics_file = self.wandb_run = None
        self.next_plot = 0.0
        self.run_dir = Path(resume) if resume else from_first_rank(lambda: make_run_dir(out, name))
        if not self.is_writer:
            return
        if resume:
            truncate_rows(self.run_dir / "metrics.jsonl", step)
            truncate_rows(self.run_dir / "samples.jsonl", step)
            read_rows(self.run_dir)  # SystemExit here, and not at exit, if it is damaged
        else:
            hold(self.run_dir)
            config_text = json.dumps(describe_run(name, config), indent=2) + "\n"
            write_atomically(self.run_dir / "config.json", config_text)
        # flushed after every line
        metrics = self.run_dir / "metrics.jsonl"
        with writing(metrics):
            self.metrics_file = open(metrics, "a", buffering=1, encoding="utf-8")
        if track:
            self.wandb_run = follow(self.run_dir, config)
        # A run that stops with an error leaves its table and figure too. Registered behind wandb's
        # own handler, which ends its run: the last one is called first.
        atexit.register(self.close, failed=True)
        if sys.stderr.isatty():
            form = "{n_fmt}/{total_fmt} {bar:12} {elapsed}<{remaining}{postfix}"
            self.bar = tqdm(total=max_steps, initial=step, bar_format=form, dynamic_ncols=True)

    def write(self, step, metrics):
        """One row. step: training steps finished, 0 before training. metrics: numbers, 0-d tensors.

        JSON has no NaN: non-finite values become null. A row with a score also redraws curves.png
        and report.html, unless that has just been done.
        """
        if not self.is_writer:
            return
        row = {key: v if isinstance(v, int) else float(v) for key, v in metrics.items()}
        finite = {key: value if math.isfinite(value) else None for key, value in row.items()}
        with writing(self.run_dir):
            self.metrics_file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        if not self.compiled and (seconds := row.get("speed/compile_s")):
            self.say(f"compiling took {seconds:.0f} s so far; later steps do not take this time")
            self.compiled = True
        parts = summary(row)
        if self.bar:  # the last score stays visible
            scores = {key: text for key, text in self.latest.items() if is_score(key)}
            self.latest = scores | parts
            self.bar.update(step - self.bar.n)
            self.bar.set_postfix_str("  ".join(self.latest.values()))
        elif parts:
            place = f"step {step:{len(str(self.max_steps))}}/{self.max_steps}"
            self.say("  ".join([place, *parts.values()]))
        if self.wandb_run:
            self.wandb_run.log(row, step=step)
        if any(map(is_score, row)) and time.perf_counter() > self.next_plot:
            start = time.perf_counter()
            self.plot()
            # It takes seconds: at most a twentieth of a run.
            self.next_plot = (end := time.perf_counter()) + 19 * (end - start)

    def samples(self, step, rows):
        """Append rows (dicts: prompt, completion, reward, step map ...) to samples.jsonl."""
        if self.is_writer:
            path = self.run_dir / "samples.jsonl"
            with writing(path), open(path, "a", encoding="utf-8") as file:
                for row in rows:
                    line = json.dumps({"step": step} | row, ensure_ascii=False, allow_nan=False)
                    file.write(f"{line}\n")

    def history(self, key):
        """[(step, value)] of one key so far, on every rank. Collective."""
        rows = from_first_rank(lambda: read_rows(self.run_dir))
        return [(row["step"], row[key]) for row in rows if row.get(key) is not None]

    def say(self, text):
        """Print a line without breaking the bar."""
        if self.is_writer:
            tqdm.write(text)
            sys.stdout.flush()  # otherwise a pipe shows it late

    def plot(self):
        """Rewrite metrics.csv (a column for every key of any row), curves.png and report.html,
        whose samples wandb gets as a table.
        """
        last = {"step": 0}
        for row in each_row(self.run_dir):
            last |= row
        with writing(self.run_dir):
            with open(self.run_dir / "metrics.csv", "w", encoding="utf-8") as file:
                table = csv.DictWriter(file, last, lineterminator="\n")
                table.writeheader()
                table.writerows(each_row(self.run_dir))
            draw_curves(self.run_dir)
            gc.collect()  # a figure is full of cycles: several MB that would wait for the collector
            samples = write_report(self.run_dir)
        if self.wandb_run and samples:
            import wandb

            table = wandb.Table(COLUMNS, [[*map(sample.get, COLUMNS)] for sample in samples])
            self.wandb_run.log({"samples": table}, step=last["step"])

    def end(self, weights, status=0):
        """Say how long the run took and where its report and weights (a path) are, and close.
        status: exit status, for wandb
        """
        seconds, report = time.perf_counter() - self.started, self.run_dir / "report.html"
        self.say(f"{seconds:.0f} s; report: {report}; weights: {weights}")
        self.close(status=status)

    def close(self, failed=False, status=0):
        """Draw the last plot, end the bar and the wandb run. A second call does nothing.

        failed: the run stopped with an error; where its record is goes to stderr.
        """
        if self.metrics_file is None or self.metrics_file.closed:
            return
        if failed:
            print(f"run directory: {self.run_dir}", file=sys.stderr)
        try:
            with writing(self.run_dir):
                self.metrics_file.close()
            self.plot()
        finally:
            if self.bar is not None:
                self.bar.close()
            if self.wandb_run:
                self.wandb_run.finish(exit_code=status or int(failed))


def follow(run_dir, config):
    """-> a new run of wandb, or the one that the run in this directory has had before"""
    import wandb

    # tables wait there for `wandb sync`, which may be on another machine; a home may be read-only
    os.environ.setdefault("WANDB_DATA_DIR", str(run_dir.resolve() / "wandb"))
    kept = run_dir / "wandb-id"
    known = kept.read_text() if kept.exists() else None
    run = wandb.init(
        project="cleandllm",
        name=run_dir.name,
        dir=run_dir,
        config=config,
        id=known,
        resume="allow",
    )
    kept.write_text(run.id)
    return run


class Stop:
    """Whether the loop has to end between two steps, and the `reason`: SIGTERM came (a scheduler's
    notice), or the run is dead, because no completion has had an advantage for many steps.
    `status`: exit status of the process, DEAD_STATUS for a dead run
    """

    def __init__(self, dead_steps=0):
        """dead_steps: so many steps in a row without an advantage end the run; 0: they do not."""
        self.received, self.dead_steps, self.dead = False, dead_steps, 0
        self.reason, self.status = "stopped by a signal", 0
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number, frame):
        self.received = True

    def is_set(self, advantages=None, metrics=None):
        """On any rank. advantages: of this rank's completions; metrics: with those of the rollout,
        for the line that after DEAD_STEPS dead steps, and at the end, says why. Collective.
        """
        is_alive = advantages is None or advantages.any()
        received, alive = all_reduce({"received": self.received, "alive": is_alive}).values()
        self.dead = 0 if alive else self.dead + 1
        is_dead = self.dead >= (self.dead_steps or math.inf)
        if is_first_rank() and (is_dead or self.dead == DEAD_STEPS):
            tqdm.write(why_dead(self.dead, metrics, self.dead_steps), file=sys.stderr)
        if is_dead:
            self.reason = f"stopped, because no completion had an advantage for {self.dead} steps"
            self.status = DEAD_STATUS
        return bool(received or is_dead)


def why_dead(steps, metrics, most):
    """A line with the figures that tell the reasons apart."""
    return (
        f"warning: for {steps} steps no completion had an advantage, because in every "
        f"group all rewards were equal, or the group was left out: mean reward "
        f"{metrics['reward/mean']:.3g}, std {metrics['reward/std']:.2g}; of the completions "
        f"{metrics['completion/truncated_frac']:.0%} are cut off, "
        f"{metrics['completion/empty_frac']:.0%} empty, "
        f"{metrics['completion/distinct_frac']:.0%} distinct within their group"
        + (f"; the run ends after {most} such steps (--dead-steps)" if steps < most else "")
    )


class Stopwatch(dict):
    """Seconds per phase, to be merged into the metrics: `with clock("rollout"): ...` adds to
    clock["time/rollout"]. A phase that runs out of GPU memory ends the run with one line.
    """

    def __init__(self, micro_batch_size):
        super().__init__()
        smaller = f"--micro-batch-size {micro_batch_size // 2} or "
        self.less = (smaller if micro_batch_size > 1 else "") + "--activation-checkpointing"

    @contextmanager
    def __call__(self, phase):
        start = time.perf_counter()
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise SystemExit(f"out of GPU memory in the {phase}: try {self.less}") from error
        if torch.cuda.is_initialized():  # otherwise the next phase would pay for kernels in flight
            torch.cuda.synchronize()
        self[f"time/{phase}"] = self.get(f"time/{phase}", 0.0) + time.perf_counter() - start

    def with_step(self):
        """-> the phases and their sum"""
        return self | {"time/step": sum(self.values())}


def machine_metrics():
    """Most memory that this process has held, in 10^9 bytes: allocated on GPU, resident on CPU; on
    GPU also how many graphs torch.compile has made so far, and its seconds.
    """
    if torch.cuda.is_available():
        compiler = torch._dynamo.utils
        return {
            "memory/peak_gb": torch.cuda.max_memory_allocated() / 1e9,
            "speed/compiled_graphs": compiler.counters["stats"]["unique_graphs"],
            "speed/compile_s": compiler.calculate_time_spent()["total_wall_time"],
        }
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return {"memory/peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9}


def make_run_dir(out, name):
    """Create out/name-<MMDD-HHMMSS>, with -2, -3 ... if that exists."""
    try:
        return new_directory(check_letters(Path(out) / f"{name}-{datetime.now():%m%d-%H%M%S}"))
    except OSError as error:
        problem = f"the run directory cannot be made ({error.strerror})"
        raise SystemExit(f"--out {out}: {problem}") from error


def describe_run(name, config):
    """-> what one needs to repeat the run"""
    return {
        "script": name.partition(f"-{Path(config.get('model', '')).name}-")[0],
        "args": config,
        "command": shlex.join(sys.orig_argv),
        "git": describe_git(),
        "code": checksums(sys.argv[0], config.get("task"), config.get("reward")),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": describe_device(),
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def checksums(script, task, reward):
    """-> {"script": crc32 of the file, ...}; task and reward only if they are the user's files"""
    reward = reward and reward.rpartition(":")[0]  # path.py:function
    named = {"script": script, "task": task, "reward": reward}
    files = {key: Path(name) for key, name in named.items() if name}
    return {key: zlib.crc32(file.read_bytes()) for key, file in files.items() if file.is_file()}


def describe_git():
    """-> commit, with -dirty behind it if files differ from it; "" outside a repository"""
    if not shutil.which("git"):
        return ""
    command = "git describe --always --dirty --abbrev=40 --exclude=*".split()
    here = Path(__file__).resolve().parent
    return subprocess.run(command, cwd=here, capture_output=True, text=True).stdout.strip()


def describe_device():
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {os.cpu_count()} cores"


def truncate_rows(path, step):
    """Keep the rows of a .jsonl up to `step`, without a last test score, which is made again."""
    kept = []
    for line, row in read_lines(path):
        if type(row.get("step")) is not int:
            raise SystemExit(f"{path} is damaged: a line has no step: {line[:100]!r}")
        is_last_test = row["step"] and any(key.startswith("test/") for key in row)
        if row["step"] <= step and not is_last_test:
            kept.append(line.decode() + "\n")
    write_atomically(path, "".join(kept))


def draw_curves(run_dir):
    """curves.png from metrics.csv: up to six of PANELS, those whose keys the run has."""
    import pandas as pd
    from matplotlib.figure import Figure  # not pyplot: needs no display and keeps no global state

    data = pd.read_csv(run_dir / "metrics.csv", index_col="step")
    if "loss/total" in data and data["loss/total"].abs().max() < NO_LOSS:
        del data["loss/total"]
    keys = lambda pattern: data.filter(regex=f"^({pattern})$")
    panels = [panel for panel in PANELS if not keys(panel[1]).empty]
    panels = panels[:5] + panels[5:][-1:]
    if not panels:
        return
    figure = Figure((15.6, 8.1), layout="constrained")
    note = "faint: every step, bold: moving average of 5 % of the steps"
    figure.suptitle(f"{run_dir.resolve().name}\n{note}", x=0.01, ha="left")
    for place, (title, left, right) in enumerate(panels, start=1):
        axes = figure.add_subplot(2, 3, place, xlabel="training step")
        axes.set_title(title, loc="left", fontweight="bold", pad=34)
        axes.locator_params("x", integer=True)
        axes.grid(alpha=0.25)
        for key, values in keys(left).items():
            draw_line(axes, key, values)
        legend = {"bbox_to_anchor": (0, 1, 1, 0), "borderaxespad": 0, "frameon": False}
        axes.legend(loc="lower left", ncols=4, fontsize=8, **legend)
        if right in data:
            twin = axes.twinx()
            draw_line(twin, f"{right}, right axis", data[right], color="tab:orange")
            twin.legend(loc="lower right", fontsize=8, **legend)
    figure.savefig(run_dir / "curves.png", dpi=110)


def draw_line(axes, label, values, color=None):
    values = values.dropna()
    window = len(values) // 40  # to either side
    mean = values.rolling(2 * window + 1, center=True, min_periods=1).mean()
    style = "*" if label.startswith("test/") else "-" if window else ".-"
    (line,) = axes.plot(mean, style, color=color, linewidth=2, label=label)
    if window:
        axes.plot(values, color=line.get_color(), alpha=0.25, linewidth=1)
    if style == "*":
        axes.margins(0.15)  # for the numbers beside the stars
        for place in values.items():
            axes.annotate(f"{place[1]:.1%}", place, (8, 8), textcoords="offset points")
