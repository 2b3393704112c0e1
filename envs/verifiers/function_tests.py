"""Judging one function: the tests call it across a process border and never meet its code.

Two processes of two users in one clean box. The examiner's has the tests and writes the verdict; the policy's has the
function and answers calls with plain data. The judged code can see neither expected values nor the verdict's way out.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.envs.errors import ConfigError
from palestra.envs.sandboxes.contract import BoxSpec, Exec, Sandbox
from palestra.envs.types import NoVerdict, Scored, Verdict
from palestra.envs.verifiers.inbox_text import program
from palestra.envs.verifiers.signs import eval_detect

GRACE_S = 5.0  # for the examiner to end, after its last question went unanswered


@dataclass(frozen=True, slots=True)
class FunctionCase:
    """One test: Python that calls `candidate` and raises where it is wrong.

    FunctionCase("0", "assert candidate(2) == 4").
    Arguments and results cross as plain data: numbers, text, bytes, lists, tuples, dicts, sets, None. A result of
    another kind is equal to nothing; a change that the function makes to its arguments stays with it.
    """

    id: str
    test: str


class FunctionExamination:
    """See Examination. 1 where every test passes, else 0; the parts say how many "passed" of how many "expected"."""

    def __init__(
        self,
        code: bytes,
        entry_point: str,
        cases: Sequence[FunctionCase],
        *,
        spec: BoxSpec | None = None,
        timeout_s: float = 20.0,
    ) -> None:
        if not cases:
            raise ConfigError(f"{entry_point}: no test; a function without one would pass whatever it does")
        if len({case.id for case in cases}) != len(cases):
            raise ConfigError(f"{entry_point}: two tests have the same id; give each its own")
        self.spec = spec or BoxSpec(role="verifier")
        self.files: Mapping[str, bytes] = {}
        self._code = code
        self._entry_point = entry_point
        self._cases = tuple(cases)
        self._timeout_s = timeout_s

    async def run(self, box: Sandbox, nonce: str) -> Verdict:
        """See Examination."""
        job = {
            "nonce": nonce,
            "code": base64.b64encode(self._code).decode("ascii"),
            "entry_point": self._entry_point,
            "tests": [case.test for case in self._cases],
            "seconds": self._timeout_s,
        }
        ended = await box.run(
            ["python3", "-I", "-S", "-B", "-c", program("inbox_plain", "inbox_examiner")],
            timeout_s=self._timeout_s + GRACE_S,
            stdin=json.dumps(job).encode(),
            user="examiner",
            beside=["python3", "-I", "-B", "-c", program("inbox_plain", "inbox_judged")],
        )
        report = _report(ended, nonce)
        flags = eval_detect({"solution.py": self._code})
        if report is None or len(report["passed"]) != len(self._cases):
            return NoVerdict(f"the examiner ended without a report: {_how(ended)}", flags)
        passed = sum(report["passed"])
        parts = {"passed": float(passed), "expected": float(len(self._cases))}
        return Scored(float(passed == len(self._cases)), parts, flags)


def _report(ended: Exec, nonce: str) -> dict[str, Any] | None:
    """What the examiner wrote, where it ended as it should."""
    if not ended.ok or ended.stdout_cut is not None:
        return None
    try:
        report = json.loads(ended.stdout)
    except ValueError:
        return None
    return report if isinstance(report, dict) and report.get("nonce") == nonce else None


def _how(ended: Exec) -> str:
    """In words, for a cause."""
    if ended.timed_out:
        return f"it ran for more than {ended.seconds:.0f} s"
    if ended.signal is not None:
        return f"signal {ended.signal}{', out of memory' if ended.out_of_memory else ''}"
    return f"exit status {ended.exit_code}: {ended.stderr[-300:].decode(errors='replace')}"
