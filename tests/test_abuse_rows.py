"""The table of docs/admission.md: every row of the catalogue has a test that exists, or a reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from palestra.envs.admission.library import ELSEWHERE, TAMPERS

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "admission.md"
ROWS = {
    "A": "01 02 04 05 07 08 10 11 13 14 16 17 19 20 22 23",
    "B": "01 02 04 05 07 08 10 11 13 14 16 17 19 20 22 23 25 26 28",
    "C": "01 02 04 05 07 08 10 11 13 14",
    "F": "01 02 04 05 07 08 10 11 13 14 16 17 19 20 22 23 25 26",
    "I": "01 02 04 05 07 08 10 11 13 14 16",
    "K": "01 02 04 05 07 08 10 11",
}
LINE = re.compile(r"^\| ((?:[A-K]\d\d ?)+) \| (.+) \|$", re.M)


def table() -> dict[str, str]:
    """What the page says to each row; a row that stands there twice is an error."""
    told: dict[str, str] = {}
    for rows, words in LINE.findall(PAGE.read_text()):
        for row in rows.split():
            assert row not in told, row
            told[row] = words
    return told


def test_every_row_has_a_test_or_a_reason() -> None:
    assert set(table()) == {f"{letter}{number}" for letter, numbers in ROWS.items() for number in numbers.split()}


def test_every_test_of_the_table_exists() -> None:
    named = [words.split("::") for words in table().values() if "::" in words]
    assert named
    for file, name in named:
        functions = {node.name for node in ast.walk(ast.parse((TESTS / file).read_text())) if hasattr(node, "name")}
        assert name in functions, f"{file}::{name}"


def test_the_rows_of_the_library_are_those_that_it_is_named_for() -> None:
    told = table()
    library = {row for row, words in told.items() if "test_a_tamper_loses" in words}
    assert {tamper.row for tamper in TAMPERS} == library
    assert not library & set(ELSEWHERE)
    assert set(ELSEWHERE) <= set(told)
