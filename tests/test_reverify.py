"""Artefacts are kept beside the records that name them, and judging them again gives the same verdicts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from abuse_support import GOLD, TOY
from palestra.envs.errors import ConfigError
from palestra.envs.types import Artefact, NoVerdict, Scored, Verdict
from palestra.rl.commands.reverify import run_reverify
from palestra.rl.exit_codes import DONE, FAILED
from palestra.rl.retention import trim_folder
from palestra.rollout import artefacts, record
from palestra.rollout.types import TerminatedBy, Trajectory
from sandbox_support import require_image
from test_collector import Plays, Sums, collector, stored_files

CONFIG = '[run]\nname = "{name}"\nfolder = "{folder}"\n[environment]\nname = "toy_environment:Speeches"\n'
ODD = Artefact(
    answer={"said": "né", "n": 2**70},
    files={"a b/\udcff.bin": b"\x00\xff", "run.sh": b""},
    executable=frozenset({"run.sh"}),
    links={"to": "a b"},
    skipped={"pipe": "a pipe"},
    flags=("eval_detect",),
)


def episode(number: int, artefact: Artefact | None, verdict: Verdict, task: str = "train-0") -> Trajectory:
    return Trajectory(f"t{number}", task, "g", 0, (), (), (), TerminatedBy.DONE, verdict, artefact=artefact)


def stored(folder: Path, *episodes: Trajectory) -> Path:
    """A run's folder with these episodes."""
    run = folder / "kept"
    (run / "trajectories").mkdir(parents=True)
    (run / "config.toml").write_text(CONFIG.format(name="kept", folder=folder))
    file = run / "trajectories" / "000000-l1.jsonl"
    linked, _ = artefacts.keep(file, episodes)
    record.append(file, linked)
    return run


def test_an_artefact_comes_back_as_it_was_under_the_digest_in_the_record(tmp_path: Path) -> None:
    run = stored(tmp_path, episode(0, ODD, Scored(1.0)), episode(1, ODD, Scored(1.0)), episode(2, None, NoVerdict("x")))
    file = run / "trajectories" / "000000-l1.jsonl"
    first, second, third = record.read(file)
    kept = list(artefacts.read(file))
    assert kept == [(first.facts[artefacts.FACT], ODD)]  # once, however many handed it over
    assert second.facts == first.facts
    assert artefacts.FACT not in third.facts


def test_a_damaged_or_cut_line_is_gone_and_nothing_else(tmp_path: Path) -> None:
    run = stored(tmp_path, *(episode(n, Artefact(f"answer {n}"), Scored(1.0)) for n in range(3)))
    path = artefacts.beside(run / "trajectories" / "000000-l1.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0].replace(lines[0][:4], b"0000") + lines[1] + lines[2][:-20])
    assert [artefact.answer for _, artefact in artefacts.read(path.with_suffix(".jsonl"))] == ["answer 1"]


def test_an_answer_that_is_no_json_costs_the_episode_nothing(tmp_path: Path) -> None:
    odd = episode(0, Artefact(object()), Scored(1.0))  # type: ignore[arg-type]
    linked, written = artefacts.keep(tmp_path / "x.jsonl", [odd])
    assert (linked, written) == ([replace(odd, artefact=None)], 0)


def test_artefacts_count_against_the_room_of_the_records(tmp_path: Path) -> None:
    run = stored(tmp_path, episode(0, ODD, Scored(1.0)))
    (run / "trajectories" / "000001-l1.jsonl").write_bytes(b"")
    assert [path.suffix for path in trim_folder(run / "trajectories", 0)] == [".artefacts", ".jsonl"]


def test_judged_again_the_verdicts_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """I16: from what is stored, without a policy's box."""
    run = stored(
        tmp_path,
        episode(0, Artefact("ab"), Scored(1.0)),
        episode(1, Artefact("abc"), Scored(0.0), task="test-3"),
        episode(2, Artefact("ab"), NoVerdict("the judge was away")),
        episode(3, None, NoVerdict("the box broke")),
    )
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    told = tmp_path / "told.json"
    assert run_reverify(run, told) == DONE
    found = json.loads(told.read_text())
    assert (found["episodes"], found["same"], found["recovered"], found["not_stored"]) == (4, 2, 1, 1)
    assert "4 episodes: 2 judged the same, 0 otherwise" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.docker
def test_what_needs_a_box_gets_one_for_judging_only(tmp_path: Path) -> None:
    """I16: a repository is judged again in a verifier's box; what was flagged is flagged again."""
    require_image()
    whole = {"passed": 4.0, "expected": 4.0}
    gold, wrong = Artefact(files={**TOY, "calc.py": GOLD}), Artefact(files=TOY)
    asks = Artefact(files={**TOY, "calc.py": GOLD + b"import sys\nsys._getframe()\n"})
    run = stored(
        tmp_path,
        episode(0, gold, Scored(1.0, whole), task="toy-fix-train"),
        episode(1, asks, Scored(0.0, whole, ("eval_detect",)), task="toy-fix-train"),
        episode(2, wrong, Scored(1.0, whole), task="toy-fix-test"),
    )
    config = (run / "config.toml").read_text().replace("toy_environment:Speeches", "abuse_toy:ToyFix")
    (run / "config.toml").write_text(config + '[environment.sandbox]\nbackend = "docker"\nmax_boxes = 2\n')
    told = tmp_path / "told.json"
    assert run_reverify(run, told) == FAILED
    found = json.loads(told.read_text())
    assert (found["episodes"], found["same"]) == (3, 2)
    assert [difference["trajectory"] for difference in found["different"]] == ["t2"]


def test_a_difference_is_said_and_never_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B28: a second judging upgrades nothing."""
    run = stored(tmp_path, episode(0, Artefact("ab"), Scored(0.0)), episode(1, Artefact("ab"), Scored(1.0)))
    assert run_reverify(run, None) == FAILED
    assert "t0 (task train-0): 0 -> 1" in capsys.readouterr().out
    assert next(record.read(run / "trajectories" / "000000-l1.jsonl")).reward == 0.0


def test_what_cannot_be_judged_again_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        run_reverify(tmp_path / "nowhere", None)
    run = stored(tmp_path, episode(0, Artefact("ab"), Scored(1.0), task="of-another-world"))
    with pytest.raises(ConfigError, match="task 'of-another-world', which the environment"):
        run_reverify(run, None)
    for file in (run / "trajectories").iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match="no records"):
        run_reverify(run, None)


def test_a_judged_episode_leaves_what_was_judged(tmp_path: Path) -> None:
    async def go() -> None:
        made, _ = collector(Plays(Sums()), tmp_path)
        await made.take(1)

    asyncio.run(go())
    (file,) = stored_files(tmp_path)
    kept = dict(artefacts.read(file))
    assert kept
    assert all(trajectory.facts[artefacts.FACT] in kept for trajectory in record.read(file))
