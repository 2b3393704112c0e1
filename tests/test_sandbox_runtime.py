"""A runtime that was asked for is used, or nothing starts: never another in its place (G19 of the abuse catalogue)."""

from __future__ import annotations

import asyncio
import os

import pytest

from palestra.envs.errors import ConfigError
from palestra.envs.sandboxes.backends import choose_backend
from sandbox_support import SPEC, Home, require_gvisor, require_image
from sandbox_support import home as home


@pytest.mark.docker
@pytest.mark.parametrize("kind", ["docker", "auto"])
def test_a_runtime_that_the_engine_does_not_list_is_refused(kind: str) -> None:
    require_image()
    with pytest.raises(ConfigError, match=r"no runtime 'kata-nowhere', only .*runc.*; register it"):
        choose_backend(kind, run="test", runtime="kata-nowhere")  # type: ignore[arg-type]


@pytest.mark.docker
def test_a_runtime_that_the_engine_lists_is_tried_and_leaves_no_box() -> None:
    require_image()
    backend, reason = choose_backend("docker", run="test", runtime="runc")
    assert reason == "docker with runc: asked for"
    assert backend.unenforced == ()
    assert asyncio.run(backend.owned()) == []


def test_no_other_kind_of_box_stands_in_for_a_runtime() -> None:
    with pytest.raises(ConfigError, match="namespace: has no runtime 'runsc'"):
        choose_backend("namespace", run="test", runtime="runsc")
    with pytest.raises(ConfigError, match="no Docker engine answers"):
        choose_backend("auto", run="test", runtime="runsc", socket_path="/nonexistent.sock")


@pytest.mark.docker
@pytest.mark.gvisor
def test_commands_run_on_the_runtimes_own_kernel(home: Home) -> None:
    require_gvisor()
    backend, _ = choose_backend("docker", run="test", runtime="runsc")
    assert "MSGQUEUE" in " ".join(backend.unenforced)

    async def body() -> str:
        box = await backend.open(SPEC, episode="t")
        try:
            return (await box.run(["uname", "-r"], timeout_s=20)).stdout.decode().strip()
        finally:
            await box.close()

    assert home.do(body()) != os.uname().release
