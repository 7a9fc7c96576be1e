"""A siege of the graders: texts of 10 MB, brackets, powers, LaTeX, null bytes, every digit.

    python soak/text.py           every task and its rewards
    python soak/text.py gsm8k     one task

No text may score, raise, take more than 10 s (Math-Verify's processes have 5) or 1 GB of memory.
Some texts hold the right answer, as does a digit of Unicode now and then: they may score. Programs
are read here, not run.
"""

import json
import resource
import sys
import time
import unicodedata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from evals import load_task
from evals.rewards import REWARDS

SIZE, SECONDS, MEMORY = 10 << 20, 10.0, 1 << 30
ENDLESS = {"mbpp_diffucoder": 40.0}  # it runs each of three tests for up to ten seconds
# repeated up to SIZE; ~ is a space, ? the right answer
PIECES = r"""
9 -9 9, 9. 9/ 9^ 1+ 1* 1= ( ) [ ] { } \{ | < $ $$ \$ ` ``` ```python ```? * ** **?** _ # #### @ \\
\ ' " é 😀 ０ 答案 答案是 选 ~ \n \t \r \0 \n\n \x85 \ud800 A\n ?\n \boxed{ \boxed{} \boxed{?
\boxed{\n \fbox{ boxed{ <answer> </answer> <answer>? <answer>?</answer> <answer>\n <|x|> answer
answer~is answer~is~? The~answer~is~not~ is~(? Question: \frac \frac{ \frac{?}{?} \frac12 \text{
\text{? \left( \sqrt \sqrt{ \pm ^{ ^\circ \color{red} \cdot A~or~ (A (A) A. A~is~ A,~ No,~it~is~
not~ [BEGIN] [DONE] [BEGIN]' def def~f(x): def~f(x):\n ~~~~x=1\n def~f(x):? class~A: import~x
<reasoning> <reasoning></reasoning><answer> </reasoning> ()
""".split()
POWERS = r"""
9**9**9**9 9^9^9^9 9^{9^{9^{9}}} 10^{10^{10^{10}}} (9^{9^9})! 9!!!!!!!! 99999999! 1e999999999
\binom{10^9}{10^8} \sum_{i=1}^{10^{99}}i^{99} \prod_{n=1}^{10^9}n \int_0^9x^{x^x}dx (x+y+z)^{9999}
x^{9999999999} \sqrt[9999]{2} __import__('os').abort() '1'*9**9
""".split()
LONG = r"""
9 9. 1/ 2^ x^{ - 1\pm 1, a= 1& xyzw 1< [ { ( x. f( \sqrt{ \text{ \left( (1,2)\cup lambda: \{ \log
\sin_ |1
""".split()
POWERS += [part * (500 // len(part)) for part in LONG]
POWERS += ["\x00", "\ud800", "\u202e1", "1\u0301", r"\frac{1}{" * 60 + "2" + "}" * 60]
FORMS = r"\boxed{%s}", "<answer>%s</answer>", "The answer is %s.", "```python\n%s\n```", "%s"
DIGITS = [chr(i) for i in range(sys.maxunicode) if unicodedata.category(chr(i))[0] == "N"]


def texts(gold):
    """(name, text, whether it may be right)."""
    for piece in PIECES:
        part = piece.replace("~", " ").replace("?", gold)
        for escape in (r"\n", r"\t", r"\r", r"\0", r"\x85", r"\ud800"):
            part = part.replace(escape, escape.encode().decode("unicode_escape"))
        yield f"{piece} to 10 MB", part * (SIZE // len(part)), "?" in piece
    for form in FORMS:
        for part in [*POWERS, "(" * 10**5, "[" * 10**5, "{" * 10**5]:
            yield f"{part[:30]} in {form}", form % part, False
    for digit in DIGITS:
        yield f"{digit} in a box", rf"\boxed{{{digit}}}", True


def siege(name, judge, example, gold, pays):
    """One row of the table. pays: also for what is not right. -> texts that were not survived"""
    tried, lost, slowest = 0, 0, 0.0
    for text_name, text, may_be_right in texts(gold):
        said, began = [], time.monotonic()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            if judge(text, example) == 1.0 and not (may_be_right or pays):
                said = ["scored"]
        except BaseException as error:
            said = [f"{type(error).__name__}: {str(error)[:80]}"]
        seconds = time.monotonic() - began
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        said += [f"{seconds:.1f} s"] * (seconds > ENDLESS.get(name, SECONDS))
        said += [f"{grown >> 20} MB"] * (grown > MEMORY)
        if said:
            print(f"  {name}: {text_name!a}: {', '.join(said)}", flush=True)
        tried, lost, slowest = tried + 1, lost + bool(said), max(slowest, seconds)
    print(f"{name} | {tried} | {tried - lost} | {slowest:.1f} s", flush=True)
    return lost


def main():
    lines = (ROOT / "tests/golden/evals.jsonl").read_text(encoding="utf-8").splitlines()
    seen, failures = set(), 0
    print("check | tried | survived | slowest")
    for case in map(json.loads, lines):
        kind, name = "scores" in case, case.get("task")
        if not (kind or "reward" in case) or sys.argv[1:] not in ([], [name]):
            continue
        task, name = load_task(name), case.get("reward", name)
        judge = REWARDS[name] if not kind else getattr(task, "job", task.score)
        # tasks of multiple choice share one reader
        if (key := (name if not kind else task.extract, case["example"].get("style"))) not in seen:
            seen.add(key)
            gold = next((answer for _, score, answer in case.get("scores", ()) if score), "1")
            failures += siege(name, judge, case["example"], gold, not kind or hasattr(task, "job"))
    return failures


if __name__ == "__main__":
    raise SystemExit(bool(main()))
