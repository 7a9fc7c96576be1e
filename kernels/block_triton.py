"""What a step of rollout/block.py does before and after its forward: one Triton kernel each, in place of a hundred small ones.

Imported only where it runs. Each program is one row; all that it computes is what the plain step computes. Blocks of n tokens
have as many lanes as the next power of 2.
"""

import torch
import triton
import triton.language as tl

from kernels.sampling_triton import unit_interval, with_part


@triton.jit
def _ranks(noise, j):
    """How many masked tokens come before each token j of a block"""
    return tl.sum((noise[None, :] & (j[None, :] < j[:, None])).to(tl.int32), 1)


@triton.jit
def _begin_kernel(
    sample, seed, sample_index, prompt_length, start, end, step, tokens, masked,
    ids, positions, pick, uniform, order, row_start, row_step, S, last,
    n: tl.constexpr, most: tl.constexpr, LANES: tl.constexpr, JOINED: tl.constexpr, ORDER: tl.constexpr,
    TOKEN: tl.constexpr, OF_ORDER: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    i = tl.load(sample + r)
    j = tl.arange(0, LANES)
    here = j < n
    begin, behind, local = tl.load(start + i), tl.load(end + i), tl.load(step + i)
    at = tl.minimum(begin, last) + j
    if JOINED:  # rows whose block is whole go on to the next one
        noisy = tl.sum(tl.load(masked + i * S + at, mask=here, other=0).to(tl.int32), 0) > 0
        goes_on = (begin < behind) & ~noisy
        begin += tl.where(goes_on, n, 0)
        local = tl.where(goes_on, 0, local)
        at = tl.minimum(begin, last) + j
        first = tl.maximum(tl.minimum(begin, last) - n, 0)
        out = r * 2 * n + j
        for half in tl.static_range(2):
            place = first + half * n + j
            tl.store(
                ids + out + half * n, tl.load(tokens + i * S + place, mask=here, other=0), mask=here
            )
            tl.store(positions + out + half * n, place, mask=here)
        to_pick = r * 2 * n - first
    else:
        tl.store(ids + r * n + j, tl.load(tokens + i * S + at, mask=here, other=0), mask=here)
        tl.store(positions + r * n + j, at, mask=here)
        to_pick = r * n - tl.minimum(begin, last)
    if most < n:  # lane j takes the j-th masked token
        noise = here & (begin < behind) & (tl.load(masked + i * S + at, mask=here, other=0) != 0)
        mine = (_ranks(noise, j)[None, :] == j[:, None]) & noise[None, :]
        at = tl.minimum(begin, last) + tl.sum(tl.where(mine, j[None, :], 0), 1)
        here = j < most
    if JOINED or most < n:
        tl.store(pick + r * most + j, to_pick + at, mask=here)
    tl.store(row_start + r, begin)
    tl.store(row_step + r, local)
    same = tl.zeros_like(at)
    state = with_part(
        with_part(tl.zeros([LANES], tl.uint64), tl.load(seed) + same),
        tl.load(sample_index + i) + same,
    )
    state = with_part(with_part(state, at - tl.load(prompt_length + i)), local + same)
    tl.store(uniform + r * most + j, unit_interval(with_part(state, TOKEN + same)), mask=here)
    if ORDER:
        tl.store(order + r * most + j, unit_interval(with_part(state, OF_ORDER + same)), mask=here)


def begin(slots, R, width, n, joined, most, order):
    """The forward that a step makes: rows that have finished a block go on to the next one where it is joined.

    -> ids, positions [R, n or 2 n], places of the blocks' first `most` masked tokens among them [R most] (all their tokens if
    most is n; None: they are all there is), uniform numbers of the draws [R most] fp64, and of the order of reveals or None,
    and start and step of each row [R] for `finish`
    """
    device, T = slots.start.device, n * (1 + joined)
    new = lambda *shape, dtype=torch.long: torch.empty(*shape, dtype=dtype, device=device)
    ids, positions, pick, uniform = (
        new(R, T),
        new(R, T),
        new(R * most),
        new(R * most, dtype=torch.float64),
    )
    orders, row_start, row_step = torch.empty_like(uniform) if order else uniform, new(R), new(R)
    words = {
        name: int.from_bytes(word.encode(), "little")
        for name, word in (("TOKEN", "token"), ("OF_ORDER", "order"))
    }
    _begin_kernel[(R,)](
        slots.sample, slots.seed, slots.sample_index, slots.prompt_length, slots.start, slots.end, slots.step, slots.tokens,
        slots.masked.view(torch.int8), ids, positions, pick, uniform, orders, row_start, row_step,
        slots.tokens.shape[1], (width // n - 1) * n,
        n=n, most=most, LANES=triton.next_power_of_2(n), JOINED=joined, ORDER=order, **words, num_warps=1,
    )  # fmt: skip
    return (
        ids,
        positions,
        pick if joined or most < n else None,
        uniform,
        orders if order else None,
        (row_start, row_step),
    )


@triton.jit
def _finish_kernel(
    sample, prompt_length, start, end, step, fault, masks_left, num_forwards, tokens, masked, logps, step_map, eos,
    row_start, row_step, drawn, drawn_logps, confidence, S, last, base, remainder, steps, threshold, factor, eb_threshold,
    n: tl.constexpr, most: tl.constexpr, LANES: tl.constexpr, RULE: tl.constexpr, EOS: tl.constexpr, STOPS: tl.constexpr,
    NOT_FINITE: tl.constexpr, LATE: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    i = tl.load(sample + r)
    j = tl.arange(0, LANES)
    here = j < n
    begin, behind, local = tl.load(row_start + r), tl.load(end + i), tl.load(row_step + r)
    live = begin < behind
    at = tl.minimum(begin, last) + j
    place = i * S + at
    noise = here & live & (tl.load(masked + place, mask=here, other=0) != 0)
    lane = _ranks(noise, j) if most < n else j
    given = here & (lane < most)
    token = tl.load(drawn + r * most + lane, mask=given, other=0)
    logp = tl.load(drawn_logps + r * most + lane, mask=given, other=0.0)

    # The rule of rollout/engine.py's `select`: rank[j] is how many masked tokens come before token j.
    if RULE == "sequential":
        score = tl.where(noise, -j.to(tl.float32), float("-inf"))
    else:
        score = tl.where(
            noise,
            tl.load(confidence + r * most + lane, mask=given, other=0.0).to(logp.dtype),
            float("-inf"),
        )
    earlier = (score[None, :] > score[:, None]) | (
        (score[None, :] == score[:, None]) & (j[None, :] < j[:, None])
    )
    rank = tl.sum(earlier.to(tl.int64), 1)
    masks = tl.sum(noise.to(tl.int64), 0)
    number = tl.minimum(masks, base + (local < remainder).to(tl.int64))
    if RULE == "low_confidence_dynamic":
        number = tl.maximum(number, tl.sum((score > threshold).to(tl.int64), 0))
    elif RULE == "low_confidence_factor":
        number = tl.maximum(
            number, tl.sum(((rank + 2).to(score.dtype) * (1 - score) < factor).to(tl.int64), 0)
        )
    elif RULE == "entropy_bounded":
        entropy = tl.where((rank[None, :] <= rank[:, None]) & noise[None, :], -score[None, :], 0.0)
        number = tl.maximum(
            number, tl.sum((noise & (tl.sum(entropy, 1) <= eb_threshold)).to(tl.int64), 0)
        )
    chosen = noise & (rank < number)

    left = tl.sum((noise & ~chosen).to(tl.int32), 0)
    was_noisy, is_whole = masks > 0, (masks > 0) & (left == 0)
    old = tl.load(tokens + place, mask=here, other=0)
    tl.store(tokens + place, token, mask=chosen)
    tl.store(masked + place, tl.zeros([LANES], tl.int8), mask=chosen)
    tl.store(logps + place, logp, mask=chosen)
    tl.store(step_map + place, local + tl.zeros_like(at), mask=chosen)
    block = tl.where(chosen, token, old)
    is_eos = j < 0
    for e in tl.static_range(EOS):
        is_eos |= block == tl.load(eos + e)
    ends = tl.sum((is_eos & here & (at >= tl.load(prompt_length + i))).to(tl.int32), 0) > 0
    if STOPS:
        behind = tl.where(is_whole & ends, begin + n, behind)
    is_done = (live & ~was_noisy) | (is_whole & (begin + n >= behind))
    finite = (logp == logp) & (tl.abs(logp) < float("inf"))
    broken = tl.sum((noise & ~finite).to(tl.int32), 0) > 0
    late = was_noisy & (local >= steps)
    many = masks > most
    tl.store(
        fault + i,
        tl.where(broken, NOT_FINITE, tl.where(late, LATE, MANY)).to(tl.int64),
        mask=broken | late | many,
    )
    tl.store(masks_left + i, tl.where(live & ~was_noisy, n, left).to(tl.int64))
    tl.store(num_forwards + i, tl.load(num_forwards + i) + live.to(tl.int64))
    tl.store(end + i, behind)
    tl.store(start + i, begin + tl.where(is_done, n, 0))
    tl.store(step + i, tl.where(is_done, 0, local + live.to(tl.int64)))


def finish(slots, R, width, n, most, rule, state, drawn, logps, confidence, eos, faults):
    """Reveal what the rule of `rollout.engine.select` chooses of the draws, and move each row on.

    state: of `begin`; drawn [R most] int64; logps, confidence [R most]; eos [E] int64; faults: numbers of not finite, of late
    and of more masks than `most`
    """
    base, remainder = divmod(n, rule.denoising_steps)
    _finish_kernel[(R,)](
        slots.sample, slots.prompt_length, slots.start, slots.end, slots.step, slots.fault, slots.left, slots.num_forwards,
        slots.tokens, slots.masked.view(torch.int8), slots.logps, slots.step_map, eos, *state, drawn, logps, confidence,
        slots.tokens.shape[1], (width // n - 1) * n, base, remainder, rule.denoising_steps,
        rule.confidence_threshold, rule.factor, rule.eb_threshold,
        n=n, most=most, LANES=triton.next_power_of_2(n), RULE=rule.remasking, EOS=len(eos), STOPS=rule.stop_at_eos,
        NOT_FINITE=faults[0], LATE=faults[1], MANY=faults[2], num_warps=1 if n <= 8 else 4,
    )  # fmt: skip
