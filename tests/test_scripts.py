"""The scripts: what they do before anything heavy starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def bash(text: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run in the root of the repository, strict like the scripts themselves."""
    command = ["bash", "-euo", "pipefail", "-c", text]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=60, check=False
    )


def test_set_up_without_a_python_says_what_is_needed() -> None:
    done = bash("./scripts/setup", PYTHON="/nowhere/python3")
    assert done.returncode == 1
    assert done.stderr.startswith("error: found no Python 3.11 or newer")
    assert "PYTHON=" in done.stderr


def test_the_quickstart_goes_on_with_an_interrupted_run_and_begins_a_new_one_after_a_finished_one(
    tmp_path: Path,
) -> None:
    ask = f". scripts/lib.sh; unfinished_or_new {tmp_path} quickstart"
    assert bash(ask).stdout == "quickstart\n"
    (tmp_path / "quickstart").mkdir()
    assert bash(ask).stdout == "quickstart\n"
    (tmp_path / "quickstart" / "summary.json").write_text("{}")
    (tmp_path / "quickstart-2").mkdir()
    (tmp_path / "quickstart-2" / "summary.json").write_text("{}")
    assert bash(ask).stdout == "quickstart-3\n"


def test_a_docker_engine_that_cannot_start_is_a_reason_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "dockerd").write_text("#!/bin/sh\necho no room for a bridge\nexit 1\n")
    (tmp_path / "dockerd").chmod(0o755)
    done = bash(
        '. scripts/lib.sh; engine_answers() { false; }; start_engine || echo "status $? pid [$engine_pid]"',
        PATH=f"{tmp_path}:{os.environ['PATH']}",
    )
    assert done.stdout == "status 1 pid []\n"
    assert "no room for a bridge" in done.stderr
