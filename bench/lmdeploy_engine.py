"""What lmdeploy's engine does behind rollout/lmdeploy.py: samples, weight updates, sleep, beside the block engine. On one GPU.

    python models/random_init.py --config DIR --tokenizer DIR --out /dev/shm/sdar --device cuda
    python bench/lmdeploy_engine.py --model /dev/shm/sdar

One JSON line a fact. samples: distinct ones of --rows of a prompt, repeated with the same seed, and without the repair of the
sampling; draws: correlation of the uniforms of two positions of a block. update: greedy tokens before and after an optimizer
step and with the first weights back, beside run-to-run equality; "forced" compares greedy tokens with the block engine's model
after equal tokens, "free" whole completions, which part for good at the first near tie. seconds: of load_weights from a
model on the same GPU. sleep: GiB that it frees, seconds to wake with new weights.
"""

import json
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import export_weights, load_model
from rollout import make_engine
from rollout.probe import greedy_agreement


@dataclass
class Args:
    model: str
    """directory in HF layout, of an SDAR"""
    rows: int = 16
    prompt_length: int = 217
    gen_length: int = 64
    learning_rate: float = 1e-4
    max_batch_size: int = 128
    throughput: tuple[int, ...] = (128,)
    """rows of timed rollouts"""
    out: str = ""
    """file to append the JSON lines to"""


def timed(work):
    """-> result, seconds"""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return result, round(time.perf_counter() - start, 4)


def free_gib():
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / 2**30


def equal_share(a, b):
    """Two traces of the same requests -> share of equal tokens"""
    return (a.completion_ids == b.completion_ids).float().mean().item()


def first_row(trace):
    return replace(trace, completion_ids=trace.completion_ids[:1])


def samples(engine, prompts, args):
    """Distinct samples, with and without the repair."""
    settings = {"num_samples": args.rows, "gen_length": args.gen_length, "stop_at_eos": False}
    settings |= {"denoising_steps": 4, "remasking": "low_confidence_static"}
    distinct = lambda trace: len({tuple(ids) for ids in trace.completion_ids.tolist()})
    first = engine.generate(prompts[:1], seed=1, **settings)
    again, other = (engine.generate(prompts[:1], seed=seed, **settings) for seed in (1, 2))
    strategy = engine.engine.sampling_strategy
    repaired = strategy.__dict__.pop("make_sampling_inputs")
    broken = engine.generate(prompts[:1], seed=1, **settings)
    strategy.make_sampling_inputs = repaired
    yield {
        "samples": args.rows, "distinct": distinct(first), "distinct_unrepaired": distinct(broken),
        "equal_with_the_same_seed": equal_share(first, again), "equal_with_another_seed": equal_share(first, other),
        "canvas": first.canvas_length.tolist()[:2], "forwards": first.num_forwards.tolist()[:2],
    }  # fmt: skip


def draws(engine):
    """lmdeploy's own kernel on the seeds of the repaired strategy: are the draws of the positions of a block independent?"""
    from types import SimpleNamespace

    from lmdeploy.pytorch.messages import SamplingParam
    from lmdeploy.pytorch.nn.multinomial_sampling import multinomial_sampling

    from rollout.lmdeploy import sample_seed

    n, count, vocabulary = engine.model.block_length, 4096, 1024
    session = SimpleNamespace(session_id=0)
    seqs = [
        SimpleNamespace(
            sampling_param=SamplingParam(top_k=0, random_seed=sample_seed(7, i)), num_valid_ids=8, num_new_tokens=0, seq_id=0,
            session=session,
        )
        for i in range(count)
    ]  # fmt: skip
    with engine.agent.all_context():
        inputs = engine.engine.sampling_strategy.make_sampling_inputs(seqs).to_device("cuda")
        scores = torch.full((count * n, vocabulary), 1 / vocabulary, device="cuda")
        tokens = (
            multinomial_sampling(scores, inputs.random_seeds, inputs.random_offsets)
            .view(count, n)
            .double()
        )
    correlation = torch.corrcoef(tokens.t())
    bins = torch.bincount((tokens.flatten() // (vocabulary // 32)).long(), minlength=32).double()
    expected = count * n / 32
    chi2 = ((bins - expected) ** 2 / expected).sum().item()
    off = (correlation - torch.eye(n, device="cuda")).abs().max().item()
    yield {
        "draws": count * n,
        "largest_correlation_of_positions": round(off, 4),
        "chi2_of_31_degrees": round(chi2, 1),
    }


def update(engine, ours, model, prompts, args):
    """Weights there and back."""
    rows = prompts[: args.rows]
    greedy = {
        "temperature": 0.0,
        "gen_length": args.gen_length,
        "denoising_steps": 4,
        "remasking": "low_confidence_static",
    }
    greedy |= {"stop_at_eos": False}
    runs = [engine.generate(rows, **greedy) for _ in range(3)]
    alone = [engine.generate(rows[:1], **greedy) for _ in range(3)]
    initial = {name: value.clone() for name, value in export_weights(model)}
    served = engine._served()
    before = {name: value.clone() for name, value in served.named_parameters()}
    addresses = {name: value.data_ptr() for name, value in served.named_parameters()}
    forced = lambda: round(
        sum(greedy_agreement(engine, model, ids) for ids in rows[:8]) / len(rows[:8]), 4
    )
    yield {
        "run_to_run_equal": [equal_share(runs[0], run) for run in runs[1:]],
        "one_row_run_to_run_equal": [equal_share(alone[0], run) for run in alone[1:]],
        "first_row_alone_and_in_the_batch_equal": equal_share(alone[0], first_row(runs[0])),
        "free_agreement": round(equal_share(runs[0], ours.generate(rows, **greedy)), 4),
        "forced_agreement": forced(),
    }
    model.requires_grad_(True)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.learning_rate
    )  # sign of the gradient: as Adam's first step
    ids = torch.tensor(rows[:2], device="cuda")
    score = torch.zeros_like(ids, dtype=torch.bool)
    score[:, -32:] = True
    noisy = torch.where(score, model.mask_token_id, ids)
    (-model.logps(ids, noisy, score).sum()).backward()
    for value in model.parameters():
        value.grad = value.grad.sign()
    optimizer.step()
    optimizer.zero_grad()
    model.requires_grad_(False)
    stale = forced()  # of the engine that has not got them yet
    _, seconds = timed(lambda: engine.load_weights(export_weights(model)))
    _, ours_seconds = timed(lambda: ours.load_weights(export_weights(model)))
    changed, own = engine.generate(rows, **greedy), ours.generate(rows, **greedy)
    yield {
        "after_an_optimizer_step": {
            "equal_to_before": equal_share(runs[0], changed), "forced_agreement": forced(), "forced_agreement_stale": stale,
            "free_agreement": round(equal_share(changed, own), 4),
        },
    }  # fmt: skip
    _, again = timed(lambda: engine.load_weights(iter(initial.items())))
    _, ours_again = timed(lambda: ours.load_weights(iter(initial.items())))
    back, alone_back = (
        [engine.generate(rows, **greedy) for _ in range(2)],
        engine.generate(rows[:1], **greedy),
    )
    now = dict(engine._served().named_parameters())
    yield {
        "first_weights_back": {
            "bitwise_equal_parameters": all(
                torch.equal(before[name], now[name]) for name in before
            ),
            "same_addresses": all(addresses[name] == now[name].data_ptr() for name in now),
            "equal_to_first_outputs": [equal_share(runs[0], run) for run in back],
            "one_row_equal": equal_share(alone[0], alone_back),
        },
        "update_seconds": {"lmdeploy": [seconds, again], "ours": [ours_seconds, ours_again]},
    }
    for name, value in export_weights(model):
        value.copy_(initial[name])


def sleeping(engine, model, prompts, args):
    greedy = {
        "temperature": 0.0,
        "gen_length": args.gen_length,
        "denoising_steps": 4,
        "remasking": "low_confidence_static",
    }
    first = engine.generate(prompts[: args.rows], stop_at_eos=False, **greedy)
    free = free_gib()
    for _ in range(2):
        _, asleep = timed(engine.sleep)
        freed = free_gib() - free
        _, awake = timed(lambda: engine.load_weights(export_weights(model)))
        equal = equal_share(
            first, engine.generate(prompts[: args.rows], stop_at_eos=False, **greedy)
        )
        yield {
            "sleep_seconds": asleep, "freed_gib": round(freed, 2), "wake_seconds": awake, "equal_after_waking": equal,
            "left_gib": round(free - free_gib(), 3),
        }  # fmt: skip


def rates(engine, ours, prompts, args):
    for rows in args.throughput:
        for name, this, top_k in (
            ("lmdeploy", engine, 0),
            ("lmdeploy", engine, 50),
            ("ours", ours, 0),
            ("ours", ours, 50),
        ):
            settings = {
                "top_k": top_k,
                "gen_length": 256,
                "denoising_steps": 4,
                "remasking": "low_confidence_static",
                "stop_at_eos": False,
            }
            seconds = []
            for seed in range(2):
                trace, spent = timed(partial(this.generate, prompts[:rows], seed=seed, **settings))
                seconds.append(spent)
            rate = round(int(trace.canvas_length.sum()) / seconds[-1], 1)
            yield {
                "engine": name,
                "top_k": top_k,
                "rows": rows,
                "tokens_per_s": rate,
                "seconds": seconds,
            }


def main(args):
    def say(fact):
        line = json.dumps({"model": Path(args.model).name} | fact)
        print(line, flush=True)
        if args.out:
            with open(args.out, "a") as file:
                file.write(line + "\n")

    free = free_gib()
    engine, seconds = timed(
        lambda: make_engine(args.model, "lmdeploy", "cuda", max_batch_size=args.max_batch_size)
    )
    plan = engine.plan(
        gen_length=args.gen_length, denoising_steps=4, remasking="low_confidence_static"
    )
    held = round(free - free_gib(), 2)
    say(
        {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "start_seconds": seconds,
            "gib": held,
            "plan": plan,
        }
    )
    model = load_model(args.model, "cuda", torch.bfloat16)
    ours = make_engine(args.model, "block", "cuda", max_batch_size=args.max_batch_size)
    generator = torch.Generator().manual_seed(0)
    count = max(args.rows, *args.throughput) if args.throughput else args.rows
    prompts = torch.randint(0, 150000, (count, args.prompt_length), generator=generator).tolist()
    for facts in (
        samples(engine, prompts, args), draws(engine), update(engine, ours, model, prompts, args),
        sleeping(engine, model, prompts, args), rates(engine, ours, prompts, args),
    ):  # fmt: skip
        for fact in facts:
            say(fact)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
