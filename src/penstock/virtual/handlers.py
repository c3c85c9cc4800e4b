"""Handlers of virtual devices: compute tasks sleep, communication tasks move real bytes of the true sizes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.cost import Workload
from penstock.dispatch import DISPATCHES
from penstock.graph import Graph, Lane, Phase, Task
from penstock.mesh import Group
from penstock.ops import OPS, Kind, Op
from penstock.ops.transfers import TRANSFERS
from penstock.runtime.checks.marks import FIELDS
from penstock.runtime.handlers import NOTHING, Handler, Handlers, Inputs, Outputs
from penstock.runtime.statistics import HEADER
from penstock.runtime.transport import Transports
from penstock.virtual.cost import Move, VirtualCost

COMMUNICATION_LANES = (Lane.INTER, Lane.INTRA)


@dataclass(frozen=True)
class RankStep:
    """What one rank does in one step, worked out before it begins. Counts: int64 [peers, slices, experts].

    place: of the rank in its expert group.
    """

    seconds: Mapping[Task, float]
    moves: Mapping[Task, Move]
    counts: Mapping[Task, tuple[Tensor, Tensor]]
    place: int

    @staticmethod
    def build(cost: VirtualCost, graph: Graph, rank: int) -> RankStep:
        """Look everything up in the cost; takes milliseconds, which a step should not pay."""
        counts = {t: cost.exchanged_counts(t, rank) for t in graph.tasks if t.op == Op.COUNTS}
        return RankStep(
            seconds={t: float(cost.seconds(t)[rank]) for t in graph.tasks if t.lane.computes},
            moves={t: cost.move(t, rank) for t in graph.tasks if t.op in TRANSFERS},
            counts={t: (torch.tensor(sent), torch.tensor(got)) for t, (sent, got) in counts.items()},
            place=cost.workload.mesh.place(rank, Group.EXPERT),
        )

    @property
    def most_rows(self) -> int:
        """Rows in the largest all-to-all."""
        return max((sum(move.input_splits) for move in self.moves.values()), default=0)


class Buffers:
    """What is sent: zeros, made once per lane. A lane runs one transfer at a time, so they may share."""

    def __init__(self, work: Workload, moe_layers: int) -> None:
        self._row_bytes = round(work.wire_bytes(1))
        largest = max(*work.all_reduce_bytes, *work.expert_all_reduce_bytes)
        self.gradients = torch.zeros(largest // torch.float32.itemsize)
        self.statistics = torch.zeros(
            HEADER + 2 * moe_layers * work.num_experts + FIELDS, dtype=torch.float64
        )
        self._rows: Sequence[Tensor] = ()

    def grow(self, rows: int) -> None:
        """Make room for `rows` hidden states."""
        if not self._rows or rows > len(self._rows[0]):
            shape = (rows, self._row_bytes)
            self._rows = tuple(torch.zeros(shape, dtype=torch.uint8) for _ in COMMUNICATION_LANES)

    def rows(self, count: int, lane: Lane) -> Tensor:
        """The first `count` rows of a lane's buffer, [count, bytes of a row]."""
        return self._rows[COMMUNICATION_LANES.index(lane)][:count]


class VirtualHandlers:
    """Built for one step of one rank. Tasks hand nothing on: the sizes of all of them are known."""

    def __init__(self, step: RankStep, cost: VirtualCost, transports: Transports, buffers: Buffers) -> None:
        self.step, self.cost, self.transports, self.buffers = step, cost, transports, buffers

    def compute(self, task: Task, inputs: Inputs) -> Outputs:
        del inputs
        sleep_until(time.perf_counter() + self.step.seconds[task])
        return NOTHING

    def exchange_counts(self, task: Task, inputs: Inputs) -> Outputs:
        """Also proof that all ranks route alike: other splits than the partners' would hang."""
        del inputs
        sent, expected = self.step.counts[task]
        once = [1] * len(sent)
        if DISPATCHES[self.cost.workload.dispatch].needs_table:  # everybody tells everybody everything
            table = sent.unsqueeze(0).expand(len(sent), *sent.shape)
            received = self.transports.inter.all_to_all(table, once, once)[:, self.step.place]
        else:
            received = self.transports.inter.all_to_all(sent, once, once)
        if not torch.equal(received, expected):
            raise RuntimeError(
                "the partners have routed their tokens otherwise than this rank has worked out for them: "
                "start all ranks with the same configuration and the same version of numpy"
            )
        return NOTHING

    def move(self, task: Task, inputs: Inputs) -> Outputs:
        del inputs
        move = self.step.moves[task]
        rows = self.buffers.rows(sum(move.input_splits), task.lane)
        self.transports.of(task.lane).all_to_all(rows, move.input_splits, move.output_splits, move.group)
        return NOTHING

    def reduce_statistics(self, task: Task, inputs: Inputs) -> Outputs:
        del task, inputs
        self.transports.inter.all_reduce(self.buffers.statistics, Group.WORLD)
        return NOTHING

    def reduce_gradients(self, task: Task, inputs: Inputs) -> Outputs:
        del inputs
        elements = self.cost.reduced_bytes(task) // self.buffers.gradients.element_size()
        self.transports.inter.all_reduce(self.buffers.gradients[:elements], task.axes)
        return NOTHING


def virtual_handlers() -> Handlers:
    """What virtual devices do for every op: its methods take a VirtualHandlers as their context."""
    by_op: dict[str, Handler] = {
        Op.COUNTS: VirtualHandlers.exchange_counts,
        **dict.fromkeys(TRANSFERS, VirtualHandlers.move),
        Op.STATISTICS: VirtualHandlers.reduce_statistics,
        Op.ALL_REDUCE: VirtualHandlers.reduce_gradients,
        Op.EXPERT_ALL_REDUCE: VirtualHandlers.reduce_gradients,
    }
    computes = {op: VirtualHandlers.compute for op, spec in OPS.items() if spec.kind is not Kind.COLLECTIVE}
    return {(op, phase): handler for op, handler in {**computes, **by_op}.items() for phase in Phase}


def sleep_until(deadline_s: float) -> None:
    """Return at `deadline_s` on the clock of `time.perf_counter`, or some 50 us later, and never before.

    Waiting in a loop would be more exact, and take the processor from the transfers of all ranks.
    """
    while (left_s := deadline_s - time.perf_counter()) > 0:
        time.sleep(left_s)
