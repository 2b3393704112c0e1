"""`palestra export`."""

from __future__ import annotations

from pathlib import Path

from palestra.envs.errors import ConfigError
from palestra.rl.exit_codes import DONE
from palestra.rl.export import DTYPES, export_adapter, export_merged, find_learned, refuse_existing
from palestra.rl.terminal import Terminal


def run_export(place: Path, to: Path, *, merged: bool, dtype: str | None) -> int:
    """Write what a run or a checkpoint holds to a new folder. Raises ConfigError with nothing written."""
    refuse_existing(to)
    if dtype is not None and not merged:
        raise ConfigError("--dtype is of whole weights; add --merged, or leave it out: factors stay in float32")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}; use one of {', '.join(DTYPES)}")
    terminal = Terminal()
    learned = find_learned(place)
    terminal.say(f"exporting {learned.where}, on the base in {learned.base}")
    if merged:
        chosen = dtype or learned.config.model.dtype
        lost = export_merged(learned, to, chosen)
        if lost:
            terminal.say(
                f"rounding to {chosen} is {lost:.0%} of the size of the update; the adapter alone loses nothing"
            )
        terminal.say(f"{to}: whole weights in {chosen}, with the tokenizer; load it as model.path")
    else:
        export_adapter(learned, to)
        terminal.say(f"{to}: the adapter as peft has it, with the tokenizer; load it as model.lora.initial")
    return DONE
