"""A box in the hands of one episode: its commands take turns with those of other boxes, and it ends with the loan."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.contract import BoxClosed, Denial, Exec, ExportLimits, Sandbox, Snapshot, Tree
from palestra.envs.sandboxes.waiting import Waits


class Turns:
    """So many commands run at once in all boxes together; the others wait, first come first served."""

    def __init__(self, at_once: int, wait_s: float) -> None:
        self.waits = Waits()
        self._at_once = at_once
        self._wait_s = wait_s
        self._free = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def turn(self, box: str) -> AsyncIterator[None]:
        """Hold one. Raises SandboxError when none came in time."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._wait_s):
                await self._free.acquire()
        except TimeoutError as error:
            raise SandboxError(
                f"{box}: no turn for a command within {self._wait_s:g} s; {self._at_once} run at once on this machine"
            ) from error
        try:
            self.waits.add(time.monotonic() - began)
            yield
        finally:
            self._free.release()


class LentSandbox:
    """See the contract. A box asks for one turn at a time, so one that has many commands holds up no other box.

    Once it is given back every method raises BoxClosed: whoever kept it does not reach the box of the next episode.
    """

    def __init__(self, box: Sandbox, turns: Turns) -> None:
        self._box = box
        self._turns = turns
        self._one = asyncio.Lock()
        self._over = False

    @property
    def id(self) -> str:
        """The box's."""
        return self._box.id

    @property
    def busy(self) -> bool:
        """Whether a command of it runs, or waits for its turn."""
        return self._one.locked()

    def end(self) -> None:
        """The loan is over."""
        self._over = True

    def _lent(self) -> Sandbox:
        if self._over:
            raise BoxClosed(f"{self._box.id}: it was given back and may be another episode's")
        return self._box

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: Literal["policy", "examiner"] = "policy",
        beside: Sequence[str] = (),
    ) -> Exec:
        """See the contract. The time limit begins with the command, not with the wait for its turn."""
        self._lent()
        async with self._one, self._turns.turn(self.id):
            box = self._lent()
            return await box.run(argv, timeout_s=timeout_s, stdin=stdin, cwd=cwd, env=env, user=user, beside=beside)

    async def read(self, path: str, max_bytes: int) -> bytes:
        """See the contract."""
        return await self._lent().read(path, max_bytes)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See the contract."""
        await self._lent().write(path, data, mode=mode)

    async def reset(self, files: Mapping[str, bytes] | None = None) -> None:
        """See the contract."""
        await self._lent().reset(files)

    async def digest(self) -> str:
        """See the contract."""
        return await self._lent().digest()

    async def output(self, handle: str, stream: Literal["stdout", "stderr"], start: int, stop: int) -> bytes:
        """See the contract."""
        return await self._lent().output(handle, stream, start, stop)

    async def export(self, paths: Sequence[str], limits: ExportLimits) -> Tree:
        """See the contract."""
        return await self._lent().export(paths, limits)

    async def snapshot(self, max_bytes: int = 64 * 2**20) -> Snapshot:
        """See the contract."""
        return await self._lent().snapshot(max_bytes)

    async def restore(self, snapshot: Snapshot) -> None:
        """See the contract."""
        await self._lent().restore(snapshot)

    def denials(self) -> tuple[Denial, ...]:
        """See the contract."""
        return self._lent().denials()

    async def close(self) -> None:
        """See the contract. The pool finds it broken and replaces it."""
        if not self._over:
            await self._box.close()
