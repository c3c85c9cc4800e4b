"""The interpreter: runs a compiled plan's calls, and hands every task the outputs on its edges."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from penstock.graph import Graph
from penstock.runtime.calls import Call
from penstock.runtime.errors import TaskError
from penstock.runtime.handlers import Inputs, Missing
from penstock.runtime.lanes import LaneError, Lanes, Ran
from penstock.runtime.program import Program
from penstock.schedule import StepPlan
from penstock.topology.faults import ACTIVITY
from penstock.trace import TaskRecord


class Execution:
    """One iteration: `run` its spans one after the other; then read its `records`.

    context: what handlers work on. timed: whether records will be read; without it a GPU has none.
    """

    def __init__(
        self, plan: StepPlan, program: Program, lanes: Lanes, context: Any, rank: int, *, timed: bool = True
    ) -> None:
        self._plan, self._program, self._lanes, self._rank = plan, program, lanes, rank
        self._context, self._timed = context, timed
        self.values: list[Any] = [None] * program.slots
        # `list.pop` is atomic: the readers of a slot on several lanes need no lock to find out who is last.
        self._readers = {slot: [None] * count for slot, count in program.shared.items()}
        self._times: list[Callable[[], list[Ran]]] = []
        self._next = 0
        self._origin_s = time.perf_counter()

    @property
    def graph(self) -> Graph:
        """All tasks of the iteration."""
        return self._plan.graph

    def run(self) -> None:
        """Run the next span. Raises TaskError naming the task that failed."""
        span = self._program.spans[self._next]
        self._next += 1
        try:
            self._times.append(self._lanes.run(span, self._execute, timed=self._timed))
        except LaneError as failure:
            self._raise(failure)

    def drop(self) -> None:
        """Let go of what tasks have handed on, and of the context: no further span will run."""
        self.values.clear()
        self._context = None

    def _execute(self, call: Call) -> Inputs:
        values = self.values
        inputs = Inputs()
        for role, slots in call.reads:
            inputs[role] = tuple([values[slot] for slot in slots])
        task = call.task
        ACTIVITY.begin(task.lane, task)
        try:
            outputs = call.handler(self._context, task, inputs)
        except Exception as error:  # noted before the transports are cut: peers ask at once
            ACTIVITY.fail(f"task {task}", error)
            raise
        finally:
            ACTIVITY.end(task.lane)
        for name, slot in call.writes:
            values[slot] = outputs[name] if name in outputs else Missing(task, name)
        for slot in call.frees:
            values[slot] = None
        for slot in call.shared:
            readers = self._readers[slot]
            readers.pop()
            if not readers:
                values[slot] = None
        return inputs

    def _raise(self, failure: LaneError) -> None:
        cause = failure.__cause__
        assert cause is not None
        if not isinstance(cause, Exception):  # an interrupt is raised unchanged
            raise cause
        grid = self._plan.schedule.grid(self._plan.graph, mark=failure.task)
        raise TaskError(failure.task, self._rank, failure.waited_s, cause, grid) from cause

    def records(self, step: int = 0) -> list[TaskRecord]:
        """Return when every task ran, in seconds from the start of the iteration on this rank; [] if that was
        not measured."""
        ran = [task for times in self._times for task in times()]
        origin_s, rank = self._origin_s, self._rank
        return [TaskRecord(r.task, rank, r.start_s - origin_s, r.end_s - origin_s, step) for r in ran]
