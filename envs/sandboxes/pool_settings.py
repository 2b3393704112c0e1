"""What a pool of boxes is told, and what it counts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from palestra.envs.sandboxes.backends import BackendName
from palestra.envs.sandboxes.contract import Limits

CPUS = len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What a pool needs to know to be made on any machine; plain data."""

    run: str
    backend: BackendName = "auto"
    image: str | None = None  # of boxes whose spec names none; None: the backend's default
    runtime: str | None = None  # that boxes must have; None: the engine's own
    limits: Limits = field(default_factory=Limits)  # of boxes whose spec says nothing else
    max_boxes: int = 32
    creating: int = 4  # boxes being made at once: more only makes each of them slower
    creates_per_s: float = 40.0  # and begun a second, after a first `max_boxes`
    executing: int = 4 * CPUS  # commands that run at once in all boxes together
    acquire_s: float = 120.0
    box_life_s: float = 12 * 3600.0  # an older box is replaced when it comes back, long before it ends by itself
    demand_s: float = 120.0  # idle boxes beyond the most that were wanted at once in this time are removed
    upkeep_s: float = 20.0  # between looks at the demand
    reap_s: float = 300.0  # between looks for what dead owners left


@dataclass(slots=True)
class PoolCounts:
    """What the pool has done so far."""

    created: int = 0
    reused: int = 0  # acquires served by a box that an earlier episode had used
    replaced: int = 0  # boxes thrown away because they broke or could not be proved clean
    acquired: int = 0
    wait_s: float = 0.0  # in all, from asking for a box to having it
    longest_wait_s: float = 0.0
    forked: int = 0
    trimmed: int = 0  # idle boxes removed because nobody has wanted so many of late
