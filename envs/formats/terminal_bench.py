"""Task folders of Terminal-Bench 1: `task.yaml`, `run-tests.sh`, `tests/`, `solution.sh`; read as Harbor tasks.

The status of `run-tests.sh` is the verdict: a `test.sh` is made that says so in the reward file.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from palestra.envs.errors import ConfigError
from palestra.envs.formats.dockerfile import Recipe, read_dockerfile
from palestra.envs.formats.harbor import DEFAULT_WORKDIR, HarborTask
from palestra.envs.formats.harbor_settings import Table, seconds
from palestra.envs.formats.task_files import Files, read_files, read_text

_TEST = b"""#!/bin/bash
export TEST_DIR=/tests
bash /tests/run-tests.sh
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


def read_terminal_bench(folder: Path) -> HarborTask:
    """The task in `folder`. Raises ConfigError."""
    table = _read_yaml(folder / "task.yaml")
    instruction = table.text("instruction").strip()
    if not instruction:
        raise ConfigError(f"{table.place}: no instruction, which is what the policy is told")
    runner = folder / "run-tests.sh"
    if not runner.is_file():
        raise ConfigError(f"{folder}: no run-tests.sh, whose status is the verdict")
    notes = ["run-tests.sh: judged by its status, in a separate box without a network"]
    recipe = _recipe(folder, notes)
    tests = Files({"test.sh": _TEST}).over(read_files(runner)).over(read_files(folder / "tests"))
    solved = read_files(folder / "solution.sh").contents.get("solution.sh")
    return HarborTask(
        id=folder.name,
        instruction=instruction,
        tests=tests,
        solution=Files() if solved is None else Files({"solve.sh": solved}),
        workdir=recipe.workdir or DEFAULT_WORKDIR,
        files=recipe.files,
        env=recipe.env,
        agent_timeout_s=seconds(table, "max_agent_timeout_sec", 360.0),
        verifier_timeout_s=seconds(table, "max_test_timeout_sec", 60.0),
        notes=tuple(notes),
    )


def _recipe(folder: Path, notes: list[str]) -> Recipe:
    path = folder / "Dockerfile"
    if not path.exists():
        if any((folder / name).exists() for name in ("docker-compose.yaml", "docker-compose.yml")):
            raise ConfigError(f"{folder}: docker-compose.yaml starts several containers, and a task has one box")
        return Recipe("", None)
    recipe = read_dockerfile(path)
    notes.append(f"Dockerfile FROM {recipe.base}: not pulled; the box has the sandbox's default image")
    return recipe


def _read_yaml(path: Path) -> Table:
    try:
        found = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: no YAML: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a table of settings, found {type(found).__name__}")
    return Table(str(path), found)
