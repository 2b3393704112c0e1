"""The record of an episode gives the episode back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from episodes import ADD, ANSWER, Judge, episode, no_verdict
from palestra.rollout import record
from palestra.rollout.types import Trajectory


def same(one: Trajectory, two: Trajectory) -> bool:
    for a, b in zip(one.samples, two.samples, strict=True):
        for name in ("ids", "sampled", "logprobs", "temperature", "version", "turn"):
            x, y = getattr(a, name), getattr(b, name)
            if x.dtype != y.dtype or not np.array_equal(x, y, equal_nan=x.dtype.kind == "f"):
                return False
    return record.to_json(one) == record.to_json(two)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    episodes = [episode([ADD, ANSWER]), episode(["nothing", ANSWER], judge=Judge(no_verdict))]
    written = record.append(path, episodes[:1]) + record.append(path, episodes[1:])
    assert written == path.stat().st_size
    assert all(map(same, record.read(path), episodes))


def test_a_line_that_a_crash_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    record.append(path, [episode([ADD, ANSWER]), episode([ANSWER])])
    path.write_bytes(path.read_bytes()[:-20])
    assert len(list(record.read(path))) == 1


def test_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="palestra-trajectory-1"):
        record.from_json({"schema": "other-2"})


@given(st.text(max_size=30))
def test_any_text_survives_the_record(text: str) -> None:
    trajectory = episode([text, ANSWER])
    line = json.dumps(record.to_json(trajectory), ensure_ascii=False).encode("utf-8", "replace")
    assert same(record.from_json(json.loads(line)), trajectory)


def test_one_line_is_one_episode_and_needs_nothing_but_json(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    record.append(path, [episode(["line\nbreak\u2028", ANSWER])])
    (line,) = path.read_text(encoding="utf-8").split("\n")[:-1]
    values = json.loads(line)
    assert values["schema"] == record.SCHEMA
    assert values["reward"] == 1.0
    assert values["terminated_by"] == "done"
