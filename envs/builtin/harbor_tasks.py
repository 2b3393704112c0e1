"""Folders of tasks in the Harbor format, and of Terminal-Bench 1, as they are: played in boxes, judged in others."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from palestra.envs.builtin.harbor_environment import HarborEnvironment, covers, task_tools
from palestra.envs.builtin.tasks import must_be_split
from palestra.envs.calls import JsonInTags
from palestra.envs.environment import Environment, Verifier
from palestra.envs.errors import ConfigError
from palestra.envs.formats.harbor import HarborTask, read_task
from palestra.envs.formats.terminal_bench import read_terminal_bench
from palestra.envs.sandboxes.contract import Boxes, BoxSpec, ExportLimits
from palestra.envs.types import JSON, Artefact, Message, Task
from palestra.envs.verifiers.boxed import BoxVerifier, Examination
from palestra.envs.verifiers.script_tests import ScriptExamination
from palestra.envs.verifiers.verdict import Bounds

_CALLS = JsonInTags()
_GRACE_S = 60.0  # of a judging, beside its script


@dataclass(frozen=True)
class Harbor:
    """The taskset of a folder. A task's own notes say what is done otherwise than its folder says."""

    folder: str
    """A task's folder, or one that holds tasks' folders."""
    test_folder: str | None = None
    """The same for the split "test"; None: a part of `folder`."""
    test_fraction: float = 0.2
    """That part; which tasks are in it is fixed by the seed."""
    seed: int = 0
    hosts: list[str] | None = None
    """What tasks that ask for the whole network may reach instead, "host:port" each; None: such tasks are refused."""
    skip_refused: bool = False
    """Go on without the tasks that are refused; otherwise one of them stops the run with all the reasons."""
    command_timeout_s: float = 60.0
    """Of one shell command, at most the task's own limit."""
    output_chars: int = 4000
    """Characters of a command's output that the policy sees."""
    artefact_bytes: int = 2 * 2**20
    """What an episode may hand over at most; more earns 0."""
    digest_states: bool = False
    """Record in which state the box was before each turn; algorithm "gigpo" compares turns taken in equal states."""

    def __post_init__(self) -> None:
        if not 0 < self.test_fraction < 1:
            raise ConfigError(f"test_fraction is {self.test_fraction}; use more than 0 and less than 1")
        for name, value in (("command_timeout_s", self.command_timeout_s), ("artefact_bytes", self.artefact_bytes)):
            if value <= 0:
                raise ConfigError(f"{name} is {value}; use more than 0")
        if self.output_chars < 40:
            raise ConfigError(f"output_chars is {self.output_chars}; use 40 or more")

    def split(self, name: str) -> Sequence[Task]:
        """The tasks of "train" or "test". Raises ConfigError for refused ones unless they are to be skipped."""
        must_be_split(name)
        return tuple(map(self._task, self._splits[name]))

    def notes(self) -> Mapping[str, tuple[str, ...]]:
        """By task: what is done otherwise than its folder says."""
        return {id: harbor.notes for id, harbor in self._by_id.items()}

    def environment(self, task: Task, boxes: Boxes) -> Environment:
        """A fresh episode."""
        return HarborEnvironment(
            task,
            self._by_id[task.id],
            boxes,
            command_timeout_s=self.command_timeout_s,
            output_chars=self.output_chars,
            export=ExportLimits(total_bytes=self.artefact_bytes),
            digest_states=self.digest_states,
        )

    def verifier(self) -> Verifier:
        """What `tests/test.sh` says, in a box of its own."""
        slowest = max(harbor.verifier_timeout_s for harbor in self._by_id.values())
        return BoxVerifier(HarborExaminer(self._by_id), bounds=Bounds(0.0, 1.0), timeout_s=slowest + _GRACE_S)

    def demonstration(self, task: Task, seed: int) -> tuple[str, ...]:
        """The task's own solution as one command, then the submission; none where there is no script of its own."""
        script = self._by_id[task.id].solution.contents.get("solve.sh")
        if script is None or b"/solution/" in script:  # the files beside it are in no policy's box
            return ()
        command = _CALLS.render_call("shell", {"command": script.decode(errors="replace")})
        return (command, _CALLS.render_call("submit", {}))

    def _task(self, id: str) -> Task:
        harbor = self._by_id[id]
        notes: list[JSON] = list(harbor.notes)
        return Task(id, _prompt(harbor), files=harbor.files.contents, image=harbor.image, truth={"notes": notes})

    @cached_property
    def _splits(self) -> dict[str, list[str]]:
        """The ids of each split."""
        if self.test_folder is not None:
            return {"train": _ids("harbor", self._train), "test": _ids("harbor-test", self._test)}
        ids = _ids("harbor", self._train)
        if len(ids) < 2:
            raise ConfigError(f"{self.folder} has {len(ids)} task that can be used; name a test_folder")
        tests = set(random.Random(f"{self.seed}/split").sample(ids, min(len(ids) - 1, self._num_tests(len(ids)))))
        return {"train": [id for id in ids if id not in tests], "test": [id for id in ids if id in tests]}

    def _num_tests(self, num_tasks: int) -> int:
        return max(1, round(num_tasks * self.test_fraction))

    @cached_property
    def _by_id(self) -> dict[str, HarborTask]:
        train, test = self._train, self._test
        return dict(zip([*_ids("harbor", train), *_ids("harbor-test", test)], [*train, *test], strict=True))

    @cached_property
    def _train(self) -> list[HarborTask]:
        return self._read(Path(self.folder))

    @cached_property
    def _test(self) -> list[HarborTask]:
        return [] if self.test_folder is None else self._read(Path(self.test_folder))

    def _read(self, folder: Path) -> list[HarborTask]:
        """Every task of the folder. Raises ConfigError with the reasons where one is refused."""
        readers = {path: reader for path in _task_folders(folder) if (reader := self._reader(path))}
        if not readers:
            raise ConfigError(f"{folder}: no task; expected task.toml (or task.yaml) in it or in the folders in it")
        tasks: list[HarborTask] = []
        reasons: list[str] = []
        for path, reader in readers.items():
            try:
                tasks.append(reader(path))
            except ConfigError as error:
                reasons.append(str(error))
        if reasons and not (self.skip_refused and tasks):
            advice = "" if self.skip_refused else "; skip_refused = true goes on without them"
            raise ConfigError(f"{len(reasons)} of {len(readers)} tasks refused{advice}:\n" + "\n".join(reasons))
        return tasks

    def _reader(self, folder: Path) -> Callable[[Path], HarborTask] | None:
        if (folder / "task.toml").exists():
            return lambda path: read_task(path, hosts=self.hosts)
        return read_terminal_bench if (folder / "task.yaml").exists() else None


class HarborExaminer:
    """See Examiner: what leaves an episode, over the files of the task that its artifacts do not name."""

    def __init__(self, tasks: Mapping[str, HarborTask]) -> None:
        self._tasks = tasks

    def examination(self, task: Task, artefact: Artefact) -> Examination:
        """The script on the artefact."""
        return _examination(self._tasks[task.id], artefact)

    def control(self, task: Task) -> Examination:
        """The script on the files as they were at the start: a task's script has a score for untouched work."""
        harbor = self._tasks[task.id]
        return _examination(harbor, Artefact(files=harbor.files.contents, executable=harbor.files.executable))


def _examination(harbor: HarborTask, artefact: Artefact) -> Examination:
    named = [artifact.source for artifact in harbor.artifacts]
    kept = {
        path: data for path, data in harbor.files.contents.items() if not any(covers(source, path) for source in named)
    }
    return ScriptExamination(
        {**kept, **artefact.files},
        harbor.tests.contents,
        links=artefact.links,
        executable=artefact.executable | (harbor.files.executable & set(kept)),
        env={**harbor.env, **harbor.verifier_env},
        spec=BoxSpec(image=harbor.image, limits=harbor.limits, role="verifier", workspace=harbor.workdir),
        timeout_s=harbor.verifier_timeout_s,
    )


def _task_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; expected a task or a folder of tasks")
    if (folder / "task.toml").exists() or (folder / "task.yaml").exists():
        return [folder]
    return sorted(path for path in folder.iterdir() if path.is_dir())


def _ids(kind: str, tasks: Sequence[HarborTask]) -> list[str]:
    """What the tasks are called; a task that is in both folders is two."""
    return [f"{kind}/{task.id}" for task in tasks]


def _prompt(harbor: HarborTask) -> tuple[Message, ...]:
    tools = task_tools(1.0, 40, {})
    told = f"You work in {harbor.workdir}.\n{_CALLS.declare(tools)}"
    return (Message("system", told), Message("user", harbor.instruction))
