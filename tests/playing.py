"""Playing written turns through an environment and judging what comes out; and lenders of boxes to play in."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from palestra.envs.calls import JsonInTags
from palestra.envs.environment import Taskset, Verifier
from palestra.envs.sandboxes.backends import Backend
from palestra.envs.sandboxes.contract import Boxes, BoxSpec, Exec, Sandbox
from palestra.envs.sandboxes.scripted import WORKSPACE, Command
from palestra.envs.types import Artefact, StepResult, Task, Verdict

FORMAT = JsonInTags()


def on_this_machine(command: Command, files: Mapping[str, bytes]) -> Exec:
    """Runs a command of a scripted box as a process of this host, in a folder with the box's files. For tests whose
    commands are the environment's own."""
    with tempfile.TemporaryDirectory() as folder:
        for path, data in files.items():
            (Path(folder) / Path(path).relative_to(WORKSPACE)).write_bytes(data)
        env = {"PATH": "/usr/bin:/bin", **command.env}
        try:
            done = subprocess.run(
                command.argv,
                input=command.stdin,
                cwd=folder,
                env=env,
                capture_output=True,
                timeout=command.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            return Exec(exit_code=None, signal=9, timed_out=True, stdout=late.stdout or b"")
        made = {f"{WORKSPACE}/{path.name}" for path in Path(folder).iterdir()} - set(files)
        assert not made, f"{command.argv[0]} wrote {made}"
        return Exec(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


class Lender:
    """Boxes of one backend, a fresh one for each episode, closed when it comes back."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.lent = 0

    async def acquire(self, spec: BoxSpec, files: Mapping[str, bytes], *, episode: str) -> Sandbox:
        box = await self._backend.open(spec, episode=episode)
        await box.reset(files)
        self.lent += 1
        return box

    async def release(self, box: Sandbox) -> None:
        self.lent -= 1
        await box.close()


async def play(taskset: Taskset, task: Task, boxes: Boxes, turns: Sequence[str]) -> tuple[list[StepResult], Artefact]:
    """Play the turns until they or the episode end."""
    environment = taskset.environment(task, boxes)
    try:
        await environment.start()
        steps = []
        for turn in turns:
            steps.append(await environment.step(FORMAT.parse(turn)))
            if steps[-1].done:
                break
        return steps, await environment.export()
    finally:
        await environment.close()


async def judged(
    taskset: Taskset, task: Task, boxes: Boxes, turns: Sequence[str], verifier: Verifier
) -> tuple[list[StepResult], Verdict]:
    """Play the turns and judge what comes out."""
    steps, artefact = await play(taskset, task, boxes, turns)
    return steps, await verifier.verify(task, artefact)
