"""Handlers of virtual devices: compute tasks sleep, communication tasks move real bytes of the true sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.cost import RoutedCost, Workload
from penstock.cost.moves import MOVES
from penstock.features.routed import Move
from penstock.features.sharded_optimizer.feature import GATHERS
from penstock.graph import Graph, Lane, Phase, Task
from penstock.mesh import Group
from penstock.ops import OPS, Kind, Op
from penstock.ops.core import GRADIENT_KINDS
from penstock.routing.sizes import split_sizes
from penstock.runtime.fingerprints import FIELDS
from penstock.runtime.handlers import NOTHING, Handler, Handlers, Inputs, Outputs
from penstock.runtime.statistics import HEADER
from penstock.runtime.transport import Transport, Transports

COMMUNICATION_LANES = (Lane.INTER, Lane.INTRA)


@dataclass(frozen=True)
class RankStep:
    """The tasks of one rank in one step, computed before it begins.

    Attributes:
        seconds: Seconds of computation, of the host's work, and of copies by tasks that move nothing.
        moves: What tasks send and receive.
        counts: Numbers of rows that tasks send and receive in exchanges of counts, int64.
    """

    seconds: Mapping[Task, float]
    moves: Mapping[Task, Move]
    counts: Mapping[Task, tuple[Tensor, Tensor]]

    @staticmethod
    def build(cost: RoutedCost, graph: Graph, rank: int, host_s: Mapping[str, float]) -> RankStep:
        """Look up everything in the cost; takes milliseconds, which a step should not pay.

        Args:
            host_s: Seconds of the host's tasks, by op.
        """
        counts = {t: cost.moves.exchanged_counts(t, rank) for t in graph.tasks if t.op == Op.COUNTS}
        moves = {t: cost.moves.move(t, rank) for t in graph.tasks if t.op in MOVES}
        slept = [t for t in graph.tasks if t.lane.computes or (t in moves and not moves[t].collective)]
        solved = {t: host_s[t.op] for t in graph.tasks if t.lane is Lane.HOST}
        return RankStep(
            seconds={t: float(cost(t)[rank]) for t in slept} | solved,
            moves=moves,
            counts={t: (torch.tensor(sent), torch.tensor(got)) for t, (sent, got) in counts.items()},
        )

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest buffer that is handed to a transport."""
        return max((move.sent_bytes for move in self.moves.values()), default=0)


class Buffers:
    """Buffers to send: zeros, made once per lane.

    A lane runs one transfer at a time, so transfers may share them.
    """

    def __init__(self, work: Workload, moe_layers: int) -> None:
        self.gradients = torch.zeros(0)
        self.statistics = torch.zeros(
            HEADER + 2 * moe_layers * (1 + work.num_experts) + FIELDS, dtype=torch.float64
        )
        self.loads = torch.zeros(1, moe_layers, work.num_experts, dtype=torch.int32)
        self._bytes: Sequence[Tensor] = ()

    def grow(self, step: RankStep, cost: RoutedCost) -> None:
        """Make room for everything that a step sends."""
        most = step.most_bytes
        if not self._bytes or most > len(self._bytes[0]):
            self._bytes = tuple(torch.zeros(most, dtype=torch.uint8) for _ in COMMUNICATION_LANES)
        sizes_bytes = cost.workload.gradients_of(cost.shape.expert_form).values()
        largest = max(map(max, sizes_bytes)) // torch.float32.itemsize
        if largest > len(self.gradients):
            self.gradients = torch.zeros(largest)

    def rows(self, move: Move, lane: Lane) -> Tensor:
        """Return the first bytes of a lane's buffer as the rows that a move sends, [rows, bytes of a row]."""
        held = self._bytes[COMMUNICATION_LANES.index(lane)][: move.sent_bytes]
        return held.view(sum(move.input_splits), move.row_bytes)


class VirtualHandlers:
    """What tasks do in one step of one rank."""

    def __init__(self, step: RankStep, cost: RoutedCost, transports: Transports, buffers: Buffers) -> None:
        self.step, self.cost, self.transports, self.buffers = step, cost, transports, buffers

    def compute(self, task: Task) -> None:
        sleep_until(time.perf_counter() + self.step.seconds[task])

    def exchange_counts(self, task: Task) -> None:
        """Exchange counts, and check that all ranks route alike: differing splits would hang."""
        sent, expected = self.step.counts[task]
        transport, once = self.transports.of(task.lane, task.axes), [1] * len(expected)
        if expected.dim() > sent.dim():  # every rank sends all counts to every other
            received = transport.all_gather(sent.unsqueeze(0), once, task.axes)
        else:
            received = transport.all_to_all(sent, once, once, task.axes)
        if not torch.equal(received, expected):
            raise RuntimeError(
                "the partners have routed their tokens otherwise than this rank has worked out for them: "
                "start all ranks with the same configuration and the same version of numpy"
            )

    def move(self, task: Task) -> None:
        """Send the bytes that a real task sends; a task that only copies takes its time."""
        move = self.step.moves[task]
        if not move.collective:
            self.compute(task)
            return
        rows, transport = self.buffers.rows(move, task.lane), self.transports.of(task.lane, move.group)
        match move.collective:
            case "all_gather":
                transport.all_gather(rows, move.output_splits, move.group)
            case "all_reduce":
                transport.all_reduce(rows.view(torch.float32), move.group)
            case _:
                transport.all_to_all(rows, move.input_splits, move.output_splits, move.group)

    def reduce_statistics(self, task: Task) -> None:
        del task
        self.transports.inter.all_reduce(self.buffers.statistics, Group.WORLD)

    def gather_loads(self, task: Task) -> None:
        transport = self.transports.of(task.lane, task.axes)
        transport.all_gather(self.buffers.loads, [1] * transport.size(task.axes), task.axes)

    def scatter_gradients(self, task: Task) -> None:
        piece, sizes, transport = self._piece(task)
        transport.all_to_all(piece, sizes, [sizes[transport.place(task.axes)]] * len(sizes), task.axes)

    def gather_parameters(self, task: Task) -> None:
        piece, sizes, transport = self._piece(task)
        transport.all_gather(piece[: sizes[transport.place(task.axes)]], sizes, task.axes)

    def sum_norm(self, task: Task) -> None:
        transport = self.transports.of(task.lane, task.axes)
        transport.all_reduce(self.buffers.statistics[: transport.size(task.axes)], task.axes)

    def _piece(self, task: Task) -> tuple[Tensor, tuple[int, ...], Transport]:
        """Return a piece of flat gradients or parameters, and how it is shared."""
        elements = self.cost.even.reduced_bytes(task) // self.buffers.gradients.element_size()
        transport = self.transports.of(task.lane, task.axes)
        return self.buffers.gradients[:elements], split_sizes(elements, transport.size(task.axes)), transport

    def reduce_gradients(self, task: Task) -> None:
        piece, _, transport = self._piece(task)
        transport.all_reduce(piece, task.axes)


Work = Callable[[VirtualHandlers, Task], None]


def virtual_handlers() -> Handlers:
    """Return the handlers of virtual devices for every op; they take a VirtualHandlers as their context."""
    kinds = GRADIENT_KINDS.values()
    by_op: dict[str, Work] = {
        Op.COUNTS: VirtualHandlers.exchange_counts,
        **dict.fromkeys(MOVES, VirtualHandlers.move),
        Op.STATISTICS: VirtualHandlers.reduce_statistics,
        Op.LOADS: VirtualHandlers.gather_loads,
        **dict.fromkeys((kind.reduce for kind in kinds), VirtualHandlers.reduce_gradients),
        **dict.fromkeys((kind.scatter for kind in kinds), VirtualHandlers.scatter_gradients),
        **dict.fromkeys(GATHERS, VirtualHandlers.gather_parameters),
        Op.NORM: VirtualHandlers.sum_norm,
    }
    computes = {op: VirtualHandlers.compute for op, spec in OPS.items() if spec.kind is not Kind.COLLECTIVE}
    return {(op, phase): _handler(work) for op, work in {**computes, **by_op}.items() for phase in Phase}


def _handler(work: Work) -> Handler:
    """Return the handler that does this work. Tasks pass on no data: all their sizes are known."""

    def handle(context: VirtualHandlers, task: Task, inputs: Inputs) -> Outputs:
        del inputs
        work(context, task)
        return NOTHING

    return handle


def sleep_until(deadline_s: float) -> None:
    """Return at `deadline_s` on the clock of `time.perf_counter`, or some 50 us later, and never before.

    Waiting in a loop would be more exact, and take the processor from the transfers of all ranks.
    """
    while (left_s := deadline_s - time.perf_counter()) > 0:
        time.sleep(left_s)
