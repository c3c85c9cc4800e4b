"""Base classes of experts: the local experts of one rank, run over rows that are sorted by expert."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from penstock.mesh import Group
from penstock.moe.experts.product import Product, grouped_product
from penstock.sharding import Shard


class ExpertShard(Shard):
    """This rank's place among `size` ranks that share every expert, each a part of its hidden width."""

    axes = Group.SHARDS


ONE_SHARD = ExpertShard()


class Experts(nn.Module, ABC):
    """The experts that this rank holds. num_local_experts: how many. shard: the part of each that it has."""

    num_local_experts: int
    shard: ExpertShard = ONE_SHARD

    @abstractmethod
    def forward(self, rows_RM: Tensor, sizes: Sequence[int], product: Product = grouped_product) -> Tensor:
        """Return the experts' outputs for rows_RM, [R, M]: the first sizes[0] rows meet expert 0, and so on.

        product: how rows and weights are multiplied; it decides when weight gradients are computed. Experts
        that do not use it get theirs together with the input gradients.
        """

    @abstractmethod
    def split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        """Cut a parameter (or what belongs to it) into experts: name without the expert, number, view.

        Checkpoints and initial weights know an expert by its number in the whole model.
        """

    @property
    def stacked(self) -> bool:
        """Whether a parameter has a dimension that counts experts, as far as the first parameter tells."""
        for name, parameter in self.named_parameters():
            return any(part.shape != parameter.shape for _, _, part in self.split(name, parameter.detach()))
        return True

    def replicas(self, slots: int) -> Experts:
        """Return experts of this kind for `slots` of other ranks' experts, whose parameters will be brought.

        The parameters are new, of the same types, and trained where this rank's are. Raises ValueError if
        this kind of experts cannot have replicas.
        """
        raise ValueError(
            f"{type(self).__name__} has no method `replicas`, which makes room for {slots} experts of other "
            "ranks: give it one, or move no experts (placement.experts=none)"
        )


class StackedExperts(Experts):
    """Experts of one architecture, every parameter stacked along dimension 0."""

    def __init__(self, num_local_experts: int) -> None:
        super().__init__()
        self.num_local_experts = num_local_experts

    def split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        for number, part in enumerate(tensor.unbind()):
            yield name, number, part

    def replicas(self, slots: int) -> Experts:
        made: dict[int, Any] = {}
        for found in self.parameters():
            room = found.new_zeros(slots, *found.shape[1:])
            made[id(found)] = nn.Parameter(room, requires_grad=found.requires_grad)
        twin = copy.deepcopy(self, made)  # with the new parameters in place of its own
        twin.num_local_experts = slots
        return twin
