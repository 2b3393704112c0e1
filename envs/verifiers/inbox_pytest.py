"""In a box for judging: runs pytest on tests that were staged, and reports every phase of every test as it ends.

The code under test shares this process, so the report alone proves nothing: the host compares it with what must be in
it, with the exit status, and with tests that must fail. Needs pytest; otherwise standard library alone.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import unittest
from collections.abc import Callable
from typing import Any

import _pytest.assertion.rewrite
import _pytest.config
import _pytest.main
import _pytest.python
import _pytest.reports
import _pytest.runner
import pluggy
import pytest

WATCHED: tuple[Any, ...] = (
    builtins,
    unittest.TestCase,
    pytest,
    pluggy.PluginManager,
    _pytest.assertion.rewrite,
    _pytest.config.Config,
    _pytest.main.Session,
    _pytest.python.Function,
    _pytest.reports.TestReport,
    _pytest.runner,
)


def callables() -> dict[str, Any]:
    """What decides over the outcome of a test, and the code it has now."""
    found: dict[str, Any] = {}
    for owner in WATCHED:
        for name, value in vars(owner).items():
            if callable(value) or isinstance(value, classmethod | staticmethod):
                inner = getattr(value, "__func__", value)
                found[f"{owner.__name__}.{name}"] = (value, getattr(inner, "__code__", None))
    return found


class Reporter:
    """A plugin that says what became of each phase of each test."""

    def __init__(self, say: Callable[..., None]) -> None:
        self.say = say

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase of one test."""
        expected = hasattr(report, "wasxfail") and report.outcome == "skipped"
        self.say(id=report.nodeid, phase=report.when, outcome="xfailed" if expected else report.outcome)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: Any) -> None:
        """A file that could not be collected."""
        if report.outcome == "failed":
            self.say(broken=report.nodeid, why=str(report.longrepr)[-300:])


def main() -> None:
    """Do the job on the standard input; the report goes to the standard output, and nothing else does."""
    job = json.load(sys.stdin)
    channel = os.dup(1)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def say(**facts: Any) -> None:
        os.write(channel, json.dumps({"nonce": job["nonce"], **facts}).encode("ascii") + b"\n")

    say(begun=True)
    os.chdir(job["root"])
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path.append(job["root"])  # last: a file of the repository never stands in for a module of the system
    sys.argv = ["pytest"]
    before = callables()
    argv = ["-q", "-c", job["config"], f"--rootdir={job['root']}", f"--confcutdir={job['root']}"]
    argv += ["--import-mode=append", "-p", "no:cacheprovider", "--continue-on-collection-errors", *job["tests"]]
    status = int(pytest.main(argv, plugins=[Reporter(say)]))
    after = callables()
    patched = [name for name in before if after.get(name) != before[name]]
    say(ended=True, status=status, patched=patched[:20])
    os._exit(status)  # nothing that was registered for the end of the process runs any more


if __name__ == "__main__":
    main()
