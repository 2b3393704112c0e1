"""A box for judging has two users, and the one who is judged reaches nothing of the one who judges."""

from __future__ import annotations

import pytest

from palestra.envs.sandboxes.contract import BoxSpec, Limits
from sandbox_support import SPEC, Box, Home, backend, home, kept

__all__ = ["home", "kept"]

LIMITS = Limits(memory_bytes=128 * 2**20, scratch_bytes=32 * 2**20, processes=32)
KINDS = ["namespace", pytest.param("docker", marks=pytest.mark.docker)]
ASK = """
import socket, time
line = socket.socket(fileno=3)
line.sendall(b"who?")
print(line.recv(100).decode(), end="")
"""
ANSWER = """
import os, socket, subprocess
subprocess.Popen(["sleep", "60"])
print("not for anyone")
line = socket.socket(fileno=3)
line.recv(100)
line.sendall(str(os.getuid()).encode())
line.recv(100)
"""


@pytest.fixture
def court(request: pytest.FixtureRequest, home: Home, kept: dict[str, Box]) -> Box:
    """A clean box for judging."""
    kind: str = request.param
    if kind not in kept:
        kept[kind] = Box(home, home.do(backend(kind).open(BoxSpec(limits=LIMITS, role="verifier"), episode="t")))
    kept[kind].reset()
    return kept[kind]


def examiner(box: Box, script: str) -> bytes:
    done = box.run("/bin/sh", "-c", script, user="examiner")
    assert done.ok, done.stderr
    return done.stdout


@pytest.mark.parametrize("court", KINDS, indirect=True)
def test_the_policys_user_cannot_read_change_or_replace_what_the_examiner_staged(court: Box) -> None:  # A23, B14
    examiner(court, "umask 077; mkdir /tests/run; echo secret > /tests/run/expected; echo 1 > /logs/reward.txt")
    for attack in (
        "cat /tests/run/expected",
        "ls /tests/run",
        "echo forged > /logs/reward.txt",
        "rm -rf /tests/run",
        "mv /tests/run /tests/old",
        "mkdir /tests/more",
        "ln -s /workspace /logs/verifier",
        "cat /logs/reward.txt",
    ):
        done = court.sh(attack)
        assert not done.ok, attack
        assert b"secret" not in done.stdout
    assert examiner(court, "cat /tests/run/expected /logs/reward.txt") == b"secret\n1\n"


@pytest.mark.parametrize("court", KINDS, indirect=True)
def test_neither_user_has_a_capability(court: Box) -> None:
    for user in ("policy", "examiner"):
        status = court.run("grep", "-E", "^(Uid|Cap(Prm|Eff|Amb))", "/proc/self/status", user=user).stdout.decode()
        words = [row.split()[1:] for row in status.splitlines()]
        assert set(words[0]) == {"65534" if user == "policy" else "65533"}
        assert all(int(mask[0], 16) == 0 for mask in words[1:])


@pytest.mark.parametrize("court", KINDS, indirect=True)
def test_a_command_beside_another_talks_over_the_socket_alone_and_ends_with_it(court: Box) -> None:
    done = court.run("python3", "-c", ASK, user="examiner", beside=["python3", "-c", ANSWER])
    assert done.stdout == b"65534"
    assert done.stderr == b""
    assert b"sleep" not in court.run("/bin/sh", "-c", "cat /proc/[0-9]*/cmdline").stdout.replace(b"cat", b"")


@pytest.mark.parametrize("court", KINDS, indirect=True)
def test_one_that_cannot_be_started_hangs_up(court: Box) -> None:
    script = "import socket; print(socket.socket(fileno=3).recv(9))"
    assert court.run("python3", "-c", script, user="examiner", beside=["no-such-program"]).stdout == b"b''\n"


@pytest.mark.parametrize("court", KINDS, indirect=True)
def test_a_reset_takes_away_what_the_examiner_left(court: Box) -> None:
    clean = court.digest()
    examiner(court, "umask 077; mkdir -p /tests/a/b /logs/verifier /tmp/mine; echo 1 > /tests/a/b/c; chmod 0 /tests/a")
    court.reset()
    assert court.digest() == clean
    assert examiner(court, "ls /tests /logs /tmp") == b"/logs:\n\n/tests:\n\n/tmp:\n"


def test_a_policys_box_has_no_examiner(home: Home) -> None:
    box = Box(home, home.do(backend("namespace").open(SPEC, episode="t")))
    try:
        with pytest.raises(ValueError, match="no examiner"):
            box.run("true", user="examiner")
        assert box.sh("ls -d /tests /logs").stdout == b""
    finally:
        home.do(box.sandbox.close())
