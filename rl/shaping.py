"""Soft overlong punishment (DAPO, arXiv:2503.14476): the reward falls before the sampling budget is spent.

Lengths are tokens that the policy sampled in the trajectory; what tools and users wrote is not its doing. Shaping comes
after everything that looks at the outcome itself: dynamic sampling, success, and the metrics of rewards.
"""

from __future__ import annotations

from palestra.envs.errors import ConfigError


def soft_overlong(length: int, longest: int, cache: int, factor: float = 1.0) -> float:
    """What is added to a reward: 0 up to `longest - cache` tokens, then down in a line to -factor at `longest`.

    Beyond `longest` it stays at -factor, so that one endless trajectory cannot outweigh its group. With `cache` 0 it is
    a step at `longest`. soft_overlong(90, 100, 20) is -0.5. Raises ConfigError for lengths that make no sense.
    """
    if longest < 1 or not 0 <= cache <= longest or not factor >= 0:
        raise ConfigError(
            f"soft overlong punishment over the last {cache} of {longest} tokens with factor {factor}: use a length of "
            "1 or more, a cache from 0 to that length, and a factor that is not negative"
        )
    if length >= longest:
        return -factor
    free = longest - cache
    return -factor * (length - free) / cache if length > free else 0.0
