"""Judging by a test script that writes its reward into a file, as task folders of other systems have it.

The script runs as the examiner in a clean box, on what the policy handed over. What the script itself executes has its
rights: a task whose script imports the judged code trusts that code, and no box can change that.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from palestra.envs.errors import ConfigError, SandboxError
from palestra.envs.sandboxes.contract import BoxSpec, Exec, Sandbox
from palestra.envs.types import NoVerdict, Scored, Verdict
from palestra.envs.verifiers.inbox_text import program
from palestra.envs.verifiers.reward_file import BAD, read_reward_json, read_reward_text
from palestra.envs.verifiers.signs import flagged, reward_preplanted
from palestra.envs.verifiers.staging import stage
from palestra.envs.verifiers.verdict import Bounds

REWARDS = "/logs/verifier"
NAMES = ("reward.txt", "reward.json")
MAX_BYTES = 64 * 2**10
READ_S = 15.0


class ScriptExamination:
    """See Examination. The reward is what `script` writes to /logs/verifier/reward.txt or reward.json, within `bounds`.

    `files`, `links`, `executable`: what lies in the workspace, changed by everyone. `tests`: what lies in /tests, the
    examiner's alone, with the script itself. `env`: for the script.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        tests: Mapping[str, bytes],
        *,
        script: str = "test.sh",
        links: Mapping[str, str] | None = None,
        executable: Collection[str] = (),
        env: Mapping[str, str] | None = None,
        bounds: Bounds | None = None,
        flags: Sequence[str] = (),
        spec: BoxSpec | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        if script not in tests:
            raise ConfigError(f"no {script} among the tests; have {', '.join(sorted(tests)[:10]) or 'none'}")
        self.spec = spec or BoxSpec(role="verifier")
        self.files: Mapping[str, bytes] = {}
        self._tree, self._links, self._executable = dict(files), dict(links or {}), frozenset(executable)
        self._tests = dict(tests)
        self._script = script
        self._env = {"HOME": "/logs", **(env or {})}  # not the workspace, where a policy may leave settings
        self._bounds = bounds or Bounds(0.0, 1.0)
        self._timeout_s = timeout_s
        self._flags = (*flags, *reward_preplanted((*files, *self._links)))

    async def run(self, box: Sandbox, nonce: str) -> Verdict:
        """See Examination."""
        await stage(box, ".", self._tree, user="policy", executable=self._executable, links=self._links)
        await stage(box, "/tests/.", self._tests, user="examiner", executable=self._tests)
        await stage(box, REWARDS, {}, user="examiner")
        ended = await box.run(
            ["/bin/bash", f"/tests/{self._script}"], timeout_s=self._timeout_s, env=self._env, user="examiner"
        )
        if ended.timed_out or ended.exit_code is None:
            how = f"more than {self._timeout_s:g} s" if ended.timed_out else f"signal {ended.signal}"
            return NoVerdict(f"{self._script} was ended: {how}", self._flags)
        found = await _written(box, nonce)
        return flagged(self._read(found, ended), self._flags)

    def _read(self, found: dict[str, Any], ended: Exec) -> Verdict:
        """The one reward that was written. Two sources are a verdict only where they agree."""
        verdicts: list[Verdict] = []
        for name, read in zip(NAMES, (read_reward_text, read_reward_json), strict=True):
            file = found[name]
            if file is not None and "bad" in file:
                return NoVerdict(f"{BAD}: {name}: {file['bad']}")
            if file is not None:
                verdicts.append(read(base64.b64decode(file["data"]), self._bounds))
        if not verdicts:
            said = ended.stderr[-300:].decode(errors="replace")
            return NoVerdict(f"{self._script} wrote no reward, exit status {ended.exit_code}: {said}")
        refused = [verdict for verdict in verdicts if isinstance(verdict, NoVerdict)]
        values = {verdict.value for verdict in verdicts if isinstance(verdict, Scored)}
        if refused:
            return refused[0]
        if len(values) > 1:
            return NoVerdict(f"{BAD}: {' and '.join(NAMES)} hold different rewards: {sorted(values)}")
        return verdicts[-1]


async def _written(box: Sandbox, nonce: str) -> dict[str, Any]:
    """What the script left under each name. Raises SandboxError: nothing of a policy runs any more."""
    job = {"nonce": nonce, "folder": REWARDS, "names": NAMES, "max_bytes": MAX_BYTES}
    argv = ["/usr/bin/python3", "-I", "-S", "-B", "-c", program("inbox_reward")]
    ended = await box.run(argv, timeout_s=READ_S, stdin=json.dumps(job).encode(), user="examiner")
    try:
        answer = json.loads(ended.stdout)
        if ended.ok and answer["nonce"] == nonce:
            return dict(answer["found"])
    except (ValueError, KeyError, TypeError):
        pass
    raise SandboxError(f"{box.id}: the reward cannot be read, exit status {ended.exit_code}: {ended.stderr[-300:]!r}")
