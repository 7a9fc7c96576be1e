"""Time the block sampler on completions of uneven length: places refilled as rows end, against batches decoded in turn.

    python models/random_init.py --config DIR --tokenizer DIR --out /dev/shm/sdar --device cuda
    python bench/refill.py --model /dev/shm/sdar --rows 128 --samples 512
    python bench/refill.py --model /dev/shm/sdar --rows 16 --samples 16 --samples-per-prompt 1 --mean-length 9999 --ridge 0

One JSON line for each way and the ratio. Lengths are those of a text that ends at each token with probability 1 / mean_length,
cut at gen_length and rounded up to blocks; they are set in place of an EOS, so that they do not depend on the weights.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rollout import make_engine
from rollout.engine import REMASKING
from rollout.sampling import keyed_uniform
from rollout.slots import Slots


@dataclass
class Args:
    model: str
    """directory in HF layout or a key of models.MODELS, of a block-causal model"""
    rows: int = 128
    """decoded together"""
    samples: int = 512
    samples_per_prompt: int = 8
    prompt_length: int = 217
    gen_length: int = 512
    mean_length: int = 256
    denoising_steps: int = 4
    remasking: str = REMASKING[0]
    ridge: int | None = None
    """RIDGE of rollout/block.py, which matters to low_confidence_dynamic: 0: separate commits; a large number: all joined"""


def main(args):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = make_engine(args.model, "block", device, max_batch_size=args.rows)
    engine.ridge = engine.ridge if args.ridge is None else args.ridge
    n, fill = engine.model.block_length, Slots.fill

    def fill_and_cut(slots, *rest):
        fill(slots, *rest)
        length = torch.log(keyed_uniform(slots.sample_index, "length")) * -args.mean_length
        end = slots.start + (length / n).long().clamp(min=0, max=args.gen_length // n - 1) * n + n
        slots.end.copy_(torch.where(slots.end > 0, end, slots.end))

    Slots.fill = fill_and_cut
    prompts = torch.randint(
        0, engine.model.mask_token_id, (args.samples // args.samples_per_prompt, args.prompt_length),
        generator=torch.Generator().manual_seed(0),
    ).tolist()  # fmt: skip
    options = {name: getattr(args, name) for name in ("gen_length", "denoising_steps", "remasking")}
    options |= {"num_samples": args.samples_per_prompt, "stop_at_eos": False}
    together = args.rows // args.samples_per_prompt  # prompts of a batch
    in_turn = [
        (prompts[i : i + together], i * args.samples_per_prompt)
        for i in range(0, len(prompts), together)
    ]
    rates = {}
    for name, batches in (("refilled", [(prompts, 0)]), ("in turn", in_turn)):
        for _ in range(2):  # the first captures graphs
            began = time.perf_counter()
            traces = [
                engine.generate(some, sample_offset=first, **options) for some, first in batches
            ]
            tokens = sum(int(trace.canvas_length.sum()) for trace in traces)  # waits for the device
            seconds = time.perf_counter() - began
        rates[name] = tokens / seconds
        facts = {
            "way": name,
            "tokens": tokens,
            "seconds": round(seconds, 2),
            "tokens_per_s": round(rates[name]),
        }
        print(
            json.dumps(facts | {"graphs": len(engine.graphs.graphs) if engine.graphs else 0}),
            flush=True,
        )
    print(
        json.dumps({"refilled / in turn": round(rates["refilled"] / rates["in turn"], 3)}),
        flush=True,
    )


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args))
