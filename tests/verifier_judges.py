"""Judges that behave and misbehave, for the tests of the process that runs them."""

from __future__ import annotations

import os
import re
import sys
import time


def agrees(truth: object, answer: object) -> float:
    return 1.0 if truth == answer else 0.0


def returns(truth: object, answer: object) -> object:
    """What `answer` names: values that JSON cannot say, or says in ways that a verdict must not be."""
    named: dict[object, object] = {
        "nan": float("nan"),
        "infinity": float("inf"),
        "huge": 10**400,
        "bytes": b"1",
        "set": {1.0},
        "keys": {1: 1.0, "reward": 1.0},
    }
    if answer == "prints":
        print('{"nonce": "0", "returned": 1.0}', flush=True)
        sys.stderr.write("noise")
        return 0.5
    return named[answer] if isinstance(answer, str) and answer in named else answer


def raises(truth: object, answer: object) -> float:
    raise RuntimeError("the judge is broken")


def exits(truth: object, answer: object) -> float:
    sys.exit(0)


def crashes(truth: object, answer: object) -> float:
    os._exit(1)


def sleeps(truth: object, answer: object) -> float:
    """For as many seconds as the answer says."""
    time.sleep(float(str(answer)))
    return 1.0


def stuck_in_c(truth: object, answer: object) -> float:
    """A regular expression that holds the interpreter's lock for ages: no Python code of the process can end it."""
    re.match(r"(a+)+$", "a" * 40 + "b")
    return 1.0


def forges(truth: object, answer: object) -> float:
    """Writes a reply to every descriptor before it returns."""
    for descriptor in range(10):
        try:
            os.write(descriptor, b'{"nonce": "0", "returned": 1.0}\n')
        except OSError:
            continue
    return 0.0


def environment(truth: object, answer: object) -> dict[str, float]:
    """How many variables the process has beside the two that it needs."""
    return {"reward": 0.0, "variables": float(len(set(os.environ) - {"PATH", "LANG", "LC_CTYPE"}))}


def process(truth: object, answer: object) -> dict[str, float]:
    """Which process judges, and how often it has been asked."""
    _asked.append(1)
    return {"reward": 0.0, "pid": float(os.getpid()), "asked": float(len(_asked))}


_asked: list[int] = []
number = 7
