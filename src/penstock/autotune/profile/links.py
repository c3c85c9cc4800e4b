"""Measures every collective on every group and lane of a layout: lines through measured exchanges.

All collectives are made of the transport's own exchanges, since those are what will run: a reduce-scatter
sums what an all-to-all brought, a broadcast sends from one rank to all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.autotune.profile.sample import Action, Budget, Limits, measure_sizes
from penstock.cost.cluster_file import PAIR, Fit, LinkModel
from penstock.cost.fit import fit_line
from penstock.dispatch import DISPATCHES, Dispatch, Place
from penstock.graph import Lane, Name, Phase, Task
from penstock.mesh import Axes, Group
from penstock.ops import Op
from penstock.runtime import Machinery
from penstock.runtime.calls import Call, Span
from penstock.runtime.handlers import Handler, Inputs, Outputs
from penstock.runtime.lanes import LaneError
from penstock.runtime.transport import Transport
from penstock.runtime.transport.legs import send_out
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


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One collective in one kind of group.

    make: returns an exchange of this number of float32 elements. used: whether plans rest on it.
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

    dispatches: names of hierarchical ones whose legs are measured, too. used_only: leave out what no plan
    rests on. limits: as of `Budget`.

    The time goes first to what plans rest on; the remainder pays for at least two sizes of everything else.
    Collectives that are left when the budget is `late` are not measured.
    Groups with the same members are measured once.
    """
    if machinery.layout.world_size == 1:
        return ()
    probes = sorted(_probes(machinery, dispatches), key=lambda probe: not probe.used)
    probes = [probe for probe in probes if probe.used or not used_only]
    budget = Budget(machinery.control, budget_s, limits)
    waiting = {each.wire: USED_WEIGHT if each.used else WEIGHT for each in reversed(probes)}
    known: dict[tuple[object, ...], LinkModel] = {}
    found = []
    for probe in probes:
        if probe.wire not in known:
            if budget.late:
                continue
            weight = waiting.pop(probe.wire)
            share_s = budget.left_s * weight / (weight + sum(waiting.values()))
            done = len(known) + 1
            ranks = counted(len(probe.members), "rank")
            logger.debug(
                f"link {done} of {done + len(waiting)}: {probe.collective} {probe.op}".rstrip() + f", {ranks}"
            )
            known[probe.wire] = _measure(probe, budget, share_s, machinery.device)
        found.append(replace(known[probe.wire], group=Group.name(probe.group)))
    mine = tuple(found)
    return machinery.control.gather(mine, "comparing measured links")[0]


def _measure(probe: Probe, budget: Budget, share_s: float, device: torch.device) -> LinkModel:
    points = measure_sizes(
        lambda size: probe.make(size // FLOAT_BYTES),
        SIZES_BYTES,
        budget,
        share_s,
        device=device,
        longest_s=LONGEST_S,
    )
    line = fit_line(points, trusted=TRUSTED)
    return LinkModel(
        collective=probe.collective,
        group=Group.name(probe.group),
        lane=str(probe.lane),
        ranks=len(probe.members),
        alpha_s=line.alpha_s,
        beta_s_per_byte=line.beta,
        op=probe.op,
        fit=Fit(r2=line.r2, residual=line.residual, points=tuple(points)),
    )


# ---- what there is to measure ------------------------------------------------------------------------------


def _probes(machinery: Machinery, dispatches: Iterable[str]) -> Iterator[Probe]:
    layout, transports = machinery.layout, machinery.transports
    groups = list(_groups(layout))
    transports.open(groups)
    for lane, group in groups:
        members = _members(layout, group)
        makes = _Exchanges(transports.of(lane, group), group, members.index(layout.rank), machinery.device)
        for collective, make in makes.table().items():
            yield Probe(
                collective=collective,
                group=group,
                lane=lane,
                members=members,
                make=make,
                used=_is_used(collective, group, layout.node_size),
            )
    yield from _pair_probe(machinery)
    if layout.ep_nodes > 1:
        for name in dispatches:
            yield from _leg_probes(DISPATCHES[name], machinery)


def _pair_probe(machinery: Machinery) -> Iterator[Probe]:
    """Yield the probe of Parm's pair, where ranks share attention. Its argument is that of its all-to-all."""
    layout = machinery.layout
    members = _members(layout, Group.EXPERT_SHARDS)
    if layout.tp_size > 1 and len(members) > 1:
        yield Probe(
            collective=PAIR,
            group=Group.EXPERT_SHARDS,
            lane=Lane.INTER,
            members=members,
            make=partial(make_pair, machinery),
            used=True,
        )


def _groups(layout: Layout) -> Iterator[tuple[Lane, Axes]]:
    """Yield groups of several ranks, with the lane on which they communicate."""
    inter = [Group.EXPERT, Group.WORLD, Group.EXPERT_REPLICAS]
    several_nodes = layout.ep_nodes > 1
    pairs: Iterable[tuple[Lane, Axes]] = product(
        [Lane.INTER], [*inter, Group.RAIL] if several_nodes else inter
    )
    for lane, group in [*pairs, (Lane.INTRA, Group.NODE)]:
        if layout.mesh.size(group) > 1 and (several_nodes or lane is Lane.INTER):
            yield lane, group
    for lane, group in _sharing_groups(layout):
        if layout.mesh.size(group) > 1:
            yield lane, group


def _sharing_groups(layout: Layout) -> Iterator[tuple[Lane, Axes]]:
    """Yield groups that exist only where ranks share attention or experts."""
    if layout.tp_size > 1:
        yield Lane.INTRA, Group.TENSOR
        yield Lane.INTER, Group.DATA
    if layout.etp_size > 1:
        yield Lane.INTRA, Group.SHARDS
        yield Lane.INTER, Group.EXPERT_SHARDS


def _is_used(collective: str, group: Axes, node_size: int | None) -> bool:
    match collective:
        case "point_to_point":  # tells whether the devices of a node share its card
            return group == Group.EXPERT and (node_size or 1) > 1
        case "all_to_all":
            return group in (Group.EXPERT, Group.EXPERT_SHARDS)
        case "all_reduce":
            return group in (Group.WORLD, Group.DATA, Group.EXPERT_REPLICAS, Group.TENSOR, Group.SHARDS)
        case "all_gather" | "reduce_scatter":
            return group in (Group.TENSOR, Group.SHARDS)
    return False


def _members(layout: Layout, group: Axes) -> tuple[int, ...]:
    return layout.mesh.members(layout.rank, group)


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
            rows = torch.zeros(sum(leg.sizes), device=machinery.device)
            return lambda: _ignore(send_out(rows, leg, transport))

        yield Probe(
            collective=dispatch.name,
            group=Group.EXPERT,
            lane=hop.lane,
            members=_members(layout, Group.EXPERT),
            make=make,
            op=hop.op,
            used=True,
        )


def _ignore(result: object) -> None:
    del result


@dataclass(frozen=True)
class _Exchanges:
    """The collectives of one group as exchanges of its transport. rank: this rank's place in the group."""

    transport: Transport
    group: Axes
    rank: int
    device: torch.device

    def table(self) -> dict[str, Make]:
        return {
            "all_to_all": self.all_to_all,
            "uneven_all_to_all": self.uneven_all_to_all,
            "all_gather": self.all_gather,
            "reduce_scatter": self.reduce_scatter,
            "all_reduce": self.all_reduce,
            "broadcast": self.broadcast,
            "point_to_point": self.point_to_point,
        }

    @property
    def size(self) -> int:
        return self.transport.size(self.group)

    def all_to_all(self, elements: int) -> Action:
        splits = [elements // self.size] * self.size
        return self._exchange(splits, splits)

    def uneven_all_to_all(self, elements: int) -> Action:
        """Return an exchange in which the first rank's experts are twice as popular as the others'."""
        share = elements // (self.size + 1)
        splits = [2 * share] + [share] * (self.size - 1)
        return self._exchange(splits, [splits[self.rank]] * self.size)

    def all_gather(self, elements: int) -> Action:
        mine, splits = self._zeros(elements // self.size), [elements // self.size] * self.size
        return lambda: _ignore(self.transport.all_gather(mine, splits, self.group))

    def reduce_scatter(self, elements: int) -> Action:
        rows, splits = self._zeros(elements // self.size * self.size), [elements // self.size] * self.size
        return lambda: _ignore(self._moved(rows, splits, splits).view(self.size, -1).sum(0))

    def all_reduce(self, elements: int) -> Action:
        tensor = self._zeros(elements)
        return lambda: self.transport.all_reduce(tensor, self.group)

    def broadcast(self, elements: int) -> Action:
        """Return an exchange from the first rank to the others, one copy each."""
        out = [elements if self.rank == 0 and other else 0 for other in range(self.size)]
        return self._exchange(out, self._from_first(elements, self.rank > 0))

    def point_to_point(self, elements: int) -> Action:
        """Return an exchange from the first rank to the last."""
        last = self.size - 1
        out = [elements if self.rank == 0 and other == last else 0 for other in range(self.size)]
        return self._exchange(out, self._from_first(elements, self.rank == last))

    def _from_first(self, elements: int, receives: bool) -> list[int]:
        return [elements if receives else 0, *[0] * (self.size - 1)]

    def _exchange(self, out: Sequence[int], back: Sequence[int]) -> Action:
        rows = self._zeros(sum(out))
        return lambda: _ignore(self._moved(rows, out, back))

    def _moved(self, rows: Tensor, out: Sequence[int], back: Sequence[int]) -> Tensor:
        return self.transport.all_to_all(rows, out, back, self.group)

    def _zeros(self, elements: int) -> Tensor:
        return torch.zeros(elements, device=self.device)


# ---- measures parm's saa as it runs: slices of a combine between  ------------------------------------------


SLICES = 4
"""Slices of a pair: fewer overlap less, more cost start-ups; the middle of what Parm's planner tries."""


def pair_axes(etp_size: int) -> Axes:
    """Return the axes along which the pair's all-to-all meets ranks."""
    return Group.EXPERT_SHARDS if etp_size > 1 else Group.EXPERT


def make_pair(machinery: Machinery, elements: int) -> Action:
    """Return a pair in which every rank sends `elements` float32 numbers to all shards of all experts."""
    layout, transports = machinery.layout, machinery.transports
    axes = pair_axes(layout.etp_size)
    between, inside = transports.of(Lane.INTER, axes), transports.of(Lane.INTRA, Group.TENSOR)
    size = between.size(axes)
    each = max(1, elements // SLICES // size)
    rows = torch.zeros(each * size, device=machinery.device)
    home: dict[Name, Tensor] = {}

    def combine(context: Any, task: Task, inputs: Inputs) -> Outputs:
        """Exchange the partial outputs of all shards of an expert, and add them where they arrive."""
        del context, inputs
        found = between.all_to_all(rows, [each] * size, [each] * size, axes)
        home[task.name] = found.view(-1, layout.etp_size, each).sum(1).flatten()
        return {"rows": home[task.name]}

    def gather(context: Any, task: Task, inputs: Inputs) -> Outputs:
        del context, inputs
        mine = home.pop(task.name._replace(op=Op.COMBINE))
        inside.all_gather(mine, [len(mine)] * layout.tp_size, Group.TENSOR)
        return {"rows": mine}

    return _action(machinery, _span(axes, combine, gather))


def _action(machinery: Machinery, span: Span) -> Action:
    def execute(call: Call) -> Outputs:
        return call.handler(None, call.task, Inputs())

    def action() -> None:
        try:
            machinery.lanes.run(span, execute)
        except LaneError as failure:  # the measured pair has no grid to show
            assert failure.__cause__ is not None, failure
            raise failure.__cause__ from None

    return action


def _span(axes: Axes, combine: Handler, gather: Handler) -> Span:
    """Return the calls of both lanes, each in order: every slice is gathered after it was combined."""
    sent, gathered = [], []
    for number in range(SLICES):
        name = Name(0, Op.COMBINE, Phase.FORWARD, microbatch=0, chunk=number)
        after = ((Lane.INTER, number + 1),)
        sent.append(_call(Task(name, Lane.INTER, axes, {}), combine, ()))
        inside = Task(name._replace(op=Op.GATHER_SLOTS), Lane.INTRA, Group.TENSOR, {})
        gathered.append(_call(inside, gather, after))
    return {Lane.INTER: tuple(sent), Lane.INTRA: tuple(gathered)}


def _call(task: Task, handler: Handler, waits: tuple[tuple[Lane, int], ...]) -> Call:
    return Call(task, handler, reads=(), writes=(), frees=(), shared=(), waits=waits)
