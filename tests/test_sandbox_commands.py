"""What a command may do, what it may not, and what is left of it; in a real box of each kind."""

from __future__ import annotations

import ast
import asyncio
import json
import time

import pytest

from palestra.envs.errors import SandboxError
from sandbox_support import DOCKER, NAMESPACE, SPEC, Box, Home
from sandbox_support import box as box
from sandbox_support import home as home
from sandbox_support import kept as kept

IDLE_INTERFACES = {"lo", "tunl0", "sit0", "ip6tnl0", "gre0", "gretap0", "erspan0"}  # what a kernel puts into each one
LIMIT = SPEC.limits.output_bytes
pytestmark = pytest.mark.parametrize("box", [NAMESPACE, DOCKER], indirect=True)


def test_exit_codes_and_signals_come_from_the_kernel(box: Box) -> None:
    """K04."""
    assert box.sh("exit 7").exit_code == 7
    ended = box.sh("kill -TERM $$")
    assert (ended.exit_code, ended.signal, ended.timed_out, ended.out_of_memory) == (None, 15, False, False)
    assert box.sh("exit 137").exit_code == 137
    assert box.sh("echo Killed: out of memory; exit 1").out_of_memory is False


def test_what_cannot_be_started_is_127_or_126_with_the_reason(box: Box) -> None:
    box.write("not-a-program", b"words", mode=0o755)
    box.write("no-rights", b"#!/bin/sh\n", mode=0o644)
    box.write("no-interpreter", b"#!/no/such\n", mode=0o755)
    assert box.run("./no-rights").exit_code == 126
    assert box.run("./not-a-program").exit_code == 126
    assert box.run("./no-interpreter").exit_code == 127
    assert box.run("true", cwd="nowhere").exit_code == 127
    assert box.run("a\0b").exit_code == 126
    assert box.run("echo", "x" * 200_000).exit_code == 126  # one argument longer than the kernel takes
    assert b"No such file" in box.run("no-such-program").stderr


def test_directory_and_environment_are_the_given_ones_and_nothing_of_the_host(box: Box) -> None:
    """G11."""
    box.write("sub/file", b"")
    assert box.run("pwd").stdout == b"/workspace\n"
    assert box.run("pwd", cwd="sub").stdout == b"/workspace/sub\n"
    assert box.run("pwd", cwd="/tmp").stdout == b"/tmp\n"
    names = set(json.loads(box.python("import os, json; print(json.dumps(dict(os.environ)))").stdout))
    assert names <= {"PATH", "HOME", "LANG", "TZ", "LC_CTYPE"}
    assert box.run("printenv", "GREETING", env={"GREETING": "hi"}).stdout == b"hi\n"


def test_a_command_has_its_three_streams_and_no_other_descriptor(box: Box) -> None:
    assert box.python("import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:4])").stdout == b"[0, 1, 2, 3]\n"


@pytest.mark.parametrize("waits", ["cat", "read line", "python3 -i", "exec 0<&-; cat"])
def test_a_command_that_waits_for_input_returns_at_once(box: Box, waits: str) -> None:
    """D08."""
    assert box.sh(waits, timeout_s=10).seconds < 5


def test_closed_output_streams_do_not_hold_anything_up(box: Box) -> None:
    assert box.sh("exec 1>&- 2>&-; sleep 0.2; exit 3", timeout_s=10).exit_code == 3


def test_a_timeout_ends_the_command_and_everything_it_started(box: Box) -> None:
    """D01, D02, D04."""
    script = "(while :; do echo x >> grown; sleep 0.05; done) & setsid sh -c 'trap \"\" TERM HUP; sleep 60' & sleep 60"
    began = time.monotonic()
    ended = box.sh(script, timeout_s=0.5)
    assert time.monotonic() - began < 3
    assert (ended.timed_out, ended.exit_code, ended.signal) == (True, None, 9)
    assert ended.survivors >= 2
    before = box.read("grown")
    time.sleep(0.6)
    assert box.read("grown") == before
    assert box.run("true").ok


def test_a_command_returns_when_it_exits_although_a_child_holds_its_streams(box: Box) -> None:
    """D02, D07."""
    ended = box.sh("sleep 30 & setsid sleep 30 & (sleep 30 &) ; echo done", timeout_s=20)
    assert ended.stdout == b"done\n"
    assert ended.seconds < 5
    assert ended.survivors == 3
    assert box.python("import os; print(sum(name.isdigit() for name in os.listdir('/proc')))").stdout == b"2\n"


def test_processes_that_respawn_when_killed_are_ended(box: Box) -> None:
    """D04."""
    script = "import os, signal\nfor _ in range(5):\n  if os.fork() == 0:\n    os.setsid()\n    while True:\n"
    script += "      if os.fork() == 0:\n        os._exit(0)\n      os.wait()\n"
    ended = box.python(script)
    assert ended.survivors >= 5
    assert box.run("true").survivors == 0


def test_short_lived_orphans_leave_no_zombies(box: Box) -> None:
    """D11."""
    assert box.sh("for i in $(seq 500); do (true &) ; done; sleep 0.3", timeout_s=30).exit_code == 0
    assert box.sh("cat /proc/[0-9]*/stat | grep -c ' Z '").stdout.strip() == b"0"


def test_an_endless_flood_is_cut_and_counted_in_bounded_memory(box: Box) -> None:
    """E05."""
    ended = box.run("yes", timeout_s=1.5)
    assert ended.timed_out
    assert len(ended.stdout) == LIMIT
    assert ended.stdout_total > 20 * LIMIT
    assert ended.stdout_cut is not None
    assert ended.stdout_total - (ended.stdout_cut[1] - ended.stdout_cut[0]) == LIMIT
    supervisor_kb = int(box.sh("ps -o rss= -p 1").stdout)
    assert supervisor_kb < 40_000


def test_head_and_tail_of_a_long_output_are_kept(box: Box) -> None:
    ended = box.sh("printf first; head -c 5000000 /dev/zero | tr '\\0' -; printf last; printf e >&2")
    assert ended.stdout_total == 5_000_009
    assert ended.stdout.startswith(b"first--")
    assert ended.stdout.endswith(b"--last")
    assert ended.stdout_cut == (LIMIT // 2, 5_000_009 - LIMIT // 2)
    assert (ended.stderr, ended.stderr_total, ended.stderr_cut) == (b"e", 1, None)


def test_bytes_that_are_no_text_come_through(box: Box) -> None:
    """F04."""
    script = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 100)"
    assert box.python(script).stdout == bytes(range(256)) * 100


def test_the_policy_has_no_capability_and_cannot_gain_one(box: Box) -> None:
    """G07."""
    status = dict(row.split(":\t", 1) for row in box.run("cat", "/proc/self/status").stdout.decode().splitlines())
    assert status["Uid"].split() == ["65534"] * 4
    assert status["Gid"].split() == ["65534"] * 4
    assert set(status["Groups"].split()) <= {"65534"}
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_the_first_process_can_be_neither_signalled_nor_read(box: Box) -> None:
    """D10."""
    box.sh("for number in $(seq 64); do kill -$number 1; done")
    box.sh("kill -9 -1")
    assert box.run("true").ok
    assert box.sh("cat /proc/1/environ || cat /proc/1/mem || ls /proc/1/fd || readlink /proc/1/cwd").stdout == b""
    attach = "import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"
    assert box.python(attach).stdout == b"-1\n"


def test_there_is_no_network_and_no_way_around_the_namespace(box: Box) -> None:
    """G02."""
    script = """
import socket
for family, place in ((socket.AF_INET, ("169.254.169.254", 80)), (socket.AF_INET, ("8.8.8.8", 53))):
    try:
        socket.create_connection(place, timeout=2)
        print("connected", place)
    except OSError:
        pass
try:
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    print("vsock")
except OSError:
    pass
print(sorted(name for _, name in socket.if_nameindex()))
"""
    said = box.python(script).stdout.decode().splitlines()
    assert len(said) == 1
    assert set(ast.literal_eval(said[0])) <= IDLE_INTERFACES


def test_namespaces_mounts_and_keyrings_are_refused(box: Box) -> None:
    script = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
calls = {"unshare": 272, "mount": 165, "keyctl": 250, "bpf": 321, "io_uring_setup": 425, "userfaultfd": 323}
if os.uname().machine == "aarch64":
    calls = {"unshare": 97, "mount": 40, "keyctl": 219, "bpf": 280, "io_uring_setup": 425, "userfaultfd": 282}
arguments = (0x10000000, 0, 0, 0, 0)
print([name for name, number in calls.items() if libc.syscall(number, *arguments) != -1 or ctypes.get_errno() != 1])
"""
    assert box.python(script).stdout == b"[]\n"


def test_only_the_scratch_can_be_written(box: Box) -> None:
    places = "/ /usr /usr/bin /etc /var/tmp /dev /home /root /run /proc/sys/kernel /sys /opt"
    script = f"for place in {places}; do (echo x > $place/file) 2>/dev/null && echo $place; done; echo end"
    assert box.sh(script).stdout == b"end\n"
    assert box.sh("for place in /workspace /tmp /dev/shm; do echo x > $place/file || exit 1; done").ok


def test_a_full_scratch_is_an_error_inside_and_the_next_command_works(box: Box) -> None:
    """E04."""
    for place in ("/workspace", "/tmp", "/dev/shm"):
        ended = box.sh(f"dd if=/dev/zero of={place}/big bs=1M count=200 2>&1; stat -c %s {place}/big")
        assert b"No space left" in ended.stdout
        assert int(ended.stdout.splitlines()[-1]) <= SPEC.limits.scratch_bytes
    assert box.run("true").ok
    with pytest.raises(OSError, match="space"):
        box.write("more", b"x" * 100_000)
    box.reset({"more": b"x" * 100_000})
    assert len(box.read("more")) == 100_000


def test_a_file_cannot_pretend_to_be_larger_than_the_scratch(box: Box) -> None:
    assert box.sh("truncate -s 1T sparse").exit_code != 0


def test_a_memory_hog_is_killed_told_as_such_and_the_next_command_works(box: Box) -> None:
    """E02."""
    ended = box.python("x = []\nwhile True: x.append(bytearray(10**6))", timeout_s=60)
    assert ended.out_of_memory
    assert (ended.exit_code, ended.signal, ended.timed_out) == (None, 9, False)
    next_one = box.run("true")
    assert next_one.ok
    assert not next_one.out_of_memory


def test_a_fork_bomb_is_held_and_the_next_command_works(box: Box) -> None:
    """E01."""
    ended = box.python("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", timeout_s=2)
    assert ended.timed_out
    assert 10 < ended.survivors <= SPEC.limits.processes
    assert box.run("true").ok


def test_open_files_are_limited_and_no_core_is_written(box: Box) -> None:
    """E10."""
    script = (
        "import os\ntry:\n  while True: n = os.open('/dev/null', 0)\nexcept OSError: os.write(1, b'%d' % n)\nos.abort()"
    )
    ended = box.python(script)
    assert int(ended.stdout) == SPEC.limits.open_files - 1
    assert ended.signal == 6
    assert box.sh("ls -A").stdout == b""


def test_a_cancelled_command_leaves_a_box_that_admits_to_be_broken(box: Box, home: Home, kept: dict[str, Box]) -> None:
    async def body() -> None:
        running = asyncio.ensure_future(box.sandbox.run(["sleep", "5"], timeout_s=10))
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(SandboxError, match="cut short"):
            await box.sandbox.run(["echo", "the reply of the other"], timeout_s=1)
        await box.sandbox.close()

    for kind in [kind for kind, one in kept.items() if one is box]:
        del kept[kind]
    home.do(body())
