"""Check and time the attention backends of training, for every visibility pattern (CUDA).

    python bench/attention.py

One JSON line per case (see CASES) and backend: milliseconds of a layer, forward and with its
backward pass, and the error ||got - want|| / ||want|| of output and gradients against dense fp32
attention. The exit status is 1 if a backend fails or its error exceeds TOLERANCE.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.timing import Report, timed
from models.attention import (
    RAGGED,
    Visibility,
    bidirectional,
    block_causal,
    make_attend,
    positions,
    refusal,
)

TOLERANCE = 1e-2
SDAR, LLADA = (32, 8), (32, 32)  # heads of queries, of keys
BLOCK = 4
# pattern, rows, tokens per row, tokens per packed document (0: a row is one document)
CASES = [(pattern, 16, 512, 0) for pattern in ("full", "padded", "block-causal", "copies")]
CASES += [(pattern, 16, 1280, 0) for pattern in ("block-causal", "copies")]
CASES += [(pattern, B, 8192 // B, 192) for pattern in ("packed", "copies") for B in (16, 8, 2)]
BACKENDS = ("sdpa", "flex", "varlen", "flash-attn")


def visibility_of(pattern, B, T, document):
    at = torch.arange(T, device="cuda")
    # A padded row starts with 20 to 50 % of a prompt that is half of T.
    pads = torch.linspace(0.2, 0.5, B, device="cuda") * T / 2 * (pattern == "padded")
    valid = at >= pads.long()[:, None]
    documents = (at // document).expand(B, -1).contiguous() if document else None
    block = ((positions(valid, documents) % BLOCK == 0).cumsum(1) - 1).clamp(min=0)
    if pattern == "copies":  # clean and one noisy
        block, valid, copy = (x.repeat(1, 2) for x in (block, valid, 0 * block))
        copy[:, T:] = 1
        documents = documents.repeat(1, 2) if document else None
        return Visibility("copies", block, valid, documents, copy)
    if pattern == "block-causal":
        return block_causal(block, valid, documents)
    return bidirectional(valid, documents)


def measure(pattern, B, T, document, backend):
    """-> times and error of one layer's forward and backward pass"""
    torch.manual_seed(0)
    visibility = visibility_of(pattern, B, T, document)
    S = visibility.block.shape[1]
    heads = LLADA if pattern in RAGGED else SDAR
    random = lambda H: torch.randn(B, S, H, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v, grad = (random(H).transpose(1, 2) for H in (heads[0], *heads[1:] * 2, heads[0]))
    is_real = visibility.valid[:, None, :, None]
    grad = grad * is_real
    attend = make_attend(visibility, backend)

    def both(attend, q, k, v, grad):
        out = attend(0, q, k, v)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)

    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, *got = both(attend, q, k, v, grad)
    # fp32 SDPA with a dense mask holds all scores: check the first row alone.
    fields = {n: x[:1] for n, x in vars(visibility).items() if torch.is_tensor(x)}
    dense = make_attend(replace(visibility, **fields), "sdpa")
    row = [x[:1].detach().float().requires_grad_() for x in (q, k, v)]
    exact, *want = both(dense, *row, grad[:1].float())
    got, want = [(out * is_real)[:1], *(x[:1] for x in got)], [exact * is_real[:1], *want]
    forward = lambda: [attend(0, q, k, v) for _ in range(10)] and None
    whole = lambda: [both(attend, q, k, v, grad) for _ in range(10)] and None
    fastest = lambda work: min(100 * timed(work)[0] for _ in range(3))
    facts = {"forward_ms": fastest(forward), "both_ms": fastest(whole)}
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]
    facts["error"] = max(errors)
    if not facts["error"] < TOLERANCE:
        raise ArithmeticError(f"too far from fp32: {facts}")
    return facts


def main():
    report = Report()
    for case in CASES:
        for backend in BACKENDS:
            if not refusal(backend, case[0]):
                report.measure(measure, *case, backend, backend=backend, case=case)
    report.close()


if __name__ == "__main__":
    main()
