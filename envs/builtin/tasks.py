"""What the tasksets of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import overload

from palestra.envs.errors import ConfigError
from palestra.envs.types import Task

SPLITS = ("train", "test")


class TasksOnDemand(Sequence[Task]):
    """`length` tasks, each made by `make(index)` when it is asked for; the same index gives an equal task."""

    def __init__(self, length: int, make: Callable[[int], Task]) -> None:
        self._indices = range(length)
        self._make = make

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self._make(each) for each in self._indices[index]]
        return self._make(self._indices[index])


def must_be_split(name: str) -> None:
    """Raises ConfigError for a split that does not exist."""
    if name not in SPLITS:
        raise ConfigError(f"no split {name!r}. Have: {', '.join(SPLITS)}")


def check_common(counts: Mapping[str, int | None], output_chars: int, judging_timeout_s: float) -> None:
    """Raises ConfigError for options that several environments have and that no task can be played with."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; use 1 or more")
    if output_chars < 40:
        raise ConfigError(f"output_chars is {output_chars}; use 40 or more")
    if not judging_timeout_s > 0:
        raise ConfigError(f"judging_timeout_s is {judging_timeout_s}; use more than 0")
