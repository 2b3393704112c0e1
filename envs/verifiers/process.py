"""A judge that is a pure function, run in a process that a policy's code never enters and that can be killed.

The process is started by its path with an empty environment, and asked over pipes. Waiting is a `poll` with a deadline,
without signals or event-loop child watchers, so it works the same from any thread, actor or loop.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import secrets
import select
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from palestra.envs.errors import ConfigError
from palestra.envs.types import JSON, Artefact, NoVerdict, Task, Verdict
from palestra.envs.verifiers.verdict import Bounds, read_verdict

_WORKER = Path(__file__).with_name("worker.py")
_START_S = 30.0  # importing a judge's module on a busy machine
_MAX_REPLY = 1 << 20


class ProcessVerifier:
    """Judges with `judge` ("package.module:function"), a pure function (truth, answer) -> number or object of numbers.

    An object carries "reward"; its other numbers are recorded as parts. A judge that overruns `timeout_s` or kills its
    process is tried again in a fresh process, `attempts` times in all; one that raises or returns no verdict is not,
    since a pure function would do it again. Either way the outcome is NoVerdict with its cause, never a number.
    """

    def __init__(self, judge: str, *, bounds: Bounds, timeout_s: float = 10.0, attempts: int = 2) -> None:
        _must_exist(judge)
        self._judge = judge
        self._bounds = bounds
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._process: _Judge | None = None
        self._closed = False
        # one thread owns the process: requests queue here, not in the event loop's own threads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verifier")

    async def verify(self, task: Task, artefact: Artefact) -> Verdict:
        """The judge's verdict on the artefact's answer against the task's truth."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, task.truth, artefact.answer)

    async def close(self) -> None:
        """End the process, also in the middle of a request, whose verdict is then missing. Idempotent."""
        if not self._closed:
            self._closed = True
            if (process := self._process) is not None:
                process.kill()  # its thread sees the end of the pipe and starts no other
            await asyncio.get_running_loop().run_in_executor(self._thread, self._end)
            self._thread.shutdown(wait=False)

    def _ask(self, truth: JSON, answer: JSON) -> Verdict:
        cause = "no attempt was made"
        for _ in range(self._attempts):
            if self._closed:
                return NoVerdict("the verifier was closed")
            try:
                if self._process is None:
                    self._process = _Judge(self._judge)
                reply = self._process.ask({"truth": truth, "answer": answer}, self._timeout_s)
            except TimeoutError:
                cause = f"timeout: the judge ran for more than {self._timeout_s:g} s"
            except (OSError, EOFError, ValueError) as error:
                cause = f"the judge's process failed: {type(error).__name__}: {error}"
            else:
                raised = reply.get("raised")
                if raised is not None:
                    return NoVerdict(f"the judge raised {raised}")
                return read_verdict(reply.get("returned"), self._bounds)
            self._end()
        return NoVerdict(f"{cause} ({self._attempts} attempts)")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()


class _Judge:
    """One process, ready for requests. Raises TimeoutError, EOFError, OSError, ValueError; then it must be ended."""

    def __init__(self, judge: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-I", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={"PATH": os.defpath, "LANG": "C.UTF-8"},
            start_new_session=True,  # a Ctrl-C at the terminal is for the run, which ends this process itself
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._requests, self._replies = self._child.stdin.fileno(), self._child.stdout.fileno()
        os.set_blocking(self._requests, False)
        try:
            self.ask({"judge": judge, "path": [*sys.path]}, _START_S)
        except BaseException:
            self.end()
            raise

    def ask(self, request: dict[str, JSON], timeout_s: float) -> dict[str, JSON]:
        """Send a request and return the reply that carries its nonce."""
        nonce = secrets.token_hex(16)
        deadline = time.monotonic() + timeout_s
        line = json.dumps({**request, "nonce": nonce, "timeout_s": timeout_s}, allow_nan=False) + "\n"
        self._write(line.encode(), deadline)
        reply = json.loads(self._read_line(deadline))
        if not isinstance(reply, dict) or reply.get("nonce") != nonce:
            raise ValueError("a reply without the nonce of the request")
        return reply

    def _write(self, data: bytes, deadline: float) -> None:
        """All of it, before the deadline."""
        rest = memoryview(data)
        while rest:
            _wait(self._requests, select.POLLOUT, deadline)
            rest = rest[os.write(self._requests, rest) :]

    def _read_line(self, deadline: float) -> bytes:
        """One line, whole, before the deadline."""
        received = bytearray()
        while not received.endswith(b"\n"):
            _wait(self._replies, select.POLLIN, deadline)
            chunk = os.read(self._replies, 1 << 16)
            if not chunk:
                raise EOFError(f"it ended with status {self._child.wait(timeout=5)}")
            received += chunk
            if len(received) > _MAX_REPLY:
                raise ValueError(f"a reply of more than {_MAX_REPLY} bytes")
        if received.count(b"\n") > 1:
            raise ValueError("more than one reply to a request")
        return bytes(received)

    def kill(self) -> None:
        """End the process at once. Safe from any thread."""
        self._child.kill()

    def end(self) -> None:
        """Kill it and close the pipes."""
        self._child.kill()
        self._child.wait(timeout=5)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()


def _wait(source: int, event: int, deadline: float) -> None:
    """Until the pipe is ready or broken. Raises TimeoutError at the deadline."""
    poll = select.poll()
    poll.register(source, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError


def _must_exist(judge: str) -> None:
    module, _, name = judge.partition(":")
    if not module or not name:
        raise ConfigError(f"judge {judge!r}: expected 'package.module:function'")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"judge {judge!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"judge {judge!r} is {type(found).__name__}, not a function")
