"""The loop: collect, credit, update, publish, until the last step. One loop, synchronous or not.

A step that is interrupted leaves nothing behind but records: what counts as trained is written to the ledger after the
update, and both belong to the newest checkpoint. Whatever came later is undone on resume and done again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from palestra.envs.errors import PalestraError
from palestra.rl.accounting import consumed
from palestra.rl.algorithms.base import Algorithm
from palestra.rl.counted import Counting
from palestra.rl.gap_watch import GapWatch
from palestra.rl.gather import Gathered, GatherSettings, gather
from palestra.rl.interrupt import unless_stopped
from palestra.rl.ledger import Ledger
from palestra.rl.one_thread import compute
from palestra.rl.publish import Publisher
from palestra.rl.retention import trim_folder
from palestra.rl.second_watch import SecondWatch
from palestra.rl.step import Learned, Learns, Practice, learn
from palestra.rl.step_metrics import Metrics, learning_metrics, publish_metrics, rollout_metrics
from palestra.rl.summary import Summary
from palestra.rollout.collector import Collector


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """When the loop does what."""

    steps: int
    save_every: int
    evaluate_every: int  # 0: never while training
    stop_without_signal: int
    keep_trajectory_bytes: int
    gather: GatherSettings
    counting: Counting
    practice: Practice


class Log(Protocol):
    """Where metrics go."""

    def log(self, step: int, values: Metrics) -> None: ...


@dataclass(slots=True)
class Loop:
    """What the loop works with. `save` writes a checkpoint of a step; `evaluate` plays the held-out tasks."""

    settings: LoopSettings
    collector: Collector
    learner: Learns
    algorithm: Algorithm
    publisher: Publisher
    ledger: Ledger
    log: Log
    summary: Summary
    gap: GapWatch
    save: Callable[[int], None]
    evaluate: Callable[[int], Awaitable[object]]
    trajectories: Path
    say: Callable[[str], None]
    stop: asyncio.Event
    second: SecondWatch = field(default_factory=SecondWatch)
    step: int = 0  # batches used so far, with or without an update
    groups_used: int = 0  # by them, dropped ones included

    async def run(self) -> bool:
        """Until the last step, or until `stop` is set. Returns whether it came to the end; always saved by then."""
        saved, quiet = self.step, 0
        while self.step < self.settings.steps and not self.stop.is_set():
            begun = time.monotonic()
            work = gather(self.collector, self.settings.gather, self.settings.counting)
            gathered = await unless_stopped(work, self.stop)
            if gathered is None:
                break
            metrics: Metrics = {"time/collect_s": time.monotonic() - begun}
            learned = await self._learn(gathered, metrics)
            quiet = 0 if learned.updates else quiet + 1
            self.log.log(self.step, metrics | {"time/step_s": time.monotonic() - begun})
            self._tell(metrics, time.monotonic() - begun)
            self.gap.note(learned.updates[: learned.fresh], self.summary)
            paid_more = metrics.get("rollout/second_gap")
            self.second.note(paid_more if isinstance(paid_more, float) else None)
            if self.step % self.settings.save_every == 0 or self.step == self.settings.steps:
                await compute(self.save, self.step)
                saved = self.step
                trim_folder(self.trajectories, self.settings.keep_trajectory_bytes)
            self._check_signal(quiet)
            if self._due_for_evaluation():
                await self.evaluate(self.step)
        if saved != self.step:
            await compute(self.save, self.step)
        return self.step >= self.settings.steps

    async def _learn(self, gathered: Gathered, metrics: Metrics) -> Learned:
        """Learn, publish once, write what was consumed. Without any signal nothing changes and no version is made."""
        settings = self.settings
        metrics |= rollout_metrics(gathered, settings.counting, self.collector.version)
        self.summary.count(gathered.groups)
        learned = await compute(
            learn, self.learner, self.algorithm, gathered.used, settings.counting, settings.practice
        )
        rows = consumed(gathered, learned, self.algorithm, settings.counting)
        metrics |= learning_metrics(learned, rows)
        if learned.updates:
            metrics |= publish_metrics(await self.publisher.publish(self.learner.step))
            self.collector.version = self.learner.step
        else:
            self.summary.steps_without_signal += 1
        self.step += 1
        self.groups_used += len(rows)
        self.ledger.train(self.step, rows)
        return learned

    def _check_signal(self, quiet: int) -> None:
        if quiet >= self.settings.stop_without_signal:
            raise PalestraError(
                f"{quiet} batches in a row had no signal: in every group all episodes had the same outcome. "
                "Use easier or harder tasks, a larger rollout.group_size, or a warm start"
            )

    def _due_for_evaluation(self) -> bool:
        every = self.settings.evaluate_every
        return bool(every) and self.step % every == 0 and self.step < self.settings.steps

    def _tell(self, metrics: Metrics, seconds: float) -> None:
        success, gap = metrics["rollout/success"], metrics.get("publish/gap")
        words = f"step {self.step}/{self.settings.steps}: success {_figure(success)}"
        if metrics["rollout/groups_filtered"]:
            words += f", {metrics['rollout/groups_filtered']} groups replaced"
        if gap is None:
            words += ", no signal in any group"
        else:
            words += f", {metrics['rollout/groups_without_signal']} groups without signal, gap {_figure(gap)}"
        self.say(f"{words}, {_figure(seconds)} s")


def _figure(value: float | int | str | None) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "-"
