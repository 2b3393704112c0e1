"""One rank of a learner in a process of its own: it meets the others, makes its learner and does what it is told.

Everything that computes runs in one thread, so the process can still be asked how it is, or told to end, while it waits
for the others inside a collective.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import distributed

from palestra.rl.learner import Learner
from palestra.rl.learner_plan import LearnerPlan
from palestra.rl.learner_state import LearnerState
from palestra.rl.one_thread import compute
from palestra.rl.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Meet:
    """Where the ranks find each other: rank 0's machine and the port that it listens on."""

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Call:
    """A method of the learner, and what it is given. Call("update", (batch, algorithm, None, 3))"""

    method: str
    arguments: tuple[object, ...] = field(default=(), repr=False)


class LearnerRank:
    """Rank `rank` of `size`."""

    def __init__(self, plan: LearnerPlan, rank: int, size: int, timeout_s: float) -> None:
        """`timeout_s`: how long a collective may wait for the others."""
        self._plan, self._ranks, self._timeout = plan, Ranks(rank, size), timedelta(seconds=timeout_s)
        self._store: distributed.TCPStore | None = None
        self._learner: Learner | None = None

    async def start(self) -> int:
        """Rank 0 begins to listen; its port, and 0 from the others."""
        if self._ranks.rank:
            return 0
        self._store = distributed.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return int(self._store.port)

    async def run(self, request: Meet | Call) -> object:
        """Do it, at the same time as the others. Rank 0 answers what the learner answers, the others nothing."""
        if isinstance(request, Meet):
            await compute(self._meet, request)
            return None
        answer = await compute(self._call, request)
        return answer if self._ranks.rank == 0 else None

    async def close(self) -> int:
        """Nothing to give back: the process ends."""
        return 0

    def _meet(self, where: Meet) -> None:
        torch.set_num_threads(self._plan.threads)
        store = self._store or distributed.TCPStore(where.address, where.port, is_master=False, timeout=self._timeout)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=store,
            rank=self._ranks.rank,
            world_size=self._ranks.size,
            timeout=self._timeout,
        )
        self._learner = self._plan.make(self._ranks)

    def _call(self, call: Call) -> object:
        assert self._learner is not None, "the ranks meet before they are called"
        # arrays arrive read-only, mapped from the object store; a state is tensors, which are ours already
        own = [
            argument if isinstance(argument, LearnerState) else copy.deepcopy(argument) for argument in call.arguments
        ]
        return getattr(self._learner, call.method)(*own)
