"""Run a table of commands on the GPUs of a machine, and write a row of each.

    python bench/runs.py bench/gsm8k.toml --out runs/gsm8k --gpus 0 1 2 3

Called again it goes on: what has its row in OUT/rows.jsonl is not run again, what was stopped is
resumed, what failed is tried again. A line of the table is one command, or many:

    method = ["d1", "bgpo"]
    rate = [1e-6, 3e-6]
    f = {d1 = "", bgpo = "--mc-num 4"}

    [runs]     # name = "number of GPUs, script, its flags but --out"
    sft = "4 algos/sft.py --data rows.jsonl --max-steps 300"
    "{method}-{rate}" = "1 algos/{method}.py --model @sft {{f[{method}]}} --learning-rate {rate}"
    "test-{method}-{rate}" = "1 evals/run.py --model @{method}-{rate} --tasks gsm8k"

--part names another section than [runs]. A word in a name stands for each of its list;
{{f[{method}]}} is the method's entry of f. @NAME is what that run leaves: its last weights, or
whatever stands at its --out. It comes first, and is run again where that is gone. Directories that
no other run waits for are deleted.
Ctrl-C or SIGTERM, as of `timeout 20m`, ends all scripts once their step is done and saved.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from itertools import product
from pathlib import Path

sys.path.insert(0, __file__.rpartition("/bench/")[0])
import distributed.start  # noqa: F401

# isort: split
import pandas as pd

from data.rows import read_lines
from distributed.disk import hold, read_json
from run.log import describe_git

# metrics of a row, as they are logged
CURVES = "eval/|test/|error/|problems/|mismatch/|reward/mean|completion/|tokens_per_forward|time/"
CURVES += "|policy/|optim/grad_norm|memory/|speed/"
# What a run says, whatever its exit status then: if it is dead, or had ended before; if it was
# stopped; last, stopped or not, when all is written.
OVER, STOPPED = "stopped: for [0-9]+ steps|the run is finished", "go on with --resume"
WRITTEN = " s; report: "


def read_table(path, part):
    """-> {name: command} of a section. SystemExit says what is wrong with it."""
    runs = {}
    try:
        words = tomllib.loads(path.read_text())
        for name, command in words.pop(part).items():
            varied = re.findall(r"{(\w+)}", name)
            for values in product(*(words[word] + [] for word in varied)):  # lists
                chosen = words | dict(zip(varied, values, strict=True))
                runs[name.format(**chosen)] = command.format(**chosen).format(**words)
        for command in runs.values():
            int(command.split()[0])
    except Exception as error:
        raise SystemExit(f"{path} [{part}]: {error!r}") from error
    if unknown := needs(" ".join(runs.values())) - runs.keys():
        raise SystemExit(f"{path} [{part}]: no run {', '.join(unknown)}")
    return runs


def needs(command):
    """-> names of the runs whose output it takes"""
    return {*re.findall(r" @(\S+)", command)}


def start(command, gpus, folder):
    """-> the process of a command, which is resumed if it was begun; in a session of its own, so
    that Ctrl-C does not reach it"""

    def left_by(found):
        source = folder.with_name(found[1])
        return f" '{max(source.glob('*/checkpoints/step-*'), default=source)}'"

    command = re.sub(r" @(\S+)", left_by, command) + f" --out '{folder}'"
    # of a training run that was saved; of an evaluation
    begun = [*folder.glob("*/resume/step-*/../../config.json"), *folder.glob("config.json")]
    if begun:
        command += f" --resume '{begun[0].resolve().parent}'"
    else:
        shutil.rmtree(folder, ignore_errors=True)
    if len(gpus) > 1:
        command = f"-m torch.distributed.run --standalone --nproc-per-node {len(gpus)} {command}"
    print(f"GPU {','.join(gpus)}: {command}", flush=True)
    # torchrun would kill its ranks after 30 s
    env = f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120 CUDA_VISIBLE_DEVICES={','.join(gpus)}"
    env += " OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}"
    line = f"exec env {env} {sys.executable} {command} > '{folder}.log' 2>&1"
    return subprocess.Popen(line, shell=True, start_new_session=True)


def is_over(process, log):
    """Whether a command need not be started again; of others the end of the log is shown"""
    text = Path(log).read_text()
    ended = WRITTEN in text or not process.returncode
    over = re.search(OVER, text) or (ended and STOPPED not in text)
    if not over:
        print(f"not finished: {log}:", *re.findall(r".*\w.*", text)[-2:], flush=True)
    return over


def row_of(folder):
    """-> what is kept of a run that is over; of an evaluation also the score of each sample, since
    errors between runs are clustered by problem"""
    row = {"commit": describe_git(), "scores": []}
    for path in folder.rglob("result.json"):
        samples = read_lines(path.with_name("samples.jsonl"))
        row["scores"].append(read_json(path) | {"each": [line["score"] for _, line in samples]})
    for path in folder.glob("*/metrics.csv"):
        table = pd.read_csv(path, index_col="step")
        row["config"] = read_json(path.with_name("config.json"))
        row["seconds"] = table["time/step"].sum()
        row["curves"] = table.filter(regex=CURVES).to_csv(float_format="%.4g")
    return row


def main(table: Path, /, out: Path, gpus: list[str], part: str = "runs"):
    """Run a table of commands: see the head of bench/runs.py.

    Args:
        table: .toml
        out: rows.jsonl, NAME.log of each run, and its directory until it is deleted
        gpus: 0 0 1 1: two runs share a GPU; where there is none, four are at work together
        part: section of the table
    """
    runs, busy = read_table(table, part), {}
    out.mkdir(parents=True, exist_ok=True)
    hold(out)
    done = [row["run"] for _, row in read_lines(out / "rows.jsonl")]
    due = [name for name in runs if runs[name] not in done]
    for name in due:  # grows
        due += [one for one in needs(runs[name]) - {*due} if not (out / one).exists()]
    waiting = [*due]

    def end(process):
        name, mine = busy.pop(process)
        gpus.extend(mine)
        if is_over(process, f"{out / name}.log"):
            row = {"name": name, "run": runs[name]} | row_of(out / name)
            with open(out / "rows.jsonl", "a") as file:
                print(json.dumps(row), file=file)
            due.remove(name)
            for one in runs.keys() - {*due} - needs(" ".join(map(runs.get, due))):
                shutil.rmtree(out / one, ignore_errors=True)

    def stop(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends two
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        while True:
            for name in [*waiting]:
                n, command = runs[name].split(maxsplit=1)
                if int(n) <= len(gpus) and not needs(command) & {*due}:
                    waiting.remove(name)
                    mine = [gpus.pop(0) for _ in range(int(n))]
                    busy[start(command, mine, out / name)] = name, mine
            if not busy:
                break
            time.sleep(1)
            for process in [one for one in busy if one.poll() is not None]:
                end(process)
    finally:
        for process in busy:
            process.terminate()  # scripts finish their step and save
        for process in [*busy]:
            process.wait()
            end(process)  # some were at their end
    if due:
        raise SystemExit(f"not done with {len(gpus)} GPUs: {', '.join(due)}")


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
