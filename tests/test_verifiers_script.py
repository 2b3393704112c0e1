"""A test script judges in a box of its own; what it writes is read strictly, and what it does not is never a reward."""

from __future__ import annotations

import pytest

from judging import SPEC, Court, court, courts, home
from palestra.envs.errors import ConfigError
from palestra.envs.types import Artefact, NoVerdict, Scored, Verdict
from palestra.envs.verifiers.reward_file import read_reward_json, read_reward_text
from palestra.envs.verifiers.script_tests import ScriptExamination
from palestra.envs.verifiers.verdict import Bounds

__all__ = ["court", "courts", "home"]

UNIT = Bounds(0.0, 1.0)
GOOD, BAD = {"answer": b"42\n"}, {"answer": b"41\n"}
CHECK = b'if [ "$(cat answer)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'


def judged(
    court: Court, files: dict[str, bytes], script: bytes = CHECK, links: dict[str, str] | None = None
) -> Verdict:
    def examined(artefact: Artefact) -> ScriptExamination:
        return ScriptExamination(artefact.files, {"test.sh": script}, links=artefact.links, spec=SPEC, timeout_s=4.0)

    return court.judge(examined, Artefact(files=files, links=links or {}), Artefact(files=GOOD))


both_kinds = pytest.mark.parametrize(
    "court", ["namespace", pytest.param("docker", marks=pytest.mark.docker)], indirect=True
)


@both_kinds
def test_the_script_says_what_it_is_worth(court: Court) -> None:
    assert judged(court, GOOD) == Scored(1.0)
    assert judged(court, BAD) == Scored(0.0)


@both_kinds
def test_a_reward_that_the_policy_left_is_not_read_and_is_flagged(court: Court) -> None:  # A01, A02
    planted = {"logs/verifier/reward.txt": b"1", "logs/verifier/reward.json": b'{"reward": 1}'}
    assert judged(court, {**BAD, **planted}) == Scored(0.0, flags=("reward_preplanted",))
    assert judged(court, {**GOOD, **planted}) == Scored(1.0, flags=("reward_preplanted",))


@both_kinds
def test_settings_that_the_policy_left_for_shells_and_pythons_are_not_read(court: Court) -> None:  # A16
    forge = b"exit() { builtin exit 0; }\ntrap 'echo 1 > /logs/verifier/reward.txt' EXIT\n"
    site = b"open('/logs/verifier/reward.txt', 'w').write('1')\nimport os\nos._exit(0)\n"
    files = dict.fromkeys((".bashrc", ".profile", ".bash_profile", ".bash_login", ".env"), forge)
    files[".local/lib/python3.11/site-packages/usercustomize.py"] = site
    files["sitecustomize.py"] = site
    assert judged(court, {**BAD, **files}, b"python3 -I -c 0\n" + CHECK) == Scored(0.0)


def test_the_script_runs_in_a_box_without_the_policys_processes_and_variables(court: Court) -> None:  # A04, A20
    script = b"set | grep -ci 'proxy\\|key=\\|token' > found\n[ $(ls -d /proc/[0-9]* | wc -l) -lt 9 ] && " + CHECK
    assert judged(court, GOOD, script) == Scored(1.0)


def test_no_reward_is_the_policys_doing_where_the_control_earns_one(court: Court) -> None:  # A05
    dies = b"[ -e broken ] && exit 3\n" + CHECK
    assert judged(court, {**GOOD, "broken": b""}, dies) == Scored(0.0, failure="no_verdict")


def test_no_reward_from_the_control_either_is_no_verdict(court: Court) -> None:
    verdict = judged(court, GOOD, b"exit 3\n")
    assert isinstance(verdict, NoVerdict)
    assert "wrote no reward" in verdict.cause


@pytest.mark.parametrize(
    "left",
    [
        b"ln -s /etc/passwd /logs/verifier/reward.txt",
        b"ln -s /proc/1/environ /logs/verifier/reward.json",
        b"mkfifo /logs/verifier/reward.txt",
        b"mkdir /logs/verifier/reward.json",
        b"head -c 100000 /dev/zero > /logs/verifier/reward.txt",
        b"echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 0}' > /logs/verifier/reward.json",
        b"rmdir /logs/verifier; ln -s /etc /logs/verifier",
    ],
)
def test_what_is_no_file_of_one_number_is_no_verdict_and_holds_nobody_up(court: Court, left: bytes) -> None:  # A07, A08
    verdict = judged(court, GOOD, left + b"\n")
    assert isinstance(verdict, NoVerdict)
    assert "bad_reward_artifact" in verdict.cause
    assert "root:" not in verdict.cause


def test_links_and_execute_bits_reach_the_script(court: Court) -> None:  # K02
    script = b'[ "$(readlink here)" = answer ] && ' + CHECK
    assert judged(court, GOOD, script, {"here": "answer"}) == Scored(1.0)


def test_a_task_without_its_script_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no test\.sh among the tests"):
        ScriptExamination({}, {"other.sh": b""})


@pytest.mark.parametrize("text", [b"1", b" 0.5\n", b"1e-1", b".25", b"+1"])
def test_a_decimal_number_is_a_reward(text: bytes) -> None:
    assert isinstance(read_reward_text(text, UNIT), Scored)


@pytest.mark.parametrize("text", [b"", b"NaN", b"inf", b"-0.5", b"1.5", b"1e309", b"true", b"1 1", b"0x1", b"1_0"])
def test_anything_else_is_none(text: bytes) -> None:  # A10
    assert isinstance(read_reward_text(text, UNIT), NoVerdict)


def test_other_numbers_of_a_json_reward_are_for_logs_only() -> None:  # A11
    assert read_reward_json(b'{"reward": 0, "bonus": 5}', UNIT) == Scored(0.0, {"bonus": 5.0})


@pytest.mark.parametrize(
    "text",
    [
        b'{"reward": 0, "reward": 1}',
        b'{"reward": {"value": 1}}',
        b"[" * 10_000,
        b'{"reward": NaN}',
        b'{"reward": Infinity}',
        b'{"reward": 1e309}',
        b'{"reward": true}',
        b'{"reward": "1"}',
        b'{"reward": [1]}',
        b'{"reward": null}',
        b'{"reward": -0.5}',
        b'{"score": 1}',
        b"1",
        b"\xff",
    ],
)
def test_a_json_reward_is_an_object_of_numbers_and_nothing_else(text: bytes) -> None:  # A10, A11
    assert isinstance(read_reward_json(text, UNIT), NoVerdict)
