"""Small repositories with a fault each, written for this environment: what they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break a kind of repository. `good` stands exactly once in the module `path`."""

    path: str
    good: str
    bad: str
    issue: str
    fails: tuple[str, ...]  # names of the hidden tests that fail with it; all others pass


@dataclass(frozen=True, slots=True)
class Kind:
    """A repository without a fault, its tests that everybody sees, and those that judge."""

    name: str
    modules: Mapping[str, str]
    visible: str  # tests/test_basics.py: passes with every fault
    hidden: str  # tests/test_hidden.py
    faults: tuple[Fault, ...]
