"""Whatever dies, nothing is left: boxes end with their host, and the reaper takes what dead owners left, no more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from palestra.envs.errors import ConfigError, SandboxError
from palestra.envs.sandboxes import cgroups
from palestra.envs.sandboxes.backends import choose_backend, engine_socket
from palestra.envs.sandboxes.contract import BoxClosed, BoxSpec, Limits
from palestra.envs.sandboxes.docker import DEFAULT_IMAGE, Engine
from palestra.envs.sandboxes.image import apt_mirror, build_image
from palestra.envs.sandboxes.namespace import NamespaceBackend
from palestra.envs.sandboxes.owner import Owner, Tag
from palestra.envs.sandboxes.pool import PoolSettings, SandboxPool
from palestra.envs.sandboxes.reaper import list_boxes, reap
from sandbox_support import DOCKER, NAMESPACE, SPEC, backend, leased, require_image
from tests_support import require

every_kind = pytest.mark.parametrize("kind", [NAMESPACE, DOCKER])

OWNER_SCRIPT = """
import asyncio, sys
from palestra.envs.sandboxes.backends import choose_backend
from palestra.envs.sandboxes.contract import BoxSpec
async def main():
    backend, _ = choose_backend(sys.argv[1], run="doomed")
    for n in range(int(sys.argv[2])):
        box = await backend.open(BoxSpec(), episode=str(n))
        print(box.id, flush=True)
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@contextlib.contextmanager
def owner_process(kind: str, boxes: int = 3) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process that owns some boxes, and their names."""
    argv = [sys.executable, "-c", OWNER_SCRIPT, kind, str(boxes)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            yield process, [line.strip() for line in iter(process.stdout.readline, "ready\n") if line]
        finally:
            process.kill()


def existing(kind: str) -> set[str]:
    """The names of everything of ours that exists."""
    if kind == "docker":
        return {listed.name for listed in list_boxes(engine_socket())}
    return {path.name.partition("@")[0] for path in cgroups.ROOT.glob("memory/palestra/*@*")}


def await_gone(kind: str, names: set[str], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while left := names & existing(kind):
        assert time.monotonic() < deadline, f"still there after {within_s} s: {left}"
        time.sleep(0.1)


def dead_owner() -> Owner:
    """An owner whose process has ended."""
    with subprocess.Popen(["sleep", "60"]) as process:
        started = int((Path(f"/proc/{process.pid}/stat")).read_text().rpartition(")")[2].split()[19])
        owner = replace(Owner.this_process(), pid=process.pid, started=started)
        assert owner.alive
        process.kill()
    return owner


def test_an_owner_is_alive_only_as_the_very_process_it_was() -> None:
    us = Owner.this_process()
    assert us.alive is True
    assert replace(us, started=us.started + 1).alive is False
    assert dead_owner().alive is False
    assert replace(us, boot="another").alive is False
    assert replace(us, boot="another", host="elsewhere").alive is None
    assert replace(us, namespace="1").alive is None


def test_a_tag_is_read_back_from_its_labels_and_judged_by_owner_before_time() -> None:
    tag = Tag(Owner.this_process(), "run", "lender", "t3/1", 1000.0)
    assert Tag.of(tag.labels()) == tag
    assert Tag.of({"palestra.project": "palestra"}) is None
    assert Tag.of({}) is None
    assert not tag.abandoned(now=10**12)  # alive: never, whatever the clock says
    far = replace(tag, owner=replace(tag.owner, boot="another", host="elsewhere"))
    assert (far.abandoned(999.0), far.abandoned(1001.0)) == (False, True)
    assert replace(tag, owner=dead_owner()).abandoned(now=0)


@every_kind
def test_a_killed_owner_leaves_nothing_and_a_live_one_loses_nothing(kind: str) -> None:
    backend(kind)
    if kind == "namespace" and not cgroups.available():
        pytest.skip("the boxes of other processes are seen by their control groups, and none can be made here")
    socket = engine_socket() if kind == "docker" else None
    with owner_process(kind) as (doomed, its), owner_process(kind) as (_, others):
        assert set(its + others) <= existing(kind)
        os.kill(doomed.pid, signal.SIGKILL)
        doomed.wait()
        report = reap(socket)
        assert not report.errors
        await_gone(kind, set(its), 30)
        assert not set(others) & set(report.removed)
        assert set(others) <= existing(kind)
    reap(socket)
    await_gone(kind, set(others), 30)


@pytest.mark.docker
def test_the_reaper_takes_created_and_running_containers_of_dead_owners_only() -> None:
    require_image()
    engine = Engine(engine_socket())
    dead, alive = dead_owner(), Owner.this_process()
    cases = {f"palestra-reap-{secrets.token_hex(4)}": facts for facts in ((dead, False), (dead, True), (alive, False))}
    try:
        for name, (owner, started) in cases.items():
            engine.create(name, DEFAULT_IMAGE, SPEC, Tag(owner, "reap", "lender", "e", time.time() + 60))
            if started:
                engine.start(name)
        listed = {row.name: row.abandoned for row in list_boxes(engine_socket()) if row.name in cases}
        assert listed == {name: owner is dead for name, (owner, _) in cases.items()}
        report = reap(engine_socket())
        assert {name for name in report.removed if name in cases} == {n for n, (o, _) in cases.items() if o is dead}
        assert existing("docker") & set(cases) == {name for name, (owner, _) in cases.items() if owner is alive}
    finally:
        for name in cases:
            engine.remove(name)


@pytest.mark.docker
def test_a_pool_removes_what_dead_owners_leave_while_it_runs() -> None:
    require_image()
    engine = Engine(engine_socket())
    name = f"palestra-reap-{secrets.token_hex(4)}"

    async def body() -> None:
        settings = PoolSettings(run="t", upkeep_s=0.1, reap_s=0.2)
        async with SandboxPool(settings, backend("docker")) as pool:
            assert not pool.reaped.errors
            tag = Tag(dead_owner(), "reap", "lender", "e", time.time() + 60)
            await asyncio.to_thread(engine.create, name, DEFAULT_IMAGE, SPEC, tag)
            await asyncio.to_thread(await_gone, "docker", {name}, 20)

    try:
        asyncio.run(body())
    finally:
        engine.remove(name)


@pytest.mark.endurance
@every_kind
def test_twenty_boxes_of_a_killed_owner_are_gone_in_thirty_seconds(kind: str) -> None:
    """Row I05."""
    backend(kind)
    if kind == "namespace" and not cgroups.available():
        pytest.skip("the boxes of other processes are seen by their control groups, and none can be made here")
    with owner_process(kind, 20) as (doomed, its):
        assert len(its) == 20
        assert set(its) <= existing(kind)
        os.kill(doomed.pid, signal.SIGKILL)
        doomed.wait()
        assert not reap(engine_socket() if kind == "docker" else None).errors
        await_gone(kind, set(its), 30)


@every_kind
def test_a_box_that_hears_nothing_ends_by_itself(kind: str) -> None:
    async def body() -> None:
        made = backend(kind, lease=leased(silence_s=1.0))
        box = await made.open(SPEC, episode="e")
        await asyncio.sleep(2.0)
        with pytest.raises(BoxClosed, match="nothing was heard"):
            await box.run(["true"], timeout_s=1)
        if kind == "docker":
            await asyncio.to_thread(await_gone, kind, {box.id}, 10)
        await box.close()
        assert await made.owned() == []

    asyncio.run(body())


@every_kind
def test_a_command_does_not_outlive_the_lease_nor_the_lifetime(kind: str) -> None:
    async def body() -> None:
        for lease in (leased(silence_s=1.0), leased(silence_s=60.0, lifetime_s=1.0)):
            box = await backend(kind, lease=lease).open(SPEC, episode="e")
            began = time.monotonic()
            with pytest.raises(BoxClosed):
                await box.run(["sleep", "30"], timeout_s=30)
            assert time.monotonic() - began < 10
            await box.close()

    asyncio.run(body())


@every_kind
def test_beats_keep_a_box_alive_in_silence_and_under_a_command(kind: str) -> None:
    async def body() -> None:
        lease = replace(leased(silence_s=1.0), beat_s=0.2)
        box = await backend(kind, lease=lease).open(SPEC, episode="e")
        await asyncio.sleep(1.5)
        assert (await box.run(["sleep", "1.5"], timeout_s=10)).ok
        await box.close()

    asyncio.run(body())


@every_kind
def test_cancelling_the_making_of_a_box_at_any_moment_leaves_nothing(kind: str) -> None:
    async def body() -> None:
        made = backend(kind)
        longest = 0.5 if kind == "docker" else 0.1
        for n in range(6):
            opening = asyncio.ensure_future(made.open(SPEC, episode=str(n)))
            await asyncio.sleep(longest * n / 6)
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await opening).close()
        assert await made.owned() == []

    asyncio.run(body())


@every_kind
def test_a_cancelled_close_closes_all_the_same(kind: str) -> None:
    async def body() -> None:
        made = backend(kind)
        box = await made.open(SPEC, episode="e")
        closing = asyncio.ensure_future(box.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert await made.owned() == []

    asyncio.run(body())


@every_kind
def test_closing_under_a_command_ends_the_command_and_tells_who_waits(kind: str) -> None:
    async def body() -> None:
        made = backend(kind)
        box = await made.open(SPEC, episode="e")
        running = asyncio.ensure_future(box.run(["sleep", "20"], timeout_s=30))
        waiting = asyncio.ensure_future(box.read("f", 1))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        await box.close()
        assert time.monotonic() - began < 5
        for one in (running, waiting):
            with pytest.raises(BoxClosed, match="it was closed"):
                await one
        assert await made.owned() == []

    asyncio.run(body())


def children(name: str) -> set[int]:
    """This process's children of that name."""
    shown = subprocess.run(["pgrep", "-P", str(os.getpid()), name], capture_output=True, check=False)
    return set(map(int, shown.stdout.split()))


def test_a_box_whose_bubblewrap_was_killed_ends_all_the_same() -> None:
    async def body() -> None:
        made = backend("namespace")
        before = await asyncio.to_thread(children, "bwrap")  # an earlier test's may not have been waited for yet
        box = await made.open(SPEC, episode="e")
        (outer,) = await asyncio.to_thread(children, "bwrap") - before
        os.kill(outer, signal.SIGKILL)
        await box.close()
        assert await made.owned() == []

    asyncio.run(body())


@pytest.mark.docker
def test_a_container_killed_from_outside_is_a_box_that_is_gone() -> None:
    async def body() -> None:
        made = backend("docker")
        box = await made.open(SPEC, episode="e")
        running = asyncio.ensure_future(box.run(["sleep", "20"], timeout_s=30))
        await asyncio.sleep(0.2)
        assert await asyncio.to_thread(Engine(engine_socket()).remove, box.id)
        with pytest.raises(BoxClosed):
            await running
        await box.close()
        assert await made.owned() == []

    asyncio.run(body())


@pytest.mark.docker
def test_a_missing_image_is_told_with_what_makes_it() -> None:
    require_image()
    with pytest.raises(ConfigError, match="no image palestra/none:1; build or load it"):
        choose_backend("docker", run="t", image="palestra/none:1")
    backend_, reason = choose_backend("auto", run="t", image="palestra/none:1")
    assert backend_.name == "namespace"
    assert "no image palestra/none:1" in reason

    async def body() -> None:
        with pytest.raises(SandboxError, match="no image palestra/none:1"):
            await backend("docker").open(BoxSpec(image="palestra/none:1"), episode="e")

    asyncio.run(body())


@pytest.mark.docker
def test_docker_is_taken_where_an_engine_answers() -> None:
    require_image()
    for kind in ("auto", "docker"):
        made, reason = choose_backend(kind, run="t")  # type: ignore[arg-type]
        assert (made.name, made.unenforced) == ("docker", ())
        assert "docker" in reason


def test_namespaces_are_taken_where_no_engine_answers() -> None:
    require("bwrap")
    made, reason = choose_backend("auto", run="t", socket_path="/nonexistent.sock")
    assert made.name == "namespace"
    assert "no Docker engine answers at /nonexistent.sock" in reason
    with pytest.raises(ConfigError, match=r"no Docker engine answers at /nonexistent\.sock"):
        choose_backend("docker", run="t", socket_path="/nonexistent.sock")


def test_what_a_kind_cannot_do_is_refused_and_not_ignored() -> None:
    require("bwrap")

    async def body() -> None:
        with pytest.raises(SandboxError, match="not the image debian"):
            await NamespaceBackend(run="t").open(BoxSpec(image="debian"), episode="e")
        small = BoxSpec(limits=Limits(memory_bytes=64 * 2**20, scratch_bytes=64 * 2**20))
        with pytest.raises(SandboxError, match="scratch counts as memory"):
            await NamespaceBackend(run="t").open(small, episode="e")

    asyncio.run(body())


def test_the_mirror_of_apt_is_found_in_both_formats(tmp_path: Path) -> None:
    old, new = tmp_path / "sources.list", tmp_path / "sources.list.d"
    new.mkdir()
    (new / "other.sources").write_text("Types: deb\nURIs: https://example.org/tools\nSuites: any\n")
    assert apt_mirror([str(old), str(new)]) is None
    (new / "z.sources").write_text("Types: deb\n# a comment\nURIs: http://example.org/debian\nSuites: bookworm\n")
    assert apt_mirror([str(old), str(new)]) == "http://example.org/debian"
    old.write_text("# deb http://no.example.org/debian x\ndeb [arch=amd64] http://a.example.org/debian/ stable main\n")
    assert apt_mirror([str(old), str(new)]) == "http://a.example.org/debian/"


@pytest.mark.docker
def test_an_image_that_is_there_is_not_built_again() -> None:
    require_image()
    said: list[str] = []
    assert build_image(engine_socket(), say=said.append) is False
    assert len(said) == 1
