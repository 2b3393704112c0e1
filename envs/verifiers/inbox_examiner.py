"""In a box for judging: asks a function of another process and holds the answers against the tests.

Runs as the examiner, with the tests; the function runs as the policy's user, behind the socket at descriptor 3, and
sends plain data only. Standard library alone; the text of `inbox_plain.py` comes before this one.
"""

from __future__ import annotations

import base64
import builtins
import json
import socket
import sys
import time
from typing import Any

from palestra.envs.verifiers.inbox_plain import Raised, decode, encode, receive, send


class HungUpError(BaseException):
    """Nobody answers any more, so no test can pass. No Exception: a test that catches those must not pass by it."""


class Candidate:
    """The function, as the tests call it."""

    def __init__(self, line: socket.socket, deadline: float) -> None:
        self.line, self.deadline = line, deadline
        self.gone: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns; what it raises is raised again where it is a built-in exception."""
        outcome = self.ask("returned", ["call", encode(args), encode(kwargs)])
        if outcome[0] == "returned":
            return self.understood(outcome[1])
        kind = getattr(builtins, str(outcome[1]), None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind = Raised
        raise kind(str(outcome[2])[:500])

    def ask(self, wanted: str, request: list[Any]) -> list[Any]:
        """One question, answered by `wanted` or "raised". Raises HungUpError where no such answer comes."""
        if self.gone is None:
            try:
                self.line.settimeout(max(0.001, self.deadline - time.monotonic()))
                send(self.line, request)
                outcome = receive(self.line)
                if isinstance(outcome, list) and len(outcome) > 1 and outcome[0] == wanted:
                    return outcome
                if isinstance(outcome, list) and len(outcome) > 2 and outcome[0] == "raised":
                    return outcome
                self.gone = "its answer is none"
            except TimeoutError:
                self.gone = "no answer in time"
            except (OSError, EOFError, ValueError, RecursionError) as error:
                self.gone = f"it is gone: {type(error).__name__}: {error}"
        raise HungUpError(self.gone)

    def understood(self, value: Any) -> Any:
        """A value of its answer."""
        try:
            return decode(value)
        except (ValueError, TypeError, IndexError, KeyError, RecursionError) as error:
            self.gone = "its answer is none"
            raise HungUpError(self.gone) from error


def examine(candidate: Candidate, test: str) -> str | None:
    """Run one test: None when it passed, else what went wrong."""
    try:
        exec(compile(test, "test", "exec"), {"__name__": "test", "candidate": candidate})
    except BaseException as error:  # noqa: BLE001 - whatever ends a test, it has not passed
        return f"{type(error).__name__}: {error}"[:300]
    return candidate.gone


def main() -> None:
    """Read what to judge from the standard input, write one line of verdict."""
    job = json.load(sys.stdin)
    candidate = Candidate(socket.socket(fileno=3), time.monotonic() + job["seconds"])
    why: str | None = None
    try:
        opened = candidate.ask("ready", ["load", base64.b64decode(job["code"]).hex(), job["entry_point"]])
        if opened[0] != "ready":
            why = f"it cannot be loaded: {str(opened[1])[:100]}: {str(opened[2])[:300]}"
    except HungUpError as error:
        why = str(error)
    reasons = [why if why is not None else examine(candidate, test) for test in job["tests"]]
    first = next((reason for reason in reasons if reason is not None), None)
    passed = [int(reason is None) for reason in reasons]
    sys.stdout.write(json.dumps({"nonce": job["nonce"], "passed": passed, "first": first}) + "\n")


if __name__ == "__main__":
    main()
