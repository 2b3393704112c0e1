"""Judging a repository by its tests, in a tree that the judged code can read and cannot change.

The verifier's own tests and configuration are laid over what the policy handed over, all of it the examiner's; pytest
runs as the policy's user, isolated from both. See `pytest_report.py` for what counts as passed.
"""

from __future__ import annotations

import json
import posixpath
import secrets
from collections.abc import Collection, Mapping, Sequence

from palestra.envs.errors import ConfigError
from palestra.envs.sandboxes.contract import BoxSpec, Sandbox
from palestra.envs.types import Verdict
from palestra.envs.verifiers.inbox_text import program
from palestra.envs.verifiers.pytest_report import Sentinels, read_report
from palestra.envs.verifiers.signs import TEST_PATH_PLANTED, flagged
from palestra.envs.verifiers.staging import stage

ROOT = "/tests/repository"
CONFIG = "/tests/own/pytest.ini"
CONFIG_NAMES = ("pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml")
TEST_FOLDERS = ("test", "tests", "testing")
SENTINEL = "def {right}():\n    assert [1, 2] == [1, 2]\n\n\ndef {wrong}():\n    assert [1, 2] == [1, 3]\n"


class PytestExamination:
    """See Examination. 1 where every expected test passes, else 0; the parts say how many "passed" of "expected".

    `files`, `links`, `executable`: the whole repository with what the policy made of it. `tests`: the verifier's own,
    and whatever else must be as it was: conftest.py, data, helpers. A conftest.py that is neither there nor in
    `allow_config` is left out, as is everything else of the policy in a folder of tests; other settings of pytest have
    no effect unless `allow_config` names their file. `flags`: what the caller found in the artefact.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        tests: Mapping[str, bytes],
        expected: Sequence[str],
        *,
        links: Mapping[str, str] | None = None,
        executable: Collection[str] = (),
        allow_config: Sequence[str] = (),
        flags: Sequence[str] = (),
        spec: BoxSpec | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if not expected:
            raise ConfigError("no expected test: a repository without one would pass whatever it does")
        self.spec = spec or BoxSpec(role="verifier")
        self.files: Mapping[str, bytes] = {}
        self._expected = tuple(expected)
        self._executable = frozenset(executable)
        self._timeout_s = timeout_s
        self._links = {path: to for path, to in (links or {}).items() if not _planted(path, tests)}
        kept = {path: data for path, data in files.items() if _stays(path, tests, allow_config)}
        self._tree = {**kept, **tests}
        self._config = next(
            (f"{ROOT}/{name}" for name in allow_config if name in CONFIG_NAMES and name in kept), CONFIG
        )
        planted = len(self._links) < len(links or {}) or any(_in_the_way(path, tests) for path in files)
        self._flags = (*flags, *((TEST_PATH_PLANTED,) if planted else ()))

    async def run(self, box: Sandbox, nonce: str) -> Verdict:
        """See Examination."""
        own, right, wrong = (f"test_{secrets.token_hex(6)}" for _ in range(3))
        sentinels = Sentinels(f"{own}.py::{right}", f"{own}.py::{wrong}")
        files = {**self._tree, f"{own}.py": SENTINEL.format(right=right, wrong=wrong).encode()}
        await stage(box, ROOT, files, user="examiner", executable=self._executable, links=self._links)
        await stage(box, posixpath.dirname(CONFIG), {"pytest.ini": b"[pytest]\n"}, user="examiner")
        tests = sorted({test.partition("::")[0] for test in self._expected if test.partition("::")[0] in self._tree})
        tests.insert(len(tests) // 2, f"{own}.py")
        job = {"nonce": nonce, "root": ROOT, "config": self._config, "tests": tests}
        ended = await box.run(
            ["python3", "-I", "-B", "-X", "pycache_prefix=/tests/none", "-c", program("inbox_pytest")],
            timeout_s=self._timeout_s,
            stdin=json.dumps(job).encode(),
        )
        verdict = read_report(ended, nonce, self._expected, sentinels)
        return flagged(verdict, self._flags)


def _in_the_way(path: str, tests: Mapping[str, bytes]) -> bool:
    """Whether a file or link at `path` stands where tests need a folder."""
    return any(test.startswith(f"{path}/") for test in tests)


def _planted(path: str, tests: Mapping[str, bytes]) -> bool:
    """Whether a link at `path` stands where a test or a folder of tests belongs."""
    return path in tests or _in_the_way(path, tests)


def _stays(path: str, tests: Mapping[str, bytes], allow_config: Sequence[str]) -> bool:
    """Whether a file of the repository is part of what is judged."""
    if path in allow_config:
        return True
    if path in tests or _in_the_way(path, tests) or posixpath.basename(path) == "conftest.py":
        return False
    folders = {posixpath.dirname(test) for test in tests}
    return not any(posixpath.basename(folder) in TEST_FOLDERS and path.startswith(f"{folder}/") for folder in folders)
