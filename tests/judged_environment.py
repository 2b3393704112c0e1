"""The speeches of `toy_environment`, judged in a box: 1 for an even number of bytes, counted there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from palestra.envs.environment import Taskset, Verifier
from palestra.envs.sandboxes.contract import BoxSpec, Sandbox
from palestra.envs.types import Artefact, NoVerdict, Scored, Task, Verdict
from palestra.envs.verifiers.boxed import BoxVerifier, Examination
from toy_environment import Speeches


@dataclass(frozen=True)
class Count:
    """Flags whoever says "cheat"."""

    said: str
    spec: BoxSpec = field(default_factory=lambda: BoxSpec(role="verifier"))
    files: Mapping[str, bytes] = field(default_factory=dict)

    async def run(self, box: Sandbox, nonce: str) -> Verdict:
        counted = await box.run(["wc", "-c"], stdin=self.said.encode(), timeout_s=10)
        if not counted.ok:
            return NoVerdict("wc failed")
        flags = ("eval_detect",) if "cheat" in self.said else ()
        return Scored(float(int(counted.stdout) % 2 == 0), flags=flags)


class Counts:
    """The examiner."""

    def examination(self, task: Task, artefact: Artefact) -> Examination:
        return Count(str(artefact.answer))

    def control(self, task: Task) -> Examination:
        return Count("ok")


@dataclass(frozen=True)
class JudgedSpeeches(Speeches):
    """The taskset."""

    def verifier(self) -> Verifier:
        return BoxVerifier(Counts(), timeout_s=10.0)


def second(taskset: Taskset) -> Verifier:
    """A second verifier that needs boxes, too."""
    return taskset.verifier()
