"""The nouns of a task. Everything here is frozen, plain data that can cross a process border."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeGuard

from palestra.envs.errors import ScoreError

Role = Literal["system", "user", "assistant", "tool"]

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]
"""A value that JSON can carry. Nothing that crosses from a policy to a judge is anything else."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. Message("tool", "42", name="calculate", call_id="c1")"""

    role: Role
    content: str
    name: str | None = None  # the tool that answers, on role "tool"
    call_id: str | None = None  # which call it answers, on role "tool"


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. `truth` is for verifiers only: it never enters a prompt or a policy's box."""

    id: str
    prompt: tuple[Message, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)  # path in the box's workspace -> content
    image: str | None = None  # None: the default image of the sandbox in use
    truth: JSON = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed request to run a tool. ToolCall("c1", "lookup", {"key": "oak"})"""

    id: str
    name: str
    arguments: Mapping[str, JSON]


@dataclass(frozen=True, slots=True)
class CallError:
    """A tool call that could not be read. `message` tells the policy what was expected and where it went wrong."""

    message: str


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy as text, and what it asks for. No call and no error: plain words.

    `calls` and `errors` are in the order in which the policy wrote them.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[CallError, ...] = ()


class CallStatus(StrEnum):
    """What became of one call. Each value is recorded, and none ends an episode by itself."""

    OK = "ok"
    UNPARSABLE = "unparsable"  # the text between the tags is not a call
    NO_CALL = "no_call"  # a turn that neither calls a tool nor finishes
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"  # refused by the schema; the tool did not run
    REPEATED = "repeated"  # refused by the repeated-call detector
    LIMIT = "limit"  # not run: over a cap on calls or bytes, or after the call that ended the episode
    ERROR = "error"  # the tool ran and failed
    TIMEOUT = "timeout"  # the tool ran out of its own time limit


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The outcome of one call, as the policy reads it (`content`) and as the record keeps it."""

    status: CallStatus
    content: str
    name: str | None = None
    call_id: str | None = None
    arguments: Mapping[str, JSON] | None = None
    seconds: float = 0.0
    attempts: int = 1  # tries inside the runtime: retries of transient failures cost the policy no step


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the environment answers to an action: messages to append, and whether the episode is over."""

    observations: tuple[Message, ...]
    results: tuple[ToolResult, ...]
    done: bool = False
    reward: float = 0.0
    """What this step earned by itself, beside the verdict on the whole episode."""
    state: str | None = None
    """A digest of the world after the step: equal digests, equal worlds. None: nobody asked for it."""


@dataclass(frozen=True, slots=True)
class Artefact:
    """What leaves an episode to be judged: the declared answer and the declared output files, as plain data.

    Paths are relative to the box's workspace, with "/" between parts and never "..". Bytes of a name that are no UTF-8
    are lone surrogates, as `os.fsdecode` makes them.
    """

    answer: JSON = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    executable: frozenset[str] = frozenset()  # of `files`, those with an execute bit
    links: Mapping[str, str] = field(default_factory=dict)  # symbolic links that stay inside the tree: path -> target
    skipped: Mapping[str, str] = field(default_factory=dict)  # what was left where it is: path -> why
    flags: tuple[str, ...] = ()  # signs of tampering, found while it was taken out
    failure: str | None = None  # the policy's own doing that leaves nothing to judge, such as "artefact_too_large"


@dataclass(frozen=True, slots=True)
class Scored:
    """A verdict. Scored(1.0, {"correct": 1.0}). `value` is finite and within the verifier's declared bounds.

    Raises ScoreError, a ValueError, for a value that is not finite.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)  # unweighted, for logs only
    flags: tuple[str, ...] = ()  # signs of tampering; what they do to the value is for the run's settings to say
    failure: str | None = None  # why there was nothing to score, where that is the policy's own doing; the value is 0

    def __post_init__(self) -> None:
        if not is_finite_number(self.value):
            raise ScoreError(
                f"not finite: a score of {repr(self.value)[:40]}; expected a finite number. A judge that found none "
                "returns NoVerdict(cause)"
            )


def is_finite_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is a number that double precision can hold."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # of an integer
        return False


@dataclass(frozen=True, slots=True)
class NoVerdict:
    """The judge could not judge. Never a reward: the trajectory leaves the statistics of its group."""

    cause: str
    flags: tuple[str, ...] = ()


Verdict = Scored | NoVerdict
