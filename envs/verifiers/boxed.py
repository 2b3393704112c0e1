"""A judge that works in boxes which no policy ever enters, and that tells its own trouble from the policy's.

What a policy hands over is judged in a clean box of a pool for judging only. A machine that fails is tried again and
never a reward. An artefact that leaves several clean boxes without a verdict is compared with one that is known to be
good: where that one is judged, the machines are sound and the policy's own work is what cannot be judged.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from palestra.envs.errors import ConfigError, SandboxError, VerifierError
from palestra.envs.sandboxes.contract import Boxes, BoxSpec, Sandbox
from palestra.envs.types import Artefact, NoVerdict, Scored, Task, Verdict
from palestra.envs.verifiers.signs import flagged
from palestra.envs.verifiers.verdict import Bounds

NO_VERDICT = "no_verdict"  # the class of an artefact that keeps its judge from a verdict


class Examination(Protocol):
    """One judging of one artefact, in one clean box; also run again, in others."""

    @property
    def spec(self) -> BoxSpec:
        """The box it needs; its role is "verifier"."""
        ...

    @property
    def files(self) -> Mapping[str, bytes]:
        """What the box's workspace holds at the start: what is judged, never tests or expected values."""
        ...

    async def run(self, box: Sandbox, nonce: str) -> Verdict:
        """Stage the tests and judge. NoVerdict where the artefact may have kept it from one. Raises SandboxError.

        `nonce`: of this run; what comes back without it is no answer.
        """
        ...


class Examiner(Protocol):
    """Knows how the artefacts of a kind of task are judged."""

    def examination(self, task: Task, artefact: Artefact) -> Examination:
        """The judging of `artefact`. Never raises for what a policy put into it."""
        ...

    def control(self, task: Task) -> Examination:
        """The judging of an artefact that is known to be good: where machines are sound it ends with a score."""
        ...


@dataclass(frozen=True, slots=True)
class _Broken:
    """Nobody's artefact did this."""

    cause: str


class BoxVerifier:
    """Judges in lent boxes, see `JudgesInBoxes`. A verdict is final: nothing is run again to better it.

    `attempts`: how often a machine may fail, and how many clean boxes may end without a verdict before the control
    decides. `timeout_s`: of one examination; its own commands keep shorter limits.
    """

    def __init__(
        self,
        examiner: Examiner,
        *,
        bounds: Bounds | None = None,
        attempts: int = 3,
        timeout_s: float = 120.0,
    ) -> None:
        self._bounds = bounds or Bounds(0.0, 1.0)
        if not self._bounds.low <= 0 <= self._bounds.high:
            raise ConfigError(f"reward bounds {self._bounds}: what cannot be judged earns 0, so 0 must be within them")
        if attempts < 1:
            raise ConfigError(f"attempts is {attempts}; an artefact is judged at least once")
        self._examiner = examiner
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._boxes: Boxes | None = None

    def lend(self, boxes: Boxes) -> None:
        """See JudgesInBoxes."""
        self._boxes = boxes

    async def verify(self, task: Task, artefact: Artefact) -> Verdict:
        """See Verifier. Raises VerifierError when no boxes were lent."""
        if artefact.failure is not None:
            return Scored(0.0, flags=artefact.flags, failure=artefact.failure)
        verdict, without = await self._judged(self._examiner.examination(task, artefact), task.id)
        if without and isinstance(verdict, NoVerdict):
            # the artefact's doing, or that of the machines?
            control, _ = await self._judged(self._examiner.control(task), f"{task.id} (control)")
            if isinstance(control, Scored):
                verdict = Scored(0.0, flags=verdict.flags, failure=NO_VERDICT)
            else:
                verdict = replace(verdict, cause=f"{verdict.cause}; nor has the control: {control.cause}")
        return flagged(verdict, artefact.flags)

    async def close(self) -> None:
        """Nothing of it outlives a call; the boxes are their lender's."""

    async def _judged(self, examination: Examination, what: str) -> tuple[Verdict, bool]:
        """The verdict, and whether `attempts` sound boxes ended without one."""
        broken: list[str] = []
        silent: list[NoVerdict] = []
        while len(broken) < self._attempts and len(silent) < self._attempts:
            outcome = await self._attempt(examination, what)
            if isinstance(outcome, _Broken):
                broken.append(outcome.cause)
            elif isinstance(outcome, NoVerdict):
                silent.append(outcome)
            else:
                return flagged(outcome, _flags(silent)), False
        flags = tuple(dict.fromkeys(_flags(silent)))
        if len(silent) == self._attempts:
            return NoVerdict(f"{silent[-1].cause} ({len(silent)} clean boxes)", flags), True
        return NoVerdict(f"{broken[-1]} ({len(broken)} attempts)", flags), False

    async def _attempt(self, examination: Examination, what: str) -> Verdict | _Broken:
        """One run in one clean box."""
        if self._boxes is None:
            raise VerifierError("this verifier judges in boxes and was lent none: call `lend` before `verify`")
        try:
            box = await self._boxes.acquire(examination.spec, examination.files, episode=f"judging {what}")
        except SandboxError as error:
            return _Broken(f"no box to judge in: {error}")
        try:
            async with asyncio.timeout(self._timeout_s):
                verdict = await examination.run(box, secrets.token_hex(16))
        except SandboxError as error:
            return _Broken(str(error))
        except TimeoutError:
            return _Broken(f"an examination took more than {self._timeout_s:g} s")
        finally:
            await self._boxes.release(box)
        if isinstance(verdict, Scored) and not self._bounds.low <= verdict.value <= self._bounds.high:
            return NoVerdict(f"out of bounds: {verdict.value} is not within {self._bounds}", verdict.flags)
        return verdict


def _flags(verdicts: Iterable[Verdict]) -> Iterable[str]:
    return (flag for verdict in verdicts for flag in verdict.flags)
