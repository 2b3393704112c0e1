"""The collector: whole groups in order, on the disk before use, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from episodes import FORMAT, RENDERER, CountedBoxes, Judge, Sums, engine
from palestra.envs.errors import InfrastructureError, IntegrityError, PalestraError
from palestra.envs.types import NoVerdict, Scored
from palestra.rollout import record
from palestra.rollout.budgets import Budgets
from palestra.rollout.collector import Collector, CollectorSettings
from palestra.rollout.play import Stage, play
from palestra.rollout.player import EpisodeRequest
from palestra.rollout.types import Trajectory


class Notebook:
    """A ledger in memory."""

    def __init__(self) -> None:
        self.issued: list[int] = []
        self.finished: list[int] = []

    def next_position(self) -> int:
        return len(self.issued)

    def issue(self, position: int, group_id: str, task_id: str, version: int) -> None:
        self.issued.append(position)

    def finish(self, position: int) -> None:
        self.finished.append(position)


class Plays:
    """Plays Sums with a scripted engine, after `before` has been awaited for each request."""

    def __init__(self, taskset: Sums, before: Callable[[EpisodeRequest], Awaitable[None]] | None = None) -> None:
        self.taskset, self.before, self.boxes = taskset, before, CountedBoxes()
        self.requests: list[EpisodeRequest] = []
        self.cancelled = 0

    async def run(self, request: EpisodeRequest) -> Trajectory:
        self.requests.append(request)
        try:
            if self.before is not None:
                await self.before(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        task = self.taskset.split(request.split)[request.index]
        stage = Stage(engine(list(self.taskset.demonstration(task, 0))), RENDERER, FORMAT, Budgets())
        world = self.taskset.environment(task, self.boxes)
        return await play(task, world, self.taskset.judge, stage, request.ticket)


def stored_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def collector(plays: Plays, folder: Path, **settings: object) -> tuple[Collector, Notebook]:
    book = Notebook()
    values: dict[str, object] = {"group_size": 2, "groups_per_step": 3, "max_groups": 100, "seed": 5} | settings
    made = Collector(
        plays,
        book,
        lambda position: (position % 10, f"train-{position % 10}"),
        folder,
        CollectorSettings(**values),  # type: ignore[arg-type]
    )
    return made, book


def test_groups_come_whole_in_order_and_are_on_the_disk(tmp_path: Path) -> None:
    rng = random.Random(0)

    async def wait(request: EpisodeRequest) -> None:
        await asyncio.sleep(rng.random() / 50)

    async def body() -> None:
        made, book = collector(Plays(Sums(), wait), tmp_path)
        for step in range(3):
            groups = await made.take(3)
            assert [group.id for group in groups] == [f"g{3 * step + i}" for i in range(3)]
            assert all(len(group.trajectories) == 2 for group in groups)
            assert all(t.reward == 1.0 and t.task_id == group.task_id for group in groups for t in group.trajectories)
        stored = [t.id for file in stored_files(tmp_path) for t in record.read(file)]
        assert len(stored) == len(set(stored)) == 18
        assert sorted(book.finished) == list(range(9))

    asyncio.run(body())


def test_on_policy_nothing_is_begun_before_it_is_asked_for(tmp_path: Path) -> None:
    async def body() -> None:
        made, book = collector(Plays(Sums()), tmp_path)
        await made.take(3)
        await asyncio.sleep(0.05)
        assert book.issued == [0, 1, 2]

    asyncio.run(body())


def test_with_a_lag_generation_runs_ahead_by_no_more_than_it(tmp_path: Path) -> None:
    async def body() -> None:
        made, book = collector(Plays(Sums()), tmp_path, max_lag=2, max_groups=12)
        for step in range(4):
            await made.take(3)
            assert len(book.issued) == min(3 * (step + 3), 12)
        await made.close()

    asyncio.run(body())


def test_slow_tasks_are_trained_as_often_as_fast_ones(tmp_path: Path) -> None:
    """Half of the tasks take ten times as long; nothing finished is thrown away for its age."""

    async def wait(request: EpisodeRequest) -> None:
        await asyncio.sleep(0.03 if request.index % 2 else 0.003)

    async def body() -> None:
        made, _ = collector(Plays(Sums(), wait), tmp_path, max_lag=2)
        taken = [group for _ in range(10) for group in await made.take(3)]
        await made.close()
        slow = sum(int(group.task_id.split("-")[1]) % 2 for group in taken)
        assert slow == len(taken) / 2

    asyncio.run(body())


def test_seeds_are_distinct_and_the_same_however_the_work_is_split(tmp_path: Path) -> None:
    async def seeds(**settings: object) -> list[int]:
        plays = Plays(Sums())
        made, _ = collector(plays, tmp_path, **settings)
        for _ in range(2):
            await made.take(3)
        await made.close()
        ordered = sorted((r for r in plays.requests), key=lambda r: r.ticket.trajectory_id)
        return [r.ticket.seed for r in ordered][:12]

    one, two = asyncio.run(seeds()), asyncio.run(seeds(max_lag=1, max_groups=6))
    assert len(set(one)) == 12
    assert one == two
    assert not set(one) & set(asyncio.run(seeds(seed=6)))


def test_a_player_that_dies_costs_one_more_try(tmp_path: Path) -> None:
    died: set[str] = set()

    async def die_once(request: EpisodeRequest) -> None:
        name = request.ticket.trajectory_id.rstrip("r")
        if name.startswith("g1-0") and name not in died:
            died.add(name)
            raise InfrastructureError("player 0 on node a: killed")

    async def body() -> None:
        made, _ = collector(Plays(Sums(), die_once), tmp_path)
        groups = await made.take(3)
        assert all(t.valid for group in groups for t in group.trajectories)
        assert died

    asyncio.run(body())


def test_an_episode_that_is_lost_leaves_the_statistics_and_is_named(tmp_path: Path) -> None:
    async def lose(request: EpisodeRequest) -> None:
        if request.ticket.trajectory_id.startswith("g1-0"):
            raise InfrastructureError("node b burned down")

    async def body() -> None:
        made, _ = collector(Plays(Sums(), lose), tmp_path)
        groups = await made.take(3)
        (lost,) = [t for group in groups for t in group.trajectories if not t.valid]
        assert lost.error == "node b burned down"
        assert lost.reward is None
        assert lost.group_id == "g1"

    asyncio.run(body())


def test_too_many_invalid_episodes_stop_the_run_with_the_first_cause(tmp_path: Path) -> None:
    judge = Judge(lambda task, artefact: NoVerdict("the judge's disk is full"))

    async def body() -> None:
        made, _ = collector(Plays(Sums(judge=judge)), tmp_path)
        with pytest.raises(PalestraError, match=r"6 of 6 episodes .* the judge's disk is full"):
            await made.take(3)

    asyncio.run(body())


def test_groups_that_replace_others_are_the_next_ones_and_count_with_their_step(tmp_path: Path) -> None:
    async def lose(request: EpisodeRequest) -> None:
        if request.ticket.trajectory_id.startswith("g3-"):
            raise InfrastructureError("node b burned down")

    async def body() -> None:
        made, book = collector(Plays(Sums(), lose), tmp_path, max_groups=6)
        assert [group.id for group in await made.take(3)] == ["g0", "g1", "g2"]
        # all of its episodes are lost, but of the step's eight they are a quarter
        assert [group.id for group in await made.take(1, replacing=True)] == ["g3"]
        assert [len(await made.take(3)) for _ in range(2)] == [3, 0]  # the run has one group more, and no further
        assert book.issued == list(range(7))

    asyncio.run(body())


def test_a_fatal_error_cancels_the_siblings_and_waits_for_them(tmp_path: Path) -> None:
    async def break_one(request: EpisodeRequest) -> None:
        if request.ticket.trajectory_id.startswith("g0-1"):
            await asyncio.sleep(0.01)
            raise IntegrityError("log-probabilities disagree")
        await asyncio.sleep(30)

    async def body() -> None:
        plays = Plays(Sums(), break_one)
        made, _ = collector(plays, tmp_path)
        with pytest.raises(IntegrityError, match="log-probabilities disagree"):
            await asyncio.wait_for(made.take(3), 5)
        assert plays.cancelled == 5
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(body())


def test_an_episode_without_end_is_given_up(tmp_path: Path) -> None:
    async def stall(request: EpisodeRequest) -> None:
        if request.ticket.trajectory_id.startswith("g2-1"):
            await asyncio.sleep(600)

    async def body() -> None:
        made, _ = collector(Plays(Sums(), stall), tmp_path, episode_s=0.2)
        groups = await asyncio.wait_for(made.take(3), 5)
        (lost,) = [t for group in groups for t in group.trajectories if not t.valid]
        assert "did not end within 0.2 s" in (lost.error or "")

    asyncio.run(body())


def test_the_end_of_the_run_leaves_nothing_behind(tmp_path: Path) -> None:
    async def body() -> None:
        made, book = collector(Plays(Sums()), tmp_path, max_lag=1, max_groups=7)
        sizes = [len(await made.take(3)) for _ in range(4)]
        assert sizes == [3, 3, 1, 0]
        assert len(book.issued) == 7

    asyncio.run(body())


def test_answers_go_with_their_questions_whatever_the_order(tmp_path: Path) -> None:
    """Each task's truth is its own number and the policy gives it: any mix-up of tasks and rewards shows."""
    judged: list[str] = []

    def judge(task: object, artefact: object) -> Scored:
        judged.append(task.id)  # type: ignore[attr-defined]
        return Scored(float(artefact.answer["final"]["value"] == task.truth))  # type: ignore[attr-defined]

    rng = random.Random(1)

    async def wait(request: EpisodeRequest) -> None:
        await asyncio.sleep(rng.random() / 100)

    async def body() -> None:
        made, _ = collector(Plays(Sums(judge=Judge(judge)), wait), tmp_path)
        groups = [group for _ in range(3) for group in await made.take(3)]
        assert all(t.reward == 1.0 for group in groups for t in group.trajectories)

    asyncio.run(body())
