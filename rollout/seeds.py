"""Seeds that name what they are for: the same parts, the same seed on any machine; no two requests share one."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**31) from the run's seed and what it is used for. derive_seed(7, "group-3", 0, "turn", 2)"""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % 2**31
