"""A second, different verifier on a sample of episodes: what a policy has learned to fool, two judges seldom share.

Its verdicts are recorded and never a reward. Which episodes it sees follows from their seeds, so no policy can tell.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from palestra.envs.environment import Taskset, Verifier
from palestra.envs.errors import ConfigError
from palestra.envs.types import NoVerdict, Task
from palestra.rollout.guard import GuardedVerifier
from palestra.rollout.seeds import derive_seed
from palestra.rollout.types import Trajectory

EXPECTED = "expected 'package.module:function', a function of the taskset that returns a verifier"
REWARD, CAUSE = "second_reward", "second_cause"  # in the facts of a trajectory that it was asked about


@dataclass(frozen=True, slots=True)
class SecondSettings:
    """Which verifier, and how often it is asked. SecondSettings("my_project.judges:held_out", 0.1)"""

    name: str
    share: float


@dataclass(frozen=True, slots=True)
class SecondOpinion:
    """The second verifier at work. `timeout_s`: of one verdict."""

    verifier: Verifier
    share: float
    timeout_s: float

    async def facts(self, task: Task, trajectory: Trajectory) -> dict[str, str | float]:
        """What it says of the episode, for the record; nothing where it is not asked. Never raises for a bad judge."""
        drawn = derive_seed(trajectory.seed, "second verifier") < self.share * 2**31
        if not drawn or not trajectory.valid or trajectory.artefact is None:
            return {}
        try:
            judging = GuardedVerifier(self.verifier).verify(task, trajectory.artefact)
            verdict = await asyncio.wait_for(judging, self.timeout_s)
        except TimeoutError:
            return {CAUSE: f"no answer within {self.timeout_s:g} s"}
        except Exception as error:  # noqa: BLE001 - written by users
            return {CAUSE: f"{type(error).__name__}: {error}"[:500]}
        if isinstance(verdict, NoVerdict):
            return {CAUSE: verdict.cause[:500]}
        return {REWARD: verdict.value}


def load_second(name: str, taskset: Taskset) -> Verifier:
    """What the function `name` ("package.module:function") makes of the taskset. Raises ConfigError."""
    module, _, attribute = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), attribute)
        verifier: Verifier = make(taskset)
    except Exception as error:  # written by users
        raise ConfigError(
            f"environment.second_verifier {name!r}: {type(error).__name__}: {error}; {EXPECTED}"
        ) from error
    if not callable(getattr(verifier, "verify", None)) or not callable(getattr(verifier, "close", None)):
        raise ConfigError(f"environment.second_verifier {name!r} gives a {type(verifier).__name__}; {EXPECTED}")
    return verifier


@dataclass(frozen=True, slots=True)
class Gap:
    """How much more the first verifier pays than the second, on the episodes that both have judged."""

    episodes: int
    first: float
    second: float

    @property
    def value(self) -> float:
        """Mean reward of the first less that of the second."""
        return self.first - self.second


def gap(trajectories: Sequence[Trajectory]) -> Gap | None:
    """Over the episodes with a reward from both; None where there is none."""
    both = [(t.reward, float(t.facts[REWARD])) for t in trajectories if t.reward is not None and REWARD in t.facts]
    if not both:
        return None
    first, second = (sum(values) / len(both) for values in zip(*both, strict=True))
    return Gap(len(both), first, second)
