"""Many ranks with the face of one learner. Each call goes to all of them; what rank 0 answers is the answer.

The ranks are processes of a crew (`rollout/crew.py`). A rank that dies or does not answer in time ends all of them and
the run with InfrastructureError; the run goes on from its last checkpoint, on as many ranks as it is then given.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from palestra.rl.batch import Batch
from palestra.rl.config import Config
from palestra.rl.learner import HasObjective, Learner, LearnerSettings, UpdateStats
from palestra.rl.learner_plan import LearnerPlan
from palestra.rl.learner_rank import Call, LearnerRank, Meet
from palestra.rl.learner_state import LearnerState
from palestra.rl.ranks import Ranks
from palestra.rollout.adapters import Adapter
from palestra.rollout.crew import Crew, CrewLimits
from palestra.rollout.nodes import Need
from palestra.rollout.types import Float32

if TYPE_CHECKING:
    from palestra.rollout.cluster import Cluster

T = TypeVar("T")


class LearnerGroup:
    """The learner of several ranks. Batches are packed with `ranks.size`. One caller at a time."""

    def __init__(self, crew: Crew[Meet | Call, object], plan: LearnerPlan) -> None:
        self.step = 0
        self.ranks = Ranks(0, len(crew.members))
        self._crew = crew
        self._plan = plan
        # a loop of its own, so that a call may come from any thread, one with a running loop among them
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="learner group", daemon=True)

    @property
    def settings(self) -> LearnerSettings:
        """What is trained, and how."""
        return self._plan.settings

    def start(self) -> None:
        """Begin the processes, have them meet, and make their learners. Raises ConfigError, InfrastructureError."""
        self._thread.start()
        said = self._do(self._crew.start())
        self._do(self._crew.all(Meet(self._crew.members[0].address, int(cast(int, said[0])))))

    def close(self) -> None:
        """End the processes."""
        self._do(self._crew.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    def update(
        self, batch: Batch, algorithm: HasObjective, old: Float32 | None = None, version: int | None = None
    ) -> UpdateStats:
        """As Learner.update."""
        stats: UpdateStats = self._ask("update", batch, algorithm, old, version)
        self.step = stats.step
        return stats

    def adapter(self) -> Adapter:
        """As Learner.adapter."""
        adapter: Adapter = self._ask("adapter")
        return adapter

    def score(self, ids: Sequence[int]) -> Float32:
        """As Learner.score."""
        logprobs: Float32 = self._ask("score", list(ids))
        return logprobs

    def sampled_logprobs(self, batch: Batch) -> Float32:
        """As Learner.sampled_logprobs."""
        logprobs: Float32 = self._ask("sampled_logprobs", batch)
        return logprobs

    def reference_logprobs(self, batch: Batch) -> Float32:
        """As Learner.reference_logprobs."""
        logprobs: Float32 = self._ask("reference_logprobs", batch)
        return logprobs

    def values(self, batch: Batch) -> Float32:
        """As Learner.values."""
        values: Float32 = self._ask("values", batch)
        return values

    def state(self) -> LearnerState:
        """As Learner.state: whole, in this process."""
        state: LearnerState = self._ask("state")
        return state

    def load_state(self, state: LearnerState) -> None:
        """As Learner.load_state; the state may be of any number of ranks."""
        self._ask("load_state", state)
        self.step = state.step

    def save_model(self, folder: str) -> None:
        """As Learner.save_model. Needs memory for the model in this process."""
        alone = self._plan.alone().make()
        alone.load_state(self.state())
        alone.save_model(folder)

    def _ask(self, method: str, *arguments: object) -> Any:
        return self._do(self._crew.all(Call(method, arguments)))[0]

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


AnyLearner = Learner | LearnerGroup


@asynccontextmanager
async def open_learner(plan: LearnerPlan, config: Config, cluster: Cluster | None) -> AsyncIterator[AnyLearner]:
    """The learner of a run: in this process, or in `cluster.learner_ranks` Ray actors that end with the block."""
    size, limit_s = config.cluster.learner_ranks, config.cluster.learner_call_s
    if size == 1 or cluster is None:
        yield plan.make()
        return
    need = Need.threads(plan.threads)
    if torch.cuda.is_available():
        need = Need(cpus=1, gpus=1)
    place = await asyncio.to_thread(partial(cluster.place, size, need, close=True))
    members = [
        place.member("learner rank", rank, partial(LearnerRank, plan, rank, size, limit_s)) for rank in range(size)
    ]
    group = LearnerGroup(Crew(members, CrewLimits(call_s=limit_s)), plan)
    try:
        await asyncio.to_thread(group.start)
        yield group
    finally:
        await asyncio.to_thread(group.close)
        place.remove()
