"""What a user's taskset hands over, looked at before anything starts: a bug in it is one sentence with its place."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from palestra.envs.environment import Taskset
from palestra.envs.errors import ConfigError, PalestraError
from palestra.envs.load import load_taskset
from palestra.envs.types import Message, Task
from palestra.rl.config import Config

T = TypeVar("T")

METHODS = ("split", "environment", "verifier", "demonstration")


def open_taskset(config: Config) -> tuple[Taskset, int, int]:
    """The taskset of a configuration, and how many tasks it has to train on and held out. Raises ConfigError."""
    name = config.environment.name
    who = f"environment {name}"
    taskset = of_user(who, lambda: load_taskset(name, config.environment.options))
    missing = [method for method in METHODS if not callable(getattr(taskset, method, None))]
    if missing:
        raise ConfigError(
            f"{who} gives a {type(taskset).__name__} without {', '.join(missing)}; a taskset has {', '.join(METHODS)}"
        )
    splits = {}
    for split in ("train", "test"):
        splits[split] = of_user(f"{who}, split {split!r}", partial(_split, taskset, split))
    if splits["train"]:
        first = splits["train"][0]
        of_user(f"{who}, demonstration", lambda: _check_turns(taskset.demonstration(first, config.run.seed)))
    of_user(f"{who}, verifier", lambda: asyncio.run(_try_verifier(taskset)))
    return taskset, len(splits["train"]), len(splits["test"])


def of_user(who: str, work: Callable[[], T]) -> T:
    """What `work`, which users wrote, gives. Raises ConfigError with the place of what it raises."""
    try:
        return work()
    except PalestraError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, SyntaxError) and error.filename:
            where = f"{error.filename}:{error.lineno}"
        else:
            where = f"{Path(place.filename)}:{place.lineno}"
        raise ConfigError(f"{who}: {type(error).__name__}: {error} ({where})") from error


def _split(taskset: Taskset, name: str) -> Sequence[Task]:
    """A split whose first task is looked at; the others may be made as they are asked for."""
    tasks = taskset.split(name)
    if not hasattr(tasks, "__len__") or not hasattr(tasks, "__getitem__"):
        raise ConfigError(f"split({name!r}) of the environment returned a {type(tasks).__name__}; expected a sequence")
    if len(tasks):
        first = tasks[0]
        if not isinstance(first, Task):
            raise ConfigError(f"split({name!r})[0] of the environment is a {type(first).__name__}; expected a Task")
        if not first.prompt or not all(isinstance(message, Message) for message in first.prompt):
            raise ConfigError(f"task {first.id!r} has the prompt {first.prompt!r}; expected one Message or more")
    return tasks


def _check_turns(turns: object) -> None:
    if not isinstance(turns, list | tuple) or not all(isinstance(turn, str) for turn in turns):
        raise ConfigError(f"demonstration() of the environment returned {turns!r}; expected a tuple of texts, or ()")


async def _try_verifier(taskset: Taskset) -> None:
    """Made and closed again: a judge that is not there is told now, not after the first episode."""
    verifier = taskset.verifier()
    if not callable(getattr(verifier, "verify", None)) or not callable(getattr(verifier, "close", None)):
        raise ConfigError(
            f"verifier() of the environment returned a {type(verifier).__name__}; it has verify and close"
        )
    await verifier.close()
