"""In a box for judging: answers calls of a policy's function. It knows no test, no expected value and no verdict.

Runs as the policy's user. Standard library alone; the text of `inbox_plain.py` comes before this one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from palestra.envs.verifiers.inbox_plain import decode, encode, receive, send


def load(code: str, entry_point: str) -> Callable[..., Any]:
    """The function of that name in the code, which comes as hexadecimal digits."""
    namespace: dict[str, Any] = {"__name__": "solution"}
    exec(compile(bytes.fromhex(code), "solution.py", "exec"), namespace)
    function = namespace[entry_point]
    if not callable(function):
        raise TypeError(f"{entry_point} is no function")
    return function  # type: ignore[no-any-return]


def main() -> None:
    """Answer until the other end hangs up."""
    line = socket.socket(fileno=3)
    function: Callable[..., Any] | None = None
    while True:
        try:
            request = receive(line)
        except (EOFError, OSError):
            return
        try:
            if request[0] == "load":
                function = load(request[1], request[2])
                answer = ["ready", True]
            else:
                assert function is not None, "asked before it was loaded"
                answer = ["returned", encode(function(*decode(request[1]), **decode(request[2])))]
        except BaseException as error:  # noqa: BLE001 - everything that the judged code raises is its answer
            answer = ["raised", type(error).__name__, str(error)[:500]]
        send(line, answer)


if __name__ == "__main__":
    main()
