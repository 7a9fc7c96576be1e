"""Distillation: the released losses, the gradient on one graph, the law of the masks, and rows from
an evaluation.
"""

import json

import pytest
import torch
from oracles import (
    MASK,
    PROMPTS,
    RELEASED,
    assert_released,
    codes_of,
    gradient,
    log_p_of,
    made_batch,
    relative,
    tiny_model,
    updated,
)
from test_methods import is_uniform

from algos import distill
from data.own_samples import right_answers
from data.tokens import batch_of
from evals.samples import generated
from models import load_tokenizer, prompt_ids
from rollout import make_engine
from rollout.rows import Rows

pytestmark = pytest.mark.usefixtures("one_rank")
GOLDEN, BLOCKS = RELEASED["distill"], {"random": (4, 4), "steps": (2, 6)}


@pytest.mark.parametrize("row", GOLDEN["rows"], ids=lambda row: row["code"])
def test_the_loss_is_that_of_the_released_code(row):
    """compute_loss of one answer after the other, the mask token left out as in ours."""
    codes = codes_of(GOLDEN["masks"])
    batch = made_batch(torch.tensor(GOLDEN["text"]), torch.ones(2, 12) > 0, mask=257)
    batch.advantages = torch.ones(2)
    rows = Rows(batch, codes > 0, codes[..., 6:] == 2).for_update(4, True, True)
    args = distill.Args(batch_size=2, micro_batch_size=2, **row["flags"])
    assert_released(row["loss"], row["norm"], distill, rows, args)


def rolled(model, masks):
    """-> Args, rows of the ragged prompts' own answers"""
    trace = make_engine(model).generate([*map(list, PROMPTS)], gen_length=8, seed=2)
    parts = trace.completion_ids, trace.replay_map
    answers = [
        (prompt, *(part[i, : trace.canvas_length[i]].tolist() for part in parts))
        for i, prompt in enumerate(PROMPTS)
    ]
    args = distill.Args(masks=masks, batch_size=3, micro_batch_size=2, blocks=BLOCKS[masks])
    batch = batch_of(answers, range(3), 7, model, "cpu")
    return args, distill.sample_masks(batch, 0.4, args)


@pytest.mark.parametrize("masks", BLOCKS)
@pytest.mark.parametrize("family", ["sdar", "llada", "dream", "llada2"])
def test_an_update_is_that_of_the_full_graph(family, masks):
    """Loss and gradient in fp64, all logits at once, in micro-batches of any size."""
    model = tiny_model(family)
    args, rows = rolled(model, masks)
    loss, clean, valid = 0.0, rows.input_ids, rows.valid_mask
    noisy, L = torch.where(rows.masked, MASK, clean[:, None]), rows.weights.shape[2]
    whole = [log_p_of(model, clean, noisy, valid, T)[:, :, -L:] for T in (1.0, 0.5)]
    for r, k in torch.cartesian_prod(torch.arange(3), torch.arange(2)).tolist():
        at = rows.weights[r, k] > 0
        log_p, log_q = (values[r, k, at] for values in whole)
        targets = clean[r, -L:][at]
        entropies = -(log_q.exp() * log_q.clamp(min=-1e9)).sum(1)[log_p.argmax(1) == targets]
        if at.any():
            loss = loss - log_p.gather(1, targets[:, None]).mean() / 3
        if len(entropies) and (k == 0 or masks == "random"):
            loss = loss + 2 * entropies.mean() / 3
    want = gradient(model, loss)
    for args.micro_batch_size in 2, 6:
        prepared = rows.for_update(args.micro_batch_size, True, True)
        metrics, got = updated(distill, model, prepared, args)
        assert metrics["loss/entropy"] > 0
        assert metrics["loss/total"] == pytest.approx(loss.item(), rel=1e-10)
        assert relative(got, want) < 1e-10


@pytest.mark.parametrize("progress, block", [(0.0, 2), (0.5, 4), (1.0, 6)])
@pytest.mark.parametrize("masks", BLOCKS)
def test_the_law_of_the_masks(masks, progress, block):
    """Without blocks one is in work, each as often, and all behind it is masked; the copies share
    it. By steps the last revealed are masked, of all shares between the bound and 0.8."""
    n, c = 4000, torch.arange(14) < 12
    batch = made_batch(torch.ones(n, 16).long(), c.expand(n, -1))
    batch.advantages = torch.ones(n)
    steps = torch.tensor([3, 5, 1, 0, 4, 2, 7, 6, 11, 8, 9, 10, -1, -1]).expand(n, -1)
    batch.trace.step_map, batch.trace.settings["attention"] = steps, "bidirectional"
    args = distill.Args(masks=masks, blocks=BLOCKS[masks], micro_batch_size=2)
    rows = distill.sample_masks(batch, progress, args)
    block = block if masks == "steps" else 4
    work = rows.weights.sum(1)  # both copies
    assert work.max() == 1 and (rows.weights > 0).le(rows.masked[..., 2:]).all()
    assert (work.sum(1) == block).all() and not rows.masked[..., :2].any()
    picked = work.argmax(1) // block
    assert is_uniform(picked, 12 // block)
    behind = torch.arange(14) >= (picked[:, None] + 1) * block
    assert (rows.masked[..., 2:] & ~(rows.weights > 0) == behind[:, None]).all()
    number = rows.weights[:, 0].sum(1)
    if masks == "random":
        assert number.mean() == pytest.approx(2, abs=0.1) and len(number.unique()) == 5
        return
    low = 0.8 * progress
    counts = ((low + (0.8 - low) * torch.linspace(0, 1, 1001)) * block).ceil().clamp(min=1)
    assert {*number.tolist()} == {*counts.tolist()}
    assert number.mean() == pytest.approx(counts.mean().item(), abs=0.1)
    first = torch.where(rows.weights[:, 0] > 0, steps, 99).amin(1)
    assert (torch.where(rows.weights[:, 1] > 0, steps, -1).amax(1) < first).all()


def test_rows_are_the_right_answers_of_an_evaluation(tmp_path):
    """What the sampler saw, as ids; not of problems that the run is scored on."""
    engine, tokenizer = make_engine("tiny-llada"), load_tokenizer("tiny-llada")
    prompts = [[{"role": "user", "content": f" {i}  1 10 =  15"}] for i in range(4)]
    how = {"gen_length": 12, "block_length": 4, "temperature": 0.0}
    rows = generated(engine, tokenizer, prompts, how, 0, 0, range(4))
    trace = engine.generate([prompt_ids(tokenizer, p) for p in prompts], seed=0, **how)
    scores = {"truncated": False, "score": 1}
    wrong = [{}, {"score": 0.5}, {"truncated": True}, {}]
    lines = [json.dumps(row | scores | other) for row, other in zip(rows, wrong, strict=True)]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines))
    (row,) = found = right_answers(str(tmp_path), tokenizer, prompts[3:], "")
    seen = trace.completion_ids, trace.replay_map
    assert row == (trace.prompt_ids[0], *(x[0].tolist() for x in seen))
    assert found.dropped == ["3 are wrong, have no end, or ask what the run is scored on"]
