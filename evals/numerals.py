r"""Numbers in answers: as text that `Fraction` reads, without LaTeX, money and units around them."""

import re

from evals.math_grader import MAX_LENGTH

# LaTeX and money as plain text: \text{dollars}, \frac{1}{2} and \frac12 (" 1/2": 1\frac{1}{2} is not 11/2), -$18
REPLACED = {
    r"\!": "",
    r"\,": "",
    "{,}": ",",
    "\\ ": " ",
    "~": " ",
    r"\$": "$",
    r"\%": "",
    "%": "",
    "−": "-",
}
WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
SHORT_FRACTION = re.compile(r"\\[dt]?frac([0-9])([0-9])")
FRACTION = re.compile(r"((?<![\w)])-)?\\[dt]?frac\{\s*(-?[0-9]+)\s*\}\{\s*([0-9]+)\s*\}")
MONEY = re.compile(r"((?<![\w)])-)?[$€£] *")

# ASCII digits only. No 1e5: Decimal("1e999999999") is a number too. In running text - is a sign unless it subtracts.
UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+|/0*[1-9][0-9]*)?|\.[0-9]+)"
NUMBER = rf"(?:(?<![\w)])-)?(?<![\w^])(?<!\^\{{)(?<![0-9]\.){UNSIGNED}(?!\d|[eE][-+]?[0-9])"
IN_TEXT = re.compile(NUMBER)
AFTER_HASHES = re.compile(rf"####[\s*]*({NUMBER})(?![.)]\s*\w)")  # not the heading "#### 1. Add up"
ANSWER_IS = re.compile("answer is", re.IGNORECASE)
# a number and nothing else but a unit: dollars, miles per hour, cm^2, /day
WHOLE = re.compile(
    rf"(-?)\s*({UNSIGNED})\s*(?:/?\s*[A-Za-z][^\d=+*,{{}}()\\^]*(?:\^\{{?[23])?)?[\s.]*"
)


def plain(text: str) -> str:
    r"""Text without the LaTeX that stands around numbers: \$1{,}450 -> 1,450, \frac{1}{2} -> 1/2, \text{eggs} -> eggs."""
    for latex, replacement in REPLACED.items():
        text = text.replace(latex, replacement)
    text = MONEY.sub(r" \1", WORDS.sub(r"\1", text))
    return FRACTION.sub(r" \1\2/\3", SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text))


def normalised(answer: str) -> str | None:
    r"""A number as text that `Fraction` reads: "\$2{,}125" -> "2125", "x = -1/2 \text{ km}" -> "-1/2"; None for all else."""
    text = plain(answer[: MAX_LENGTH + 1]).rpartition("=")[2].strip(" \t\r\n{}()")
    match = WHOLE.fullmatch(text) if len(answer) <= MAX_LENGTH else None
    return match[1] + match[2].replace(",", "") if match else None


def final_numbers(text: str) -> list[str]:
    """The number that rule 2, 3 or 4 of gsm8k.extract finds in plain text, last; [] where there is none."""
    if after_hashes := AFTER_HASHES.findall(text):
        return after_hashes
    if mentions := list(ANSWER_IS.finditer(text)):
        behind = text[mentions[-1].end() :][:MAX_LENGTH].lstrip(" \t\r\n:*")
        sentence = re.split(r"\n|\.(?=\s|$)", behind, maxsplit=1)[0]
        if number := IN_TEXT.search(sentence.rpartition("=")[2]):
            return [number[0]]
    return IN_TEXT.findall(text)
