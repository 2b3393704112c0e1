"""The learner: the only writer of weights.

One `update` is one optimiser step over all rows of a batch. Micro-batches are summed, never averaged, since the weights
of the action tokens hold the counts of the whole step. Dropout is off throughout: the policy that is trained is the one
that sampled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from palestra.envs.errors import ConfigError, IntegrityError
from palestra.rl import lora
from palestra.rl.batch import Batch, PackedRow, row_of_ids
from palestra.rl.checkpointing import checkpoint_layers
from palestra.rl.critic import Critic, critic_metrics, with_values
from palestra.rl.gguf import no_progress_bars
from palestra.rl.head import Head
from palestra.rl.learner_settings import HasObjective, LearnerSettings, UpdateStats
from palestra.rl.learner_state import LearnerState, capture, check_start, restore, whole_weights
from palestra.rl.logprobs import check_head
from palestra.rl.loss_scale import LossScale
from palestra.rl.members import join_actions
from palestra.rl.objective import ActionTokens, Objective, Terms, loss_terms
from palestra.rl.optimizer import make_optimizer
from palestra.rl.own_attention import adopt_packed_attention
from palestra.rl.ranks import Ranks
from palestra.rl.scorer import Scorer
from palestra.rl.spread import Replicated, Sharded, Spread, exchanged, gradient_parts, part
from palestra.rl.tally import Tally
from palestra.rollout.adapters import Adapter
from palestra.rollout.types import Float32

NOTHING = row_of_ids([0, 0])
"""What a rank without rows of its own computes, to no effect, while the others wait for it."""


class Learner:
    """Owns a model's weights, its adapter and its optimizer. One caller at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: LearnerSettings,
        *,
        seed: int = 0,
        start: Adapter | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Takes `model` over. `seed` makes the fresh adapter; `start` is put into it, and becomes the reference.

        Raises ConfigError when the model cannot be computed exactly in packed rows or trained as asked.
        """
        _check(model, settings, start)
        self.step = 0
        self.settings = settings
        self.ranks = ranks or Ranks()
        adopt_packed_attention(model)
        self._adapted = _adapted(model, settings.lora, seed, start) if settings.train == "lora" else None
        self._model = model.eval()
        check_head(model, Head.of(model))
        if settings.gradient_checkpointing:
            checkpoint_layers(model)
        self._loss_scale = LossScale() if model.dtype == torch.float16 else None
        self._sharded = settings.sharding == "shard" and self.ranks.size > 1
        self._spread: Spread = Sharded(self.ranks) if self._sharded else Replicated(self.ranks)
        self._scorer = Scorer(model)
        self._spread.install(self._scorer)
        self._named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        kept = start is not None or settings.keep_start
        self._start_digest = None if start is None else start.digest()
        self._start = {name: part(p).detach().clone() for name, p in self._named.items()} if kept else None
        self._optimizer = make_optimizer(settings.optimizer, list(self._named.values()))
        self._critic = None
        if settings.critic is not None:
            width = model.config.get_text_config().hidden_size
            self._critic = Critic(settings.critic, width, settings.optimizer, device=model.device, dtype=model.dtype)

    def update(
        self, batch: Batch, algorithm: HasObjective, old: Float32 | None = None, version: int | None = None
    ) -> UpdateStats:
        """One optimiser step. `old` [N], in row order, are the log-probabilities that ratios are taken to when a batch
        serves several steps (`sampled_logprobs` before the first); `version`, that of the weights when the batch was
        frozen, is what the age of tokens is counted from (None: that of now). Raises IntegrityError, with the weights
        untouched, when a gradient is not finite; ValueError for a batch without action tokens or an `old` of another
        length."""
        if not batch.num_actions:
            raise ValueError("a batch without action tokens teaches nothing; skip the step and publish no new version")
        started = time.perf_counter()
        version = self.step if version is None else version
        metrics, grad_norm = self._accumulate(batch, algorithm.objective, old, version)
        while not all(map(math.isfinite, (grad_norm, metrics["loss"], metrics.get("value_grad_norm", 0.0)))):
            self._forget_gradients()
            self._refuse(metrics["loss"], grad_norm)
            metrics, grad_norm = self._accumulate(batch, algorithm.objective, old, version)
        rate = self.settings.optimizer.rate_after(self.step)
        if self._critic is not None and "value_grad_norm" in metrics:
            self._critic.apply(metrics["value_grad_norm"], rate / self.settings.optimizer.learning_rate)
        self._step(grad_norm, rate)
        return UpdateStats(
            step=self.step,
            loss=metrics.pop("loss"),
            grad_norm=grad_norm,
            learning_rate=rate,
            action_tokens=batch.num_actions,
            row_tokens=batch.num_tokens,
            micro_batches=len(batch.rows),
            seconds=time.perf_counter() - started,
            metrics=metrics,
        )

    def adapter(self) -> Adapter:
        """A copy of what is trained, to publish: the adapter in force, or all weights (of rank 0 alone)."""
        if self._adapted is not None:
            return lora.extract(self._adapted, self._spread.whole)
        return Adapter({}, whole_weights(self._named, self._spread, keep=self.ranks.rank == 0))

    @torch.no_grad()
    def score(self, ids: Sequence[int]) -> Float32:
        """log p(ids[t] | ids[:t]) at temperature 1 under the weights in force, [L - 1] float32, for t = 1 to L - 1."""
        logprobs, _ = self._scorer(row_of_ids(ids))
        self._spread.rest()
        return np.asarray(logprobs.float().cpu().numpy(), np.float32)

    @torch.no_grad()
    def sampled_logprobs(self, batch: Batch) -> Float32:
        """Log-probabilities of the batch's action tokens, tempered as they were sampled, [N] float32 in row order."""
        return self._measure(batch, lambda row: self._scorer(row)[0])

    @torch.no_grad()
    def values(self, batch: Batch) -> Float32:
        """V of the state before each of the batch's action tokens, [N] float32 in row order.

        Raises ConfigError without a critic.
        """
        critic = self._critic
        if critic is None:
            raise ConfigError("this learner has no critic to ask for values; give it one (LearnerSettings.critic)")
        return self._measure(batch, lambda row: critic.values(self._scorer(row, hidden="only")[0]))

    def reference_logprobs(self, batch: Batch) -> Float32:
        """As `sampled_logprobs`, of the reference policy: adapter off, or the adapter that training began with."""
        with self._reference():
            return self.sampled_logprobs(batch)

    def state(self) -> LearnerState:
        """A copy of everything that changes, on the host of rank 0; on the other ranks, which take part, no tensors."""
        keep = self.ranks.rank == 0
        tensors = capture(self._named, self._optimizer, self._spread, keep=keep)
        if keep:
            tensors["rng/torch"] = torch.get_rng_state()
            if self._critic is not None:
                tensors |= self._critic.tensors()
            if self._loss_scale is not None:
                tensors["loss_scale"] = self._loss_scale.tensor()
        return LearnerState(self.step, self.settings.train, tensors, self._start_digest)

    def load_state(self, state: LearnerState) -> None:
        """Go on from the whole `state`, on every rank. Raises ConfigError, with nothing changed, when it is of other
        parameters or began with another adapter, which would be another reference."""
        check_start(state, self._start_digest)
        restore(state, self.settings.train, self._named, self._optimizer, self._spread)
        if self._critic is not None:
            self._critic.load(state.tensors)
        torch.set_rng_state(state.tensors["rng/torch"])
        if self._loss_scale is not None and "loss_scale" in state.tensors:
            self._loss_scale.restore(state.tensors["loss_scale"])
        self.step = state.step

    @no_progress_bars()
    def save_model(self, folder: str) -> None:
        """Write the whole model as a Hugging Face folder: all weights, or base plus adapter merged in float32.

        Raises ConfigError when the weights are in parts: a learner of one rank that has loaded the state can write it.
        """
        if self._sharded:
            raise ConfigError("the weights are in parts on several ranks; load the state in a learner of one, and save")
        if self._adapted is None:
            self._model.save_pretrained(folder)
        else:
            lora.save_merged(self._adapted, folder)

    def _measure(self, batch: Batch, of_row: Callable[[PackedRow], Tensor]) -> Float32:
        """[N] numbers of the batch's action tokens, in row order, from those of each row; ranks share the work."""
        found = torch.zeros(batch.num_actions, device=self._model.device)
        ends = np.cumsum([len(row.predictors) for row in batch.rows]).tolist()
        for row, end in self.ranks.share(list(zip(batch.rows, ends, strict=True))):
            num = len(row.predictors)
            if num or self._sharded:
                numbers = of_row(row if num else NOTHING)
                self._spread.rest()
                found[end - num : end] = numbers.float()[:num]
        return np.asarray(self.ranks.sum(found).cpu().numpy(), np.float32)

    def _accumulate(
        self, batch: Batch, objective: Objective, old: Float32 | None, version: int
    ) -> tuple[dict[str, float], float]:
        """Gradients of all rows of all ranks. Returns the metrics, "loss" among them, and the gradient's norm."""
        self._forget_gradients()  # of an update that raised between two rows
        tally = Tally(self._terms(None, objective, version))
        scale = 1.0 if self._loss_scale is None else self._loss_scale.value
        for row, old_of_row in self.ranks.share(_with_old(batch, old)):
            if len(row.predictors):
                terms = self._terms(row, objective, version, old_of_row)
                (terms.loss * scale).backward()
                tally.add(terms)
            elif self._sharded:
                self._take_part(objective)
        metrics = tally.metrics(batch.num_actions, self.ranks)
        parameters = list(self._named.values())
        self._spread.sum_gradients(parameters)
        if self._loss_scale is not None:
            torch._foreach_mul_(gradient_parts(parameters), 1.0 / scale)
            metrics |= {"loss_scale": scale, "overflows": float(self._loss_scale.overflows)}
        if self._critic is not None:
            metrics = critic_metrics(metrics, self._critic.sum_gradients(self.ranks, scale))
        return metrics, float(self._spread.norm(parameters))

    def _forget_gradients(self) -> None:
        """Leave the weights, the critic's too, as they are."""
        self._optimizer.zero_grad(set_to_none=True)
        if self._critic is not None:
            self._critic.forget_gradients()

    def _take_part(self, objective: Objective) -> None:
        """Compute nothing while other ranks compute a row: they gather weights and sum gradients with this one."""
        if objective.kl_in_loss:
            self._reference_logprobs(NOTHING)
        logprobs, _ = self._scorer(NOTHING)
        (logprobs.sum() * 0.0).backward()

    def _terms(self, row: PackedRow | None, objective: Objective, version: int, old: Float32 | None = None) -> Terms:
        """The terms of a row; of None, those of no tokens, under the same names."""
        if row is None:
            nothing = torch.zeros(0, device=self._model.device)
            nobody = join_actions([])
            tokens = ActionTokens.of(nobody, nothing.device, nothing.dtype)
            terms = loss_terms(objective, nothing, tokens, reference=nothing, entropy=nothing, version=version)
            return terms if self._critic is None else with_values(terms, self._critic.terms(None, nobody))
        reference = self._reference_logprobs(row) if objective.kl_in_loss else None
        logprobs, entropy, *hidden = self._scorer(
            row,
            entropy_gradient=objective.entropy_coefficient > 0,
            smoothing=objective.label_smoothing,
            hidden="drop" if self._critic is None else "keep",
        )
        tokens = ActionTokens.of(row.actions, logprobs.device, logprobs.dtype)
        frozen = None if old is None else torch.from_numpy(old).to(logprobs)
        terms = loss_terms(
            objective, logprobs, tokens, old=frozen, reference=reference, entropy=entropy, version=version
        )
        return terms if self._critic is None else with_values(terms, self._critic.terms(hidden[0], row.actions))

    @torch.no_grad()
    def _reference_logprobs(self, row: PackedRow) -> Tensor:
        with self._reference():
            logprobs: Tensor = self._scorer(row)[0]
            self._spread.rest()
        return logprobs

    def _reference(self) -> AbstractContextManager[None]:
        """Inside, the model is the reference policy: adapter off, or the weights that training began with."""
        if self._start is not None:
            return exchanged(self._named, self._start)
        if self._adapted is None:
            raise ConfigError(
                'a KL needs a reference, and all weights are trained: set keep_start, model.train to "lora" or the KL '
                "to 0"
            )
        return lora.reference(self._adapted)

    def _refuse(self, loss: float, norm: float) -> None:
        """Lower the loss scale in float16. Raises IntegrityError elsewhere, and when that cannot help."""
        if self._loss_scale is not None and math.isfinite(loss):
            self._loss_scale.overflowed(self.step + 1)
            return
        raise IntegrityError(
            f"update {self.step + 1}: loss {loss} with gradient norm {norm}; the weights were left as they "
            "are. Look at log_rho_abs_max of the steps before, and at the precision of the model"
        )

    def _step(self, norm: float, rate: float) -> None:
        """Clip by the norm of all gradients of all ranks, and step."""
        parts = gradient_parts(list(self._named.values()))
        torch._foreach_mul_(parts, min(1.0, self.settings.optimizer.max_grad_norm / (norm + 1e-6)))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self._loss_scale is not None:
            self._loss_scale.worked()


def _with_old(batch: Batch, old: Float32 | None) -> list[tuple[PackedRow, Float32 | None]]:
    """Each row with its part of `old`."""
    if old is None:
        return [(row, None) for row in batch.rows]
    if old.shape != (batch.num_actions,):
        raise ValueError(f"old has shape {old.shape}, but the batch has {batch.num_actions} action tokens in its rows")
    ends = np.cumsum([len(row.predictors) for row in batch.rows])
    return list(zip(batch.rows, np.split(old, ends[:-1]), strict=True))


def _check(model: PreTrainedModel, settings: LearnerSettings, start: Adapter | None) -> None:
    if settings.train == "full" and start is not None:
        raise ConfigError('an initial adapter needs model.train = "lora"')
    if settings.train == "full" and model.dtype not in (torch.float32, torch.float64):
        raise ConfigError(f"model.dtype is {model.dtype}: full training loses small updates there; use float32 or lora")


def _adapted(
    model: PreTrainedModel, settings: lora.LoraSettings, seed: int, start: Adapter | None
) -> lora.AdaptedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = lora.attach(model, settings)
    if start is not None:
        lora.insert(adapted, start)
    return adapted
