"""Measures every collective on every group and lane of a layout: lines through measured exchanges.

All collectives are the transport's own exchanges, since those are what will run; a broadcast is an all-to-all
in which one rank sends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.autotune.profile.sample import Action, Budget, Limits, fitted, measure_sizes
from penstock.cost.cluster_file import PAIR, LinkModel
from penstock.features.dispatch import DISPATCHES, Dispatch, Place
from penstock.graph import Lane, Name, Phase, Task
from penstock.mesh import Axes, Group, node_of
from penstock.ops import Op
from penstock.runtime import Machinery
from penstock.runtime.executor import Call, LaneError
from penstock.runtime.handlers import Inputs, Outputs
from penstock.runtime.transport import Transport, send_out
from penstock.topology import Layout
from penstock.words import counted

logger = logging.getLogger(__name__)

SIZES_BYTES = tuple(1 << power for power in (18, 20, 14, 22, 16, 12, 24))
"""Sizes in the order of their worth: two give a line, extremes tell its start-up from its slope."""

LONGEST_S = 0.15
FLOAT_BYTES = 4
USED_WEIGHT, WEIGHT = 4.0, 1.0
"""Weights by which time is shared: collectives on which plans rest get more of it."""

TRUSTED = 2
"""Number of largest sizes that are always used: delays of milliseconds by others matter little there."""

Make = Callable[[int], Action]


@dataclass(frozen=True)
class Probe:
    """One collective in one kind of group.

    Attributes:
        members: The ranks of the group.
        make: Returns an exchange of a number of float32 elements.
        op: The op of a leg of a dispatch; "" for a collective.
        used: Whether plans rest on it.
    """

    collective: str
    group: Axes
    lane: Lane
    members: tuple[int, ...]
    make: Make
    op: str = ""
    used: bool = False

    @property
    def wire(self) -> tuple[object, ...]:
        """Key that is equal for probes that send the same bytes between the same ranks."""
        return self.collective, self.lane, self.op, self.members


def measure_links(
    machinery: Machinery,
    dispatches: Iterable[str],
    budget_s: float,
    *,
    used_only: bool = False,
    limits: Limits | None = None,
) -> tuple[LinkModel, ...]:
    """Return lines of all collectives; the same on all ranks, which must call it together. () for one rank.

    The time goes first to what plans rest on; the remainder pays for at least two sizes of everything else.
    Collectives that are left when the budget is `late` are not measured. Groups with the same members are
    measured once.

    Args:
        dispatches: Names of hierarchical dispatches whose legs are measured, too.
        budget_s: Seconds for all links together.
        used_only: Whether to leave out what no plan rests on.
        limits: What else ends measuring; None = nothing.
    """
    if machinery.layout.world_size == 1:
        return ()
    probes = sorted(_probes(machinery, dispatches), key=lambda probe: not probe.used)
    probes = [probe for probe in probes if probe.used or not used_only]
    budget = Budget(machinery.control, budget_s, limits)
    waiting = {each.wire: USED_WEIGHT if each.used else WEIGHT for each in reversed(probes)}
    by_wire: dict[tuple[object, ...], LinkModel] = {}
    links = []
    for probe in probes:
        if probe.wire not in by_wire:
            if budget.late:
                continue
            weight = waiting.pop(probe.wire)
            share_s = budget.left_s * weight / (weight + sum(waiting.values()))
            done = len(by_wire) + 1
            ranks = counted(len(probe.members), "rank")
            logger.debug(
                f"link {done} of {done + len(waiting)}: {probe.collective} {probe.op}".rstrip() + f", {ranks}"
            )
            line = _measure(probe, budget, share_s, machinery.device)
            by_wire[probe.wire] = replace(line, nodes=_nodes(machinery.layout, probe.members))
        links.append(replace(by_wire[probe.wire], group=Group.name(probe.group)))
    return machinery.control.gather(tuple(links), "comparing measured links")[0]


def _nodes(layout: Layout, ranks: Iterable[int]) -> int | None:
    """Return how many nodes these ranks cover; None if there is one node, or if nodes are not known."""
    return len({node_of(rank, layout.node_size) for rank in ranks}) if layout.nodes > 1 else None


def _measure(probe: Probe, budget: Budget, share_s: float, device: torch.device) -> LinkModel:
    def make(size_bytes: int) -> Action:
        return probe.make(size_bytes // FLOAT_BYTES)

    points = measure_sizes(make, SIZES_BYTES, budget, share_s, device=device, longest_s=LONGEST_S)
    line, fit = fitted(points, trusted=TRUSTED)
    return LinkModel(
        collective=probe.collective,
        group=Group.name(probe.group),
        lane=str(probe.lane),
        ranks=len(probe.members),
        alpha_s=line.alpha_s,
        beta_s_per_byte=line.beta,
        op=probe.op,
        fit=fit,
    )


# ---- what there is to measure ------------------------------------------------------------------------------


def _probes(machinery: Machinery, dispatches: Iterable[str]) -> Iterator[Probe]:
    layout, transports = machinery.layout, machinery.transports
    groups = _groups(layout)
    transports.open(groups)
    for lane, group in groups:
        members = layout.mesh.members(layout.rank, group)
        transport, place = transports.of(lane, group), members.index(layout.rank)
        for name, make in exchanges(transport, group, place, machinery.device).items():
            yield Probe(name, group, lane, members, make, used=_is_used(name, group, layout.node_size))
    shards = layout.mesh.members(layout.rank, Group.EXPERT_SHARDS)
    if layout.tp_size > 1 and len(shards) > 1:  # the argument of Parm's pair is that of its all-to-all
        make = partial(make_pair, machinery)
        yield Probe(PAIR, Group.EXPERT_SHARDS, Lane.INTER, shards, make, used=True)
    if layout.ep_nodes > 1:
        for name in dispatches:
            yield from _leg_probes(DISPATCHES[name], machinery)


def _groups(layout: Layout) -> list[tuple[Lane, Axes]]:
    """Return groups of several ranks, with the lane on which they communicate."""
    pairs = [(Lane.INTER, group) for group in (Group.EXPERT, Group.WORLD, Group.EXPERT_DATA)]
    if layout.ep_nodes > 1:
        pairs += [(Lane.INTER, Group.RAIL), (Lane.INTRA, Group.NODE)]
    if layout.tp_size > 1:
        pairs += [(Lane.INTRA, Group.TENSOR), (Lane.INTER, Group.DATA)]
    if layout.etp_size > 1:
        pairs += [(Lane.INTRA, Group.SHARDS), (Lane.INTER, Group.EXPERT_SHARDS)]
    return [(lane, group) for lane, group in pairs if layout.mesh.size(group) > 1]


def _is_used(collective: str, group: Axes, node_size: int | None) -> bool:
    match collective:
        case "point_to_point":  # tells whether the devices of a node share its card
            return group == Group.EXPERT and (node_size or 1) > 1
        case "all_to_all":
            return group in (Group.EXPERT, Group.EXPERT_SHARDS)
        case "all_reduce":
            return group in (Group.WORLD, Group.DATA, Group.EXPERT_DATA, Group.TENSOR, Group.SHARDS)
        case "all_gather" | "reduce_scatter":
            return group in (Group.TENSOR, Group.SHARDS)
    return False


def _leg_probes(dispatch: Dispatch, machinery: Machinery) -> Iterator[Probe]:
    """Yield every leg that moves anything, with even routing. Argument: elements of the rows of each rank."""
    layout = machinery.layout
    place, ranks = Place(layout.ep_rank, layout.ep_size, layout.ep_node_size), layout.ep_size
    for number, hop in enumerate(dispatch.hops):
        transport = machinery.transports.of(hop.lane)
        if hop.lane is Lane.INTRA and layout.ep_node_size == 1:
            continue

        def make(elements: int, number: int = number, transport: Transport = transport) -> Action:
            leg = dispatch.legs(np.full((ranks, ranks), elements // ranks), place)[number]
            rows = torch.zeros(sum(leg.sizes), dtype=torch.float32, device=machinery.device)
            return lambda: _drop(send_out(rows, leg, transport))

        members = layout.mesh.members(layout.rank, Group.EXPERT)
        yield Probe(dispatch.name, Group.EXPERT, hop.lane, members, make, hop.op, used=True)


def exchanges(transport: Transport, group: Axes, rank: int, device: torch.device) -> dict[str, Make]:
    """Return the collectives of a group as exchanges of its transport.

    Args:
        rank: This rank's place in the group.

    Returns:
        By name of the collective, what makes an exchange of a number of float32 elements.
    """
    size = transport.size(group)

    def zeros(elements: int) -> Tensor:
        return torch.zeros(elements, dtype=torch.float32, device=device)

    def exchange(out: Sequence[int], back: Sequence[int]) -> Action:
        rows = zeros(sum(out))
        return lambda: _drop(transport.all_to_all(rows, out, back, group))

    def all_to_all(elements: int) -> Action:
        return exchange([elements // size] * size, [elements // size] * size)

    def uneven_all_to_all(elements: int) -> Action:
        """Return an exchange in which the first rank's experts are twice as popular as the others'."""
        share = elements // (size + 1)
        splits = [2 * share] + [share] * (size - 1)
        return exchange(splits, [splits[rank]] * size)

    def all_gather(elements: int) -> Action:
        own, splits = zeros(elements // size), [elements // size] * size
        return lambda: _drop(transport.all_gather(own, splits, group))

    def reduce_scatter(elements: int) -> Action:
        rows, splits = zeros(elements // size * size), [elements // size] * size
        return lambda: _drop(transport.reduce_scatter(rows, splits, group))

    def all_reduce(elements: int) -> Action:
        tensor = zeros(elements)
        return lambda: transport.all_reduce(tensor, group)

    def from_first(receives: Callable[[int], bool], elements: int) -> Action:
        out = [elements if rank == 0 and other and receives(other) else 0 for other in range(size)]
        return exchange(out, [elements if rank and receives(rank) else 0, *[0] * (size - 1)])

    return {
        "all_to_all": all_to_all,
        "uneven_all_to_all": uneven_all_to_all,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_reduce": all_reduce,
        "broadcast": partial(from_first, lambda _: True),
        "point_to_point": partial(from_first, lambda other: other == size - 1),
    }


def _drop(result: object) -> None:
    del result


# ---- Parm's SAA as it runs: slices of a combine between nodes, each gathered under the next ----------------
# Its line is measured, since those of both transfers do not tell how much they disturb each other.


SLICES = 4
"""Slices of a pair: fewer overlap less, more cost start-ups; the middle of what Parm's planner tries."""


def make_pair(machinery: Machinery, elements: int) -> Action:
    """Return a pair in which every rank sends `elements` float32 numbers to all shards of all experts."""
    layout, transports = machinery.layout, machinery.transports
    axes = Group.EXPERT_SHARDS if layout.etp_size > 1 else Group.EXPERT
    between, inside = transports.of(Lane.INTER, axes), transports.of(Lane.INTRA, Group.TENSOR)
    size = between.size(axes)
    share = max(1, elements // SLICES // size)
    rows = torch.zeros(share * size, dtype=torch.float32, device=machinery.device)
    home: dict[Name, Tensor] = {}

    def combine(context: Any, task: Task, inputs: Inputs) -> Outputs:
        """Exchange the partial outputs of all shards of an expert, and add them where they arrive."""
        del context, inputs
        partials = between.all_to_all(rows, [share] * size, [share] * size, axes)
        home[task.name] = partials.view(-1, layout.etp_size, share).sum(1).flatten()
        return {"rows": home[task.name]}

    def gather(context: Any, task: Task, inputs: Inputs) -> Outputs:
        del context, inputs
        own = home.pop(task.name._replace(op=Op.COMBINE))
        inside.all_gather(own, [len(own)] * layout.tp_size, Group.TENSOR)
        return {"rows": own}

    nothing = {"reads": (), "writes": (), "frees": (), "shared": ()}
    sent, gathered = list[Call](), list[Call]()
    for number in range(SLICES):
        name = Name(0, Op.COMBINE, Phase.FORWARD, microbatch=0, chunk=number)
        gathering = Task(name._replace(op=Op.GATHER_SLOTS), Lane.INTRA, Group.TENSOR, {})
        sent.append(Call(Task(name, Lane.INTER, axes, {}), combine, waits=(), **nothing))
        gathered.append(Call(gathering, gather, waits=((Lane.INTER, number + 1),), **nothing))
    span = {Lane.INTER: tuple(sent), Lane.INTRA: tuple(gathered)}

    def action() -> None:
        try:
            machinery.lanes.run(span, lambda call: call.handler(None, call.task, Inputs()))
        except LaneError as failure:  # the measured pair has no grid to show
            assert failure.__cause__ is not None, failure
            raise failure.__cause__ from None

    return action
