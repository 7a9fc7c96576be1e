"""The value of an arithmetic expression in an answer, in fractions."""

import ast
import operator
import re
from fractions import Fraction

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
MAX_LENGTH = 512  # characters of an answer; longer ones are not legal
MAX_DEPTH = 64  # operators and opening brackets of an answer: bounds the depth of its tree
LEGAL = re.compile(
    r"(?:(?:0|[1-9][0-9]*)(?![0-9])|[-+*/() ])+"
)  # ASCII integers without leading zeros


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """(value, sorted literals) of a legal expression; None for anything else, division by zero included. Never raises."""
    if (
        len(text) > MAX_LENGTH
        or not LEGAL.fullmatch(text)
        or len(re.findall(r"[-+*/(]", text)) > MAX_DEPTH
    ):
        return None
    literals = []

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=literal):
                literals.append(literal)
                return Fraction(literal)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
                return OPERATIONS[type(op)](value(left), value(right))
        raise SyntaxError(
            f"{type(node).__name__} is not legal"
        )  # **, //, unary plus, calls like 2(3), ()

    try:
        result = value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError):
        return None
    return result, sorted(literals)
