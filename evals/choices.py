"""Multiple choice: the letter that a completion answers, and what the benchmarks of letters share.

A benchmark is a file with a subclass of Choices and, as `task`, its one object.
"""

import re
from functools import partial
from typing import NamedTuple

from data.rows import Row, is_hub_id, read_rows
from evals.examples import one_split, own_part, parse_rows, source_and_style, user

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SHOTS = 5  # solved questions of the same subject in front of a question
BESIDE = 30  # characters at most between statements that belong together
SPECIAL = re.compile(r"<\|\w+\|>")  # a special token that was decoded: <|endoftext|>
NOT_IN_A_WORD = (  # \b does not end a letter before a Chinese character; _B_ is slanted
    r"(?!_?[A-Za-z0-9]|['’][A-Za-z])"
)
MARKUP = r"(?:[\s*_$\"'“‘`>#[({（]|\\?(?:text|math)(?:bf|rm)?\{|\\boxed\b){0,8}"
CLOSED = r"(?=\s{0,4}[\])}）])"
BARE = rf"([A-Z]){NOT_IN_A_WORD}(?!(?<=I)[ \t]+[a-z])"  # I do not know
IS = (
    r"\b(?:is|are|(?:would|should|must|will|(?:seems|appears|likely) to)(?: \w{2,12}ly)? be)\b"
    r"(?:[\s:]{1,4}(?:most|\w{2,12}ly|indeed|thus|therefore|in|closest to|option|choice|letter"
    r"|not \S{1,12} but)\b){0,3}\s{0,4}:?"
)
NAMED = r"\b(?:answers?|choice|option|correct|right|best|closest|likely|probable|true|false)\b"
SAID = (  # what names the letter that follows
    rf"(?:\b(?:choose|select|pick|go with)\s{{1,4}}(?:option|choice)?|{NAMED}[^.:!?\n]{{0,60}}?"
    rf"(?:{IS}|\b(?:may|might|could) be\b)"
    r"|\b(?:likely|(?:probab|possib)ly|certainly|definitely|surely)(?: (?:be|option|choice))?\b"
    r"|\b(?:answer|choice|option)['\"]?\s{0,4}[*_]{0,2}\s{0,4}[:：=–](?:\s{0,4}(?:option|choice)\b)?"
    r"|答案(?:选项|应该|应当|应)?(?:是|为|选)?\s{0,4}[:：]?(?:选项)?"
    r"|(?<![不可备])选择?\s{0,4}[:：]?"
    r"|(?:正确|错误|符合题意)的?(?:选项|一项|说法)?(?:是|为)\s{0,4}[:：]?"
    r"|\b(?:no|wait|actually|sorry)[,.:!]?\s{1,4}(?:it|that)"
    r"(?:'s|\s{1,4}(?:is|must be|should be))\b)"
)
STATED = re.compile(
    # the answer is (B) - is (b) - is 7 km (B) - is, of anything, (B) or B. text
    rf"(?i:{SAID})(?:{MARKUP}(?:{BARE}|(?<=[\[({{（])([a-z]){CLOSED}"
    r"|(?<=[:：*]\s)([a-z])(?=[.\s]{0,4}(?:\n|$)))"
    r"|(?:(?![.!?]\s|\([A-Z]\))[^\n]){1,99}?(?<!not )\(([A-Z])(?=\)[*.\s]{0,4}(?:\n|$)))"
    rf"|(?i:{IS}){MARKUP}(?:(?<=[\[({{（])([A-Z]){CLOSED}|([A-Z])(?=[):]\s|\. (?:[a-z\d]"
    r"|(?:[A-Z][a-z]+ ?){1,3}\.?(?:\n|$))))"
    rf"|\\boxed\s?{MARKUP}(?<=[({{])([A-Za-z]){CLOSED}|<answer>\s*\(?([A-Z])(?=\)?\s*[.:)<])"
    # (option B) - Thus, B.
    r"|(?i:\((?:option|choice|answer) )\(?([A-Z])(?=\)+[.*\s]{0,4}(?:\n|$))"
    r"|(?i:(?:^|[.!\n]\s{0,3})(?:thus|therefore|hence|so),? (?:option )?)\(?([A-Z])"
    r"(?=\)?[.\s]{0,4}(?:\n|$))"
    # B is correct - so (B) is the best answer
    r"|(?:^|[.,:;(\n，。项以]\s?|(?i:option|choice|so|that|think|makes|thus|therefore)\s)[*_]{0,2}\(?([A-Z])"
    r"(?=\)?[*_]{0,2} (?:is|are|as|the) (?:(?:the|most|clearly|only|a) ){0,3}"
    r"(?:best|correct|right|answer|likely)\b|(?:选?项)?是?正确)"
)
# behind a letter: B or C - B C - B, C - B. C. - A. text B. text - two letters, whatever the signs
HEDGED = re.compile(
    rf"[\])*_}}）]{{0,3}}(?:,?[ \t]*(?:or\b|and\b|to\b|through\b|[-–/&;|]|或|和)[ \t]*"
    rf"\(?[A-Za-z]{NOT_IN_A_WORD}|[ \t]+\(?[A-HJ]{NOT_IN_A_WORD}"
    r"|[ \t]*,[ \t]*\(?[A-Z]\)?(?:[.,;\n]|$))"
    rf"|(?<=([A-Z]))(?:\W{{1,9}}(?!\1)[A-Z]{NOT_IN_A_WORD}(?![(^])){{2}}"
    r"|[.:)][ \t]*(?:[Oo]r[ \t]+)?\(?[A-Z][.:)<]"
    r"|(?<=A)[.:)] [^\n]{1,300}?\s\(?B[.:)] (?!is|are|was|does|has|would)[^\n]{1,300}?\s\(?C[.:)] "
)
LABEL = (
    rf"[ \t*_$\"'(\[（→]{{0,6}}(?:(?:[Oo]ption|[Cc]hoice) \(?)?([A-Z]){NOT_IN_A_WORD}"
    r"[ \t*_$\"')\]）]{0,6}(?:[.:,、。，：)]|$)"
)
BELOW = re.compile(rf"([^\n]{{0,400}})\n+{LABEL}", re.M)  # a label on the next line
LABEL = re.compile(rf"^{LABEL}", re.M)
# of an option that is not the answer
DENIED = re.compile(
    r"[)\s*]{0,4}(?:is|was)(?: also)?(?:(?:n't| not)(?: the)? (?:correct|right|true|answer|best)"
    r"| wrong| incorrect| false)\b"
)
# The answer is A. No, it is B. But options of MMLU begin with "No, because" too.
RETRACTED = re.compile(
    r"[^.!?\n]{0,60}[.!?)\s]{1,4}(?:(?:wait|actually|sorry)[,.:!]"
    r"|no[,.:!]\s{1,4}(?:(?:it|that|this)\b|\(?(?-i:[A-Z])\b))",
    re.IGNORECASE,
)
# I don't think the answer is ...
NOT_SAID = re.compile(r"(?:n't|\bnot)(?: (?:think|believe|sure|say|mean)\b[^.,\n]*)?\s*$")
LONE = re.compile(r"[ \t.:,、。，：)*_$\"'\]）]*(?:\n|$)")  # nothing else on the line


def letter(completion, letters):
    r"""The letter of `letters` that a completion answers; None if there is none. Never raises,
    linear in time.

    The first rule that finds something, in front of a next question that the model asks itself:
      1. the last statement. It names a letter behind words ("answer is (B)", "ANSWER: B", "I choose
         B", "the likely cause is (B)", \boxed{B}, <answer>B. text, 答案是B) or in front of them ("B
         is correct"). One that names several ("B or C"), restates the options, is taken back,
         or, with those directly in front of it, names all options or calls several correct, names
         none; letters outside `letters` do not count;
      2. a line that is a letter and nothing else, unless another line is another letter;
      3. "B." or "(B) text" at the start of a line, unless another letter starts a line in the same
         way: a list of options is no answer.
    OpenCompass takes the first match of some fifty patterns and in the end any capital letter, so
    that the article "A" answers A there.
    """
    completion = SPECIAL.sub("\n", own_part(completion))
    said, others, last = [], set(), 0  # others: letters of the statements directly in front
    for match in STATED.finditer(completion):
        (start, end), choice = match.span(), match[match.lastindex].upper()
        denied = NOT_SAID.search(completion, max(0, start - 40), start)
        if choice in letters and not denied and not DENIED.match(completion, end):
            below = BELOW.match(completion, end)
            restated = (
                below and below[2] != choice and ("\n" in match[0] or not LONE.fullmatch(below[1]))
            )
            taken_back = HEDGED.match(completion, end) or RETRACTED.match(completion, end)
            others = others - {choice} if start - last < BESIDE else set()
            # all options, or "A is correct. B is correct."
            cycles = len(others) + 1 == len(letters) or match.lastindex == STATED.groups
            said.append(None if restated or taken_back or others and cycles else choice)
            others, last = others | {choice}, end
    if said:
        return said[-1]
    lone, labels = set(), set()
    for match in LABEL.finditer(completion):
        if match[1] in letters and not DENIED.match(completion, match.end()):
            found = lone if LONE.match(completion, match.end()) else labels
            found.add(match[1] if not HEDGED.match(completion, match.end(1)) else None)
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
    base, heading: a Form and what stands above it, for `choices`. topics: {subject: its words}.
    `read` makes an example of a row: question, options (a list), gold (a letter), and subject if
    there are several.
    """

    PRESETS, parts, topics, heading = {}, (None,), {}, ""
    base = Form("{question}\n{options}\nAnswer:", " {gold}")
    splits = {"test": "test", "validation": "validation"}

    def load(self, split, path=None, limit=None):
        """The first `limit` examples, subject after subject. With a style other than "": "style";
        if it shows worked examples "shots", the first SHOTS of the subject.

        path: empty for the hub's rows, or a file or hub id with HUB's columns; or a style, or one
        behind a path. A file gives the same rows for every split, and its worked examples are the
        hub's.
        """
        path, style = source_and_style(path, self.HUB, self.PRESETS)
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
        return parse_rows(
            self.problem, self.needs, read_parts(path, part, self.parts, self.PRESETS)
        )

    def problem(self, row):
        example = self.read(row)
        options = labelled(example)
        "".join([*options.values(), example.get("subject", "")])  # TypeError if one is no text
        if example["gold"] not in options:
            raise ValueError("the answer is no option")
        return example

    def prompt(self, example):
        """Worked examples as chat turns, then the question."""
        form, shown = self.form(example), example.get("shots", ())
        shots = [[self.filled(form, text, shot) for text in form.shot] for shot in shown]
        return user(self.filled(form, form.ask, example), shots)

    def choices(self, example):
        """-> text without a chat, as lm-eval shows it to base models, {letter: what may follow}"""
        fill, ask, answer = partial(self.filled, self.base), self.base.ask, self.base.answer
        shots = [fill(f"{ask}{answer}\n\n", shot) for shot in example.get("shots", ())]
        options = labelled(example).items()
        follow = {letter: answer.format(gold=letter, option=option) for letter, option in options}
        return fill(self.heading, example) + "".join(shots) + fill(ask, example), follow

    def form(self, example):
        return self.forms[example.get("style", "")]

    def filled(self, form, text, example):
        subject = example.get("subject", "")
        lines = "\n".join(form.option.format(*pair) for pair in labelled(example).items())
        topic = self.topics.get(subject, subject.replace("_", " "))
        more = {"options": lines, "stripped_options": lines.strip(), "topic": topic}
        return text.format(**example | more)

    def extract(self, completion, example):
        """The letter of the completion, one of the options; None if there is none."""
        return letter(completion, labelled(example))

    def score(self, completion, example):
        """Whether the letter is the gold one. Never raises."""
        return self.extract(completion, example) == example["gold"]

    def answer(self, example, draw=0):
        """The gold letter as the prompt asks for it."""
        return self.form(example).answer.format(**example)


def labelled(example):
    """{letter: option}, without those of MMLU-Pro that are "N/A"."""
    pairs = zip(LETTERS, example["options"], strict=False)
    return {letter: option for letter, option in pairs if option != "N/A"}


def read_parts(path, split, parts, presets=()):
    """Rows of a file, or those of a hub data set with these configs, each with its config as
    "subject" if it has none."""
    if not is_hub_id(path):
        return read_rows(path, split, presets)
    read = lambda part: read_rows(path, split, presets, config=part)
    return [Row(row.place, {"subject": part} | row) for part in parts for row in read(part)]
