"""The methods of the project, and the code that their scripts share.

    python tests/sync_shared.py SCRIPT    copies its shared blocks to the other scripts

A block stands between `# >>> shared: name` and `# <<< shared: name`. Blocks of one name are
byte-identical in all scripts of METHODS. A script that is not listed here is your own: no test
looks at it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = ("sdar", "sdar-moe", "llada2")
BIDIRECTIONAL = ("llada", "dream", "llada-moe")
ALL = (*BLOCK, *BIDIRECTIONAL)  # tiny-<family> is a model of each
LORA, TWO = {"lora_rank": 4}, {"num_iterations": 2}
# the reference stays after 2 updates and moves after 4
MOVES = TWO | {"max_steps": 3, "ref_sync_steps": 3}
TREES = TWO | {"branches": (2, 2), "lambda_max": 1.0}
TRACES = TWO | {"accuracy_range": (0.0, 9.0)}
VALUES = {"value_model": True, "value_learning_rate": 5e-6}
# own: the most tokens outside of shared blocks. runs: {family: flags} of tests/golden_runs.py.
# A paper's None: the method is ours.
METHODS = {
    "d1": {
        "title": "diffu-GRPO: one-pass mean-field log-probabilities, clipped ratio, KL",
        "paper": "2504.12216",
        "families": ALL,
        "own": 503,
        "runs": {"dream": LORA | {"num_iterations": 2}},
    },
    "coupled_grpo": {
        "title": "Coupled-GRPO (DiffuCoder): scores from complementary masks, clipped ratio, KL",
        "paper": "2506.20639",
        "families": ALL,
        "own": 673,
        "runs": {"sdar": MOVES | {"baseline": "loo", "top_p": 0.9}},
    },
    "spg": {
        "title": "SPG: policy gradient on a lower and an upper bound of the log-likelihood",
        "paper": "2510.09541",
        "families": ALL,
        "own": 902,
        "runs": {"llada-moe": {"num_iterations": 1, "block_length": 4}},
    },
    "bgpo": {
        "title": "BGPO: bounds of the ELBO objective that are sums over mask draws",
        "paper": "2510.11683",
        "families": ALL,
        "own": 565,
        "runs": {
            "llada2": LORA | {"mc_num": 2, "lora_merged_rollout": True},
            "sdar-moe": {"mc_num": 3, "num_iterations": 2, "lr_schedule": "cosine"},
        },
    },
    "cj_grpo": {
        "title": "CJ-GRPO: each token in the state that revealed it, replayed from the rollout",
        "paper": "2509.23924",
        "families": ALL,
        "own": 697,
        "runs": {"llada": LORA | TWO | {"eos_policy": "eoser", "schedule": "ascending"}},
    },
    "mdpo": {
        "title": "MDPO: every denoising step graded by its prediction, with its own advantage",
        "paper": "2508.13148",
        "families": BIDIRECTIONAL,
        "own": 1184,
        "runs": {"llada": TWO | {"train_steps": 3, "remasking": "rcr"}},
    },
    "espo": {
        "title": "ESPO: one ratio per completion, of its ELBO per token, from complementary masks",
        "paper": "2512.03759",
        "families": ALL,
        "own": 670,
        "runs": {"llada": TWO | {"ref_sync_steps": 1, "epsilon": 4e-4}},
    },
    "ebpo": {
        "title": "EBPO (LLaDA2.1): one ratio per completion, of the ELBO of all its blocks",
        "paper": "2602.08676",
        "families": BLOCK,
        "own": 644,
        "runs": {"sdar": TWO | {"mc_num": 3}},
    },
    "wd1": {
        "title": "wd1: weighted log-likelihood of good and bad completions, without a ratio",
        "paper": "2507.08838",
        "families": ALL,
        "own": 401,
        "runs": {"llada": LORA | TWO | {"psi": 0.5}},
    },
    "justgrpo": {
        "title": "JustGRPO: left to right, with the exact likelihood of every completion",
        "paper": "2601.15165",
        "families": ALL,
        "own": 731,
        "runs": {"llada": LORA | TWO | {"denoising_steps": 4, "positions": 3}},
    },
    "dtreerpo": {
        "title": "d-TreeRPO: trees of rollouts, each segment judged by its siblings",
        "paper": "2512.09675",
        "families": ALL,
        "own": 1405,
        "runs": {"llada": LORA | TREES, "sdar": TREES},
    },
    "tracerl": {
        "title": "TraceRL: PPO on the states of the rollout, with or without a value model",
        "paper": "2509.06949",
        "families": ALL,
        "own": 1251,
        "runs": {
            "dream": TRACES | LORA | {"shrink": 2, "row_mean": True},
            "sdar": TRACES | VALUES | {"denoising_steps": 3, "gamma": 0.9},
        },
    },
    "tpg": {
        "title": "TPG: the sampler's exact policy gradient, from all tokens that it drew",
        "paper": None,
        "families": ALL,
        "own": 723,
        "runs": {"sdar": TWO | {"denoising_steps": 4, "train_steps": 3, "beta": 0.1}},
    },
    "sft": {
        "title": "supervised fine-tuning: each family's own masked cross-entropy",
        "paper": "2510.06303",
        "families": ALL,
        "own": 2041,
        "runs": {
            "dream": LORA | {"cart_p": 0.2},
            "sdar": {"pack_length": 128, "max_length": 100},
        },
    },
    "vrpo": {
        "title": "VRPO (LLaDA 1.5): DPO on ELBO estimates, variance reduced by shared draws",
        "paper": "2505.19223",
        "families": ALL,
        "own": 2349,
        "runs": {
            "llada": LORA | {"mc_num": 2, "micro_batch_size": 8, "share_masks": False},
            "sdar": {"mc_num": 2, "masks_per_timestep": 2, "micro_batch_size": 8},
        },
    },
}
OFFLINE = ("sft", "vrpo")
ONLINE = [script for script in METHODS if script not in OFFLINE]
# (script, block): one sentence why this block differs from that of the other scripts
EXCEPTIONS = {("dtreerpo", "rollout"): "Its rollouts are trees: sample_trees."}
MARK = re.compile(r"^\s*# (>>>|<<<) shared: (\w+)\s*$")


def source(script):
    return (ROOT / f"algos/{script}.py").read_text()


def shared_blocks(text, name):
    """Text of a script -> {block: (first line, end line)}. ValueError if markers are unpaired."""
    blocks, opened = {}, None
    for number, line in enumerate(text.splitlines()):
        if not (mark := MARK.match(line)):
            continue
        side, title = mark.groups()
        if side == ">>>" and (opened or title in blocks):
            where = f" inside {opened[0]!r}" if opened else " again"
            raise ValueError(f"{name}:{number + 1} opens {title!r}{where}")
        if side == "<<<" and (not opened or opened[0] != title):
            found = opened[0] if opened else None
            raise ValueError(f"{name}:{number + 1} closes {title!r}, open is {found!r}")
        if side == "<<<":
            blocks[title] = (opened[1], number)
        opened = (title, number + 1) if side == ">>>" else None
    if opened:
        raise ValueError(f"{name}: {opened[0]!r} is never closed")
    return blocks


def sync(reference, text, skip=()):
    """-> text with its shared blocks, but those in skip, replaced by those of the reference text"""
    blocks = shared_blocks(reference, "reference")
    lines, new = text.splitlines(), reference.splitlines()
    # from the end, so that earlier line numbers stay valid
    for title, (start, end) in reversed(shared_blocks(text, "sibling").items()):
        if title in blocks and title not in skip:
            lines[start:end] = new[slice(*blocks[title])]
    return "\n".join(lines) + "\n"


def main():
    reference = sys.argv[1] if len(sys.argv) == 2 else ""
    if reference not in METHODS:
        raise SystemExit(f"usage: python tests/sync_shared.py {{{','.join(METHODS)}}}")
    for script in METHODS:
        skip = [block for name, block in EXCEPTIONS if name in (script, reference)]
        text = sync(source(reference), source(script), skip)
        (ROOT / f"algos/{script}.py").write_text(text)


if __name__ == "__main__":
    main()
