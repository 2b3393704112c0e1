"""Who made a box: written on everything that is created, so that what a dead owner left is told from what is in use."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

PREFIX = "palestra."
PROJECT = "palestra"


@dataclass(frozen=True, slots=True)
class Owner:
    """A process of a host. Owner("node3", boot="8f1c...", namespace="4026531836", pid=4711, started=188223)

    A pid comes again, so its start time belongs to it; a host boots again, so its boot id does; and the same pid means
    another process in another process namespace.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: int  # clock ticks from boot

    @classmethod
    def this_process(cls) -> Owner:
        """Us."""
        pid = os.getpid()
        started = _start_time(pid)
        assert started is not None, "this process has a start time"
        return cls(socket.gethostname(), _boot_id(), _namespace(), pid, started)

    @property
    def alive(self) -> bool | None:
        """Whether this very process runs; None where that cannot be seen from here (another host or namespace)."""
        if self.boot != _boot_id():
            return False if self.host == socket.gethostname() else None
        if self.namespace != _namespace():
            return None
        return _start_time(self.pid) == self.started


@dataclass(frozen=True, slots=True)
class Tag:
    """What is written on a box: its owner, the run and the lender it belongs to, what for, and when it is over."""

    owner: Owner
    run: str
    lender: str  # one backend object of the owner; what it made is found again by this
    episode: str
    expires: float  # seconds since the epoch

    def labels(self) -> dict[str, str]:
        """{"palestra.project": "palestra", "palestra.owner.pid": "4711", ...}"""
        labels = {PREFIX + "project": PROJECT, PREFIX + "expires": f"{self.expires:.0f}"}
        labels |= {PREFIX + name: getattr(self, name) for name in ("run", "lender", "episode")}
        return labels | {f"{PREFIX}owner.{field.name}": str(getattr(self.owner, field.name)) for field in fields(Owner)}

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> Tag | None:
        """What `labels` say; None when they are not ours or not whole."""
        if labels.get(PREFIX + "project") != PROJECT:
            return None
        try:
            facts = {field.name: labels[f"{PREFIX}owner.{field.name}"] for field in fields(Owner)}
            owner = Owner(facts["host"], facts["boot"], facts["namespace"], int(facts["pid"]), int(facts["started"]))
            run, lender, episode = (labels[PREFIX + name] for name in ("run", "lender", "episode"))
            return cls(owner, run, lender, episode, float(labels[PREFIX + "expires"]))
        except (KeyError, ValueError):
            return None

    def abandoned(self, now: float) -> bool:
        """The owner is dead, or cannot be seen and its box is over its time. A live owner's box never is."""
        alive = self.owner.alive
        return not alive if alive is not None else now > self.expires


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _start_time(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else int(rest[18])
