"""`palestra doctor` where little is installed."""

from __future__ import annotations

import subprocess
import sys

WITHOUT = """
import importlib.machinery, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "peft"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import palestra.rl.cli
import palestra.rl.commands.doctor
"""


def test_it_starts_without_the_packages_that_it_looks_for() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
