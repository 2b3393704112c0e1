"""The README keeps its promises: every fenced block is run, read or looked up, by the words behind its opening fence.

python NAME        a file of the example project; the test writes it
toml NAME          the same, and it must be a valid configuration
bash run           run in the example project, after the files are there
bash               looked up: every script, make word and subcommand exists
bash quickstart    looked up, and run by `pytest -m slow`
bash cluster       looked up, and run by `pytest -m slow` on a slurm of two nodes
text               not code
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli_w

from tests_support import require

ROOT = Path(__file__).resolve().parents[1]
KINDS = re.compile(r"python \S+[.]py|toml \S+[.]toml|bash(?: run| quickstart| cluster)?|text")
ELSEWHERE = {"git", "cd", "sbatch", "pip", "python"}  # programs that are not ours to check


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. Block(12, "bash run", "palestra --help\\n")"""

    line: int
    kind: str
    text: str


def blocks() -> list[Block]:
    """Every fenced block of the README, in order."""
    text = (ROOT / "README.md").read_text()
    found = re.finditer(r"^```(.*)\n((?:(?!```).*\n)*)```$", text, re.MULTILINE)
    return [Block(text[: m.start()].count("\n") + 1, m[1].strip(), m[2]) for m in found]


def of_kind(pattern: str) -> list[Block]:
    """The blocks whose kind matches."""
    return [block for block in blocks() if re.fullmatch(pattern, block.kind)]


def shell(text: str, folder: Path, timeout_s: float) -> str:
    """Run a block in a folder, with the command of this interpreter's environment on the path."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def commands(text: str) -> list[list[str]]:
    """The commands of a bash block as words, without comments and assignments in front."""
    joined = text.replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in re.split(r"\n|&&|;", joined)]
    bare = [words[next((n for n, w in enumerate(words) if not re.match(r"\w+=", w)), len(words)) :] for words in lines]
    return [words for words in bare if words]


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(blocks())  # none is indented or left open
    assert [f"line {b.line}: {b.kind!r}" for b in blocks() if not KINDS.fullmatch(b.kind)] == []


def test_every_command_that_is_named_exists() -> None:
    words = [words for block in of_kind("bash.*") for words in commands(block.text)]
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = []
    for first, *rest in words:
        if first.startswith(("./", "scripts/")):
            known = os.access(ROOT / first, os.X_OK)
        elif first == "make":
            known = set(rest) <= targets
        else:
            known = first in {"palestra", *ELSEWHERE}
        missing += [] if known else [" ".join([first, *rest])]
    assert missing == []
    files = {word for w in words for word in w[1:] if re.fullmatch(r"(?:configs|slurm|scripts)/[\w./-]+", word)}
    assert sorted(name for name in files if not (ROOT / name).exists()) == []
    for subcommand in sorted({w[1] for w in words if w[0] == "palestra"}):
        shell(f"palestra {subcommand} --help", ROOT, 60)


def test_every_link_leads_to_a_file() -> None:
    text = (ROOT / "README.md").read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:|#", link)]
    assert sorted(link for link in links if not (ROOT / link).exists()) == []


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The example project of the README: its files, written; its configurations, read by a dry run."""
    for block in of_kind("(?:python|toml) .*"):
        name = block.kind.split()[1]
        (tmp_path / name).write_text(block.text)
    return tmp_path


def test_the_first_environment_of_ones_own_works(example: Path) -> None:
    runs = of_kind("bash run")
    assert runs != []
    for block in runs:
        assert shell(block.text, example, 240) != ""


def test_the_configurations_shown_are_valid(example: Path) -> None:
    shown = of_kind("toml .*")
    for block in shown:
        name = block.kind.split()[1]
        tomllib.loads(block.text)
        assert "environment" in shell(f"palestra train {name} --dry-run", example, 120)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quickstart_block_does_what_it_says() -> None:
    (block,) = of_kind("bash quickstart")
    assert "success" in shell(block.text, ROOT, 1400)


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.timeout(1500)
def test_the_cluster_block_trains_on_a_slurm_of_two_nodes(tmp_path: Path) -> None:
    require("slurm")
    (block,) = of_kind("bash cluster")
    shown = re.findall(r"configs/\w+[.]toml", block.text)[0]
    text = block.text.replace(f"$PWD/{shown}", str(shortened(ROOT / shown, tmp_path))).replace("$PWD/.venv", sys.prefix)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # a short path, for sockets
        here = shell(f"scripts/slurm_test_cluster start {folder}", ROOT, 120)
        try:
            job = re.findall(r"\d+", shell(here + text, ROOT, 60))[0]
            wait_for_end(f"{here}\nscontrol show job {job}", 1200)
        finally:
            shell(f"scripts/slurm_test_cluster stop {folder}", ROOT, 60)
    logs = sorted(ROOT.glob(f"palestra-{job}[.-]*"))
    said = "".join(log.read_text() for log in logs)
    for log in logs:
        log.unlink()
    assert "exit code 0" in said, said[-4000:]
    assert (tmp_path / "short" / "summary.json").exists()


def shortened(config: Path, folder: Path) -> Path:
    """The same settings with two steps and a small evaluation, in a run folder of the test's own."""
    settings = tomllib.loads(config.read_text())
    settings["run"] = settings.get("run", {}) | {
        "name": "short",
        "folder": str(folder),
        "steps": 2,
        "groups_per_step": 2,
    }
    settings["evaluation"] = settings.get("evaluation", {}) | {"tasks": 4}
    short = folder / config.name
    short.write_text(tomli_w.dumps(settings))
    return short


def wait_for_end(show_job: str, limit_s: float) -> None:
    """Until slurm says that the job has ended, however it did."""
    deadline = time.monotonic() + limit_s
    while re.search(r"JobState=(?:PENDING|CONFIGURING|RUNNING|COMPLETING)", shell(show_job, ROOT, 30)):
        assert time.monotonic() < deadline, f"the job has not ended after {limit_s} s"
        time.sleep(2)
