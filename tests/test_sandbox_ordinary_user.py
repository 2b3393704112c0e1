"""Namespace boxes of an ordinary user, who has one user id to give and no control groups."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from palestra.envs import types
from tests_support import require

PROBES = """
import asyncio, json
from palestra.envs.sandboxes.contract import BoxSpec, Limits
from palestra.envs.sandboxes.namespace import NamespaceBackend

SPEC = BoxSpec(limits=Limits(memory_bytes=128 * 2**20, scratch_bytes=32 * 2**20, processes=32))
HOG = "x = []\\nwhile True: x.append(bytearray(10**6))"
BOMB = "import os\\nwhile True:\\n  try: os.fork()\\n  except OSError: pass"
ATTACH = "import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"

async def main():
    backend = NamespaceBackend(run="ordinary")
    box = await backend.open(SPEC, episode="e")
    found = {"unenforced": list(backend.unenforced)}
    async def sh(script):
        return (await box.run(["/bin/sh", "-c", script], timeout_s=20)).stdout.decode()
    found["capabilities"] = await sh("grep -E 'Cap(Eff|Prm|Inh|Amb|Bnd)' /proc/self/status | cut -f2 | sort -u")
    await sh("for number in $(seq 64); do kill -$number 1; done; kill -9 -1")
    found["read of the first process"] = await sh("cat /proc/1/environ || cat /proc/1/mem || ls /proc/1/fd")
    found["attached"] = (await box.run(["python3", "-c", ATTACH], timeout_s=20)).stdout.decode()
    found["written"] = await sh("for f in / /usr /etc /dev /bin; do (echo x > $f/x) 2>/dev/null && echo $f; done")
    hog = await box.run(["python3", "-c", HOG], timeout_s=30)
    found["hog"] = [hog.exit_code, b"MemoryError" in hog.stderr]
    bomb = await box.run(["python3", "-c", BOMB], timeout_s=2)
    found["bomb"] = [bomb.timed_out, bomb.survivors <= 32]
    await sh("mkdir -p a/b /tmp/a; echo 1 > a/b/c; chmod 0 a/b/c a/b a /tmp/a; chmod 0 /workspace; sleep 100 &")
    digests = [await box.digest(), await box.digest()]
    open_up = "cd /; chmod 755 /workspace; cd /workspace; chmod 755 a a/b; chmod 600 a/b/c; echo 2 > a/b/c"
    await box.run(["/bin/sh", "-c", open_up + "; chmod 0 a/b/c a/b a /workspace"], timeout_s=20, cwd="/")
    digests.append(await box.digest())
    found["digests of closed files"] = [digests.index(digest) for digest in digests]
    await box.reset({"f": b"1"})
    found["after the reset"] = await sh("ls -A / /workspace /tmp /dev/shm | grep -c . ; stat -c %a /workspace; cat f")
    await box.close()
    found["owned"] = await backend.owned()
    print(json.dumps(found))

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_box_of_an_ordinary_user_holds_and_says_what_it_cannot_enforce() -> None:
    require("bwrap")
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "palestra"
        package.mkdir()
        (package / "envs").symlink_to(Path(types.__file__).parent)
        os.chmod(folder, 0o755)
        done = subprocess.run(
            ["/usr/bin/python3", "-B", "-c", PROBES],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            user=23456,
            group=23456,
            extra_groups=[],
            cwd="/",
            env={"PYTHONPATH": folder, "PATH": os.environ["PATH"]},
        )
    if "bwrap cannot make a box here" in done.stderr or "No module named" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])  # no namespaces for users, or the checkout is not for their eyes
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [gap.partition(":")[0] for gap in found.pop("unenforced")] == ["memory_bytes", "cpus", "user"]
    after = found.pop("after the reset").split()
    assert after[1:] == ["755", "1"]
    assert found == {
        "capabilities": "0000000000000000\n",
        "read of the first process": "",
        "attached": "-1\n",
        "written": "",
        "digests of closed files": [0, 0, 2],
        "hog": [1, True],
        "bomb": [True, True],
        "owned": [],
    }
