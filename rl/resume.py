"""Where a run goes on: the newest complete checkpoint, or the one that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from palestra.envs.errors import ConfigError
from palestra.rl.checkpoints import Checkpoints, broken, places, step_of
from palestra.rl.job import Start
from palestra.rl.run_folder import RunFolder


def find_start(folder: RunFolder, resume: str, say: Callable[[str], None]) -> Start:
    """The start of this life of the run. Raises ConfigError when the step that was asked for is not there."""
    if resume.isdigit():
        return _at(folder, int(resume), say)
    begun = (folder.path / "ledger.sqlite").exists()
    found = Checkpoints(folder.checkpoints, base="").newest()  # which base it is of is checked when it is loaded
    if found is None:
        if begun:
            say("no checkpoint yet: this run begins again at step 0")
        return Start()
    for why in found.skipped:
        say(f"skipped: {why}")
    for later in places(folder.checkpoints):
        if step_of(later) > found.step:  # else it would count among the newest that are kept, in place of a good one
            say(f"{later.name} is kept as {_set_aside(later, 'broken')}")
    say(f"resuming from {found.folder} (step {found.step})")
    return Start(found.step, found.folder)


def _at(folder: RunFolder, step: int, say: Callable[[str], None]) -> Start:
    """From an older checkpoint: later ones leave the lineage, but are kept under another name."""
    place = folder.checkpoints / f"step_{step:06d}"
    problem = broken(place) if place.exists() else "there is no such checkpoint"
    if problem is not None:
        have = [path.name for path in places(folder.checkpoints) if broken(path) is None]
        raise ConfigError(f"{place}: {problem}; complete checkpoints: {', '.join(have) or 'none'}")
    for later in places(folder.checkpoints):
        if step_of(later) > step:
            say(f"{later.name} is of a lineage that ends here; kept as {_set_aside(later, 'undone')}")
    say(f"resuming from {place}")
    return Start(step, place)


def _set_aside(place: Path, why: str) -> str:
    """Under another name, which no checkpoint has. Returns it."""
    number = 0
    while (aside := place.with_name(f"{why}_{place.name}_{number}")).exists():
        number += 1
    place.rename(aside)
    return aside.name
