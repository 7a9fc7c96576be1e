"""The training loop: `main` of the scripts, run for a few steps in a forked process and watched through its own functions."""

import functools
import json
import math
import zlib
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import runlog
from algos import bgpo, cj_grpo, coupled_grpo, d1, mdpo, sft, spg, vrpo
from data.stream import ShuffledStream
from evals import TRIAL, countdown, load_problems
from models import export_weights, load_model, load_tokenizer
from models.tensors import tensor_names
from rollout.probe import replay_logps

MODULES = {
    "d1": d1, "bgpo": bgpo, "sft": sft, "coupled_grpo": coupled_grpo, "spg": spg, "cj_grpo": cj_grpo, "mdpo": mdpo,
    "vrpo": vrpo,
}  # fmt: skip
EVERY = dict(eval_limit=0, max_steps=3, learning_rate=3e-3, weight_decay=0.0)
ONLINE = EVERY | dict(prompts_per_step=2, num_generations=4)
SMALL = {
    "d1": ONLINE | dict(num_iterations=2, beta=0.0),
    "bgpo": ONLINE | dict(num_iterations=2, mc_num=2),
    "sft": EVERY | dict(batch_size=4),
    "vrpo": EVERY | dict(batch_size=4, mc_num=2),
    "coupled_grpo": ONLINE | dict(beta=0.0),
    "spg": ONLINE | dict(num_iterations=2),
    "cj_grpo": ONLINE | dict(num_iterations=2, beta=0.0),
    "mdpo": ONLINE | dict(beta=0.0, temperature=1.0),  # of tiny-llada
}
OFFLINE = ("sft", "vrpo")  # one update a step
LORA = dict(lora_rank=4, lora_alpha=16)
online = pytest.mark.parametrize("script", ["d1", "bgpo"])
# where a method's rows, or the number of its forwards, matter
every_method = pytest.mark.parametrize(
    "script", [script for script in MODULES if script not in OFFLINE]
)
with_old = pytest.mark.parametrize(
    "script", [name for name, module in MODULES.items() if getattr(module, "USES_OLD", False)]
)
every_script = pytest.mark.parametrize("script", ["d1", "bgpo", *OFFLINE])


@pytest.fixture(scope="module", autouse=True)
def imports():
    """What every child would otherwise import for itself."""
    import peft  # noqa: F401
    import torch._dynamo  # noqa: F401

    load_tokenizer("tiny-sdar")


def _child(rank, test, arguments):
    torch.set_num_threads(1)
    runlog.RunLog.plot = lambda self: None
    load = countdown.load
    countdown.load = lambda split, path=None, limit=None: load(split, path, min(limit or 60, 60))
    test(**arguments)


def forked(test):
    """Run a test in a process of its own, because `main` makes a process group and patches must not stay."""

    @functools.wraps(test)
    def run_test(**arguments):
        mp.start_processes(_child, args=(test, arguments), nprocs=1, join=True, start_method="fork")

    return run_test


def by_content(completion, example):
    """A reward that tells completions and problems apart, in two components."""
    draw = zlib.crc32(f"{completion} {example}".encode())
    return {"a": float(draw % 5), "b": 0.25 * (draw // 5 % 3)}


def by_turn(pattern):
    """A reward that goes round a pattern, whatever the completion."""
    turn = count()
    return lambda completion, example: {"a": float(pattern[next(turn) % len(pattern)])}


def dead_first():
    """A reward that is the same for all of the first problem, and tells the completions of others apart."""
    first = []

    def reward(completion, example):
        first[:] = first or [example]
        return {"a": 1.0 if example == first[0] else float(zlib.crc32(completion.encode()) % 97)}

    return reward


def weights_of(model):
    return {name: value.clone() for name, value in export_weights(model)}


def plain_model(weights=None, name="tiny-sdar"):
    """The tiny model outside FSDP and without adapters, with these weights or its first ones."""
    model = load_model(name)
    with torch.no_grad():
        for name, value in (weights or {}).items():
            tensor_names(model)[name].copy_(value)
    return model


def distance(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


def run(script, out, reward=None, loss=None, **arguments):
    """main() under watch. reward: default one that leaves no group dead, however far the policy has gone; loss: replacement of
    the loss, called with the original one and its arguments.

    -> batches: per step what make_batch gave, the policy's weights and its replay of the trace; losses: per call of the loss;
    steps: per optimizer step; scored: per evaluation; forwards: rows of each draw_logps; rows, samples: files; error, policy.
    """
    module, seen = (
        MODULES[script],
        SimpleNamespace(batches=[], losses=[], steps=[], scored=[], forwards=[], masks=[]),
    )
    seen.asked = []  # the problems of each evaluation
    reward = reward or by_turn([0, 1, 3, 0])
    seen.args, seen.error, seen.policy = (
        module.Args(out=str(out), **(SMALL[script] | arguments)),
        None,
        None,
    )
    with pytest.MonkeyPatch.context() as patch:

        def spy(name, watch):
            if hasattr(module, name):
                patch.setattr(module, name, functools.partial(watch, getattr(module, name)))

        def parallelize(original, model, args):
            model = original(model, args)
            seen.policy = seen.policy or model
            return model

        def make_batch(original, *arguments, **named):
            batch = original(*arguments, **named)
            step = SimpleNamespace(
                batch=batch, weights=weights_of(seen.policy), first_argument=arguments[0]
            )
            if script not in OFFLINE:
                step.trace = arguments[0]
                step.replay = replay_logps(seen.policy, step.trace)
            seen.batches.append(step)
            return batch

        def sample_masks(original, *arguments):
            result = original(*arguments)
            if result is not None:  # None: the rows of the first iteration again
                seen.masks.append(
                    (len(seen.batches), result[0] if script == "sft" else result.masked)
                )
            return result

        def watch_loss(original, *arguments):
            step = seen.batches[-1]
            grads = [
                p.grad.to_local().abs().max().item()
                for p in seen.policy.parameters()
                if p.grad is not None
            ]
            call = SimpleNamespace(
                step=len(seen.batches),
                arguments=arguments,
                grad=max(grads, default=0.0),
                weights=step.weights,
            )
            if script not in OFFLINE:
                call.estimates, call.old, call.ref, call.rows, _ = arguments
            seen.losses.append(call)
            return loss(seen, original, *arguments) if loss else original(*arguments)

        def draw_logps(original, model, rows, k):
            seen.forwards.append((len(seen.batches), len(rows.input_ids), torch.is_grad_enabled()))
            return original(model, rows, k)

        def score(original, engine, *arguments, **settings):
            seen.scored.append(distance(weights_of(engine.model), weights_of(seen.policy)))
            seen.asked.append(arguments[2])
            return original(engine, *arguments, **settings)

        AdamW = torch.optim.AdamW

        def watched_adamw(params, **settings):
            optimizer = AdamW(params, **settings)
            local = lambda: [
                p.to_local().detach().clone() for p in optimizer.param_groups[0]["params"]
            ]

            def before(optimizer, args, kwargs):
                grads = [p.grad.to_local() for p in optimizer.param_groups[0]["params"]]
                norm = torch.stack([grad.norm() for grad in grads]).norm().item()
                group = {
                    name: optimizer.param_groups[0][name]
                    for name in ("lr", "betas", "weight_decay")
                }
                seen.steps.append(SimpleNamespace(norm=norm, before=local(), **group))

            def after(optimizer, args, kwargs):
                step = seen.steps[-1]
                step.moved = max(
                    (a - b).abs().max().item() for a, b in zip(local(), step.before, strict=True)
                )

            optimizer.register_step_pre_hook(before)
            optimizer.register_step_post_hook(after)
            return optimizer

        for name, watch in [
            ("parallelize", parallelize), ("make_batch", make_batch), ("sample_masks", sample_masks), ("mean_score", score),
            ("draw_logps", draw_logps), ("sft_loss", watch_loss), ("preference_loss", watch_loss), ("policy_loss", watch_loss),
        ]:  # fmt: skip
            spy(name, watch)
        each = lambda texts, examples: (
            texts == [TRIAL] or list(map(reward, texts, examples))
        )  # that of before a run
        spy("load_reward", lambda original, name, task: each)
        patch.setattr(torch.optim, "AdamW", watched_adamw)
        try:
            module.main(seen.args)
        except SystemExit as error:
            seen.error = str(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    for name in ("metrics", "samples"):
        lines = [path.read_text().splitlines() for path in out.glob(f"*/{name}.jsonl")]
        setattr(seen, name, [json.loads(line) for line in sum(lines, [])])
    seen.rows = [row for row in seen.metrics if "loss/total" in row]  # one a step
    return seen


def estimates_by(module, weights, rows, args):
    """What the method estimates for these rows under other weights, by a plain model."""
    model = plain_model(weights, args.model)
    with torch.no_grad():
        draws = [module.draw_logps(model, rows, k) for k in range(rows.masked.shape[1])]
        return module.estimate_logps(torch.stack(draws, 1), rows, args)


def gap(a, b):
    return (a - b).abs().max().item()


# ---------------------------------------------------------------------------------------- the engine


@pytest.mark.parametrize(
    "lora", [{}, LORA, LORA | dict(lora_merged_rollout=True)], ids=["full", "lora", "merged"]
)
@online
@forked
def test_every_rollout_samples_from_the_policy_of_that_step(script, lora, tmp_path):
    """A stale engine: its recorded log-probabilities would be the first policy's, not those that the learner replays."""
    seen = run(script, tmp_path, by_content, learning_rate=1e-2, **lora)
    first = plain_model()
    assert len(seen.batches) == 3
    for number, step in enumerate(seen.batches):
        revealed = step.trace.step_map >= 0
        assert gap(step.replay[revealed], step.trace.logps[revealed]) < 2e-3
        if number:
            assert gap(replay_logps(first, step.trace)[revealed], step.trace.logps[revealed]) > 0.3
        written = [row for row in seen.samples if row["step"] == number + 1]
        assert [row["completion_ids"] for row in written] == [
            step.trace.completion(i) for i in range(4)
        ]
        for i, row in enumerate(written):
            assert row["logps"] == pytest.approx(
                step.trace.logps[i][step.trace.completion_mask[i]].tolist(), abs=6e-5
            )
            assert row["reward"] == sum(
                by_content(row["completion"], example_of(seen, number, 0)).values()
            )


@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
@every_script
@forked
def test_evaluations_use_the_policy_of_that_step(script, lora, tmp_path):
    seen = run(script, tmp_path, eval_limit=4, eval_every=1, learning_rate=1e-2, **lora)
    splits = ["test", *["validation"] * 3, "test"][
        script == "sft" :
    ]  # sft scores the test split at the end alone
    problems = {
        split: load_problems(countdown, split, "", load_tokenizer("tiny-sdar"), 1024, 4)[0]
        for split in set(splits)
    }
    assert problems["test"] != problems["validation"] and seen.asked == [
        problems[split] for split in splits
    ]
    assert len(seen.scored) == len(splits) and max(seen.scored) < 1e-6
    assert distance(weights_of(seen.policy), weights_of(plain_model())) > 0.01


# ---------------------------------------------------------------------------------------- what a rollout is made of


def example_of(seen, step, prompt):
    """The problem behind a prompt of a step: the stream says it, not the loop."""
    return problems_of(seen)[step * seen.args.prompts_per_step + prompt][0]


@functools.cache
def all_problems():
    return load_problems(countdown, "train", "", load_tokenizer("tiny-sdar"), 1024)[0]


def problems_of(seen):
    return ShuffledStream(all_problems(), seen.args.seed)


@online
@forked
def test_a_step_has_its_own_prompts_and_draws_and_each_row_its_own_reward(script, tmp_path):
    seen = run(
        script, tmp_path, by_content, prompts_per_step=3, learning_rate=1e-4, temperature=0.8
    )
    args, tokenizer, stream = seen.args, load_tokenizer("tiny-sdar"), problems_of(seen)
    for number, step in enumerate(seen.batches):
        trace, want = step.trace, []
        assert trace.prompt_ids == [stream[number * 3 + p][1] for p in range(3) for _ in range(4)]
        for i in range(12):
            want.append(
                sum(by_content(trace.text(i, tokenizer), example_of(seen, number, i // 4)).values())
            )
        assert seen.rows[number]["reward/mean"] == pytest.approx(sum(want) / 12)
        groups = torch.tensor(want, dtype=torch.float64).view(3, 4)
        A = groups - groups.mean(1, keepdim=True)
        if script == "bgpo":
            A = A / groups.std(1, keepdim=True).clamp(min=1e-4)
        torch.testing.assert_close(
            step.batch.advantages.double(), A.flatten(), atol=1e-4, rtol=1e-4
        )
        assert not torch.allclose(A, A.roll(1, 0))  # a swap of groups would show
        L = trace.completion_ids.shape[1]
        for call in (call for call in seen.losses if call.step == number + 1):
            assert (
                call.rows.num_tokens == trace.completion_mask.sum()
                and call.rows.num_sequences == 12
            )
            for ids, value in zip(call.rows.input_ids[:, -L:], call.rows.advantages, strict=True):
                twins = (trace.completion_ids == ids).all(1)
                assert twins.any() and (step.batch.advantages[twins] - value).abs().min() < 1e-6
        settings = trace.settings
        assert (settings["temperature"], settings["num_samples"]) == (0.8, 4)
        assert (settings["gen_length"], settings["denoising_steps"]) == (
            args.gen_length,
            args.denoising_steps,
        )
        assert settings["remasking"] == args.remasking
    masks = [masked for _, masked in seen.masks]
    assert len(masks) == 6 and len(seen.losses) == 6
    if (
        script == "bgpo"
    ):  # another iteration, other masks (d1's lie in the prompt, which has the same length everywhere)
        assert all(
            a.shape != b.shape or not torch.equal(a, b)
            for i, a in enumerate(masks)
            for b in masks[:i]
        )
    assert not any(torch.equal(masks[2 * s], masks[2 * s + 1]) for s in range(3))
    seeds = [step.trace.settings["seed"] for step in seen.batches]
    assert len(set(seeds)) == 3 and len({step.batch.seed for step in seen.batches}) == 3


@every_method
@forked
def test_rows_without_advantage_are_dropped_where_nothing_else_pulls_at_them(script, tmp_path):
    """The first of two groups is dead: half of the rows, unless there is a KL. Counts of the step stay those of all rows."""
    pattern, draws = [1, 1, 1, 1, 0, 0, 0, 3], 2 if script == "bgpo" else 1
    seen = run(
        script,
        tmp_path,
        dead_first() if script == "mdpo" else by_turn(pattern),
        max_steps=1,
        num_iterations=1,
    )
    passes = {"coupled_grpo": 2 * 3, "spg": 2 * 2}.get(
        script, 1
    )  # coupled draws: their values first, then each with its graph
    rows, trace, batch = seen.losses[0].rows, seen.batches[0].trace, seen.batches[0].batch
    if script == "cj_grpo":  # a row for each step that revealed something
        live = sum(len(steps[steps >= 0].unique()) for steps in trace.replay_map[4:])
    elif script == "mdpo":
        live = int(((batch.advantages != 0) & trace.records["masked"].any(2)).sum())
        assert (
            not batch.advantages[:4].any() and 0 < live < 4 * trace.num_replays
        )  # the last step may grade all alike
    else:
        live = 4 * draws
    assert [count for _, count, _ in seen.forwards] == [live] * passes
    P = batch.input_ids.shape[1] - trace.completion_ids.shape[1]
    assert (rows.advantages != 0).all() and (
        rows.input_ids[:, P // 2 : P] == batch.input_ids[4, P // 2 : P]
    ).any(1).all()
    assert rows.num_sequences == 8 and rows.num_tokens == trace.completion_mask.sum()
    if script == "d1":
        seen = run(
            script, tmp_path / "kl", by_turn(pattern), max_steps=1, num_iterations=1, beta=0.1
        )
        assert [rows for _, rows, _ in seen.forwards] == [8, 8]  # the reference, the policy


@pytest.mark.parametrize(
    "script, iterations",
    [("d1", 1), ("bgpo", 1), *((name, 2) for name in MODULES if name not in OFFLINE)],
)
@forked
def test_a_step_without_any_spread_moves_weights_by_weight_decay_alone(
    script, iterations, tmp_path
):
    settings = dict(learning_rate=1e-2, weight_decay=0.1, num_iterations=iterations)
    seen = run(script, tmp_path, by_turn([0.1]), **settings)
    shrink = (1 - 1e-2 * 0.1) ** (3 * iterations)
    before, after = weights_of(plain_model(None, seen.args.model)), weights_of(seen.policy)
    for name in before:
        torch.testing.assert_close(after[name], before[name] * shrink, atol=1e-6, rtol=1e-5)
    assert len(seen.rows) == 3 and all(
        value is not None for row in seen.metrics for value in row.values()
    )
    assert all(
        row["optim/grad_norm"] == 0 and row["reward/zero_std_frac"] == 1 for row in seen.rows
    )
    if iterations == 1:  # and a live one moves them
        seen = run(script, tmp_path / "live", by_turn([0, 0, 0, 1]), **settings)
        assert (
            distance(
                weights_of(seen.policy), {name: value * shrink for name, value in before.items()}
            )
            > 1e-3
        )


# ---------------------------------------------------------------------------------------- old and reference values


@with_old
@forked
def test_old_values_come_from_before_the_first_update(script, tmp_path):
    # at this learning rate these end all answers at once after a step or two, and then nothing moves
    steps = {"cj_grpo": 1, "mdpo": 1, "coupled_grpo": 2}.get(script, 3)
    seen = run(script, tmp_path, learning_rate=1e-2, num_iterations=3, max_steps=steps)
    module, name = MODULES[script], "policy/log_ratio" if script == "bgpo" else "policy/ratio"
    assert [call.step for call in seen.losses] == [1, 1, 1, 2, 2, 2, 3, 3, 3][: 3 * steps]
    for i, call in enumerate(seen.losses):
        want = estimates_by(module, call.weights, call.rows, seen.args)
        assert gap(call.old, want) < 2e-3
        moved = gap(call.estimates, want)
        assert moved < 2e-3 if i % 3 == 0 else moved > 0.1, (i, moved)
    for row in seen.rows:  # of the last update
        assert abs(row[name] - (0 if script == "bgpo" else 1)) > 0.02


@every_method
@forked
def test_with_one_update_the_old_values_are_the_values_themselves(script, tmp_path):
    seen = run(script, tmp_path, learning_rate=1e-2, num_iterations=1)
    for call in seen.losses:
        assert torch.equal(call.old, call.estimates) and not call.old.requires_grad
        assert (
            gap(call.old, estimates_by(MODULES[script], call.weights, call.rows, seen.args)) < 2e-3
        )
    assert {rows for _, rows, _ in seen.forwards} == {
        len(call.rows.input_ids) for call in seen.losses
    }
    assert len(seen.forwards) == 3 * {"coupled_grpo": 2 * 3, "spg": 2 * 2}.get(
        script, 1
    )  # no pass for old values


@pytest.mark.parametrize(
    "script, lora", [("d1", {}), ("d1", LORA), ("cj_grpo", {})], ids=["full", "lora", "fixed rows"]
)
@forked
def test_the_reference_is_the_first_policy_at_every_step(script, lora, tmp_path):
    seen = run(script, tmp_path, beta=0.04, learning_rate=1e-2, **lora)
    for call in seen.losses:
        want = estimates_by(MODULES[script], None, call.rows, seen.args)
        scored = call.rows.weights[:, 0] != 0
        assert gap(call.ref[scored], want[scored]) < 2e-3, call.step
        if call.step > 1:
            assert gap(call.estimates[scored], want[scored]) > 0.1
            assert gap(call.old[scored], want[scored]) > 0.1  # the adapters are on again
    assert seen.rows[-1]["loss/kl"] > 1e-3


@forked
def test_the_reference_of_coupled_grpo_moves(tmp_path):
    """0.6 policy + 0.4 reference after rollouts in which the optimizer's steps, two each, reach or pass a multiple of 3: the
    second (4), the third (6), not the fourth (8). It serves from the next rollout on."""
    settings = dict(beta=0.04, learning_rate=3e-3, max_steps=5, ref_sync_steps=3, ref_mixup=0.6)
    seen = run("coupled_grpo", tmp_path, **settings)
    first = weights_of(plain_model())
    mix = lambda old, new: {name: 0.4 * value + 0.6 * new[name] for name, value in old.items()}
    second = mix(first, seen.batches[2].weights)  # the policy before step 3
    references = [first, second, mix(second, seen.batches[3].weights)]
    for call in seen.losses:
        now = [0, 0, 1, 2, 2][call.step - 1]
        want = estimates_by(coupled_grpo, references[now], call.rows, seen.args)
        assert gap(call.ref, want) < 2e-3, call.step
        if now:
            assert (
                gap(call.ref, estimates_by(coupled_grpo, references[now - 1], call.rows, seen.args))
                > 0.05
            )


@forked
def test_mdpo_logs_what_its_best_steps_earned(tmp_path):
    """Six steps of eight sequences: the mean over sequences of the highest reward of any step."""
    graded = torch.rand(8, 6)
    mdpo.step_rewards = lambda *given: graded  # the child ends with the test
    seen = run("mdpo", tmp_path, max_steps=1)
    assert seen.rows[-1]["reward/best_step"] == pytest.approx(graded.amax(1).mean().item())


@forked
def test_a_method_without_kl_refuses_beta(tmp_path):
    assert "no KL" in run("bgpo", tmp_path, beta=0.1).error
    assert run("d1", tmp_path / "d1", max_steps=1).losses[0].ref is None


# ---------------------------------------------------------------------------------------- the optimizer step


def lrs(module, steps, **arguments):
    return [
        module.lr_at(step, module.Args(learning_rate=1.0, **arguments)) for step in range(steps)
    ]


@every_script
def test_learning_rate_schedules(script):
    module = MODULES[script]
    assert lrs(module, 3) == [1, 1, 1]
    assert lrs(module, 6, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert lrs(module, 6, lr_schedule="linear", max_steps=4) == [1, 0.75, 0.5, 0.25, 0, 0]
    assert lrs(module, 6, lr_schedule="linear", max_steps=100, schedule_steps=4) == [
        1,
        0.75,
        0.5,
        0.25,
        0,
        0,
    ]
    assert lrs(module, 7, lr_schedule="linear", schedule_steps=6, warmup_steps=2) == [
        0.5,
        1,
        1,
        0.75,
        0.5,
        0.25,
        0,
    ]
    half = math.sqrt(0.5)
    want = [1, (1 + half) / 2, 0.5, (1 - half) / 2, 0, 0]
    assert lrs(module, 6, lr_schedule="cosine", max_steps=4) == pytest.approx(want)
    want = [1 / 3, 2 / 3, 1, 1, 0.5, 0, 0]
    assert lrs(module, 7, lr_schedule="cosine", schedule_steps=5, warmup_steps=3) == pytest.approx(
        want
    )


@every_script
@forked
def test_the_optimizer_gets_the_schedule_and_a_clipped_fresh_gradient(script, tmp_path):
    """Warm-up 1/4, 2/4, 3/4: AdamW's first step moves the largest entry by its learning rate; each gradient starts from 0."""
    schedule = dict(warmup_steps=4, learning_rate=4e-3, max_grad_norm=1e-2, betas=(0.8, 0.95))
    seen = run(script, tmp_path, **schedule)
    updates = 1 if script in OFFLINE else 2
    assert [row["optim/lr"] for row in seen.rows] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert [step.lr for step in seen.steps] == pytest.approx(
        [lr for lr in (1e-3, 2e-3, 3e-3) for _ in range(updates)]
    )
    assert seen.steps[0].moved == pytest.approx(1e-3, rel=0.01)
    assert all(step.betas == (0.8, 0.95) and step.weight_decay == 0 for step in seen.steps)
    assert all(step.norm == pytest.approx(1e-2, rel=1e-3) for step in seen.steps)
    assert all(row["optim/grad_norm"] > 0.1 for row in seen.rows)  # as it was before the clip
    assert len(seen.losses) == len(seen.steps) and all(call.grad == 0 for call in seen.losses)
    tiny = run(script, tmp_path / "tiny", **schedule | dict(warmup_steps=4000), max_steps=1)
    assert tiny.steps[0].moved == pytest.approx(1e-6, rel=0.05)


def infinite_slope(values):
    """0 with an infinite gradient."""
    return (values - values.detach()).abs().sqrt().sum()


SPOILED = {
    "nan": lambda loss, values: loss * math.nan,
    "inf": lambda loss, values: loss * 0 + math.inf,
    "gradient": lambda loss, values: loss + infinite_slope(values),
}


@pytest.mark.parametrize("fault", list(SPOILED))
@every_script
@forked
def test_what_is_not_finite_stops_the_run_before_the_optimizer_step(script, fault, tmp_path):
    """Of two updates the second at step 2 (offline: the only one): step and rank are said, weights and records as before."""
    at = 2 if script in OFFLINE else 4

    def spoil(seen, original, *arguments):
        result = original(*arguments)
        if len(seen.losses) < at:
            return result
        seen.spoiled = weights_of(seen.policy)
        if script == "sft":
            return SPOILED[fault](result, arguments[0])
        return SPOILED[fault](result[0], arguments[0]), result[1]

    seen = run(script, tmp_path, loss=spoil)
    assert seen.error and seen.error.startswith("not finite at step 2: loss "), seen.error
    assert script == "sft" or "on rank 0" in seen.error
    assert {"nan": "loss nan", "inf": "loss inf", "gradient": "gradient norm "}[fault] in seen.error
    assert str(tmp_path) in seen.error and "\n" not in seen.error
    assert len(seen.steps) == at - 1 and distance(seen.spoiled, weights_of(seen.policy)) == 0
    assert all(value.isfinite().all() for value in weights_of(seen.policy).values())
    assert [row["step"] for row in seen.rows] == [1]


# ---------------------------------------------------------------------------------------- randomness


@every_script
@forked
def test_equal_seeds_repeat_a_run_and_other_seeds_do_not(script, tmp_path):
    """Whatever the global generators hold."""
    runs = []
    for number, seed in enumerate((7, 7, 8)):
        torch.manual_seed(number)
        runs.append(run(script, tmp_path / str(number), seed=seed))
    exempt = ("time/", "speed/", "memory/")
    a, b, c = (
        [{k: v for k, v in row.items() if not k.startswith(exempt)} for row in seen.metrics]
        for seen in runs
    )
    assert a == b and runs[0].samples == runs[1].samples
    assert distance(weights_of(runs[0].policy), weights_of(runs[1].policy)) == 0
    assert all(
        x["loss/total"] != y["loss/total"] for x, y in zip(runs[0].rows, runs[2].rows, strict=True)
    )
    if script not in OFFLINE:
        seeds = [{step.trace.settings["seed"] for step in seen.batches} for seen in runs]
        assert seeds[0] == seeds[1] and not seeds[0] & seeds[2]


# ---------------------------------------------------------------------------------------- SFT


@forked
def test_sft_reads_the_stream_in_order_and_masks_every_step_anew(tmp_path):
    drawn = []

    class Watched(ShuffledStream):
        def __getitem__(self, i):
            drawn.append((i, super().__getitem__(i)))
            return drawn[-1][1]

    sft.ShuffledStream = Watched
    seen = run("sft", tmp_path)
    assert [i for i, _ in drawn] == list(range(12))
    assert [step.first_argument for step in seen.batches] == [
        [row for _, row in drawn[4 * s : 4 * s + 4]] for s in range(3)
    ]
    assert len({str(row) for _, row in drawn}) == 12
    first, sft.all_reduce = (
        seen.batches[0].batch,
        lambda values: values,
    )  # the process group is gone
    levels = lambda batch: sft.sample_masks(batch, seen.args, seen.policy.objective)[1].amax(1)
    for other in (
        replace(first, step=1),
        replace(first, seed=1),
    ):  # both the noise and its level are drawn anew
        assert not torch.equal(other.uniform(), first.uniform())
        a, b = levels(first), levels(other)  # 0 where nothing is masked
        assert ((a > 0) & (b > 0)).any() and (a != b)[(a > 0) & (b > 0)].all()
    assert [(step.batch.step, step.batch.seed) for step in seen.batches] == [
        (0, 42),
        (1, 42),
        (2, 42),
    ]
    for step, (_, masked) in zip(seen.batches, seen.masks, strict=True):
        assert masked.any() and not (masked & ~step.batch.answer_mask).any()
