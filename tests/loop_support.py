"""The loop of training by itself, with whatever stands around it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from palestra.rl.algorithms.base import Algorithm
from palestra.rl.counted import Counting
from palestra.rl.gap_watch import GapWatch
from palestra.rl.gather import GatherSettings
from palestra.rl.ledger import Ledger
from palestra.rl.step import Learns, Practice
from palestra.rl.step_metrics import Metrics
from palestra.rl.summary import Summary
from palestra.rl.train import Loop, LoopSettings


@dataclass
class Around:
    """Keeps what the loop logs, publishes and saves; sets `stop` after the step `stop_at`."""

    stop_at: int | None = None
    lines: list[Metrics] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    saved: list[tuple[int, int]] = field(default_factory=list)  # step, groups used by then
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def publish(self, version: int) -> SimpleNamespace:
        self.published.append(version)
        return SimpleNamespace(gap=0.0, gap_mean=0.0, moved=1.0, matched_modules=1, digest="d", seconds=0.0)

    async def evaluate(self, step: int) -> None: ...

    def log(self, step: int, values: Metrics) -> None:
        self.lines.append(values)
        if step == self.stop_at:
            self.stop.set()


def loop_around(
    around: Around,
    collector: Any,
    learner: Learns,
    algorithm: Algorithm,
    ledger: Ledger,
    folder: Path,
    *,
    steps: int = 1,
    groups: int = 1,
    practice: Practice | None = None,
    step: int = 0,
    groups_used: int = 0,
) -> Loop:
    """A loop of `steps` steps of `groups` groups, after `step` that have used `groups_used`; saves only at the end."""
    publisher: Any = around
    loop = Loop(
        settings=LoopSettings(
            steps, 1 << 20, 0, 1 << 20, 1 << 30, GatherSettings(groups), Counting(), practice or Practice(64)
        ),
        collector=collector,
        learner=learner,
        algorithm=algorithm,
        publisher=publisher,
        ledger=ledger,
        log=around,
        summary=Summary("e", "s", 0),
        gap=GapWatch(on_policy=False),
        save=lambda done: around.saved.append((done, loop.groups_used)),
        evaluate=around.evaluate,
        trajectories=folder,
        say=lambda line: None,
        stop=around.stop,
        step=step,
        groups_used=groups_used,
    )
    return loop
