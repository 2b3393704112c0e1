"""Which kind of box is used, and why."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol

from palestra.envs.errors import ConfigError, SandboxError
from palestra.envs.sandboxes.contract import BoxSpec, Sandbox
from palestra.envs.sandboxes.namespace import NamespaceBackend

BackendName = Literal["auto", "docker", "namespace"]
DEFAULT_SOCKET = "/var/run/docker.sock"
PROBE_S = 2.0


class Backend(Protocol):
    """Makes boxes of one kind and knows what it made."""

    name: str
    unenforced: tuple[str, ...]
    """Limits that this backend cannot enforce here, in words; empty when it enforces all."""

    async def open(self, spec: BoxSpec, *, episode: str) -> Sandbox:
        """A new, clean box. Leaves nothing behind when it fails or is cancelled. Raises SandboxError."""
        ...

    async def owned(self) -> list[str]:
        """The boxes that this backend object has made and that still exist. Raises SandboxError."""
        ...

    async def sweep(self) -> None:
        """Remove what `owned` would list. Raises SandboxError."""
        ...


def engine_socket() -> str:
    """The Docker engine's socket: PALESTRA_DOCKER_SOCKET, else DOCKER_HOST where it is a socket, else the usual one."""
    host = os.environ.get("DOCKER_HOST", "")
    return os.environ.get("PALESTRA_DOCKER_SOCKET") or (
        host.removeprefix("unix://") if host.startswith("unix://") else DEFAULT_SOCKET
    )


def engine_trouble(socket_path: str) -> str | None:
    """Why no Docker engine can be used at `socket_path`, or None when one answers."""
    if importlib.util.find_spec("docker") is None:
        return "the package docker is not installed (pip install 'palestra[docker]')"
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(PROBE_S)
            client.connect(socket_path)
            client.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            answer = client.recv(64)
    except OSError as error:
        return f"no Docker engine answers at {socket_path}: {error}"
    return None if b" 200 " in answer else f"what answers at {socket_path} is no Docker engine: {answer[:40]!r}"


def choose_backend(
    kind: BackendName,
    *,
    run: str,
    image: str | None = None,
    socket_path: str | None = None,
    runtime: str | None = None,
) -> tuple[Backend, str]:
    """A backend for a run, and the reason in words. `image` None: the default one.

    `runtime`: the container runtime that boxes must have, "runsc" for gVisor; None: whatever the engine's default is.
    One that is asked for is never left out: the engine must list it, and a box must come up with it.

    "auto" takes Docker where an engine answers and has the image, else namespaces. Raises ConfigError with what to do
    when the kind that was asked for, or for "auto" neither, works here.
    """
    path = socket_path or engine_socket()
    if runtime is not None:
        if kind == "namespace":
            raise ConfigError(f"sandbox namespace: has no runtime {runtime!r}; use the docker sandbox, or no runtime")
        return _docker(run, image, path, runtime), f"docker with {runtime}: asked for"
    if kind == "namespace":
        return NamespaceBackend(run=run), "namespace: asked for"
    try:
        backend = _docker(run, image, path)
    except ConfigError as error:
        if kind == "docker":
            raise
        try:
            return NamespaceBackend(run=run), f"namespace: {error}"
        except ConfigError as second:
            raise ConfigError(f"no sandbox works here: {error}; {second}") from second
    return backend, "docker: asked for" if kind == "docker" else f"docker: an engine answers at {path}"


def _docker(run: str, image: str | None, socket_path: str, runtime: str | None = None) -> Backend:
    trouble = engine_trouble(socket_path)
    if trouble is not None:
        raise ConfigError(f"sandbox docker: {trouble}")
    # here, because the package is an extra that a machine without an engine does not need
    from palestra.envs.sandboxes.docker import DEFAULT_IMAGE, DockerBackend

    backend = DockerBackend(run=run, socket_path=socket_path, image=image or DEFAULT_IMAGE, runtime=runtime)
    if runtime is not None:
        with ThreadPoolExecutor(1) as apart:  # whoever asks may be on a running loop
            try:
                apart.submit(asyncio.run, backend.probe()).result()
            except SandboxError as error:
                raise ConfigError(f"sandbox docker: no box works with the runtime {runtime!r}: {error}") from error
    return backend
