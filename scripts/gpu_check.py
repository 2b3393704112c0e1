"""The check of one GPU: parts run one after the other, each in a process of its own with a time limit.

A part that hangs, runs out of memory or breaks the device takes no other with it. A part writes its results as it goes,
so what it had found before its time was over is still told. Exit codes: 0 all agrees, 1 something differs or failed, 2
wrong usage.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
PARTS = {"correctness": 0.36, "speed of 0.6B": 0.26, "speed of 4B": 0.38}
"""Share of all seconds that each part may take at most."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for; handed on to the parts."""

    device: str
    small: bool
    tolerance_factor: float


def main() -> int:
    """Run the parts, print the tables, write the JSON."""
    arguments = _arguments()
    asked = Asked(arguments.device, arguments.small, arguments.tolerance_factor)
    if arguments.part is not None:
        return _be_part(arguments.part, asked, Path(arguments.result), arguments.seconds)
    missing = [name for name in ("torch", "transformers", "peft", "numpy") if not importlib.util.find_spec(name)]
    if missing:
        return _wrong(f"{sys.executable} has no {', '.join(missing)}; set PYTHON to one that has")
    results: dict[str, Any] = {}
    begun = time.monotonic()
    parts = list(PARTS)[:2] if asked.small else list(PARTS)  # little models have one shape
    for part in parts:
        print(f"{part} ...", flush=True)
        results[part] = _run(part, PARTS[part] * arguments.seconds, asked)
        if (wrong := results[part].get("wrong")) is not None:
            return _wrong(wrong)
        for line in _lines(part, results[part]):
            print(line, flush=True)
    faults = [fault for part, found in results.items() for fault in _faults(part, found)]
    whole = {
        "ok": not faults,
        "faults": faults,
        "seconds": round(time.monotonic() - begun, 1),
        "asked": {"device": asked.device, "small": asked.small, "tolerance_factor": asked.tolerance_factor},
        "parts": results,
    }
    Path(arguments.json).write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    print(f"{whole['seconds']} s; all figures in {arguments.json}")
    for fault in faults:
        print(f"gpu_check: {fault}", file=sys.stderr)
    return 1 if faults else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="one little model and short rows: what a CPU can do")
    parser.add_argument("--seconds", type=float, default=450.0, help="for all parts together")
    parser.add_argument("--json", default="gpu_check.json", help="where the figures go")
    parser.add_argument("--tolerance-factor", type=float, default=1.0, help="on every difference that is allowed")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(part: str, limit_s: float, asked: Asked) -> dict[str, Any]:
    """What a part found, and how it ended: {"seconds": ..., "failed": None or a sentence, ...}"""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--part", part, "--result", str(result)]
        command += ["--device", asked.device, "--tolerance-factor", str(asked.tolerance_factor)]
        command += ["--seconds", str(limit_s)]
        command += ["--small"] if asked.small else []
        begun, failed = time.monotonic(), None
        try:
            done = subprocess.run(
                command, env=QUIET | os.environ, stderr=subprocess.PIPE, text=True, timeout=limit_s, check=False
            )
            said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing was said"]
            if done.returncode == 2:
                return {"wrong": said[-1]}
            if done.returncode:
                failed = f"ended with status {done.returncode}: {said[-1]}"
        except subprocess.TimeoutExpired:
            failed = f"took longer than the {limit_s:.0f} s that it may take"
        found: dict[str, Any] = json.loads(result.read_text()) if result.is_file() else {}
        return found | {"seconds": round(time.monotonic() - begun, 1), "failed": failed}


def _be_part(part: str, asked: Asked, result: Path, limit_s: float) -> int:
    begun = time.monotonic()
    _lay_out_names()
    import torch

    if asked.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA GPU is visible to torch; --device cpu --small runs the same without one", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")  # float32 is to be compared with the CPU's

    def tell(found: Mapping[str, Any]) -> None:
        """Whole or not at all: the time may be over at any moment."""
        fresh = result.with_suffix(".fresh")
        fresh.write_text(json.dumps(found), encoding="utf-8")
        fresh.replace(result)

    if part == "correctness":
        from gpu_check_correctness import check_all

        check_all(asked.device, asked.small, asked.tolerance_factor, tell)
    else:
        from gpu_check_speed import measure_all

        # what is left of the time after the imports, less what the last measurement may still need
        measure_all(part.rpartition(" ")[2], asked.device, asked.small, begun + 0.5 * limit_s, tell)
    return 0


def _lay_out_names() -> None:
    """`import palestra.rl` finds this checkout's `rl`, whether or not anything is installed."""
    spec = ModuleSpec("palestra", None, is_package=True)
    spec.submodule_search_locations = [str(ROOT)]
    sys.modules["palestra"] = importlib.util.module_from_spec(spec)


def _faults(part: str, found: Mapping[str, Any]) -> list[str]:
    """What must not be, one sentence each."""
    faults = [f"{part} {found['failed']}"] if found["failed"] else []
    for check in found.get("checks", ()):
        if not check["ok"]:
            faults.append(f"{check['what']} differs by {check['found']:.3g}, at most {check['allowed']:.3g} is allowed")
    return faults


def _lines(part: str, found: Mapping[str, Any]) -> list[str]:
    """The part as a table."""
    lines = [f"  {found['device']}" if "device" in found else "  nothing found"]
    for check in found.get("checks", ()):
        verdict = "ok" if check["ok"] else "DIFFERS"
        lines.append(f"  {check['what']:66} {check['found']:10.2e} of {check['allowed']:8.1e}  {verdict}")
    for row in found.get("rows", ()):
        if row["missing"] is not None:
            lines.append(f"  {row['what']:44} {row['tokens']:7,} tokens  {row['missing']}")
        else:
            lines.append(
                f"  {row['what']:44} {row['tokens']:7,} tokens {row['tokens_per_s']:10,.0f} tokens/s "
                f"{row['step_s']:8.2f} s/update {row['peak_gib']:7.2f} GiB at most"
            )
    return [*lines, f"  {found['seconds']} s" + (f"; {part} {found['failed']}" if found["failed"] else "")]


def _wrong(sentence: str) -> int:
    print(f"gpu_check: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
