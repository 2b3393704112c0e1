"""A taskset that breaks its contract at one place, as those that users write may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palestra.envs.environment import Environment, Verifier
from palestra.envs.sandboxes.contract import Boxes
from palestra.envs.types import Artefact, Message, Scored, Task, Verdict
from palestra.envs.verifiers.process import ProcessVerifier
from palestra.envs.verifiers.verdict import Bounds
from toy_environment import EvenLength, Speech, Speeches


def nothing() -> object:
    """Returns no taskset."""
    return object()


class Wilful:
    """`at` names the place."""

    def __init__(self, at: str = "") -> None:
        self._at = at

    def split(self, name: str) -> Sequence[Task]:
        _break(self._at, "split")
        return Speeches().split(name)

    def environment(self, task: Task, boxes: Boxes) -> Environment:
        _break(self._at, "environment")
        return WilfulSpeech(task, self._at)

    def verifier(self) -> Verifier:
        if self._at == "judge":
            return ProcessVerifier("wilful_environment:nowhere", bounds=Bounds(0, 1))
        return WilfulVerifier(self._at)

    def demonstration(self, task: Task, seed: int) -> tuple[str, ...]:
        return Speeches().demonstration(task, seed)


class WilfulSpeech(Speech):
    """The environment of it."""

    def __init__(self, task: Task, at: str) -> None:
        super().__init__(task)
        self._at = at

    async def start(self) -> tuple[Message, ...]:
        _break(self._at, "start")
        wrong: Any = "say something"
        return wrong if self._at == "start_text" else await super().start()  # type: ignore[no-any-return]

    async def export(self) -> Artefact:
        wrong: Any = None
        return wrong if self._at == "export_none" else await super().export()  # type: ignore[no-any-return]

    async def close(self) -> None:
        raise RuntimeError("broken in close, which must hide nothing")


class WilfulVerifier(EvenLength):
    """The verifier of it."""

    def __init__(self, at: str) -> None:
        self._at = at

    async def verify(self, task: Task, artefact: Artefact) -> Verdict:
        _break(self._at, "verify")
        wrong: Any = 1.0
        if self._at == "verify_nan":
            return Scored(float("nan"))
        return wrong if self._at == "verify_number" else await super().verify(task, artefact)  # type: ignore[no-any-return]


def _break(at: str, here: str) -> None:
    if at == here:
        raise RuntimeError(f"broken in {here}")
