"""In the box: who the policy is, and how the supervisor takes its rights."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
from collections.abc import Iterator
from typing import Any

from palestra.envs.sandboxes.inbox_line import BoxBrokenError

PR_SET_DUMPABLE, PR_GET_NO_NEW_PRIVS = 4, 39
CAPABILITY_VERSION_3 = 0x20080522


class Policy:
    """The user whose commands run here: never the supervisor's own, except where the host grants only one user."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.uid, self.gid = int(config["uid"]), int(config["gid"])
        self.examiner: int | None = config["examiner"]  # in boxes for judging: uid and gid of the user who judges
        self.apart = os.getuid() != self.uid
        self.oom_score = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        self.unset = _set_limits(config["rlimits"], config["may_lack"])
        os.umask(0o022)
        if self.apart:
            os.setgroups([])
            _inherit_no_capability()
        else:  # one user for both: keep this process's memory and descriptors from the policy's debugger
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)

    @contextlib.contextmanager
    def lending(self, user: str = "policy") -> Iterator[None]:
        """For starting a command: what is executed in here has that user for good and no capability.

        Executing makes the saved user the effective one; only we keep 0 as the saved one and take it back. No process
        of the policy lives meanwhile but the new one, and nothing inside can signal process 1 of its namespace.
        """
        uid, gid = self.uid, self.gid
        if user == "examiner":
            if self.examiner is None or not self.apart:
                raise BoxBrokenError("this box has no examiner: it is for a policy, or has only one user to give")
            uid = gid = self.examiner
        os.write(self.oom_score, b"1000")  # inherited: the kernel kills a command before it kills the supervisor
        if self.apart:
            os.setresgid(gid, gid, 0)
            os.setresuid(uid, uid, 0)
        try:
            yield
        finally:
            if self.apart:
                os.setresuid(0, 0, 0)
                os.setresgid(0, 0, 0)
            os.write(self.oom_score, b"0")

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """For reaching files: with the policy's rights and no more, so no path leads to what it could not reach."""
        if not self.apart:
            yield
            return
        os.setegid(self.gid)
        os.seteuid(self.uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)


def no_new_privileges() -> bool:
    """Whether no program can give this process or its children more rights than it has."""
    return bool(ctypes.CDLL(None).prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1)


def _set_limits(limits: dict[str, int], may_lack: list[str]) -> list[str]:
    """On this process too: only its children feel them. Returns those of `may_lack` that the kernel does not set."""
    unset = []
    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        except (OSError, ValueError):
            if name not in may_lack:
                raise
            unset.append(name)
    return unset


def _inherit_no_capability() -> None:
    """Keep ours, and let none pass to what we start: clears the inheritable set, and the ambient one with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)  # effective, permitted, inheritable: low words, then high words
    if libc.capget(header, data) != 0:
        raise OSError(ctypes.get_errno(), "cannot read the capabilities")
    words = list(struct.unpack("6I", data.raw))
    words[2] = words[5] = 0
    if libc.capset(header, struct.pack("6I", *words)) != 0:
        raise OSError(ctypes.get_errno(), "cannot clear the inheritable capabilities")
