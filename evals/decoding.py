"""How many tokens, in which blocks and steps: the settings of published numbers, by model and task.

evals/run.py and every evals/<task>.py take their defaults from `settings`; any flag overrides its
part, and result.json has what was used. Lengths are those of DARE's table (configurations of
yjyddq/DARE); "*" is for tasks without a number of their own there. Where DARE has several variants,
this is the plain one, without a rule for the end of text. Examples and prompts belong to the task.
"""

from pathlib import Path


def one_by_one(text, **more):
    """{task: settings} of lines with task, length, block and maybe a cache: as many denoising steps
    as tokens."""
    rows = {}
    for task, length, block, *cache in map(str.split, text.strip().splitlines()):
        rows[task] = sizes(int(length), int(block)) | more | ({"cache": cache[0]} if cache else {})
    return rows


def sizes(length, block):
    return {"gen_length": length, "block_length": block, "denoising_steps": block}


def dream(length):
    """Dream decodes the whole answer as one block, in steps of its own schedule, the least
    uncertain first."""
    rule = {"schedule": "timesteps", "remasking": "entropy", "temperature": 0.2, "top_p": 0.95}
    return sizes(length, length) | rule


def llada2(length):
    """32 tokens a block (the model's own), revealed above 0.95, in at most 32 steps."""
    rule = {"remasking": "low_confidence_dynamic", "confidence_threshold": 0.95}
    return {"gen_length": length, "denoising_steps": 32} | rule


def each(names, row):
    return dict.fromkeys(names.split(), row)


# what no row sets
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

# LLaDA-8B-Instruct: greedy, steps = length, Fast-dLLM's caches. AIME is the mean of eight runs.
# C-Eval is not published.
LLADA = one_by_one("""
* 512 32
mmlu 3 3 dual
hellaswag 3 3 prefix
ceval 3 3
mmlu_pro 256 256 dual
arc_c 512 512 prefix
gsm8k 256 8 prefix
math500 512 64 prefix
gpqa 128 64 prefix
humaneval 512 32 prefix
humaneval_plus 512 32 prefix
mbpp 512 32 prefix
olympiad 2048 64 prefix
""")
LLADA |= one_by_one("aime24 2048 64 dual\naime25 2048 64 prefix", temperature=1.0, repeats=8)
# DARE's validation during training: half as many steps as tokens
LLADA |= each("countdown sudoku", sizes(256, 32) | {"denoising_steps": 16})
# LLaDA-1.5: no cache, and an end of text is revealed last in its block; other tasks as for
# LLaDA-8B-Instruct
LLADA_15 = LLADA | one_by_one("gpqa 256 16")
LLADA_15 |= one_by_one(
    "gsm8k 256 16\nmath500 1024 128\nhumaneval 512 32\nmbpp 512 32", eos_policy="demote"
)
DREAM = {"*": dream(512), "gsm8k": dream(256), "olympiad": dream(2048)}
DREAM |= each("mmlu mmlu_pro gpqa hellaswag", dream(128))
DREAM |= each("aime24 aime25", dream(2048) | {"repeats": 8})
# greedy, one of the four tokens of a block per step; DARE's lmdeploy runs of MMLU, GPQA, HumanEval
# and MBPP reveal above 0.95
SDAR = {"*": {"gen_length": 4096, "denoising_steps": 4}}
LLADA2 = {"*": llada2(512), "gpqa": llada2(128)}
LLADA2 |= each("mmlu mmlu_pro hellaswag gsm8k", llada2(256))
LLADA2 |= each("aime24 aime25 olympiad", llada2(2048))
TINY = {"*": {"gen_length": 64, "denoising_steps": 2}}  # the shipped models, for a try on a CPU

# names of --model, then model_type of config.json
SETTINGS = {
    "llada-1.5": LLADA_15,
    "llada-8b-base": one_by_one("* 256 256"),
    **each("tiny-sdar tiny-llada tiny-dream tiny-sdar-moe tiny-llada2", TINY),
    "llada": LLADA,
    "Dream": DREAM,
    **each("sdar sdar_moe", SDAR),
    "llada2_moe": LLADA2,
}
# the short prompts of the shipped models: an expression and an end of text, or 16 cells
COMPACT = {
    "countdown": {"gen_length": 12, "denoising_steps": 2},
    "sudoku": {"gen_length": 16, "denoising_steps": 2},
}


def settings(model, model_type, task, style=""):
    """-> arguments of engine.generate, and "repeats", for `model` (a key of MODELS, or a directory
    with that name) or else its architecture. style: of the task's examples; "compact" problems have
    one setting for all models. SystemExit for an architecture without settings."""
    rows = SETTINGS.get(Path(model).name) or SETTINGS.get(model_type)
    if rows is None:
        raise SystemExit(
            f"evals/decoding.py has no settings of a {model_type!r} model; known: "
            f"{', '.join(SETTINGS)}"
        )
    return BASE | (COMPACT[task] if style == "compact" else rows.get(task, rows["*"]))
