"""In the box: the first process. It starts the policy's commands, ends them, and removes what they leave behind.

It must be process 1 of its own process namespace: then SIGKILL to everything (`kill(-1)`) reaches every process of the
box but itself, every orphan becomes its child, and "no child left" proves that no process is left.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from palestra.envs.sandboxes.inbox_commands import Commands
from palestra.envs.sandboxes.inbox_digest import digest
from palestra.envs.sandboxes.inbox_export import Export
from palestra.envs.sandboxes.inbox_files import Files, wipe
from palestra.envs.sandboxes.inbox_gate import hand_over
from palestra.envs.sandboxes.inbox_line import BoxBrokenError, Line, Pieces
from palestra.envs.sandboxes.inbox_policy import Policy, no_new_privileges
from palestra.envs.sandboxes.inbox_seccomp import confine
from palestra.envs.sandboxes.inbox_snapshot import Restoring, Snapshot
from palestra.envs.sandboxes.inbox_state import Roots, differing, restore, state

WIPE_S = 20.0
DIGEST_S = 20.0
EXPORT_S = 20.0
SETTLE_S = 0.25  # sockets of killed processes may be listed a moment longer


class Supervisor:
    """Answers the host's requests, one after the other."""

    def __init__(self, config: dict[str, Any], line: Line) -> None:
        self.line = line
        line.lease_s = config["lease_s"]
        line.ends_at = time.monotonic() + config["lifetime_s"]
        self.policy = Policy(config)
        self.commands = Commands(config, line, self.policy)
        self.files = Files(config["workspace"], self.policy)
        self.roots: Roots = config["roots"]
        confine()
        restore(self.roots, self.policy)
        if config["gate"]:  # before the look at the cold box, which has that socket
            hand_over(*config["gate"])
        self.cold = state(self.roots)

    def answer(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Do what is asked. Whatever goes wrong is told to the host by its kind."""
        try:
            return self._do(header, body)
        except BoxBrokenError as error:
            return {"error": "broken", "message": str(error)}, b""
        except OSError as error:
            message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            return {"error": "os", "errno": error.errno, "message": message}, b""
        except ValueError as error:
            return {"error": "value", "message": str(error)}, b""

    def _do(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        if header["do"] == "run":
            return self._run(header, body)
        if header["do"] == "read":
            return {}, self.files.read(header["path"], header["max_bytes"])
        if header["do"] == "write":
            self.files.write(header["path"], body, header["mode"])
            return {}, b""
        if header["do"] == "reset":
            return self._reset(header["files"], body), b""
        if header["do"] == "digest":
            return {"digest": digest(self.roots, self.policy, time.monotonic() + DIGEST_S)}, b""
        if header["do"] == "export":
            export = Export(self.files, Pieces(self.line), header["limits"], time.monotonic() + EXPORT_S)
            return export.take(header["paths"]), b""
        if header["do"] == "snapshot":
            until = time.monotonic() + DIGEST_S
            Snapshot(Pieces(self.line), header["max_bytes"], until).take(self.roots, self.policy)
            return {"digest": digest(self.roots, self.policy, until)}, b""
        if header["do"] == "restore":
            return self._restore(header), b""
        raise BoxBrokenError(f"{header['do']!r} is nothing this supervisor does")

    def _run(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            return self.commands.run(header, body)
        except OSError as error:  # no pipe, no process: the box's trouble, not the command's
            raise BoxBrokenError(f"cannot start a command: {error}") from error

    def _reset(self, files: list[list[Any]], body: bytes) -> dict[str, Any]:
        """Back to the state at the start, proved; then write `files`: [path, length, mode] each."""
        survivors = self._clean()
        at = 0
        for path, length, mode in files:
            self.files.write(path, body[at : at + length], mode)
            at += length
        return {"survivors": survivors}

    def _restore(self, header: dict[str, Any]) -> dict[str, Any]:
        """Back to the state of a snapshot, whose bytes follow the request: proved clean, then proved the same."""
        left = header["bytes"]

        def take(size: int) -> bytes:
            nonlocal left
            if size > left:
                raise ValueError("the snapshot ends too early")
            left -= size
            return self.line.exactly(size)

        try:
            self._clean()
            Restoring(take).put(self.roots, self.policy)
        except (OSError, ValueError) as error:
            raise BoxBrokenError(f"the snapshot cannot be put back: {error}") from error
        finally:
            self.line.skip(left)
        found = digest(self.roots, self.policy, time.monotonic() + DIGEST_S)
        if found != header["digest"]:
            raise BoxBrokenError("what was put back is not what the snapshot says")
        return {}

    def _clean(self) -> int:
        """Back to the state at the start, proved; how many processes were killed for it."""
        survivors, _ = self.commands.sweep()
        try:
            restore(self.roots, self.policy)  # first: the policy may have closed them
            for root in self.roots:
                wipe(root, time.monotonic() + WIPE_S)
        except OSError as error:
            raise BoxBrokenError(f"cannot wipe: {error}") from error
        settled = time.monotonic() + SETTLE_S
        while left := differing(state(self.roots), self.cold):
            if time.monotonic() > settled:
                raise BoxBrokenError(f"not clean after the reset: {', '.join(left)}")
            time.sleep(0.005)
        return survivors


def main() -> None:
    """Serve the host until it is gone."""
    line = Line()
    config, _ = line.receive()
    signal.alarm(0)  # set while the source was on its way
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which process 1 of a namespace never gets from inside
    if os.getpid() != 1:
        line.send({"error": "broken", "message": f"the supervisor is process {os.getpid()} of its box, not process 1"})
        return
    if not no_new_privileges():
        line.send({"error": "broken", "message": "the box does not have no-new-privileges set"})
        return
    supervisor = Supervisor(config, line)
    line.send({"unset": supervisor.policy.unset})
    while True:
        header, body = line.receive()
        if header["do"] != "beat":
            line.send(*supervisor.answer(header, body))
