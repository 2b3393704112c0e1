"""Worked solutions of GSM8K as tool-using episodes, made from the calculator marks `<<48/2=24>>` in the data."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from palestra.envs.calls import CallFormat
from palestra.envs.verifiers.numeric import equal, parse_number

_MARK = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")
_LEADING_ZEROS = re.compile(r"(?<![0-9.])0+(?=[0-9])")
_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True, slots=True)
class Step:
    """One mark. Step("Natalia sold 48/2", "48/2", Fraction(24))"""

    words: str  # the sentence before the result
    expression: str
    value: Fraction


def turns(solution: str, number: str, calls: CallFormat, seed: int) -> tuple[str, ...]:
    """An expert's turns: the sums in Python, one a turn or all at once as `seed` says, then the answer.

    A solution with a mark that does not evaluate to what it says, or whose last one is not the answer, is told in words
    instead, and answered without the tool.
    """
    answer = calls.render_call("answer", {"value": number})
    steps = read_steps(solution)
    expected = parse_number(number)
    if not steps or expected is None or not equal(steps[-1].value, expected):
        return (f"{_words(solution)}\n{answer}",)
    if random.Random(seed).random() < 0.5:
        code = "\n".join(f"print({step.expression})" for step in steps)
        return (_say(_words_of(steps), calls.render_call("python", {"code": code})), answer)
    one_each = (calls.render_call("python", {"code": f"print({step.expression})"}) for step in steps)
    return (*(_say(step.words, call) for step, call in zip(steps, one_each, strict=True)), answer)


def read_steps(solution: str) -> list[Step]:
    """Every mark in order; none at all when one of them is wrong or is no sum of plain numbers."""
    steps = []
    for line in solution.split("####")[0].strip().split("\n"):
        begin = 0
        for mark in _MARK.finditer(line):
            expression = _LEADING_ZEROS.sub("", mark[1].strip())  # 05 is no Python
            value, said = evaluate(expression), parse_number(mark[2])
            if value is None or said is None or not equal(value, said):
                return []
            words = _MARK.sub("", line[begin : mark.start()]).strip()
            steps.append(Step(re.sub(r"\s*=?\s*[$€£]?$", "", words), expression, value))
            begin = mark.end()
    return steps


def evaluate(expression: str) -> Fraction | None:
    """The exact value of numbers with + - * / and brackets, or None for anything else."""
    try:
        return _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(repr(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not plain arithmetic")


def _words(solution: str) -> str:
    return _MARK.sub("", solution.split("####")[0]).strip()


def _words_of(steps: Sequence[Step]) -> str:
    return "\n".join(step.words for step in steps if step.words)


def _say(words: str, call: str) -> str:
    return f"{words}\n{call}" if words else call
