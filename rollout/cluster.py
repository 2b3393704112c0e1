"""Ray, and all of it: joining or starting a cluster, a place for each actor, and handles that look like plain objects.

What runs in an actor is an ordinary object made by a picklable factory; nothing outside this file knows Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np
import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from palestra.envs.errors import ConfigError, EngineError, InfrastructureError
from palestra.rollout.adapters import Adapter
from palestra.rollout.engines.protocol import EngineFacts
from palestra.rollout.hosts import short_folder
from palestra.rollout.nodes import JOB_LABEL, NODE_LABEL, ClusterSettings, Need, Node
from palestra.rollout.replicas import ReplicaDied
from palestra.rollout.types import Completion, Float32, Receipt, Sampling
from palestra.rollout.vitals import Vitals, own_vitals, scene

log = logging.getLogger(__name__)
PULSE_S = 2.0  # between two looks at an actor: how late the death of an idle one is noticed
Request = TypeVar("Request")
Result = TypeVar("Result")
Item = TypeVar("Item")


class Cluster:
    """A Ray cluster, for the time of a `with` block."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Nothing is started or joined before the block is entered."""
        self.settings = settings
        self.folder: Path | None = None  # of a private cluster's files
        self._places: list[Placement] = []

    def __enter__(self) -> Self:
        """Join or start, and wait for the nodes. Raises ConfigError (wrong address, foreign cluster, no short
        folder), InfrastructureError (nodes that did not join, by name)."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        on_term = signal.getsignal(signal.SIGTERM)
        try:
            if self.settings.address is None:
                self._start_private()
            else:
                self._join(self.settings.address)
            self.ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_term)  # ray.init replaces the handler; ours is the owner's business
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for place in self._places:
            place.remove()
        ray.shutdown()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def address(self) -> str:
        """Where others join, "host:port"; of a cluster that is up."""
        return str(ray.get_runtime_context().gcs_address)

    def nodes(self) -> tuple[Node, ...]:
        """The nodes that are up, by name."""
        return tuple(sorted((_node(entry) for entry in _alive()), key=lambda node: node.name))

    def ready(self) -> tuple[Node, ...]:
        """The nodes, once all that are expected have joined. Raises InfrastructureError with the missing ones,
        ConfigError when the cluster is not this job's."""
        settings, deadline = self.settings, time.monotonic() + self.settings.join_s
        while True:
            alive = _alive()
            _check_job(alive, settings)
            present = [_node(entry).name for entry in alive]
            missing = [name for name in settings.node_names if name not in present]
            if present and not missing:
                return self.nodes()
            if time.monotonic() > deadline:
                raise InfrastructureError(
                    f"after {settings.join_s:g} s these nodes have not joined the cluster: {', '.join(missing)}; "
                    f"joined: {', '.join(sorted(present)) or 'none'}. See the launcher's output of the missing ones"
                )
            time.sleep(0.5)

    def place(self, count: int, need: Need, *, limit_s: float = 60.0, close: bool = False) -> Placement:
        """Room for `count` actors, spread over the nodes as evenly as they allow, or `close` to each other. Raises
        InfrastructureError when the cluster does not have it within `limit_s`."""
        bundle = {"CPU": need.cpus} | ({"GPU": need.gpus} if need.gpus else {})
        group = placement_group([bundle] * count, strategy="PACK" if close else "SPREAD")
        place = Placement(group, need)
        if not group.wait(timeout_seconds=limit_s):
            place.remove()
            have = "; ".join(f"{n.name}: {n.cpus:g} CPUs, {n.gpus:g} GPUs" for n in self.nodes())
            raise InfrastructureError(
                f"no room for {count} actors of {need.cpus:g} CPUs and {need.gpus:g} GPUs within {limit_s:g} s; the "
                f"cluster has {have}, part of it perhaps taken. Ask for fewer or smaller ones, or for more nodes"
            )
        self._places.append(place)
        return place

    def _start_private(self) -> None:
        settings = self.settings
        self.folder = short_folder(settings.folder)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes one into the home folder
        ray.init(
            address="local",  # explicit: neither an address record nor the environment leads elsewhere
            num_cpus=settings.cpus,
            num_gpus=settings.gpus,
            labels={JOB_LABEL: settings.job} if settings.job else None,
            object_store_memory=settings.object_store_bytes,
            include_dashboard=False,
            # a killed actor takes its children along; an engine is not a background job (Ray starts workers at nice 15)
            _system_config={"process_group_cleanup_enabled": True, "worker_niceness": 0},
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(self.folder),
        )

    def _join(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"cluster address {address!r} is not host:port; only an explicit one is joined")
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise ConfigError(f"no cluster answers at {address}: {error}. Is the address right?") from error
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (RayError, ConnectionError, RuntimeError) as error:
            raise ConfigError(f"the cluster at {address} cannot be joined: {error}") from error


class Placement:
    """Room for actors, each in its own bundle; a replacement takes the bundle of the one that it replaces."""

    def __init__(self, group: PlacementGroup, need: Need) -> None:
        self._group = group
        self._need = need
        self._sent: tuple[object, Any] | None = None  # what was sent last, and its reference

    def engine(self, index: int, factory: Callable[[], object]) -> RemoteEngine:
        """A handle of the engine that `factory` makes in an actor in bundle `index`. Begins with its `start`."""
        return RemoteEngine(self, f"engine {index}", index, factory)

    def player(self, index: int, factory: Callable[[], object]) -> RemotePlayer[Any, Any]:
        """The same, of an object that plays (`run`) and that may be an engine too."""
        return RemotePlayer(self, f"player {index}", index, factory)

    def member(self, role: str, index: int, factory: Callable[[], object]) -> RemoteMember[Any, Any]:
        """The same, of an object that does its work together with those in the other bundles (`run`)."""
        return RemoteMember(self, f"{role} {index}", index, factory)

    def remove(self) -> None:
        """Give the room back, and end what runs in it."""
        if ray.is_initialized():
            remove_placement_group(self._group)

    def begin(self, index: int, factory: Callable[[], object]) -> Any:
        """An actor in bundle `index` that will host what `factory` makes."""
        need = self._need
        # whether Ray hides devices from an actor that asked for none depends on its version: here it always does
        hidden = {} if need.gpus else {"CUDA_VISIBLE_DEVICES": ""}
        options = {
            "num_cpus": need.cpus,
            "num_gpus": need.gpus,
            "max_concurrency": 10_000,  # requests wait in the engine, which knows how to batch them, not before it
            "max_restarts": 0,  # a fresh one is made by the pool, which proves its weights before it serves
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
            "runtime_env": {"env_vars": hidden | dict(need.environment)},
        }
        return ray.remote(Host).options(**options).remote(factory)

    def shared(self, item: Item) -> ray.ObjectRef[Item]:
        """`item` in the object store: put there once, though it is sent to all, mapped by every actor of a node."""
        if self._sent is None or self._sent[0] is not item:
            self._sent = (item, ray.put(item))
        reference: ray.ObjectRef[Item] = self._sent[1]
        return reference


class Host:
    """What runs in the actor's process: the object, and what the process says of itself."""

    def __init__(self, factory: Callable[[], object]) -> None:
        self._factory = factory
        self._item: object = None

    async def begin(self) -> object:
        """Make the object and start it."""
        self._item = self._factory()
        return await self.call("start")

    async def call(self, method: str, *arguments: object, **named: object) -> object:
        """Await a method of the object."""
        return await getattr(self._item, method)(*arguments, **named)

    async def generate(self, prompt: np.ndarray, sampling: Sampling, session: str) -> object:
        """`generate` with a prompt that travelled as an array: a list costs ten times its size."""
        return await self.call("generate", prompt.tolist(), sampling, session=session)

    async def vitals(self) -> Vitals:
        """Where this process is and how it is doing."""
        name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        return own_vitals(ray.get_runtime_context().get_node_id(), name, ray.util.get_node_ip_address())


class RemoteEngine:
    """An Engine in an actor. Deadlines are the pool's; a call that is cancelled here is cancelled there."""

    def __init__(self, place: Placement, role: str, index: int, factory: Callable[[], object]) -> None:
        self._place, self._role, self._index, self._factory = place, role, index, factory
        self._actor: Any = None  # Ray's handle: its methods are known at run time only
        self._vitals: Vitals | None = None

    @property
    def where(self) -> str:
        """The role, the node and the process."""
        seen = self._vitals
        return f"{self._role} on {seen.node}, pid {seen.pid}" if seen else f"{self._role}, not up yet"

    @property
    def vitals(self) -> Vitals:
        """What its process said last. Raises EngineError before it is up."""
        if self._vitals is None:
            raise EngineError(f"{self.where}: it has said nothing of itself")
        return self._vitals

    async def start(self) -> EngineFacts:
        """As the protocol says; first makes the actor."""
        self._actor = self._place.begin(self._index, self._factory)
        self._vitals = await self._ask("vitals")
        facts: EngineFacts = await self._ask("begin")
        return facts

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """As the protocol says. Raises ReplicaDied when the process is gone."""
        completion: Completion = await self._ask("generate", np.asarray(prompt, np.int32), sampling, session)
        return completion

    async def end_session(self, session: str) -> None:
        """As the protocol says."""
        await self._ask("call", "end_session", session)

    async def score(self, ids: Sequence[int]) -> Float32:
        """As the protocol says."""
        logprobs: Float32 = await self._ask("call", "score", list(ids))
        return logprobs

    async def load(self, adapter: Adapter, version: int) -> Receipt:
        """As the protocol says. The factors arrive as read-only arrays, mapped from the node's object store."""
        receipt: Receipt = await self._ask("call", "load", self._place.shared(adapter), version)
        return receipt

    def shared(self, adapter: Adapter) -> ray.ObjectRef[Adapter]:
        """The one copy of `adapter` that all replicas of this placement are sent."""
        return self._place.shared(adapter)

    async def close(self) -> int:
        """Close the object, then end its process, whether that answered or not. What `close` returned, else 0."""
        actor, self._actor = self._actor, None
        if actor is None:
            return 0
        try:
            left = await actor.call.remote("close")
        except (RayActorError, OutOfMemoryError):
            return 0
        except RayError as error:
            raise EngineError(f"{self.where} could not be closed: {error}") from error
        finally:
            ray.kill(actor)
        return left or 0

    async def death(self) -> str:
        """Returns once the process is dead: what Ray knows of it."""
        while True:
            try:
                self._vitals = await self._ask("vitals")
            except ReplicaDied as error:
                return str(error)
            except EngineError as error:
                log.warning("%s", error)
            await asyncio.sleep(PULSE_S)

    async def last_words(self) -> str:
        """Its memory and the end of its log, asked of its node. Within ten seconds; never raises."""
        seen = self._vitals
        if seen is None:
            return ""
        there = NodeAffinitySchedulingStrategy(seen.node_id, soft=False)
        try:
            async with asyncio.timeout(10):
                found = await ray.remote(scene).options(num_cpus=0, scheduling_strategy=there).remote(seen.logs)
        except (RayError, TimeoutError) as error:
            found = f"its node does not answer ({type(error).__name__})"
        return f"resident when last seen: {seen.resident_bytes / 2**20:.0f} MiB; {found}"

    async def _ask(self, word: str, *arguments: object) -> Any:
        """Call the host. Exceptions of the object arrive as they were raised there, with a note of the place."""
        if self._actor is None:
            raise EngineError(f"{self.where}: it was closed, or never started")
        answer = getattr(self._actor, word).remote(*arguments)
        try:
            return await answer
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except RayTaskError as error:
            if isinstance(error.cause, RayError):
                raise EngineError(f"{self.where}: {error.cause}") from error
            error.cause.add_note(f"in {self.where}: {error}")
            raise error.cause from None
        except (ActorDiedError, OutOfMemoryError) as error:  # the second: Ray itself has killed it
            raise ReplicaDied(f"{self.where}: its process is dead. {_exit_of(error)}") from error
        except RayError as error:
            raise EngineError(f"{self.where}: {error}") from error


class RemotePlayer(RemoteEngine, Generic[Request, Result]):
    """An object that plays, in an actor; an Engine too, when the object is one."""

    async def run(self, request: Request) -> Result:
        """Play one request there. Raises what it raises; ReplicaDied when the process is gone."""
        result: Result = await self._ask("call", "run", request)
        return result


class RemoteMember(RemotePlayer[Request, Result]):
    """One of several actors that are sent the same requests: one that comes again goes into the object store once."""

    @property
    def address(self) -> str:
        """Where the others reach its node. Raises EngineError before it is up."""
        return self.vitals.address

    async def run(self, request: Request) -> Result:
        """As RemotePlayer.run."""
        result: Result = await self._ask("call", "run", self._place.shared(request))
        return result


def _alive() -> list[dict[str, Any]]:
    return [entry for entry in ray.nodes() if entry["Alive"]]


def _node(entry: Mapping[str, Any]) -> Node:
    have = entry["Resources"]
    name = entry["Labels"].get(NODE_LABEL) or entry["NodeManagerHostname"]
    return Node(name, entry["NodeManagerAddress"], have.get("CPU", 0.0), have.get("GPU", 0.0))


def _check_job(alive: Sequence[Mapping[str, Any]], settings: ClusterSettings) -> None:
    if settings.job is None:
        return
    for entry in alive:
        found = entry["Labels"].get(JOB_LABEL)
        if found != settings.job:
            raise ConfigError(
                f"the cluster at {settings.address} is not this job's: node {_node(entry).name} carries "
                f"{f'job {found}' if found else 'no job'}, not {settings.job}. Nothing was placed on it"
            )


def _exit_of(error: ActorDiedError | OutOfMemoryError) -> str:
    """What Ray knows of this death, without its list of what may cause any, or its page on memory."""
    lines = str(error).strip().splitlines()
    if isinstance(error, OutOfMemoryError):
        return " ".join(lines[:2])
    last = lines[-1]
    told = re.split(r"\s*(?:Some common causes include|There are some potential root causes)", last)[0]
    return told.removeprefix("The actor is dead because its worker process has died. ")
