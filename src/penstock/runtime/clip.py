"""The gradient norm of a model whose experts are spread over ranks, clipping by it, and the marks it reads.

A rank has three kinds of gradients: those of its experts, which count where they are the first of their
replicas; those of parameters that it shares with other ranks of a node, whose parts count once each; and
those of parameters that it holds whole, as all ranks do. Marks on parameters say which is which, and which
ranks hold the rest. A mark stays with a parameter through `.to()` and in any list. A copy of a parameter, or
a parameter put in its place, has none until the next forward.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from penstock.copies import Mark
from penstock.device import device_of, is_dtensor
from penstock.mesh import Group
from penstock.moe import MoELayer
from penstock.runtime.parts import living_stacks
from penstock.runtime.transport import HostCounts, Transport
from penstock.sharding import MARK as PART_MARK
from penstock.sharding import PartMark, sharding_of
from penstock.topology import Layout
from penstock.topology.faults import ACTIVITY, explain

MARK, STACKED_MARK, SHARDED = "penstock_ranks", "penstock_stacked", "penstock_sharded"
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class ExpertRanks(Mark):
    """The ranks that train together and how their experts are spread.

    Attributes:
        device: Where the transport takes tensors.
        number: Counts what was built in this process, so that all ranks choose the same one of several.
    """

    layout: Layout
    transport: Transport
    device: torch.device
    number: int = field(default_factory=lambda: next(_numbers))

    @cached_property
    def is_first_in_edp(self) -> bool:
        """Whether this rank's experts are the ones that count; other ranks may hold further replicas."""
        return self.layout.mesh.place(self.layout.rank, Group.EXPERT_DATA) == 0

    @cached_property
    def with_same_parts(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that hold the same parts of what ranks share."""
        return self.layout.mesh.groups(Group.DATA)

    def gather(self, row: Tensor) -> Tensor:
        """Return every rank's `row` [N], as [ranks, N] on this rank's device, bit by bit the same on all."""
        table = torch.zeros(self.layout.world_size, *row.shape, dtype=row.dtype, device=self.device)
        table[self.layout.rank] = row
        self.transport.all_reduce(table, Group.WORLD)
        return table


def mark_all(model: nn.Module) -> None:
    """Mark the experts of every layer in `model` that runs by itself; a stack has marked its own."""
    for module in model.modules():
        if isinstance(module, MoELayer) and module.exchange is not None:
            module.exchange.adopt(module.experts)


def mark_experts(parameters: Iterable[Tensor], ranks: ExpertRanks, *, stacked: bool = True) -> None:
    """Mark these parameters with their experts' ranks, and with the tag that Megatron and DeepSpeed use.

    Args:
        stacked: Whether one parameter has the weights of several experts.
    """
    for parameter in parameters:
        parameter.allreduce = False  # type: ignore[attr-defined]  # the tag that other tools read
        setattr(parameter, MARK, ranks)
        setattr(parameter, STACKED_MARK, stacked)


def ranks_of(parameter: Tensor) -> ExpertRanks | None:
    """Return the ranks that hold an expert's parameter; None for a parameter that every rank holds.

    Raises:
        ValueError: For an expert whose ranks are not known.
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


def ranks_of_parts(parameter: Tensor) -> ExpertRanks | None:
    """Return the ranks that hold the other parts of a parameter; None for a whole one.

    Raises:
        ValueError: For a part whose ranks are not known.
    """
    mark = getattr(parameter, PART_MARK, None)
    if not isinstance(mark, PartMark):
        return None
    if not isinstance(mark.ranks, ExpertRanks):
        raise ValueError(
            f"a parameter of shape {list(parameter.shape)} is a part of a larger one, and which ranks hold "
            "the others is not known: pass the stack that it belongs to"
        )
    return mark.ranks


Whole = Literal["tensor", "model"]


def share_of(parameter: Tensor, *, whole: Whole) -> str:
    """Return of what this parameter is only a share, in words; "" where this rank has all of it.

    Args:
        whole: What must be there: the tensor that the parameter is on one process, or the model.
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


OWNERS: WeakSet[Any] = WeakSet()
"""What has gradients of parameters in shares."""


class _Sharded:
    """The mark of a parameter whose gradients are in shares, as long as what owns the shares exists."""

    def __init__(self, owner: object) -> None:
        self.owner = ref(owner)
        OWNERS.add(owner)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle the mark as an empty OrderedDict, a type that torch.load always accepts."""
        return OrderedDict, ()


def mark_sharded(parameters: Iterable[Tensor], owner: object) -> None:
    """Mark parameters whose gradients lie in shares of `owner`."""
    for parameter in parameters:
        setattr(parameter, SHARDED, _Sharded(owner))


def is_sharded(parameter: Tensor) -> bool:
    """Return whether the gradients of a parameter lie in shares."""
    mark = getattr(parameter, SHARDED, None)
    return isinstance(mark, _Sharded) and mark.owner() is not None


# ---- the norm, and clipping by it --------------------------------------------------------------------------


TINY = 1e-6
EQUAL = 1e-5
"""Relative difference up to which ranks have the same norm; reduced gradients are equal bit by bit."""


@torch.no_grad()
def clip_grad_norm_(
    model_or_parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`.

    Like `torch.nn.utils.clip_grad_norm_`, and correct where experts are spread over ranks: every expert
    counts once, whatever the layout; so does a parameter that stands in the list twice, of which ranks have
    parts (tensor parallelism), or that is sharded (DTensor). Every rank gets the same norm to the last bit,
    so what ranks share stays equal.

    With experts on several ranks all of them must call it, when gradients are finished: after `backward`. It
    costs one all-reduce of 24 bytes per rank, and on a GPU the host waits.

    Args:
        model_or_parameters: A module (a `PipelinedStack`, one in `DistributedDataParallel`, any other), or
            parameters in any order; parameters without a gradient count nothing.
        max_norm: The largest norm that is left; `math.inf` only measures.
        norm_type: p of the p-norm, above 0; `math.inf` for the largest entry.
        error_if_nonfinite: Whether a norm that is not finite is an error.
        foreach: As in `torch.nn.utils.clip_grad_norm_`.

    Returns:
        The norm before scaling, a float64 scalar.

    Raises:
        ValueError: If a setting makes no sense.
        RuntimeError: If gradients that all ranks share differ between them, if not every rank takes part, or,
            with `error_if_nonfinite`, if the norm is not finite.
    """
    if not float(max_norm) >= 0:
        raise ValueError(
            f"max_norm = {max_norm}: must be 0 or more, or gradients would change their sign. Use 1.0, or "
            "math.inf to measure only"
        )
    if not float(norm_type) > 0:
        raise ValueError(f"norm_type = {norm_type}: must be above 0. Use 2.0, or math.inf")
    parameters = _parameters_of(model_or_parameters)
    device = parameters[0].device if parameters else torch.device("cpu")
    norm = _total_norm(parameters, float(norm_type), foreach, device)
    if error_if_nonfinite:
        _check_finite(norm, norm_type)
    if max_norm != math.inf:
        scale = (max_norm / (norm + TINY)).clamp(max=1.0)
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in _gradients(parameters):
            here = gradient.to_local() if is_dtensor(gradient) else gradient
            here = here._values() if here.is_sparse else here
            groups.setdefault((here.device, here.dtype), []).append(here)
        for (there, dtype), group in groups.items():
            factor = scale.to(there, dtype)
            if foreach is False:
                for gradient in group:
                    gradient.mul_(factor)
            else:
                torch._foreach_mul_(group, factor)
    return norm


def follow_torch() -> None:
    """Let torch's own `clip_grad_norm_`, wherever it was imported, count experts of scheduled models once.

    torch has no hook for that: what is replaced is the function by which it measures.
    """
    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = _norm_of_torch


_TORCH_NORM = clip_grad._get_total_norm


@torch.no_grad()
def _norm_of_torch(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Return the norm of gradients, which may be those of scheduled models."""
    grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    by_grad = {id(p.grad): p for stack in living_stacks() for p in stack.parameters() if p.grad is not None}
    parameters: list[Any] = [by_grad.get(id(grad), SimpleNamespace(grad=grad)) for grad in grads]
    if not any(share_of(each, whole="model") for each in parameters):
        return _TORCH_NORM(grads, norm_type, error_if_nonfinite, foreach)
    norm = _total_norm(parameters, float(norm_type), foreach, grads[0].device)
    if error_if_nonfinite:
        _check_finite(norm, norm_type)
    return norm.to(grads[0].dtype)


def _check_finite(norm: Tensor, norm_type: float) -> None:
    if not norm.isfinite():
        raise RuntimeError(
            f"the norm of order {float(norm_type):g} of all gradients is {norm.item()}, so they cannot be "
            "clipped by it; error_if_nonfinite=False scales them all the same"
        )


def _parameters_of(given: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return each parameter once; mark experts of a module's layers, if copying has lost their marks."""
    if isinstance(given, nn.Module):
        mark_all(given)
        parameters: Iterable[Any] = given.parameters()
    elif isinstance(given, Tensor):
        parameters = [given]
    else:
        parameters = list(given)
        if not parameters and isinstance(given, Iterator):
            warnings.warn(
                "clip_grad_norm_ got an iterator without parameters, perhaps a used one: nothing is clipped",
                stacklevel=4,
            )
    unique = list({id(parameter): parameter for parameter in parameters}.values())
    if any(is_sharded(parameter) for parameter in unique if isinstance(parameter, Tensor)):
        raise RuntimeError(
            "a sharded optimizer has these gradients in shares, and clips them itself: give it max_norm "
            "(optimizer.clip_grad_norm), and read its `norm` after a step"
        )
    for parameter in unique:
        if not isinstance(parameter, Tensor):
            raise TypeError(
                f"clip_grad_norm_ takes a module or its parameters, not {type(parameter).__name__}: use "
                "model.parameters()"
            )
    return unique


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _total_norm(
    parameters: Sequence[Tensor], order: float, foreach: bool | None, device: torch.device
) -> Tensor:
    experts = [(p, home) for p in parameters if (home := ranks_of(p)) is not None]
    dense = [(p, ranks_of_parts(p)) for p in parameters if ranks_of(p) is None]
    kinds = (
        [p for p, home in experts if home.is_first_in_edp],
        [p for p, home in dense if home is not None],
        [p for p, home in dense if home is None],
    )
    row = torch.stack([_norm(_gradients(kind), order, foreach, device) for kind in kinds])
    # Ranks may list their parameters in different orders, and must still choose the same transport.
    homes = (home for _, home in (*experts, *dense) if home is not None)
    spread = [home for home in homes if home.layout.world_size > 1]
    if not spread:
        return _p_norm(row, order)
    ranks = min(spread, key=lambda home: home.number)
    try:
        with ACTIVITY.exchanging("clipping gradients"):
            table = ranks.gather(row)  # norms of experts, parts and whole parameters, [ranks, 3]
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {ranks.layout.rank}: clip_grad_norm_ did not hear from all others: {explain(error)}. "
            "Every rank must call it, with its experts, trained or not: pass the module, or all of "
            "model.parameters()"
        ) from error
    # What is equal on ranks is compared now, but on GPUs in the next call: nobody waits for the host here.
    counted = HostCounts(table)
    unread: HostCounts | None = counted
    if device_of(table).is_gpu:
        unread, UNREAD[ranks] = UNREAD.get(ranks), counted
    if unread is not None:
        _, parts, whole = unread.numbers.T
        _check_equal(whole.tolist(), "parameters that all ranks hold")
        for same in ranks.with_same_parts:
            of = f"the part of parameters that ranks {', '.join(map(str, same))} hold"
            _check_equal(parts[list(same)].tolist(), of)
    # Where several ranks hold the same gradients, the largest norm counts: if one rank alone holds a
    # value that is not finite, all must learn of it.
    of_experts, of_parts, of_all = table.unbind(1)
    norms = [of_experts, of_all.amax(0, keepdim=True)]
    for same in ranks.with_same_parts:
        norms.append(torch.stack([of_parts[rank] for rank in same]).amax(0, keepdim=True))
    return _p_norm(torch.cat(norms), order).to(device)


UNREAD: WeakKeyDictionary[ExpertRanks, HostCounts] = WeakKeyDictionary()
"""Norms of all ranks in the last call, where reading them at once would make the host wait for a GPU."""


def _check_equal(found: Sequence[float], of: str) -> None:
    """Raise RuntimeError if norms of the same gradients differ between ranks."""
    if all(map(math.isfinite, found)) and max(found) - min(found) > EQUAL * max(found):
        shown = ", ".join(f"{norm:.6g}" for norm in found)
        raise RuntimeError(
            f"gradients of {of} differ: their norms by rank are {shown}. Clip when they have been averaged "
            "(not inside no_sync), and give every rank the same parameters"
        )


def _norm(gradients: Sequence[Tensor], order: float, foreach: bool | None, device: torch.device) -> Tensor:
    """Return the norm of gradients of this rank, and of all shards of DTensors; float64 scalar on
    `device`."""
    plain = [_values(g) for g in gradients if not is_dtensor(g)]
    norms = [norm.to(device) for norm in _each_norm(plain, order, foreach)]
    # One norm for all DTensors that are spread over the same dimensions of the same mesh.
    spread: dict[tuple[Any, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        if is_dtensor(gradient):
            from torch.distributed.tensor import Replicate

            whole = [Replicate() if p.is_partial() else p for p in gradient.placements]
            part = gradient.redistribute(placements=whole).to_local()
            cut = tuple(i for i, placement in enumerate(whole) if not placement.is_replicate())
            spread.setdefault((gradient.device_mesh, cut), []).append(_values(part))
    # In an order that is the same on all ranks.
    for (mesh, cut), parts in sorted(
        spread.items(), key=lambda item: f"{item[0][0].mesh.tolist()} {item[0][1]}"
    ):
        norm = _together(_each_norm(parts, order, foreach), order, parts[0].device)
        for dimension in cut:
            group = mesh.get_group(dimension)
            everyone = [torch.empty_like(norm) for _ in range(group.size())]
            dist.all_gather(everyone, norm, group=group)
            norm = _p_norm(torch.stack(everyone), order)
        norms.append(norm.to(device))
    return _together(norms, order, device)


def _together(norms: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    """Return one norm of several parts. They are sorted first: the order of parameters changes no bit."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return _p_norm(torch.stack(list(norms)).sort().values, order)


def _p_norm(values: Tensor, order: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, order)
    return norm


def _each_norm(gradients: Sequence[Tensor], order: float, foreach: bool | None) -> list[Tensor]:
    """Return the norm of every gradient, float64; numbers of fewer than four bytes are summed in float32."""
    norms: list[Tensor] = []
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():  # an empty tensor has no largest entry
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (_, dtype), group in groups.items():
        wide = torch.promote_types(dtype, torch.float32)
        if foreach is False:
            made = [torch.linalg.vector_norm(g, order, dtype=wide) for g in group]
        else:
            made = list(torch._foreach_norm(group, order, dtype=wide))
        norms += torch.stack(made).abs().double().unbind()
    return norms


def _values(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient; of a sparse one those that are stored, each place once."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
