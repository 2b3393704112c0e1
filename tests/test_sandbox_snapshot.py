"""A state of a box put aside and put back, here or in another box, and proved to be the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.contract import BoxSpec, Sandbox
from palestra.envs.sandboxes.scripted import ScriptedBoxes
from sandbox_support import DOCKER, GVISOR, NAMESPACE, SCRIPTED, SPEC, Box, Home, backend, opened
from sandbox_support import box as box
from sandbox_support import home as home
from sandbox_support import kept as kept

every_kind = pytest.mark.parametrize("box", [SCRIPTED, NAMESPACE, DOCKER, GVISOR], indirect=True)
real_kinds = pytest.mark.parametrize("box", [NAMESPACE, DOCKER, GVISOR], indirect=True)


@every_kind
def test_a_state_comes_back_as_it_was(box: Box) -> None:
    box.reset({"a/b": b"1", "c": b"2" * 300_000})
    before, state = box.digest(), box.snapshot()
    assert state.digest == before
    box.write("a/b", b"3")
    box.write("new", b"4")
    assert box.digest() != before
    box.restore(state)
    assert box.digest() == before
    assert (box.read("a/b"), box.read("c")) == (b"1", b"2" * 300_000)
    with pytest.raises(FileNotFoundError):
        box.read("new")
    box.reset()
    box.restore(state)
    assert box.read("a/b") == b"1"


@every_kind
def test_a_snapshot_larger_than_allowed_is_refused_and_the_box_goes_on(box: Box) -> None:
    box.write("big", bytes(range(1, 200)) * 5000)
    with pytest.raises(ValueError, match="larger than 500000"):
        box.snapshot(500_000)
    assert len(box.read("big")) == 995_000
    assert box.snapshot(1_400_000).digest == box.digest()


@pytest.mark.parametrize("kind", [SCRIPTED, NAMESPACE, DOCKER, GVISOR])
def test_a_state_that_is_not_what_it_says_breaks_the_box(kind: str) -> None:
    async def body() -> None:
        box = await opened(kind)
        try:
            await box.write("a", b"1")
            state = await box.snapshot()
            with pytest.raises(SandboxError):
                await box.restore(replace(state, digest="0" * 64))
        finally:
            await box.close()

    asyncio.run(body())


@real_kinds
def test_everything_that_can_be_written_comes_back(box: Box) -> None:
    script = r"""
import os, socket
for place in ("/workspace", "/tmp", "/dev/shm"):
    os.makedirs(place + "/closed/inner/empty")
    for name in (b"-rf", b"new\nline", b"\xff", b"n" * 255):
        open(os.path.join(place.encode(), b"closed", name), "wb").write(name)
    os.mkfifo(place + "/pipe", 0o640)
    socket.socket(socket.AF_UNIX).bind(place + "/sock")
    os.symlink("/etc/passwd", place + "/link")
    os.symlink("loop", place + "/loop")
    os.chmod(place + "/closed/-rf", 0o4711)
    os.chmod(place + "/closed/inner", 0o000)
    os.chmod(place + "/closed", 0o311)
os.chmod("/workspace", 0o2700)
"""
    assert box.python(script).ok
    before, state = box.digest(), box.snapshot()
    box.reset()
    box.restore(state)
    assert box.digest() == before
    shown = box.sh(
        "find /tmp/closed /tmp/pipe /tmp/sock /dev/shm/link -maxdepth 0 -printf '%m %y\\n'; cat /tmp/closed/-rf"
    )
    assert shown.stdout == b"311 d\n640 p\n755 s\n777 l\n-rf"


@real_kinds
def test_holes_deep_trees_and_a_full_scratch_come_back_in_little_room(box: Box) -> None:
    assert box.sh("truncate -s 30000000 hole; printf x | dd of=hole bs=1 seek=20000000 conv=notrunc").ok
    state = box.snapshot()
    assert len(state.data) < 200_000
    box.restore(state)
    assert box.digest() == state.digest
    box.reset()
    deep = "import os\nfor i in range(3000):\n    os.mkdir('d'); os.chdir('d')\nopen('end', 'w').write('1')"
    assert box.python(deep).ok
    state = box.snapshot()
    box.restore(state)
    assert box.digest() == state.digest
    box.reset()
    box.sh("dd if=/dev/urandom of=big bs=1M; dd if=/dev/urandom of=/tmp/big bs=1M")
    state = box.snapshot()
    box.restore(state)
    assert box.digest() == state.digest


@real_kinds
def test_restoring_ends_what_still_runs_there(box: Box) -> None:
    state = box.snapshot()
    box.sh("setsid sleep 100 & setsid sleep 100 &")
    box.restore(state)
    assert box.sh("ls -d /proc/[0-9]* | wc -l").stdout.strip() <= b"4"


@pytest.mark.parametrize("kind", [NAMESPACE, DOCKER, GVISOR])
def test_a_state_goes_on_in_another_box_without_touching_the_first(kind: str, home: Home) -> None:
    async def body(first: Sandbox, second: Sandbox) -> None:
        await first.run(["/bin/sh", "-c", "mkdir d; echo 1 > d/f; echo t > /tmp/t"], timeout_s=20)
        state = await first.snapshot()
        await second.restore(state)
        assert await second.digest() == await first.digest()
        await second.write("d/f", b"2")
        assert await first.read("d/f", 10) == b"1\n"
        assert await first.digest() == state.digest

    async def both() -> None:
        lender = backend(kind)
        boxes = [await lender.open(SPEC, episode=name) for name in ("first", "second")]
        try:
            await body(*boxes)
        finally:
            for one in boxes:
                await one.close()

    home.do(both())


def test_scripted_boxes_fork() -> None:
    async def body() -> None:
        boxes = ScriptedBoxes()
        first = await boxes.acquire(BoxSpec(), {"a": b"1"}, episode="e")
        other = await boxes.fork(first, episode="f")
        await other.write("a", b"2")
        assert (await first.read("a", 1), await other.read("a", 1)) == (b"1", b"2")
        assert boxes.lent == 2

    asyncio.run(body())
