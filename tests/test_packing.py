"""The objectives of algos/sft.py against brute force and official code; packed documents against documents alone."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_loop import forked, run
from torch.utils._python_dispatch import TorchDispatchMode

from algos import sft
from bench import packing
from models import add_lora, attention, dream, llada, llada2, sdar
from models.tiny import TINY_CONFIGS, TINY_SDAR, random_model

FAMILIES = list(TINY_CONFIGS)
PARALLEL = SimpleNamespace(activation_checkpointing=False, attention="auto", compile=False)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def alone(request, monkeypatch):
    """One process without a process group."""
    if "run_ranks" not in request.fixturenames:
        monkeypatch.setattr(sft, "all_reduce", as_floats)


def as_floats(values):
    return {name: float(value) for name, value in values.items()}


def model_of(family, lora=False):
    """A peaked random model in fp64 with random biases, norms and adapters."""
    model = random_model(TINY_CONFIGS[family])
    model.eos_token_ids, model.pad_token_id = [256], 256
    if lora:
        add_lora(model, 4, 8, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        for name, value in model.state_dict().items():
            if value.dim() == 1 or "lora_B" in name:
                value.add_(torch.randn(value.shape, generator=generator) * 0.1)
    return model.double()


def examples_of(number=7, seed=0):
    """[(prompt ids, answer ids)] of 1 to 24 tokens; some prompts are empty: then a scored token opens the document."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high: torch.randint(low, high, (1,), generator=generator).item()
    ids = lambda n: torch.randint(0, 256, (n,), generator=generator).tolist()
    return [(ids(draw(1, 9) if i % 3 else 0), [*ids(draw(0, 15)), 256]) for i in range(number)]


def args_of(**changes):
    return sft.Args(
        **(
            {
                "batch_size": 7,
                "micro_batch_size": 2,
                "eos_tail": 5,
                "max_length": 32,
                "group_by_length": False,
            }
            | changes
        )
    )


def step_of(model, args, examples, step=0, rank=0, world_size=1):
    """A step's loss and gradient on one rank, as `main` makes them. -> share of the loss, gradients"""
    model.zero_grad()
    batch = sft.make_batch(examples, args, model, step, rank, world_size, CPU)
    noise, loss = sft.sample_masks(batch, args, model.objective), 0.0
    for i in range(0, len(batch.input_ids), args.micro_batch_size):
        rows = slice(i, i + args.micro_batch_size)
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(rows.stop >= len(batch.input_ids))
        share = sft.micro_loss(model, batch, *noise, rows, args)
        (share * world_size).backward()
        loss += share.item()
    whole = lambda grad: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return loss, [
        whole(p.grad).clone() for p in model.parameters() if p.requires_grad and p.grad is not None
    ]


def distance(a, b):
    """Largest difference of two steps' gradients over the largest gradient."""
    return max((x - y).abs().max() for x, y in zip(a[1], b[1], strict=True)) / max(
        x.abs().max() for x in b[1]
    )


# --- packing -----------------------------------------------------------------------------------------------------------------

LAYOUTS = {"packed": {"pack_length": 40}, "one row": {"pack_length": 400}, "grouped": {"group_by_length": True},
           "micro-batches": {"micro_batch_size": 7}}  # fmt: skip


@pytest.mark.parametrize(
    "family, lora", [*[(family, False) for family in FAMILIES], ("tiny-sdar", True)]
)
def test_packed_documents_are_the_documents_alone(family, lora):
    """Loss and gradients of a step in fp64, whatever the layout of its examples."""
    model, examples = model_of(family, lora), examples_of()
    want = step_of(model, args_of(), examples)
    assert len(want[1]) == sum(p.requires_grad for p in model.parameters())
    for name, layout in LAYOUTS.items():
        got = step_of(model, args_of(**layout), examples)
        assert math.isclose(got[0], want[0], rel_tol=1e-10), name
        assert distance(got, want) < 1e-10, name
    assert (
        len(sft.make_batch(examples, args_of(pack_length=400), model, 0, 0, 1, CPU).input_ids) == 1
    )


BUGS = ("attention", "positions", "noise", "shift")


@pytest.mark.parametrize("bug, family", [(bug, family) for bug in BUGS for family in FAMILIES
                                         if bug != "shift" or family == "tiny-dream"])  # fmt: skip
def test_the_comparison_sees_documents_that_leak(monkeypatch, bug, family):
    """Negative controls: attention, positions and blocks, the draws or Dream's shift that run on from document to document."""
    model, examples = model_of(family), examples_of()
    want = step_of(model, args_of(), examples)
    if bug == "attention":
        dense = attention.Visibility.dense
        monkeypatch.setattr(
            attention.Visibility, "dense", lambda self: dense(replace(self, document=None))
        )
    elif bug == "positions":
        for module in (llada, dream, sdar, llada2):
            monkeypatch.setattr(
                module, "positions", lambda valid, document: attention.positions(valid)
            )
    elif bug == "noise":
        column = lambda self: torch.arange(self.input_ids.shape[1])
        uniform = lambda self: sft.keyed_uniform(
            self.seed, self.step, self.document_ids, column(self)
        )
        monkeypatch.setattr(sft.Batch, "uniform", uniform)
    else:
        align = dream.Dream.align
        monkeypatch.setattr(
            dream.Dream, "align", lambda self, hidden, valid, documents: align(self, hidden, valid)
        )
    seen = (
        1e-9 if bug == "positions" else 1e-4
    )  # RoPE is relative: positions that run on show in the rounding alone
    assert distance(step_of(model, args_of(pack_length=400), examples), want) > seen


@pytest.mark.parametrize("family", ["tiny-sdar", "tiny-llada2"])
def test_the_noisy_copy_of_packed_rows_holds_the_blocks_with_a_mask_alone(monkeypatch, family):
    """Prompts between the answers, and answers' blocks without a mask, are in the clean copy only."""
    model, args, widths = model_of(family), args_of(pack_length=60), []
    batch = sft.make_batch(examples_of(), args, model, 0, 0, 1, CPU)
    masked = sft.sample_masks(batch, args, model.objective)[0]
    hidden = model.hidden
    monkeypatch.setattr(
        model, "hidden", lambda ids, *rest: widths.append(ids.shape[1]) or hidden(ids, *rest)
    )
    ids = batch.input_ids
    model.logps(
        ids,
        torch.where(masked, 257, ids),
        masked,
        batch.valid_mask,
        document_ids=batch.document_ids,
    )
    B, T = masked.shape
    needed = []
    for b in range(B):
        block = [
            (d, i // 4)
            for d, i in zip(
                batch.document_ids[b].tolist(), batch.position_ids[b].tolist(), strict=True
            )
        ]
        scored = {block[t] for t in range(T) if masked[b, t]}
        needed.append(sum(found in scored for found in block))
    assert B > 1 and len(set(needed)) > 1 and widths == [max(needed) + T] and max(needed) < 0.9 * T


@pytest.mark.parametrize(
    "world_size, layouts",
    [(2, [("tiny-llada", "packed"), ("tiny-llada2", "grouped")]), (4, [("tiny-llada2", "packed")])],
)
def test_ranks_give_the_loss_and_gradient_of_one(run_ranks, monkeypatch, world_size, layouts):
    """Rows that do not divide get fillers; a rank may have nothing else. Divisors: answers, and masked tokens of all ranks."""
    examples, cases = examples_of(8), []
    for family, layout in layouts:
        with monkeypatch.context() as patch:
            patch.setattr(sft, "all_reduce", as_floats)
            args = args_of(batch_size=8, **LAYOUTS[layout])
            cases.append((family, args, step_of(model_of(family), args, examples)))

    def body(rank, world_size):
        for family, args, want in cases:
            model = sft.parallelize(model_of(family), PARALLEL)
            got = step_of(model, args, examples, rank=rank, world_size=world_size)
            assert math.isclose(sft.all_reduce({"loss": got[0]})["loss"], want[0], rel_tol=1e-10)
            assert distance(got, want) < 1e-10

    run_ranks(world_size, body)


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize(
    "pack_length, grouped", [(0, False), (0, True), (32, False), (48, False), (1000, False)]
)
def test_rows_hold_every_document_once_and_are_equally_many_on_every_rank(
    world_size, pack_length, grouped
):
    args = args_of(pack_length=pack_length, group_by_length=grouped)
    documents = [(i, prompt, answer) for i, (prompt, answer) in enumerate(examples_of(40))]
    rows = sft.lay_out(documents, args, world_size)
    size = lambda row: sum(len(prompt) + len(answer) for _, prompt, answer in row)
    own = [row for row in rows if row[0][0] >= 0]
    assert (
        sorted(document for row in own for document in row) == documents
        and len(rows) % world_size == 0
    )
    fillers = rows[len(own) :]
    assert len(fillers) < world_size and all(len(row) == 1 and not row[0][2] for row in fillers)
    if pack_length:
        sizes, total = [size(row) for row in own], sum(map(size, own))
        assert max(sizes) <= pack_length and len(own) <= -(
            -total // (pack_length - 24)
        )  # none is longer than 24
        assert all(
            a + b > pack_length for i, a in enumerate(sizes) for b in sizes[:i]
        )  # no two rows would fit into one
    else:
        assert (sorted(map(size, own), reverse=True) == list(map(size, own))) == grouped


@forked
def test_main_makes_the_same_run_packed_grouped_and_neither(tmp_path):
    """fp32: the losses of three steps; each step then starts from weights that differ by rounding alone."""
    layouts = [
        {},
        {"max_length": 64, "pack_length": 64, "micro_batch_size": 1},
        {"group_by_length": True, "micro_batch_size": 3},
    ]
    runs = [
        run("sft", tmp_path / str(i), batch_size=16, **layout) for i, layout in enumerate(layouts)
    ]
    losses = [[row["loss/total"] for row in seen.rows] for seen in runs]
    assert len(losses[0]) == 3 and len(set(losses[0])) == 3
    for got in losses[1:]:
        assert got == pytest.approx(losses[0], rel=1e-4)
    rows = [len(seen.batches[0].batch.input_ids) for seen in runs]
    assert rows[1] < rows[0] == rows[2] == 16


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"pack_length": 63, "max_length": 64},
            "--pack-length 63 is shorter than an example may be: --max-length gives 64",
        ),
        ({"pack_length": 65, "max_length": 65}, "--pack-length 65 .* --max-length gives 68"),
        ({"cart_p": 0.1}, "--cart-p 0.1: .* Dream"),
        ({"cart_p": 1.5, "model": "tiny-dream"}, "--cart-p 1.5"),
    ],
)
def test_layouts_and_weights_that_cannot_be_are_refused(monkeypatch, changes, words):
    monkeypatch.setattr(sft, "setup_distributed", lambda: (0, 1, CPU))
    with pytest.raises(SystemExit, match=words):
        sft.main(sft.Args(**changes))


# --- objectives --------------------------------------------------------------------------------------------------------------


def seen_by_loops(lengths, N):
    """[2 T, 2 T] bool over [noisy | clean]: the definition, pair by pair. lengths: of the documents of one row"""
    places = [(document, i) for document, n in enumerate(lengths) for i in range(n)]
    columns = [(noisy, *place) for noisy in (True, False) for place in places]
    mask = torch.zeros(len(columns), len(columns), dtype=torch.bool)
    for q, (q_noisy, q_document, i) in enumerate(columns):
        for k, (k_noisy, k_document, j) in enumerate(columns):
            if q_noisy:
                block = i // N == j // N if k_noisy else j // N < i // N
            else:
                block = not k_noisy and j // N <= i // N
            mask[q, k] = block and q_document == k_document
    return mask, [i for _, i in places]


def two_documents():
    """SDAR with two documents in a row, as its official code was run: ids, labelled, masked, t, lengths"""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 256, (1, 28), generator=generator)
    labelled = torch.ones(1, 28, dtype=torch.bool)
    labelled[0, :3] = labelled[0, 12:18] = False
    t = torch.cat([torch.tensor([0.4]).expand(12), torch.tensor([0.75]).expand(16)])[None]
    masked = (torch.rand(1, 28, generator=generator) < t) & labelled
    model = random_model(TINY_SDAR | {"num_hidden_layers": 2}).double()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        model.model.embed_tokens.weight.mul_(30)
    return model, ids, labelled, masked, t, [12, 16]


def packed_loss(model, ids, labelled, masked, t, lengths):
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    logps = model.logps(ids, torch.where(masked, 257, ids), masked, document_ids=documents)
    return sft.sft_loss(logps, masked / t, labelled.sum())


def test_two_packed_documents_give_the_loss_of_the_official_sdar_code():
    """JetAstra/SDAR c2041a8, SDARForCausalLM.forward in training mode (transformers 4.52.4, torch 2.13, CPU, fp64) on the same
    weights, documents and masks; FlexAttention by SDPA under its mask, the Triton loss and norm by their formulas. The official
    softmax gives the mask token a probability, ours 0: model.mask_token_id = None lets it in."""
    model, *row = two_documents()
    assert row[2].nonzero()[:, 1].tolist() == [8, 9, 10, 11, 18, 19, 20, 21, 22, 25, 26, 27]
    model.mask_token_id = None
    loss = packed_loss(model, *row)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    assert loss.item() == pytest.approx(16.494638259163, abs=1e-6) and norm == pytest.approx(
        68.412350851422, abs=1e-5
    )
    ids, labelled, masked, t, lengths = row
    assert (
        abs(packed_loss(model, ids, labelled, masked, t, [28]) - loss) > 0.01
    )  # negative control: one long document


def test_two_packed_documents_against_a_plain_loop():
    """One full [noisy | clean] forward under the mask of the definition, and -log p / t token by token."""
    model, *row = two_documents()
    ids, labelled, masked, t, lengths = row
    mask, position = seen_by_loops(lengths, 4)
    attend = lambda layer, q, k, v: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=True
    )
    twice = torch.cat([torch.where(masked, 257, ids), ids], 1)
    logits = model.head(model.hidden(twice, torch.tensor([position * 2]), attend))[0, :28]
    logits[:, 257] = -math.inf
    want = (
        sum(-logits[i].log_softmax(-1)[ids[0, i]] / t[0, i] for i in range(28) if masked[0, i]) / 19
    )
    assert labelled.sum() == 19 and packed_loss(model, *row).item() == pytest.approx(
        want.item(), rel=1e-6
    )  # t is fp32


def cross_entropies(batch):
    """A cross-entropy for every token, the larger the shorter its answer: means over answers and over tokens differ."""
    noise = sft.keyed_uniform(99, batch.document_ids, batch.position_ids)
    return noise + 8 / batch.answer_length.double()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mean_loss_is_the_mean_cross_entropy(family):
    """For fixed logits, over the noise: per answer (LLaDA) or per token, in steps of 8 answers of different lengths.

    LLaDA2's is a ratio, sum over masked tokens / their number: its bias in steps of 8 is below half a per cent here.
    """
    model, args = (
        random_model(TINY_CONFIGS[family]),
        args_of(batch_size=8, max_length=80, eos_tail=0),
    )
    examples = [([1, 2], [3] * n) for n in (6, 10, 14, 18, 22, 38, 46, 62)]
    batch = sft.make_batch(examples, args, model, 0, 0, 1, CPU)
    ce, is_answer = cross_entropies(batch), batch.answer_mask
    per_answer, per_token = (ce * is_answer / batch.answer_length).sum() / 8, ce[is_answer].mean()
    want = per_answer if family == "tiny-llada" else per_token
    losses = []
    for step in range(1500):
        _, weights, divisor = sft.sample_masks(replace(batch, step=step), args, model.objective)
        losses.append(sft.sft_loss(-ce, weights, divisor))
    losses = torch.stack(losses)
    error = 5 * losses.std().item() / len(losses) ** 0.5 + 0.005 * want.item() * (
        family == "tiny-llada2"
    )
    assert losses.mean().item() == pytest.approx(want.item(), abs=error)
    assert (
        error < 0.1 * want and abs(per_answer - per_token) > 2 * error
    )  # the other mean would not pass


def test_masked_counts_of_a_micro_batch_under_1_over_t_are_a_hidden_1_over_t():
    """DARE's divisor, and the released Dream trainer's in micro-batches of one: several times the mean cross-entropy."""
    model, args = (
        random_model(TINY_CONFIGS["tiny-dream"]),
        args_of(batch_size=1, max_length=80, eos_tail=0),
    )
    batch = sft.make_batch([([1, 2], [3] * 64)], args, model, 0, 0, 1, CPU)
    ours, theirs = [], []
    for step in range(2000):
        masked, weights, divisor = sft.sample_masks(
            replace(batch, step=step), args, model.objective
        )
        ours.append(weights.sum() / divisor)
        theirs.append(weights.sum() / max(masked.sum(), 1))
    assert (
        torch.stack(ours).mean().item() == pytest.approx(1, abs=0.1)
        and torch.stack(theirs).mean() > 4
    )


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("pack_length", [0, 32])
def test_context_adaptive_weights_by_loops(p, pack_length):
    """w_i = sum over clean j != i of its document of p (1 - p)^(|i - j| - 1) / 2, 0 on clean tokens; mean over masked ones."""
    model, args = (
        random_model(TINY_CONFIGS["tiny-dream"]),
        args_of(cart_p=p, pack_length=pack_length, eos_tail=3),
    )
    examples = [
        ([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 256]),
        ([], [1, 2, 256]),
        ([1], [2, 3, 4, 256]),
    ]
    batch = sft.make_batch(examples, args, model, 1, 0, 1, CPU)
    masked, weights, divisor = sft.sample_masks(batch, args, model.objective)
    assert divisor == masked.sum() > 3 and len(batch.input_ids) == (1 if pack_length else 3)
    B, T = masked.shape
    for b in range(B):
        for i in range(T):
            want = sum(
                p * (1 - p) ** (abs(i - j) - 1) / 2
                for j in range(T)
                if batch.valid_mask[b, j]
                and not masked[b, j]
                and batch.document_ids[b, i] == batch.document_ids[b, j]
                and i != j
            )
            assert weights[b, i].item() == pytest.approx(
                want if masked[b, i] else 0.0, rel=1e-6, abs=1e-12
            )
    everything = replace(batch, answer_mask=batch.valid_mask, input_ids=batch.input_ids)
    assert not sft.context_weights(
        everything.answer_mask, everything, p
    ).any()  # nothing clean: weight 0, not NaN


def test_context_adaptive_weights_of_long_rows():
    """By the whole matrix of distances, in rows of a single document (no end of a row is near its start) and of several; with
    memory that grows with the length of a row, not with its square."""
    T, generator = 700, torch.Generator().manual_seed(0)
    document = torch.stack([torch.zeros(T, dtype=torch.long), torch.arange(T) // 97])
    masked = torch.rand(2, T, generator=generator) < 0.7
    batch = SimpleNamespace(document_ids=document, valid_mask=torch.ones(2, T, dtype=torch.bool))
    distance = (torch.arange(T)[:, None] - torch.arange(T)).abs()
    for p in (0.003, 0.1, 0.8):
        near = (
            p / 2 * (1 - p) ** (distance - 1).double() * (document[:, :, None] == document[:, None])
        )
        want = (near @ (~masked).double()[:, :, None])[..., 0] * masked
        torch.testing.assert_close(
            sft.context_weights(masked, batch, p), want.float(), rtol=1e-6, atol=1e-30
        )
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **kwargs or {})
            sizes.append(made.numel() if isinstance(made, torch.Tensor) else 0)
            return made

    with Sizes():
        sft.context_weights(masked, batch, 0.1)
    assert max(sizes) == masked.numel()


# --- the benchmark -----------------------------------------------------------------------------------------------------------


def test_the_benchmark_draws_lengths_of_gsm8k_and_gives_every_layout_the_same_step(run_ranks):
    args = packing.Args(batch_size=400)
    examples = packing.examples_of(0, args, 256)
    lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in examples]).double()
    assert (
        74 <= lengths.min() and lengths.max() <= 471 and abs(lengths.mean() - 179) < 8
    )  # of the 7,473 rows: 178.9
    assert all(prompt and answer for prompt, answer in examples)

    def body(rank, world_size):
        model = sft.parallelize(random_model(TINY_CONFIGS["tiny-llada2"]), PARALLEL)
        args, facts = packing.Args(batch_size=6, steps=1, micro_batch_tokens=1024), {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for layout in ({"group_by_length": False}, {}, {"pack_length": 512}):
            facts[str(layout)] = packing.measure(
                model, optimizer, args, layout, 1.0, rank, world_size, CPU
            )
        first, *others = facts.values()
        assert all(
            other["first_loss"] == pytest.approx(first["first_loss"], rel=1e-5) for other in others
        )
        assert first["real_share"] < others[0]["real_share"] <= 1 and others[1]["real_share"] > 0.8

    run_ranks(1, body)


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-sdar"])
def test_the_benchmark_counts_what_the_loss_needs(name, monkeypatch):
    """Tokens and pairs of two packed documents and a filler, counted on the mask of the forward itself."""
    monkeypatch.setattr(
        packing, "flops", lambda model, tokens, pairs, scored, backward: (tokens, pairs, scored)
    )
    model = random_model(TINY_CONFIGS[name])
    model.pad_token_id = 256
    args = sft.Args(batch_size=2, pack_length=40, max_length=40, eos_tail=2)
    batch = sft.make_batch([([5] * 9, [6] * 8), ([7] * 3, [8] * 5)], args, model, 0, 0, 1, CPU)
    u = batch.uniform() < 0.3
    masked = u & batch.answer_mask
    assert 0 < masked.sum() < batch.answer_mask.sum()
    real = batch.valid_mask & (batch.document_ids >= 0)
    tokens, pairs, scored = packing.work(model, batch, masked)
    assert scored == masked.sum()
    if name == "tiny-llada":
        sees = attention.bidirectional(batch.valid_mask, batch.document_ids).dense()
        used = real
    else:
        _, block = model.grid(batch.valid_mask, batch.document_ids)
        columns = attention.scored_columns(masked, block, batch.valid_mask)
        sees = attention.two_copy(block, batch.valid_mask, columns, batch.document_ids).dense()
        used = torch.cat([torch.ones_like(columns, dtype=torch.bool), real], 1)
        assert columns.shape[1] < real.sum()
    assert tokens == used.sum() and pairs == (sees & used[:, :, None]).sum()
