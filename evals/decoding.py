"""How many tokens, in which blocks and steps: the settings of published numbers, by model and task.

evals/run.py and every evals/<task>.py take their defaults from `settings`; any flag overrides its
part, and result.json has what was used. Lengths are those of DARE's table (configurations of
yjyddq/DARE); * is for tasks without a number of their own there. Where DARE has several variants,
this is the plain one, without a rule for the end of text. Examples and prompts belong to the task.
"""

import re
from dataclasses import asdict, fields, make_dataclass
from pathlib import Path

from models.config import architecture
from models.names import pinned
from rollout.engine import SamplingSettings

# Flags with the names and help texts of SamplingSettings. None: the setting of TABLE
SamplerFlags = make_dataclass(
    "SamplerFlags",
    [(field.name, field.type | None, None) for field in fields(SamplingSettings)],
    bases=(SamplingSettings,),
)
RULE_OF = {  # flags that other rules ignore
    "confidence_threshold": "low_confidence_dynamic",
    "factor": "low_confidence_factor",
    "eb_threshold": "entropy_bounded",
}
# what no line of TABLE sets
BASE = asdict(SamplingSettings(temperature=0.0, remasking="low_confidence_static"))
BASE |= {"samples": 1}

# Names of --model or its architecture, tasks, tokens, block (own: the model's), steps per block
# (own: one for each of its tokens), other settings. The other settings of a model's line * hold for
# all its tasks. A later line replaces an earlier one.
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
llada,llada-1.5 aime24                        2048 64   64   cache=dual temperature=1 samples=8
llada,llada-1.5 aime25                        2048 64   64   cache=prefix temperature=1 samples=8
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
lladamoe        aime24,aime25                 2048 64   2    temperature=1 samples=8
# Dream decodes the whole answer as one block, in steps of its own schedule, the least uncertain
# first.
Dream           *     512  512  512  schedule=timesteps remasking=entropy temperature=0.2 top_p=0.95
Dream           gsm8k                         256  256  256
Dream           mmlu,mmlu_pro,gpqa,hellaswag  128  128  128
Dream           olympiad                      2048 2048 2048
Dream           aime24,aime25                 2048 2048 2048 samples=8
# greedy, one token of a block per step; DARE's lmdeploy runs of MMLU, GPQA, HumanEval and MBPP
# reveal above 0.95
sdar,sdar_moe   *                             4096 own  own
# greedy, one token of a block, or of the answer, per step (dllm, examples/a2d)
a2d-block       *                             256  own  own
a2d-masked      *                             256  256  256
# revealed above 0.95, in at most 32 steps
llada2_moe      *     512  own  32   remasking=low_confidence_dynamic confidence_threshold=0.95
llada2_moe      gpqa                          128  own  32
llada2_moe      mmlu,mmlu_pro,hellaswag,gsm8k 256  own  32
llada2_moe      aime24,aime25,olympiad        2048 own  32
# the shipped models, for a try on a CPU
tiny-sdar,tiny-sdar-moe,tiny-llada2 *         64   own  2
tiny-llada,tiny-llada-moe,tiny-dream *        64   own  2
# examples with the style "compact", for all diffusion models: an answer and an end of text
compact         countdown                     12   own  2
compact         sudoku                        20   own  2
# autoregressive models; to a sampler they have blocks of one token
autoregressive  *                             512  own  1
autoregressive  olympiad                      2048 own  1
autoregressive  aime24,aime25                 2048 own  1    temperature=1 samples=8
"""


def read(table):
    """-> {model: {task: settings}}"""
    settings = {}
    for line in re.findall(r"^\w.*", table, re.MULTILINE):  # others are comments
        models, tasks, *words = line.split()
        numbers = (None if word == "own" else int(word) for word in words[:3])
        row = dict(zip(("gen_length", "block_length", "denoising_steps"), numbers, strict=True))
        for name, value in (word.split("=") for word in words[3:]):
            row[name] = type(BASE[name])(value)
        for model in models.split(","):
            rows = settings.setdefault(model, {})
            rows |= {task: rows.get("*", {}) | row for task in tasks.split(",")}
    return settings


SETTINGS = read(TABLE)


def sampling_for(flags, model, task, style):
    """Flags that are given, otherwise the `settings` of an engine's model."""
    known = settings(
        flags.model,
        "autoregressive" if model.mask_token_id is None else architecture(model.checkpoint_config),
        task,
        style,
    )
    known["denoising_steps"] = known["denoising_steps"] or model.block_length
    given = vars(flags)
    sampling = {k: v if given[k] is None else given[k] for k, v in known.items()}
    for name, rule in RULE_OF.items():
        if given[name] is not None and sampling["remasking"] != rule:
            raise SystemExit(f"{flags.flag(name)} needs --remasking {rule}")
    return sampling


def settings(model, model_type, task, style=""):
    """-> arguments of engine.generate, and "samples", for `model` (a key of MODELS, or a directory
    with that name) or else its architecture. style: of the task's examples"""
    rows = SETTINGS.get(Path(pinned(model)[0]).name) or SETTINGS.get(model_type)
    if rows is None:
        raise SystemExit(f"evals/decoding.py has no settings of a {model_type!r} model")
    if model_type != "autoregressive":
        rows = SETTINGS.get(style, rows)
    return BASE | (rows.get(task) or rows["*"])
