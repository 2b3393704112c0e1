"""Commands that mean harm: each ends within its limit, costs the host next to nothing, and the next episode is clean.

The rows of the abuse catalogue that ordinary tests of commands, resets and exports do not cover already.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

from sandbox_support import DOCKER, NAMESPACE, SPEC, Box
from sandbox_support import box as box
from sandbox_support import home as home
from sandbox_support import kept as kept

pytestmark = pytest.mark.parametrize("box", [NAMESPACE, DOCKER], indirect=True)
MIB = 2**20
FLOOD = "import sys\nfor _ in range(50): sys.stdout.buffer.write(b'x' * 2**20)"
BAD_TEXT = "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe\\x80' * 350_000)"
LONG_LINE = "print('y' * 5_000_000)"
BOMB = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
HOG = "x = []\nwhile True: x.append(bytearray(10**6))"
FULL = """
for place in ("/workspace", "/tmp", "/dev/shm"):
    with open(place + "/big", "wb", buffering=0) as file:
        try:
            while True: file.write(b"z" * 2**20)
        except OSError: pass
x = []
while True: x.append(bytearray(10**6))
"""
SURVIVORS = """
import os, signal, time
for _ in range(8):
    if os.fork() == 0:
        os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: time.sleep(0.01)
"""
CLOSED = "import os, time\nfor fd in (0, 1, 2): os.close(fd)\ntime.sleep(0.3)\nos._exit(9)"


def resident_bytes() -> int:
    """Of this process, which is the host of the boxes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    "script", [FLOOD, BAD_TEXT, LONG_LINE, BOMB, HOG, FULL, SURVIVORS, CLOSED], ids=lambda script: script[:20]
)
def test_it_ends_within_its_limit_costs_the_host_little_and_the_next_episode_is_clean(box: Box, script: str) -> None:
    """E01, E02, E04, E05, D02, D04, L7."""
    box.reset({"task": b"1"})
    clean = box.digest()
    before, began = resident_bytes(), time.monotonic()
    done = box.python(script, timeout_s=4)
    assert time.monotonic() - began < 4 + 5
    assert len(done.stdout) <= SPEC.limits.output_bytes
    assert resident_bytes() - before < 64 * MIB
    box.reset({"task": b"1"})
    assert box.digest() == clean
    assert box.run("cat", "task").stdout == b"1"
    assert box.sh("ls -d /proc/[0-9]* | wc -l").survivors == 0


def test_a_flood_on_both_streams_is_counted_to_the_byte(box: Box) -> None:
    """E05, F04."""
    script = "import os\nfor _ in range(100): os.write(1, b'a' * 65536); os.write(2, b'\\xff' * 65536)"
    done = box.python(script)
    assert (done.stdout_total, done.stderr_total) == (6_553_600, 6_553_600)
    assert set(done.stdout) == {ord("a")}
    assert set(done.stderr) == {0xFF}
    assert done.ok


def test_what_a_command_prints_is_never_taken_for_an_answer(box: Box) -> None:
    """F02: frames, exit codes and markers of others, on streams and on every descriptor that it can find."""
    script = r"""
import json, os, struct
head = json.dumps({"exit_code": 0, "signal": None, "timed_out": False}).encode()
frame = struct.pack(">II", len(head), 0) + head
for fd in range(256):
    try: os.write(fd, frame)
    except OSError: pass
for path in ("/proc/1/fd/1", "/proc/1/fd/0"):
    try: open(path, "wb").write(frame)
    except OSError: pass
print("__EXIT__0\nroot@box:/# ")
os._exit(5)
"""
    done = box.python(script)
    assert done.exit_code == 5
    assert b"__EXIT__" not in done.stderr
    assert box.run("echo", "next").stdout == b"next\n"


def test_more_short_processes_than_the_limit_leave_nothing(box: Box) -> None:
    """D11: 2000 orphans, one after the other."""
    script = "import os\nfor _ in range(2000):\n  if os.fork() == 0:\n    os.fork(); os._exit(0)\n  os.wait()"
    assert box.python(script, timeout_s=60).exit_code == 0
    assert box.sh("cat /proc/[0-9]*/stat | grep -c ' Z '").stdout.strip() == b"0"


def test_nothing_that_runs_later_can_be_asked_for(box: Box) -> None:
    """D05."""
    script = """
(sleep 0.5; echo late > /workspace/late) & nohup sh -c 'sleep 0.5; echo late > /tmp/late' &
echo '* * * * * id' | crontab - && echo scheduled
echo 'id' | at now && echo scheduled
echo '* * * * * root id' > /etc/cron.d/x && echo scheduled
systemd-run --user --on-active=0.5 touch /tmp/late && echo scheduled
exit 0
"""
    assert b"scheduled" not in box.sh(script).stdout
    time.sleep(0.8)
    assert box.sh("ls /workspace /tmp").stdout == b"/tmp:\n\n/workspace:\n"


def test_empty_files_are_limited_by_the_memory_that_they_take(box: Box) -> None:
    """E04: a million empty files."""
    script = (
        "n = 0\ntry:\n  while n < 10**6: open(f'/workspace/{n}', 'w').close(); n += 1\nexcept OSError: pass\nprint(n)"
    )
    before = os.statvfs("/tmp").f_ffree
    done = box.python(script, timeout_s=8)
    assert done.out_of_memory or done.timed_out or int(done.stdout) < 10**6
    assert before - os.statvfs("/tmp").f_ffree < 50_000
    box.reset()
    assert box.sh("ls -A").stdout == b""


def test_sockets_and_descriptors_run_out_inside_only(box: Box) -> None:
    """E10."""
    script = """
import socket
held = []
server = socket.create_server(("127.0.0.1", 0), backlog=1000)
try:
    while len(held) < 60_000: held.append(socket.create_connection(server.getsockname()))
except OSError: pass
print(len(held))
"""
    assert int(box.python(script).stdout) < SPEC.limits.open_files
    box.reset()
    assert box.run("true").ok


def test_there_is_no_engine_and_no_key_to_find(box: Box) -> None:
    """G01, G11."""
    script = """
import os
for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock",
             "/var/run/secrets/kubernetes.io", "/root/.docker/config.json", "/root/.ssh", "/root/.netrc"):
    if os.path.exists(path): print(path)
print([name for name in os.environ if any(word in name for word in ("DOCKER", "KUBE", "TOKEN", "KEY", "SECRET"))])
"""
    assert box.python(script).stdout == b"[]\n"


def test_metadata_addresses_are_out_of_reach_however_they_are_written(box: Box) -> None:
    """G02: at once, without a wait."""
    script = """
import socket, time
began = time.monotonic()
places = ["169.254.169.254", "::ffff:169.254.169.254", "2852039166", "0xa9fea9fe", "metadata.google.internal",
          "fd00:ec2::254", "100.100.100.200"]
for place in places:
    try:
        socket.create_connection((place, 80), timeout=3)
        print("reached", place)
    except OSError:
        pass
print(time.monotonic() - began < 3)
"""
    assert box.python(script).stdout == b"True\n"


def test_no_program_gives_root(box: Box) -> None:
    """G07."""
    script = """
for program in su sudo passwd mount newgrp chsh pkexec; do
  path=$(command -v $program) || continue
  echo x | $path -c id 2>/dev/null | grep -c uid=0
done
cp /bin/sh mine && chmod 4755 mine && ./mine -p -c 'id -u'
"""
    assert set(box.sh(script).stdout.split()) <= {b"0", b"65534"}


def test_a_link_that_is_swapped_all_the_time_is_never_followed(box: Box) -> None:
    """G08: nothing of the policy runs while the host looks, so there is nobody left to swap."""
    script = "import os\nfor n in range(10**9):\n  os.symlink('/etc/passwd', 'l'); os.rename('l', 'target')\n"
    script += "  open('f', 'w').close(); os.rename('f', 'target')"
    box.python(script, timeout_s=0.5)
    for _ in range(20):
        try:
            assert box.read("target") == b""
        except PermissionError:
            assert "target" in box.export(".").skipped
    for path in ("/proc/self/root/etc/passwd", "/proc/1/root/etc/passwd", "/proc/self/cwd/target"):
        with pytest.raises(PermissionError):
            box.read(path)


def test_the_name_and_the_groups_of_the_box_cannot_be_changed(box: Box) -> None:
    """G16."""
    script = "hostname other; echo other > /proc/sys/kernel/hostname; echo $$ > /sys/fs/cgroup/memory/cgroup.procs; "
    script += "echo 1 > /sys/fs/cgroup/memory/memory.limit_in_bytes; uname -n"
    assert box.sh(f"({script}) 2>/dev/null").stdout == b"box\n"


def test_an_honest_end_is_not_taken_for_a_limit(box: Box) -> None:
    """K04."""
    for code in (124, 137):
        done = box.sh(f"exit {code}")
        assert (done.exit_code, done.timed_out, done.out_of_memory) == (code, False, False)
    killed = box.sh("kill -9 $$")
    assert (killed.signal, killed.timed_out, killed.out_of_memory) == (9, False, False)
