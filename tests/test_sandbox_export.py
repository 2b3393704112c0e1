"""What leaves a box at the end of an episode: regular files and inner links, within limits, whatever the policy left.

Rows A07 A08 B25 E07 E08 G08 K02 K08 of the abuse catalogue.
"""

from __future__ import annotations

import time

import pytest

from sandbox_support import DOCKER, GVISOR, NAMESPACE, SCRIPTED, Box
from sandbox_support import box as box
from sandbox_support import home as home
from sandbox_support import kept as kept

every_kind = pytest.mark.parametrize("box", [SCRIPTED, NAMESPACE, DOCKER, GVISOR], indirect=True)
real_kinds = pytest.mark.parametrize("box", [NAMESPACE, DOCKER, GVISOR], indirect=True)


@every_kind
def test_files_leave_as_they_are_and_only_those_asked_for(box: Box) -> None:
    data = bytes(range(256)) * 3000
    box.write("src/a/main.py", b"print(1)\n")
    box.write("src/tool", data, mode=0o755)
    box.write("other/file", b"x")
    box.write("src2", b"y")
    tree = box.export("src", "src/a")
    assert tree.files == {"src/a/main.py": b"print(1)\n", "src/tool": data}
    assert tree.executable == {"src/tool"}
    assert (tree.links, tree.skipped, tree.over) == ({}, {}, None)
    assert set(box.export(".").files) == {"src/a/main.py", "src/tool", "other/file", "src2"}
    assert box.export("src2", "missing", "src2/below").files == {"src2": b"y"}
    assert box.export().files == {}


@every_kind
@pytest.mark.parametrize("path", ["..", "/etc", "a/../../etc", "/workspacefile"])
def test_an_export_from_outside_the_workspace_is_the_callers_mistake(box: Box, path: str) -> None:
    with pytest.raises(ValueError, match="outside the workspace"):
        box.export("a", path)


@every_kind
def test_limits_are_said_and_nothing_is_handed_over_beyond_them(box: Box) -> None:
    """B25, E08."""
    for n in range(5):
        box.write(f"d/{n}", b"x" * 1000)
    box.write("a/b/c/file", b"x")
    assert len(box.export("d", total_bytes=5100, files=5, depth=0 + 1).files) == 5
    for limits, word in (({"total_bytes": 5000}, "5000 bytes"), ({"files": 4}, "4 files")):
        tree = box.export("d", **limits)
        assert tree.files == {}
        assert word in (tree.over or "")
    assert "deep" in (box.export(".", depth=2).over or "")
    assert box.export(".", depth=3).over is None


@real_kinds
def test_links_that_stay_inside_are_kept_as_links(box: Box) -> None:
    """K02."""
    assert box.sh(
        "mkdir -p a/b; echo x > a/f; ln -s ../f a/b/up; ln -s a/b dir; ln -s nothing gone; ln -s ./a/./f dot"
    ).ok
    tree = box.export(".")
    assert tree.files == {"a/f": b"x\n"}
    assert tree.links == {"a/b/up": "../f", "dir": "a/b", "gone": "nothing", "dot": "./a/./f"}
    assert tree.skipped == {}


@real_kinds
def test_no_link_is_followed_out_of_the_box_or_around_it(box: Box) -> None:
    """A07, G08: neither as the thing asked for, nor on the way, nor by a chain that only seems to stay inside."""
    script = """
mkdir -p out p/q; ln -s /etc/hostname out/reward; ln -s /proc/1/environ out/env; ln -s ../../etc out/etc
ln -s ../.. p/q/root; ln -s root/../../etc/passwd p/q/seems; ln -s /workspace/out way; ln -s out inner
"""
    assert box.sh(script).exit_code == 0
    tree = box.export(".")
    assert tree.files == {}
    assert tree.links == {"p/q/root": "../..", "inner": "out"}
    assert set(tree.skipped) == {"out/reward", "out/env", "out/etc", "p/q/seems", "way"}
    assert all("link" in reason for reason in tree.skipped.values())
    for path in ("way/reward", "inner/reward", "out/etc/passwd"):
        on_the_way = box.export(path)
        assert on_the_way.files == {}
        assert "on the way" in on_the_way.skipped[path]


@real_kinds
def test_what_is_no_file_stays_behind_with_the_reason(box: Box) -> None:
    """A08: nothing waits for a pipe."""
    script = "import os, socket\nos.mkfifo('pipe'); socket.socket(socket.AF_UNIX).bind('sock'); os.mkdir('reward.json')"
    assert box.python(script + "\nopen('file', 'w').write('x')").ok
    began = time.monotonic()
    tree = box.export(".", "pipe", "sock")
    assert time.monotonic() - began < 5
    assert tree.files == {"file": b"x"}
    assert tree.skipped == {"pipe": "a pipe", "sock": "a socket"}
    assert box.export("reward.json").files == {}


@real_kinds
def test_closed_modes_hide_nothing_and_stay(box: Box) -> None:
    assert box.sh("mkdir -p a/b; echo x > a/b/f; chmod 0 a/b/f a/b a").ok
    assert box.export(".").files == {"a/b/f": b"x\n"}
    assert box.sh("find a -maxdepth 0 -printf '%m\\n'").stdout == b"0\n"
    assert box.sh("cd /; chmod 0 /workspace").ok
    assert box.export(".").files == {"a/b/f": b"x\n"}
    assert set(box.export("a/b").skipped) == {"a/b"}


@real_kinds
def test_names_come_through_whatever_bytes_they_are(box: Box) -> None:
    """B25, E07, K08."""
    names = [b"-rf", b"new\nline", b"$(id)", b"\xff\xfe", b"n" * 255, "é漢".encode(), b'quo"te\\', b" "]
    script = f"import os\nos.mkdir('d')\nfor name in {names!r}: open(os.path.join(b'd', name), 'wb').write(name)"
    assert box.python(script).ok
    tree = box.export("d")
    found = {name.encode(errors="surrogateescape"): data for name, data in tree.files.items()}
    assert found == {b"d/" + name: name for name in names}


@real_kinds
def test_what_is_only_apparently_there_counts_as_there(box: Box) -> None:
    """E08: a file of holes."""
    assert box.sh("for i in 1 2 3; do truncate -s 30000000 hole$i; done").ok
    began = time.monotonic()
    assert "bytes" in (box.export(".").over or "")
    assert time.monotonic() - began < 2
    assert len(box.export("hole1", total_bytes=31_000_000).files["hole1"]) == 30_000_000
    assert box.run("true").ok


@real_kinds
def test_a_tree_that_is_too_deep_or_too_wide_ends_soon(box: Box) -> None:
    """E07: 5000 directories deep, paths that no call could open; then more entries than are looked at."""
    deep = "import os\nfor i in range(5000):\n    os.mkdir('d'); os.chdir('d')"
    assert box.python(deep).ok
    began = time.monotonic()
    assert "deep" in (box.export(".").over or "")
    assert box.export(".", depth=10_000).files == {}
    box.reset()
    assert box.python("import os\nfor i in range(4000): os.mkdir(str(i))").ok
    assert "entries" in (box.export(".", files=500).over or "")
    assert box.export(".", files=1000).files == {}
    assert time.monotonic() - began < 20
