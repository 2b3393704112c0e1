"""What counts as a verdict: one finite number within declared bounds, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from palestra.envs.errors import ConfigError
from palestra.envs.types import NoVerdict, Scored, Verdict

REWARD = "reward"
"""The key of the reward where a judge returns an object; every other key is for logs and is never added to it."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The closed range that a judge declares for its rewards. Bounds(0.0, 1.0)"""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ConfigError(f"reward bounds are {self.low} and {self.high}; use two finite numbers, the lower first")


def read_verdict(returned: object, bounds: Bounds) -> Verdict:
    """A judge's return value as a verdict: a number, or an object of numbers with the key "reward".

    Whatever is no verdict is NoVerdict with its own cause: nothing, no number (a boolean and a text are none), no
    finite number, out of bounds. Nothing is clipped, converted or filled in.
    """
    if returned is None:
        return NoVerdict("the judge returned nothing")
    if not isinstance(returned, Mapping):
        returned = {REWARD: returned}
    if REWARD not in returned:
        return NoVerdict(f"not a number: an object without the key {REWARD!r}")
    parts: dict[str, float] = {}
    for name, value in returned.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            return NoVerdict(f"not a number: {str(name)[:40]} is {repr(value)[:40]}")
        try:
            parts[str(name)] = float(value)
        except OverflowError:
            return NoVerdict(f"not finite: {str(name)[:40]} is an integer beyond double precision")
        if not math.isfinite(parts[str(name)]):
            return NoVerdict(f"not finite: {str(name)[:40]} is {value}")
    reward = parts.pop(REWARD)
    if not bounds.low <= reward <= bounds.high:
        return NoVerdict(f"out of bounds: {reward} is not within [{bounds.low}, {bounds.high}]")
    return Scored(reward, parts)
