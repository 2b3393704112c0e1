"""Keeps many episodes going and hands out finished groups, oldest first.

How far generation may run ahead of training is one number. A group is issued only while it would still be fresh
enough when its turn comes, so nothing finished is ever thrown away and slow tasks are not starved.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from palestra.envs.errors import InfrastructureError, PalestraError
from palestra.envs.types import NoVerdict
from palestra.rollout import artefacts, record
from palestra.rollout.play import Ticket
from palestra.rollout.player import EpisodeRequest
from palestra.rollout.seeds import derive_seed
from palestra.rollout.types import Group, TerminatedBy, Trajectory

log = logging.getLogger(__name__)


class Plays(Protocol):
    """Where episodes are played: one player, or a pool of them."""

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Play one episode. Raises IntegrityError to stop the run, InfrastructureError when its machine died."""
        ...


class Book(Protocol):
    """The ledger as the collector sees it."""

    def next_position(self) -> int: ...

    def issue(self, position: int, group_id: str, task_id: str, version: int) -> None: ...

    def finish(self, position: int) -> None: ...


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """How groups are made."""

    group_size: int
    groups_per_step: int
    max_groups: int  # of the whole run, not counting replaced ones: nothing is issued beyond it
    max_lag: int = 0  # steps that generation may run ahead; 0 is on-policy
    temperature: float = 1.0
    seed: int = 0
    max_attempts: int = 2  # tries of an episode whose machine failed
    max_invalid_fraction: float = 0.5  # of a step's episodes; above it the run stops with the first cause
    episode_s: float = 900.0  # the longest that one episode may take, all tries and waiting for a box included


@dataclass(frozen=True, slots=True)
class Issued:
    """A group on its way."""

    position: int
    task_index: int
    group_id: str


class Collector:
    """The driver's side of generation."""

    def __init__(
        self,
        players: Plays,
        book: Book,
        task_at: Callable[[int], tuple[int, str]],
        folder: Path,
        settings: CollectorSettings,
        *,
        already_consumed: int = 0,
        already_replaced: int = 0,
        life: int = 1,
    ) -> None:
        """`task_at` gives the task's index and id at a position; `already_consumed` groups came before this life, of
        which `already_replaced` were taken in place of others."""
        self._players, self._book, self._task_at, self._settings = players, book, task_at, settings
        self._folder, self._life = folder, life
        self._running: deque[tuple[Issued, asyncio.Task[Group]]] = deque()
        self._issued = self._consumed = already_consumed
        self._limit = settings.max_groups + already_replaced
        self._of_step: list[Group] = []  # taken since the last groups that replaced none
        self.version = 0
        self.bytes_written = 0

    async def take(self, count: int, *, replacing: bool = False) -> list[Group]:
        """The `count` oldest groups, finished and on the disk. With a lag, newer ones go on behind the caller.

        They come in the order of their positions, never in that of finishing: who is fast is not trained more.
        `replacing`: they stand in for as many that the caller has dropped, so the run plays as many more.

        Raises the first IntegrityError of an episode, and InfrastructureError when too many episodes are invalid or
        a group is not finished in time; the other episodes are cancelled and closed first.
        """
        settings = self._settings
        self._consumed += count
        self._limit += count if replacing else 0
        self._admit(min(self._consumed + settings.max_lag * settings.groups_per_step, self._limit))
        groups: list[Group] = []
        try:
            while len(groups) < count and self._running:
                issued, task = self._running[0]
                groups.append(await self._finished(issued, task))
                self._running.popleft()
        except BaseException:
            await self.close()
            raise
        self._of_step = [*(self._of_step if replacing else ()), *groups]
        self._check_validity([t for group in self._of_step for t in group.trajectories], "step")
        return groups

    async def evaluate(
        self, split: str, tasks: Mapping[int, str], samples: int, *, temperature: float, seed: int, file: Path
    ) -> list[Trajectory]:
        """Play tasks of `split` (place -> id), each `samples` times, all at once. Invalid episodes are in the list too.

        Raises PalestraError when too many of them are: a rate of what is left would say nothing.
        """
        requests = [
            EpisodeRequest(
                split,
                index,
                Ticket(
                    f"eval-{self.version}-{split}{index}-{sample}",
                    f"eval-{self.version}-{split}{index}",
                    derive_seed(seed, "eval", split, index, sample),
                    temperature,
                ),
                self._settings.max_attempts,
            )
            for index in tasks
            for sample in range(samples)
        ]
        trajectories = await self._all([self._episode(request, tasks[request.index]) for request in requests])
        trajectories = await self._written(file, trajectories)
        self._check_validity(trajectories, "evaluation")
        if not any(t.valid for t in trajectories):
            raise PalestraError(f"no episode of this evaluation has a verdict. First cause: {_cause(trajectories[0])}")
        return trajectories

    async def close(self) -> None:
        """Cancel what is being played and wait until it has been given back."""
        tasks = [task for _, task in self._running]
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _admit(self, upto: int) -> None:
        """Issue groups until `upto` of the whole run have been."""
        while self._issued < upto:
            position = self._book.next_position()
            index, task_id = self._task_at(position)
            issued = Issued(position, index, f"g{position}")
            self._book.issue(position, issued.group_id, task_id, self.version)
            self._running.append((issued, asyncio.create_task(self._group(issued, task_id))))
            self._issued += 1

    async def _group(self, issued: Issued, task_id: str) -> Group:
        settings = self._settings
        requests = [
            EpisodeRequest(
                "train",
                issued.task_index,
                Ticket(
                    f"{issued.group_id}-{member}-l{self._life}",
                    issued.group_id,
                    # by position and member alone: the same however the work is split, and after a resume
                    derive_seed(settings.seed, "episode", issued.position, member),
                    settings.temperature,
                ),
                settings.max_attempts,
            )
            for member in range(settings.group_size)
        ]
        trajectories = await self._all([self._episode(request, task_id) for request in requests])
        trajectories = await self._written(self._file(issued), trajectories)
        self._book.finish(issued.position)
        return Group(issued.group_id, task_id, tuple(trajectories))

    async def _written(self, file: Path, trajectories: list[Trajectory]) -> list[Trajectory]:
        """The episodes on the disk: first what they handed over, then their records, which name it."""
        linked, kept = await asyncio.to_thread(artefacts.keep, file, trajectories)
        self.bytes_written += kept + await asyncio.to_thread(record.append, file, linked)
        return linked

    async def _episode(self, request: EpisodeRequest, task_id: str) -> Trajectory:
        """One episode within its deadline. A player that died costs one try more, then the episode is invalid."""
        cause = ""
        for attempt in range(2):
            ticket = replace(request.ticket, trajectory_id=request.ticket.trajectory_id + ("" if not attempt else "r"))
            try:
                work = self._players.run(replace(request, ticket=ticket))
                return await asyncio.wait_for(work, self._settings.episode_s)
            except InfrastructureError as error:
                cause = str(error)
            except TimeoutError:
                cause = f"the episode did not end within {self._settings.episode_s:g} s"
            log.warning("%s: %s", ticket.trajectory_id, cause)
        return _lost(request.ticket, task_id, cause)

    async def _finished(self, issued: Issued, task: asyncio.Task[Group]) -> Group:
        limit = self._settings.episode_s * 2 + 60
        done, _ = await asyncio.wait({task}, timeout=limit)
        if not done:
            raise InfrastructureError(
                f"waited {limit:g} s for group {issued.group_id} (task {issued.task_index}); the collector is stalled"
            )
        return task.result()

    async def _all(self, episodes: Sequence[object]) -> list[Trajectory]:
        """Every episode's trajectory. The first fatal error cancels the others and waits for them to be closed."""
        tasks = [asyncio.ensure_future(episode) for episode in episodes]  # type: ignore[call-overload]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def _check_validity(self, episodes: Sequence[Trajectory], what: str) -> None:
        invalid = [t for t in episodes if not t.valid]
        if len(invalid) > self._settings.max_invalid_fraction * len(episodes):
            raise PalestraError(
                f"{len(invalid)} of {len(episodes)} episodes of this {what} have no verdict; the run stops. "
                f"First cause: {_cause(invalid[0])}"
            )

    def _file(self, issued: Issued) -> Path:
        """One file for each step's worth of positions and life of the run."""
        return self._folder / f"{issued.position // self._settings.groups_per_step:06d}-l{self._life}.jsonl"


def _cause(trajectory: Trajectory) -> str:
    """Why an episode has no verdict, and which it was."""
    error = trajectory.error or "none was recorded"
    known = trajectory.id in error
    return error if known else f"{error} (task {trajectory.task_id}, trajectory {trajectory.id})"


def _lost(ticket: Ticket, task_id: str, cause: str) -> Trajectory:
    """An episode of which nothing came back."""
    return Trajectory(
        id=ticket.trajectory_id,
        task_id=task_id,
        group_id=ticket.group_id,
        seed=ticket.seed,
        messages=(),
        turns=(),
        samples=(),
        terminated_by=TerminatedBy.INFRASTRUCTURE,
        verdict=NoVerdict(cause),
        error=cause,
    )
