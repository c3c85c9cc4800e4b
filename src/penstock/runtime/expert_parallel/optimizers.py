"""Optimisers of parameters of which a rank holds a share: their states say which, or they are refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from penstock.partial_state import KEY, ShareError, ShareMark, check_share, part_of, torch_callers
from penstock.partial_state import share_of as marked_share
from penstock.runtime.clip import MARK, OWNERS, ExpertRanks, Whole, is_sharded, share_of
from penstock.sharding import sharding_of
from penstock.topology.faults import is_first_to_say

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
    kind = type(optimizer)
    unknown = not NUMBERWISE & _words(each.__name__ for each in kind.__mro__)
    for name, parameter in _trained(optimizer) if unknown else ():
        if part := share_of(parameter, whole="tensor"):
            if is_first_to_say(f"an unknown optimizer: {kind.__module__}.{kind.__qualname__} {name}"):
                warnings.warn(
                    f"whether {kind.__name__} treats every number by itself is not known, and {name} "
                    f"{list(parameter.shape)} of this rank is only {part}: an update by the norm, sums or "
                    "products of a tensor would train something else than on one process, and nothing would "
                    "tell",
                    stacklevel=1,
                )
            break
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
    optimizer.register_load_state_dict_pre_hook(own_parts)


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


def own_parts(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's parts of a state, without marks.

    Raises:
        ShareError: It is another share's.
    """
    states, groups = dict(state["state"]), []
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        if KEY in saved:
            check_share(marked_share(saved[KEY]), _share(group["params"]))
        for parameter, number in zip(group["params"], saved["params"], strict=False):
            if number in states:
                states[number] = _taken(f"of parameter {number}", parameter, states[number])
        groups.append({key: each for key, each in saved.items() if key != KEY})
    groups += state["param_groups"][len(groups) :]  # torch refuses another number of groups
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
        **dict.fromkeys(
            ("lamb", "lars", "larc", "novograd", "stableadam", "apollo", "fromage", "adamp", "sgdp"), NORM
        ),
        **dict.fromkeys(("adafactor", "came", "sm3"), FACTORS),
        **dict.fromkeys(("muon", "galore", "dion", "scion"), SPECTRUM),
        **dict.fromkeys(("shampoo", "soap", "psgd", "kron"), GRAMIAN),
        "adammini": "means over blocks of a tensor",
    },
    "model": dict.fromkeys(("lbfgs", "prodigy", "dadapt", "sam"), ALL),
}
"""What updates need, by what must be whole for that and by words in an optimiser's name, joined, in lower
case."""
NUMBERWISE = frozenset(
    (
        *("adam", "adamw", "nadam", "radam", "adamax", "adagrad", "adadelta", "ademamix", "adan", "adopt"),
        *("sgd", "asgd", "rmsprop", "rprop", "lion", "sophia", "madgrad", "tiger", "signum"),
    )
)
"""Words in the names of optimisers that treat every number by itself."""
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


@cache
def watch_optimizers() -> None:
    """Check every optimiser of this process before each of its steps, and mark its state, from now on.

    Costs a look into a table and a set in every step of an optimiser. The one hook stays, and does nothing
    where nothing is marked.
    """
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
    """Return, for the names of an optimiser's classes, what updates need and what must be whole for that."""
    words = _words(names)
    found = {whole: table[name] for whole, table in NEEDS.items() for name in table.keys() & words}
    return tuple((what, whole) for whole, what in found.items())


def _words(names: Iterable[str]) -> set[str]:
    """Return the words of these names in lower case, also several that follow each other, as one."""
    found = set[str]()
    for each in names:
        words = [word.lower() for word in WORDS.findall(each)]
        found |= {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    return found


def _trained(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that an optimiser trains, with their names, if it knows these."""
    for group in optimizer.param_groups:
        names = group.get("param_names") or ["a parameter"] * len(group["params"])
        yield from ((n, p) for n, p in zip(names, group["params"], strict=True) if p.requires_grad)
