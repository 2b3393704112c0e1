"""In the box: everything a policy could leave a trace in, listed, and put back as it was."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

from palestra.envs.sandboxes.inbox_policy import Policy

TEXTS = ("/proc/self/mountinfo", "/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg")
SOCKETS = ("/proc/net/sockstat", "/proc/net/sockstat6")  # /proc/net/tcp walks the whole machine's table: 11 ms
IPC_RMID = 0

Roots = dict[str, list[int]]
"""Every directory that the policy can write to: path -> [mode, uid, gid]."""


def restore(roots: Roots, policy: Policy) -> None:
    """Owner, mode and attributes of the writable directories themselves, and no System V object."""
    for root, (mode, uid, gid) in roots.items():
        if policy.apart:
            os.chown(root, uid, gid)
        os.chmod(root, mode)
        with contextlib.suppress(OSError):  # a file system without attributes
            for name in os.listxattr(root):
                os.removexattr(root, name)
    _remove_ipc(policy)


def state(roots: Roots) -> dict[str, Any]:
    """What two clean boxes have in common. No `differing` from the state at the start means clean."""
    found: dict[str, Any] = {"processes": sorted(name for name in os.listdir("/proc") if name.isdigit())}
    for root in roots:
        facts = os.stat(root)
        with os.scandir(root) as entries:
            found[root] = [facts.st_mode, facts.st_uid, facts.st_gid, next(entries, None) is None]
    for path in TEXTS:
        found[path] = _text(path)
    for path in SOCKETS:  # b"TCP: inuse 0 orphan 0 tw 2": the first count is of this box, and closed ones fade in tw
        rows = (row.split() for row in _text(path).splitlines())
        found[path] = {row[0]: int(row[2]) for row in rows}
    return found


def differing(now: dict[str, Any], cold: dict[str, Any]) -> list[str]:
    """What a box has that it did not have at the start.

    Sockets may be fewer than then: the one with which a box's network is set up is freed some time after its close.
    """
    return [key for key in now if not (_no_more(now[key], cold[key]) if key in SOCKETS else now[key] == cold[key])]


def _no_more(now: dict[bytes, int], then: dict[bytes, int]) -> bool:
    return all(count <= then.get(kind, 0) for kind, count in now.items())


def _remove_ipc(policy: Policy) -> None:
    """System V memory, semaphores and queues outlive their processes; only their owner may remove them."""
    ids = {kind: _sysv_ids(kind) for kind in ("shm", "sem", "msg")}
    if not any(ids.values()):
        return
    libc = ctypes.CDLL(None)
    with policy.acting():
        for number in ids["shm"]:
            libc.shmctl(number, IPC_RMID, None)
        for number in ids["sem"]:
            libc.semctl(number, 0, IPC_RMID)
        for number in ids["msg"]:
            libc.msgctl(number, IPC_RMID, None)


def _sysv_ids(kind: str) -> list[int]:
    return [int(row.split()[1]) for row in _text(f"/proc/sysvipc/{kind}").splitlines()[1:]]


def _text(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    with open(fd, "rb", buffering=0) as file:
        return file.readall() or b""
