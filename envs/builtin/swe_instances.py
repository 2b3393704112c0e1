"""Instances for `swe_repository`: ours, made by breaking a sound repository, and folders of one's own.

A folder of an instance:
    instance.toml   issue = "...", fail_to_pass = ["tests/test_x.py::test_y"], pass_to_pass = [...]; and if wanted
                    repository = "name" (instances of one name stay in one split), image = "...", allow_config = [...]
    repository/     the base: files, without .git
    tests/          the hidden tests, laid over the repository: tests/tests/test_x.py is tests/test_x.py there
    gold/           the files of a known good solution that differ from the base; deleted = [...] in instance.toml
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from palestra.envs.builtin.swe_kinds import Fault, Kind
from palestra.envs.builtin.swe_kinds_numbers import KINDS as NUMBERS
from palestra.envs.builtin.swe_kinds_structures import KINDS as STRUCTURES
from palestra.envs.builtin.swe_kinds_text import KINDS as TEXT
from palestra.envs.errors import ConfigError
from palestra.envs.git_tree import Commit
from palestra.envs.patches import Changes

_KEYS = {"issue", "fail_to_pass", "pass_to_pass", "repository", "image", "allow_config", "deleted"}


@dataclass(frozen=True, slots=True)
class Instance:
    """A repository, what is wrong with it, and what decides whether it is mended. The last commit is the base."""

    id: str
    repository: str
    history: tuple[Commit, ...]
    issue: str
    tests: Mapping[str, bytes]  # hidden, at their paths in the repository
    fail_to_pass: tuple[str, ...]  # never empty
    pass_to_pass: tuple[str, ...]
    gold: Changes
    image: str | None = None
    allow_config: tuple[str, ...] = ()  # settings of the tests that a solution may have to change

    def __post_init__(self) -> None:
        if not self.fail_to_pass:
            raise ConfigError(
                f"{self.id}: fail_to_pass is empty; a task without such a test is solved by doing nothing"
            )
        if strange := [id for id in self.expected if id.partition("::")[0] not in {*self.tests, *self.base}]:
            raise ConfigError(f"{self.id}: no file for the test {strange[0]!r}; expected it among the tests")

    @property
    def base(self) -> Mapping[str, bytes]:
        """The files as the policy gets them."""
        return self.history[-1].files

    @property
    def expected(self) -> tuple[str, ...]:
        """The tests that must pass, all of them."""
        return (*self.fail_to_pass, *self.pass_to_pass)


def built_in() -> list[Instance]:
    """Ours, the same each time."""
    kinds = (*TEXT, *NUMBERS, *STRUCTURES)
    return [_broken(kind, number, fault) for kind in kinds for number, fault in enumerate(kind.faults)]


def from_folder(folder: Path) -> list[Instance]:
    """Every folder below that has an instance.toml, by name. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; expected one with a folder for each instance")
    found = [_read(path.parent) for path in sorted(folder.glob("*/instance.toml"))]
    if not found:
        raise ConfigError(f"{folder}: expected folders with an instance.toml, found none")
    return found


def _broken(kind: Kind, number: int, fault: Fault) -> Instance:
    """The kind with one of its faults, which came in with the second commit."""
    good = {path: text.encode() for path, text in kind.modules.items()}
    old, new = fault.good.encode(), fault.bad.encode()
    if good[fault.path].count(old) != 1:
        raise ConfigError(f"{kind.name}/{number}: {fault.good!r} must stand in {fault.path} exactly once")
    readme = {"README.md": f"# {kind.name}\n\nRun the tests with `python3 -m pytest`.\n".encode()}
    code = {**readme, **good, fault.path: good[fault.path].replace(old, new)}
    history = (
        Commit("Say what this is", readme),
        Commit("Add the code", code),
        Commit("Add tests", {**code, "tests/test_basics.py": kind.visible.encode()}),
    )
    test = "tests/test_hidden.py"
    names = [
        line.split("(")[0].removeprefix("def ") for line in kind.hidden.splitlines() if line.startswith("def test")
    ]
    return Instance(
        f"{kind.name}/{number}",
        kind.name,
        history,
        fault.issue,
        {test: kind.hidden.encode(), "tests/test_basics.py": kind.visible.encode()},
        tuple(f"{test}::{name}" for name in names if name in fault.fails),
        tuple(f"{test}::{name}" for name in names if name not in fault.fails),
        Changes({fault.path: good[fault.path]}),
    )


def _read(folder: Path) -> Instance:
    """One folder. Raises ConfigError with the reason."""
    try:
        said = tomllib.loads((folder / "instance.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}/instance.toml: cannot be read: {error}") from error
    if unknown := sorted(set(said) - _KEYS):
        raise ConfigError(f"{folder}/instance.toml: no setting {unknown[0]!r}. Have: {', '.join(sorted(_KEYS))}")
    base = _files(folder / "repository")
    if not base:
        raise ConfigError(f"{folder}/repository: expected the files of the base, found none")
    return Instance(
        folder.name,
        _text(folder, said, "repository", folder.name),
        (Commit("The state of the repository", base),),
        _text(folder, said, "issue", None),
        _files(folder / "tests"),
        _texts(folder, said, "fail_to_pass"),
        _texts(folder, said, "pass_to_pass"),
        Changes(_files(folder / "gold"), frozenset(_texts(folder, said, "deleted"))),
        _text(folder, said, "image", "") or None,
        _texts(folder, said, "allow_config"),
    )


def _files(folder: Path) -> dict[str, bytes]:
    """Path -> content of the regular files below. Raises ConfigError for links and for a .git."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or name.split("/")[0] == ".git":
            raise ConfigError(f"{path}: expected plain files without links and without a .git")
        if path.is_file():
            found[name] = path.read_bytes()
    return found


def _text(folder: Path, said: Mapping[str, object], key: str, default: str | None) -> str:
    value = said.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{folder}/instance.toml: {key} is {value!r}; expected a text")
    return value


def _texts(folder: Path, said: Mapping[str, object], key: str) -> tuple[str, ...]:
    value = said.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{folder}/instance.toml: {key} is {value!r}; expected a list of texts")
    return tuple(value)
