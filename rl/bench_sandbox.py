"""What sandboxes cost: one command, a reset, an episode, many boxes at once; and the plain way in the same run."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.backends import Backend, choose_backend, engine_socket
from palestra.envs.sandboxes.contract import BoxSpec, Limits, Sandbox
from palestra.envs.sandboxes.pool import PoolSettings, SandboxPool

ARGV, CWD, ENV = ("/bin/true",), "/tmp", {"EPISODE": "7", "PYTHONHASHSEED": "0"}
COMMANDS = 5  # of an episode
FILES = {f"task/file_{number}.py": b"x = 1\n" * 50 for number in range(20)}
SPEC = BoxSpec(limits=Limits(memory_bytes=128 * 2**20, scratch_bytes=32 * 2**20))
PARALLEL = (1, 8, 32, 64)


async def measure(
    say: Callable[[str], None],
    *,
    parallel: Sequence[int] = PARALLEL,
    seconds: float = 4.0,
    rounds: int = 200,
    plain_episodes: int = 8,
) -> dict[str, Any]:
    """The figures of `palestra bench sandbox`. Milliseconds and rates per second; each rate over `seconds`."""
    backend, reason = choose_backend("auto", run="bench")
    say(reason)
    settings = PoolSettings(run="bench", max_boxes=max(parallel))
    async with SandboxPool(settings, backend) as pool:
        figures: dict[str, Any] = {"backend": backend.name, "reason": reason} | await _alone(pool, rounds)
        figures |= await asyncio.to_thread(_plain, backend, plain_episodes, say)
        figures["speedup"] = _ratio(figures["plain_episode_ms_p50"], figures["episode_ms_p50"])
        figures["parallel"] = []
        for boxes in parallel:
            say(f"{boxes} boxes at once")
            figures["parallel"].append(await _at_once(pool, boxes, seconds))
        waits = pool.waits()["command"]
        figures["command_wait_ms"] = {"p50": _ms(waits.p50), "p95": _ms(waits.p95), "longest": _ms(waits.longest)}
        figures["replaced"] = pool.counts.replaced
    figures["leaked"] = pool.leaked()
    return figures


async def _alone(pool: SandboxPool, rounds: int) -> dict[str, float]:
    """One box and nothing beside it."""
    box = await pool.acquire(SPEC, FILES, episode="bench")
    commands = [await _seconds(_command, box) for _ in range(rounds)]
    resets = []
    for _ in range(max(1, rounds // 4)):
        await box.run(["/bin/sh", "-c", "mkdir -p a/b; echo 1 > a/b/c; echo 2 > task/file_3.py"], timeout_s=20)
        resets.append(await _seconds(_reset, box))
    await pool.release(box)
    episodes = [await _seconds(_episode, pool) for _ in range(max(2, rounds // 4))]
    return {
        "exec_ms_p50": _ms(statistics.median(commands)),
        "reset_ms_p50": _ms(statistics.median(resets)),
        "episode_ms_p50": _ms(statistics.median(episodes[1:])),
    }


async def _command(box: Sandbox) -> None:
    ended = await box.run(ARGV, timeout_s=20, cwd=CWD, env=ENV)
    if not ended.ok:
        raise SandboxError(f"{ARGV[0]} ended with {ended.exit_code}, expected 0: {ended.stderr!r}")


async def _reset(box: Sandbox) -> None:
    """Sweep, wipe, the task's files, and the digest that proves it."""
    await box.reset(FILES)
    await box.digest()


async def _episode(pool: SandboxPool) -> None:
    """A box and its commands. Its reset runs behind it, and the next one, which gets the same box, waits for that."""
    box = await pool.acquire(SPEC, {}, episode="bench")
    for _ in range(COMMANDS):
        await _command(box)
    await pool.release(box)


async def _at_once(pool: SandboxPool, boxes: int, seconds: float) -> dict[str, float]:
    """Rates with so many boxes in use all the time; cold ones are made for one episode and removed after it."""
    lent = await asyncio.gather(*(pool.acquire(SPEC, {}, episode=f"bench/{n}") for n in range(boxes)))
    commands = await _rate([lambda box=box: _command(box) for box in lent], seconds)  # type: ignore[misc]
    for box in lent:
        await pool.release(box)
    episodes = await _rate([lambda: _episode(pool)] * boxes, seconds)
    began = time.perf_counter()
    making = asyncio.Semaphore(4)
    await asyncio.gather(*(_cold_episode(pool.backend, making) for _ in range(max(boxes, 4))))
    cold = max(boxes, 4) / (time.perf_counter() - began)
    rates = {"exec_per_s": commands, "episode_per_s": episodes, "cold_episode_per_s": cold}
    return {"boxes": boxes} | {name: round(rate, 1) for name, rate in rates.items()}


async def _cold_episode(backend: Backend, making: asyncio.Semaphore) -> None:
    async with making:
        box = await backend.open(SPEC, episode="bench")
    try:
        for _ in range(COMMANDS):
            await _command(box)
    finally:
        await box.close()


async def _rate(works: Sequence[Callable[[], Awaitable[None]]], seconds: float) -> float:
    """How often a second the works are done, each again and again, all at once."""
    began = time.perf_counter()
    done = 0

    async def repeat(work: Callable[[], Awaitable[None]]) -> None:
        nonlocal done
        while time.perf_counter() - began < seconds:
            await work()
            done += 1

    await asyncio.gather(*map(repeat, works))
    return done / (time.perf_counter() - began)


def _plain(backend: Backend, num_episodes: int, say: Callable[[str], None]) -> dict[str, float | None]:
    if backend.name != "docker":
        say("no Docker engine here, so there is no plain path to measure against")
        return {"plain_exec_ms_p50": None, "plain_episode_ms_p50": None}
    # here, because a machine without an engine may lack the package
    from palestra.envs.sandboxes.plain_docker import plain_times

    say("the plain path, through the SDK")
    times = plain_times(engine_socket(), ARGV, CWD, ENV, commands=COMMANDS, episodes=num_episodes)
    commands, episodes = times
    return {
        "plain_exec_ms_p50": _ms(statistics.median(commands)),
        "plain_episode_ms_p50": _ms(statistics.median(episodes[1:])),
    }


async def _seconds(work: Callable[[Any], Awaitable[None]], argument: object) -> float:
    began = time.perf_counter()
    await work(argument)
    return time.perf_counter() - began


def _ratio(plain_ms: float | None, ours_ms: float) -> float | None:
    return None if plain_ms is None else round(plain_ms / ours_ms, 1)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
