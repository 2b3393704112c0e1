"""Find an environment by name: one of ours by its short name, anyone's by a dotted path, without registration."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import typing
from collections.abc import Callable, Mapping

import pydantic

from palestra.envs.environment import Taskset
from palestra.envs.errors import ConfigError

BUILTIN: Mapping[str, str] = {
    "arithmetic": "palestra.envs.builtin.arithmetic:Arithmetic",
    "gsm8k": "palestra.envs.builtin.gsm8k:Gsm8k",
    "harbor": "palestra.envs.builtin.harbor_tasks:Harbor",
    "humaneval_repair": "palestra.envs.builtin.humaneval_repair:HumanEvalRepair",
    "notes": "palestra.envs.builtin.notes:Notes",
    "swe_repository": "palestra.envs.builtin.swe_repository:SweRepository",
    "tool_schema": "palestra.envs.builtin.tool_schema:ToolSchema",
}
"""Short names. Whatever a dotted path may name may stand here, and the other way round."""


def find_taskset(name: str) -> Callable[..., Taskset]:
    """What makes the taskset: a function or class of keyword options. Raises ConfigError."""
    path = BUILTIN.get(name, name)
    module, colon, attribute = path.partition(":")
    if not colon or not module or not attribute:
        raise ConfigError(
            f"environment {name!r}: no such name{_near(name, BUILTIN)}. Have: {', '.join(BUILTIN)}; "
            f"your own is a path 'package.module:function'"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(f"environment {name!r}: {error}; is its package installed here?") from error
    except AttributeError as error:
        raise ConfigError(f"environment {name!r}: {module} has no {attribute!r}") from error
    if not callable(found):
        raise ConfigError(f"environment {name!r} is {type(found).__name__}; expected a function that returns a taskset")
    return typing.cast(Callable[..., Taskset], found)


def load_taskset(name: str, options: Mapping[str, object]) -> Taskset:
    """The taskset `name` with `options`, each checked against the annotation of its parameter. Raises ConfigError."""
    make = find_taskset(name)
    parameters = inspect.signature(make).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    types = typing.get_type_hints(make.__init__ if inspect.isclass(make) else make)
    checked = {}
    for option, value in options.items():
        if option not in parameters and not takes_any:
            known = ", ".join(parameters) or "no options"
            raise ConfigError(f"environment {name!r}: no option {option!r}{_near(option, parameters)}. Have: {known}")
        checked[option] = _checked(name, option, value, types.get(option))
    try:
        inspect.signature(make).bind(**checked)
    except TypeError as error:
        raise ConfigError(f"environment {name!r}: {error}; set it in the environment's options") from error
    return make(**checked)


def _checked(name: str, option: str, value: object, wanted: typing.Any) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"environment {name!r}: option {option} is {value}; use a finite number")
    if wanted is None:
        return value
    try:
        adapter: pydantic.TypeAdapter[object] = pydantic.TypeAdapter(wanted)
        return adapter.validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        said = error.errors()[0]["msg"]
        raise ConfigError(f"environment {name!r}: option {option} is {value!r}: {said}") from error


def _near(word: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
