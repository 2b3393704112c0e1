"""A reset leaves nothing of an episode, and says so when it cannot; links and special files are never followed."""

from __future__ import annotations

import pytest

from sandbox_support import DOCKER, NAMESPACE, Box
from sandbox_support import box as box
from sandbox_support import home as home
from sandbox_support import kept as kept

pytestmark = pytest.mark.parametrize("box", [NAMESPACE, DOCKER], indirect=True)

TRACES = """
import os
for root in ("/workspace", "/tmp", "/dev/shm"):
    print(root, oct(os.stat(root).st_mode), os.stat(root).st_uid, os.listdir(root))
print(sum(name.isdigit() for name in os.listdir("/proc")))
"""
CLEAN = b"/workspace 0o40755 65534 []\n/tmp 0o41777 "


def traces(box: Box) -> bytes:
    return box.python(TRACES).stdout


def test_nothing_of_an_episode_is_left(box: Box) -> None:
    before = traces(box)
    assert before.startswith(CLEAN)
    script = """
import os, subprocess
for place in ("/workspace", "/tmp", "/dev/shm"):
    for name in (b"plain", b".hidden", b"-rf", b"new\\nline", b"\\xff\\xfe", b"$(touch x)", b"n" * 255, b"wiped-1"):
        open(os.path.join(place.encode(), name), "w").write("x")
    os.makedirs(f"{place}/closed/inner/most")
    open(f"{place}/closed/inner/file", "w").close()
    os.mkfifo(f"{place}/fifo")
    os.symlink("/etc", f"{place}/link")
    os.symlink(f"{place}/loop", f"{place}/loop")
    os.chmod(f"{place}/closed/inner", 0)
    os.chmod(f"{place}/closed", 0)
os.chmod("/workspace", 0o700)
subprocess.Popen(["sleep", "1000"], start_new_session=True)
"""
    assert box.python(script).exit_code == 0
    box.reset()
    assert traces(box) == before


def test_a_very_deep_tree_is_wiped(box: Box) -> None:
    """E07."""
    script = """
import os
for place, depth in (("/workspace", 3000), ("/tmp", 1000)):
    os.chdir(place)
    for n in range(depth):
        os.mkdir("d")
        os.chdir("d")
    open("f", "w").close()
"""
    before = traces(box)
    assert box.python(script).exit_code == 0
    box.reset()
    assert traces(box) == before


def test_a_wide_directory_is_wiped(box: Box) -> None:
    before = traces(box)
    assert box.python("for n in range(5000): open(f'/workspace/{n}', 'w').close()", timeout_s=60).exit_code == 0
    box.reset()
    assert traces(box) == before


def test_memory_segments_and_semaphores_are_removed(box: Box) -> None:
    script = "import ctypes; c = ctypes.CDLL(None); print(c.shmget(7, 4096, 0o1666) >= 0, c.semget(7, 1, 0o1666) >= 0, "
    script += "c.msgget(7, 0o1666) >= 0)"
    assert box.python(script).stdout == b"True True True\n"
    assert box.sh("cat /proc/sysvipc/* | wc -l").stdout.strip() == b"6"
    box.reset()
    assert box.sh("cat /proc/sysvipc/* | wc -l").stdout.strip() == b"3"


def test_a_message_queue_that_nobody_would_see_cannot_be_made(box: Box) -> None:
    script = "import ctypes; print(ctypes.CDLL(None).mq_open(b'/q', 0o102, 0o600, None))"
    assert box.python(script).stdout == b"-1\n"


def test_a_server_left_listening_is_gone_and_its_port_free(box: Box) -> None:
    server = "import socket, os, time\ns = socket.create_server(('127.0.0.1', 8080))\n"
    server += "c = socket.create_connection(('127.0.0.1', 8080)); print('up', flush=True)\n"
    script = server + "if os.fork() == 0:\n  os.setsid(); time.sleep(100)\n"
    assert box.python(script).stdout == b"up\n"
    box.reset()
    assert box.python(server).stdout == b"up\n"


def test_the_given_files_belong_to_the_policy(box: Box) -> None:
    box.reset({"src/main.py": b"print(1)", "data": b""})
    assert box.sh("stat -c '%n %a %u' data src src/main.py").stdout == (
        b"data 644 65534\nsrc 755 65534\nsrc/main.py 644 65534\n"
    )
    assert box.sh("echo x >> data && rm src/main.py").ok


def test_the_mode_of_a_written_file_is_the_given_one(box: Box) -> None:
    box.write("tool", b"#!/bin/sh\necho ran\n", mode=0o755)
    assert box.run("./tool").stdout == b"ran\n"
    box.write("tool", b"secret", mode=0o600)
    assert box.sh("stat -c %a tool").stdout == b"600\n"


@pytest.mark.parametrize(
    "trick",
    [
        "ln -s /etc/passwd target",
        "ln -s /proc/1/environ target",
        "ln -s nothing target",
        "mkfifo target",
        "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('target')\"",
    ],
)
def test_a_link_or_special_file_is_neither_read_nor_written(box: Box, trick: str) -> None:
    assert box.sh(trick).ok
    with pytest.raises(PermissionError):
        box.read("target")
    with pytest.raises(PermissionError):
        box.write("target", b"x")


def test_a_link_on_the_way_is_not_followed(box: Box) -> None:
    """G08."""
    assert box.sh("mkdir real; echo x > real/file; ln -s real way; ln -s / out; ln -s way loop").ok
    for path in ("way/file", "out/etc/passwd", "loop/file", "/workspace/way/file", "/bin/sh"):
        with pytest.raises(PermissionError):
            box.read(path)
    for path in ("way/new", "out/tmp/new", "way/deeper/new"):
        with pytest.raises(PermissionError):
            box.write(path, b"x")
    assert box.sh("ls real /tmp").stdout == b"/tmp:\n\nreal:\nfile\n"


def test_reading_has_the_rights_of_the_policy_and_no_more(box: Box) -> None:
    assert box.sh("echo x > mine; chmod 000 mine").ok
    for path in ("mine", "/proc/1/environ"):
        with pytest.raises(PermissionError):
            box.read(path)
    assert box.read("/proc/uptime")
    with pytest.raises(FileNotFoundError):
        box.read("mine/below")


def test_a_hard_link_is_replaced_and_not_written_through(box: Box) -> None:
    assert box.sh("echo old > one; ln one two").ok
    box.write("two", b"new")
    assert (box.read("one"), box.read("two")) == (b"old\n", b"new")


def test_paths_are_no_options_and_no_patterns(box: Box) -> None:
    for path in ("-rf", "*", "$(id)", "a b", "x\ny", "é", "\udcff"):
        box.write(path, path.encode(errors="surrogateescape"))
        assert box.read(path) == path.encode(errors="surrogateescape")
    with pytest.raises(OSError, match="too long"):
        box.write("n" * 300, b"x")
