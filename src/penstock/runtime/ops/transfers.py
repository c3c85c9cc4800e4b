"""Handlers that move rows. The transpose of a leg is the same leg the other way.

Rows that leave for another rank or come from one are a tuple with one tensor per slice; between two legs they
are one tensor, rank by rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.graph import Cut, Phase, Task
from penstock.ops import Op, transfers
from penstock.ops.transfers import AWAY, HOME
from penstock.routing.routes import Routes
from penstock.runtime.handlers import Inputs, Outputs, StepContext, handles
from penstock.runtime.transport.legs import Later, exchange_counts, send_home, send_out

F, B = Phase.FORWARD, Phase.BACKWARD
Rows = Tensor | tuple[Tensor, ...]


@handles(Op.COUNTS, F)
def counts(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return route: how many rows go where."""
    maker = context.counting(task.layer)
    transport = context.transports.of(task.lane, task.axes)
    return {"route": exchange_counts(inputs.one("counts"), maker, transport, context.degrees, task.axes)}


def _leg(context: StepContext, task: Task, inputs: Inputs, rows: Rows, *, outward: bool) -> Outputs:
    """Move rows along a leg towards the experts, or along the same leg home."""
    routes, cut = routes_of(inputs), task.cut
    if isinstance(rows, tuple):
        rows = held(rows, cut)
    assert task.chunk is not None, task
    legs = routes.cuts[cut.chunks][task.chunk]
    if not legs:  # every expert is on this rank
        return {"rows": rows}
    slices = routes.slices[cut.first : cut.stop]
    number = context.legs(task.layer).index(transfers.outward(task.op))
    sent, received = [s.rows_sent for s in slices], [s.rows_received for s in slices]
    first, last = (0, len(legs) - 1) if outward else (len(legs) - 1, 0)
    if number == first:
        assert isinstance(rows, tuple), task
        if outward and routes.home:
            rows = tuple(by_position(each, s.sent, routes.home) for each, s in zip(rows, slices, strict=True))
        rows = to_ranks(rows, sent if outward else received)
    assert isinstance(rows, Tensor), task
    transport = context.transports.of(task.lane, legs[number].axes)
    moved = (send_out if outward else send_home)(rows, legs[number], transport)
    if number != last:
        return {"rows": moved}
    came = to_slices(moved, received if outward else sent)
    if routes.home and not outward:
        came = tuple(as_at_home(each, s.sent, routes.home) for each, s in zip(came, slices, strict=True))
    return {"rows": came}


def move(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return rows: after a leg of dispatch or combine."""
    return _leg(context, task, inputs, inputs.one("rows"), outward=task.op in HOME)


def move_back(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return rows: their gradients after the transpose of the leg."""
    return _leg(context, task, inputs, inputs.one("d_rows"), outward=task.op not in HOME)


for op in (*HOME, *AWAY):
    handles(op, F)(move)
    handles(op, B)(move_back)


def held(rows: tuple[Tensor, ...], cut: Cut) -> tuple[Tensor, ...]:
    """Return the slices that a task has, from exactly those slices or from all."""
    return rows[cut.first : cut.stop] if len(rows) == cut.slices else rows


def routes_of(inputs: Inputs) -> Routes:
    """Return the routes of a microbatch: known where sizes are fixed, else in transit to the host."""
    found: Later[Routes] | Routes = inputs.one("route")
    return Later.of(found)


# ---- rows of several slices in one transfer ---------------------------------------------------------------
#
# At home and at the experts rows lie slice by slice, so that either phase can take its own runs of slices. In
# transit they lie rank by rank, since a rank gets what is meant for it in one piece. A block is one slice's
# rows for one rank. A chunk that is one slice lies the same either way, and nothing is copied.
#
# Where rows are split among several homes of their expert when counts are known, they lie at home by expert,
# and leave by position.
#
# Shapes: K slices of a chunk, P ranks.


Sizes = Sequence[Sequence[int]]
"""Rows of every block, [K][P]."""


def to_ranks(slices: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """Return the slices' rows rank by rank, inside a rank slice by slice."""
    if len(slices) == 1:
        return slices[0]
    blocks = [rows.split(list(row)) for rows, row in zip(slices, sizes, strict=True)]
    return torch.cat([blocks[k][p] for p in range(len(sizes[0])) for k in range(len(sizes))])


def to_slices(rows: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """Return rows slice by slice: the inverse of `to_ranks`."""
    if len(sizes) == 1:
        return (rows,)
    blocks = rows.split([size for by_slice in zip(*sizes, strict=True) for size in by_slice])
    return tuple(torch.cat(blocks[k :: len(sizes)]) for k in range(len(sizes)))


def joined(slices: Sequence[Tensor]) -> Tensor:
    """Return one tensor of all slices, slice by slice."""
    return slices[0] if len(slices) == 1 else torch.cat(list(slices))


def by_position(rows: Tensor, sent: Sequence[Sequence[int]], home: Sequence[int]) -> Tensor:
    """Return a slice's rows, which lie in the order `home`, by position. sent: by rank and slot there."""
    return _turned(rows, _filled(sent, home), _filled(sent, sorted(home)))


def as_at_home(rows: Tensor, sent: Sequence[Sequence[int]], home: Sequence[int]) -> Tensor:
    """Return a slice's rows in the order `home`: the inverse of `by_position`."""
    return _turned(rows, _filled(sent, sorted(home)), _filled(sent, home))


def _filled(sent: Sequence[Sequence[int]], positions: Sequence[int]) -> dict[int, int]:
    """Return the sizes of the blocks that have rows, in the order of `positions`."""
    sizes = [size for of_rank in sent for size in of_rank]
    return {position: sizes[position] for position in positions if sizes[position]}


def _turned(rows: Tensor, lie: dict[int, int], wanted: dict[int, int]) -> Tensor:
    """Return blocks in another order; without a copy where they lie in it already."""
    if list(lie) == list(wanted):
        return rows
    blocks = dict(zip(lie, rows.split(list(lie.values())), strict=True))
    return torch.cat([blocks[position] for position in wanted])
