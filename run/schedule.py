"""The learning rate over the steps of a run."""

import math


def share_at(step, schedule, warmup, steps):
    """Share of the peak learning rate in optimizer step 0, 1, ...: linear warm-up, then schedule.

    schedule: "constant", or "linear" or "cosine", which end at 0 after `steps`.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1, (step - warmup) / max(steps - warmup, 1))
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return {"constant": 1, "linear": 1 - progress, "cosine": cosine}[schedule]
