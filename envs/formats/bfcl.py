"""Rows of the Berkeley function-calling data: a question, the functions at hand, and the calls that are accepted.

A file of questions and one of answers, an object a line:
{"id": "s_2", "question": [[{"role": "user", "content": "..."}]], "function": [{"name": "math.hypot", ...}]}
{"id": "s_2", "ground_truth": [{"math.hypot": {"x": [4], "y": [5], "z": ["", 0]}}]}
Each argument has a list of accepted values; "" among them says that the argument may be left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from palestra.envs.builtin.data import json_lines
from palestra.envs.errors import ConfigError
from palestra.envs.formats.accepted_calls import AcceptedCall, accept
from palestra.envs.formats.tool_schema import Declaration, read_declaration
from palestra.envs.schemas import echo
from palestra.envs.types import JSON, Message, Role

_ROLES: tuple[Role, ...] = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class CallRow:
    """A question with its functions and the calls that answer it, in any order."""

    id: str
    question: tuple[Message, ...]
    declarations: tuple[Declaration, ...]
    answers: tuple[AcceptedCall, ...]


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row that cannot be used, and why. RefusedRow("parallel_7", "f: parameters.x: type is ...")"""

    id: str
    reason: str


def read_rows(questions: Path, answers: Path) -> tuple[tuple[CallRow, ...], tuple[RefusedRow, ...]]:
    """Every row of a file as what it says, or as why it is refused. Raises ConfigError where a file cannot be read."""
    accepted = {str(row.get("id")): row.get("ground_truth") for row in json_lines(answers)}
    rows: list[CallRow] = []
    refused: list[RefusedRow] = []
    for number, raw in enumerate(json_lines(questions), 1):
        id = str(raw.get("id", f"line {number}"))
        try:
            rows.append(_row(id, raw, accepted.get(id)))
        except ConfigError as error:
            refused.append(RefusedRow(id, str(error)))
    return tuple(rows), tuple(refused)


def _row(id: str, raw: Mapping[str, JSON], accepted: JSON) -> CallRow:
    functions = raw.get("function")
    if not isinstance(functions, list) or not functions:
        raise ConfigError(f"function is {echo(functions)}; expected a list of declarations")
    declarations = tuple(read_declaration(function) for function in functions)
    by_name = {declaration.name: declaration for declaration in declarations}
    if len(by_name) != len(declarations):
        raise ConfigError(f"two declarations of one name among {', '.join(each.name for each in declarations)}")
    if not isinstance(accepted, list) or not accepted:
        raise ConfigError(f"ground_truth is {echo(accepted)}; expected a list of accepted calls under the same id")
    answers = tuple(_answer(by_name, call) for call in accepted)
    return CallRow(id, _question(raw.get("question")), declarations, answers)


def _answer(declarations: Mapping[str, Declaration], raw: JSON) -> AcceptedCall:
    if not isinstance(raw, Mapping) or len(raw) != 1:
        raise ConfigError(f"an accepted call is {echo(raw)}; expected one name with its arguments")
    [(name, arguments)] = raw.items()
    if name not in declarations:
        raise ConfigError(f"an accepted call of {echo(name)}, which is not declared. Have: {', '.join(declarations)}")
    return accept(declarations[name], arguments)


def _question(raw: JSON) -> tuple[Message, ...]:
    """The messages of the one turn. Several turns are another kind of task."""
    if not isinstance(raw, list) or len(raw) != 1 or not isinstance(raw[0], list):
        raise ConfigError(f"question is {echo(raw)}; expected a list with one turn, which is a list of messages")
    return tuple(map(_message, raw[0]))


def _message(raw: JSON) -> Message:
    role = raw.get("role") if isinstance(raw, Mapping) else None
    content = raw.get("content") if isinstance(raw, Mapping) else None
    for known in _ROLES:
        if role == known and isinstance(content, str):
            return Message(known, content)
    raise ConfigError(f"a message is {echo(raw)}; expected a role ({', '.join(_ROLES)}) and a content of text")


def functions_of(rows: Sequence[CallRow]) -> tuple[str, ...]:
    """The names of all functions that the rows declare, sorted."""
    return tuple(sorted({declaration.name for row in rows for declaration in row.declarations}))
