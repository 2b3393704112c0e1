"""Settings of [algorithm] that nothing reads, because of another setting beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reader:
    """`settings` are read only where the setting `by` has one of the values `having`."""

    settings: tuple[str, ...]
    by: str
    having: tuple[object, ...]


CAPPED = ("token_tis", "turn_tis", "turn_geo_tis", "turn_geo_mask", "seq_tis", "seq_geo_tis", "seq_geo_mask")

READERS = (
    Reader(("clip_low", "clip_high"), "surrogate", ("ppo", "cispo_two_sided")),
    Reader(("dual_clip",), "surrogate", ("ppo",)),
    Reader(("dppo_max_ratio",), "surrogate", ("dppo_tv", "dppo_kl")),
    Reader(("tis_cap",), "correction", CAPPED),
    Reader(("length_norm_tokens",), "aggregation", ("seq-mean-token-sum-norm",)),
    Reader(("max_refills", "when_uninformative"), "dynamic_sampling", (True,)),
    Reader(("ddof", "eps"), "std", ("group", "batch", None)),  # None: an algorithm with one way to divide
    Reader(("alpha",), "lam", (None,)),
)
"""What make_objective and make_correction refuse by themselves is not repeated here."""


def idle(settings: Mapping[str, Any], usual: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for every setting that has no effect and is not as `usual`, the value where none is given: a resolved
    configuration holds those of all settings, and means nothing by them."""
    for reader in READERS:
        decides = settings[reader.by]
        if decides in reader.having:
            continue
        for name in reader.settings:
            if settings[name] != usual[name]:
                yield (
                    f"algorithm.{name} is {shown(settings[name])}, but algorithm.{reader.by} is {shown(decides)}, "
                    f"where nothing reads it; leave it out, or set {reader.by} to what does: {_readers(reader)}"
                )
    if settings["kl"] != usual["kl"] and settings["kl_coefficient"] == 0:
        yield (
            f"algorithm.kl is {settings['kl']}, but algorithm.kl_coefficient is 0, so it weighs nothing; give a "
            "kl_coefficient, such as 0.001, or leave the kl out"
        )


def _readers(reader: Reader) -> str:
    """The values, without the None of an algorithm that has no such setting."""
    return ", ".join(shown(value) for value in reader.having if value is not None) or "none"


def shown(value: object) -> str:
    """As it stands in a file."""
    if value is None:
        return "off"
    return str(value).lower() if isinstance(value, bool) else str(value)
