"""One episode of a Harbor task: a shell in a box, a submission, and the artifacts that leave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch

from palestra.envs.builtin.python_tool import cut
from palestra.envs.formats.harbor import Artifact, HarborTask
from palestra.envs.sandboxes.contract import Boxes, BoxSpec, ExportLimits, Tree
from palestra.envs.tool_environment import ToolEnvironment
from palestra.envs.tools import Tool, ToolContext, ToolError
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
        timeout_s = min(command_timeout_s, harbor.agent_timeout_s)
        tools = (shell_tool(timeout_s, output_chars, harbor.env), submit_tool())
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


def shell_tool(timeout_s: float, output_chars: int, env: Mapping[str, str]) -> Tool:
    """`shell(command)`: a fresh shell per call in the working directory, at most `output_chars` of what it prints."""

    async def run(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        result = await context.run(["/bin/bash", "-c", str(arguments["command"])], env=env)
        printed = (result.stdout + result.stderr).decode(errors="replace").rstrip()
        told = [cut(printed, output_chars)] if printed else []
        if result.out_of_memory:
            told.append("[the box ran out of memory]")
        if result.survivors:
            told.append(f"[{result.survivors} background processes were ended]")
        if not result.ok:
            how = f"signal {result.signal}" if result.exit_code is None else f"exit status {result.exit_code}"
            raise ToolError("\n".join([*told, f"[{how}]"]))
        return "\n".join(told) or "(nothing printed)"

    command: dict[str, JSON] = {"type": "string"}
    parameters: dict[str, JSON] = {
        "type": "object",
        "properties": {"command": command},
        "required": ["command"],
        "additionalProperties": False,
    }
    return Tool("shell", "Run a shell command and read what it prints.", parameters, run, timeout_s=timeout_s)


def submit_tool() -> Tool:
    """`submit()`: the work is done."""

    async def submit(arguments: Mapping[str, JSON], context: ToolContext) -> str:
        return "submitted"

    nothing: dict[str, JSON] = {"type": "object", "properties": {}, "additionalProperties": False}
    return Tool("submit", "Hand the work in; this ends the task.", nothing, submit, finishes=True)


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
