"""Verdicts: what is one, who gives it, and what happens when the judge fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.envs.errors import ConfigError
from palestra.envs.types import JSON, Artefact, NoVerdict, Scored, Task, Verdict
from palestra.envs.verifiers.numeric import judge, parse_number
from palestra.envs.verifiers.process import ProcessVerifier
from palestra.envs.verifiers.verdict import Bounds, read_verdict
from tests_support import require

UNIT = Bounds(0.0, 1.0)


def verdicts(
    name: str, *answers: JSON, truth: JSON = None, timeout_s: float = 10.0, attempts: int = 2
) -> list[Verdict]:
    async def body() -> list[Verdict]:
        verifier = ProcessVerifier(f"verifier_judges:{name}", bounds=UNIT, timeout_s=timeout_s, attempts=attempts)
        try:
            return [await verifier.verify(Task("t", (), truth=truth), Artefact(answer)) for answer in answers]
        finally:
            await verifier.close()

    return asyncio.run(body())


def cause(verdict: Verdict) -> str:
    assert isinstance(verdict, NoVerdict), verdict
    return verdict.cause


# --- what counts as a verdict


@pytest.mark.parametrize("reward", [0, 1, 0.5, 1.0, -0.0])
def test_a_finite_number_within_the_bounds_is_a_verdict(reward: float) -> None:
    assert read_verdict(reward, UNIT) == Scored(float(reward))


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "returned nothing"),
        (float("nan"), "not finite"),
        (float("inf"), "not finite"),
        (10**400, "not finite"),
        (-0.5, "out of bounds"),
        (1.5, "out of bounds"),
        (True, "not a number"),
        ("1", "not a number"),
        ([1], "not a number"),
        ({"score": 1.0}, "without the key 'reward'"),
        ({"reward": None}, "not a number"),
        ({"reward": 1.0, "bonus": "5"}, "not a number"),
        ({"reward": 1.0, "bonus": float("nan")}, "not finite"),
        ({"reward": {"reward": 1.0}}, "not a number"),
    ],
)
def test_anything_else_is_no_verdict_with_its_own_cause(returned: object, said: str) -> None:
    assert said in cause(read_verdict(returned, UNIT))


def test_extra_numbers_are_recorded_and_never_added() -> None:
    assert read_verdict({"reward": 0, "bonus": 5}, UNIT) == Scored(0.0, {"bonus": 5.0})


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.0), (0.0, 0.0), (0.0, float("nan")), (float("-inf"), 1.0)])
def test_bounds_that_bound_nothing_are_refused(low: float, high: float) -> None:
    with pytest.raises(ConfigError, match="reward bounds"):
        Bounds(low, high)


# --- the process that judges


def test_pass_and_fail_are_numbers_and_the_process_is_kept() -> None:
    assert verdicts("agrees", {"x": [1, "é"]}, 2, truth={"x": [1, "é"]}) == [Scored(1.0), Scored(0.0)]
    first, second = verdicts("process", 1, 2)
    assert isinstance(first, Scored)
    assert isinstance(second, Scored)
    assert first.parts["pid"] == second.parts["pid"] != os.getpid()
    assert (first.parts["asked"], second.parts["asked"]) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "returned nothing"),
        ("abc", "not a number"),
        ("nan", "not finite"),
        ("infinity", "not finite"),
        ("bytes", "not a number"),
        ("set", "not a number"),
        ("keys", "not a number"),
        (True, "not a number"),
        (1.5, "out of bounds"),
        ("huge", "not finite"),
    ],
)
def test_what_a_judge_returns_is_checked_behind_the_pipe(answer: JSON, said: str) -> None:
    assert said in cause(verdicts("returns", answer)[0])


def test_a_judge_that_raises_is_no_verdict_and_the_next_request_is_served() -> None:
    first, second = verdicts("raises", 1, 2)
    assert cause(first) == cause(second) == "the judge raised RuntimeError: the judge is broken"


@pytest.mark.parametrize("name", ["exits", "crashes"])
def test_a_judge_that_ends_its_process_is_tried_again_and_then_no_verdict(name: str) -> None:
    assert "the judge's process failed: EOFError" in cause(verdicts(name, 1)[0])
    assert "(2 attempts)" in cause(verdicts(name, 1)[0])


def test_a_judge_that_overruns_is_killed_and_replaced() -> None:
    began = time.monotonic()
    late, fine = verdicts("sleeps", 60, 0, timeout_s=0.5)
    assert cause(late) == "timeout: the judge ran for more than 0.5 s (2 attempts)"
    assert fine == Scored(1.0)
    assert time.monotonic() - began < 10


def test_a_judge_that_holds_the_interpreter_is_killed_too() -> None:
    assert "timeout" in cause(verdicts("stuck_in_c", 1, timeout_s=0.5, attempts=1)[0])


def test_what_a_judge_prints_is_not_its_verdict() -> None:
    assert verdicts("returns", "prints") == [Scored(0.5)]


def test_a_forged_reply_is_worth_nothing_and_spoils_the_true_one() -> None:
    assert "the judge's process failed: ValueError" in cause(verdicts("forges", 1)[0])


def test_the_process_inherits_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    assert verdicts("environment", 1) == [Scored(0.0, {"variables": 0.0})]


def test_the_same_score_from_a_thread_a_loop_in_it_and_at_once() -> None:
    found: list[list[Verdict]] = []
    thread = threading.Thread(target=lambda: found.append(verdicts("agrees", 1, 2, truth=1)))
    thread.start()
    thread.join()
    assert found == [[Scored(1.0), Scored(0.0)]]

    async def at_once() -> list[Verdict]:
        verifier = ProcessVerifier("verifier_judges:agrees", bounds=UNIT)
        tasks = [Task(str(n), (), truth=n) for n in range(50)]
        got = await asyncio.gather(*(verifier.verify(task, Artefact(int(task.id))) for task in tasks))
        wrong = await asyncio.gather(*(verifier.verify(task, Artefact(int(task.id) + 1)) for task in tasks))
        await verifier.close()
        return [*got, *wrong]

    assert asyncio.run(at_once()) == [Scored(1.0)] * 50 + [Scored(0.0)] * 50


@pytest.mark.ray
def test_the_same_score_inside_a_ray_actor() -> None:
    require("ray")
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:

        @ray.remote
        class Judge:
            async def verdict(self, answer: int) -> Verdict:
                verifier = ProcessVerifier("palestra.envs.verifiers.numeric:judge", bounds=UNIT)
                played: JSON = {"final": {"value": answer}, "ran": {}, "turns": 1}
                try:
                    return await verifier.verify(Task("t", (), truth={"number": 7}), Artefact(played))
                finally:
                    await verifier.close()

        actor = Judge.remote()  # type: ignore[attr-defined]
        got = ray.get([actor.verdict.remote(7), actor.verdict.remote(8)], timeout=120)
        assert [verdict.value for verdict in got] == [1.0, 0.0]
    finally:
        ray.shutdown()


def test_closing_ends_the_process_also_in_the_middle_of_a_request() -> None:
    async def body() -> Verdict:
        verifier = ProcessVerifier("verifier_judges:sleeps", bounds=UNIT, timeout_s=60)
        await verifier.verify(Task("t", ()), Artefact(0))
        waiting = asyncio.ensure_future(verifier.verify(Task("t", ()), Artefact(50)))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        await verifier.close()
        await verifier.close()
        assert time.monotonic() - began < 5
        return await waiting

    assert cause(asyncio.run(body())) == "the verifier was closed"


def test_a_judge_dies_with_whoever_asked_it(tmp_path: object) -> None:
    program = """
import asyncio, sys
from palestra.envs.types import Artefact, Task
from palestra.envs.verifiers.process import ProcessVerifier
from palestra.envs.verifiers.verdict import Bounds
async def main():
    verifier = ProcessVerifier("verifier_judges:process", bounds=Bounds(0, 1))
    print(int((await verifier.verify(Task("t", ()), Artefact(1))).parts["pid"]), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    here = os.path.dirname(__file__)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": here}
    ) as asker:
        assert asker.stdout is not None
        pid = int(asker.stdout.readline())
        asker.send_signal(signal.SIGKILL)
        asker.wait()
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    """Running, and no zombie that nobody collects."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    "name", ["verifier_judges", "verifier_judges:none", "no_such_module:judge", "verifier_judges:number"]
)
def test_a_judge_that_does_not_exist_is_a_wrong_setting(name: str) -> None:
    with pytest.raises(ConfigError, match="judge"):
        ProcessVerifier(name, bounds=UNIT)


# --- the numeric judge


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (72, "72"), (72.0, "72"), (-3, "-3"), (0.1, "1/10"), ("72", "72"), (" 72 ", "72"), ("72.", "72"),
        ("72.50", "145/2"),
        ("1,080", "1080"), ("109,200,000", "109200000"), ("-5", "-5"), ("+5", "5"), (".5", "1/2"), ("$5", "5"),
        ("-$5.25", "-21/4"), ("€ 5", "5"), ("50%", "50"), ("50 %", "50"), ("72 clips", "72"), ("72clips.", "72"),
    ],
)  # fmt: skip
def test_one_number_is_read_exactly(value: JSON, number: str) -> None:
    assert str(parse_number(value)) == number


@pytest.mark.parametrize(
    "value",
    [
        None, True, [72], {"value": 72}, "", "seventy-two", "72 or 73", "72, 73", "72 73", "1,08", "10,80", "1,0800",
        "72/1", "48+24", "x = 72", "the answer is 72", "72 clips in May", "1e3", "0x48", "７２", "7 2", "--5", "5-",
        "$", "%", "NaN", "Infinity", "5 dozen", "3k", "2 million", "1" * 65, "72\n73", "72 1", float("inf"),
    ],
)  # fmt: skip
def test_anything_but_one_plain_number_is_none(value: JSON) -> None:
    assert parse_number(value) is None


@given(st.integers(-(10**12), 10**12))
def test_a_whole_number_reads_the_same_in_every_way_of_writing(number: int) -> None:
    ways: list[JSON] = [number, str(number), f"{number:,}", f"{number}.0", json.loads(json.dumps(number))]
    assert {parse_number(way) for way in ways} == {number}


def played(value: JSON, ran: int = 0, turns: int = 1) -> JSON:
    return {"final": None if value is None else {"value": value}, "ran": {"python": ran} if ran else {}, "turns": turns}


def test_a_whole_number_is_matched_exactly_and_a_fraction_to_a_millionth() -> None:
    assert judge({"number": "72"}, played("72.0"))["reward"] == 1.0
    assert judge({"number": "72"}, played(72.0000001))["reward"] == 0.0
    assert judge({"number": "0.3"}, played(0.1 + 0.2))["reward"] == 1.0
    assert judge({"number": "0.3"}, played(0.301))["reward"] == 0.0


def test_no_answer_and_an_empty_one_earn_nothing() -> None:
    assert judge({"number": 0}, played(None))["reward"] == 0.0
    assert judge({"number": 0}, played(""))["reward"] == 0.0
    assert judge({"number": 0}, {"final": {}, "ran": {}, "turns": 0})["reward"] == 0.0


def test_declared_credits_are_given_for_less_than_the_answer() -> None:
    truth: JSON = {"number": "72", "tool": "python", "tool_credit": 0.1, "number_credit": 0.2}
    assert judge(truth, played("73", ran=2))["reward"] == pytest.approx(0.3)
    assert judge(truth, played("73"))["reward"] == 0.2
    assert judge(truth, played("x or y", ran=1))["reward"] == 0.1
    assert judge(truth, played("72"))["reward"] == 1.0
    parts = judge(truth, played("73", ran=2))
    assert (parts["correct"], parts["numeric"], parts["used_tool"], parts["answered"]) == (0.0, 1.0, 1.0, 1.0)


def test_turns_cost_what_the_task_says_and_at_most_one() -> None:
    truth: JSON = {"number": 72, "turn_cost": 0.1}
    assert judge(truth, played(72, turns=4))["reward"] == pytest.approx(0.6)
    assert judge(truth, played(1, turns=100))["reward"] == -1.0
