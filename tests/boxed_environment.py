"""The speeches of `toy_environment`, counted by a command in a box; the verdict names the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

from palestra.envs.environment import Environment, Verifier
from palestra.envs.sandboxes.contract import Boxes, BoxSpec, Sandbox
from palestra.envs.types import Artefact, Message, Scored, Task, Verdict
from toy_environment import Speech, Speeches


class CountedSpeech(Speech):
    """What was said lies in a file of the box, and `wc` counts it there."""

    def __init__(self, task: Task, boxes: Boxes) -> None:
        super().__init__(task)
        self._boxes = boxes
        self._box: Sandbox | None = None

    async def start(self) -> tuple[Message, ...]:
        self._box = await self._boxes.acquire(BoxSpec(), {}, episode=self._task.id)
        return await super().start()

    async def export(self) -> Artefact:
        assert self._box is not None
        await self._box.write("said", self._said.encode())
        counted = await self._box.run(["wc", "-c", "said"], timeout_s=30)
        return Artefact(int(counted.stdout.split()[0]))

    async def close(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await self._boxes.release(box)


class EvenCount:
    """1 when something was said, in an even number of bytes. Its one part is the name of the machine."""

    async def verify(self, task: Task, artefact: Artefact) -> Verdict:
        count = artefact.answer
        assert isinstance(count, int)
        return Scored(float(count > 0 and count % 2 == 0), {os.uname().nodename: 1.0})

    async def close(self) -> None: ...


@dataclass(frozen=True)
class CountedSpeeches(Speeches):
    """The taskset."""

    def environment(self, task: Task, boxes: Boxes) -> Environment:
        return CountedSpeech(task, boxes)

    def verifier(self) -> Verifier:
        return EvenCount()
