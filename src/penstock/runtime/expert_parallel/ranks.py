"""Marks on parameters that say which ranks hold an expert, or the other parts of a parameter.

The mark stays with a parameter through `.to()` and in any list. A copy of a parameter, or a parameter put in
its place, has none until the layer's next forward.
"""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from penstock.mesh import Group
from penstock.moe import MoELayer
from penstock.partial_state import KEY, ShareError, ShareMark, check_share, part_of, torch_callers
from penstock.partial_state import share_of as marked_share
from penstock.runtime.transport import Transport
from penstock.sharding import sharding_of
from penstock.topology import Layout

MARK, PARTS_MARK, STACKED_MARK = "penstock_ranks", "penstock_ranks_of_parts", "penstock_stacked"
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """The ranks that train together and how their experts are spread.

    Attributes:
        device: Where the transport takes tensors.
        number: Counts what was built in this process, so that all ranks choose the same one of several.
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


def mark_parts(parameters: Iterable[Tensor], ranks: ExpertRanks) -> None:
    """Mark parameters that `penstock.sharding` has marked as parts with the ranks of the other parts."""
    for parameter in parameters:
        if sharding_of(parameter) is not None:
            setattr(parameter, PARTS_MARK, ranks)


def ranks_of_parts(parameter: Tensor) -> ExpertRanks | None:
    """Return the ranks that hold the other parts of a parameter; None for a whole one.

    Raises:
        ValueError: For a part whose ranks are not known.
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


# ---- optimisers whose parameters are a rank's share: their state says so as state dicts of the model do
#
# Moments of one rank's experts have the shapes of every other rank's. An optimiser belongs to the training
# loop and is seen when it steps, so it is checked there: before its first update, and from then on whenever a
# state is loaded into it.


MIXING = tuple(f"torch.distributed.optim.{name}_optimizer" for name in ("zero_redundancy", "post_localSGD"))
"""Modules of optimisers that give every rank the parameters of other ranks, or their mean."""

_known: WeakSet[Optimizer] = WeakSet()


def watch_optimizer(optimizer: Optimizer) -> None:
    """Mark and check the states of one optimiser.

    Raises:
        ShareError: If it has loaded another share's, or would mix the parameters of shares.
    """
    if optimizer in _known:
        return
    share = _share(parameter for group in optimizer.param_groups for parameter in group["params"])
    for name in (type(optimizer).__module__, *torch_callers()):  # one may be around this optimiser
        if share and name in MIXING:
            raise ShareError(
                f"an optimizer of {name} takes the parameters of all ranks for the same, and this rank holds "
                f"{share}: an update would mix them. Use an ordinary optimizer, or for PipelinedStack "
                "penstock.ShardedAdamW (optimizer.zero_stage=1)"
            )
    for group in optimizer.param_groups:
        if KEY in group:  # loaded before the optimiser was known
            check_share(marked_share(group[KEY]), _share(group["params"]))
            del group[KEY]
        for number, parameter in enumerate(group["params"]):
            state = optimizer.state.get(parameter, {})
            # A plain tensor of the part's shape is this rank's: a loop may have filled the state itself.
            said = {key: each for key, each in state.items() if getattr(each, "shape", ()) != parameter.shape}
            state.update(_taken(f"of parameter {number}", parameter, said))
    _known.add(optimizer)
    optimizer.register_state_dict_post_hook(_give)
    optimizer.register_load_state_dict_pre_hook(_take)


def _give(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with parts as DTensors, and with marks in groups that have other state of a share."""
    states, groups = dict(state["state"]), []
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        unsaid = list[Tensor]()
        for parameter, number in zip(group["params"], saved["params"], strict=True):
            held = states.get(number, {})
            of_shape = [key for key, each in held.items() if isinstance(each, Tensor) and each.dim() > 0]
            part = part_of(parameter)
            if of_shape and part is None:
                unsaid.append(parameter)
            elif part is not None:
                states[number] = {**held, **{key: part.spread(held[key]) for key in of_shape}}
        share = _share(group["params"]) if _share(unsaid) else ""
        groups.append({**saved, KEY: ShareMark.of(share)} if share else saved)
    return {**state, "state": states, "param_groups": groups}


def _take(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's parts of a state, without marks. Raises ShareError for another share's."""
    states, groups = dict(state["state"]), []
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        if KEY in saved:
            check_share(marked_share(saved[KEY]), _share(group["params"]))
        for parameter, number in zip(group["params"], saved["params"], strict=False):
            if number in states:
                states[number] = _taken(f"of parameter {number}", parameter, states[number])
        groups.append({key: each for key, each in saved.items() if key != KEY})
    return {**state, "state": states, "param_groups": groups}


def _taken(whose: str, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    part = part_of(parameter)
    if part is None:
        return dict(state)
    return {
        key: part.of(f"{key} {whose}", each) if isinstance(each, Tensor) and each.dim() > 0 else each
        for key, each in state.items()
    }


def _share(parameters: Iterable[Tensor]) -> str:
    """Return in words of which shares these parameters are; empty where all are whole."""
    found = set[str]()
    for parameter in parameters:
        ranks, sharding = getattr(parameter, MARK, None), sharding_of(parameter)
        if isinstance(ranks, ExpertRanks) and ranks.layout.ep_size > 1:
            found.add(f"experts of ep_rank {ranks.layout.ep_rank} of {ranks.layout.ep_size}")
        if sharding is not None:
            found.add(sharding.in_words)
    return "; ".join(sorted(found))


# ---- refusals of optimisers that are wrong with what a rank holds -----------------------------------------
#
# Wherever an optimiser of torch takes a step.
#
# Most optimisers treat every number of a parameter by itself, so a rank may hold a share of it. Others need
# the whole tensor (its norm, sums over rows and columns, singular vectors) or all parameters of a model.
# With the share of a rank they would compute something else and say nothing.


NORM, FACTORS = "the norm of a tensor", "sums over rows and columns of a tensor"
SPECTRUM, GRAMIAN = "the singular vectors of a tensor", "products of a tensor with itself"
ALL = "products of all gradients of the model"

NEEDS: Mapping[Whole, Mapping[str, str]] = {
    "tensor": {
        **dict.fromkeys(("lamb", "lars", "larc", "novograd", "stableadam", "apollo", "fromage"), NORM),
        **dict.fromkeys(("adafactor", "came", "sm3"), FACTORS),
        **dict.fromkeys(("muon", "galore", "dion", "scion"), SPECTRUM),
        **dict.fromkeys(("shampoo", "soap", "psgd", "kron"), GRAMIAN),
        "adammini": "means over blocks of a tensor",
    },
    "model": dict.fromkeys(("lbfgs", "prodigy", "dadapt"), ALL),
}
"""What updates need, by what must be whole for that and by words in an optimiser's name, joined, in lower
case."""
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
SHARDED = "penstock_sharded"


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


class _Watch:
    """The one hook of this process on all optimisers; it stays, and does nothing where nothing is marked."""

    begun = False


def watch_optimizers() -> None:
    """Check every optimiser of this process before each of its steps, and mark its state, from now on.

    Costs a look into a table and a set in every step of an optimiser.
    """
    if not _Watch.begun:
        _Watch.begun = True
        register_optimizer_step_pre_hook(_before_step)


@_disable_dynamo
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs
    check_optimizer(optimizer)
    watch_optimizer(optimizer)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise an error if an optimiser cannot update what it holds.

    That is ValueError if it needs whole tensors, or the whole model, of which this rank has a share, and
    RuntimeError if a sharded optimiser has the gradients of its parameters.
    """
    kind = type(optimizer)
    for what, whole in _needs(tuple(each.__name__ for each in kind.__mro__)):
        for name, parameter in _trained(optimizer):
            if share := share_of(parameter, whole=whole):
                raise ValueError(
                    f"{kind.__name__} needs {what} for an update, and on this rank {name} "
                    f"{list(parameter.shape)} is only {share}: it would train something else than on one "
                    "process, and ranks might drift apart. Use an optimiser that treats every number by "
                    "itself (AdamW, Adam, Lion, RMSprop, SGD), for all parameters or these alone, or hold "
                    "everything on every rank (ep_size, tp_size and etp_size of 1)"
                )
    if OWNERS and getattr(optimizer, "updates", None) is None:
        for name, parameter in _trained(optimizer):
            if is_sharded(parameter):
                raise RuntimeError(
                    f"{kind.__name__} would leave {name} {list(parameter.shape)} as it is: a sharded "
                    "optimizer has the gradients, in shares, and updates all parameters of its stack. Call "
                    "the step of that one alone, or use optimizer.zero_stage=0"
                )


@cache
def _needs(names: Sequence[str]) -> tuple[tuple[str, Whole], ...]:
    """Return what updates need, in words, and what must be whole for that.

    names: of an optimiser's class and its base classes.
    """
    found: dict[Whole, str] = {}
    for each in names:
        words = [word.lower() for word in WORDS.findall(each)]
        joined = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
        for whole, table in NEEDS.items():
            for name in table.keys() & joined:
                found[whole] = table[name]
    return tuple((what, whole) for whole, what in found.items())


def _trained(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that an optimiser trains, with their names, if it knows these."""
    for group in optimizer.param_groups:
        names = group.get("param_names") or ["a parameter"] * len(group["params"])
        yield from ((n, p) for n, p in zip(names, group["params"], strict=True) if p.requires_grad)
