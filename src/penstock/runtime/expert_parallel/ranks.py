"""Marks on parameters that say which ranks hold an expert, or the other parts of a parameter.

The mark stays with a parameter through `.to()` and in any list. A copy of a parameter, or a parameter put in
its place, has none until the layer's next forward.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.mesh import Group
from penstock.moe import MoELayer
from penstock.runtime.transport import Transport
from penstock.sharding import sharding_of
from penstock.topology import Layout

MARK, PARTS_MARK, STACKED_MARK = "penstock_ranks", "penstock_ranks_of_parts", "penstock_stacked"
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """The ranks that train together and how their experts are spread.

    device: where the transport takes tensors. number: counts what was built in this process, so that all
    ranks choose the same one of several.
    """

    layout: Layout
    transport: Transport
    device: torch.device
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def is_first_in_edp(self) -> bool:
        """Whether this rank's experts are the ones that count; other ranks may hold further replicas."""
        return self.layout.mesh.place(self.layout.rank, Group.EXPERT_DATA) == 0

    def gather(self, row: Tensor) -> Tensor:
        """Return every rank's `row` [N], as [ranks, N] on this rank's device, bit by bit the same on all."""
        table = torch.zeros(self.layout.world_size, *row.shape, dtype=row.dtype, device=self.device)
        table[self.layout.rank] = row
        self.transport.all_reduce(table, Group.WORLD)
        return table

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertRanks:
        """Return this very object: a copy of a parameter lives on the same ranks."""
        del memo
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle the mark as an empty OrderedDict, a type that torch.load always accepts."""
        return OrderedDict, ()


class MarksExperts(nn.Module):
    """A module that marks the experts of all its layers by itself."""

    def mark_experts(self) -> None:
        """Mark them again, as far as copying has lost marks."""
        raise NotImplementedError


def mark_all(model: nn.Module) -> None:
    """Mark the experts of every layer and stack in `model`."""
    for module in model.modules():
        if isinstance(module, MarksExperts):
            module.mark_experts()
        elif isinstance(module, MoELayer) and module.exchange is not None:
            module.exchange.adopt(module.experts)


def mark_experts(parameters: Iterable[Tensor], ranks: ExpertRanks, *, stacked: bool = True) -> None:
    """Mark these parameters with their experts' ranks, and with the tag that Megatron and DeepSpeed use.

    stacked: whether one parameter has the weights of several experts.
    """
    for parameter in parameters:
        parameter.allreduce = False  # type: ignore[attr-defined]  # the tag that other tools read
        setattr(parameter, MARK, ranks)
        setattr(parameter, STACKED_MARK, stacked)


def ranks_of(parameter: Tensor) -> ExpertRanks | None:
    """Return the ranks that hold an expert's parameter; None for a parameter that every rank holds.

    Raises ValueError for an expert whose ranks are not known.
    """
    if getattr(parameter, "allreduce", True) is not False:
        return None
    ranks = getattr(parameter, MARK, None)
    if not isinstance(ranks, ExpertRanks):
        raise ValueError(
            f"a parameter of shape {list(parameter.shape)} has allreduce = False, so it is an expert's, but "
            "which ranks hold the other experts is not known: pass the module that it belongs to, or run its "
            "layer's forward before"
        )
    return ranks


def mark_parts(parameters: Iterable[Tensor], ranks: ExpertRanks) -> None:
    """Mark parameters that `penstock.sharding` has marked as parts with the ranks of the other parts."""
    for parameter in parameters:
        if sharding_of(parameter) is not None:
            setattr(parameter, PARTS_MARK, ranks)


def ranks_of_parts(parameter: Tensor) -> ExpertRanks | None:
    """Return the ranks that hold the other parts of a parameter; None for a whole one.

    Raises ValueError for a part whose ranks are not known.
    """
    if sharding_of(parameter) is None:
        return None
    ranks = getattr(parameter, PARTS_MARK, None)
    if not isinstance(ranks, ExpertRanks):
        raise ValueError(
            f"a parameter of shape {list(parameter.shape)} is a part of a larger one, and which ranks hold "
            "the others is not known: pass the stack that it belongs to"
        )
    return ranks


Whole = Literal["tensor", "model"]


def share_of(parameter: Tensor, *, whole: Whole) -> str:
    """Return of what this parameter is only a share, in words; "" where this rank has all of it.

    whole: what must be there: the tensor that the parameter is on one process, or the model.
    """
    if (sharding := sharding_of(parameter)) is not None:
        return f"one of {sharding.count} parts of a tensor"
    ranks = getattr(parameter, MARK, None)
    if not isinstance(ranks, ExpertRanks) or ranks.layout.ep_size == 1:
        return ""
    if whole == "tensor" and not getattr(parameter, STACKED_MARK, True):
        return ""
    return f"the experts of one of {ranks.layout.ep_size} ranks"


def is_marked(parameter: Tensor) -> bool:
    """Return whether this very object has been marked as an expert's."""
    return isinstance(parameter, nn.Parameter) and isinstance(getattr(parameter, MARK, None), ExpertRanks)
