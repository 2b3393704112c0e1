"""A repository, an issue, and hidden tests: mended in a box, judged elsewhere by the tests that failed and those that
must go on passing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from palestra.envs.builtin.file_tools import file_tools
from palestra.envs.builtin.shell_tool import run_tool, submit_tool
from palestra.envs.builtin.swe_instances import Instance, built_in, from_folder
from palestra.envs.builtin.tasks import check_common, must_be_split
from palestra.envs.calls import JsonInTags
from palestra.envs.environment import Environment, Verifier
from palestra.envs.errors import ConfigError
from palestra.envs.git_tree import git_files
from palestra.envs.patches import Changes, changes, is_junk, unified_diff
from palestra.envs.sandboxes.contract import Boxes, BoxSpec, ExportLimits
from palestra.envs.tool_environment import ToolEnvironment
from palestra.envs.tools import Tool
from palestra.envs.types import Artefact, Message, Task
from palestra.envs.verifiers.boxed import BoxVerifier, Examination
from palestra.envs.verifiers.pytest_tests import PytestExamination
from palestra.envs.verifiers.signs import eval_detect, reward_preplanted

TEST_SHARE = 4  # the instances of every fourth repository are for testing
TOO_LARGE = "artefact_too_large"
_TRANSPORT = ExportLimits(total_bytes=32 * 2**20, files=20_000)  # with .git and junk, which are no part of a patch
_CALLS = JsonInTags()


@dataclass(frozen=True)
class SweRepository:
    """The taskset: ours without a `folder`, else what lies there (see swe_instances.py for its form)."""

    folder: str | None = None
    """Of instances; each a folder with an instance.toml. None: the small repositories that come with the package."""
    train_tasks: int | None = None
    """At most so many, from the start; None: all."""
    test_tasks: int | None = None
    patch_bytes: int = 2 * 2**20
    """A larger change is the policy's own failure."""
    command_timeout_s: float = 20.0
    output_chars: int = 4000
    """Characters of a file or of a command's output that the policy sees at once."""
    judging_timeout_s: float = 60.0
    """For all expected tests together."""
    digest_states: bool = False
    """Record in which state the box was before each turn; algorithm "gigpo" compares turns taken in equal states."""

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("train_tasks", "test_tasks", "patch_bytes")}
        check_common(counts, self.output_chars, self.judging_timeout_s)

    def split(self, name: str) -> Sequence[Task]:
        """The tasks of "train" or "test"; they share no repository. Raises ConfigError."""
        must_be_split(name)
        repositories = list(dict.fromkeys(each.repository for each in self._instances.values()))
        testing = set(repositories[TEST_SHARE - 1 :: TEST_SHARE])
        ours = [each for each in self._instances.values() if (each.repository in testing) == (name == "test")]
        if not ours:
            raise ConfigError(f"no {name} tasks in {len(repositories)} repositories; expected {TEST_SHARE} or more")
        return tuple(self._task(each) for each in ours[: self.train_tasks if name == "train" else self.test_tasks])

    def environment(self, task: Task, boxes: Boxes) -> Environment:
        """A fresh episode."""
        return SweEnvironment(
            task, self._tools, boxes, self.patch_bytes, calls=_CALLS, digest_states=self.digest_states
        )

    def verifier(self) -> Verifier:
        """1 where every expected test passes, else 0."""
        return BoxVerifier(SweExaminer(self._instances, self.judging_timeout_s), timeout_s=self.judging_timeout_s + 60)

    def demonstration(self, task: Task, seed: int) -> tuple[str, ...]:
        """Look at the history and the tests, write the known good files, test again, hand in."""
        gold = self._instances[task.id].gold
        check = _CALLS.render_call("run", {"command": "python3 -m pytest -q"})
        look = [_CALLS.render_call("read_file", {"path": path}) for path in sorted(gold.written) if path in task.files]
        write = [
            _CALLS.render_call("write_file", {"path": path, "text": data.decode()})
            for path, data in sorted(gold.written.items())
        ]
        remove = [_CALLS.render_call("run", {"command": f"rm -- '{path}'"}) for path in sorted(gold.deleted)]
        first = _CALLS.render_call("run", {"command": "git log --oneline"})
        return (first, *look, *write, *remove, check, _CALLS.render_call("submit", {}))

    def _task(self, instance: Instance) -> Task:
        system = (
            "The current folder is a git repository. Resolve the issue by changing its files, then submit. "
            f"Hidden tests decide.\n{_CALLS.declare(self._tools)}"
        )
        return Task(
            instance.id,
            (Message("system", system), Message("user", instance.issue.strip())),
            {**instance.base, **git_files(instance.history)},
            instance.image,
            truth={"tests": {path: data.decode(errors="replace") for path, data in instance.tests.items()}},
        )

    @cached_property
    def _instances(self) -> Mapping[str, Instance]:
        found = from_folder(Path(self.folder)) if self.folder else built_in()
        return {instance.id: instance for instance in found}

    @cached_property
    def _tools(self) -> tuple[Tool, ...]:
        # without byte code beside the source, no run sees an older file than the last edit
        run = run_tool(self.command_timeout_s, self.output_chars, {"PYTHONDONTWRITEBYTECODE": "1"})
        return (*file_tools(self.output_chars), run, submit_tool())


class SweEnvironment(ToolEnvironment):
    """One episode. What leaves is the work tree as it is, whatever git says of it; the answer holds the patch."""

    def __init__(
        self,
        task: Task,
        tools: Sequence[Tool],
        boxes: Boxes,
        patch_bytes: int,
        *,
        calls: JsonInTags,
        digest_states: bool,
    ) -> None:
        super().__init__(task, tools, boxes, calls=calls, digest_states=digest_states)
        self._patch_bytes = patch_bytes

    async def export(self) -> Artefact:
        """The files without `.git` and junk, and the patch beside the usual answer. Raises SandboxError."""
        assert self._box is not None, "exported between start and close"
        answer = (await super().export()).answer
        assert isinstance(answer, dict)
        tree = await self._box.export(["."], _TRANSPORT)
        if tree.over is not None:
            return Artefact(answer, flags=self.signs(), failure=TOO_LARGE)
        files = {path: data for path, data in tree.files.items() if not is_junk(path)}
        links = {path: target for path, target in tree.links.items() if not is_junk(path)}
        base = base_files(self.task)
        made = changes(base, files, executable=tree.executable & set(files), links=links)
        if made.size > self._patch_bytes:
            return Artefact(answer, flags=self.signs(), failure=TOO_LARGE)
        answer["patch"] = unified_diff(base, made)
        return Artefact(answer, files, made.executable, links, tree.skipped, self.signs())


@dataclass(frozen=True, slots=True)
class SweExaminer:
    """See Examiner: the hidden tests over the policy's tree."""

    instances: Mapping[str, Instance]
    timeout_s: float

    def examination(self, task: Task, artefact: Artefact) -> Examination:
        """See Examiner."""
        instance = self.instances[task.id]
        made = changes(instance.base, artefact.files)
        return PytestExamination(
            artefact.files,
            instance.tests,
            instance.expected,
            links=artefact.links,
            executable=artefact.executable,
            allow_config=instance.allow_config,
            flags=(*eval_detect(made.written), *reward_preplanted(made.written)),
            spec=BoxSpec(image=task.image, role="verifier"),
            timeout_s=self.timeout_s,
        )

    def control(self, task: Task) -> Examination:
        """See Examiner: the known good solution."""
        instance = self.instances[task.id]
        return self.examination(task, as_artefact(instance.gold, instance.base))


def as_artefact(made: Changes, base: Mapping[str, bytes]) -> Artefact:
    """What an episode that made these changes hands over."""
    return Artefact({"patch": unified_diff(base, made)}, made.applied(base), made.executable, made.links)


def base_files(task: Task) -> Mapping[str, bytes]:
    """The repository's files as the policy got them."""
    return {path: data for path, data in task.files.items() if not is_junk(path)}
