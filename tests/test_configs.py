"""Every configuration that ships is read and planned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests_support import data_folder, require

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_can_be_planned(path: Path, tmp_path: Path) -> None:
    if path.stem.startswith(("gsm8k", "humaneval")):
        require("data")
    done = subprocess.run(
        [sys.executable, "-m", "palestra.rl", "train", str(path), "--dry-run"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PALESTRA_DATA": str(data_folder())},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "# steps" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_there_are_configurations_and_each_begins_with_what_it_is_for() -> None:
    assert len(CONFIGS) >= 2
    for path in CONFIGS:
        text = path.read_text(encoding="utf-8")
        assert text.startswith("# "), f"{path.name} does not say what it is for"
        assert len(text.splitlines()) < 100
