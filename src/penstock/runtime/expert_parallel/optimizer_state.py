"""Optimisers whose parameters are a rank's share: their state says so as state dicts of the model do.

Moments of one rank's experts have the shapes of every other rank's. An optimiser belongs to the training loop
and is seen when it steps, so it is checked there: before its first update, and from then on whenever a state
is loaded into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer

from penstock.dtensors import part_of
from penstock.partial_state import KEY, ShareError, ShareMark, check_share, share_of, torch_callers
from penstock.runtime.expert_parallel.ranks import MARK, ExpertRanks
from penstock.sharding import sharding_of

MIXING = tuple(f"torch.distributed.optim.{name}_optimizer" for name in ("zero_redundancy", "post_localSGD"))
"""Modules of optimisers that give every rank the parameters of other ranks, or their mean."""

_known: WeakSet[Optimizer] = WeakSet()


def watch_optimizer(optimizer: Optimizer) -> None:
    """Mark and check the states of one optimiser.

    Raises ShareError if it has loaded another share's, or would mix the parameters of shares.
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
            check_share(share_of(group[KEY]), _share(group["params"]))
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
            check_share(share_of(saved[KEY]), _share(group["params"]))
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
    return "; ".join(sorted({words for parameter in parameters for words in _shares(parameter)}))


def _shares(parameter: Tensor) -> Iterator[str]:
    ranks, sharding = getattr(parameter, MARK, None), sharding_of(parameter)
    if isinstance(ranks, ExpertRanks) and ranks.layout.ep_size > 1:
        yield f"experts of ep_rank {ranks.layout.ep_rank} of {ranks.layout.ep_size}"
    if sharding is not None:
        yield sharding.in_words
