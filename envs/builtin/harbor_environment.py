"""One episode of a Harbor task: a shell in a box, a submission, and the artifacts that leave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch

from palestra.envs.builtin.shell_tool import run_tool, submit_tool
from palestra.envs.formats.harbor import Artifact, HarborTask
from palestra.envs.sandboxes.contract import Boxes, BoxSpec, ExportLimits, Tree
from palestra.envs.tool_environment import ToolEnvironment
from palestra.envs.tools import Tool
from palestra.envs.types import JSON, Artefact, Message, Task

TOO_LARGE = "artefact_too_large"


class HarborEnvironment(ToolEnvironment):
    """The episode of `task`, whose folder says `harbor`. What leaves are the files that its artifacts name."""

    def __init__(
        self,
        task: Task,
        harbor: HarborTask,
        boxes: Boxes,
        *,
        command_timeout_s: float,
        output_chars: int,
        export: ExportLimits,
        digest_states: bool = False,
    ) -> None:
        tools = task_tools(min(command_timeout_s, harbor.agent_timeout_s), output_chars, harbor.env)
        super().__init__(task, tools, boxes, spec=policy_box(harbor), digest_states=digest_states)
        self._harbor = harbor
        self._export = export

    async def start(self) -> tuple[Message, ...]:
        """Borrow a box with the task's files, programs among them executable. Raises SandboxError."""
        opening = await super().start()
        assert self._box is not None, "the start lends one"
        for path in sorted(self._harbor.files.executable):
            await self._box.write(path, self._harbor.files.contents[path], mode=0o755)
        if self._harbor.files.executable:
            self._opening_state = await self._state(self._box)
        return opening

    async def export(self) -> Artefact:
        """What the artifacts name, and what was done for it. Raises SandboxError."""
        assert self._box is not None, "exported between start and close"
        answer = (await super().export()).answer
        tree = await self._box.export([artifact.source for artifact in self._harbor.artifacts], self._export)
        if tree.over is not None:
            return Artefact(answer, skipped=tree.skipped, flags=self.signs(), failure=TOO_LARGE)
        return replace(_artefact(answer, tree, self._harbor.artifacts), flags=self.signs())


def policy_box(harbor: HarborTask) -> BoxSpec:
    """The kind of box that the task is played in."""
    return BoxSpec(image=harbor.image, limits=harbor.limits, network=harbor.network, workspace=harbor.workdir)


def task_tools(timeout_s: float, output_chars: int, env: Mapping[str, str]) -> tuple[Tool, ...]:
    """`shell(command)`, since tests and instructions of such tasks are written for bash, and `submit()`."""
    return (run_tool(timeout_s, output_chars, env, name="shell", shell="/bin/bash"), submit_tool())


def _artefact(answer: JSON, tree: Tree, artifacts: tuple[Artifact, ...]) -> Artefact:
    """The tree without what the artifacts leave out."""
    files = {path: data for path, data in tree.files.items() if not _excluded(path, artifacts)}
    return Artefact(
        answer,
        files=files,
        executable=tree.executable & set(files),
        links={path: target for path, target in tree.links.items() if not _excluded(path, artifacts)},
        skipped=tree.skipped,
    )


def _excluded(path: str, artifacts: tuple[Artifact, ...]) -> bool:
    """Whether every artifact that names the path leaves it out, by its name or by its path from the source."""
    naming = [artifact for artifact in artifacts if covers(artifact.source, path)]
    return all(any(_matches(path, artifact.source, each) for each in artifact.exclude) for artifact in naming)


def _matches(path: str, source: str, pattern: str) -> bool:
    inner = path if source == "." else path.removeprefix(f"{source}/")
    return fnmatch(inner, pattern) or fnmatch(path.rpartition("/")[2], pattern)


def covers(source: str, path: str) -> bool:
    """Whether `path` is the artifact's source or lies below it."""
    return source == "." or path == source or path.startswith(f"{source}/")
