"""Multiple choice: the letter that a completion answers, and what the benchmarks of letters share.

A benchmark is a file with a subclass of Choices and, as `task`, its one object.
"""

import re
from typing import NamedTuple

from data.rows import is_hub_id, read_rows
from evals.examples import one_split, parse_rows, source_and_style, user
from evals.math_grader import MAX_TEXT

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SHOTS = 5  # solved questions of the same subject in front of a question
SPECIAL = re.compile(r"<\|\w+\|>")  # a special token that was decoded: <|endoftext|>
NOT_IN_A_WORD = (  # \b does not end a letter before a Chinese character; _B_ is slanted
    r"(?!_?[A-Za-z0-9]|['’][A-Za-z])"
)
# a letter in brackets may be lower case; "B or C" and "B, C" are no choice
HEDGED = (
    rf"(?:[ \t]*(?:or\b|and\b|to\b|through\b|[-–/&;|]|或|和)[ \t]*\(?[A-Za-z]{NOT_IN_A_WORD}"
    rf"|[ \t]+\(?[A-HJ]{NOT_IN_A_WORD}"
    r"|[ \t]*,[ \t]*\(?[A-Z]\)?(?:[.,;\n]|$))"
)
BARE = rf"([A-Z]){NOT_IN_A_WORD}(?!{HEDGED})(?!(?<=I)[ \t]+[a-z])"  # I do not know
IN_BRACKETS = r"[\[({（]\s*(?:\\?(?:text|math)(?:bf|rm)?\{\s*)?\(?([A-Za-z])\)?\s*[\])}）]"
SAID = (  # a phrase such as "the answer is", then markup
    r"(?:\b(?:choose|select|pick|go with)\s{1,4}|\b(?:answer|choice|option)"
    r"(?: to the question)?['\"]?(?:\s{1,4}(?:is|would be|should be|must be)\s{0,4}:?"
    r"|\s{0,4}[*_]{0,2}\s{0,4}[:：–])"
    r"|答案(?:选项|应该|应当|应)?(?:是|为|选)?\s{0,4}[:：]?"
    r"|(?:应|故|应该|因此|所以)[，,]?选(?:择|项)?\s{0,4}[:：]?"
    r"|(?:正确|错误|符合题意)的?(?:选项|一项|说法)?(?:是|为)\s{0,4}[:：]?"
    r"|\b(?:no|wait|actually|sorry)[,.:!]?\s{1,4}(?:it|that)"
    r"(?:'s|\s{1,4}(?:is|must be|should be))\s{1,4})"
    r"[\s*_$\"'“‘]{0,8}(?:(?:option|choice|选项)\s{0,4})?[*_$\"'“‘]{0,4}"
)
EXPLICIT = re.compile(
    rf"(?i:{SAID})[^*\n]{{1,99}}\*\* ?\(([A-Z])\)"
    rf"|(?i:{SAID})(?:\\boxed\s*)?(?:{BARE}|{IN_BRACKETS}(?!{HEDGED}))|\\boxed\s*{IN_BRACKETS}"
    r"|<answer>\s*\(?([A-Z])\)?\s*[.:)<](?!\s*(?:or\s+)?\(?[A-Z]\s*[.:)<])"
    r"|(?:^|[.,:;\n]\s?|(?i:option|choice)\s)\(?([A-Z])\)? is (?:the )?(?:best|correct|right)\b"
)
LABEL = re.compile(
    rf"^[ \t*_$\"'(\[（→]{{0,6}}([A-Z]){NOT_IN_A_WORD}[ \t*_$\"')\]）]{{0,6}}(?:[.:,、。，：)]|$)",
    re.M,
)
# of an option that is not the answer; letters of options that follow on the line
DENIED = re.compile(r"\s*(?:is|was)(?:n't| not| wrong| incorrect| false)\b")
OTHERS = re.compile(r"\b([A-Z])(?=\s*(?:[.,:;|)]|$))")
# The answer is A. No, it is B. But options of MMLU begin with "No, because" too.
RETRACTED = re.compile(
    r"[^.!?\n]{0,60}[.!?)\s]{1,4}(?:(?:wait|actually|sorry)[,.:!]"
    r"|no[,.:!]\s{1,4}(?:(?:it|that|this)\b|\(?(?-i:[A-Z])\b))",
    re.IGNORECASE,
)
NOT_SAID = re.compile(r"(?:n't|\bnot|\bnever)\b[^.,\n]*$")  # I don't think the answer is ...
LONE = re.compile(r"[\s.:,、。，：)*_$\"'\]）]*")


def letter(completion, letters="ABCD"):
    r"""The letter of `letters` that a completion answers; None if there is none. Never raises,
    linear in time.

    The first rule that finds something:
      1. the last explicit statement: "answer is (B)", "ANSWER: B", "**Answer:** B", "option is B",
         "I choose B", "B is correct", \boxed{B}, <answer>B. text, 答案是B, 故选B. A letter outside
         `letters` and "B or C" do not count;
      2. a line that is a letter and nothing else, unless another line is another letter;
      3. "B." or "(B) text" at the start of a line, unless another letter starts a line in the same
         way: a list of options is no answer.
    OpenCompass takes the first match of some fifty patterns and in the end any capital letter, so
    that the article "A" answers A there.
    """
    completion = SPECIAL.sub("\n", completion[-MAX_TEXT:])
    said = [
        choice
        for match in EXPLICIT.finditer(completion)
        if (choice := next(filter(None, match.groups())).upper()) in letters
        and not NOT_SAID.search(completion[max(0, match.start() - 40) : match.start()])
        and not RETRACTED.match(completion, match.end())
    ]
    if said:
        return said[-1]
    lone, labels = set(), set()
    for match in LABEL.finditer(completion):
        if match[1] in letters:
            rest = completion[match.end() : match.end() + 32].partition("\n")[0]
            if not DENIED.match(rest):
                (lone if LONE.fullmatch(rest) else labels).update(match[1], *OTHERS.findall(rest))
    found = lone or labels
    return found.pop() if len(found) == 1 else None


class Form(NamedTuple):
    """A prompt, and the answer that it asks for. Its texts name keys of an example; {options} are
    its options, one line each, and {topic} is its subject in words."""

    ask: str
    answer: str = "{gold}"
    option: str = "{}. {}"
    # a worked example in front, if there are any: a question and its answer, as two chat turns
    shot: tuple = ()


class Choices:
    """A benchmark whose answers are letters.

    HUB, parts: its rows, and their configs there, one for each subject if there are several.
    splits: {split: the hub's name of it}. needs: what a row must have. forms: {style: Form}, the
    default is "". styles: {name behind --data FILE@: style}, names that are also data of their own.
    topics: {subject: its words}. `read` makes an example of a row: question, options (a list), gold
    (a letter), and subject if there are several.
    """

    PRESETS, parts, styles, topics = (), (None,), {}, {}
    splits = {"test": "test", "validation": "validation"}

    def load(self, split, path=None, limit=None):
        """The first `limit` examples, subject after subject. With a style other than "": "style";
        if it shows worked examples "shots", the first SHOTS of the subject.

        path: empty for the hub's rows, or a file or hub id with HUB's columns; or a style, or one
        behind a path. A file gives the same rows for every split, and its worked examples are the
        hub's.
        """
        path, style = source_and_style(path, self.HUB, self.styles)
        examples = self.examples(path, one_split(self.NAME, split, self.splits))[:limit]
        if self.form(style).shot:
            shots = self.examples(path if is_hub_id(path) else self.HUB, "dev")
            for example in examples:
                own = [shot for shot in shots if shot["subject"] == example["subject"]]
                example["shots"] = own[:SHOTS]
                if len(own) < SHOTS:
                    few = f"fewer than {SHOTS} dev rows of {example['subject']!r}"
                    raise SystemExit(f"{path}: {few}")
        return [example | style for example in examples]

    def examples(self, path, part):
        rows = read_parts(path, part, self.parts, self.PRESETS)
        return parse_rows(self.problem, self.needs, path, rows)

    def problem(self, row):
        example = self.read(row)
        options = labelled(example["options"])
        "".join([*options.values(), example.get("subject", "")])  # TypeError if one is no text
        if example["gold"] not in options:
            raise ValueError("the answer is no option")
        return example

    def prompt(self, example):
        """Worked examples as chat turns, then the question."""
        form = self.form(example)
        shots = example["shots"] if form.shot else ()
        shots = [[self.filled(text, shot) for text in form.shot] for shot in shots]
        return user(self.filled(form.ask, example), shots)

    def form(self, example):
        return self.forms[example.get("style", "")]

    def filled(self, text, example):
        option, subject = self.form(example).option, example.get("subject", "")
        lines = "\n".join(option.format(*pair) for pair in labelled(example["options"]).items())
        topic = self.topics.get(subject, subject.replace("_", " "))
        more = {"options": lines, "stripped_options": lines.strip(), "topic": topic}
        return text.format(**example | more)

    def extract(self, completion, example):
        """The letter of the completion, one of the options; None if there is none."""
        return letter(completion, labelled(example["options"]))

    def score(self, completion, example):
        """1.0 if the letter is the gold one, else 0.0. Never raises."""
        return float(self.extract(completion, example) == example["gold"])

    def answer(self, example, draw=0):
        """The gold letter as the prompt asks for it."""
        return self.form(example).answer.format(**example)


def labelled(options):
    """{letter: option}, without those of MMLU-Pro that are "N/A"."""
    pairs = zip(LETTERS, options, strict=False)
    return {letter: option for letter, option in pairs if option != "N/A"}


def read_parts(path, split, parts, presets=()):
    """Rows of a file, or those of a hub data set with these configs, each with its config as
    "subject" if it has none."""
    if not is_hub_id(path):
        return read_rows(path, split, presets)
    read = lambda part: read_rows(path, split, presets, config=part)
    return [{"subject": part} | row for part in parts for row in read(part)]
