"""All tampers, and the rows of the catalogue's first three sections that no script in a box can try."""

from __future__ import annotations

from collections.abc import Mapping

from palestra.envs.admission.forging import FORGING
from palestra.envs.admission.harness import HARNESS
from palestra.envs.admission.reading import READING
from palestra.envs.admission.tamper import Tamper

TAMPERS: tuple[Tamper, ...] = (*FORGING, *HARNESS, *READING)

ELSEWHERE: Mapping[str, str] = {
    "B26": "proof tasks: no environment here has any",
    "C13": "handles of output: a tool's argument, not a command; tested on the sandbox",
    "C14": "what an image carries: looked at on the engine, not from a box",
}
