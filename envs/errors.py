"""The tree of errors. Whose fault it was is decided by the class, at the border where it happened.

PalestraError
├── ConfigError             a wrong setting; exit code 2, before anything has started
├── ScoreError              a judge's number is none; the episode has no verdict
├── InfrastructureError     nobody's policy did this: the episode leaves the group and is tried again
│   ├── SandboxError        a box could not be made, reached or reset
│   ├── EngineError         an inference engine failed or died
│   └── VerifierError       a judge failed to judge
└── IntegrityError          something is wrong without looking wrong: the run stops
"""

from __future__ import annotations


class PalestraError(Exception):
    """Base of everything that Palestra raises on purpose."""


class ConfigError(PalestraError, ValueError):
    """A setting is wrong. The message says what was found, what was expected and what to do."""


class ScoreError(PalestraError, ValueError):
    """What was to be a score is no finite number."""


class InfrastructureError(PalestraError, RuntimeError):
    """A machine, a daemon or a network failed. Never a reward; bounded retries, then the run stops."""


class SandboxError(InfrastructureError):
    """A sandbox could not do what its contract promises, for no fault of the command in it."""


class EngineError(InfrastructureError):
    """An inference engine failed, died or refused a request that it should have served."""


class VerifierError(InfrastructureError):
    """A verifier could not reach a verdict."""


class IntegrityError(PalestraError, RuntimeError):
    """Numbers that must agree do not. Training on them would be silent and wrong, so the run stops."""
