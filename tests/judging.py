"""Judging in real boxes from plain tests: a pool for judging, and an examiner that is told what to examine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from palestra.envs.sandboxes.backends import BackendName
from palestra.envs.sandboxes.contract import Boxes, BoxSpec, Limits
from palestra.envs.sandboxes.pool import PoolSettings, SandboxPool
from palestra.envs.types import Artefact, Task, Verdict
from palestra.envs.verifiers.boxed import BoxVerifier, Examination
from sandbox_support import Home, home, require_image
from tests_support import require

__all__ = ["court", "courts", "home"]

LIMITS = Limits(memory_bytes=256 * 2**20, scratch_bytes=32 * 2**20, processes=32)
SPEC = BoxSpec(limits=LIMITS, role="verifier")
TASK = Task("t", ())


@dataclass
class Told:
    """An examiner that makes what it was given."""

    make: Callable[[Artefact], Examination]
    good: Artefact

    def examination(self, task: Task, artefact: Artefact) -> Examination:
        return self.make(artefact)

    def control(self, task: Task) -> Examination:
        return self.make(self.good)


@dataclass
class Court:
    """Boxes for judging, in a loop of their own."""

    home: Home
    boxes: Boxes

    def judge(self, make: Callable[[Artefact], Examination], artefact: Artefact, good: Artefact) -> Verdict:
        """The verdict of a BoxVerifier over that kind of examination; one try, then the control."""
        verifier = BoxVerifier(Told(make, good), attempts=1)
        verifier.lend(self.boxes)
        return self.home.do(verifier.verify(TASK, artefact))


def opened(home: Home, kind: BackendName) -> SandboxPool:
    """A started pool of boxes for judging, or a skip with the reason."""
    if kind == "docker":
        require_image()
    else:
        require("bwrap")
    settings = PoolSettings(backend=kind, max_boxes=2, limits=LIMITS, run="judging-tests")
    pool = SandboxPool(settings)
    home.do(pool.start())
    return pool


@pytest.fixture(scope="module")
def courts(home: Home) -> Iterator[dict[str, Court]]:
    """The module's, by kind of box."""
    made: dict[str, Court] = {}
    yield made
    for court in made.values():
        assert isinstance(court.boxes, SandboxPool)
        home.do(court.boxes.close())
        assert court.boxes.leaked() == 0


@pytest.fixture
def court(request: pytest.FixtureRequest, courts: dict[str, Court], home: Home) -> Court:
    """Of the kind in the test's parameter; of namespaces where it has none."""
    kind: BackendName = getattr(request, "param", "namespace")
    if kind not in courts:
        courts[kind] = Court(home, opened(home, kind))
    return courts[kind]
