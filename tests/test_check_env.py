"""`palestra check-env`: an environment that can be cheated is not admitted, and the row says how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from palestra.envs.errors import ConfigError
from palestra.rl.commands.check_env import run_check_env
from palestra.rl.exit_codes import DONE, FAILED
from tests_support import require

CONFIG = """
[run]
name = "admission"
folder = "{folder}"
[environment]
name = "abuse_toy:ToyFix"
[environment.options]
{options}
[environment.sandbox]
backend = "namespace"
max_boxes = 4
"""


@pytest.fixture
def configured(tmp_path: Path) -> Path:
    """A configuration; its environment pays what a file of the policy says."""
    return written(tmp_path, "careless = true")


def written(folder: Path, options: str) -> Path:
    path = folder / "config.toml"
    path.write_text(CONFIG.format(folder=folder, options=options))
    return path


def test_an_environment_that_believes_the_policy_is_refused_by_name(
    configured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require("bwrap")
    told = tmp_path / "rows.json"
    assert run_check_env(configured, [], 1, told) == FAILED
    rows = {row["check"]: row for row in json.loads(told.read_text())}
    assert rows["gold"]["ok"]
    assert rows["no-op"]["ok"]
    assert rows["reset"]["ok"]
    assert rows["A01 reward file written ahead"]["found"] == "1"
    assert not rows["A01 reward file written ahead"]["ok"]
    printed = capsys.readouterr().out
    assert "FAILED A01 reward file written ahead, task toy-fix-train: wanted 0, got 1" in printed


def test_hidden_tests_within_reach_are_found(tmp_path: Path) -> None:
    """C05: the policy's box holds nothing of what judges it."""
    require("bwrap")
    told = tmp_path / "rows.json"
    assert run_check_env(written(tmp_path, "careless = true\ntests_in_reach = true"), [], 1, told) == FAILED
    rows = {row["check"]: row for row in json.loads(told.read_text())}
    assert "hidden/notes" in rows["C05 folders of the verifier"]["found"]
    assert "hidden/notes" in rows["hidden lines"]["found"]


def test_an_environment_that_judges_what_was_said_is_admitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require("bwrap")
    named = 'environment.name="arithmetic"'
    assert run_check_env(written(tmp_path, ""), [named], 1, None) == DONE
    assert "0 failed; this environment may be trained on" in capsys.readouterr().out


def test_what_cannot_be_checked_is_a_wrong_configuration(configured: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tasks is 0"):
        run_check_env(configured, [], 0, None)
    with pytest.raises(ConfigError, match="no option 'careful'"):
        run_check_env(written(tmp_path, "careful = true"), [], 1, None)
