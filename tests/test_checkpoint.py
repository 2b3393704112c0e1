"""Checkpoints: complete or absent, whatever happens while one is written."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from learning_support import random_groups, tiny_llama
from palestra.envs.errors import ConfigError, IntegrityError
from palestra.rl.algorithms.rloo import RLOO
from palestra.rl.batch import pack
from palestra.rl.checkpoints import Checkpoints, base_digest, broken
from palestra.rl.learner import Learner, LearnerSettings, LearnerState
from palestra.rl.lora import LoraSettings
from palestra.rollout.adapters import Adapter

SETTINGS = LearnerSettings(lora=LoraSettings(rank=2, alpha=4.0))


def state(step: int) -> LearnerState:
    return LearnerState(step, "lora", {"weight/a": torch.full((3,), float(step))})


def test_a_learner_comes_back_from_disk_bit_for_bit(tmp_path: Path) -> None:
    algorithm = RLOO()
    learner = Learner(tiny_llama(dtype=torch.float32), SETTINGS)

    def step(which: Learner, seed: int) -> None:
        groups = random_groups(np.random.default_rng(seed))
        which.update(pack(groups, [algorithm.advantages(g) for g in groups], 100, algorithm.objective), algorithm)

    step(learner, 0)
    checkpoints = Checkpoints(tmp_path / "checkpoints", base="abc")
    checkpoints.save(learner.state(), {"cursor": 7, "rng": [1, 2, 3]})
    found = checkpoints.newest()
    assert found is not None
    assert (found.step, found.folder.name, found.skipped) == (1, "step_000001", ())
    loaded, extra = checkpoints.load(found.folder)
    assert extra == {"cursor": 7, "rng": [1, 2, 3]}
    resumed = Learner(tiny_llama(dtype=torch.float32), SETTINGS, seed=5)
    resumed.load_state(loaded)
    for which in (learner, resumed):
        step(which, 1)
    ours, theirs = resumed.state().tensors, learner.state().tensors
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_state_that_began_with_another_adapter_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    def learner(start: Adapter | None) -> Learner:
        return Learner(tiny_llama(dtype=torch.float32), SETTINGS, start=start)

    one, other = (Learner(tiny_llama(dtype=torch.float32), SETTINGS, seed=seed).adapter() for seed in (1, 2))
    checkpoints = Checkpoints(tmp_path, base="abc")
    for start in (one, None):
        loaded, _ = checkpoints.load(checkpoints.save(learner(start).state(), {}))
        learner(start).load_state(loaded)
        for another in (other, None if start else one):
            resumed = learner(another)
            before = resumed.adapter().digest()
            with pytest.raises(ConfigError, match=r"began with .*Resume with the model\.lora\.initial"):
                resumed.load_state(loaded)
            assert resumed.adapter().digest() == before


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, base="abc", keep=2)
    for step in (1, 2, 10, 9):
        checkpoints.save(state(step), {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000009", "step_000010"]


def test_nothing_yet_is_none_and_not_an_error(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "not there", base="abc").newest() is None


@pytest.mark.parametrize("harm", ["no manifest", "cut", "flipped", "missing file", "empty folder"])
def test_a_broken_checkpoint_is_skipped_and_said(tmp_path: Path, harm: str) -> None:
    checkpoints = Checkpoints(tmp_path, base="abc", keep=3)
    checkpoints.save(state(1), {})
    place = checkpoints.save(state(2), {})
    tensors = place / "learner.safetensors"
    if harm == "no manifest":
        (place / "manifest.json").unlink()
    elif harm == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-5])
    elif harm == "flipped":
        tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x7f")
    elif harm == "missing file":
        (place / "extra.json").unlink()
    else:
        for file in place.iterdir():
            file.unlink()
    found = checkpoints.newest()
    assert found is not None
    assert found.step == 1
    assert len(found.skipped) == 1
    assert "step_000002 is not complete" in found.skipped[0]


def test_starting_over_is_never_silent(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, base="abc")
    (checkpoints.save(state(1), {}) / "manifest.json").unlink()
    with pytest.raises(IntegrityError, match="no complete checkpoint"):
        checkpoints.newest()


def test_another_base_model_is_refused(tmp_path: Path) -> None:
    place = Checkpoints(tmp_path, base="abc").save(state(1), {})
    with pytest.raises(ConfigError, match="a base model with digest"):
        Checkpoints(tmp_path, base="xyz").load(place)


def test_a_base_is_known_by_its_weights(tmp_path: Path) -> None:
    digests = []
    for seed in (0, 0, 1):
        folder = tmp_path / str(len(digests))
        tiny_llama(dtype=torch.float32, seed=seed).save_pretrained(folder)
        digests.append(base_digest(folder))
    assert digests[0] == digests[1] != digests[2]


def test_a_full_disk_leaves_the_last_checkpoint_intact(tmp_path: Path) -> None:
    """The limit on file size stands in for a full disk: the write fails in the middle of the tensors."""
    checkpoints = Checkpoints(tmp_path, base="abc")
    checkpoints.save(state(1), {})
    program = f"""
import resource, signal, torch
from pathlib import Path
from palestra.rl.checkpoints import Checkpoints
from palestra.rl.learner import LearnerState
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpoints = Checkpoints(Path({str(tmp_path)!r}), base="abc")
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    checkpoints.save(LearnerState(2, "lora", {{"weight/a": torch.zeros(1_000_000)}}), {{}})
except Exception as error:
    print("failed:", type(error).__name__, error)
checkpoints.save(LearnerState(3, "lora", {{"weight/a": torch.zeros(10)}}), {{}})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "failed:" in done.stdout, done.stderr
    assert str(errno.EFBIG) in done.stdout or "File too large" in done.stdout
    found = checkpoints.newest()
    assert found is not None
    assert (found.step, found.skipped) == (3, ())  # the run could go on, and step 1 was there until then
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001", "step_000003"]


def test_killing_the_writer_never_leaves_a_half_written_checkpoint(tmp_path: Path) -> None:
    program = f"""
import torch, sys
from pathlib import Path
from palestra.rl.checkpoints import Checkpoints
from palestra.rl.learner import LearnerState
checkpoints = Checkpoints(Path({str(tmp_path)!r}), base="abc", keep=2)
print("ready", flush=True)
for step in range(1, 100_000):
    checkpoints.save(LearnerState(step, "lora", {{"weight/a": torch.full((300_000,), float(step))}}), {{"step": step}})
"""
    checkpoints = Checkpoints(tmp_path, base="abc")
    for delay in (0.15, 0.2, 0.27):
        writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(delay)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(timeout=30)
        writer.stdout.close()
        for place in tmp_path.glob("step_*"):
            assert broken(place) is None, place
        found = checkpoints.newest()
        if found is not None:
            loaded, extra = checkpoints.load(found.folder)
            assert loaded.tensors["weight/a"][0].item() == loaded.step == extra["step"] == found.step


def test_the_manifest_lists_every_file_with_its_hash(tmp_path: Path) -> None:
    place = Checkpoints(tmp_path, base="abc").save(state(1), {})
    manifest = json.loads((place / "manifest.json").read_text())
    assert set(manifest["files"]) | {"manifest.json"} == {file.name for file in place.iterdir()}
