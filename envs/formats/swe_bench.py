"""Rows as SWE-bench and its relatives write them, the predictions that are scored on them, and when one is resolved.

{"instance_id": "a__b-1", "repo": "a/b", "base_commit": "0123...", "problem_statement": "...", "patch": "diff ...",
 "test_patch": "diff ...", "FAIL_TO_PASS": "[\\"tests/test_x.py::test_y\\"]", "PASS_TO_PASS": [...], "image": "..."}
The two lists may be lists or JSON in a text. Columns that are not named here are let pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from palestra.envs.builtin.data import json_lines
from palestra.envs.errors import ConfigError
from palestra.envs.strict_json import JsonError, loads
from palestra.envs.types import JSON

_IMAGES = ("image", "image_name", "docker_image")  # SWE-bench 5, SWE-smith, R2E-Gym
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


@dataclass(frozen=True, slots=True)
class SweBenchRow:
    """One instance."""

    id: str
    repository: str  # "owner/name"
    base_commit: str
    issue: str
    fail_to_pass: tuple[str, ...]  # never empty
    pass_to_pass: tuple[str, ...]
    patch: str  # the known good one, a unified diff
    test_patch: str
    image: str | None = None  # with the repository in it; None: the row names none


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row that cannot be used, and why. RefusedRow("a__b-1", "FAIL_TO_PASS is empty; ...")"""

    id: str
    reason: str


def read_rows(path: Path) -> tuple[list[SweBenchRow], list[RefusedRow]]:
    """The rows of a JSONL file. Raises ConfigError for a file that cannot be read at all."""
    rows: dict[str, SweBenchRow] = {}
    refused = []
    for number, columns in enumerate(json_lines(path), 1):
        try:
            row = read_row(columns)
            if row.id in rows:
                raise ConfigError("an earlier row has the same instance_id")
            rows[row.id] = row
        except ConfigError as error:
            refused.append(RefusedRow(str(columns.get("instance_id", f"row {number}")), str(error)))
    return list(rows.values()), refused


def read_row(columns: Mapping[str, JSON]) -> SweBenchRow:
    """One row. Raises ConfigError with the reason why it cannot be used."""
    commit = _text(columns, "base_commit")
    if not _COMMIT.fullmatch(commit):
        raise ConfigError(f"base_commit is {commit[:80]!r}; expected 7 to 64 hex digits")
    fail, stay = _tests(columns, "FAIL_TO_PASS"), _tests(columns, "PASS_TO_PASS")
    if not fail:
        raise ConfigError("FAIL_TO_PASS is empty; an instance without such a test is resolved by doing nothing")
    if both := set(fail) & set(stay):
        raise ConfigError(f"{min(both)!r} is in FAIL_TO_PASS and in PASS_TO_PASS; expected it in one of them")
    return SweBenchRow(
        _text(columns, "instance_id"),
        _text(columns, "repo"),
        commit,
        _text(columns, "problem_statement"),
        fail,
        stay,
        _text(columns, "patch"),
        _text(columns, "test_patch"),
        next((_text(columns, name) for name in _IMAGES if columns.get(name) is not None), None),
    )


def resolved(row: SweBenchRow, outcomes: Mapping[str, str]) -> bool:
    """Whether every test of both lists was reported "passed"; skipped or missing is a failure.

    `outcomes`: test id -> "passed", "failed", "skipped" or another word.
    """
    return all(outcomes.get(test) == "passed" for test in (*row.fail_to_pass, *row.pass_to_pass))


def write_predictions(path: Path, model: str, patches: Iterable[tuple[str, str]]) -> None:
    """(instance id, unified diff) as the lines that SWE-bench scores. Replaces the file."""
    lines = (
        json.dumps({"instance_id": id, "model_name_or_path": model, "model_patch": patch}) + "\n"
        for id, patch in patches
    )
    path.write_text("".join(lines), encoding="utf-8")


def _text(columns: Mapping[str, JSON], name: str) -> str:
    value = columns.get(name)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} is {str(value)[:80]!r}; expected a text that is not empty")
    return value


def _tests(columns: Mapping[str, JSON], name: str) -> tuple[str, ...]:
    """Test ids, each once, from a list or from JSON in a text."""
    value = columns.get(name)
    if isinstance(value, str):
        try:
            value = loads(value)
        except JsonError as error:
            raise ConfigError(f"{name} is no JSON: {error}; expected a list of test ids") from error
    if not isinstance(value, list):
        raise ConfigError(f"{name} is {type(value).__name__}; expected a list of test ids, or one as JSON in a text")
    ids = [each for each in value if isinstance(each, str) and each]
    if len(ids) < len(value):
        raise ConfigError(f"{name} holds something that is no test id; expected texts")
    return tuple(dict.fromkeys(ids))
