"""Keys and values kept between the turns of a session, so that only what is new gets computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

KeyValues = list[tuple[Tensor, Tensor]]
"""Per layer: keys and values, each [1, heads, tokens, width]."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The keys and values of `ids` under the weights of one load (counted, since a version may be loaded twice)."""

    ids: tuple[int, ...]
    load: int
    layers: KeyValues

    @property
    def num_bytes(self) -> int:
        """Memory of all layers."""
        return sum(t.numel() * t.element_size() for pair in self.layers for t in pair)


class KeptSessions:
    """The newest state of each session within a bound of bytes; the least recently used goes first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, Kept] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def put(self, session: str, kept: Kept) -> None:
        """Keep it in place of what the session had; what alone exceeds the bound is not kept."""
        self.drop(session)
        self._held[session] = kept
        self.num_bytes += kept.num_bytes
        while self.num_bytes > self._max_bytes:
            self.drop(next(iter(self._held)))

    def prefix(self, session: str, prompt: Sequence[int], load: int) -> KeyValues | None:
        """What can be reused for `prompt`: the common prefix by ids, under the same load, short of the last token."""
        kept = self._held.get(session)
        if kept is None or kept.load != load:
            return None
        self._held.move_to_end(session)
        common = _common(kept.ids, prompt[:-1])  # the last token must run, since its logits are wanted
        if common == 0:
            return None
        return [(keys[:, :, :common], values[:, :, :common]) for keys, values in kept.layers]

    def drop(self, session: str) -> None:
        """Forget a session. Idempotent."""
        kept = self._held.pop(session, None)
        if kept is not None:
            self.num_bytes -= kept.num_bytes


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))
