"""Publishing a version, and proving that it landed.

Every engine gives a receipt with the digest of what it received and the number of modules that it bound. Then the
trainer and every engine score the same fixed rows: their log-probabilities must agree, and differ from the version
before. What trains on weights that nobody samples from looks like training; this is what notices.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from palestra.envs.errors import IntegrityError
from palestra.rl.one_thread import compute
from palestra.rollout.adapters import Adapter
from palestra.rollout.types import Float32, Receipt

SEEN = 1e-6
"""A change of the trainer's log-probabilities above this must be seen in every engine's too."""

STOOD_STILL = 0.1
"""Of the trainer's change; an engine that moved by less did not take the new weights."""


class Publishes(Protocol):
    """The engines, all of them."""

    async def publish(self, adapter: Adapter, version: int) -> tuple[Receipt, ...]: ...

    async def score_each(self, ids: Sequence[int]) -> tuple[Float32, ...]:
        """What each replica says of one row, [L - 1]."""
        ...


class Scores(Protocol):
    """The trainer, as far as it publishes."""

    def adapter(self) -> Adapter: ...

    def score(self, ids: Sequence[int]) -> Float32: ...


@dataclass(frozen=True, slots=True)
class Proof:
    """What a publish showed. Natural-log units, over all probe tokens and replicas."""

    version: int
    digest: str
    matched_modules: int
    mode: str
    gap: float  # largest difference of engine and trainer
    gap_mean: float
    moved: float | None  # largest difference from the version before, of the engine that moved least; None: the first
    seconds: float


class Publisher:
    """Publishes the learner's weights and keeps what the engines said of the version before."""

    def __init__(self, engines: Publishes, learner: Scores, rows: Sequence[Sequence[int]], max_gap: float) -> None:
        """`rows`: ids to probe with, a few tens of tokens in all; `max_gap` stops the run when exceeded."""
        self._engines, self._learner, self._max_gap = engines, learner, max_gap
        self.rows = rows
        self._before: tuple[str, Float32, list[Float32]] | None = None  # digest, trainer, each replica
        self.proofs: list[Proof] = []

    async def publish(self, version: int) -> Proof:
        """Serve the learner's weights as `version` everywhere. Raises IntegrityError when the proof fails, EngineError
        when an engine cannot take it; the version before is then still in force."""
        begun = time.monotonic()
        adapter = await compute(self._learner.adapter)
        receipts = await self._engines.publish(adapter, version)
        digest = await compute(adapter.digest)
        _check_receipts(receipts, version, digest, adapter.num_parts)
        trainer = np.concatenate([await compute(self._learner.score, row) for row in self.rows])
        scored = [await self._engines.score_each(row) for row in self.rows]
        replicas = [np.concatenate(parts) for parts in zip(*scored, strict=True)]
        gaps = np.stack([np.abs(replica - trainer) for replica in replicas])
        moved = self._moved(digest, trainer, replicas)
        proof = Proof(
            version=version,
            digest=digest,
            matched_modules=receipts[0].matched_modules,
            mode=receipts[0].mode,
            gap=float(gaps.max()),
            gap_mean=float(gaps.mean()),
            moved=moved,
            seconds=time.monotonic() - begun,
        )
        if not proof.gap <= self._max_gap:
            raise IntegrityError(
                f"version {version}: engine and trainer differ by {proof.gap:.3g} in log-probability on the probe, "
                f"more than rollout.max_logprob_gap = {self._max_gap:g}. The engine does not serve what is trained"
            )
        self._before = (digest, trainer, replicas)
        self.proofs.append(proof)
        return proof

    def _moved(self, digest: str, trainer: Float32, replicas: list[Float32]) -> float | None:
        if self._before is None:
            return None
        old_digest, old_trainer, old = self._before
        if len(old) != len(replicas):  # all of them served the same weights
            old = [old[0]] * len(replicas)
        moved = min(float(np.abs(new - before).max()) for new, before in zip(replicas, old, strict=True))
        expected = float(np.abs(trainer - old_trainer).max())
        # not exactly 0: the same weights score the same row a little differently in another batch
        if digest != old_digest and expected > SEEN and moved <= STOOD_STILL * expected:
            raise IntegrityError(
                f"the trainer's log-probabilities moved by {expected:.3g} since the version before, but those of an "
                f"engine by {moved:.3g}: it still serves the old weights"
            )
        return moved


def _check_receipts(receipts: Sequence[Receipt], version: int, digest: str, modules: int) -> None:
    if not receipts:
        raise IntegrityError(f"version {version}: no engine gave a receipt")
    for receipt in receipts:
        found = (receipt.version, receipt.digest, receipt.matched_modules)
        if found != (version, digest, modules):
            raise IntegrityError(
                f"engine {receipt.engine}: received version {receipt.version}, digest {receipt.digest[:12]}, and bound "
                f"{receipt.matched_modules} of {modules} modules; expected version {version}, digest {digest[:12]}"
            )
