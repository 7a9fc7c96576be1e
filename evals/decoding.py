"""How many tokens, in which blocks and steps: the settings of published numbers, by model and task.

`settings` gives them to evals/run.py and to every evals/<task>.py; any flag overrides its part, and result.json has what was
used. Lengths are those with which DARE's table was made (configurations of yjyddq/DARE); "*" stands for tasks that have no
number of their own there. Where DARE has several variants of a setting, the plain one is here: no rule for the end of a text.
Not here: examples and prompts, which are the task's.
"""

from pathlib import Path


def one_by_one(gen_length, block_length, **more):
    """As many denoising steps as tokens."""
    return {
        "gen_length": gen_length,
        "block_length": block_length,
        "denoising_steps": block_length,
    } | more


def dream(gen_length):
    """Dream decodes the whole answer as one block, in steps of its own schedule, the least uncertain first."""
    return one_by_one(
        gen_length,
        gen_length,
        schedule="timesteps",
        remasking="entropy",
        temperature=0.2,
        top_p=0.95,
    )


def llada2(gen_length):
    """32 tokens a block (the model's own), revealed above 0.95, in at most 32 steps."""
    rule = {"remasking": "low_confidence_dynamic", "confidence_threshold": 0.95}
    return {"gen_length": gen_length, "denoising_steps": 32} | rule


# what no row names
BASE = {
    "block_length": None,  # the model's own
    "remasking": "low_confidence_static",
    "confidence_threshold": 0.9,
    "schedule": "uniform",
    "cache": "none",
    "eos_policy": "none",
    "temperature": 0.0,
    "top_p": 1.0,
    "repeats": 1,
}

# LLaDA-8B-Instruct: greedy, steps = length, Fast-dLLM's caches. AIME is the mean of eight runs. C-Eval is not published.
LLADA = {
    "*": one_by_one(512, 32),
    "mmlu": one_by_one(3, 3, cache="dual"),
    "hellaswag": one_by_one(3, 3, cache="prefix"),
    "ceval": one_by_one(3, 3),
    "mmlu_pro": one_by_one(256, 256, cache="dual"),
    "arc_c": one_by_one(512, 512, cache="prefix"),
    "gsm8k": one_by_one(256, 8, cache="prefix"),
    "math500": one_by_one(512, 64, cache="prefix"),
    "gpqa": one_by_one(128, 64, cache="prefix"),
    **dict.fromkeys(("humaneval", "humaneval_plus", "mbpp"), one_by_one(512, 32, cache="prefix")),
    "aime24": one_by_one(2048, 64, temperature=1.0, repeats=8, cache="dual"),
    "aime25": one_by_one(2048, 64, temperature=1.0, repeats=8, cache="prefix"),
    "olympiad": one_by_one(2048, 64, cache="prefix"),
    # DARE's validation in training: half as many steps as tokens
    "countdown": {"gen_length": 256, "block_length": 32, "denoising_steps": 16},
    "sudoku": {"gen_length": 256, "block_length": 32, "denoising_steps": 16},
}
# LLaDA-1.5: no cache, and an end of text is revealed last of its block; what has no row here is LLaDA-8B-Instruct's
LLADA_15 = LLADA | {
    "gsm8k": one_by_one(256, 16, eos_policy="demote"),
    "math500": one_by_one(1024, 128, eos_policy="demote"),
    "gpqa": one_by_one(256, 16),
    "humaneval": one_by_one(512, 32, eos_policy="demote"),
    "mbpp": one_by_one(512, 32, eos_policy="demote"),
}
DREAM = {
    "*": dream(512),
    **dict.fromkeys(("mmlu", "mmlu_pro", "gpqa", "hellaswag"), dream(128)),
    "gsm8k": dream(256),
    **dict.fromkeys(("aime24", "aime25"), dream(2048) | {"repeats": 8}),
    "olympiad": dream(2048),
}
# greedy, one of the four tokens of a block a step; DARE's lmdeploy runs of MMLU, GPQA, HumanEval and MBPP reveal above 0.95
SDAR = {"*": {"gen_length": 4096, "denoising_steps": 4}}
LLADA2 = {
    "*": llada2(512),
    **dict.fromkeys(("mmlu", "mmlu_pro", "hellaswag", "gsm8k"), llada2(256)),
    "gpqa": llada2(128),
    **dict.fromkeys(("aime24", "aime25", "olympiad"), llada2(2048)),
}
TINY = {"*": {"gen_length": 64, "denoising_steps": 2}}  # of the shipped models, for a try on a CPU

# names of --model, then model_type of config.json
SETTINGS = {
    "llada-1.5": LLADA_15,
    "llada-8b-base": {"*": one_by_one(256, 256)},
    **dict.fromkeys(
        ("tiny-sdar", "tiny-llada", "tiny-dream", "tiny-sdar-moe", "tiny-llada2"), TINY
    ),
    "llada": LLADA,
    "Dream": DREAM,
    "sdar": SDAR,
    "sdar_moe": SDAR,
    "llada2_moe": LLADA2,
}
# the short prompts of the shipped models: an expression and an end of text, or 16 cells
COMPACT = {
    "countdown": {"gen_length": 12, "denoising_steps": 2},
    "sudoku": {"gen_length": 16, "denoising_steps": 2},
}


def settings(model, model_type, task, style=""):
    """-> arguments of engine.generate, and "repeats": of `model` (a key of MODELS or a directory of that name), else of its
    architecture. style: of the task's examples; "compact" problems have one setting for all models. SystemExit for a new
    architecture without a row."""
    rows = SETTINGS.get(Path(model).name) or SETTINGS.get(model_type)
    if rows is None:
        raise SystemExit(
            f"evals/decoding.py has no settings of a {model_type!r} model; known: {', '.join(SETTINGS)}"
        )
    return BASE | (COMPACT[task] if style == "compact" else rows.get(task, rows["*"]))
