"""What signs of tampering do to a verdict: that is for the settings of a run to say, not for a verifier."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from palestra.envs.environment import Verifier
from palestra.envs.types import Artefact, NoVerdict, Task, Verdict

OnViolation = Literal["zero", "mask", "honest"]


def settled(verdict: Verdict, rule: OnViolation) -> Verdict:
    """The verdict that counts. Without a flag it is the verifier's own; with one it is worth nothing ("zero"), is none
    ("mask"), or is still the verifier's own ("honest"). The flags stay on it."""
    if not verdict.flags or isinstance(verdict, NoVerdict) or rule == "honest":
        return verdict
    if rule == "mask":
        return NoVerdict(f"integrity violation: {', '.join(verdict.flags)}", verdict.flags)
    return replace(verdict, value=min(0.0, verdict.value))


def is_masked(verdict: Verdict, rule: OnViolation) -> bool:
    """Whether the rule took the verdict away. Then nothing has failed, and the episode is not tried again."""
    return rule == "mask" and isinstance(verdict, NoVerdict) and verdict.cause.startswith("integrity violation")


class SettlingVerifier:
    """A verifier's verdicts as the rule makes them."""

    def __init__(self, verifier: Verifier, rule: OnViolation) -> None:
        self._verifier = verifier
        self._rule = rule

    async def verify(self, task: Task, artefact: Artefact) -> Verdict:
        """The verdict that counts. Signs that were found while the artefact was taken out count, whoever judges it."""
        verdict = await self._verifier.verify(task, artefact)
        flags = tuple(dict.fromkeys((*artefact.flags, *verdict.flags)))
        return settled(replace(verdict, flags=flags), self._rule)

    async def close(self) -> None:
        """As the verifier does."""
        await self._verifier.close()
