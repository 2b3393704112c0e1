"""Episodes of a real environment, played by scripts: an expert's turns, a tamper in its box, or nothing at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from palestra.envs.admission.tamper import Tamper
from palestra.envs.calls import CallFormat, JsonInTags
from palestra.envs.environment import Environment, Taskset, Verifier
from palestra.envs.sandboxes.contract import Boxes, BoxSpec, Exec, Sandbox
from palestra.envs.types import Task, Verdict

COMMAND_S = 60.0


class Watched:
    """Boxes of a lender, and what was asked of it last: a policy's box in the hands of whoever plays the policy."""

    def __init__(self, boxes: Boxes) -> None:
        self._boxes = boxes
        self.box: Sandbox | None = None
        self.spec: BoxSpec | None = None
        self.files: Mapping[str, bytes] = {}

    async def acquire(self, spec: BoxSpec, files: Mapping[str, bytes], *, episode: str) -> Sandbox:
        """See Boxes."""
        self.box = await self._boxes.acquire(spec, files, episode=episode)
        self.spec, self.files = spec, files
        return self.box

    async def fork(self, box: Sandbox, *, episode: str) -> Sandbox:
        """See Boxes."""
        self.box = await self._boxes.fork(box, episode=episode)
        return self.box

    async def release(self, box: Sandbox) -> None:
        """See Boxes."""
        await self._boxes.release(box)


@dataclass(frozen=True, slots=True)
class Played:
    """What came of an episode. `found` is of the tamper's last command; None: it had no box to run in."""

    verdict: Verdict
    found: Exec | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """What episodes are played with."""

    taskset: Taskset
    boxes: Boxes
    verifier: Verifier
    seed: int = 0
    calls: CallFormat = JsonInTags()

    def gold(self, task: Task) -> tuple[str, ...]:
        """The expert's turns; empty where the environment has none."""
        return tuple(self.taskset.demonstration(task, self.seed))

    async def judged(self, task: Task, turns: Sequence[str] = (), tamper: Tamper | None = None) -> Played:
        """Play the turns, with the tamper before the last of them, and have it judged.

        A policy that does nothing has no turns: its time runs out. Raises what the environment and the boxes raise.
        """
        watched = Watched(self.boxes)
        environment = self.taskset.environment(task, watched)
        found = None
        try:
            await environment.start()
            *first, last = turns or (None,)
            ended = await self._play(environment, first)
            if tamper is not None and watched.box is not None:
                found = await run(watched.box, tamper.argv())
            if last is not None and not ended:
                await self._play(environment, [last])
            verdict = await self.verifier.verify(task, await environment.export())
            if tamper is not None and tamper.loot is not None and watched.box is not None:
                found = await run(watched.box, tamper.loot_argv())
            return Played(verdict, found)
        finally:
            await environment.close()

    async def in_box(self, task: Task, argv: Sequence[str], *, canary: str = "", stdin: bytes = b"") -> Exec | None:
        """Run a command in the box of a fresh episode; None: the environment uses none."""
        watched = Watched(self.boxes)
        environment = self.taskset.environment(task, watched)
        try:
            await environment.start()
            return None if watched.box is None else await run(watched.box, argv, canary=canary, stdin=stdin)
        finally:
            await environment.close()

    async def _play(self, environment: Environment, turns: Sequence[str | None]) -> bool:
        for turn in turns:
            if turn is not None and (await environment.step(self.calls.parse(turn))).done:
                return True
        return False


async def run(box: Sandbox, argv: Sequence[str], *, canary: str = "", stdin: bytes = b"") -> Exec:
    """As a policy would: from the workspace, with what it leaves behind killed."""
    return await box.run(argv, timeout_s=COMMAND_S, stdin=stdin, env={"CANARY": canary} if canary else None)


def with_canary(task: Task, canary: str) -> Task:
    """The task with a word among its hidden data that is nowhere else; for opening it, not for judging."""
    return replace(task, truth={**task.truth, "canary": canary}) if isinstance(task.truth, dict) else task
