"""Signs of tampering: what the settings make of a verdict that carries them, and a second judge that looks on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from episodes import ADD, ANSWER, TASK, episode
from palestra.envs.errors import ConfigError, IntegrityError
from palestra.envs.types import Artefact, NoVerdict, Scored, Task, Verdict
from palestra.rl.evaluation import report
from palestra.rl.second_watch import SecondWatch
from palestra.rl.step_metrics import integrity_metrics
from palestra.rollout import record
from palestra.rollout.integrity import SettlingVerifier, is_masked, settled
from palestra.rollout.second_opinion import SecondOpinion, gap, load_second
from palestra.rollout.types import Trajectory

CAUGHT = Scored(1.0, {"passed": 4.0}, ("framework_patched",))


def test_an_episode_with_signs_of_tampering_earns_what_the_settings_say() -> None:
    assert settled(CAUGHT, "zero") == replace(CAUGHT, value=0.0)
    assert settled(CAUGHT, "honest") == CAUGHT
    masked = settled(CAUGHT, "mask")
    assert masked == NoVerdict("integrity violation: framework_patched", ("framework_patched",))
    assert is_masked(masked, "mask")
    assert not is_masked(NoVerdict("the judge raised"), "mask")


@pytest.mark.parametrize("rule", ["zero", "mask", "honest"])
def test_an_episode_without_them_keeps_its_verdict(rule: str) -> None:
    for verdict in (Scored(1.0), Scored(0.25, {"a": 1.0}), NoVerdict("the machine died")):
        assert settled(verdict, rule) == verdict  # type: ignore[arg-type]


def test_a_penalty_is_not_forgiven_for_tampering() -> None:
    assert settled(Scored(-0.5, flags=("eval_detect",)), "zero") == Scored(-0.5, flags=("eval_detect",))


def test_signs_that_were_found_at_the_export_count_whoever_judges() -> None:
    class Generous:
        async def verify(self, task: Task, artefact: Artefact) -> Verdict:
            return Scored(1.0)

        async def close(self) -> None: ...

    verifier = SettlingVerifier(Generous(), "zero")
    verdict = asyncio.run(verifier.verify(TASK, Artefact(flags=("control_plane_probe",))))
    assert verdict == Scored(0.0, flags=("control_plane_probe",))


def judged(verdict: Verdict, **facts: float) -> Trajectory:
    played = episode([ADD, ANSWER])
    return replace(played, verdict=verdict, facts={**played.facts, **facts})


def test_the_signs_are_in_the_record_the_metrics_and_the_report() -> None:
    episodes = [judged(settled(CAUGHT, "zero")), judged(settled(CAUGHT, "mask")), judged(Scored(1.0))]
    assert [record.from_json(record.to_json(t)).verdict for t in episodes] == [t.verdict for t in episodes]
    metrics = integrity_metrics(episodes, "rollout")
    assert metrics == {"rollout/flagged": 2, "rollout/flagged/framework_patched": 2}
    assert report(episodes).flagged == 2
    assert report(episodes).flags == {"framework_patched": 2}


class Strict:
    """A second judge that gives half of what the first does, or fails."""

    def __init__(self, verdict: Verdict | Exception) -> None:
        self.verdict = verdict
        self.asked = 0

    async def verify(self, task: Task, artefact: Artefact) -> Verdict:
        self.asked += 1
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict

    async def close(self) -> None: ...


def asked(judge: Strict, share: float, trajectories: list[Trajectory]) -> list[dict[str, str | float]]:
    async def work() -> list[dict[str, str | float]]:
        opinion = SecondOpinion(judge, share, timeout_s=5.0)
        return [await opinion.facts(TASK, trajectory) for trajectory in trajectories]

    return asyncio.run(work())


def test_the_second_verifier_sees_a_share_of_the_episodes_and_the_same_ones_each_time() -> None:
    played = [replace(judged(Scored(1.0)), seed=seed, artefact=Artefact(1)) for seed in range(400)]
    judge = Strict(Scored(0.5))
    first, again = (asked(judge, 0.25, played) for _ in range(2))
    assert first == again
    assert 60 < sum(bool(facts) for facts in first) < 140
    assert {facts.get("second_reward") for facts in first} == {None, 0.5}


def test_it_is_not_asked_of_what_has_no_verdict_and_its_own_failure_is_recorded() -> None:
    judge = Strict(RuntimeError("no model"))
    lost, whole = (replace(judged(verdict), artefact=Artefact(1)) for verdict in (NoVerdict("gone"), Scored(1.0)))
    assert asked(judge, 1.0, [lost]) == [{}]
    assert asked(judge, 1.0, [whole]) == [{"second_cause": "RuntimeError: no model"}]


def test_the_distance_of_the_two_is_measured_where_both_have_judged() -> None:
    episodes = [judged(Scored(1.0), second_reward=0.0), judged(Scored(1.0), second_reward=1.0), judged(Scored(0.0))]
    found = gap(episodes)
    assert found is not None
    assert (found.episodes, found.value) == (2, 0.5)
    assert integrity_metrics(episodes, "rollout")["rollout/second_gap"] == 0.5
    assert gap(episodes[2:]) is None


def test_the_run_stops_when_the_distance_stays(caplog: pytest.LogCaptureFixture) -> None:
    watch = SecondWatch(limit=0.1, patience=2)
    for distance in (0.3, 0.05, None, 0.3):
        watch.note(distance)
    assert "alarm" in caplog.text
    with pytest.raises(IntegrityError, match=r"alarm_gap allows 0\.1"):
        watch.note(0.2)
    SecondWatch().note(1.0)


def test_a_second_verifier_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="second_verifier"):
        load_second("no_such_module:judge", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="second_verifier"):
        load_second("nonsense", None)  # type: ignore[arg-type]
