"""Task folders written by hand from the description of the Harbor format, and one of Terminal-Bench 1."""

from __future__ import annotations

from pathlib import Path


def write(folder: Path, files: dict[str, str], executable: tuple[str, ...] = ()) -> Path:
    """The files below `folder`."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if name in executable else 0o644)
    return folder


def greeting(root: Path, name: str = "greeting") -> Path:
    """A file to be written; the reward is a text."""
    test = """#!/bin/bash
mkdir -p /logs/verifier
if [ "$(cat /app/hello.txt)" = "Hello, $WHOM!" ]; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
"""
    return write(
        root / name,
        {
            "task.toml": """schema_version = "1.4"
[task]
name = "own/greeting"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 30.0
env = { WHOM = "world" }
[environment]
workdir = "/app"
network_mode = "no-network"
memory_mb = 256
[environment.unknown_to_us]
key = 1
""",
            "instruction.md": "<!-- canary 1234 -->\n\nWrite 'Hello, world!' into /app/hello.txt.\n",
            "tests/test.sh": test,
            "solution/solve.sh": "#!/bin/bash\necho 'Hello, world!' > /app/hello.txt\n",
        },
    )


def totals(root: Path) -> Path:
    """Files that a Dockerfile copies, a program among them, older spellings, and a reward as JSON with more."""
    return write(
        root / "totals",
        {
            "task.toml": """version = "1.0"
artifacts = ["/app/out", { source = "/app/log", exclude = ["*.tmp"] }]
[environment]
memory = "256M"
storage = "1G"
allow_internet = false
[verifier]
environment_mode = "separate"
""",
            "instruction.md": "Sum the columns of data/table.csv with ./sum.sh and write them to /app/out/sums.txt.",
            "environment/Dockerfile": """# a base that nobody pulls
FROM python:3.12-slim
WORKDIR /app
ENV LANG=C.UTF-8 COLUMNS_TO_SUM=2
COPY data/ \\
     data/
COPY sum.sh .
CMD ["bash"]
""",
            "environment/data/table.csv": "1,10\n2,20\n3,30\n",
            "environment/sum.sh": "#!/bin/sh\nawk -F, '{a += $1; b += $2} END {print a, b}' data/table.csv\n",
            "tests/test.sh": """#!/bin/bash
python3 - <<'PY'
import json, pathlib
expected = pathlib.Path("/tests/expected.txt").read_text().split()
found = pathlib.Path("/app/out/sums.txt")
right = found.is_file() and found.read_text().split() == expected
print(sorted(map(str, pathlib.Path("/app").rglob("*"))))
kept = pathlib.Path("/app/data/table.csv").is_file() and not pathlib.Path("/app/log/a.tmp").exists()
json.dump({"reward": float(right and kept), "kept": float(kept)}, open("/logs/verifier/reward.json", "w"))
PY
""",
            "tests/expected.txt": "6 60\n",
            "solution/solve.sh": "mkdir -p out log; ./sum.sh > out/sums.txt; echo x > log/a.tmp; echo y > log/a.log\n",
        },
        executable=("environment/sum.sh",),
    )


def repair(root: Path) -> Path:
    """A module to be repaired, judged by unit tests; nothing is said about a network."""
    return write(
        root / "repair",
        {
            "task.toml": '[environment]\nworkdir = "/srv/project"\n',
            "instruction.md": "`double` in maths.py is wrong. Repair it.",
            "environment/Dockerfile": "FROM debian\nWORKDIR /srv/project\nCOPY . .\n",
            "environment/maths.py": "def double(n):\n    return n + 2\n",
            "tests/test.sh": """cd /srv/project
if python3 -m unittest discover -s /tests
then echo 1.0 > /logs/verifier/reward.txt; else echo 0.0 > /logs/verifier/reward.txt; fi
""",
            "tests/test_maths.py": """import sys, unittest
sys.path.insert(0, "/srv/project")
from maths import double

class Doubles(unittest.TestCase):
    def test_double(self):
        self.assertEqual([double(n) for n in (0, 2, 5)], [0, 4, 10])
""",
            "solution/solve.sh": "sed -i 's/n + 2/n * 2/' maths.py\n",
        },
    )


def legacy(root: Path) -> Path:
    """A task of Terminal-Bench 1."""
    return write(
        root / "legacy",
        {
            "task.yaml": """instruction: |-
  Create a folder /app/box with a file in it.
author_name: someone
difficulty: easy
parser_name: pytest
max_agent_timeout_sec: 100
max_test_timeout_sec: 30
""",
            "Dockerfile": "FROM ghcr.example/base:latest\nWORKDIR /app\n",
            "run-tests.sh": '#!/bin/bash\npython3 "$TEST_DIR/check.py"\n',
            "tests/check.py": "import pathlib\nassert any(pathlib.Path('/app/box').iterdir())\n",
            "solution.sh": "mkdir box && touch box/file\n",
        },
    )
