"""Whether a difference is real: success with an interval that knows that samples of one task are not independent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean of values in [0, 1] and its 95 % interval. Interval(0.5, 0.37, 0.63, tasks=50, samples=50)"""

    mean: float
    low: float
    high: float
    tasks: int
    samples: int

    def as_dict(self) -> dict[str, float | int]:
        """Plain values, for summary.json."""
        return asdict(self)

    def overlaps(self, other: Interval) -> bool:
        """Whether the two intervals share a point."""
        return self.low <= other.high and other.low <= self.high


def clustered_interval(values_by_task: Mapping[str, Sequence[float]]) -> Interval:
    """The mean over tasks, each counted once, with a Wilson interval at the effective number of samples.

    The effective number is what gives the cluster-robust variance of the mean: the number of samples when they are
    independent, the number of tasks when samples of one task always agree. It never has zero width, also when every
    episode succeeded (Wilson 1927; Miller, arXiv:2411.00640, for clustering). Raises ValueError without values.
    """
    means = np.array([np.mean(values) for values in values_by_task.values() if len(values)], dtype=np.float64)
    if not len(means):
        raise ValueError("no scored episode: there is nothing to estimate a success rate from")
    tasks, samples = len(means), sum(len(values) for values in values_by_task.values())
    mean = float(means.mean())
    effective = _effective_samples(means, mean, tasks, samples)
    low, high = _wilson(mean, effective)
    return Interval(mean, low, high, tasks, samples)


def pass_at(values_by_task: Mapping[str, Sequence[float]]) -> dict[int, float]:
    """k -> chance that at least one of k samples of a task is 1, the mean over tasks, for k = 1, 2, 4, ... up to the
    samples that every task has; unbiased (arXiv:2107.03374). {1: 0.25, 2: 0.4643, ...} for 2 of 8."""
    most = min((len(values) for values in values_by_task.values()), default=0)
    counts = [(len(values), sum(value >= 1.0 for value in values)) for values in values_by_task.values()]
    return {
        k: float(np.mean([1.0 - math.comb(n - right, k) / math.comb(n, k) for n, right in counts]))
        for k in (2**power for power in range(most.bit_length()))
    }


def _effective_samples(means: np.ndarray, mean: float, tasks: int, samples: int) -> float:
    if tasks < 2 or mean in (0.0, 1.0):
        return float(tasks)
    variance_of_mean = float(means.var(ddof=1)) / tasks
    if variance_of_mean == 0.0:
        return float(samples)
    return min(max(mean * (1 - mean) / variance_of_mean, 1.0), float(samples))


def _wilson(mean: float, count: float) -> tuple[float, float]:
    centre = (mean + Z95**2 / (2 * count)) / (1 + Z95**2 / count)
    half = Z95 / (1 + Z95**2 / count) * math.sqrt(mean * (1 - mean) / count + Z95**2 / (4 * count**2))
    return max(0.0, centre - half), min(1.0, centre + half)
