"""SWE-bench rows: both ways of writing lists, the dialects, and rows that are refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from palestra.envs.errors import ConfigError
from palestra.envs.formats.swe_bench import read_row, read_rows, resolved, write_predictions
from palestra.envs.types import JSON

ROW: dict[str, JSON] = {
    "instance_id": "a__b-1",
    "repo": "a/b",
    "base_commit": "0123456789abcdef",
    "problem_statement": "It is broken.",
    "patch": "diff --git a/x b/x\n",
    "test_patch": "diff --git a/t b/t\n",
    "FAIL_TO_PASS": '["t.py::one"]',
    "PASS_TO_PASS": ["t.py::two"],
    "hints_text": "",
    "version": "1.0",
}


def test_the_lists_may_be_lists_or_texts() -> None:
    row = read_row(ROW)
    assert (row.fail_to_pass, row.pass_to_pass) == (("t.py::one",), ("t.py::two",))
    assert read_row({**ROW, "FAIL_TO_PASS": ["t.py::one"], "PASS_TO_PASS": '["t.py::two"]'}) == row


@pytest.mark.parametrize("column", ["image", "image_name", "docker_image"])
def test_dialects_name_the_image_differently(column: str) -> None:
    assert read_row({**ROW, column: "swe/one"}).image == "swe/one"
    assert read_row(ROW).image is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS is empty"),
        ({"FAIL_TO_PASS": "t.py::one"}, "FAIL_TO_PASS is no JSON"),
        ({"PASS_TO_PASS": {"t": 1}}, "PASS_TO_PASS is dict"),
        ({"PASS_TO_PASS": [1]}, "no test id"),
        ({"PASS_TO_PASS": ["t.py::one"]}, "in FAIL_TO_PASS and in PASS_TO_PASS"),
        ({"base_commit": "--upload-pack=x"}, "expected 7 to 64 hex digits"),
        ({"problem_statement": None}, "problem_statement is 'None'"),
        ({"image": 3}, "image is '3'"),
    ],
)
def test_a_bad_row_is_refused_with_the_reason(change: dict[str, JSON], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_row({**ROW, **change})


def test_bad_rows_do_not_hide_good_ones(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    second = {**ROW, "instance_id": "a__b-2", "FAIL_TO_PASS": []}
    path.write_text("".join(json.dumps(row) + "\n" for row in (ROW, second, ROW)))
    rows, refused = read_rows(path)
    assert [row.id for row in rows] == ["a__b-1"]
    assert [each.id for each in refused] == ["a__b-2", "a__b-1"]
    assert "same instance_id" in refused[1].reason


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ({"t.py::one": "passed", "t.py::two": "passed", "t.py::three": "failed"}, True),
        ({"t.py::one": "passed", "t.py::two": "skipped"}, False),
        ({"t.py::one": "passed"}, False),
        ({}, False),
    ],
)
def test_resolved_is_every_test_passed(outcomes: dict[str, str], expected: bool) -> None:
    assert resolved(read_row(ROW), outcomes) is expected


def test_predictions_are_lines_that_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    write_predictions(path, "ours", [("a__b-1", "diff\n"), ("a__b-2", "")])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"instance_id": "a__b-1", "model_name_or_path": "ours", "model_patch": "diff\n"},
        {"instance_id": "a__b-2", "model_name_or_path": "ours", "model_patch": ""},
    ]
