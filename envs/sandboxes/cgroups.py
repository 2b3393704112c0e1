"""Control groups for boxes that no engine puts into one: memory, processes and CPU of a box, both kernel interfaces."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.contract import Limits
from palestra.envs.sandboxes.owner import Owner

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids", "cpu")
PARENT = "palestra"
PERIOD_US = 100_000
GONE_S = 5.0


@dataclass(frozen=True, slots=True)
class Group:
    """The folders of one box's group: one on the unified interface, one for each controller on the older one."""

    name: str
    folders: tuple[Path, ...]

    @property
    def memory_folder(self) -> Path:
        """Where the counter of kills for memory lies."""
        return self.folders[0]

    @property
    def entrances(self) -> list[str]:
        """Files to write a pid to."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    def remove(self) -> None:
        """Kill what is in it and remove it. Raises SandboxError when it stays."""
        deadline = time.monotonic() + GONE_S
        for folder in self.folders:
            while folder.is_dir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    for pid in (folder / "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    continue
                if time.monotonic() > deadline:
                    raise SandboxError(f"the control group {folder} still has processes {GONE_S:g} s after SIGKILL")
                time.sleep(0.005)


def available() -> bool:
    """Whether this process may make groups with all three controllers."""
    return os.geteuid() == 0 and _parents() is not None


def create(box: str, owner: Owner, limits: Limits) -> Group:
    """A group with the limits of a box, named after its owner. Raises SandboxError."""
    parents = _parents()
    if parents is None:
        raise SandboxError("no control groups can be made here")
    name = f"{box}@{owner.namespace}-{owner.pid}-{owner.started}"
    group = Group(name, tuple(parent / PARENT / name for parent in parents))
    quota = int(limits.cpus * PERIOD_US)
    unified = {
        "memory.max": limits.memory_bytes,
        "memory.swap.max": 0,
        "pids.max": limits.processes + 2,  # the supervisor and, outside, bubblewrap
        "cpu.max": f"{quota} {PERIOD_US}",
    }
    older = {
        "memory.limit_in_bytes": limits.memory_bytes,
        "memory.memsw.limit_in_bytes": limits.memory_bytes,  # with swap
        "pids.max": limits.processes + 2,
        "cpu.cfs_period_us": PERIOD_US,
        "cpu.cfs_quota_us": quota,
    }
    try:
        for folder in group.folders:
            folder.mkdir(parents=True)
            for file, value in (unified if len(parents) == 1 else older).items():
                if (folder / file).exists():
                    (folder / file).write_text(str(value))
    except OSError as error:
        group.remove()
        raise SandboxError(f"cannot make the control group {name}: {error}") from error
    return group


def abandoned() -> list[Group]:
    """The groups of owners that are dead: their boxes ended with them, the groups stay."""
    us = Owner.this_process()
    found = []
    for name, folders in _groups().items():
        namespace, pid, started = name.rpartition("@")[2].split("-")
        if Owner(us.host, us.boot, namespace, int(pid), int(started)).alive is False:
            found.append(Group(name, folders))
    return found


def _groups() -> dict[str, tuple[Path, ...]]:
    found: dict[str, tuple[Path, ...]] = {}
    for parent in _parents() or ():
        for folder in (parent / PARENT).glob("*@*"):
            found[folder.name] = (*found.get(folder.name, ()), folder)
    return found


def _parents() -> tuple[Path, ...] | None:
    """The folders that groups can be made in, with the memory controller's first."""
    unified = ROOT / "cgroup.controllers"
    if unified.exists():
        if not set(CONTROLLERS) <= set(unified.read_text().split()):
            return None
        with contextlib.suppress(OSError):
            for folder in (ROOT, ROOT / PARENT):
                folder.mkdir(exist_ok=True)
                (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))
            return (ROOT,)
        return None
    folders = tuple(ROOT / name for name in CONTROLLERS)
    return folders if all(os.access(folder / "cgroup.procs", os.W_OK) for folder in folders) else None
