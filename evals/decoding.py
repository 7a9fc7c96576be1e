"""How many tokens, in which blocks and steps: the settings of published numbers, by model and task.

evals/run.py and every evals/<task>.py take their defaults from `settings`; any flag overrides its
part, and result.json has what was used. Lengths are those of DARE's table (configurations of
yjyddq/DARE); * is for tasks without a number of their own there. Where DARE has several variants,
this is the plain one, without a rule for the end of text. Examples and prompts belong to the task.
"""

from dataclasses import dataclass, fields
from pathlib import Path

from models.config import architecture
from models.names import pinned

MAX = 1 << 31  # of numbers: a seed times 2^32 has 63 bits


@dataclass
class SamplerFlags:
    """Arguments of engine.generate. None: the setting of TABLE."""

    gen_length: int | None = None
    """tokens generated per prompt, a multiple of the block length"""
    block_length: int | None = None
    """tokens per block; fixed by their configuration for block-causal models"""
    denoising_steps: int | None = None
    """denoising steps per block"""
    remasking: str | None = None
    """rule that chooses the positions to reveal; an unknown name prints the engine's rules"""
    confidence_threshold: float | None = None
    """dynamic remasking reveals every position above this confidence; static remasking ignores it
    """
    factor: float = 1.0
    """low_confidence_factor: Fast-dLLM's f; larger values reveal more per step"""
    eb_threshold: float = 0.35
    """entropy_bounded: nats revealed per step; SDAR's default"""
    editing_threshold: float | None = None
    """LLaDA2.1: replace a revealed token by one more probable than this (its authors: 0.5, or 0 for
    speed)"""
    max_post_steps: int = 16
    """LLaDA2.1: maximum number of steps that only edit a block"""
    cache: str | None = None
    """bidirectional models: none, or Fast-dLLM's approximate prefix or dual cache"""
    schedule: str | None = None
    """bidirectional models: tokens per step, uniform, timesteps (Dream) or ascending (ASS)"""
    alg_temp: float = 0.0
    """bidirectional models: Dream's temperature for a random order; 0: most confident first"""
    eos_policy: str | None = None
    """bidirectional models: none, suppress, demote or eoser, which keep answers from ending early
    """
    temperature: float | None = None
    """sampling temperature; 0 is greedy"""
    top_k: int = 0
    """sample only from this many most probable tokens; 0: from all"""
    top_p: float | None = None
    """sample from the fewest tokens whose probabilities add up to this"""
    seed: int = 0
    """sampling seed; sample i draws from (seed, i)"""

    def __post_init__(self):
        """SystemExit names a number that no flag takes; `Engine.validate` knows closer ranges."""
        for name, value in vars(self).items():
            low = int(name in ("batch_size", "limit", "repeats"))
            if isinstance(value, int | float) and not low <= value < MAX:
                raise SystemExit(f"--{name.replace('_', '-')} {value} must be from {low} to {MAX}")


SAMPLING = tuple(field.name for field in fields(SamplerFlags))

# what no line of TABLE sets
BASE = {
    "remasking": "low_confidence_static",
    "confidence_threshold": 0.9,
    "schedule": "uniform",
    "cache": "none",
    "eos_policy": "none",
    "temperature": 0.0,
    "top_p": 1.0,
    "repeats": 1,
}

# Names of --model or model_type of config.json, tasks, tokens, block (own: the model's), steps per
# block, other settings. The other settings of a model's line * hold for all its tasks. A later
# line replaces an earlier one.
TABLE = """
# LLaDA-8B-Instruct: greedy, steps = length, Fast-dLLM's caches. AIME is the mean of eight runs.
# C-Eval is not published.
llada,llada-1.5 *                             512  32   32
llada,llada-1.5 mmlu                          3    3    3    cache=dual
llada,llada-1.5 hellaswag                     3    3    3    cache=prefix
llada,llada-1.5 ceval                         3    3    3
llada,llada-1.5 mmlu_pro                      256  256  256  cache=dual
llada,llada-1.5 arc_c                         512  512  512  cache=prefix
llada,llada-1.5 gsm8k                         256  8    8    cache=prefix
llada,llada-1.5 math500                       512  64   64   cache=prefix
llada,llada-1.5 gpqa                          128  64   64   cache=prefix
llada,llada-1.5 humaneval,humaneval_plus,mbpp,mbpp_plus 512 32 32 cache=prefix
llada,llada-1.5 olympiad                      2048 64   64   cache=prefix
llada,llada-1.5 aime24                        2048 64   64   cache=dual temperature=1 repeats=8
llada,llada-1.5 aime25                        2048 64   64   cache=prefix temperature=1 repeats=8
# DARE's validation during training: half as many steps as tokens
llada,llada-1.5 countdown,sudoku              256  32   16
# LLaDA-1.5: no cache, and an end of text is revealed last in its block
llada-1.5       gpqa                          256  16   16
llada-1.5       gsm8k                         256  16   16   eos_policy=demote
llada-1.5       math500                       1024 128  128  eos_policy=demote
llada-1.5       humaneval,mbpp                512  32   32   eos_policy=demote
llada-8b-base   *                             256  256  256
# LLaDA-MoE: 64 steps in all, blocks of 64. AIME as above.
lladamoe        *                             512  64   8
lladamoe        gpqa                          128  64   32
lladamoe        mmlu,mmlu_pro,gsm8k,hellaswag 256  64   16
lladamoe        olympiad                      2048 64   2
lladamoe        aime24,aime25                 2048 64   2    temperature=1 repeats=8
# Dream decodes the whole answer as one block, in steps of its own schedule, the least uncertain
# first.
Dream           *     512  512  512  schedule=timesteps remasking=entropy temperature=0.2 top_p=0.95
Dream           gsm8k                         256  256  256
Dream           mmlu,mmlu_pro,gpqa,hellaswag  128  128  128
Dream           olympiad                      2048 2048 2048
Dream           aime24,aime25                 2048 2048 2048 repeats=8
# greedy, one of the four tokens of a block per step; DARE's lmdeploy runs of MMLU, GPQA, HumanEval
# and MBPP reveal above 0.95
sdar,sdar_moe   *                             4096 own  4
# revealed above 0.95, in at most 32 steps
llada2_moe      *     512  own  32   remasking=low_confidence_dynamic confidence_threshold=0.95
llada2_moe      gpqa                          128  own  32
llada2_moe      mmlu,mmlu_pro,hellaswag,gsm8k 256  own  32
llada2_moe      aime24,aime25,olympiad        2048 own  32
# the shipped models, for a try on a CPU
tiny-sdar,tiny-sdar-moe,tiny-llada2 *         64   own  2
tiny-llada,tiny-llada-moe,tiny-dream *        64   own  2
# examples with the style "compact", for all models: an answer and an end of text
compact         countdown                     12   own  2
compact         sudoku                        20   own  2
"""


def read(table):
    """-> {model: {task: settings}}"""
    settings = {}
    for line in table.strip().splitlines():
        if line.startswith("#"):
            continue
        models, tasks, length, block, steps, *others = line.split()
        row = {"gen_length": int(length), "denoising_steps": int(steps)}
        row["block_length"] = None if block == "own" else int(block)
        for name, value in (other.split("=") for other in others):
            row[name] = type(BASE[name])(value)
        for model in models.split(","):
            rows = settings.setdefault(model, {})
            rows |= {task: rows.get("*", {}) | row for task in tasks.split(",")}
    return settings


SETTINGS = read(TABLE)


def chosen(flags, model, task, style):
    """SamplerFlags of an engine's model, their None filled in from `settings`. -> arguments of
    engine.generate, repeats"""
    known = settings(flags.model, architecture(model.checkpoint_config), task, style)
    given = {name: getattr(flags, name, None) for name in (*SAMPLING, "repeats")}
    given = {name: known.get(name) if flag is None else flag for name, flag in given.items()}
    return given, given.pop("repeats")


def settings(model, model_type, task, style=""):
    """-> arguments of engine.generate, and "repeats", for `model` (a key of MODELS, or a directory
    with that name) or else its architecture. style: of the task's examples. SystemExit for an
    architecture without settings."""
    rows = SETTINGS.get(Path(pinned(model)[0]).name) or SETTINGS.get(model_type)
    if rows is None:
        raise SystemExit(
            f"evals/decoding.py has no settings of a {model_type!r} model; known: "
            f"{', '.join(SETTINGS)}"
        )
    rows = SETTINGS["compact"] if style == "compact" else rows
    return BASE | (rows.get(task) or rows["*"])
