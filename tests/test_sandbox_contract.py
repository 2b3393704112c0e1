"""What every kind of box promises, asked of every kind: in memory, of namespaces, of a Docker engine."""

from __future__ import annotations

import asyncio

import pytest

from palestra.envs.errors import SandboxError
from palestra.envs.sandboxes.contract import BoxClosed, ExportLimits
from palestra.envs.sandboxes.scripted import ScriptedSandbox, Trouble
from sandbox_support import DOCKER, GVISOR, NAMESPACE, SCRIPTED, Box, Home, opened
from sandbox_support import box as box
from sandbox_support import home as home
from sandbox_support import kept as kept

every_kind = pytest.mark.parametrize("box", [SCRIPTED, NAMESPACE, DOCKER, GVISOR], indirect=True)
every_name = pytest.mark.parametrize("kind", [SCRIPTED, NAMESPACE, DOCKER, GVISOR])


@every_kind
def test_a_command_says_how_it_ended(box: Box) -> None:
    assert box.run("true").exit_code == 0
    assert box.run("true").ok
    assert box.run("false").exit_code == 1
    assert not box.run("false").ok
    assert box.run("no-such-program").exit_code == 127


@every_kind
def test_arguments_and_input_reach_the_program_unread(box: Box) -> None:
    said = box.run("echo", "$(id)", "a  b", "*", "é\n")
    assert said.stdout == "$(id) a  b * é\n\n".encode()
    assert said.stdout_total == len(said.stdout)
    assert box.run("cat", stdin=b"\x00\xff\n").stdout == b"\x00\xff\n"
    assert box.run("cat").stdout == b""


@every_kind
def test_a_file_is_read_as_it_was_written(box: Box) -> None:
    data = bytes(range(256)) * 5000
    box.write("deep/er/file.bin", data)
    assert box.read("deep/er/file.bin", len(data)) == data
    assert box.read("/workspace/deep/er/file.bin", len(data)) == data
    box.write("deep/er/file.bin", b"new")
    assert box.read("deep/../deep/er/file.bin") == b"new"
    box.write("empty", b"")
    assert box.read("empty", 0) == b""


@every_kind
def test_reading_says_what_is_wrong_with_a_path(box: Box) -> None:
    box.write("folder/file", b"12345")
    with pytest.raises(FileNotFoundError):
        box.read("nothing")
    with pytest.raises(IsADirectoryError):
        box.read("folder")
    with pytest.raises(IsADirectoryError):
        box.read(".")
    with pytest.raises(ValueError, match="file"):
        box.read("folder/file", 4)
    with pytest.raises(PermissionError):
        box.read("a\0b")


@every_kind
@pytest.mark.parametrize("path", ["../escape", "/etc/escape", "/workspacefile", "a/../../escape", ".", "/"])
def test_writing_outside_the_workspace_is_refused(box: Box, path: str) -> None:
    with pytest.raises(PermissionError):
        box.write(path, b"x")


@every_kind
def test_a_directory_cannot_be_overwritten(box: Box) -> None:
    box.write("folder/file", b"x")
    with pytest.raises(OSError, match="directory"):
        box.write("folder", b"x")
    assert box.read("folder/file") == b"x"


@every_kind
def test_a_reset_leaves_the_given_files_and_no_others(box: Box) -> None:
    box.write("old", b"x")
    box.reset({"new/a": b"1", "b": b"2"})
    assert (box.read("new/a"), box.read("b")) == (b"1", b"2")
    with pytest.raises(FileNotFoundError):
        box.read("old")
    box.reset()
    with pytest.raises(FileNotFoundError):
        box.read("b")


@every_kind
def test_equal_states_have_equal_digests_and_any_other_state_has_another(box: Box) -> None:
    box.reset({"a/b": b"1", "c": b"2"})
    start = box.digest()
    assert start == box.digest()
    box.write("c", b"3")
    assert box.digest() != start
    box.write("c", b"2")
    assert box.digest() == start
    box.write("c", b"2", mode=0o600)
    assert box.digest() != start
    box.reset({"c": b"2", "a/b": b"1"})
    assert box.digest() == start
    box.reset({"a/b": b"1", "d": b"2"})
    assert box.digest() != start
    box.reset({"a/b": b"12", "c": b""})
    assert box.digest() != start


@every_kind
def test_commands_asked_for_at_once_are_served_one_after_the_other(box: Box, home: Home) -> None:
    async def body() -> list[bytes]:
        asked = [box.sandbox.run(["echo", str(n)], timeout_s=20) for n in range(10)]
        return [done.stdout for done in await asyncio.gather(*asked)]

    assert home.do(body()) == [b"%d\n" % n for n in range(10)]


@every_name
def test_a_closed_box_refuses_everything_and_closes_twice(kind: str) -> None:
    async def body() -> None:
        box = await opened(kind)
        state = await box.snapshot()
        await box.close()
        await box.close()
        calls = (
            box.run(["true"], timeout_s=1),
            box.read("a", 1),
            box.write("a", b""),
            box.reset(),
            box.digest(),
            box.output("a", "stdout", 0, 1),
            box.export(["."], ExportLimits()),
            box.snapshot(),
            box.restore(state),
        )
        for call in calls:
            with pytest.raises(BoxClosed):
                await call

    asyncio.run(body())


@pytest.mark.parametrize(("trouble", "error"), [(Trouble.STALL, SandboxError), (Trouble.DIE, BoxClosed)])
def test_a_scripted_box_can_be_told_to_fail(trouble: Trouble, error: type[SandboxError]) -> None:
    async def body() -> None:
        box = ScriptedSandbox(lambda command, files: trouble)
        with pytest.raises(error):
            await box.run(["true"], timeout_s=0.01)
        with pytest.raises(BoxClosed):
            await box.read("a", 1)

    asyncio.run(body())


def test_a_scripted_box_fails_once_where_it_is_told_to() -> None:
    async def body() -> None:
        box = ScriptedSandbox()
        box.trouble = Trouble.FAIL
        with pytest.raises(SandboxError):
            await box.reset()
        await box.reset({"a": b"1"})
        assert await box.read("a", 1) == b"1"

    asyncio.run(body())


real_kinds = pytest.mark.parametrize("box", [NAMESPACE, DOCKER, GVISOR], indirect=True)


@real_kinds
def test_a_digest_covers_everything_that_can_be_written_and_nothing_that_only_time_changes(box: Box) -> None:
    box.reset({"a": b"1"})
    seen = {box.digest()}
    for script in (
        "mkdir empty",
        "rmdir empty; ln -s a link",
        "ln -sfn b link",
        "rm link; mkfifo pipe",
        "rm pipe; echo x > /tmp/x",
        "mv /tmp/x /dev/shm/x",
        "rm /dev/shm/x; chmod 700 /workspace",
    ):
        assert box.sh(script).ok
        now = box.digest()
        assert now not in seen
        seen.add(now)
    assert box.sh("chmod 755 /workspace; touch -d 2001-01-01 a; cat a; cp a b; rm b").ok
    assert box.digest() in seen


@real_kinds
def test_closed_modes_hide_nothing_from_a_digest_and_stay_as_they_were(box: Box) -> None:
    box.reset({"deep/er/file": b"1"})
    close = "chmod 000 deep/er/file; chmod 000 deep/er; chmod 311 deep; chmod 000 /workspace"
    assert box.sh(close).ok
    first = box.digest()
    assert box.digest() == first
    mode = "-maxdepth 0 -printf '%m\\n'"
    shown = (
        f"cd /; chmod 755 /workspace; cd /workspace; find deep {mode}; chmod 755 deep deep/er; find deep/er/file {mode}"
    )
    assert box.run("/bin/sh", "-c", shown, cwd="/").stdout == b"311\n0\n"
    box.reset({"deep/er/file": b"2"})
    assert box.sh(close).ok
    assert box.digest() != first


@real_kinds
def test_a_digest_is_fast_and_exact_whatever_the_policy_piles_up(box: Box) -> None:
    box.reset()
    assert box.sh("for i in 1 2 3 4 5 6 7 8; do truncate -s 30000000 hole$i; done").ok
    holes = box.digest()
    assert box.sh("for i in 1 2 3 4 5 6 7 8; do truncate -s 0 hole$i; truncate -s 30000000 hole$i; done").ok
    assert box.sh("dd if=/dev/zero of=hole1 bs=65536 count=3 seek=2 conv=notrunc").ok
    assert box.digest() == holes  # zeros are zeros, written or not
    assert box.sh("printf x | dd of=hole1 bs=1 seek=20000000 conv=notrunc").ok
    assert box.digest() != holes
    deep = "import os\nfor i in range(900):\n    os.mkdir('d' * 20); os.chdir('d' * 20)\nopen('end', 'w').write('1')"
    assert box.python(deep).ok
    first = box.digest()
    assert box.digest() == first
    box.reset()
