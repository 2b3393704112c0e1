"""A process that plays episodes in boxes and may be killed at any time: `python chaos_player.py KIND RUN FILE n,n,...`.

The truth of an episode is known beforehand: its policy squares its number, and is off by one where the number is odd. A
line is written for each verdict, and none for an episode whose machines failed more often than it tries.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.backends import choose_backend, engine_socket
from palestra.envs.sandboxes.contract import BoxSpec, Limits
from palestra.envs.sandboxes.pool import PoolSettings, SandboxPool

LIMITS = Limits(memory_bytes=128 * 2**20, scratch_bytes=32 * 2**20, processes=32)
POLICY = "n = int(open('task').read()); open('answer', 'w').write(str(n * n + n % 2))"
JUDGE = "import sys; n = int(open('task').read()); sys.exit(open('answer').read() != str(n * n))"
TRIES = 20


def truth(number: int) -> float:
    """The reward that the episode must get."""
    return 0.0 if number % 2 else 1.0


async def play(number: int, boxes: SandboxPool, judges: SandboxPool, pause_s: float) -> float:
    """One episode and its verdict. Raises SandboxError when a machine failed: that is no reward."""
    task = b"%d" % number
    box = await boxes.acquire(BoxSpec(limits=LIMITS), {"task": task}, episode=str(number))
    try:
        for _ in range(4):
            await box.run(["sleep", str(pause_s)], timeout_s=30)
        ended = await box.run(["python3", "-c", POLICY], timeout_s=60)
        assert ended.ok, ended
        answer = await box.read("answer", 100)
    finally:
        await boxes.release(box)
    files = {"task": task, "answer": answer}
    judge = await judges.acquire(BoxSpec(limits=LIMITS, role="verifier"), files, episode=str(number))
    try:
        ended = await judge.run(["python3", "-c", JUDGE], timeout_s=60)
        assert ended.exit_code in (0, 1), ended
        return 1.0 if ended.exit_code == 0 else 0.0
    finally:
        await judges.release(judge)


async def main(kind: str, run: str, file: Path, numbers: list[int], pause_s: float) -> None:
    """Play all of them, some at once."""
    pools = [
        SandboxPool(
            PoolSettings(run=run, max_boxes=4, reap_s=1.0, upkeep_s=0.5),
            choose_backend(kind, run=run, socket_path=engine_socket())[0],  # type: ignore[arg-type]
        )
        for _ in range(2)
    ]
    some = asyncio.Semaphore(6)

    async def episode(number: int) -> None:
        async with some:
            for _ in range(TRIES):
                try:
                    reward = await play(number, *pools, pause_s)
                except SandboxError:
                    await asyncio.sleep(0.2)
                    continue
                line = json.dumps({"episode": number, "reward": reward}) + "\n"
                os.write(out, line.encode())
                return

    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    async with pools[0], pools[1]:
        await asyncio.gather(*map(episode, numbers))
    left = sum(pool.leaked() for pool in pools)
    os.close(out)
    sys.exit(f"{left} boxes were left" if left else 0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]), float(sys.argv[5])))
