"""The methods of the project, and the code that their scripts share.

    python tests/sync_shared.py SCRIPT    copies its shared blocks to the other scripts

A block stands between `# >>> shared: name` and `# <<< shared: name`. Blocks of one name are
byte-identical in all scripts of METHODS. A script that is not listed here is your own: no test
looks at it.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BLOCK = ("sdar", "sdar-moe", "llada2")
BIDIRECTIONAL = ("llada", "dream", "llada-moe")
ALL = (*BLOCK, *BIDIRECTIONAL)  # tiny-<family> is a model of each
LORA, TWO = {"lora_rank": 4}, {"num_iterations": 2}
IN_BLOCKS = TWO | {"block_length": 4}
# the reference stays after 2 updates and moves after 4
MOVES = TWO | {"max_steps": 3, "ref_sync_steps": 3, "baseline": "loo", "top_p": 0.9}
TREES = TWO | {"branches": (2, 2), "lambda_max": 1.0}
TRACES = TWO | {"accuracy_range": (0.0, 9.0)}
FAST = TRACES | {"nll_weight": 0.1, "remasking": "low_confidence_dynamic", "denoising_steps": 4}
FAST |= {"reward": f"{ROOT}/tests/golden_runs.py:coin+tokens_per_forward"}
OWN = {"data": str(ROOT / "tests/golden/own.jsonl")}
VALUES = {"value_model": True, "value_learning_rate": 5e-6, "denoising_steps": 3, "gamma": 0.9}
VALUES |= {"positive_only": True, "train_steps": 2}


class Method(NamedTuple):
    own: int  # the most tokens outside of shared blocks
    runs: dict  # {family: flags} of tests/golden_runs.py; the last serve all families
    families: tuple = ALL


METHODS = {
    "d1": Method(179, {"dream": LORA | TWO}),
    "coupled_grpo": Method(446, {"sdar": MOVES}),
    "spg": Method(155, {"llada-moe": {"num_iterations": 1, "block_length": 4}}),
    "stabledrl": Method(269, {"llada": IN_BLOCKS}),
    "bgpo": Method(
        435,
        {
            "llada2": LORA | {"mc_num": 2, "lora_merged_rollout": True},
            "sdar-moe": TWO | {"mc_num": 3, "lr_schedule": "cosine"},
        },
    ),
    "cj_grpo": Method(
        370, {"llada": LORA | TWO | {"eos_policy": "eoser", "schedule": "ascending"}, "sdar": TWO}
    ),
    "mdpo": Method(966, {"llada": TWO | {"train_steps": 3, "remasking": "rcr"}}, BIDIRECTIONAL),
    "espo": Method(459, {"llada": TWO | {"ref_sync_steps": 1, "epsilon": 4e-4}}),
    "gdpo": Method(372, {"sdar": TWO | {"mc_num": 2}}),
    "ebpo": Method(520, {"sdar": TWO | {"mc_num": 3}}, BLOCK),
    "wd1": Method(225, {"llada": LORA | TWO | {"psi": 0.5}}),
    "justgrpo": Method(314, {"llada": LORA | TWO | {"denoising_steps": 4, "train_steps": 3}}),
    "dtreerpo": Method(1158, {"llada": LORA | TREES, "sdar": TREES}),
    "tracerl": Method(
        1240,
        {
            "dream": TRACES | LORA | {"shrink": 2, "row_mean": True},
            "sdar": TRACES | VALUES,
            "llada2": FAST | {"beta": 0.1},
        },
    ),
    "tpg": Method(272, {"sdar": TWO | {"denoising_steps": 4, "train_steps": 3, "beta": 0.1}}),
    "opsd": Method(691, {"llada": LORA | IN_BLOCKS, "sdar": IN_BLOCKS | {"learning_rate": 1e-5}}),
    "sft": Method(
        1936,
        {"dream": LORA | {"cart_p": 0.2}, "sdar": {"pack_length": 128, "max_length": 100}},
    ),
    "vrpo": Method(
        1417,
        {
            "llada": LORA | {"mc_num": 2, "micro_batch_size": 8, "share_masks": False},
            "sdar": {"mc_num": 2, "masks_per_timestep": 2, "micro_batch_size": 8},
        },
    ),
    "distill": Method(
        688, {"llada": LORA | OWN | {"blocks": (4, 8)}, "sdar": OWN | {"masks": "random"}}
    ),
}
OFFLINE = ("sft", "vrpo", "distill")
ONLINE = [script for script in METHODS if script not in OFFLINE]
# (script, block): one sentence why this block differs from that of the other scripts
EXCEPTIONS = {
    ("dtreerpo", "rollout"): "Its rollouts are trees: sample_trees.",
    ("mdpo", "rollout"): "The prediction of every step has a reward: step_rewards.",
    ("stabledrl", "update"): "An update begins with the weights of whole groups: group_weights.",
    ("opsd", "learner"): "The reference says what is scored (teach): not one token, but k.",
}
SHARED = re.compile(r"(^ *# >>> shared: (\w+)\n)(.*?)(^ *# <<< shared: \2$)", re.M | re.S)


def source(script):
    return (ROOT / f"algos/{script}.py").read_text()


def shared_blocks(text):
    """Text of a script -> {block: its text}. ValueError if a marker has no partner."""
    blocks = {name: body for _, name, body, _ in SHARED.findall(text)}
    if len(re.findall(r"# (?:>>>|<<<) shared:", text)) != 2 * len(blocks):
        raise ValueError("a marker of a shared block has no partner, or a name comes twice")
    return blocks


def sync(reference, text, skip=()):
    """-> text with its shared blocks, but those in skip, replaced by those of the reference text"""
    own, new = shared_blocks(text), shared_blocks(reference)
    blocks = own | {name: new[name] for name in new.keys() - {*skip}}
    return SHARED.sub(lambda mark: mark[1] + blocks[mark[2]] + mark[4], text)


def without(text, names):
    """-> text with `pass` for its shared blocks of these names"""
    cut = lambda mark: mark[1].partition("#")[0] + "pass\n" if mark[2] in names else mark[0]
    return SHARED.sub(cut, text)


def main(reference):
    for script in METHODS:
        skip = [block for name, block in EXCEPTIONS if name in (script, reference)]
        text = sync(source(reference), source(script), skip)
        (ROOT / f"algos/{script}.py").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])
