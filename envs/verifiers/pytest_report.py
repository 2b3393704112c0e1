"""What a run of pytest in a box amounts to: its report held against the tests that must be in it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from palestra.envs.sandboxes.contract import Exec
from palestra.envs.types import NoVerdict, Scored, Verdict
from palestra.envs.verifiers.signs import FRAMEWORK_PATCHED, REPORT_MISMATCH

PHASES = ("setup", "call", "teardown")
PASSED, FAILED = 0, 1  # exit statuses of pytest: all passed, or some failed


@dataclass(frozen=True, slots=True)
class Sentinels:
    """Two tests of the verifier's own whose names nobody can guess: one that must pass and one that must not."""

    passing: str
    failing: str


def read_report(ended: Exec, nonce: str, expected: Sequence[str], sentinels: Sentinels) -> Verdict:
    """1 where every expected test passed in all its phases, the sentinels are as they must be, and all signs agree.

    NoVerdict where the run was ended from outside, or pytest never began.
    """
    lines, foreign = _lines(ended, nonce)
    if not any("begun" in line for line in lines):
        said = ended.stderr[-300:].decode(errors="replace")
        return NoVerdict(f"pytest did not begin, exit status {ended.exit_code}: {said}")
    if ended.exit_code is None:
        how = "out of time" if ended.timed_out else f"signal {ended.signal}"
        return NoVerdict(f"the tests were ended: {how}{', out of memory' if ended.out_of_memory else ''}")
    outcomes = _outcomes(lines)
    passed = [test for test in expected if _passed(outcomes.get(test, {}))]
    parts = {"passed": float(len(passed)), "expected": float(len(expected))}
    flags = _flags(lines, outcomes, foreign, ended, sentinels)
    return Scored(float(len(passed) == len(expected) and not flags), parts, flags)


def _lines(ended: Exec, nonce: str) -> tuple[list[dict[str, Any]], bool]:
    """The lines of the report, and whether something else stands among them."""
    lines, foreign = [], ended.stdout_cut is not None
    for text in ended.stdout.splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and line.get("nonce") == nonce:
            lines.append(line)
        else:
            foreign = True
    return lines, foreign


def _outcomes(lines: list[dict[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Test -> phase -> every outcome that was reported of it."""
    outcomes: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if "id" in line:
            outcomes[str(line["id"])][str(line.get("phase"))].append(str(line.get("outcome")))
    return outcomes


def _passed(phases: dict[str, list[str]]) -> bool:
    """All three phases, each reported, and none of them ever as anything else."""
    if phases.get("call") == ["xfailed"]:
        phases = {**phases, "call": ["passed"]}
    return set(phases) == set(PHASES) and all(set(outcomes) == {"passed"} for outcomes in phases.values())


def _flags(
    lines: list[dict[str, Any]],
    outcomes: dict[str, dict[str, list[str]]],
    foreign: bool,
    ended: Exec,
    sentinels: Sentinels,
) -> tuple[str, ...]:
    ends = [line for line in lines if "ended" in line]
    complete = len(ends) == 1 and lines[-1] is ends[0] and ends[0].get("status") == ended.exit_code
    repeated = any(len(seen) > 1 for phases in outcomes.values() for seen in phases.values())
    flags = []
    if any(line.get("patched") for line in ends):
        flags.append(FRAMEWORK_PATCHED)
    if complete and not foreign and ended.exit_code in (PASSED, FAILED) and not repeated:
        failing = outcomes.get(sentinels.failing, {}).get("call")
        if failing == ["failed"] and _passed(outcomes.get(sentinels.passing, {})):
            return tuple(flags)
        if failing == ["passed"]:
            flags.append(FRAMEWORK_PATCHED)
    return tuple(dict.fromkeys([*flags, REPORT_MISMATCH]))
