"""Which cluster, what its nodes are, and what one actor takes: plain data, for those who decide and never see Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

JOB_LABEL, NODE_LABEL = "palestra-job", "palestra-node"  # what a launcher writes on each node


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Which cluster, and what must be there before anything is placed."""

    address: str | None = None  # "host:port" to join; None starts a private one on this machine
    job: str | None = None  # the cluster must carry this id
    node_names: tuple[str, ...] = ()  # nodes that must have joined; empty: any one
    join_s: float = 120.0
    cpus: int | None = None  # of a private cluster; None: all
    gpus: int | None = None  # of a private cluster; None: what Ray finds
    folder: str | None = None  # of a private cluster's files; a short one is found where this is too long
    object_store_bytes: int = 512 * 2**20  # of a private cluster

    @classmethod
    def of_launcher(cls, environment: Mapping[str, str]) -> Self:
        """What the launch script says: RAY_ADDRESS, PALESTRA_JOB, PALESTRA_NODES (names, separated by spaces)."""
        return cls(
            address=environment.get("RAY_ADDRESS") or None,
            job=environment.get("PALESTRA_JOB") or None,
            node_names=tuple(environment.get("PALESTRA_NODES", "").split()),
        )


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster that is up."""

    name: str
    address: str
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Need:
    """What one actor takes from its node."""

    cpus: float = 1.0
    gpus: float = 0.0  # requested from Ray, which then sets the visible devices; with 0 the actor sees none
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of the actor's process

    @classmethod
    def threads(cls, count: int) -> Self:
        """`count` CPUs, and every numeric library told so."""
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
        return cls(cpus=count, environment=dict.fromkeys(names, str(count)))
