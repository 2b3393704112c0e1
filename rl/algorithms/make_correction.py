"""From the [algorithm] settings to the correction of the mismatch."""

from __future__ import annotations

from palestra.envs.errors import ConfigError
from palestra.rl.corrections import (
    OPSM,
    Correction,
    GeometricMask,
    GeometricTIS,
    IcePop,
    ProductMask,
    ProductTIS,
    TokenClamp,
    TokenTIS,
)
from palestra.rl.segments import Level
from palestra.rl.settings_objective import ObjectiveSettings

BANDED = ("token_clamp", "icepop", "turn_mask", "turn_geo_mask", "seq_mask", "seq_geo_mask")


def make_correction(settings: ObjectiveSettings) -> Correction | None:
    """How the mismatch of trainer and engine is corrected; None: not at all.

    Raises ConfigError for a bound that is missing, or given to a correction that has none.
    """
    name = settings.correction
    if name not in BANDED and (settings.correction_low is not None or settings.correction_high is not None):
        raise ConfigError(
            f"algorithm.correction_low and correction_high bound {', '.join(BANDED)}, but algorithm.correction is "
            f"{name}; leave them out or choose one of these"
        )
    if (name == "opsm") != (settings.opsm_delta is not None):
        raise ConfigError(
            f"algorithm.correction is {name} with opsm_delta {settings.opsm_delta}; opsm needs one, such as 0.1, and "
            "no other correction has it"
        )
    if name == "none" or (name == "token_tis" and settings.tis_cap is None):
        return None
    if settings.opsm_delta is not None:
        return OPSM(settings.opsm_delta)
    return _banded(settings) if name in BANDED else _capped(settings)


def _capped(settings: ObjectiveSettings) -> Correction:
    name, cap = settings.correction, settings.tis_cap
    if cap is None:
        raise ConfigError(f"algorithm.correction is {name}, which needs a cap, but tis_cap is off; use 2.0, say")
    if name == "token_tis":
        return TokenTIS(cap)
    return (GeometricTIS if "_geo_" in name else ProductTIS)(_level(name), cap)


def _banded(settings: ObjectiveSettings) -> Correction:
    name, low, high = settings.correction, settings.correction_low, settings.correction_high
    if name in ("turn_mask", "seq_mask"):
        if high is None:
            raise ConfigError(f"algorithm.correction is {name}, which needs algorithm.correction_high, such as 2.0")
        return ProductMask(_level(name), high, low or 0.0)
    if low is None or high is None:
        raise ConfigError(
            f"algorithm.correction is {name}, which needs algorithm.correction_low and correction_high, such as 0.5 "
            "and 2.0; calibrate them on log_rho_abs_max and turn_log_rho_abs_max of a run without"
        )
    if name == "token_clamp":
        return TokenClamp(low, high)
    if name == "icepop":
        return IcePop(low, high)
    return GeometricMask(_level(name), low, high, settings.tis_cap)


def _level(name: str) -> Level:
    return "turn" if name.startswith("turn_") else "sequence"
