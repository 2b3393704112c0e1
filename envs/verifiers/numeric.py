"""Is the answer the number? A judge that reads one number strictly and gives no credit for a second guess."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from palestra.envs.types import JSON

MAX_CHARS = 64
_NUMBER = re.compile(
    r"[-+]?(?P<currency>[$€£] ?)?(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?: ?%| ?(?P<unit>[A-Za-z]{1,20}))?\.?"
)
_MULTIPLIERS = frozenset({"k", "m", "b", "dozen", "dozens", "hundred", "thousand", "million", "billion", "half"})


def judge(truth: JSON, answer: JSON) -> dict[str, float]:
    """1 for the right number; else the small credits that the task declares; minus what the turns cost.

    `truth` is {"number": "1,080"} with, if wanted, "tool" and "tool_credit" (a call of that tool succeeded),
    "number_credit" (the answer is some number), and "turn_cost" (taken off per turn, at most 1 in all). `answer` is
    what a ToolEnvironment exports; the number is the argument "value" of the finishing call.
    """
    assert isinstance(truth, Mapping)
    assert isinstance(answer, Mapping)
    final, ran, turns = answer["final"], answer["ran"], answer["turns"]
    expected = parse_number(truth["number"])
    assert expected is not None, "the truth is no number"
    assert isinstance(ran, Mapping)
    assert isinstance(turns, int)
    found = parse_number(final.get("value")) if isinstance(final, Mapping) else None
    correct = found is not None and equal(found, expected)
    used_tool = bool(ran.get(str(truth.get("tool"))))
    credit = _number(truth, "tool_credit") * used_tool + _number(truth, "number_credit") * (found is not None)
    cost = min(1.0, _number(truth, "turn_cost") * turns)
    return {
        "reward": (1.0 if correct else credit) - cost,
        "correct": float(correct),
        "numeric": float(found is not None),
        "used_tool": float(used_tool),
        "answered": float(final is not None),
    }


def parse_number(value: JSON) -> Fraction | None:
    """The one number that `value` is, exactly, or None.

    A JSON number, or text of it: an optional sign, a currency sign before, thousands in threes, a percent sign or one
    word of a unit behind ("$1,080", "72 clips", "50%", read as 50). Two numbers, an equation, an exponent, a fraction,
    a word that multiplies ("5 dozen") or anything longer than 64 characters is none.
    """
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        try:
            return Fraction(Decimal(repr(value)))
        except (InvalidOperation, ValueError, OverflowError):  # NaN and infinity
            return None
    if not isinstance(value, str) or len(value) > MAX_CHARS:
        return None
    match = _NUMBER.fullmatch(value.strip())
    if match is None or (match["unit"] or "").lower() in _MULTIPLIERS:
        return None
    number = Fraction(match["digits"].replace(",", ""))
    return -number if value.strip().startswith("-") else number


def equal(found: Fraction, expected: Fraction) -> bool:
    """Exactly, when a whole number is expected; else to one millionth."""
    if expected.denominator == 1:
        return found == expected
    return abs(found - expected) <= Fraction(1, 1_000_000) * max(Fraction(1), abs(expected))


def _number(truth: Mapping[str, JSON], name: str) -> float:
    value = truth.get(name, 0.0)
    assert isinstance(value, int | float)
    return float(value)
