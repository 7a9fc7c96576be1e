"""The methods against brute force: enumerated likelihoods and bounds, the law of their masks, the
papers' numbers, and values of the released code.
"""

import importlib
import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from oracles import (
    EOS,
    MASK,
    RELEASED,
    TEXT,
    OneBlock,
    assert_released,
    codes_of,
    estimates_of,
    exact_elbo,
    made_batch,
    made_rows,
    rollout_batch,
    small_args,
    tilted,
    tiny_model,
)
from torch.nn.functional import one_hot

from algos import (
    bgpo,
    cj_grpo,
    coupled_grpo,
    d1,
    dtreerpo,
    ebpo,
    espo,
    gdpo,
    justgrpo,
    mdpo,
    opsd,
    spg,
    stabledrl,
    tracerl,
    vrpo,
    wd1,
)

pytestmark = pytest.mark.usefixtures("one_rank")


def within(draws, want):
    """Whether the mean of independent draws [n, ...] is the wanted value, within its standard
    error.
    """
    gap = (draws.mean(0) - want).abs()
    return (gap < 4.5 * draws.std(0) / len(draws) ** 0.5 + 1e-6).all()


def is_uniform(numbers, n):
    """Whether independent numbers are 0 to n - 1, each as often."""
    return within(one_hot(numbers.long(), n).double(), 1 / n)


# --- likelihoods by enumeration -------------------------------------------------------------------


@pytest.mark.parametrize("family", ["sdar", "llada", "dream"])
def test_one_block_by_enumeration(family):
    """625 completions, 24 orders, 15 masks: ELBO by orders = ELBO by masks <= exact; SPG's
    bounds.
    """
    space = OneBlock(family)
    orders, table = space.by_order(), space.by_mask()  # [24, 625], [15, 625, 4]
    exact, elbo = orders.logsumexp(0) - math.log(24), orders.mean(0)
    assert exact.exp().sum().item() == pytest.approx(1, abs=1e-10)
    assert (elbo <= exact + 1e-10).all() and (exact - elbo).max() > 0.05
    # 48 draws with each mask as often as it is likely: the expectation itself
    each = lambda values: values.repeat_interleave(space.times, 0)
    weights = space.patterns * 4.0 / space.patterns.sum(1, keepdim=True)  # [15, 4]
    rows = made_rows(each(weights).expand(625, -1, -1), [1.0] * 625)
    all48 = each(table).transpose(0, 1)
    bounds = [4 * spg.estimate_logps(all48, rows, spg.Args(eubo_beta=b)) for b in (1, 1.5, 2, 4)]
    lower, uppers = bounds[0][:, 0], torch.stack([bound[:, 1] for bound in bounds])
    torch.testing.assert_close(lower, elbo, atol=1e-6, rtol=0)
    assert (lower <= uppers[0] + 1e-6).all() and (uppers.diff(dim=0) >= -1e-10).all()
    # Hoelder: an upper bound where beta >= the number of tokens, and not below
    assert (exact <= uppers[3] + 1e-6).all() and (exact > uppers[1] + 1e-3).sum() > 20


PROMPT, COMPLETION = [4, 1, 2, 3, 0, 1], [2, 0, 3, 1, 4, 0, 2, 2, 5]
BLOCKS = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3])  # the EOS ends the third one early


def drawn(module, u, noise, **fields):
    """-> rows of one completion for each level u [n], with noise [n, 4] in every block; the sampler
    went on behind the EOS
    """
    ids, c = torch.tensor(PROMPT + COMPLETION + [0] * 3), torch.arange(12) < 9
    batch = made_batch(*(x.expand(len(u), -1) for x in (ids, c, BLOCKS)))
    orders = {1: noise.flip(1)}
    order = lambda key: orders.get(key, noise).repeat(1, 4)[:, 2:14]
    batch.uniform = lambda iteration, key, *at: u[:, None] if at else order(key)
    return module.sample_masks(batch, 0, small_args(module, p_mask_context=0.0, **fields))


@pytest.mark.parametrize("module", [bgpo, ebpo, espo, spg])
def test_each_block_is_unbiased(module):
    """All levels and orders of noise, for each block of each draw: prompt tokens in the first, a
    last one cut by the EOS. The mean is the ELBO over all orders.
    """
    model = tiny_model()
    orders = torch.tensor(list(itertools.permutations([0.2, 0.4, 0.6, 0.8])))
    u = ((torch.arange(60) + 0.5) / 60).double().repeat_interleave(24)
    rows = drawn(module, u, orders.repeat(60, 1))
    assert not rows.masked[..., :6].any() and rows.masked[..., 15:].all()
    with torch.no_grad():
        logps = module.draw_logps(model, rows)
    terms = rows.weights.double() * logps  # [1440, K, 12]
    if module is espo:  # a pair of masks is a draw
        terms = terms.unflatten(1, (2, 2)).mean(2)
    ends = [0.0] + [exact_elbo(model, PROMPT, COMPLETION[:end]) for end in (2, 6, 9)]
    for block, want in enumerate(torch.tensor(ends).double().diff()):
        got = terms[..., BLOCKS == block].sum(2)
        assert (got.std(0) > 0.01).all()
        torch.testing.assert_close(got.mean(0), want.expand(2), atol=1e-6, rtol=0)
    whole = module.estimate_logps(logps, rows, spg.Args())
    whole = whole[:, 0] * 9 if module is spg else whole  # its lower bound, per token
    assert whole.mean().item() == pytest.approx(ends[-1], abs=1e-5)


@pytest.mark.parametrize("points", [(0,), (-(3**-0.5), 3**-0.5), (-(0.6**0.5), 0, 0.6**0.5)])
def test_gdpo_integrates_polynomials_of_the_time(points):
    """K times: exactly up to degree 2 K - 1, and not above, in blocks of any length. Of n tokens
    t (n - 1) + 1 are masked on average.
    """
    K, u = len(points), (torch.arange(100) + 0.5).double() / 100
    times = (torch.tensor(points).double() + 1) / 2
    rows = drawn(gdpo, u, torch.rand(100, 4), mc_num=K)
    for degree in range(2 * K + 1):
        error = gdpo.estimate_logps(times[:, None] ** degree, rows, None) / 9 - 1 / (degree + 1)
        assert ((error.abs() < 1e-6) == (degree < 2 * K)).all()
    counts = (rows.weights[..., 2:6] > 0).sum(2).double().mean(0)
    torch.testing.assert_close(counts, 3 * times + 1, atol=0.01, rtol=0)


def test_counts_of_ebpos_released_code():
    """_forward_process_ebpo of yjyddq/DARE 83ae8a3 for 6 + 9 tokens, two draws, offset 0.35."""
    noise = torch.tensor([[0.4, 0.1, 0.3, 0.2]])
    chosen = drawn(ebpo, torch.tensor([0.35]).double(), noise).weights[0] != 0
    counts = [[int(draw[BLOCKS == b].sum()) for b in range(3)] for draw in chosen]
    assert counts == [[1, 3, 3], [2, 1, 1]]
    # tokens of least noise: of .4 .1 .3 .2 three, then of .2 .3 .1 .4 one
    assert chosen[:, 2:6].tolist() == [[False, True, True, True], [False, False, True, False]]


# --- the law of the masks -------------------------------------------------------------------------


@pytest.mark.parametrize("module", [bgpo, ebpo, espo, spg, vrpo])
def test_the_law_of_the_masks(module):
    """In each block of each draw every number of masked tokens is as likely, stratified over the
    draws. Given it all tokens are alike, and nothing else tells which; numbers are independent in
    all updates, and in all blocks unless EBPO couples these.
    """
    n, least, found = 8000, 0 if module is espo else 1, []
    c, blocks = torch.ones(n, 8, dtype=torch.bool), (torch.arange(8) // 4).expand(n, -1)
    args = small_args(module, p_mask_context=0.0, mc_num=3)
    for iteration in range(2):
        masked = module.sample_masks(made_batch(blocks, c, blocks), iteration, args).masked
        if module is espo:  # a draw masks the rest of the one before
            assert torch.equal(masked[:, 1::2], ~masked[:, ::2])
            masked = masked[:, ::2]
        masked = masked.view(n, 3, 2, 4).double()
        numbers = masked.sum(3)
        assert is_uniform(numbers - least, 5 - least)
        assert (4 * numbers.mean(1).var(0) < numbers[:, 0].var(0)).all()
        residual = masked - masked.mean(3, keepdim=True)
        assert within(residual, 0.0)
        found += [residual[..., 0].flatten(1), numbers[:, 0, : 1 + (module is not ebpo)]]
    assert torch.cat(found, 1).T.corrcoef().fill_diagonal_(0).abs().max() < 0.055


@pytest.mark.parametrize("module", [d1, spg, wd1])
def test_the_prompt_is_hidden_in_both_copies(module):
    """About 15 % of the valid prompt, new for each update; a block model reads the prompt from the
    clean copy.
    """
    args, hidden = small_args(module), []
    batch = rollout_batch(module, tiny_model(), args, [list(range(1, 5)) * 8, [1, 2, 3]])
    for iteration in range(40):
        rows = module.sample_masks(batch, iteration, args)
        hidden.append(rows.input_ids != batch.input_ids)
        assert (rows.masked[..., : batch.P] == hidden[-1][:, None, : batch.P]).all()
        assert (rows.input_ids[hidden[-1]] == MASK).all()
    hidden, prompt = torch.stack(hidden), batch.valid_mask.clone()
    prompt[:, batch.P :] = False
    assert not (hidden & ~prompt).any() and len(hidden.unique(dim=0)) == 40
    assert hidden.sum() / prompt.sum() / 40 == pytest.approx(0.15, abs=0.015)


def test_spg_picks_blocks_of_the_rollout():
    """3 blocks of 4 with tokens: each picked as often, another in the second draw; all after the
    pick is masked, and before it lightly.
    """
    n, c = 6000, torch.arange(16) < 11
    batch = made_batch(torch.ones(n, 18, dtype=torch.long), c.expand(n, -1))
    rows = spg.sample_masks(batch, 1, spg.Args(mc_num=2, p_mask_context=0.0))
    masked = rows.masked[:, :, 2:]
    picked = masked.long().argmax(2) // 4  # block of the first masked token
    assert is_uniform(picked, 3) and (picked.diff() != 0).all()
    parts = masked.view(n, 2, 4, 4)
    assert parts.all(3)[torch.arange(4) > picked[..., None]].all()
    scored = masked & c
    torch.testing.assert_close(rows.weights, 11.0 * scored / scored.sum(2, keepdim=True))
    masked = spg.sample_masks(batch, 1, spg.Args(p_mask_context=0.15)).masked[:, :, 2:]
    light = masked[..., :4][(masked[..., 8:12].sum(2) < 4) & (masked[..., 4:8].sum(2) < 3)]
    assert light.double().mean() == pytest.approx(0.15, abs=0.02)


def test_coupled_masks_partition_the_completion():
    """All, a part, the rest, each token with weight 1/2 on average; nothing shown after the EOS.
    One t of U(0.2, 0.8) for each group, given which tokens are independent.
    """
    ids, c = torch.zeros(20000, 6).long(), (torch.arange(5) < 4).expand(20000, -1)
    args = coupled_grpo.Args(num_generations=4)
    rows = coupled_grpo.sample_masks(made_batch(ids, c), 0, args)
    masked, w = rows.masked[..., 1:], rows.weights
    everything, part, rest = masked.unbind(1)
    assert not rows.masked[..., 0].any() and everything.all()
    assert torch.equal(part ^ rest, c) and (part & rest).eq(~c).all() and within(w[..., :4], 0.5)
    t = torch.where(w[:, 1].any(1), 1 / (2 * w[:, 1].amax(1)), 1 - 1 / (2 * w[:, 2].amax(1)))
    shares = torch.stack([torch.ones_like(t), t, 1 - t], 1)[..., None]
    torch.testing.assert_close(w, (masked & c[:, None]) / (2 * shares))
    torch.testing.assert_close(t.view(-1, 4), t[::4, None].expand(-1, 4))
    assert is_uniform((t[::4] - 0.2) // 0.15000001, 4)
    residual = part[:, :4].double() - t[:, None]
    assert within(residual, 0.0)
    assert residual.T.corrcoef().fill_diagonal_(0).abs().max() < 0.035


# --- numbers of the papers and values of the official code ----------------------------------------


@pytest.mark.parametrize("module, shape, want", [(bgpo, (1, 1), 1001), (ebpo, (1,), 1.2)])
def test_a_bound_that_is_not_taken_does_not_overflow(module, shape, want):
    args, rows = small_args(module, mc_num=1, epsilon=0.2), made_rows([[[1]]], [1.0])
    ratio = torch.full(shape, 1000.0, requires_grad=True)
    loss, _ = module.policy_loss(ratio, torch.zeros(shape), None, rows, args)
    assert loss.item() == pytest.approx(-want)
    assert torch.autograd.grad(loss, ratio)[0].isfinite()


def test_spgs_upper_bound_is_taken_in_log_space():
    """p^1.5 is 0 in fp32."""
    rows, logps = made_rows(torch.ones(1, 1, 1), [1.0]), torch.full((1, 1, 1), math.log(1e-32))
    rows.weights = rows.weights.float()
    bounds = spg.estimate_logps(logps.requires_grad_(), rows, spg.Args())
    assert torch.autograd.grad(bounds[0, 1], logps)[0].item() == 1


def test_stabledrls_weights():
    """Ratios clipped at 2 and divided by their mean in a group of 3; one left out has 1."""
    rows = made_rows(torch.ones(5, 1, 2), [1.0, -1.0, 1.0, -1.0, -1.0])
    rows.sequence, rows.old = torch.tensor([0, 1, 3, 4, 5]), torch.zeros(5, 2)
    now = torch.tensor([1, 4, 0.5, 1, 8]).log()[:, None].expand(5, 2)
    got = stabledrl.group_weights(now, rows, stabledrl.Args(num_generations=3, clip_ratio=2.0))
    assert got.tolist() == pytest.approx([0.75, 1.5, 3 / 7, 6 / 7, 12 / 7])


OTHERS = {  # rewards of the table below that are not 1, 0, 0, 0
    mdpo: [[1, 0, 1], [0, 1, 1], [0, 0, 0]],  # of three steps
    dtreerpo: [3, 2, 1, 0, 0, 0],
    opsd: [0.5, 1, 2, 0],
}
ADVANTAGES = [  # script, flags, advantages of the first and of the others, by hand
    (d1, {}, 0.75, -0.25),
    (opsd, {}, 0.0, 1.0, 0.0, 0.0),
    (opsd, {"min_reward": 0.5}, 1.0, 0.0),
    (coupled_grpo, {}, 0.75, -0.25),
    (coupled_grpo, {"baseline": "loo"}, 1.0, -0.333333),
    (espo, {}, 1.0, -0.333333),
    (bgpo, {}, 1.499997, -0.499999),
    (ebpo, {}, 1.499997, -0.499999),
    (cj_grpo, {}, 1.499997, -0.499999),
    (cj_grpo, {"scale_rewards": False}, 0.75, -0.25),
    (justgrpo, {}, 1.4997, -0.4999),
    # biased standard deviation; 0 outside of the range of accuracies, whose ends count
    (tracerl, {}, 1.732051, -0.577350),
    (tracerl, {"accuracy_range": (0.0, 0.25)}, 1.732051, -0.577350),
    (tracerl, {"accuracy_range": (0.3, 0.8)}, 0.0, 0.0),
    # softmax of A and of -A as in the released code
    (wd1, {}, 0.366135, -0.122045),
    (wd1, {"psi": 0.5}, 0.186485, -0.062162),
    # gains 1 -1 1, 0 1 0 and 0 0 0 plus means of the later rewards
    (mdpo, {"num_generations": 3}, [0.872757, -0.5773, 0.9999],
     [0.218189, 1.154601, 0], [-1.090946, -0.5773, -0.9999]),
    (dtreerpo, {"branches": (3, 2)}, [2.25, 1], [2.25, -1], [-0.75, 1], [-0.75, -1],
     [-1.5, 0], [-1.5, 0]),
]  # fmt: skip


@pytest.mark.parametrize("module, flags, first, other, more", [(*a[:4], a[4:]) for a in ADVANTAGES])
def test_advantages(module, flags, first, other, more):
    """Exactly 0 for equal rewards: an ulp would be a full step of AdamW."""
    args = module.Args(**{"num_generations": 4} | flags)
    rewards = torch.tensor(2 * OTHERS.get(module, [1, 0, 0, 0])).double()
    want = torch.tensor(2 * [first, other, *(more or [other] * 2)]).double()
    got = module.compute_advantages(rewards, args)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    for G, value in itertools.product((2, 6, 10), (0.1, 0.3, 0.7, 1 / 3, 2.1)):
        if module is opsd:  # it compares nothing
            break
        equal = torch.full((60, *rewards.shape[1:]), value)
        assert not module.compute_advantages(equal, replace(args, num_generations=G)).any()


@pytest.mark.parametrize("row", RELEASED["rows"], ids=lambda row: row["code"][:24])
def test_a_tiny_llada_equals_the_released_code(row):
    """Its loss and backward on this model's logits, the mask token left out as in ours; old and
    reference values of tilted models.
    """
    module = importlib.import_module(f"algos.{row['script']}")
    args = module.Args(num_generations=2, micro_batch_size=64, **row["flags"])
    codes, c = codes_of(row["masks"]), torch.arange(12) < torch.tensor(row["lengths"])[:, None]
    batch = made_batch(TEXT, c, mask=257)
    batch.advantages = torch.tensor(row["advantages"])
    weights = (codes[..., 6:] == 2) * torch.tensor(row["weights"])[..., None]  # 2: scored
    rows = module.Rows(batch, codes > 0, weights)
    rows.temperature = row.get("temperature", 1.0)
    tilts = row.get("tilts", (0, 0.3, -0.2))
    first, rows.old, rows.ref = (estimates_of(module, tilted(x), rows, args) for x in tilts)
    want, rows.has_gradient = torch.tensor(row["first"]), True
    torch.testing.assert_close(first.flatten()[: len(want)], want, atol=1e-5, rtol=2e-6)
    assert_released(row["loss"], row["norm"], module, rows, args)


STATES = [  # 1: masked, 2: shown to the teacher; loss, norm of the gradient
    (("000000101111112112", "000000000010112111"), 0.06942357, 42.084553),
    (("000000111111211121", "000000000011121112"), -0.02800084, 52.244923),
]


@pytest.mark.parametrize("states, loss, norm", STATES)
def test_opsd_equals_the_released_code(states, loss, norm):
    """compute_loss of xingzhejun/d-OPSD 1b55cf3 with k 20, clip 0.05, in blocks of 4."""
    codes, batch = codes_of([states]), made_batch(TEXT[1:], torch.ones(1, 12).bool(), mask=257)
    work = torch.zeros(1, 2, 12)
    work[0, 0, :4] = work[0, 1, 4:8] = 0.5
    rows, args = (
        opsd.Rows(batch, codes == 1, work * (codes[..., 6:] == 1)),
        opsd.Args(num_generations=1),
    )
    args.micro_batch_size, rows.student, rows.targets = 64, codes > 0, args.teacher_top_k
    rows.revealed = torch.full((1, 2, 1), 2)
    assert_released(loss, norm, opsd, opsd.teach(tilted(0.3), rows, args), args)


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_what_opsds_teacher_sees(family):
    """With share 1 all that is ahead: later blocks of a bidirectional model; in the last block, and
    in each of a block model, what later steps reveal there.
    """
    model, args = tiny_model(family), small_args(opsd, teacher_share=1.0, num_iterations=2)
    batch = rollout_batch(opsd, model, args)
    updates, trace = [opsd.sample_masks(batch, i, args) for i in range(2)], batch.trace
    states = torch.stack([*trace.states(MASK)], 1) == MASK
    taught = [torch.zeros_like(batch.completion_mask) for _ in updates]
    for rows, tokens in zip(updates, taught, strict=True):
        assert torch.equal(rows.student[..., batch.P :], states)
        shown = (rows.student & ~rows.masked)[..., batch.P :]
        for r, k in rows.revealed[..., 0].nonzero().tolist():
            replay, block = trace.replay_map[r], trace.blocks[r]
            here, hit = rows.weights[r, k] > 0, (replay == k) & batch.completion_mask[r]
            work = torch.isin(block, block[here])
            later = (block > block[here].max()) & (replay > k)
            want = later if family == "llada" and later.any() else work & (replay > k)
            assert torch.equal(shown[r, k] & (want | work), want)
            assert torch.equal(here, work & rows.masked[r, k, batch.P :])
            tokens[r] |= hit & work
            assert (hit & work).sum() == rows.revealed[r, k]
    assert torch.equal(taught[0] ^ taught[1], batch.completion_mask)  # each token in one update


def test_mdpo_grades_every_prediction():
    """Up to its own EOS; a step without a forward repeats the last."""
    draws = torch.tensor([[[1, EOS, 4], [-1, -1, -1], [-1, 2, -1]]])
    trace = SimpleNamespace(records={"tokens": draws}, settings={"eos_token_ids": [EOS]})
    grade = lambda texts, examples: [
        {"a": float(sum(json.loads(text))), "b": example}
        for text, example in zip(texts, examples, strict=True)
    ]
    problems = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, **_: ids), grade=grade)
    assert mdpo.step_rewards(trace, problems, [0.25]).tolist() == [[6.25, 6.25, 7.25]]
