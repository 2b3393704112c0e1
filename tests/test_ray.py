"""Engines and players as Ray actors: one private cluster for all tests of this file."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from palestra.envs.errors import InfrastructureError
from palestra.rollout.nodes import ClusterSettings, Need
from palestra.rollout.players import PlayerPool
from palestra.rollout.pool import EnginePool
from palestra.rollout.replicas import Limits, ReplicaDied, Replicas
from palestra.rollout.types import Sampling
from tests_support import require
from wilful_engine import WilfulPlayer, Will, adapter

if TYPE_CHECKING:
    from palestra.rollout.cluster import Cluster, Placement, RemotePlayer

pytestmark = pytest.mark.ray
TESTS = str(Path(__file__).parent)
ASK = Sampling(max_tokens=3)
LIMITS = Limits(start_s=60, load_s=20, request_s=20, close_s=5, replacements=4, backoff_s=0.05)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four CPUs and two make-believe GPUs, with the devices named as slurm names a part of a node."""
    require("ray")
    from palestra.rollout.cluster import Cluster

    long_folder = tmp_path_factory.mktemp("a-folder-name-as-long-as-those-that-slurm-makes-for-its-jobs")
    os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"
    try:
        with Cluster(ClusterSettings(job="4711", cpus=4, gpus=2, folder=str(long_folder))) as cluster:
            yield cluster
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]


def placed(cluster: Cluster, count: int, **need: object) -> Placement:
    variables = {"PYTHONPATH": TESTS, **need.pop("environment", {})}  # type: ignore[dict-item]
    return cluster.place(count, Need(environment=variables, **need))  # type: ignore[arg-type]


def is_running(pid: int) -> bool:
    """Whether the process is there, and not only waiting to be buried."""
    command = Path(f"/proc/{pid}/cmdline")
    return command.exists() and command.read_bytes() != b""


async def eventually(check: Callable[[], bool], limit_s: float) -> None:
    for _ in range(int(limit_s / 0.1)):
        if check():
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"not within {limit_s:g} s")


def perform(
    cluster: Cluster,
    body: Callable[[EnginePool, PlayerPool[str, str], list[RemotePlayer[str, str]]], Awaitable[None]],
    count: int = 2,
    **need: object,
) -> None:
    """Run `body` with `count` actors that are engines and players, and the handles in the order they were made."""

    async def run() -> None:
        place = placed(cluster, count, **need)
        handles: list[RemotePlayer[str, str]] = []

        def make(index: int) -> RemotePlayer[str, str]:
            handles.append(place.player(index, partial(WilfulPlayer, Will())))
            return handles[-1]

        replicas = Replicas("player", count, make, LIMITS)
        engines, players = EnginePool(replicas), PlayerPool[str, str](replicas, run_s=30)
        try:
            await engines.start()
            await body(engines, players, handles)
        finally:
            await engines.close()
            place.remove()

    asyncio.run(run())


def test_the_cluster_is_private_with_short_socket_paths_whatever_the_environment_suggests(cluster: Cluster) -> None:
    (node,) = cluster.nodes()
    assert (node.cpus, node.gpus) == (4, 2)
    folder = cluster.folder
    assert folder is not None
    assert len(str(folder)) <= 43


def test_a_remote_engine_answers_as_a_local_one_and_proves_what_it_loads(cluster: Cluster) -> None:
    async def body(engines: EnginePool, players: PlayerPool[str, str], handles: list[RemotePlayer[str, str]]) -> None:
        receipts = await engines.publish(adapter(1.0, modules=3), 1)
        assert [r.digest for r in receipts] == [adapter(1.0, modules=3).digest()] * 2
        completion = await engines.generate([4, 5, 6, 7], ASK, session="a")
        assert (completion.ids.tolist(), completion.versions.tolist()) == ([4, 5, 6], [1, 1, 1])
        assert [s.tolist() for s in await engines.score_each([1, 2])] == [[1.0], [1.0]]
        with pytest.raises(ValueError, match="no such task"):
            await players.run("complain")
        assert sorted(await asyncio.gather(*(players.run("where") for _ in range(4)))) == sorted(
            str(handle.vitals.pid) for handle in handles for _ in range(2)
        )

    perform(cluster, body)


def test_a_killed_actor_is_named_with_its_node_pid_and_log_and_its_seat_is_filled_with_the_version_in_force(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(engines: EnginePool, players: PlayerPool[str, str], handles: list[RemotePlayer[str, str]]) -> None:
        await engines.publish(adapter(5.0), 5)
        dead = handles[0].vitals
        episodes = [asyncio.create_task(players.run("60")) for _ in range(2)]
        await asyncio.sleep(0.3)
        killed_at = time.monotonic()
        os.kill(dead.pid, signal.SIGKILL)
        done, others = await asyncio.wait(episodes, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1, "only the episode of the dead player is told"
        with pytest.raises(ReplicaDied, match=rf"player 0 on .*pid {dead.pid}: its process is dead"):
            done.pop().result()
        told_s = time.monotonic() - killed_at
        assert (await engines.generate([1, 2], ASK, session="x")).versions.tolist() == [5, 5]
        assert [s.tolist() for s in await engines.score_each([1, 2])] == [[5.0], [5.0]]
        whole_s = time.monotonic() - killed_at
        print(f"a death was told after {told_s:.2f} s, and its seat filled after {whole_s:.2f} s")
        assert told_s < 30
        assert handles[2].vitals.pid != dead.pid
        assert engines.counters().replacements == 1
        for other in others:
            other.cancel()

    perform(cluster, body)
    assert "resident when last seen" in caplog.text
    assert "MiB free" in caplog.text


def test_the_death_of_an_idle_actor_is_noticed(cluster: Cluster) -> None:
    async def body(engines: EnginePool, players: PlayerPool[str, str], handles: list[RemotePlayer[str, str]]) -> None:
        os.kill(handles[0].vitals.pid, signal.SIGKILL)
        await eventually(lambda: engines.counters().replacements == 1, 30)

    perform(cluster, body, count=1)


def test_a_cancelled_request_is_cancelled_in_its_actor(cluster: Cluster) -> None:
    async def body(engines: EnginePool, players: PlayerPool[str, str], handles: list[RemotePlayer[str, str]]) -> None:
        task = asyncio.create_task(players.run("cancellable"))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.wait([task])
        for _ in range(100):
            if (cancelled := await players.run("cancelled?")) == "1":
                break
        assert cancelled == "1"

    perform(cluster, body, count=1)


def test_actors_see_the_devices_and_variables_that_they_asked_for_and_no_others(cluster: Cluster) -> None:
    seen: dict[float, list[str]] = {}

    def look(gpus: float) -> Callable[..., Awaitable[None]]:
        async def body(engines: EnginePool, players: PlayerPool[str, str], handles: list[object]) -> None:
            seen[gpus] = sorted(await asyncio.gather(*(players.run("devices") for _ in range(2))))
            assert await players.run("variable OMP_NUM_THREADS") == "3"

        return body

    for gpus in (1.0, 0.0):
        perform(cluster, look(gpus), gpus=gpus, environment=dict(Need.threads(3).environment))
    assert seen[1.0] == ["2", "3"]
    assert seen[0.0] == ["", ""]


def test_factors_are_put_once_for_all_replicas_and_arrive_without_a_copy(cluster: Cluster) -> None:
    async def body(engines: EnginePool, players: PlayerPool[str, str], handles: list[RemotePlayer[str, str]]) -> None:
        factors = adapter(1.0, modules=2, width=1_000_000)
        first = handles[0].shared(factors)
        assert handles[1].shared(factors) is first
        await engines.publish(factors, 1)
        assert await asyncio.gather(*(players.run("factors are mapped") for _ in range(2))) == ["True", "True"]

    perform(cluster, body)


def test_more_than_the_cluster_has_is_refused_with_what_it_has(cluster: Cluster) -> None:
    with pytest.raises(InfrastructureError, match=r"no room for 9 actors of 1 CPUs and 0 GPUs.*4 CPUs, 2 GPUs"):
        cluster.place(9, Need(), limit_s=1)


def test_a_second_launch_on_this_machine_is_a_cluster_of_its_own_even_with_a_stale_address_record(
    cluster: Cluster, tmp_path: Path
) -> None:
    record = tmp_path / "ray" / "ray_current_cluster"
    record.parent.mkdir()
    record.write_text("127.0.0.1:1")
    program = (
        "from palestra.rollout.cluster import Cluster\n"
        "from palestra.rollout.nodes import ClusterSettings\n"
        "with Cluster(ClusterSettings(job='4712', cpus=1, gpus=0)) as cluster:\n"
        "    print(len(cluster.nodes()), cluster.nodes()[0].cpus)\n"
    )
    variables = {**os.environ, "RAY_TMPDIR": str(tmp_path), "RAY_AUTH_TOKEN": "f" * 64}
    command = [sys.executable, "-c", program]
    second = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=90, check=False)
    assert second.stdout.split() == ["1", "1.0"], second.stderr
    assert len(cluster.nodes()) == 1


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"address": "{here}", "job": "4712"}, "ConfigError", "carries job 4711, not 4712. Nothing was placed on it"),
        ({"address": "{here}", "job": "4711", "node_names": ("n1", "n2"), "join_s": 1}, "InfrastructureError",
         "these nodes have not joined the cluster: n1, n2; joined: "),
        ({"address": "127.0.0.1:9"}, "ConfigError", "no cluster answers at 127.0.0.1:9"),
        ({"address": "auto"}, "ConfigError", "not host:port; only an explicit one is joined"),
    ],
)  # fmt: skip
def test_joining_a_wrong_or_incomplete_cluster_says_what_is_wrong(
    cluster: Cluster, settings: dict[str, object], error: str, message: str
) -> None:
    settings = {k: v.replace("{here}", cluster.address) if isinstance(v, str) else v for k, v in settings.items()}
    program = (
        "from palestra.rollout.cluster import Cluster\n"
        "from palestra.rollout.nodes import ClusterSettings\n"
        f"with Cluster(ClusterSettings(**{settings!r})): print('joined')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    last = [line for line in done.stderr.splitlines() if line.startswith("palestra.")][-1]
    assert last.startswith(f"palestra.envs.errors.{error}: ")
    assert message in last


def test_the_children_of_a_killed_actor_die_with_it(cluster: Cluster) -> None:
    async def body(engines: EnginePool, players: PlayerPool[str, str], handles: list[RemotePlayer[str, str]]) -> None:
        child = int(await players.run("child"))
        os.kill(handles[0].vitals.pid, signal.SIGKILL)
        await eventually(lambda: not is_running(child), 20)

    perform(cluster, body, count=1)


def test_an_actor_that_ray_kills_for_memory_counts_as_dead_with_the_figures() -> None:
    require("ray")
    program = (
        "import asyncio\n"
        "from palestra.rollout.cluster import Cluster\n"
        "from palestra.rollout.nodes import ClusterSettings, Need\n"
        "with Cluster(ClusterSettings(cpus=1, gpus=0)) as cluster:\n"
        "    asyncio.run(cluster.place(1, Need()).player(0, dict).start())\n"
    )
    limits = {"RAY_memory_usage_threshold": "0.0001", "RAY_memory_monitor_refresh_ms": "100"}
    command = [sys.executable, "-c", program]
    environment = {**os.environ, **limits, "RAY_AUTH_TOKEN": "f" * 64}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    last = [line for line in done.stderr.splitlines() if line.startswith("palestra.")][-1]
    assert last.startswith("palestra.rollout.replicas.ReplicaDied: player 0")
    assert "its process is dead. 1 worker(s) were killed due to the node running low on memory" in last
    assert "exceeded threshold" in last
