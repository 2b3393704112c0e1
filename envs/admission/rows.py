"""The checks of one task. Each is a row: what had to come out, and what did."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial

from palestra.envs.admission.library import TAMPERS
from palestra.envs.admission.scene import Played, Scene, Watched, run, with_canary
from palestra.envs.admission.tamper import Tamper
from palestra.envs.types import JSON, NoVerdict, Scored, Task, Verdict

MIN_SECRET = 24  # characters of a hidden line that tell it from an ordinary one
RESIDUE = """echo left > left; mkdir -p deep/er && chmod 0 deep/er; echo left > /tmp/left; echo left > /dev/shm/left
echo 'trap : EXIT' >> ~/.bashrc; git config --global user.name left; chmod 700 /tmp
setsid sleep 60 > /dev/null 2>&1 < /dev/null &"""


@dataclass(frozen=True, slots=True)
class Row:
    """One check of one task. `ok` is None where it does not apply, and `found` says why."""

    check: str
    task: str
    expected: str
    found: str
    ok: bool | None


Check = Callable[[], Awaitable[Row]]


def checks(scene: Scene, task: Task) -> Iterator[tuple[str, Check]]:
    """All that is to be checked of a task: the row's name, and what gives it."""
    turns = scene.gold(task)
    yield "gold", partial(_gold, scene, task, turns)
    yield "no-op", partial(_paid, scene, task, "no-op", (), None, 0.0)
    for tamper in TAMPERS:
        name = f"{tamper.row} {tamper.name}"
        if tamper.beats == "answer":
            yield name, partial(_reading, scene, task, name, turns, tamper)
            continue
        yield name, partial(_paid, scene, task, name, (), tamper, 0.0)
        if tamper.honest and turns:
            yield f"{name}, with gold", partial(_paid, scene, task, f"{name}, with gold", turns, tamper, 1.0)
    yield "hidden lines", partial(_hidden_lines, scene, task)
    yield "reset", partial(_reset, scene, task)


async def checked(name: str, task: Task, check: Check, limit_s: float) -> Row:
    """The row of a check. What goes wrong in it is its outcome: what cannot be checked is not admitted."""
    try:
        async with asyncio.timeout(limit_s):
            return await check()
    except TimeoutError:
        return Row(name, task.id, "an end", f"not ended after {limit_s:g} s", False)
    except Exception as error:  # noqa: BLE001 - the border to environments that users write
        return Row(name, task.id, "no error", f"{type(error).__name__}: {error}", False)


async def _gold(scene: Scene, task: Task, turns: tuple[str, ...]) -> Row:
    if not turns:
        return Row("gold", task.id, "1", "the environment has no demonstration of it", None)
    return await _paid(scene, task, "gold", turns, None, 1.0)


async def _paid(
    scene: Scene, task: Task, name: str, turns: tuple[str, ...], tamper: Tamper | None, expected: float
) -> Row:
    """What an episode earns. A tamper alone: as `on_integrity_violation = "zero"` pays it, so a flag is enough."""
    played = await scene.judged(task, turns, tamper)
    if tamper is not None and played.found is None:
        return Row(name, task.id, f"{expected:g}", "the environment uses no box", None)
    caught = tamper is not None and not turns and bool(played.verdict.flags)
    right = isinstance(played.verdict, Scored) and (caught or played.verdict.value == expected)
    return Row(name, task.id, f"{expected:g}", _words(played.verdict), right)


async def _reading(scene: Scene, task: Task, name: str, turns: tuple[str, ...], tamper: Tamper) -> Row:
    """Whether a script finds what it must not see."""
    canary = f"CANARY-{uuid.uuid4()}"
    if tamper.mate:
        first = await scene.in_box(task, tamper.argv())
        found = first and await scene.in_box(task, tamper.loot_argv())
    elif tamper.loot is not None:
        played: Played = await scene.judged(task, turns, tamper)
        found = played.found
    else:
        found = await scene.in_box(with_canary(task, canary), tamper.argv(), canary=canary)
    if found is None:
        return Row(name, task.id, "nothing", "the environment uses no box", None)
    seen = found.stdout.decode(errors="replace").strip()[:200] if found.exit_code == 0 else "nothing"
    return Row(name, task.id, "nothing", seen or "something", found.exit_code != 0)


async def _hidden_lines(scene: Scene, task: Task) -> Row:
    """Whether lines of the hidden data lie in a file that the policy starts with."""
    public = "\n".join([m.content for m in task.prompt] + [d.decode(errors="replace") for d in task.files.values()])
    secrets = {line for text in _texts(task.truth) for line in map(str.strip, text.splitlines())}
    lines = sorted(line for line in secrets if len(line) >= MIN_SECRET and line not in public)
    if not lines:
        return Row("hidden lines", task.id, "nothing", "the task hides no text", None)
    search = ["grep", "-rlsFD", "skip", "-f", "-", ".", "/tmp", "/dev/shm"]
    found = await scene.in_box(task, search, stdin="\n".join(lines).encode())
    if found is None:
        return Row("hidden lines", task.id, "nothing", "the environment uses no box", None)
    seen = found.stdout.decode(errors="replace").strip()[:200]
    return Row("hidden lines", task.id, "nothing", seen or "nothing", not seen)


async def _reset(scene: Scene, task: Task) -> Row:
    """Whether a used box comes back as one that nobody used."""
    watched = Watched(scene.boxes)
    environment = scene.taskset.environment(task, watched)
    try:
        await environment.start()
    finally:
        await environment.close()
    if watched.spec is None:
        return Row("reset", task.id, "as a cold box", "the environment uses no box", None)
    used = await scene.boxes.acquire(watched.spec, watched.files, episode=f"{task.id} (used)")
    cold = await scene.boxes.acquire(watched.spec, watched.files, episode=f"{task.id} (cold)")
    try:
        wanted = await cold.digest()
        await run(used, ["/bin/sh", "-c", RESIDUE])
        await used.reset(watched.files)
        same = await used.digest() == wanted
    finally:
        await scene.boxes.release(used)
        await scene.boxes.release(cold)
    return Row("reset", task.id, "as a cold box", "as a cold box" if same else "another state", same)


def _texts(value: JSON) -> Iterator[str]:
    """All text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _words(verdict: Verdict) -> str:
    if isinstance(verdict, NoVerdict):
        return f"no verdict: {verdict.cause}"
    more = [*([verdict.failure] if verdict.failure else []), *(f"flag {flag}" for flag in verdict.flags)]
    return f"{verdict.value:g}" + (f" ({', '.join(more)})" if more else "")
