"""Experts: the local experts of one rank, run over rows that are sorted by expert."""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.mesh import Group
from penstock.moe.products import Product, grouped_product
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


# ---- feed-forward experts: those of early MoE models, with GELU, and SwiGLU of present ones; shared
# experts (DeepSeekMoE, Qwen), a network that every token passes, whatever its gate says
#
# Shapes: R rows, M hidden size, H expert hidden size, E local experts.


INITIAL_STD = 0.02


class FeedForwardExperts(StackedExperts):
    """Experts with matrices into a hidden width and one back; each shard has a part of that width.

    The outputs of a shard are partial sums. ffn_hidden_size: of whole experts.
    """

    inward: tuple[str, ...]

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_local_experts: int,
        shard: ExpertShard = ONE_SHARD,
    ) -> None:
        super().__init__(num_local_experts)
        self.shard = shard
        width = ffn_hidden_size // shard.size
        for name in self.inward:
            setattr(self, name, weight(num_local_experts, hidden_size, width))
        self.w_down = weight(num_local_experts, width, hidden_size)
        into, back = (hidden_size, ffn_hidden_size), (ffn_hidden_size, hidden_size)
        cut = {**{name: shard.cut(1, into) for name in self.inward}, "w_down": shard.cut(0, back)}
        self.shardings = shard.among(cut)


class GeluExperts(FeedForwardExperts):
    """Two matrices per expert with GELU between."""

    inward = ("w_up",)
    w_up: nn.Parameter

    def forward(self, rows_RM: Tensor, sizes: Sequence[int], product: Product = grouped_product) -> Tensor:
        hidden_RH = F.gelu(product(rows_RM, self.w_up, sizes))
        return product(hidden_RH, self.w_down, sizes)


class SwiGLUExperts(FeedForwardExperts):
    """Three matrices per expert: silu(x W_gate) * (x W_up), then W_down (Mixtral)."""

    inward = ("w_gate", "w_up")
    w_gate: nn.Parameter
    w_up: nn.Parameter

    def forward(self, rows_RM: Tensor, sizes: Sequence[int], product: Product = grouped_product) -> Tensor:
        gate_RH = F.silu(product(rows_RM, self.w_gate, sizes))
        return product(gate_RH * product(rows_RM, self.w_up, sizes), self.w_down, sizes)


def weight(experts: int, rows: int, columns: int) -> nn.Parameter:
    """Return stacked matrices [experts, rows, columns], drawn as small as a decoder's weights."""
    made = nn.Parameter(torch.empty(experts, rows, columns))
    return made if made.is_meta else nn.Parameter(nn.init.normal_(made.data, std=INITIAL_STD))


class SharedExpert(nn.Module):
    """One expert of any kind over all tokens. Several shared experts are one network of their summed width.

    It waits for no transfer: in a stack it is a task of its own that runs while rows are in transit.
    """

    def __init__(self, expert: Experts) -> None:
        super().__init__()
        self.expert = expert

    def forward(self, x_TM: Tensor) -> Tensor:
        out_TM: Tensor = self.expert(x_TM, [len(x_TM)])
        return out_TM


# ---- any module as an expert ------------------------------------------------------------------------------
#
# Shapes: R rows, M hidden size, n rows of one expert.


NUMBERED = re.compile(r"(?P<before>(?:^|.*?\.)expert_modules\.)(?P<number>\d+)\.(?P<after>.+)")


class ModuleExperts(Experts):
    """Experts that `make` returns one by one, each a module that maps [n, M] to [n, M], n > 0.

    They multiply as they like: their weight gradients come with the input gradients and cannot be deferred.
    An expert without rows is not called, and its parameters get no gradient; inside a stack they get zeros.
    Raises ValueError if `make` returns a module twice.
    """

    def __init__(self, make: Callable[[], nn.Module], num_local_experts: int) -> None:
        super().__init__()
        self.num_local_experts = num_local_experts
        self.expert_modules = nn.ModuleList(make() for _ in range(num_local_experts))
        if len({id(module) for module in self.expert_modules}) < num_local_experts:
            raise ValueError("`make` returned the same module twice: every expert needs weights of its own")

    def forward(self, rows_RM: Tensor, sizes: Sequence[int], product: Product = grouped_product) -> Tensor:
        del product
        parts = zip(self.expert_modules, rows_RM.split(list(sizes)), strict=True)
        outputs = list[Tensor]()
        for expert, part_nM in parts:
            if not len(part_nM):
                continue
            outputs.append(expert(part_nM))
            if outputs[-1].shape != part_nM.shape:
                raise ValueError(
                    f"{type(expert).__name__} as an expert must return what it gets, rows of shape "
                    f"{list(part_nM.shape)}, and returned {list(outputs[-1].shape)}"
                )
        return torch.cat(outputs) if outputs else rows_RM

    def split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        found = NUMBERED.fullmatch(name)
        if found is None:
            raise ValueError(
                f"{name} is no parameter of ModuleExperts: expected ...expert_modules.<number>...."
            )
        yield found["before"] + found["after"], int(found["number"]), tensor

    def replicas(self, slots: int) -> Experts:
        first = self.expert_modules[0]
        return ModuleExperts(lambda: copy.deepcopy(first), slots)
