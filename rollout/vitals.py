"""What a process says of itself while it lives, and what its machine says of it once it is dead."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LAST_LINES = 8  # of each log, in the report of a death


@dataclass(frozen=True, slots=True)
class Vitals:
    """One look at a living process."""

    node_id: str
    node: str  # name and address
    address: str  # where other machines reach its node
    pid: int
    resident_bytes: int
    logs: tuple[str, ...]  # files on its node that its output goes to
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES, as whoever placed it has set it


def own_vitals(node_id: str, name: str, address: str) -> Vitals:
    """Of this process, on the node of that id, name and address."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    outputs = {os.path.realpath(f"/proc/self/fd/{number}") for number in (1, 2)}
    return Vitals(
        node_id=node_id,
        node=f"{name} ({address})",
        address=address,
        pid=os.getpid(),
        resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        logs=tuple(sorted(path for path in outputs if os.path.isfile(path))),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def scene(logs: Sequence[str]) -> str:
    """This machine's memory, and the last lines of `logs`, for people."""
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(memory[key].split()[0]) // 1024 for key in ("MemAvailable", "MemTotal"))
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    killed = counts.get("oom_kill", "?")
    text = [f"node: {free} of {total} MiB free, {killed} processes killed for memory since it was booted"]
    for log_file in map(Path, logs):
        lines = log_file.read_text(errors="replace").splitlines() if log_file.is_file() else []
        told = [line for line in lines if line and not line.startswith((":job_id:", ":actor_name:"))]  # marks of Ray
        text += [f"  {log_file.name}: {line}" for line in told[-LAST_LINES:]]
    return "\n".join(text)
