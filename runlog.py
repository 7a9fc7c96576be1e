"""The record of a run: one directory with config.json, metrics.jsonl, metrics.csv, samples.jsonl and curves.png.

    with RunLog(args.out, f"bgpo-{model}-{task}-s{args.seed}", rank, asdict(args), args.max_steps, args.track) as log:
        log.write(step, {"reward/mean": 0.3, "loss/total": loss})

The files are the only state: the table and the figure are made from metrics.jsonl, so `draw_curves(run_dir)` redraws any run.
"""

import atexit
import csv
import json
import math
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from tqdm import tqdm

# what the progress bar and the plain line show of a row
SUMMARY = {
    "reward/mean": "reward {:6.3f}",
    "loss/total": "loss {:8.4f}",
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


class RunLog:
    """All ranks construct it and know `run_dir`; only rank 0 writes, elsewhere every method does nothing."""

    def __init__(self, out, name, rank, config, max_steps, track=False, resume="", step=0):
        """config: dict that JSON can hold. max_steps: length of the bar. track: mirror the rows to wandb.

        resume: run directory to go on in; rows of steps after `step` are dropped from its files, config.json stays.
        SystemExit where it is beyond max_steps: what is written at the end would not be of that step.
        """
        if step > max_steps:
            raise SystemExit(
                f"--resume {resume}: the run is at step {step} already, beyond --max-steps {max_steps}"
            )
        self.is_writer, self.max_steps, self.latest = rank == 0, max_steps, {}
        self.bar = self.metrics_file = self.wandb_run = None
        chosen = [Path(resume) if resume else make_run_dir(out, name) if self.is_writer else None]
        if dist.is_initialized():  # ranks start at different seconds
            dist.broadcast_object_list(chosen, src=0)
        self.run_dir = chosen[0]
        if not self.is_writer:
            return
        if resume:
            for name in ("metrics.jsonl", "samples.jsonl"):
                truncate_rows(self.run_dir / name, step)
        else:
            write_atomically(
                self.run_dir / "config.json",
                json.dumps(describe_run(name, config), indent=2) + "\n",
            )
        self.metrics_file = open(
            self.run_dir / "metrics.jsonl", "a", buffering=1, encoding="utf-8"
        )  # flushed per line
        atexit.register(
            self.close, failed=True
        )  # a run that stops with an error leaves its table and figure too
        if track:
            import wandb

            self.wandb_run = wandb.init(
                project="cleandllm", name=self.run_dir.name, config=config, dir=self.run_dir
            )
        if sys.stderr.isatty():
            bar_format = "{n_fmt}/{total_fmt} {bar:12} {elapsed}<{remaining}{postfix}"
            self.bar = tqdm(
                total=max_steps, initial=step, bar_format=bar_format, dynamic_ncols=True
            )

    def write(self, step, metrics):
        """One row. step: training steps finished, so 0 is before training. metrics: numbers and 0-d tensors.

        JSON has no NaN: non-finite values become null. A row with a score also redraws the plot.
        """
        if not self.is_writer:
            return
        row = {
            key: value if isinstance(value, int) else float(value) for key, value in metrics.items()
        }
        finite = {key: value if math.isfinite(value) else None for key, value in row.items()}
        self.metrics_file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        parts = {key: text.format(row[key]) for key, text in SUMMARY.items() if key in row}
        parts |= {key: f"{key.split('/')[0]} {row[key]:.3f}" for key in row if is_score(key)}
        if self.bar is None:
            self.say(
                "  ".join(
                    [f"step {step:{len(str(self.max_steps))}}/{self.max_steps}", *parts.values()]
                )
            )
        else:
            self.latest |= parts  # the last evaluation stays in sight
            self.bar.update(step - self.bar.n)
            self.bar.set_postfix_str("  ".join(self.latest.values()))
        if self.wandb_run:
            self.wandb_run.log(row, step=step)
        if any(map(is_score, row)):
            self.plot()

    def samples(self, step, rows):
        """Append rows (dicts: prompt, completion, reward, step map ...) to samples.jsonl."""
        if self.is_writer:
            with open(self.run_dir / "samples.jsonl", "a", encoding="utf-8") as file:
                file.writelines(
                    json.dumps({"step": step, **row}, ensure_ascii=False, allow_nan=False) + "\n"
                    for row in rows
                )

    def history(self, key):
        """[(step, value)] of one key so far, on every rank. Collective."""
        found = [
            [(row["step"], row[key]) for row in read_rows(self.run_dir) if row.get(key) is not None]
            if self.is_writer
            else None
        ]
        if dist.is_initialized():
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def say(self, text):
        """Print a line without breaking the bar."""
        if self.is_writer:
            tqdm.write(text)
            sys.stdout.flush()  # a pipe shows it at once

    def plot(self):
        """Rewrite metrics.csv (a column for every key of any row) and redraw curves.png."""
        if self.is_writer:
            rows = read_rows(self.run_dir)
            with open(self.run_dir / "metrics.csv", "w", newline="", encoding="utf-8") as file:
                columns = dict.fromkeys(["step", *(key for row in rows for key in row)])
                writer = csv.DictWriter(file, columns, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
            draw_curves(self.run_dir)

    def close(self, failed=False):
        """Last plot; ends the bar and the wandb run, even where the plot fails. A second call does nothing."""
        if self.metrics_file is None or self.metrics_file.closed:
            return
        self.metrics_file.close()
        try:
            self.plot()
        finally:
            if self.bar is not None:
                self.bar.close()
            if self.wandb_run:
                self.wandb_run.finish(exit_code=int(failed))

    def __enter__(self):
        return self

    def __exit__(self, error_type, error, traceback):
        self.close(failed=error_type is not None)


class StopSignal:
    """SIGTERM (a scheduler's notice) is remembered, for the loop to end between two steps."""

    def __init__(self):
        self.received = False
        signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number, frame):
        self.received = True

    def is_set(self):
        """Whether any rank received it. Collective."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        flag = torch.tensor(int(self.received), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)


class Stopwatch(dict):
    """Seconds per phase, ready to be merged into the metrics: `with clock("rollout"): ...` adds to clock["time/rollout"]."""

    @contextmanager
    def __call__(self, phase):
        start = time.perf_counter()
        yield
        if torch.cuda.is_initialized():  # kernels run behind: without this the next phase would pay
            torch.cuda.synchronize()
        self[f"time/{phase}"] = self.get(f"time/{phase}", 0.0) + time.perf_counter() - start


def peak_memory_gb(device):
    """Most memory this process has held, in 10^9 bytes: allocated on the GPU, resident on CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def make_run_dir(out, name):
    """Create out/name-<MMDD-HHMMSS>, with -2, -3 ... where that exists."""
    stem, count = f"{name}-{datetime.now():%m%d-%H%M%S}", 1
    while True:
        run_dir = Path(out) / (stem if count == 1 else f"{stem}-{count}")
        try:  # mkdir itself is the test: of two runs in one second only one gets the name
            run_dir.mkdir(parents=True)
            return run_dir
        except FileExistsError:
            count += 1
        except OSError as error:
            raise SystemExit(
                f"--out {out}: the run directory cannot be made ({error.strerror})"
            ) from error


def describe_run(name, config):
    """What one needs to repeat the run."""
    return {
        "script": name.partition("-")[0],
        "args": config,
        "command": shlex.join(sys.orig_argv),
        "git": describe_git(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": describe_device(),
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def describe_git():
    """-> commit and whether files differ from it (new ones too: a copied script is one); None outside a repository."""
    if not shutil.which("git"):
        return None
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    head = subprocess.run(
        [*git, "rev-parse", "--verify", "--quiet", "HEAD"], capture_output=True, text=True
    )
    if head.returncode:
        return None
    status = subprocess.run(
        [*git, "status", "--porcelain"], capture_output=True, text=True, check=True
    )
    return {"commit": head.stdout.strip(), "dirty": bool(status.stdout)}


def describe_device():
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def write_atomically(path, text):
    """A process killed at any moment leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def truncate_rows(path, step):
    """Keep the rows of a .jsonl file up to `step`. A last line without its end was being written when the run was killed."""
    if path.exists():
        *lines, _ = path.read_bytes().split(
            b"\n"
        )  # bytes: the cut may go through a character, and text has other line ends
        rows = [(line, json.loads(line)) for line in lines]
        # The last test score is written again, at the end that the run now has.
        kept = [
            line
            for line, row in rows
            if row["step"] <= step and not (row["step"] and any(map(is_test, row)))
        ]
        write_atomically(path, b"".join(line + b"\n" for line in kept).decode())


def command_line(arguments):
    """Parse the flags of a script into its dataclass. With --resume DIR, that run's own arguments are the defaults.

    SystemExit if a flag is given with another value than the run had: only max_steps, track and resume may change.
    """
    import tyro

    given = check_numbers(tyro.cli(arguments))
    if not given.resume:
        return given
    path = Path(given.resume) / "config.json"
    if not path.is_file():
        raise SystemExit(f"--resume {given.resume} is no run directory: it has no config.json")
    config = json.loads(path.read_text(encoding="utf-8"))
    script, saved = Path(sys.argv[0]).stem, config["args"]
    if config.get("script", script) != script:
        raise SystemExit(
            f"--resume {given.resume} is a run of {config['script']}.py, not of {script}.py"
        )
    known = {field.name: field.type for field in fields(arguments)}
    before = arguments(
        **{
            key: tuple(value) if isinstance(value, list) else value
            for key, value in saved.items()
            if key in known
        }
    )
    now = tyro.cli(arguments, default=before)
    for name in known:
        if name not in ("max_steps", "track", "resume") and getattr(now, name) != getattr(
            before, name
        ):
            flag = name.replace("_", "-")
            raise SystemExit(
                f"--resume: the run had --{flag} {getattr(before, name)}, now it is {getattr(now, name)}"
            )
    return check_numbers(now)


# flags that count something which must be there; every other number may be 0, and none is negative
AT_LEAST_ONE = {
    *(
        "max_steps",
        "micro_batch_size",
        "batch_size",
        "prompts_per_step",
        "num_iterations",
        "mc_num",
    ),
    *(
        "gen_length",
        "denoising_steps",
        "max_length",
        "masks_per_timestep",
        "train_steps",
        "lora_alpha",
    ),
}
# flags at whose 0 a run goes on for ever and learns nothing, and why
ABOVE_ZERO = {
    "temperature": "greedy completions of a group are all alike, and nothing tells them apart",
    "max_grad_norm": "it is the norm that a gradient is cut down to; inf leaves all as they are",
}


def check_numbers(args):
    """-> args; SystemExit names the first number that is too small, or is none."""
    for field in fields(args):
        value, name, least = (
            getattr(args, field.name),
            field.name.replace("_", "-"),
            int(field.name in AT_LEAST_ONE),
        )
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if field.name in ABOVE_ZERO and not value > 0:
                raise SystemExit(f"--{name} {value} must be above 0: {ABOVE_ZERO[field.name]}")
            if not value >= least:
                raise SystemExit(f"--{name} {value} must be at least {least}")
        if field.name == "betas" and not all(0 <= beta < 1 for beta in value):
            raise SystemExit(f"--betas {' '.join(map(str, value))} must be at least 0 and below 1")
    return args


def is_score(key):
    return key.startswith(("eval/", "test/"))


def is_test(key):
    return key.startswith("test/")


def read_rows(run_dir):
    return [
        json.loads(line)
        for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


# title, left key and axis label, right key and axis label; drawn are the first three whose left key exists
LINE_PANELS = [
    ("Loss", "loss/total", "loss", "", ""),
    (
        "Chosen answers preferred",
        "reward/accuracy",
        "share of the pairs",
        "reward/margin",
        "mean margin",
    ),
    ("Likelihood of the completions", "policy/elbo", "ELBO, nats per completion", "", ""),
    (
        "Change of the policy",
        "policy/ratio",
        "probability ratio, new / old",
        "policy/clip_frac",
        "clipped share",
    ),
    (
        "Length of the answers",
        "completion/length",
        "tokens",
        "completion/truncated_frac",
        "cut off at the limit",
    ),
    ("Gradient", "optim/grad_norm", "norm before clipping", "optim/lr", "learning rate"),
    ("Speed", "speed/tokens_per_s", "tokens per second", "", ""),
]


def draw_curves(run_dir):
    """curves.png: up to six panels, those whose keys the run has."""
    from matplotlib.figure import Figure  # not pyplot: needs no display and keeps no global state

    data = {}  # key -> (steps, values)
    for row in read_rows(run_dir):
        for key, value in row.items():
            steps, values = data.setdefault(key, ([], []))
            steps.append(row["step"])
            values.append(math.nan if value is None else value)  # a gap in the line
    # With one update per rollout the advantages cancel: the loss is rounding noise, only its slope counts.
    if max(map(abs, data.get("loss/total", ([], [0.0]))[1])) < 1e-6:
        data.pop("loss/total", None)
    panels = [draw_scores] if any(map(is_score, data)) else []
    panels += [draw_reward] if "reward/mean" in data else []
    panels += [partial(draw_lines, panel) for panel in LINE_PANELS if panel[1] in data][:3]
    panels += [draw_seconds] if any(key.startswith("time/") for key in data) else []
    if not panels:
        return
    columns = 2 if len(panels) in (2, 4) else min(3, len(panels))
    lines, last = math.ceil(len(panels) / columns), max(1, *data["step"][0])
    figure = Figure(figsize=(5.2 * columns, 3.7 * lines + 0.7), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)
    args = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["args"]
    facts = [
        f"{key} {Path(str(args[key])).name}"
        for key in ("model", "task", "seed")
        if args.get(key, "") != ""
    ]
    figure.suptitle(
        "     ".join([run_dir.name.split("-")[0], *facts]), fontsize=14, fontweight="bold"
    )
    note = "faint: every step      bold: mean over 5 % of the steps (in runs of 40 steps or more)"
    figure.supxlabel(note, fontsize=9, color="0.4")
    for place, draw in enumerate(panels, start=1):
        first = len(figure.axes)
        axes = figure.add_subplot(
            lines, columns, place, xlabel="training step", xlim=(-0.04 * last, 1.04 * last)
        )
        axes.grid(alpha=0.25)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_title(draw(axes, data), loc="left", fontweight="bold", fontsize=11, pad=24)
        handles = [
            handle for each in figure.axes[first:] for handle in each.get_legend_handles_labels()[0]
        ]
        outside = {
            "loc": "lower left",
            "bbox_to_anchor": (-0.02, 1),
            "ncols": len(handles),
        }  # above the axes: covers no curve
        axes.legend(
            handles=handles,
            **outside,
            frameon=False,
            fontsize=8,
            handlelength=1.5,
            columnspacing=1.5,
        )
    figure.savefig(run_dir / "curves.png", dpi=110)


def draw_scores(axes, data):
    """Validation over steps; the test score before and after, with its number."""
    label_axis(axes, "problems solved", top=1)
    for key, (steps, values) in sorted(data.items()):
        if key.startswith("eval/"):
            axes.plot(steps, values, "o-", label=f"{key[5:]}, validation")
        if key.startswith("test/"):
            axes.plot(
                steps, values, "*", markersize=14, clip_on=False, zorder=3, label=f"{key[5:]}, test"
            )
            for step, value in zip(steps, values, strict=True):
                # clear of the curve: over the first star (below a high one), right of the later
                offset = (14, 0) if step > steps[0] else (-6, 18 if value < 0.85 else -18)
                axes.annotate(
                    f"{value:.1%}", (step, value), offset, textcoords="offset points", va="center"
                )
    return "Score on problems not trained on"


def draw_reward(axes, data):
    steps, values = data["reward/mean"]
    draw_line(axes, steps, values, "tab:blue", "mean")
    if "reward/std" in data:
        low, high = zip(
            *((m - s, m + s) for m, s in zip(values, data["reward/std"][1], strict=True)),
            strict=True,
        )
        axes.fill_between(
            steps,
            low,
            high,
            color="tab:blue",
            alpha=0.12,
            linewidth=0,
            label="± standard deviation",
        )
        axes.set_ylim(
            bottom=min(0, *values) if len(values) > 1 else None
        )  # rewards are seldom negative where the band is
    label_axis(axes, "reward")
    return "Reward in training"


def draw_lines(panel, axes, data):
    title, left, left_label, right, right_label = panel
    draw_line(axes, *data[left], "tab:blue", left_label)
    label_axis(axes, left_label)
    if right in data:
        twin, (steps, values), label = axes.twinx(), data[right], f"{right_label} (right axis)"
        if right.endswith("_frac"):
            draw_line(twin, steps, values, "tab:orange", label)
            label_axis(twin, right_label, top=min(1, max(0.05, 1.1 * max(values))))
        else:  # a schedule has nothing to smooth
            twin.plot(steps, values, color="tab:orange", label=label)
            label_axis(twin, right_label)
    return title


def draw_line(axes, steps, values, color, label):
    window = len(values) // 40  # to either side
    if window:
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
        values = [fmean(values[max(0, i - window) : i + window + 1]) for i in range(len(values))]
    axes.plot(steps, values, "-" if window else ".-", color=color, linewidth=2, label=label)


def draw_seconds(axes, data):
    """Stacked phases; step k fills [k - 1, k]. A phase of some steps only (eval) is spread over the steps since its last."""
    phases = [key for key in data if key.startswith("time/") and key != "time/step"] or [
        "time/step"
    ]
    phases.sort(key=lambda key: -len(data[key][0]))  # the steady ones at the bottom
    stacks, last = [], max(1, *data["step"][0])
    for key in phases:
        seconds, previous = [0.0] * last, 0
        for step, value in zip(*data[key], strict=True):
            for k in range(previous, step):
                seconds[k] = value / (step - previous)
            previous = step
        stacks.append([seconds[0], *seconds])
    axes.stackplot(
        range(last + 1), stacks, labels=[key[5:] for key in phases], step="pre", alpha=0.8
    )
    label_axis(axes, "seconds")
    return "Time per step"


def label_axis(axes, label, top=None):
    """top: of an axis of shares, in percent. Else plain numbers: an exponent above the axis would hit the legend."""
    axes.set_ylabel(label)
    axes.yaxis.set_major_formatter("{x:.0%}" if top else "{x:.6g}")
    if top:
        axes.set_ylim(0, top)
