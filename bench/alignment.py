"""Does the first update of a method push the reward of the sampler uphill?

    python bench/alignment.py --model tiny-llada --task countdown
    python bench/alignment.py --model DIR --task sudoku --gen-length 20 --keep rows.jsonl

Each method's own script makes rollouts and takes its first update (no KL, no clipping); the
gradient that its optimizer would receive is kept, one vector for each of --blocks rollouts of the
same prompts. The exact gradient of the sampler's expected reward on these prompts is TPG's, of all
denoising steps. Compared are expectations: `cosine` removes the noise by products of different
rollouts only.

Vectors go to --out and are not made twice, so that a call that was cut off goes on. docs/plot.py
draws the rows of docs/curves/alignment.jsonl.
"""

import json
import math
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data.stream import ShuffledStream
from distributed.groups import close_distributed, setup_distributed
from models.config import architecture
from models.names import checkpoint_config
from run.flags import values_for
from run.log import describe_device, describe_git

EXACT, EXACT_AT = "tpg", (1.0, 0.3)  # the method, temperatures: sampling, near the greedy score
METHODS = ("d1", "coupled_grpo", "spg", "bgpo", "cj_grpo", "mdpo", "wd1", EXACT)
METHODS += ("espo", "ebpo", "justgrpo", "dtreerpo", "tracerl")
REFUSED = {("sdar", "mdpo"), ("llada", "ebpo")}  # by the scripts themselves, which say why


@dataclass
class Args:
    model: str = "tiny-sdar"
    """key of models.MODELS, or a directory in HF layout; of a size whose gradients fit in memory"""
    task: str = "countdown"
    gen_length: int = 12
    """tokens of a completion; two denoising steps per block"""
    methods: tuple[str, ...] = METHODS
    temperatures: tuple[float, ...] = EXACT_AT
    """of the methods' rollouts"""
    prompts: int = 16
    """the batch whose reward is to rise, the same in all rollouts"""
    blocks: int = 16
    """rollouts of the batch, 8 completions of each prompt"""
    clean_prompt: bool = False
    """d1, wd1 and SPG mask nothing but the completion; with an --out and --keep of its own"""
    no_negatives: bool = False
    """of the methods, all negative advantages are set to 0; with an --out and --keep of its own"""
    at_rollout: bool = False
    """all methods score at the temperature of the rollouts; with an --out and --keep of its own"""
    out: str = "runs/alignment"
    keep: str = ""
    """file that gets the rows, in place of older ones of the same method, pair and temperature"""


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


class Gradient:
    """What an optimizer receives: `update` of the scripts calls `step` with the gradient."""

    def __init__(self, model):
        self.param_groups = [{"params": list(model.parameters())}]

    def step(self):
        grads = [p.grad.full_tensor().flatten() for p in self.param_groups[0]["params"]]
        self.value = torch.cat(grads).cpu()

    def zero_grad(self):
        for p in self.param_groups[0]["params"]:
            p.grad = None


def settings(script, method, temperature, args):
    """-> Args of the script: its own for tiny models, but for what all must share"""
    found = values_for(script.Args, script.BY_SIZE, args.model, args.task, 0)
    fields = {name: value for name, (value, _) in found.items()} | {"lora_rank": 0}
    fields |= {"model": args.model, "task": args.task, "gen_length": args.gen_length}
    fields |= {"temperature": temperature, "prompts_per_step": args.prompts, "eval_limit": 0}
    fields |= {"num_iterations": 1, "beta": 0.0, "max_grad_norm": math.inf}
    fields |= {"micro_batch_size": 8 * args.prompts, "compile": False, "positions": 4}
    if args.clean_prompt:
        fields |= {"p_mask_prompt": 0.0, "p_mask_context": 0.0}
    if method == EXACT:
        fields["train_steps"] = args.gen_length  # all
    return script.Args(**{k: v for k, v in fields.items() if hasattr(script.Args, k)})


def measure(method, temperature, device, rollouts, folder, args):
    """Make the vectors of a method that are not in its folder yet. rollouts: those made so far, for
    all methods that make the same
    """
    script = import_module(f"algos.{method}")
    script.Rows.temperature = temperature if args.at_rollout else 1.0
    flags = settings(script, method, temperature, args)
    task, tokenizer, reward, problems, _ = script.load_data(flags)
    sampling = {name: getattr(flags, name) for name in script.ROLLOUT.split()}
    model, _, engine = script.load_models(device, sampling, 8 * args.prompts, flags)
    stream, optimizer = ShuffledStream(problems["train"][: args.prompts], 0), Gradient(model)
    trees = {"branches": flags.branches} if hasattr(flags, "branches") else {}
    for block in range(args.blocks):
        file, start = folder / f"{block}.pt", time.perf_counter()
        if file.is_file():
            continue
        key = block, script.RECORDS, *(sampling | trees).items()
        if key not in rollouts:
            rollouts[key] = script.roll_out(engine, stream, sampling | trees, block, flags)
        trace, examples = rollouts[key]
        if hasattr(script, "step_rewards"):
            rewards = script.step_rewards(trace, reward, tokenizer, examples)
        else:
            parts = reward(trace.texts(tokenizer), examples)
            rewards = torch.tensor([sum(part.values()) for part in parts], device=device)
        batch = script.Batch(trace, model)
        batch.advantages, batch.progress = script.compute_advantages(rewards, flags), 0.0
        if args.no_negatives and method != EXACT:
            batch.advantages = batch.advantages.clamp(min=0)
        script.update(model, None, optimizer, batch, 0, flags)
        seconds = time.perf_counter() - start
        torch.save({"gradient": optimizer.value, "seconds": seconds}, folder / "new")
        (folder / "new").replace(file)  # one that is killed leaves no half a file
        print(f"{folder} {block}: {seconds:.1f} s", flush=True)


def main(args):
    device = setup_distributed()
    family = architecture(checkpoint_config(args.model)[0])
    methods = [method for method in args.methods if (family, method) not in REFUSED]
    wanted = {(method, t): None for t in args.temperatures for method in methods}
    vectors, seconds, rollouts = {}, {}, {}
    for method, temperature in {(EXACT, t): None for t in EXACT_AT} | wanted:
        folder = Path(args.out) / f"{family}-{args.task}/{method}-t{temperature:g}"
        folder.mkdir(parents=True, exist_ok=True)
        measure(method, temperature, device, rollouts, folder, args)
        files = [torch.load(folder / f"{block}.pt") for block in range(args.blocks)]
        vectors[method, temperature] = torch.stack([file["gradient"] for file in files])
        seconds[method, temperature] = sum(file["seconds"] for file in files)
    close_distributed()
    facts = {"family": family, "task": args.task, "completions": args.blocks * args.prompts * 8}
    facts |= {"commit": describe_git(), "machine": describe_device()}
    file = Path(args.keep)
    kept = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    mine = lambda row: (row["family"], row["task"]) == (family, args.task)
    made = lambda row: (row["method"], row["temperature"]) in vectors
    rows = [old for old in kept if not (mine(old) and made(old))]
    others = {old["completions"] for old in filter(mine, rows)} - {facts["completions"]}
    if args.keep and others:
        raise SystemExit(f"rows of {others} completions would remain: choose --blocks accordingly")
    for (method, temperature), vector in vectors.items():
        for target in [at for at in EXACT_AT if at <= temperature]:
            value, error = cosine(vector, vectors[EXACT, target])
            noise = noise_scale(vector) * args.prompts * 8
            found = {"method": method, "temperature": temperature, "exact_at": target}
            found |= {"cosine": round(value, 4), "error": round(error, 4), "noise": round(noise, 0)}
            rows.append(found | {"seconds": round(seconds[method, temperature])} | facts)
            print(
                f"{method:14} at {temperature:g}, exact at {target:g}: {value:.2f} +- {error:.2f}"
            )
    if args.keep:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
