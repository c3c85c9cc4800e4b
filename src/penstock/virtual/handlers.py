"""Handlers of virtual devices: compute tasks sleep, communication tasks move real bytes of the true sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.cost import Workload, split_sizes
from penstock.graph import Graph, Group, Lane, Op, Phase, Task
from penstock.graph.task import SPECS
from penstock.runtime.executor import Inputs
from penstock.runtime.results import Outcome
from penstock.runtime.statistics import HEADER
from penstock.runtime.transport import Transport
from penstock.virtual.cost import Splits, VirtualCost

ELEMENT_TYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True)
class RankStep:
    """What one rank does in one step, worked out before it begins. Counts: int64 [peers, chunks, experts]."""

    seconds: Mapping[Task, float]
    splits: Mapping[Task, Splits]
    counts: Mapping[Task, tuple[Tensor, Tensor]]

    @staticmethod
    def build(cost: VirtualCost, graph: Graph, rank: int) -> RankStep:
        """Look everything up in the cost; takes milliseconds, which a step should not pay."""
        moves = (Op.COUNTS, Op.DISPATCH, Op.COMBINE)
        counts = {t: cost.exchanged_counts(t, rank) for t in graph.tasks if t.op is Op.COUNTS}
        return RankStep(
            seconds={t: float(cost.seconds(t)[rank]) for t in graph.tasks if t.lane is Lane.COMPUTE},
            splits={t: cost.splits(t, rank) for t in graph.tasks if t.op in moves},
            counts={t: (torch.tensor(sent), torch.tensor(got)) for t, (sent, got) in counts.items()},
        )

    @property
    def most_rows(self) -> int:
        """Hidden states in the largest all-to-all."""
        sent = (sum(rows) for task, (rows, _) in self.splits.items() if task.op is not Op.COUNTS)
        return max(sent, default=0)


class Buffers:
    """What is sent: zeros, made once. The lane `inter` runs one transfer at a time, so they may share."""

    def __init__(self, work: Workload, moe_layers: int) -> None:
        self._width, self._type = work.hidden_size, ELEMENT_TYPES[work.element_bytes]
        largest = max(*work.all_reduce_bytes, *work.expert_all_reduce_bytes)
        self.gradients = torch.zeros(largest // torch.float32.itemsize)
        self.statistics = torch.zeros(HEADER + 2 * moe_layers * work.num_experts, dtype=torch.float64)
        self._rows = torch.zeros(0, self._width, dtype=self._type)

    def grow(self, rows: int) -> None:
        """Make room for `rows` hidden states."""
        if rows > len(self._rows):
            self._rows = torch.zeros(rows, self._width, dtype=self._type)

    def rows(self, count: int) -> Tensor:
        """The first `count` hidden states, [count, hidden size]."""
        return self._rows[:count]


class VirtualHandlers:
    """Built for one step of one rank. Tasks hand nothing on: the sizes of all of them are known."""

    def __init__(self, step: RankStep, cost: VirtualCost, transport: Transport, buffers: Buffers) -> None:
        self.step, self.cost, self.transport, self.buffers = step, cost, transport, buffers

    def table(self) -> dict[tuple[Op, Phase], Callable[[Task, Inputs], Outcome]]:
        """The handler of every op and phase."""
        by_op = {
            Op.COUNTS: self.exchange_counts,
            Op.DISPATCH: self.move,
            Op.COMBINE: self.move,
            Op.STATISTICS: self.reduce_statistics,
            Op.ALL_REDUCE: self.reduce_gradients,
            Op.EXPERT_ALL_REDUCE: self.reduce_gradients,
        }
        return {
            (op, Phase(phase)): by_op.get(op, self.compute)
            for op, spec in SPECS.items()
            for phase in spec.phases
        }

    def compute(self, task: Task, inputs: Inputs) -> Outcome:
        del inputs
        sleep_until(time.perf_counter() + self.step.seconds[task])
        return Outcome(None)

    def exchange_counts(self, task: Task, inputs: Inputs) -> Outcome:
        """Also proof that all ranks route alike: other splits than the partners' would hang."""
        del inputs
        sent, expected = self.step.counts[task]
        received = self.transport.all_to_all(sent, *self.step.splits[task])
        if not torch.equal(received, expected):
            raise RuntimeError(
                "the partners have routed their tokens otherwise than this rank has worked out for them: "
                "start all ranks with the same configuration and the same version of numpy"
            )
        return Outcome(None)

    def move(self, task: Task, inputs: Inputs) -> Outcome:
        del inputs
        input_splits, output_splits = self.step.splits[task]
        self.transport.all_to_all(self.buffers.rows(sum(input_splits)), input_splits, output_splits)
        return Outcome(None)

    def reduce_statistics(self, task: Task, inputs: Inputs) -> Outcome:
        del task, inputs
        self.transport.all_reduce(self.buffers.statistics, Group.WORLD)
        return Outcome(None)

    def reduce_gradients(self, task: Task, inputs: Inputs) -> Outcome:
        del inputs
        work, shape = self.cost.workload, self.cost.shape
        replicated = task.op is Op.ALL_REDUCE
        sizes = work.all_reduce_bytes if replicated else work.expert_all_reduce_bytes
        chunks = shape.all_reduce_chunks if replicated else shape.expert_all_reduce_chunks
        assert task.chunk is not None, task
        elements = sizes[task.layer] // self.buffers.gradients.element_size()
        chunk = self.buffers.gradients[: split_sizes(elements, chunks[task.layer])[task.chunk]]
        self.transport.all_reduce(chunk, task.spec.group)
        return Outcome(None)


def sleep_until(deadline_s: float) -> None:
    """Return at `deadline_s` on the clock of `time.perf_counter`, or some 50 us later, and never before.

    Waiting in a loop would be more exact, and take the processor from the transfers of all ranks.
    """
    while (left_s := deadline_s - time.perf_counter()) > 0:
        time.sleep(left_s)
