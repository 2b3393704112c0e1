"""Boxes for tests: one loop in a thread, one shared box of each kind, and the base image made where it is missing."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, Literal, TypeVar

import pytest

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.backends import Backend, choose_backend, engine_socket
from palestra.envs.sandboxes.contract import BoxSpec, Exec, ExportLimits, Limits, Sandbox, Snapshot, Tree
from palestra.envs.sandboxes.docker import DEFAULT_IMAGE, DockerBackend, Engine
from palestra.envs.sandboxes.image import build_image
from palestra.envs.sandboxes.namespace import NamespaceBackend
from palestra.envs.sandboxes.scripted import Command, ScriptedSandbox
from palestra.envs.sandboxes.supervised import Lease
from tests_support import require

T = TypeVar("T")
SPEC = BoxSpec(limits=Limits(memory_bytes=128 * 2**20, scratch_bytes=32 * 2**20, processes=32))
SCRIPTED = pytest.param("scripted")
NAMESPACE = pytest.param("namespace")
DOCKER = pytest.param("docker", marks=pytest.mark.docker)
GVISOR = pytest.param("gvisor", marks=[pytest.mark.docker, pytest.mark.gvisor])


class Home:
    """A running event loop that outlives a test, so that a box can serve several of them."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def do(self, work: Coroutine[Any, Any, T], timeout_s: float = 90.0) -> T:
        """The result of `work`, awaited over there."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def end(self) -> None:
        """Stop the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


class Box:
    """A sandbox that is asked from a plain test."""

    def __init__(self, home: Home, sandbox: Sandbox) -> None:
        self.home = home
        self.sandbox = sandbox

    def run(self, *argv: str, timeout_s: float = 20.0, **settings: Any) -> Exec:
        """Run a command."""
        return self.home.do(self.sandbox.run(argv, timeout_s=timeout_s, **settings))

    def sh(self, script: str, timeout_s: float = 20.0) -> Exec:
        """Run a shell script."""
        return self.run("/bin/sh", "-c", script, timeout_s=timeout_s)

    def python(self, script: str, timeout_s: float = 20.0) -> Exec:
        """Run a Python script."""
        return self.run("python3", "-c", script, timeout_s=timeout_s)

    def read(self, path: str, max_bytes: int = 2**20) -> bytes:
        """Read a file."""
        return self.home.do(self.sandbox.read(path, max_bytes))

    def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file."""
        self.home.do(self.sandbox.write(path, data, mode=mode))

    def output(
        self, handle: str | None, start: int, stop: int, stream: Literal["stdout", "stderr"] = "stdout"
    ) -> bytes:
        """A piece of what a command wrote."""
        assert handle is not None
        return self.home.do(self.sandbox.output(handle, stream, start, stop))

    def export(self, *paths: str, **limits: int) -> Tree:
        """Take files out."""
        return self.home.do(self.sandbox.export(paths, ExportLimits(**limits)))

    def snapshot(self, max_bytes: int = 64 * 2**20) -> Snapshot:
        """Its state."""
        return self.home.do(self.sandbox.snapshot(max_bytes))

    def restore(self, snapshot: Snapshot) -> None:
        """Put a state back."""
        self.home.do(self.sandbox.restore(snapshot))

    def digest(self) -> str:
        """Its state."""
        return self.home.do(self.sandbox.digest())

    def reset(self, files: dict[str, bytes] | None = None) -> None:
        """Reset it."""
        self.home.do(self.sandbox.reset(files))


@functools.cache
def require_image() -> None:
    """An engine with the base image; made here if it is missing, which takes a minute."""
    require("docker")
    if not Engine(engine_socket()).has_image(DEFAULT_IMAGE):
        build_image(engine_socket())


def require_gvisor() -> None:
    """An engine that knows the runtime runsc, and the base image. Where it does and no box works, tests fail."""
    require_image()
    try:
        Engine(engine_socket()).check_runtime("runsc")
    except SandboxError as error:
        pytest.skip(str(error))


def backend(kind: str, **settings: Any) -> Backend:
    """A backend for tests, or a skip with the reason."""
    if kind == "gvisor":
        require_gvisor()
        return choose_backend("docker", run="test", runtime="runsc")[0]
    if kind == "docker":
        require_image()
        return DockerBackend(run="test", socket_path=engine_socket(), **settings)
    require("bwrap")
    return NamespaceBackend(run="test", **settings)


async def opened(kind: str) -> Sandbox:
    """A new box of a kind."""
    return ScriptedSandbox(small_shell) if kind == "scripted" else await backend(kind).open(SPEC, episode="t")


def leased(silence_s: float, lifetime_s: float = 3600.0) -> Lease:
    """A lease that nobody renews."""
    return Lease(silence_s=silence_s, beat_s=3600.0, lifetime_s=lifetime_s)


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """A loop for the module."""
    made = Home()
    yield made
    made.end()


@pytest.fixture(scope="module")
def kept(home: Home) -> Iterator[dict[str, Box]]:
    """The module's boxes, by kind."""
    boxes: dict[str, Box] = {}
    yield boxes
    for box in boxes.values():
        home.do(box.sandbox.close())


@pytest.fixture
def box(request: pytest.FixtureRequest, home: Home, kept: dict[str, Box]) -> Box:
    """A clean box of the kind in the test's parameter: a used one, reset; a new one where the last test broke it."""
    kind: str = request.param
    if kind not in kept:
        kept[kind] = Box(home, home.do(opened(kind)))
    kept[kind].reset()
    return kept[kind]


def small_shell(command: Command, files: dict[str, bytes]) -> Exec:
    """The few programs that the contract's tests need from a scripted box."""
    program, *words = command.argv
    if program == "echo":
        out = " ".join(words).encode() + b"\n"
        return Exec(exit_code=0, stdout=out, stdout_total=len(out))
    if program == "cat":
        return Exec(exit_code=0, stdout=command.stdin, stdout_total=len(command.stdin))
    return Exec(exit_code={"true": 0, "false": 1}.get(program, 127))
