"""How a learner's weights lie over its ranks: whole on each of them, or a part on each.

Replicated: every rank holds all weights, gradients and moments; gradients are summed in one exchange per update.
Sharded: every rank holds 1/size of each tensor (FSDP2). A decoder layer's weights are gathered just before the layer is
computed, forward and backward, and given back after; each gradient is summed into the parts where it is created.

Both sum gradients over ranks, never average them: the weights of the action tokens hold the counts of the whole step.
Everything here that talks to other ranks must be called by all of them, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from palestra.envs.errors import ConfigError, IntegrityError
from palestra.rl.ranks import Ranks


class Spread(Protocol):
    """What a learner asks of the layout of its weights."""

    def install(self, root: nn.Module) -> None:
        """Lay the weights out. `root` is what a pass calls; parameters may be other objects afterwards."""
        ...

    def rest(self) -> None:
        """After a pass without a backward: give gathered weights back."""
        ...

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """After the last backward: gradients are those of all ranks' rows."""
        ...

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Of all gradients together, the same on all ranks; a scalar."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """The tensor that `tensor` is this rank's view of."""
        ...

    def fill(self, tensor: Tensor, whole: Tensor) -> None:
        """Overwrite this rank's part of a tensor from the whole of it."""
        ...


class Replicated:
    """All weights on every rank; alone, nothing is exchanged."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def install(self, root: nn.Module) -> None:
        """As Spread.install: the weights stay as they are."""

    def rest(self) -> None:
        """As Spread.rest: nothing was gathered."""

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """As Spread.sum_gradients."""
        self._ranks.sum_gradients(parameters)

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """As Spread.norm; every rank has all gradients."""
        return torch.nn.utils.get_total_norm(gradient_parts(parameters))

    def whole(self, tensor: Tensor) -> Tensor:
        """As Spread.whole: itself."""
        return tensor

    def fill(self, tensor: Tensor, whole: Tensor) -> None:
        """As Spread.fill."""
        with torch.no_grad():
            tensor.copy_(whole)


class Sharded:
    """1/size of each tensor on every rank, cut along its first dimension; a rank's part of a short one may be empty."""

    def __init__(self, ranks: Ranks) -> None:
        """On this process's CUDA device, or the CPU where there is none."""
        self._ranks = ranks
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._root: FSDPModule | None = None

    def install(self, root: nn.Module) -> None:
        """As Spread.install. Raises ConfigError for a model without decoder layers to cut at, IntegrityError when
        parameters are not in parts afterwards."""
        mesh = init_device_mesh(self._device, (self._ranks.size,))
        layers = [module for module in root.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise ConfigError(
                "this model has no decoder layers that its weights could be sharded by; set cluster.learner_sharding "
                'to "replicate"'
            )
        for module in (*layers, root):
            sharded = fully_shard(module, mesh=mesh)
            sharded.set_gradient_divide_factor(1.0)  # sums, and not by way of an average
            sharded.set_force_sum_reduction_for_comms(True)
        assert isinstance(root, FSDPModule), root
        self._root = root
        check_sharded(root, self._ranks)

    def rest(self) -> None:
        """As Spread.rest: embeddings and head stay gathered between forward and backward, and there was no backward."""
        assert self._root is not None, "install comes first"
        self._root.reshard()

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """As Spread.sum_gradients: each backward has done it."""

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """As Spread.norm: the root of the sum of the parts' squares."""
        parts = [part for part in gradient_parts(parameters) if part.numel()]
        square = torch.nn.utils.get_total_norm(parts).square() if parts else torch.zeros(())
        return self._ranks.sum(square.to(self._device)).sqrt()

    def whole(self, tensor: Tensor) -> Tensor:
        """As Spread.whole: gathered from all ranks where it is in parts."""
        with torch.no_grad():
            return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def fill(self, tensor: Tensor, whole: Tensor) -> None:
        """As Spread.fill: every rank has the whole and takes its part, without exchange."""
        with torch.no_grad():
            if isinstance(tensor, DTensor):
                cut = distribute_tensor(
                    whole.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
                )
                tensor.to_local().copy_(cut.to_local())
            else:
                tensor.copy_(whole)


def check_sharded(root: nn.Module, ranks: Ranks) -> None:
    """Raise IntegrityError unless every parameter is cut into `ranks.size` parts, of which this rank holds its own.

    A trainer that falls back to whole copies without a word runs, and runs out of memory where it was bought to fit.
    """
    for name, parameter in root.named_parameters():
        if not isinstance(parameter, DTensor):
            raise IntegrityError(f"{name} is whole on rank {ranks.rank}, though weights are to be sharded")
        chunks = torch.empty(parameter.shape[0], device="meta").chunk(ranks.size)
        wanted = len(chunks[ranks.rank]) if ranks.rank < len(chunks) else 0
        found = parameter.to_local().shape[0]
        if found != wanted:
            raise IntegrityError(
                f"rank {ranks.rank} holds {found} of the {parameter.shape[0]} rows of {name}; {wanted} are its part"
            )


@contextmanager
def exchanged(named: Mapping[str, nn.Parameter], others: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the parameters hold `others`, which are parts as this process holds them."""
    own = {name: part(parameter).detach().clone() for name, parameter in named.items()}
    _write(named, others)
    try:
        yield
    finally:
        _write(named, own)


@torch.no_grad()
def _write(named: Mapping[str, nn.Parameter], parts: Mapping[str, Tensor]) -> None:
    for name, parameter in named.items():
        part(parameter).copy_(parts[name])


def part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient_parts(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """What this process holds of the gradients that are there."""
    return [part(parameter.grad) for parameter in parameters if parameter.grad is not None]
