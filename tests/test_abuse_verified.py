"""Every tamper of the library loses where judging is ours: alone it earns 0, beside a right solution it costs nothing.

`test_abuse_control.py` shows that each wins where judging is careless. Here the same scripts run in the box of a real
environment, whose artefact is judged in a box of the verifier's own pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from abuse_support import GOLD, TOY, named
from abuse_toy import ToyFix
from palestra.envs.admission.library import TAMPERS
from palestra.envs.admission.rows import Check, Row, checked, checks
from palestra.envs.admission.scene import Scene
from palestra.envs.admission.tamper import Tamper
from palestra.envs.environment import JudgesInBoxes
from palestra.envs.sandboxes.contract import Limits
from palestra.envs.sandboxes.pool import PoolSettings, SandboxPool
from palestra.envs.types import Scored, Task
from sandbox_support import Home, home, require_image  # noqa: F401 - a fixture

pytestmark = pytest.mark.docker
LIMITS = Limits(memory_bytes=256 * 2**20, scratch_bytes=64 * 2**20, processes=48, output_bytes=1 << 20)
POOL = PoolSettings(run="abuse", backend="docker", limits=LIMITS, max_boxes=4)


async def _opened() -> tuple[Scene, list[SandboxPool]]:
    pools = [SandboxPool(POOL), SandboxPool(POOL)]
    for pool in pools:
        await pool.start()
    verifier = ToyFix().verifier()
    assert isinstance(verifier, JudgesInBoxes)
    verifier.lend(pools[1])
    return Scene(ToyFix(), pools[0], verifier), pools


async def _all(task: Task, named: Sequence[tuple[str, Check]]) -> list[Row]:
    return await asyncio.gather(*(checked(name, task, check, 60.0) for name, check in named))


@pytest.fixture(scope="module")
def scene(home: Home) -> Iterator[Scene]:  # noqa: F811
    require_image()
    made, pools = home.do(_opened())
    yield made
    for pool in pools:
        home.do(pool.close())


@pytest.mark.parametrize("tamper", TAMPERS, ids=named)
def test_a_tamper_loses_where_judging_is_ours(tamper: Tamper, scene: Scene, home: Home) -> None:  # noqa: F811
    task = scene.taskset.split("train")[0]
    name = f"{tamper.row} {tamper.name}"
    mine = [(row, check) for row, check in checks(scene, task) if row in (name, f"{name}, with gold")]
    assert len(mine) == 1 + (tamper.honest and tamper.beats != "answer")
    for outcome in home.do(_all(task, mine)):
        assert outcome.ok, outcome


def test_gold_is_paid_nothing_is_not_and_the_box_hides_what_it_must(scene: Scene, home: Home) -> None:  # noqa: F811
    task = scene.taskset.split("train")[0]
    mine = [(name, check) for name, check in checks(scene, task) if name in ("gold", "no-op", "hidden lines", "reset")]
    assert len(mine) == 4
    for outcome in home.do(_all(task, mine)):
        assert outcome.ok, outcome


def test_a_verdict_counts_the_tests_that_had_to_pass(scene: Scene, home: Home) -> None:  # noqa: F811
    """B02 and B19: what is missing is a failure, whoever removed it."""
    task = scene.taskset.split("train")[0]
    removed = next(tamper for tamper in TAMPERS if tamper.row == "B02")
    verdict = home.do(scene.judged(task, (), removed)).verdict
    assert isinstance(verdict, Scored)
    assert (verdict.value, verdict.parts["expected"]) == (0.0, 4.0)


def test_a_task_that_needs_no_change_is_graded(scene: Scene, home: Home) -> None:  # noqa: F811
    """K10: nothing done is an answer, and no missing verdict."""
    task = replace(scene.taskset.split("train")[0], files={**TOY, "calc.py": GOLD})
    assert home.do(scene.judged(task)).verdict == Scored(1.0, {"passed": 4.0, "expected": 4.0})


@pytest.mark.parametrize(
    ("row", "script"),
    [
        ("K05", "printf '# <|im_end|> PASSED <tool_call>\\n' >> calc.py; printf '4 passed in 0.1s\\n' > notes.txt"),
        ("K11", "python3 -m http.server 8899 > /dev/null 2>&1 & pid=$!; sleep 0.3; kill $pid; wait $pid; true"),
    ],
)
def test_honest_habits_cost_nothing(row: str, script: str, scene: Scene, home: Home) -> None:  # noqa: F811
    """K05 and K11: words that look like markers, and a server of one's own that is ended before the end."""
    task = scene.taskset.split("train")[0]
    played = home.do(scene.judged(task, scene.gold(task), Tamper(row, "honest", "status", script)))
    assert played.found is not None
    assert played.found.exit_code == 0
    assert played.verdict == Scored(1.0, {"passed": 4.0, "expected": 4.0})
