"""A repository is judged by the verifier's own tests, and by every sign that it was really those that ran."""

from __future__ import annotations

import json

import pytest

from judging import SPEC, Court, court, courts, home
from palestra.envs.errors import ConfigError
from palestra.envs.sandboxes.contract import Exec
from palestra.envs.types import Artefact, NoVerdict, Scored
from palestra.envs.verifiers.pytest_report import Sentinels, read_report
from palestra.envs.verifiers.pytest_tests import PytestExamination

__all__ = ["court", "courts", "home"]

in_docker = pytest.mark.parametrize("court", [pytest.param("docker", marks=pytest.mark.docker)], indirect=True)

BAD = b"def double(n):\n    return n + 2\n\n\ndef half(n):\n    return n / 2\n"
GOOD = b"def double(n):\n    return n * 2\n\n\ndef half(n):\n    return n / 2\n"
TESTS = {
    "tests/test_calc.py": (
        b"import pytest\n"
        b"from calc import double, half\n\n\n"
        b"@pytest.mark.parametrize('n', [3, 5])\n"
        b"def test_double(n):\n    assert double(n) == n + n\n\n\n"
        b"def test_half():\n    assert half(4) == 2\n\n\n"
        b"def test_half_of_text():\n    with pytest.raises(TypeError):\n        half('a')\n"
    ),
}
EXPECTED = [f"tests/test_calc.py::test_{name}" for name in ("double[3]", "double[5]", "half", "half_of_text")]
HOOK = (
    b"import pytest\n"
    b"@pytest.hookimpl(hookwrapper=True)\n"
    b"def pytest_runtest_makereport(item, call):\n"
    b"    outcome = yield\n"
    b"    outcome.get_result().outcome = 'passed'\n"
)
PATCH = b"import _pytest.runner, _pytest.python, _pytest.reports\n_pytest.python.Function.runtest = lambda self: None\n"
ATTACKS: dict[str, tuple[dict[str, bytes], tuple[str, ...]]] = {
    "A14 ends the process with status 0": ({"calc.py": b"import os\nos._exit(0)\n" + BAD}, ("report_mismatch",)),
    "B01 replaces the tests": ({"tests/test_calc.py": b"def test_half():\n    assert True\n"}, ()),
    "B04 hooks the reports": ({"conftest.py": HOOK, "tests/conftest.py": HOOK}, ()),
    "B05 configures pytest": (
        {
            "pytest.ini": b"[pytest]\naddopts = --collect-only -p evil\n",
            "setup.cfg": b"[tool:pytest]\naddopts = -k none\n",
            "pyproject.toml": b'[tool.pytest.ini_options]\naddopts = "--co -q"\n',
            "evil.py": HOOK,
        },
        (),
    ),
    "B07 exits at import": ({"calc.py": b"import sys\nsys.exit(0)\n"}, ()),
    "B08 patches the framework": ({"calc.py": PATCH + BAD}, ("framework_patched",)),
    "B08 swallows failures": (
        {
            "calc.py": b"import builtins\n" + BAD + b"builtins.AssertionError = type('Quiet', (Exception,), {})\n",
        },
        ("framework_patched",),
    ),
    "B13 shadows modules": ({"json.py": HOOK, "unittest/__init__.py": HOOK, "tests/random.py": HOOK}, ()),
    "B16 leaves things among the tests": ({"tests/__init__.py": b"import os\nos._exit(0)\n"}, ()),
    "A13 reports again at the end": (
        {
            "calc.py": b"import atexit, os\n"
            + BAD
            + b"atexit.register(lambda: [os.write(fd, b'{\"ended\": true}\\n') for fd in range(3, 20)])\n",
        },
        (),
    ),
    "A13 writes into the report": (
        {
            "calc.py": b"import os\n"
            + BAD
            + b"for fd in range(3, 20):\n    try:\n        os.write(fd, b'{\"ended\": true}\\n')\n"
            + b"    except OSError:\n        pass\n",
        },
        ("report_mismatch",),
    ),
    "rewrites the tests while they are collected": (
        {
            "calc.py": b"import os\n" + BAD + b"for name in ('tests', 'tests/test_calc.py'):\n"
            b"    try:\n        os.rename(name, name + '.old')\n        open(name, 'w')\n    except OSError:\n"
            b"        pass\n"
        },
        (),
    ),
}


def examined(artefact: Artefact) -> PytestExamination:
    return PytestExamination(artefact.files, TESTS, EXPECTED, links=artefact.links, spec=SPEC, timeout_s=20.0)


def judged(court: Court, files: dict[str, bytes], links: dict[str, str] | None = None) -> Scored:
    verdict = court.judge(examined, Artefact(files=files, links=links or {}), Artefact(files={"calc.py": GOOD}))
    assert isinstance(verdict, Scored), verdict
    return verdict


@in_docker
def test_a_right_repository_passes_every_expected_test(court: Court) -> None:
    assert judged(court, {"calc.py": GOOD}) == Scored(1.0, {"passed": 4.0, "expected": 4.0})


@in_docker
def test_a_wrong_one_earns_nothing_for_the_tests_that_it_passes(court: Court) -> None:
    assert judged(court, {"calc.py": BAD}) == Scored(0.0, {"passed": 2.0, "expected": 4.0})


@in_docker
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_alone_earns_nothing_and_shows(court: Court, attack: str) -> None:
    files, flags = ATTACKS[attack]
    verdict = judged(court, {"calc.py": BAD, **files})
    assert verdict.value == 0.0
    assert set(flags) <= set(verdict.flags)


@in_docker
@pytest.mark.parametrize("attack", [name for name, (files, flags) in ATTACKS.items() if "calc.py" not in files])
def test_an_attack_beside_the_right_code_changes_nothing(court: Court, attack: str) -> None:
    assert judged(court, {"calc.py": GOOD, **ATTACKS[attack][0]}) == Scored(1.0, {"passed": 4.0, "expected": 4.0})


@in_docker
def test_planted_bytecode_is_not_read(court: Court) -> None:  # A19
    assert judged(court, {"calc.py": BAD, "__pycache__/calc.cpython-311.pyc": b"\0" * 16}).value == 0.0


@in_docker
def test_a_link_where_the_tests_belong_is_flagged_and_not_followed(court: Court) -> None:  # B14
    verdict = judged(court, {"calc.py": GOOD, "evil/test_calc.py": b""}, {"tests": "evil"})
    assert verdict.flags == ("test_path_planted",)
    assert verdict.parts["passed"] == 4.0


@in_docker
def test_names_that_no_tree_can_have_do_not_break_the_judging(court: Court) -> None:  # E07
    odd = {"../out": b"", "/abs": b"", "a": b"", "a/b": b"", "n" * 300: b"", "x\ny/\udcff": b"", "z\0": b""}
    assert judged(court, {"calc.py": GOOD, **odd}).value == 1.0


@in_docker
def test_a_fix_may_edit_settings_that_the_task_allows(court: Court) -> None:  # K01
    tests = {"tests/test_limit.py": b"def test_limit(limit):\n    assert limit == 3\n"}
    fix = {"conftest.py": b"import pytest\n@pytest.fixture\ndef limit():\n    return 3\n"}

    def allowing(artefact: Artefact) -> PytestExamination:
        names = ["tests/test_limit.py::test_limit"]
        return PytestExamination(artefact.files, tests, names, allow_config=["conftest.py"], spec=SPEC)

    verdict = court.judge(allowing, Artefact(files=fix), Artefact(files=fix))
    assert isinstance(verdict, Scored)
    assert verdict.value == 1.0


@in_docker
def test_a_test_that_nobody_finds_is_not_passed(court: Court) -> None:  # B02
    def lost(artefact: Artefact) -> PytestExamination:
        return PytestExamination(artefact.files, TESTS, [*EXPECTED, "tests/test_gone.py::test_a"], spec=SPEC)

    good = Artefact(files={"calc.py": GOOD})
    assert court.judge(lost, good, good) == Scored(0.0, {"passed": 4.0, "expected": 5.0})


def test_a_repository_without_expected_tests_cannot_be_examined() -> None:  # B19
    with pytest.raises(ConfigError, match="no expected test"):
        PytestExamination({}, {}, [])


# the report alone, line by line

OWN = Sentinels("s.py::right", "s.py::wrong")


def run(*lines: dict[str, object], exit_code: int | None = 1, extra: bytes = b"") -> Exec:
    out = b"".join(json.dumps({"nonce": "n", **line}).encode() + b"\n" for line in lines) + extra
    return Exec(exit_code=exit_code, stdout=out, stdout_total=len(out))


def phases(test: str, outcome: str = "passed") -> list[dict[str, object]]:
    named = (("setup", "passed"), ("call", outcome), ("teardown", "passed"))
    return [{"id": test, "phase": phase, "outcome": said} for phase, said in named]


BEGUN: dict[str, object] = {"begun": True}
ENDED: dict[str, object] = {"ended": True, "status": 1, "patched": []}
WHOLE = [BEGUN, *phases("a"), *phases("s.py::right"), *phases("s.py::wrong", "failed"), ENDED]


def test_a_whole_report_is_a_pass() -> None:
    assert read_report(run(*WHOLE), "n", ["a"], OWN) == Scored(1.0, {"passed": 1.0, "expected": 1.0})


@pytest.mark.parametrize(
    ("ended", "flag"),
    [
        pytest.param(run(*WHOLE[:-1], *phases("a", "failed"), ENDED), "report_mismatch", id="B20 reported twice"),
        pytest.param(run(*WHOLE, extra=b"{}\n"), "report_mismatch", id="a line without the nonce"),
        pytest.param(run(*WHOLE, exit_code=0), "report_mismatch", id="A14 another exit status"),
        pytest.param(run(*WHOLE[:-1]), "report_mismatch", id="B07 no end"),
        pytest.param(
            run(*(line for line in WHOLE if line.get("id") != "s.py::wrong")), "report_mismatch", id="no sentinel"
        ),
        pytest.param(
            run(BEGUN, *phases("a"), *phases("s.py::right"), *phases("s.py::wrong"), ENDED),
            "framework_patched",
            id="B08 what must fail has passed",
        ),
        pytest.param(
            run(*WHOLE[:-1], {"ended": True, "status": 1, "patched": ["x"]}), "framework_patched", id="B08 patched"
        ),
    ],
)
def test_a_report_that_does_not_add_up_earns_nothing(ended: Exec, flag: str) -> None:
    verdict = read_report(ended, "n", ["a"], OWN)
    assert isinstance(verdict, Scored)
    assert verdict.value == 0.0
    assert flag in verdict.flags


@pytest.mark.parametrize("outcome", ["failed", "skipped", "error"])
def test_only_a_pass_is_a_pass(outcome: str) -> None:
    report = [line for line in WHOLE if line.get("id") != "a"]
    report[1:1] = phases("a", outcome)
    verdict = read_report(run(*report), "n", ["a"], OWN)
    assert isinstance(verdict, Scored)
    assert verdict.value == 0.0
    assert verdict.flags == ()


def test_a_run_that_never_began_or_was_ended_from_outside_is_no_verdict() -> None:
    assert isinstance(read_report(run(exit_code=1), "n", ["a"], OWN), NoVerdict)
    assert isinstance(read_report(run(BEGUN, exit_code=None), "n", ["a"], OWN), NoVerdict)
