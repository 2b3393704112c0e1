"""The process in which a judge runs: `python -I worker.py`, one JSON object per line in and out.

Knows nothing but the standard library and what the first line tells it: where to import from, and which function.
Each request carries a nonce that its reply repeats, and a deadline that the kernel enforces here too, so that a judge
that hangs ends even when whoever asked is gone.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
from typing import BinaryIO


def main() -> None:
    """Serve until the input ends."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # what a judge prints or reads goes nowhere
        os.dup2(null, stream)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    setup = json.loads(requests.readline())
    sys.path[:] = setup["path"]
    module, _, name = setup["judge"].partition(":")
    judge = getattr(importlib.import_module(module), name)
    _send(replies, {"nonce": setup["nonce"]})
    for line in requests:
        request = json.loads(line)
        signal.alarm(math.ceil(request["timeout_s"]) + 1)
        try:
            outcome = {"returned": _plain(judge(request["truth"], request["answer"]))}
        except Exception as error:  # noqa: BLE001 - the boundary: what a judge raises is its own verdict on itself
            outcome = {"raised": f"{type(error).__name__}: {error}"[:500]}
        signal.alarm(0)
        _send(replies, {"nonce": request["nonce"], **outcome})


def _plain(value: object) -> object:
    """What JSON can carry, as it is; anything else as a note of its type, which is no number."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return f"<{type(value).__name__}>"


def _send(replies: BinaryIO, reply: dict[str, object]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()
