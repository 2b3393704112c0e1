"""Whatever is killed while episodes are played: the run ends, every reward is the true one, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from chaos_player import truth
from palestra.envs.sandboxes import cgroups
from palestra.envs.sandboxes.backends import engine_socket, engine_trouble
from palestra.envs.sandboxes.docker import DEFAULT_IMAGE
from palestra.envs.sandboxes.pool import PoolSettings, SandboxPool
from palestra.envs.sandboxes.reaper import list_boxes, reap
from sandbox_support import DOCKER, NAMESPACE, SPEC, backend, require_image

PLAYER = Path(__file__).with_name("chaos_player.py")
GONE_S = 40.0


@dataclass
class Chaos:
    """A run that is played by one process after another, as long as there are episodes without a verdict."""

    kind: str
    folder: Path
    episodes: int
    pause_s: float
    env: dict[str, str]

    def __post_init__(self) -> None:
        self.run = f"chaos-{secrets.token_hex(4)}"
        self.file = self.folder / "verdicts.jsonl"
        self.file.touch()
        self.player: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def verdicts(self) -> dict[int, set[float]]:
        """Every reward that an episode was given; a player that dies right after writing plays none again."""
        found: dict[int, set[float]] = {}
        for row in self.file.read_text().splitlines():
            line = json.loads(row)
            found.setdefault(line["episode"], set()).add(line["reward"])
        return found

    def start(self) -> None:
        """A player for the episodes that have no verdict."""
        left = [number for number in range(self.episodes) if number not in self.verdicts()]
        argv = [sys.executable, str(PLAYER), self.kind, self.run, str(self.file), json.dumps(left), str(self.pause_s)]
        self.player = subprocess.Popen(argv, env={**os.environ, **self.env}, start_new_session=True)
        self.starts += 1

    def play(self, strike: Callable[[Chaos], object], every_s: float, within_s: float) -> None:
        """To the end, with a strike every few seconds; a player that was killed is followed by another."""
        deadline = time.monotonic() + within_s
        self.start()
        try:
            while len(self.verdicts()) < self.episodes:
                assert time.monotonic() < deadline, f"{len(self.verdicts())} of {self.episodes} after {within_s} s"
                assert self.player is not None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.player.wait(every_s)
                    self.start()
                    continue
                strike(self)
            assert self.player is not None
            self.player.wait(60)
        finally:
            assert self.player is not None
            self.player.kill()
            self.player.wait()

    def check(self) -> None:
        """No reward but the true one, and nothing left of any of the players."""
        assert self.verdicts() == {number: {truth(number)} for number in range(self.episodes)}
        socket = self.env.get("PALESTRA_DOCKER_SOCKET") or engine_socket()
        deadline = time.monotonic() + GONE_S
        while self.left(socket):
            reap(socket if self.kind == "docker" else None)
            assert time.monotonic() < deadline, self.left(socket)
            time.sleep(0.2)

    def left(self, socket: str) -> list[str]:
        """What exists of the run's boxes."""
        if self.kind == "docker":
            return [box.name for box in list_boxes(socket) if box.run == self.run]
        groups = [path.name for path in cgroups.ROOT.glob(f"*/{cgroups.PARENT}/palestra-{self.run}-*")]
        return groups + [str(pid) for pid in supervisors(self)]


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    shown = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    below: dict[int, list[int]] = {}
    for row in shown.splitlines():
        child, parent = map(int, row.split())
        below.setdefault(parent, []).append(child)
    found, open_ = [], [pid]
    while open_:
        children = below.get(open_.pop(), [])
        found += children
        open_ += children
    return found


def supervisors(chaos: Chaos) -> list[int]:
    """The processes in the run's boxes that answer its host, as the host numbers them."""
    if chaos.kind == "docker":
        names = [box.name for box in list_boxes(engine_socket()) if box.run == chaos.run and box.state == "running"]
        shown = subprocess.run(
            ["docker", "inspect", "-f", "{{.State.Pid}}", *names], capture_output=True, text=True, check=False
        )
        return [int(word) for word in shown.stdout.split() if int(word)]
    if chaos.player is None:
        return []
    return [pid for pid in descendants(chaos.player.pid) if b"\0-S\0-B\0" in _command_line(pid)]


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def kill(pids: Sequence[int], rng: random.Random) -> None:
    """One of them, for which no one is prepared."""
    with contextlib.suppress(ProcessLookupError):
        if pids:
            os.kill(rng.choice(pids), signal.SIGKILL)


def striker(rng: random.Random, struck: list[str]) -> Callable[[Chaos], None]:
    """Kills the player, a supervisor in a box, or a container (of a namespace box: its bubblewrap)."""

    def strike(chaos: Chaos) -> None:
        assert chaos.player is not None
        what = rng.choice(["player", "supervisor", "supervisor", "box", "box"])
        struck.append(what)
        if what == "player":
            kill([chaos.player.pid], rng)
        elif what == "supervisor":
            kill(supervisors(chaos), rng)
        elif chaos.kind == "docker":
            boxes = [box.name for box in list_boxes(engine_socket()) if box.run == chaos.run]
            subprocess.run(["docker", "kill", rng.choice(boxes or ["none"])], capture_output=True, check=False)
        else:
            kill(
                [pid for pid in descendants(chaos.player.pid) if _command_line(pid).startswith(b"/usr/bin/bwrap")], rng
            )

    return strike


@pytest.mark.parametrize("kind", [NAMESPACE, DOCKER])
def test_twenty_episodes_survive_kills(kind: str, tmp_path: Path) -> None:
    backend(kind)
    struck: list[str] = []
    chaos = Chaos(kind, tmp_path, episodes=20, pause_s=0.05, env={})
    chaos.play(striker(random.Random(4), struck), every_s=1.5, within_s=200)
    assert struck
    chaos.check()


@pytest.mark.endurance
@pytest.mark.parametrize("kind", [NAMESPACE, DOCKER])
def test_two_hundred_episodes_survive_a_kill_every_few_seconds(kind: str, tmp_path: Path) -> None:
    backend(kind)
    struck: list[str] = []
    chaos = Chaos(kind, tmp_path, episodes=200, pause_s=0.5, env={})
    chaos.play(striker(random.Random(5), struck), every_s=2.5, within_s=1200)
    print(f"{len(struck)} strikes: {struck}; {chaos.starts} players")
    assert {"player", "supervisor", "box"} <= set(struck)
    chaos.check()


class PrivateEngine:
    """A dockerd of the test's own, which it may kill."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.socket = str(folder / "docker.sock")
        self.log = (folder / "log").open("ab")
        self.name = f"palestra-{secrets.token_hex(4)}"
        self.argv = ["dockerd", "-H", f"unix://{self.socket}", "--data-root", str(folder / "data"), "--bridge=none"]
        self.argv += ["--exec-root", str(folder / "exec"), "--pidfile", str(folder / "pid"), "--iptables=false"]
        self.argv += ["--containerd-namespace", self.name, *arguments]
        self.argv += ["--containerd-plugins-namespace", f"{self.name}-plugins"]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        Path(self.argv[self.argv.index("--pidfile") + 1]).unlink(missing_ok=True)
        self.process = subprocess.Popen(self.argv, stdout=self.log, stderr=self.log, start_new_session=True)
        deadline = time.monotonic() + 60
        while engine_trouble(self.socket) is not None:
            assert self.process.poll() is None, "the private engine does not start; see its log"
            assert time.monotonic() < deadline, "the private engine does not answer"
            time.sleep(0.1)

    def end(self, how: signal.Signals) -> None:
        """End it and wait for it."""
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait(60)

    def clear(self) -> None:
        """End it, and what an engine that was killed while it started a container does not know any more."""
        self.end(signal.SIGTERM)
        for folder in Path("/proc").glob("[0-9]*"):
            if self.name.encode() in _command_line(int(folder.name)):  # a shim, and below it a container not begun
                for pid in (*descendants(int(folder.name)), int(folder.name)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        self.log.close()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket; nothing of an engine in it is left in the end."""
    folder = Path("/tmp") / f"palestra-engine-{secrets.token_hex(3)}"
    folder.mkdir()
    yield folder
    mounted = [row.split()[4] for row in Path("/proc/self/mountinfo").read_text().splitlines()]
    for place in sorted((path for path in mounted if path.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "-l", place], check=True)  # a killed engine leaves its mounts
    subprocess.run(["rm", "-rf", "--one-file-system", str(folder)], check=True)


@pytest.mark.endurance
@pytest.mark.docker
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run an engine")
@pytest.mark.parametrize("live_restore", [False, True])
def test_a_run_survives_twenty_seconds_without_its_engine(
    live_restore: bool, short_folder: Path, tmp_path: Path
) -> None:
    """Row I10."""
    require_image()
    engine = PrivateEngine(short_folder, *(["--live-restore"] if live_restore else []))
    engine.start()
    try:
        saved = subprocess.Popen(["docker", "save", DEFAULT_IMAGE], stdout=subprocess.PIPE)
        subprocess.run(["docker", "-H", f"unix://{engine.socket}", "load", "-q"], stdin=saved.stdout, check=True)
        saved.wait()
        downs = []

        def strike(chaos: Chaos) -> None:
            if not downs and len(chaos.verdicts()) > 2:
                downs.append(len(chaos.verdicts()))
                engine.end(signal.SIGKILL)
                time.sleep(20)
                engine.start()

        chaos = Chaos("docker", tmp_path, 30, pause_s=0.5, env={"PALESTRA_DOCKER_SOCKET": engine.socket})
        chaos.play(strike, every_s=0.5, within_s=400)
        assert downs
        assert downs[0] < 30
        chaos.check()
    finally:
        engine.clear()


@pytest.mark.endurance
@pytest.mark.docker
def test_two_hundred_boxes_are_asked_for_at_once() -> None:
    """Row I14: no engine error, and the waits are known."""

    async def body() -> None:
        settings = PoolSettings(run="herd", max_boxes=64, acquire_s=600.0)
        async with SandboxPool(settings, backend("docker")) as pool:

            async def episode(n: int) -> None:
                box = await pool.acquire(SPEC, {"n": b"%d" % n}, episode=str(n))
                assert (await box.run(["cat", "n"], timeout_s=30)).stdout == b"%d" % n
                await gathered.wait() if n < 64 else None
                await pool.release(box)

            gathered = asyncio.Barrier(64)
            await asyncio.gather(*(episode(n) for n in range(200)))
            waits = pool.waits()["box"]
            print(waits)
            assert waits.count == 200
            assert 0 < waits.p50 <= waits.p95 <= waits.longest
            assert pool.counts.replaced == 0
        assert pool.leaked() == 0

    asyncio.run(body())
