"""The check of one GPU, without one: all of its logic, and what it says when something differs or takes too long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
NOT_NEEDED = ("ray", "vllm", "docker", "wandb", "pydantic", "jsonschema", "tenacity", "tomli_w")


def gpu_check(folder: Path, *words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The script as a person starts it, in a folder of its own."""
    env = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"PYTHONPATH": str(path)} if path else {}
    command = [str(ROOT / "scripts" / "gpu_check"), *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder that, on the path, makes a Python in which nothing is installed that the learner does not need."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({NOT_NEEDED!r}))\n")
    return tmp_path


def test_all_of_it_runs_here_with_nothing_but_torch_transformers_and_peft(tmp_path: Path, bare: Path) -> None:
    done = gpu_check(tmp_path, "--device", "cpu", "--small", "--json", "figures.json", path=bare)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["ok"]
    checks = figures["parts"]["correctness"]["checks"]
    assert {word for check in checks for word in check["what"].split()} >= {"float64", "float32", "bfloat16", "tree"}
    assert any(check["found"] > 0 for check in checks)  # half precision does differ
    episode, once, each = figures["parts"]["speed of 0.6B"]["rows"]
    assert episode["tokens"] == 256
    assert min(row["tokens_per_s"] for row in (episode, once, each)) > 0
    assert once["tokens"] == each["tokens"]
    assert once["action_tokens"] == each["action_tokens"]
    assert once["row_tokens"] < each["row_tokens"]
    assert "tokens/s" in done.stdout
    assert "DIFFERS" not in done.stdout


def test_a_part_that_takes_too_long_is_ended_and_told(tmp_path: Path) -> None:
    done = gpu_check(tmp_path, "--device", "cpu", "--small", "--seconds", "1.5")
    assert done.returncode == 1
    assert "gpu_check: correctness took longer than the 1 s that it may take" in done.stderr
    assert len(json.loads((tmp_path / "gpu_check.json").read_text())["faults"]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_at_once(tmp_path: Path) -> None:
    done = gpu_check(tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "gpu_check: no CUDA GPU is visible to torch; --device cpu --small runs the same without one\n"
    )
    assert not (tmp_path / "gpu_check.json").exists()


def test_a_python_without_torch_is_told(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "scripts" / "gpu_check.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "has no torch, transformers, peft, numpy; set PYTHON to one that has" in done.stderr


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@pytest.mark.usefixtures("parts")
def test_what_differs_is_found_and_is_a_sentence() -> None:
    import gpu_check
    import gpu_check_correctness as correctness

    told: list[dict[str, object]] = []
    report = correctness.Report("here", 1.0, lambda found: told.append(dict(found)))
    batch = correctness._batch(40)
    seen = correctness.see(correctness.learner("llama", "cpu", torch.float32), batch)
    correctness._compare(report, "same", seen, seen, correctness.EXACT)
    assert all(check.ok for check in report.checks)
    grown = {name: 1.01 * tensor for name, tensor in seen.gradient.items()}
    broken = seen.logprobs.copy()
    broken[3] = float("nan")
    correctness._compare(report, "odd", replace(seen, gradient=grown, logprobs=broken), seen, correctness.SINGLE)
    faults = gpu_check._faults("correctness", {**told[-1], "failed": None})
    assert faults == [
        "odd: log-probabilities differs by 1e+300, at most 0.0002 is allowed",
        "odd: gradient differs by 0.01, at most 0.002 is allowed",
    ]
    json.dumps(told[-1], allow_nan=False)


@pytest.mark.usefixtures("parts")
def test_too_little_memory_is_a_figure_and_a_shorter_row_is_tried() -> None:
    import gpu_check_speed as speed

    def attempt(length: int) -> speed.Row:
        if length > 5000:
            raise torch.OutOfMemoryError
        return speed.Row("one episode", length, tokens_per_s=7.0)

    rows = list(speed.longest_that_fits((16_384, 8_192, 4_096), attempt))
    assert [(row.tokens, row.missing) for row in rows] == [
        (16_384, "out of memory"),
        (8_192, "out of memory"),
        (4_096, None),
    ]
