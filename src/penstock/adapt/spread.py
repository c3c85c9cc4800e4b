"""Experts that are spread over ranks, outside of steps: running them, and saving and reading their adapters.

Shapes: T tokens, M hidden size, k choices per token.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.adapt.cut import Cut
from penstock.adapt.passes import Passes
from penstock.families.adapters import ExpertAxis, axes_of, core_of
from penstock.features.dispatch import find_dispatch
from penstock.graph import Lane
from penstock.mesh import Group
from penstock.moe import MoELayer, RouteMaker
from penstock.moe.permute.sort import SortPermutation
from penstock.runtime import Machinery
from penstock.runtime.transport import Later, exchange_counts, send_home, send_out


class Spread:
    """Sends tokens to the experts of all ranks and back, without gradients.

    All ranks that share them call it. passes: the model's, of which each comes here once. width: numbers that
    experts get for a token.
    """

    def __init__(self, machinery: Machinery, moe: MoELayer, passes: Passes, width: int) -> None:
        self._machinery, self._moe, self._passes, self._width = machinery, moe, passes, width
        self._maker = RouteMaker(find_dispatch("flat"), machinery.layout.place, False)
        passes.meetings.append(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the spread for a copy of the layer, on the same machinery."""
        twin = memo[id(self)] = copy.copy(self)
        twin._moe = copy.deepcopy(self._moe, memo)
        twin._passes = copy.deepcopy(self._passes, memo)
        return twin

    def __call__(self, x_TM: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        with self._passes.at(self), torch.no_grad():
            return self._exchanged(x_TM.to(self._dtype), experts_Tk, weights_Tk).to(x_TM.dtype)

    @torch.no_grad()
    def take_part(self) -> None:
        """Compute this rank's experts on the tokens of others, with none of its own."""
        x_TM = torch.empty(0, self._width, dtype=self._dtype, device=self._machinery.device)
        none_Tk = x_TM.new_empty(0, 1)
        self._exchanged(x_TM, none_Tk.long(), none_Tk)

    @property
    def _dtype(self) -> torch.dtype:
        """The type of rows, in which experts multiply them: the same on all ranks."""
        device = self._machinery.device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return next(self._moe.experts.parameters()).dtype

    def _exchanged(self, x_TM: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        order, transport = self._moe.permutation, self._machinery.transports.of(Lane.INTER, Group.EXPERT)
        assert isinstance(order, SortPermutation)
        plan = order.arrange(experts_Tk, (len(x_TM),), masked=False)
        assert plan.counts_CN is not None
        route = Later.of(exchange_counts(plan.counts_CN, self._maker, transport)).slices[0]
        rows_RM = plan.rows.take(x_TM)
        for leg in route.legs:
            rows_RM = send_out(rows_RM, leg, transport)
        rows_RM = self._moe.expert_rows(rows_RM, route)
        for leg in reversed(route.legs):
            rows_RM = send_home(rows_RM, leg, transport)
        return order.unpermute(rows_RM, weights_Tk, plan)


class NarrowSpread(Spread):
    """The same where ranks share every expert: they bring their tokens together, and add up parts of sums."""

    def _exchanged(self, x_TM: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        layout, transport = self._machinery.layout, self._machinery.transports.of(Lane.INTER, Group.SHARDS)
        size_12 = torch.tensor([experts_Tk.shape], device=x_TM.device)
        sizes_S2 = transport.all_gather(size_12, [1] * layout.etp_size, Group.SHARDS)
        sizes, top_k = sizes_S2[:, 0].tolist(), int(sizes_S2[:, 1].max())
        given = (x_TM, *(each.reshape(len(x_TM), top_k) for each in (experts_Tk, weights_Tk)))
        every = [transport.all_gather(each.contiguous(), sizes, Group.SHARDS) for each in given]
        sum_TM = super()._exchanged(*every)
        transport.all_reduce(sum_TM, Group.SHARDS)
        mine_TM: Tensor = sum_TM.split(sizes)[layout.etp_rank]
        return mine_TM


class _Hook:
    """A hook on state dictionaries of a block whose experts, and so their adapters, are spread over ranks.

    A class, since torch marks such hooks, which is impossible for a method. All ranks ask for state
    dictionaries together, and peft saves and reads adapters as those of the whole model.
    """

    def __init__(self, cut: Cut, machinery: Machinery) -> None:
        self.cut, self.machinery = cut, machinery

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the hook for a copy of the block, whose hooks are copied with it, on the same machinery."""
        return type(self)(copy.deepcopy(self.cut, memo), self.machinery)

    def adapters(self, prefix: str) -> Iterator[tuple[str, nn.Parameter, ExpertAxis]]:
        """Yield the adapters' names in a state dictionary, the parameters, and how experts lie in them."""
        self.cut.follow()
        experts, path = self.cut.experts, self.cut.family.experts
        own, axes = set(core_of(experts).parameters()), axes_of(experts)
        for name, parameter in experts.named_parameters():
            if parameter not in own:
                yield f"{prefix}{path}.{name}", parameter, axes[parameter]


class JoinAdapters(_Hook):
    """Joins the adapters of all ranks' experts in a state dictionary."""

    def __call__(self, block: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        del block, metadata
        layout, control = self.machinery.layout, self.machinery.control
        for name, _, axis in self.adapters(prefix):
            everyone = control.gather(state[name].detach().cpu(), f"gathering {name}")
            parts = [everyone[rank] for rank in layout.mesh.members(layout.rank, Group.EXPERT)]
            state[name] = axis.join(parts).to(state[name].device)


class TakeAdapters(_Hook):
    """Takes this rank's part of adapters that are loaded.

    Raises ValueError unless they are of all experts.
    """

    def __call__(self, block: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        del block, others
        layout = self.machinery.layout
        for name, parameter, axis in self.adapters(prefix):
            if (whole := state.get(name)) is None:
                continue
            if tuple(whole.shape) != (wanted := axis.whole_shape(tuple(parameter.shape), layout.ep_size)):
                raise ValueError(
                    f"{name} {list(whole.shape)} is no adapter of all experts here, which is {list(wanted)}: "
                    "read adapters of this model, of the same rank"
                )
            state[name] = axis.part(whole, layout.ep_rank, layout.ep_size).clone()
