"""Experts: the local experts of one rank, run over rows that are sorted by expert.

Shapes: T tokens, k choices, R rows, n rows of one expert, N columns of a row: M, the hidden size, and those
beside the hidden state; H expert hidden size, E experts: in parameters the local ones.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.device import on_device
from penstock.features.sample_placement.feature import PACKED_COLUMNS
from penstock.mesh import Group
from penstock.moe.permute.slots import places
from penstock.moe.permute.sort import Permutation, PermutationPlan, RowPlan, SortPermutation
from penstock.moe.products import Product, grouped_product
from penstock.moe.routers import Choice, ExpertChoice, TokenChoice, Tokens
from penstock.placement import SPLIT, ExpertPlacement, Part, Replication
from penstock.routing.routes import GroupSizes
from penstock.sharding import Shard


class ExpertShard(Shard):
    """This rank's place among `size` ranks that share every expert, each a part of its hidden width."""

    axes = Group.SHARDS


ONE_SHARD = ExpertShard()


class Experts(nn.Module, ABC):
    """The experts that this rank holds.

    Attributes:
        num_local_experts: The number of experts here.
        shard: The part of each expert that this rank has.
    """

    num_local_experts: int
    shard: ExpertShard = ONE_SHARD

    @abstractmethod
    def forward(self, rows_RM: Tensor, sizes: Sequence[int], product: Product = grouped_product) -> Tensor:
        """Return the experts' outputs for rows_RM, [R, M]: the first sizes[0] rows meet expert 0, and so on.

        Args:
            sizes: Rows per expert.
            product: How rows and weights are multiplied; it decides when weight gradients are computed.
                Experts that do not use it get theirs together with the input gradients.
        """

    @abstractmethod
    def split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        """Cut a parameter, or a tensor that belongs to it, into experts.

        Checkpoints and initial weights know an expert by its number in the whole model.

        Args:
            name: The parameter's name.

        Yields:
            The name without the expert, the expert's number on this rank, and a view, for every expert.
        """

    @property
    def stacked(self) -> bool:
        """Whether a parameter has a dimension that counts experts, as far as the first parameter tells."""
        for name, parameter in self.named_parameters():
            return any(part.shape != parameter.shape for _, _, part in self.split(name, parameter.detach()))
        return True

    def replicas(self, slots: int) -> Experts:
        """Return experts of this kind for `slots` of other ranks' experts, whose parameters will be brought.

        The parameters are new, of the same types, and trained where this rank's are.

        Raises:
            ValueError: If this kind of experts cannot have replicas.
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
        for parameter in self.parameters():
            room = parameter.new_zeros(slots, *parameter.shape[1:])
            made[id(parameter)] = nn.Parameter(room, requires_grad=parameter.requires_grad)
        twin = copy.deepcopy(self, made)  # with the new parameters in place of its own
        twin.num_local_experts = slots
        return twin


# ---- feed-forward experts: those of early MoE models, with GELU, and SwiGLU of present ones; shared
# experts (DeepSeekMoE, Qwen), a network that every token passes, whatever its gate says


INITIAL_STD = 0.02


class FeedForwardExperts(StackedExperts):
    """Experts with matrices into a hidden width and one back; each shard has a part of that width.

    The outputs of a shard are partial sums.

    Args:
        ffn_hidden_size: The hidden width of whole experts.
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


NUMBERED = re.compile(r"(?P<before>(?:^|.*?\.)expert_modules\.)(?P<number>\d+)\.(?P<after>.+)")


class ModuleExperts(Experts):
    """Experts that `make` returns one by one, each a module that maps [n, M] to [n, M], n > 0.

    They multiply as they like: their weight gradients come with the input gradients and cannot be deferred.
    An expert without rows is not called, and its parameters get no gradient; inside a stack they get zeros.
    Under autocast, rows that may travel to them have its type, and their outputs are cast to it.

    Raises:
        ValueError: If `make` returns a module twice.
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
        match = NUMBERED.fullmatch(name)
        if match is None:
            raise ValueError(
                f"{name} is no parameter of ModuleExperts: expected ...expert_modules.<number>...."
            )
        yield match["before"] + match["after"], int(match["number"]), tensor

    def replicas(self, slots: int) -> Experts:
        first = self.expert_modules[0]
        return ModuleExperts(lambda: copy.deepcopy(first), slots)


# ---- targets of a layer's rows, and the experts that compute the rows that come here ----------------------
#
# Without replicas an expert's rows go to where its placement says. While ranks hold others' experts as
# replicas, a rank's rows of an expert are split among several positions, here or on the way, and a replica
# computes them with parameters that were brought to it.
# Here H are the positions among which an expert's rows are split.


STRIDE = 2531
"""SPLIT divided by the golden ratio, made odd: any run of rows is shared among positions in the same way."""


@dataclass(frozen=True)
class OwnSlots:
    """Slots without replicas: every expert is where it is placed."""

    permutation: Permutation
    experts: Experts
    placement: ExpertPlacement

    def placed(self, choice: Choice) -> Choice:
        """Return the choice by position instead of by expert.

        Costs a copy of E integers to the device, and nothing under the default placement.
        """
        if self.placement.is_even:
            return choice
        if isinstance(choice, TokenChoice):
            # The entry after the last expert keeps padding at -1.
            table = on_device((*self.placement.positions, -1), choice.experts_Tk.device)
            return replace(choice, experts_Tk=table[choice.experts_Tk])
        experts = on_device(self.placement.by_position, choice.weights.device)
        if isinstance(choice, ExpertChoice):
            return replace(choice, tokens_ES=choice.tokens_ES[experts], weights=choice.weights[experts])
        mix_BLES, weights = (part.index_select(2, experts) for part in (choice.mix_BLES, choice.weights))
        return replace(choice, mix_BLES=mix_BLES, weights=weights)


@dataclass(frozen=True)
class SlotsWithReplicas:
    """Slots with replicas: some experts are on several ranks.

    Attributes:
        permutation: The permutation by position, replicas among them.
        spread: Maps the experts of this rank's rows to positions; None: rows stay by expert, and are split
            among its positions when the counts of all ranks are known.
    """

    permutation: Permutation
    experts: Experts
    spread: Spread | None

    def placed(self, choice: Choice) -> Choice:
        """Return the choice by position instead of by expert."""
        assert isinstance(choice, TokenChoice), "a permutation that takes replicas takes no others"
        return choice if self.spread is None else replace(choice, experts_Tk=self.spread(choice.experts_Tk))


class Spread:
    """Maps experts to positions, by the splits of one rank.

    Of the rows of an expert on this rank the n-th goes to the position that has part `n * STRIDE` modulo
    SPLIT. So the rows of any sample, chunk and microbatch are shared in about the same way.
    """

    def __init__(self, splits: Sequence[Sequence[Part]], device: torch.device) -> None:
        self._most = max(map(len, splits))
        ends = [[*accumulate(part.parts for part in parts)] for parts in splits]
        self._ends_EH = on_device([self._filled(row, SPLIT) for row in ends], device)
        positions = [[part.position for part in parts] for parts in splits]
        self._positions_EH = on_device([self._filled(row, -1) for row in positions], device)

    def __call__(self, experts_Tk: Tensor) -> Tensor:
        """Return positions for experts, [T, k]; -1 stays -1."""
        clamped_Tk = experts_Tk.clamp(min=0)
        positions_TkH = self._positions_EH[clamped_Tk]
        if self._most == 1:
            return positions_TkH.squeeze(2).masked_fill_(experts_Tk < 0, -1)
        phase_Tk = places(experts_Tk, len(self._ends_EH)) * STRIDE % SPLIT
        part_Tk = (phase_Tk.unsqueeze(2) >= self._ends_EH[clamped_Tk]).sum(dim=2)
        position_Tk1 = positions_TkH.gather(2, part_Tk.clamp(max=self._most - 1).unsqueeze(2))
        return position_Tk1.squeeze(2).masked_fill_(experts_Tk < 0, -1)

    def _filled(self, row: Sequence[int], value: int) -> list[int]:
        return [*row, *[value] * (self._most - len(row))]


class OwnAndReplicas(Experts):
    """A rank's own experts, then its replicas, as experts of one rank. Not a module of the model."""

    def __init__(self, own: Experts, replicas: Experts) -> None:
        super().__init__()
        self.num_local_experts = own.num_local_experts + replicas.num_local_experts
        self.shard = own.shard
        self.own, self.others = own, replicas

    def forward(self, rows_RM: Tensor, sizes: Sequence[int], product: Product = grouped_product) -> Tensor:
        here = self.own.num_local_experts
        own, others = GroupSizes(sizes[:here]), GroupSizes(sizes[here:])
        if not any(others):
            out_RM: Tensor = self.own(rows_RM, own, product)
            return out_RM
        own_RM, others_RM = rows_RM.split([sum(own), sum(others)])
        return torch.cat([self.own(own_RM, own, product), self.others(others_RM, others, product)])

    def split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        raise AssertionError(f"{name} {list(tensor.shape)}: parameters are those of the layer's own experts")


def slots_with_replicas(
    own: Experts, replicas: Experts, permutation: Permutation, replication: Replication, spread: Spread | None
) -> SlotsWithReplicas:
    """Return the slots of a layer whose ranks hold replicas.

    Args:
        spread: See `SlotsWithReplicas`.

    Raises:
        ValueError: If the permutation takes no replicas.
    """
    with_slots = (
        permutation
        if spread is None
        else permutation.with_slots(replication.placement.ranks, replication.slots)
    )
    return SlotsWithReplicas(with_slots, OwnAndReplicas(own, replicas), spread)


# ---- what a row is: one of a layer's tokens, or its residual stream, which comes back with the experts'
# outputs
#
# Where samples move (NetMoE), the residual stream has to come to a token's new home, since the token's
# outputs are added to it there. The token's rows pass the experts' ranks on the way, so they bring it: a row
# leaves home with the residual stream r instead of its norm, the weight w of the choice, and a number c that
# is 1 in the row of the first choice and 0 in all others; at the experts the row becomes w * E(norm(r)) + c *
# r. The sum of a token's rows is then the whole output of the block, whatever the weights add up to, and no
# additional row has travelled.


@dataclass(frozen=True)
class OwnTokens:
    """Rows are the layer's tokens, and padding has none."""

    def chosen(self, choice: Choice, tokens: Tokens, home: int) -> Choice:
        """Return the choice by position, including whatever else has to travel."""
        del tokens, home
        return choice

    def rows(self, permutation: Permutation, x_TM: Tensor, choice: Choice, plan: PermutationPlan) -> Tensor:
        """Return the rows in expert order."""
        return permutation.permute(x_TM, choice, plan)


@dataclass(frozen=True)
class ResidualRows(OwnTokens):
    """Rows are those of the residual stream, with columns beside it; padding has one row per token."""

    residual_TM: Tensor

    def chosen(self, choice: Choice, tokens: Tokens, home: int) -> Choice:
        """Return the choice with padding sent to position `home` of its own rank, with a weight of 0."""
        assert isinstance(choice, TokenChoice), "samples move where tokens choose"
        if tokens.valid_T is None:
            return choice
        valid_T1 = tokens.valid_T.unsqueeze(1)
        carrier_1k = torch.full_like(choice.experts_Tk[:1], -1)
        carrier_1k[:, :1] = home
        return replace(
            choice,
            experts_Tk=torch.where(valid_T1, choice.experts_Tk, carrier_1k),
            weights=choice.weights.masked_fill(~valid_T1, 0),
            masked=True,
        )

    def rows(self, permutation: Permutation, x_TM: Tensor, choice: Choice, plan: PermutationPlan) -> Tensor:
        """Return the rows in expert order, [R, N]."""
        del x_TM
        assert isinstance(permutation, SortPermutation) and isinstance(choice, TokenChoice), "see `chosen`"
        rows: RowPlan = plan.rows
        kept_RM = rows.take(self.residual_TM)
        weight_of_row_R = rows.weight_of_row_R
        weights_R = choice.weights.flatten().index_select(0, weight_of_row_R)
        first_R = weight_of_row_R % choice.weights.shape[1] == 0
        return torch.cat([kept_RM, *(each.to(kept_RM).unsqueeze(1) for each in (weights_R, first_R))], dim=1)


TOKENS = OwnTokens()


def given_back(
    rows_RN: Tensor, norm: Callable[[Tensor], Tensor], experts: Callable[[Tensor], Tensor], *, residual: bool
) -> Tensor:
    """Return what experts make of rows that carry the residual stream: w * E(norm(r)) + c * r, [R, M].

    Args:
        residual: Whether c * r is added here; of several ranks that compute a row, one adds it.
    """
    columns = [rows_RN.shape[1] - PACKED_COLUMNS, *[1] * PACKED_COLUMNS]
    kept_RM, weights_R1, first_R1 = (part.contiguous() for part in rows_RN.split(columns, dim=1))
    weighted_RM = experts(norm(kept_RM)) * weights_R1
    return torch.addcmul(weighted_RM, kept_RM, first_R1) if residual else weighted_RM
