"""Updates on ranks whose work differs at random: numbers of groups, lengths, live rows.

    python soak/ragged.py [WORD ...]    all checks, or those whose name has one of the words

Each is a rollout and an update of a method on a tiny model in fp64. On 2 and 4 gloo ranks it must
end, with the metrics and the weights of one rank.
"""

import importlib
import math
import os
import random
import signal
import sys
from pathlib import Path

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import conftest
import table
import torch
import torch.multiprocessing as mp
from oracles import CONFIGS, tiny_model
from sync_shared import METHODS, ONLINE

from models.value import add_value_head
from rollout import make_engine

ROLLOUTS = 130  # on 2 ranks, and again on 4
LIMIT = 60  # seconds that an update may take


def plan(seed, ranks):
    """What all ranks know of an update. -> script, family, flags, groups of each rank, prompts,
    rewards
    """
    draw = random.Random(seed)
    script = ONLINE[seed % len(ONLINE)]
    families = [family for family in CONFIGS if family in METHODS[script]["families"]]
    G, groups = draw.randint(2, 4), draw.randint(4, 9)
    flags = {
        "num_generations": G,
        "num_iterations": draw.randint(1, 2),
        "micro_batch_size": draw.randint(8, 24),
        "sync_every_backward": draw.random() < 0.5,
        "learning_rate": 0.1,
        "max_grad_norm": math.inf,
        "beta": draw.choice([0.0, 0.1]),
        "gen_length": draw.choice([4, 8, 12]),
        "denoising_steps": draw.choice([1, 2, 4]),
        "prompts_per_step": groups,
        "seed": seed,
    }
    if script == "dtreerpo":  # two segments in every block
        flags |= {"branches": (G, 2), "block_length": 4, "denoising_steps": draw.choice([2, 4])}
        flags["num_generations"] = G = 2 * G
    prompts = [[draw.randrange(5) for _ in range(draw.randint(1, 15))] for _ in range(groups)]
    dead = draw.random()
    rewards = [[draw.random() * (draw.random() > dead) for _ in range(G)] for _ in range(groups)]
    rewards = [[row[0]] * G if draw.random() < dead else row for row in rewards]
    cuts = sorted(draw.sample(range(1, groups), 3))[: ranks - 1]
    return script, draw.choice(families), flags, [0, *cuts, groups], prompts, rewards


def update(rank, ranks, seed):
    """-> metrics of the update, weights after it"""
    script, family, flags, bounds, prompts, rewards = plan(seed, ranks)
    module = importlib.import_module(f"algos.{script}")
    if "mc_num" in vars(module.Args):
        flags["mc_num"] = 2
    args = module.Args(**flags)
    args.beta *= module.USES_REF
    sampling = {name: getattr(args, name) for name in module.ROLLOUT.split()}
    mine = range(bounds[rank], bounds[rank + 1])
    module.rank_share = lambda *_: mine  # otherwise every rank has as many prompts
    model, reference, critic = tiny_model(family), tiny_model(family, seed=1), tiny_model(family)
    add_value_head(critic).value_head.to_empty(device="cpu").double().weight.data.fill_(0.1)
    if script == "dtreerpo":
        sampling["branches"] = args.branches
    prompts = [("", ids) for ids in prompts]
    trace, _ = module.roll_out(make_engine(model), prompts, sampling, 0, args)
    batch = module.Batch(trace, model)
    scores = torch.tensor(rewards[mine.start : mine.stop], dtype=torch.float64).flatten()
    if module.RECORDS == "states":  # a reward for every step
        scores = scores[:, None] * torch.arange(1, trace.num_replays + 1)
    batch.advantages = module.compute_advantages(scores, args)
    for each in (model, reference, critic):
        module.parallelize(each, args)
    optimizer, values = torch.optim.SGD(model.parameters(), lr=1.0), {}
    batch.progress = 0.5  # of d-TreeRPO's schedule
    if script == "tracerl":
        descent = torch.optim.SGD(critic.parameters(), lr=1.0)
        values = module.update_values(critic, descent, batch, 0, args)
    metrics = module.update(model, reference, optimizer, batch, 0, args) | values
    trained = [p for each in (model, critic) for p in each.parameters() if p.requires_grad]
    return metrics, [p.full_tensor().detach() for p in trained]


def work(rank, ranks, seeds, place):
    for seed in seeds:
        signal.alarm(LIMIT)  # ends a rank that waits for ever
        metrics, weights = update(rank, ranks, seed)
        if ranks == 1:
            torch.save((metrics, weights), place / f"{seed}")
            continue
        want, whole = torch.load(place / f"{seed}")
        assert metrics.keys() == want.keys(), (seed, metrics, want)
        for name, value in want.items():
            assert math.isclose(metrics[name], value, rel_tol=1e-4, abs_tol=1e-6), (
                seed, plan(seed, ranks), name, metrics[name], value,
            )  # fmt: skip
        torch.testing.assert_close(weights, whole, atol=1e-5, rtol=1e-4)


def ragged(folder, ranks, script):
    seeds = [seed for seed in range(ROLLOUTS) if ONLINE[seed % len(ONLINE)] == script]
    for world_size in (1, ranks):
        store = str(folder / f"store-{world_size}")
        arguments = world_size, store, work, (seeds, folder)
        mp.start_processes(conftest._rank_main, arguments, world_size, start_method="fork")
    yield from seeds


CHECKS = [
    (f"{script} on {ranks} ranks", ragged, ranks, script) for ranks in (2, 4) for script in ONLINE
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    conftest.warm_up()
    sys.exit(table.run(CHECKS))
