"""Does the first update of a method push the reward of the sampler uphill?

    python bench/alignment.py --model tiny-llada --task countdown
    python bench/alignment.py --model DIR --task sudoku --gen-length 20

Each method's own script runs, with an optimizer that keeps the gradient and moves nothing (no KL,
no clipping): one vector for each of --blocks rollouts of the same prompts. The exact gradient of
the sampler's expected reward on these prompts is TPG's, of all denoising steps. Compared are
expectations: `cosine` removes the noise by products of different rollouts only.

Vectors go to --out and are not made twice, so that a call that was cut off goes on.
"""

import json
import math
import sys
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import distributed.start  # noqa: F401

# isort: split
import torch
import torch.distributed as dist

from data.stream import ShuffledStream
from models.checkpoint import checkpoint_config
from models.config import architecture
from run.flags import values_for
from run.log import describe_device, describe_git
from run.problems import Problems

EXACT, EXACT_AT = "tpg", (1.0, 0.3)  # the method, temperatures: sampling, near the greedy score
METHODS = (
    "d1", "coupled_grpo", "spg", "bgpo", "cj_grpo", "mdpo", "wd1", "espo", "ebpo", "justgrpo",
    "dtreerpo", "tracerl",
)  # fmt: skip


@dataclass
class Args:
    model: str = "tiny-sdar"
    """key of models.MODELS, or a directory in HF layout; of a size whose gradients fit in memory"""
    task: str = "countdown"
    gen_length: int = 12
    """tokens of a completion; two denoising steps per block"""
    methods: tuple[str, ...] = METHODS
    prompts: int = 16
    """the batch whose reward is to rise, the same in all rollouts"""
    blocks: int = 16
    """rollouts of the batch, 8 completions of each prompt"""
    out: str = "runs/alignment"
    """vectors, and rows.jsonl, to which rows are appended"""


def cosine(a, b):
    """Cosine of the expectations of two random vectors, from n independent draws of each.

    Every product is a mean over pairs of different draws, so that noise has no part in it. With two
    draws this is (a1.b2 + b1.a2) / 2 / sqrt((a1.a2)(b1.b2)). a, b [n, P] -> cosine, its standard
    error by the jackknife; NaN where noise drowns a vector
    """
    n = len(a)
    # all draws, then all but one
    used = torch.cat([torch.ones(1, n), 1 - torch.eye(n)]).double()

    def products(x, y):
        pairs = (x @ y.T).double().fill_diagonal_(0)
        return ((used @ pairs) * used).sum(1)

    values = products(a, b) / products(a, a).sqrt() / products(b, b).sqrt()
    spread = (values[1:] - values[1:].mean()).square().sum()
    return float(values[0]), float(((n - 1) / n * spread).sqrt())


def noise_scale(a):
    """Draws whose mean has as much noise as signal. a [n, P] -> squared noise / squared signal"""
    pairs, n = (a @ a.T).double(), len(a)
    signal = (pairs.sum() - pairs.trace()) / (n * (n - 1))
    return float((pairs.trace() / n - signal) / signal)


def settings(script, method, temperature, args):
    """-> Args of the script: its own for tiny models, but for what all must share"""
    fields = values_for(script.Args, script.BY_SIZE, args.model, args.task, 0)
    fields = {name: value for name, (value, _) in fields.items()} | {
        "model": args.model, "task": args.task, "gen_length": args.gen_length, "lora_rank": 0,
        "temperature": temperature, "prompts_per_step": args.prompts, "num_generations": 8,
        "micro_batch_size": 8 * args.prompts, "max_steps": args.blocks, "schedule_steps": 1 << 30,
        "num_iterations": 1, "beta": 0.0, "max_grad_norm": math.inf, "eval_limit": 0,
        "dead_steps": 0, "compile": False, "positions": 4, "out": f"{args.out}/runs",
    }  # fmt: skip
    if method == EXACT:
        fields["train_steps"] = args.gen_length  # all
    known = script.Args.__dataclass_fields__
    return script.Args(**{name: value for name, value in fields.items() if name in known})


def measure(method, temperature, args):
    """-> gradients of a method [blocks, P]"""
    script, vectors = import_module(f"algos.{method}"), []

    class Gradient(torch.optim.AdamW):
        def step(self):
            grads = [p.grad.full_tensor().flatten() for p in self.param_groups[0]["params"]]
            vectors.append(torch.cat(grads).cpu())

    class FewProblems(Problems):
        def __init__(self, *how):
            super().__init__(*how)
            self.stream = ShuffledStream(self.train[: args.prompts], 0)

    few = patch.object(script, "Problems", FewProblems)
    with few, patch.object(torch.optim, "AdamW", Gradient):
        script.main(settings(script, method, temperature, args))
    return torch.stack(vectors)


def main(args):
    family = architecture(checkpoint_config(args.model)[0])
    found, folder = {}, Path(args.out) / f"{family}-{args.task}"
    folder.mkdir(parents=True, exist_ok=True)
    for method, temperature in product(dict.fromkeys((EXACT, *args.methods)), EXACT_AT):
        file = folder / f"{method}-t{temperature:g}.pt"
        if not file.is_file():
            try:
                torch.save(measure(method, temperature, args), folder / "new")
            except SystemExit as error:  # a method that does not take the model
                print(f"{method}: {error}")
                dist.destroy_process_group()
                continue
            (folder / "new").replace(file)  # one that is killed leaves no half a file
        found[method, temperature] = torch.load(file)
    facts = {"family": family, "task": args.task, "completions": args.blocks * args.prompts * 8}
    facts |= {"commit": describe_git(), "machine": describe_device()}
    with open(Path(args.out) / "rows.jsonl", "a") as rows:
        for (method, temperature), vectors in found.items():
            row = {"method": method, "temperature": temperature}
            row["noise"] = round(noise_scale(vectors) * args.prompts * 8, 0)
            for target in (at for at in EXACT_AT if at <= temperature):
                value, error = cosine(vectors, found[EXACT, target])
                row |= {"exact_at": target, "cosine": round(value, 4), "error": round(error, 4)}
                print(line := json.dumps(row | facts))
                rows.write(f"{line}\n")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
