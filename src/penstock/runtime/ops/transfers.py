"""Handlers that move rows. The transpose of a leg is the same leg the other way.

Rows that leave for another rank or come from one are a tuple with one tensor per slice; between two legs they
are one tensor, rank by rank.
"""

from __future__ import annotations

from torch import Tensor

from penstock.graph import Cut, Phase, Task
from penstock.ops import Op, transfers
from penstock.ops.transfers import AWAY, HOME
from penstock.routing.routes import Routes
from penstock.runtime.handlers import Inputs, Outputs, StepContext, handles
from penstock.runtime.ops.slices import as_at_home, by_position, to_ranks, to_slices
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
