"""Check and time the fused sampling kernels. One CUDA GPU.

    python bench/sampling.py        # JSON lines

Ours is held against fp64 first. Then milliseconds, medians over sets of logits that are larger together than the L2 cache: ours
(replays of a CUDA graph, so without launch gaps), sample_reference and softmax + multinomial; and ours as a share of the memory
roofline, which reads the logits once at the bandwidth of a copy on this GPU.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rollout.sampling import keyed_uniform, sample_categorical, sample_reference

SHAPES = [(512, 151936), (64, 151936), (2048, 126464), (512, 157184)]  # SDAR, LLaDA, LLaDA2
BANNED = 5


def check(logits, uniform, temperature):
    """-> the largest distance of a uniform number from the bin of its token, errors of logps, max-probs, entropies; in fp64"""
    tokens, *values = sample_categorical(logits, uniform, temperature, BANNED, statistics=True)
    z = logits.double()
    z[:, BANNED] = float("-inf")
    log_p = (z / (temperature or 1)).log_softmax(-1)
    p = log_p.exp()
    if temperature == 0:
        outside = float((tokens != logits.masked_fill(z.isinf(), float("-inf")).argmax(-1)).sum())
    else:
        high = p.cumsum(-1).gather(1, tokens[:, None])[:, 0]
        outside = (
            torch.maximum(high - p.gather(1, tokens[:, None])[:, 0] - uniform, uniform - high)
            .clamp(min=0)
            .max()
            .item()
        )
    want = log_p.gather(1, tokens[:, None])[:, 0], p.amax(-1), torch.special.entr(p).sum(-1)
    same = sample_reference(logits, uniform, temperature, BANNED)[0] == tokens
    errors = [(got - value).abs().max().item() for got, value in zip(values, want, strict=True)]
    return {"outside": outside, "errors": errors, "same_token": same.double().mean().item()}


def milliseconds(function, inputs, graph=True, replays=10):
    """Median of passes over all inputs, divided by their number. graph=False: for functions that wait for the GPU."""
    run = lambda: [function(*x) for x in inputs]
    run()  # compiles
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(inputs))
    return sorted(times)[replays // 2]


def main():
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    bandwidth = 2 * source.nbytes / milliseconds(torch.clone, [(source,)], graph=False) * 1e3
    print(
        json.dumps(
            {
                "gpu": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "copy_tb_s": bandwidth / 1e12,
            }
        )
    )
    del source
    for N, V in SHAPES:
        sets = [
            4 * torch.randn(N, V, device="cuda", dtype=torch.bfloat16)
            for _ in range(max(2, 512 // N))
        ]
        uniform = keyed_uniform(0, torch.arange(N, device="cuda"))
        for temperature in (0, 0.7, 1.0):
            print(
                json.dumps(
                    {
                        "N": N,
                        "V": V,
                        "temperature": temperature,
                        **check(sets[0], uniform, temperature),
                    }
                )
            )
        ours = milliseconds(
            lambda z, u: sample_categorical(z, u, 1.0, BANNED, statistics=True),
            [(z, uniform) for z in sets],
        )
        row = {"N": N, "V": V, "ms": ours, "roofline": sets[0].nbytes / bandwidth * 1e3 / ours}
        if N == 512:
            pairs = [(z, uniform) for z in sets[:2]]
            row["reference_ms"] = milliseconds(sample_reference, pairs, graph=False)
            row["multinomial_ms"] = milliseconds(
                lambda z, u: z.float().softmax(-1).multinomial(1), pairs, graph=False
            )
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
