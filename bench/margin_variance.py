"""Variance of VRPO's margin by budget, n_t timesteps x n_yt masks, shared with the reference or not (LLaDA 1.5, Table 2).

    python bench/margin_variance.py --policy runs/vrpo-tiny-sdar-countdown-.../checkpoints/step-000200 --out variance.jsonl
    python bench/margin_variance.py --out variance.jsonl --figure variance.png      only draw what the file holds

Every (pair, repeat) has draws of its own; the variance is over the repeats of a pair, then the mean over pairs.
"""

import json
import sys
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algos import vrpo
from data.preferences import encode_pairs, training_pairs
from data.rows import read_jsonl
from evals import load_task
from models import load_model, load_tokenizer

BUDGETS = (1, 1), (1, 4), (2, 2), (4, 1), (8, 1)
PAPER = {
    (1, 1, True): 44.0,
    (1, 4, True): 7.3,
    (2, 2, True): 4.7,
    (4, 1, True): 2.2,
    (8, 1, True): 1.0,
    (4, 1, False): 2183.7,
}


@dataclass
class Args:
    policy: str = ""
    """directory of a run's checkpoint: the reference after some steps; empty: measure nothing, draw --out"""
    model: str = "tiny-sdar"
    """the reference, which the run started from"""
    task: str = "countdown"
    """task whose right and wrong answers are the pairs, or the task of --data"""
    data: str = ""
    """file, folder or hub id of pairs; empty: the task's gold answers against wrong ones"""
    pairs: int = 32
    """first pairs of the data"""
    repeats: int = 64
    """margins of each pair"""
    micro_batch_size: int = 256
    """sequences per forward"""
    out: str = ""
    """.jsonl that gets a row for every budget; of earlier rows those of other models stay"""
    figure: str = ""
    """.png to draw of --out"""


def margins(policy, reference, batch, args):
    """One margin of every pair. -> [P]"""
    masks = vrpo.sample_masks(batch, args)
    others = masks if args.share_masks else vrpo.sample_masks(batch, args, "ref")
    elbos, ref_elbos = (
        vrpo.elbo_values(*case, args).mean(1)
        for case in ((policy, batch, masks), (reference, batch, others))
    )
    rewards = args.beta * (elbos - ref_elbos)
    return rewards[0::2] - rewards[1::2]


def measure(args):
    """-> rows, one for every budget with shared draws, then with draws of the reference's own"""
    _, _, device = vrpo.setup_distributed()  # the counts of a batch are collectives
    policy, reference = (load_model(name, device) for name in (args.policy, args.model))
    chosen = islice(training_pairs(load_task(args.task), args.data), args.pairs)
    pairs = encode_pairs(
        chosen, load_tokenizer(args.model), reference, 2048, use_cache=False
    ).at_least(1)
    print(f"{len(pairs)} pairs, {args.repeats} margins each")
    print(
        "| n_t / n_yt | draws of the reference | mean margin | variance of the margin | of the loss |\n|---|---|---|---|---|"
    )
    rows = []
    for mc_num, masks_per_timestep, share in [
        (*budget, share) for share in (True, False) for budget in BUDGETS
    ]:
        fields = {"mc_num": mc_num, "masks_per_timestep": masks_per_timestep, "share_masks": share}
        vrpo_args = vrpo.Args(
            batch_size=len(pairs), micro_batch_size=args.micro_batch_size, **fields
        )
        batch = vrpo.make_batch(pairs, 0, vrpo_args, reference, 0, device)
        found = torch.stack(
            [
                margins(policy, reference, replace(batch, step=s), vrpo_args)
                for s in range(args.repeats)
            ]
        ).double()
        values = {
            "margin": found.mean(),
            "variance": found.var(0).mean(),
            "loss_variance": F.softplus(-found).var(0).mean(),
        }
        values = {name: round(value.item(), 6) for name, value in values.items()}
        rows.append(
            {"model": Path(args.model).name}
            | fields
            | values
            | {"pairs": len(pairs), "repeats": args.repeats}
        )
        kind = "shared" if share else "its own"
        numbers = (
            f"{values['margin']:.3f} | {values['variance']:.4f} | {values['loss_variance']:.2e}"
        )
        print(f"| {mc_num} / {masks_per_timestep} | {kind} | {numbers} |", flush=True)
    dist.destroy_process_group()
    return rows


def draw(rows, path):
    """The variances of every model beside the paper's, on a logarithmic axis."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    columns = {"LLaDA-8B (paper)": PAPER}
    for row in rows:
        budget = row["mc_num"], row["masks_per_timestep"], row["share_masks"]
        columns.setdefault(row["model"], {})[budget] = row["variance"]
    figure = Figure(figsize=(3.4 * len(columns), 3.4), layout="constrained")
    places, names = range(len(BUDGETS)), [f"{n_t} / {n_yt}" for n_t, n_yt in BUDGETS]
    for axes, (name, values) in zip(
        figure.subplots(1, len(columns), squeeze=False)[0], reversed(columns.items()), strict=True
    ):
        for share, marker, label in ((True, "o-", "shared"), (False, "s--", "its own")):
            points = [
                (i, values[*budget, share])
                for i, budget in enumerate(BUDGETS)
                if (*budget, share) in values
            ]
            axes.plot(*zip(*points, strict=True), marker, label=f"draws of the reference: {label}")
        axes.set(title=name, yscale="log", xlabel="timesteps / masks per timestep")
        axes.set_xticks(places, names)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel("variance of the margin")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main(args):
    rows = [row for _, row in read_jsonl(args.out)] if args.out and Path(args.out).exists() else []
    if args.policy:
        found = measure(args)
        rows = [row for row in rows if row["model"] != found[0]["model"]] + found
        if args.out:
            Path(args.out).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if args.figure:
        if not rows:
            raise SystemExit("--figure draws the rows of --out, which has none")
        draw(rows, args.figure)


if __name__ == "__main__":
    main(tyro.cli(Args))
