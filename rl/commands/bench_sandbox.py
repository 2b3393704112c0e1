"""`palestra bench sandbox`, also `palestra sandbox bench`: print what sandboxes cost here."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from palestra.rl.bench_sandbox import measure
from palestra.rl.exit_codes import DONE, FAILED
from palestra.rl.terminal import Terminal


def run_bench_sandbox(json_file: Path | None) -> int:
    """Print the figures, and write them as one JSON object when asked to; exit code 1 when a box was left behind."""
    figures = asyncio.run(measure(Terminal().say))
    for name, value in figures.items():
        for row in value if isinstance(value, list) else [value]:
            print(f"{name:24} {_short(row)}")
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return FAILED if figures["leaked"] else DONE


def _short(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(part)}" for name, part in value.items())
    return "not measured" if value is None else str(value)
