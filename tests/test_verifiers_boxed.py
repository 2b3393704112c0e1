"""A verifier that judges in boxes: whose fault it is that there is no verdict, and where its boxes come from."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from episodes import CountedBoxes
from palestra.envs.errors import ConfigError, SandboxError, VerifierError
from palestra.envs.sandboxes.contract import BoxSpec, Exec, Sandbox
from palestra.envs.sandboxes.scripted import Command, ScriptedSandbox
from palestra.envs.types import Artefact, NoVerdict, Scored, Task, Verdict
from palestra.envs.verifiers.boxed import BoxVerifier, Examination
from palestra.rollout.engines.scripted import ScriptedEngine
from palestra.rollout.load_renderer import load_renderer
from palestra.rollout.play import Ticket
from palestra.rollout.player import EpisodeRequest, Player, PlayerSettings
from palestra.rollout.second_opinion import SecondSettings
from palestra.rollout.types import Trajectory
from tiny_models import make_tokenizer

TASK = Task("t", ())
NONE = NoVerdict("it said nothing", ("eval_detect",))


@dataclass
class Played:
    """An examination that ends each time as the list says, the last way for good."""

    ends: list[Verdict | Exception | Literal["hangs"]]
    runs: int = 0
    nonces: set[str] = field(default_factory=set)
    boxes: set[str] = field(default_factory=set)
    spec: BoxSpec = field(default_factory=lambda: BoxSpec(role="verifier"))
    files: Mapping[str, bytes] = field(default_factory=dict)

    async def run(self, box: Sandbox, nonce: str) -> Verdict:
        end = self.ends[min(self.runs, len(self.ends) - 1)]
        self.runs += 1
        self.nonces.add(nonce)
        self.boxes.add(box.id)
        if end == "hangs":
            await asyncio.sleep(60)
            raise AssertionError
        if isinstance(end, Exception):
            raise end
        return end


@dataclass
class Examiner:
    """Of the policy's artefact and of the control."""

    own: Played
    good: Played

    def examination(self, task: Task, artefact: Artefact) -> Examination:
        return self.own

    def control(self, task: Task) -> Examination:
        return self.good


def judged(own: Played, good: Played | None = None, artefact: Artefact | None = None) -> Verdict:
    boxes = CountedBoxes()
    verifier = BoxVerifier(Examiner(own, good or Played([Scored(1.0)])), timeout_s=0.2)
    verifier.lend(boxes)  # type: ignore[arg-type]
    verdict = asyncio.run(verifier.verify(TASK, artefact or Artefact()))
    assert boxes.lent == 0
    return verdict


def test_a_verdict_is_final() -> None:  # B28
    own = Played([Scored(0.0), Scored(1.0)])
    assert judged(own) == Scored(0.0)
    assert own.runs == 1


@pytest.mark.parametrize("trouble", [SandboxError("the box died"), "hangs"])
def test_a_machine_that_fails_is_tried_again_in_another_box(trouble: SandboxError | Literal["hangs"]) -> None:
    own = Played([trouble, trouble, Scored(1.0)])
    assert judged(own) == Scored(1.0)
    assert len(own.boxes) == len(own.nonces) == 3


@pytest.mark.parametrize("trouble", [SandboxError("the box died"), "hangs"])
def test_a_machine_that_fails_for_good_is_never_a_reward(trouble: SandboxError | Literal["hangs"]) -> None:
    own, good = Played([trouble]), Played([Scored(1.0)])
    verdict = judged(own, good)
    assert isinstance(verdict, NoVerdict)
    assert "3 attempts" in verdict.cause
    assert good.runs == 0


def test_an_artefact_that_silences_sound_machines_earns_nothing() -> None:  # A05
    own, good = Played([NONE]), Played([Scored(0.0)])
    assert judged(own, good) == Scored(0.0, flags=("eval_detect",), failure="no_verdict")
    assert (own.runs, good.runs) == (3, 1)


@pytest.mark.parametrize("good", [Played([NONE]), Played([SandboxError("the engine is away")])])
def test_where_the_control_is_silent_too_it_was_the_machines(good: Played) -> None:
    verdict = judged(Played([NONE]), good)
    assert isinstance(verdict, NoVerdict)
    assert "nor has the control" in verdict.cause


def test_signs_from_runs_before_the_verdict_stay() -> None:
    assert judged(Played([NONE, Scored(1.0)])) == Scored(1.0, flags=("eval_detect",))


def test_what_could_not_be_handed_over_is_judged_without_a_box() -> None:  # B25
    own = Played([Scored(1.0)])
    artefact = Artefact(failure="artefact_too_large", flags=("a",))
    assert judged(own, artefact=artefact) == Scored(0.0, flags=("a",), failure="artefact_too_large")
    assert own.runs == 0


def test_a_score_beyond_the_bounds_is_none() -> None:  # A10
    verdict = judged(Played([Scored(1.5)]), Played([Scored(1.5)]))
    assert isinstance(verdict, NoVerdict)
    assert "out of bounds" in verdict.cause


def test_without_boxes_it_says_what_is_missing() -> None:
    verifier = BoxVerifier(Examiner(Played([]), Played([])))
    with pytest.raises(VerifierError, match="lent none"):
        asyncio.run(verifier.verify(TASK, Artefact()))
    with pytest.raises(ConfigError, match="judged at least once"):
        BoxVerifier(Examiner(Played([]), Played([])), attempts=0)


# in a player


def counting(command: Command, files: dict[str, bytes]) -> Exec:
    return Exec(exit_code=0, stdout=str(len(command.stdin)).encode())


class Pool(CountedBoxes):
    """Boxes that can count, and the order in which everything is closed."""

    async def acquire(self, spec: BoxSpec, files: Mapping[str, bytes], *, episode: str) -> Sandbox:
        assert spec.role == "verifier"
        self.lent += 1
        self.made += 1
        return ScriptedSandbox(counting)

    async def start(self) -> None:
        self.open = True

    async def close(self) -> None:
        self.open = False


def played(folder: Path, words: str, **settings: object) -> tuple[Trajectory, list[Pool]]:
    make_tokenizer(512).save_pretrained(folder)
    pools: list[Pool] = []

    def boxes() -> Pool:
        pools.append(Pool())
        return pools[-1]

    async def work() -> Trajectory:
        renderer = load_renderer(str(folder), history="append", trust_remote_code=False)
        engine = ScriptedEngine(lambda prompt, session, turn: renderer.encoder.words(words), context_tokens=2048)
        chosen = PlayerSettings(str(folder), "judged_environment:JudgedSpeeches", **settings)  # type: ignore[arg-type]
        player = Player(chosen, engine, boxes)  # type: ignore[arg-type]
        await player.start()
        trajectory = await player.run(EpisodeRequest("train", 0, Ticket("a", "g", seed=1)))
        assert await player.close() == 0
        return trajectory

    return asyncio.run(work()), pools


def test_a_player_lends_a_pool_of_its_own_to_the_verifier_and_closes_it(tmp_path: Path) -> None:
    trajectory, (policys, judges) = played(tmp_path, "even")
    assert trajectory.verdict == Scored(1.0)
    assert (policys.made, judges.made) == (0, 1)
    assert not policys.open
    assert not judges.open


def test_two_verifiers_share_the_pool_for_judging(tmp_path: Path) -> None:
    trajectory, pools = played(tmp_path, "even", second_verifier=SecondSettings("judged_environment:second", share=1.0))
    assert trajectory.facts["second_reward"] == 1.0
    assert [pool.made for pool in pools] == [0, 2]


def test_a_masked_episode_is_not_tried_again(tmp_path: Path) -> None:
    trajectory, (_, judges) = played(tmp_path, "a cheat!", on_integrity_violation="mask")
    assert trajectory.verdict == NoVerdict("integrity violation: eval_detect", ("eval_detect",))
    assert judges.made == 1
