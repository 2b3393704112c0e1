"""Which calls are right: a name, and for each argument the values that are accepted.

Texts are compared as the data's own checker does it: without case, spaces and the marks , . / - _ * ^ and with one
kind of quotes. Numbers are compared by value; true and false are no numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from palestra.envs.errors import ConfigError
from palestra.envs.formats.tool_schema import Declaration
from palestra.envs.schemas import echo, validator
from palestra.envs.types import JSON

LEFT_OUT = ""
"""Among the accepted values of an argument: it may be left out."""
_IGNORED = re.compile(r"[ ,./\-_*^]")


@dataclass(frozen=True, slots=True)
class AcceptedCall:
    """AcceptedCall("math.hypot", {"x": (4,), "y": (5,), "z": (0,)}, frozenset({"z"}))"""

    name: str
    arguments: Mapping[str, tuple[JSON, ...]]  # argument -> accepted values that its schema takes
    optional: frozenset[str] = frozenset()  # arguments that may be left out

    def plain(self) -> dict[str, JSON]:
        """As JSON; `from_plain` reads it."""
        arguments: dict[str, JSON] = {name: list(values) for name, values in self.arguments.items()}
        optional: list[JSON] = [*sorted(self.optional)]
        return {"name": self.name, "arguments": arguments, "optional": optional}


def from_plain(raw: JSON) -> AcceptedCall:
    """What `plain` made."""
    assert isinstance(raw, Mapping)
    arguments, optional = raw["arguments"], raw["optional"]
    assert isinstance(arguments, Mapping)
    assert isinstance(optional, list)
    values = {name: tuple(each) for name, each in arguments.items() if isinstance(each, list)}
    return AcceptedCall(str(raw["name"]), values, frozenset(map(str, optional)))


def accept(declaration: Declaration, raw: JSON) -> AcceptedCall:
    """An accepted call of the data, checked against the declaration: values that its schema refuses are left away,
    since no call can carry them. Raises ConfigError when an argument that is needed has none left."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{declaration.name}: accepted arguments are {echo(raw)}; expected an object of lists")
    parameters = declaration.tool.parameters
    properties, required = parameters.get("properties"), parameters.get("required", [])
    assert isinstance(properties, Mapping)
    assert isinstance(required, list)
    arguments: dict[str, tuple[JSON, ...]] = {}
    optional: set[str] = set()
    for name, values in raw.items():
        if name not in properties:
            raise ConfigError(f"{declaration.name}: an accepted value for {echo(name)}, which is not declared")
        if not isinstance(values, list):
            raise ConfigError(f"{declaration.name}.{name}: accepted values are {echo(values)}; expected a list")
        if LEFT_OUT in values and name not in required:
            optional.add(name)
        arguments[name] = _taken(properties[name], [value for value in values if value != LEFT_OUT or len(values) == 1])
        if not arguments[name] and name not in optional:
            raise ConfigError(f"{declaration.name}.{name}: of {echo(values)} its own declaration takes none")
    missing = [name for name in required if name not in raw]
    if missing:
        raise ConfigError(f"{declaration.name}: no accepted value for {missing[0]}, which is required")
    return AcceptedCall(declaration.name, arguments, frozenset(optional))


def _taken(schema: JSON, values: Sequence[JSON]) -> tuple[JSON, ...]:
    assert isinstance(schema, Mapping)
    check = validator(schema)
    return tuple(value for value in values if check.is_valid(example(value)))


def example(accepted: JSON) -> JSON:
    """A value to write for an accepted one. In an object each key has its own list of accepted values again."""
    if isinstance(accepted, Mapping):
        return {key: example(values[0]) for key, values in accepted.items() if isinstance(values, list) and values}
    if isinstance(accepted, list):
        return [example(item) for item in accepted]
    return accepted


def trouble(accepted: AcceptedCall, name: str, arguments: Mapping[str, JSON]) -> str | None:
    """Why a call is not the accepted one, naming the argument; None when it is."""
    if name != accepted.name:
        return f"{echo(name)} is called; expected {accepted.name}"
    for argument in arguments:
        if argument not in accepted.arguments:
            return f"{argument}: not expected here"
    for argument, values in accepted.arguments.items():
        if argument not in arguments:
            if argument not in accepted.optional:
                return f"{argument}: left out"
        elif not any(_same(value, arguments[argument]) for value in values):
            return f"{argument}: {echo(arguments[argument])} is none of the accepted values"
    return None


def matched(accepted: Sequence[AcceptedCall], calls: Sequence[tuple[str, Mapping[str, JSON]]]) -> int:
    """How many accepted calls were made, each call counting for one of them, whatever their order."""
    fits = [[n for n, want in enumerate(accepted) if trouble(want, *call) is None] for call in calls]
    taken: dict[int, int] = {}  # accepted -> the call that stands for it

    def place(call: int, seen: set[int]) -> bool:
        for want in fits[call]:
            if want not in seen:
                seen.add(want)
                if want not in taken or place(taken[want], seen):
                    taken[want] = call
                    return True
        return False

    return sum(place(call, set()) for call in range(len(calls)))


def _same(accepted: JSON, found: JSON) -> bool:
    """Whether `found` is what is accepted."""
    if isinstance(accepted, bool) or isinstance(found, bool) or accepted is None or found is None:
        return accepted is found
    if isinstance(accepted, int | float) and isinstance(found, int | float):
        return accepted == found
    if isinstance(accepted, str) and isinstance(found, str):
        return _plain_text(accepted) == _plain_text(found)
    if isinstance(accepted, list) and isinstance(found, list):
        return len(accepted) == len(found) and all(map(_same, accepted, found))
    if isinstance(accepted, Mapping) and isinstance(found, Mapping):
        return _same_object(accepted, found)
    return False


def _same_object(accepted: Mapping[str, JSON], found: Mapping[str, JSON]) -> bool:
    """Each key has a list of accepted values, "" among them where it may be left out."""
    if any(key not in accepted for key in found):
        return False
    for key, values in accepted.items():
        assert isinstance(values, list)
        if key not in found and LEFT_OUT not in values:
            return False
        if key in found and not any(_same(value, found[key]) for value in values):
            return False
    return True


def _plain_text(text: str) -> str:
    return _IGNORED.sub("", text).lower().replace("'", '"')
