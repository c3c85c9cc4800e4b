"""The interpreter: walks a schedule's lanes, hands every task the results of its dependencies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.graph import Op, Phase, Task
from penstock.runtime.errors import TaskError
from penstock.runtime.lanes import LaneError, Lanes, Ran
from penstock.runtime.results import Outcome, ResultTable
from penstock.schedule import StepPlan
from penstock.topology.rollcall import ACTIVITY
from penstock.trace import TaskRecord


@dataclass(frozen=True)
class Inputs:
    """What a handler sees: the results of its task's dependencies, by task."""

    task: Task
    table: ResultTable

    def __getitem__(self, need: Task) -> Any:
        return self.table.read(self.task, need)


class Handler(Protocol):
    """What really happens when a task of one op and phase runs."""

    def __call__(self, task: Task, inputs: Inputs, /) -> Outcome: ...


Handlers = Mapping[tuple[Op, Phase], Handler]


class Execution:
    """One iteration: `run` its forward half, then its backward half; then read its `records`."""

    def __init__(
        self, plan: StepPlan, lanes: Lanes, handlers: Handlers, rank: int, *, training: bool
    ) -> None:
        self._plan, self._lanes, self._handlers, self._rank = plan, lanes, handlers, rank
        tasks = [task for task in plan.graph.tasks if training or task.forward]
        self.results = ResultTable(plan.graph, tasks)
        self._times: list[Callable[[], list[Ran]]] = []
        self._origin_s = time.perf_counter()
        self._needs = plan.graph.needs

    def run(self, *, forward: bool) -> None:
        """Run all tasks of one half. Raises TaskError naming the task that failed."""
        orders = self._plan.schedule.half(forward=forward).lanes
        try:
            times = self._lanes.run(orders, self._needs.__getitem__, self._execute)
        except LaneError as failure:
            self._raise(failure)
        self._times.append(times)

    def _execute(self, task: Task) -> Any:
        inputs = Inputs(task, self.results)
        read = [inputs[need] for need in self._needs[task]]
        ACTIVITY.begin(task.lane, task)
        try:
            self.results.put(task, self._handlers[task.op, task.phase](task, inputs))
        except Exception as error:  # noted before the transports are cut: peers ask at once
            ACTIVITY.fail(f"task {task}", error)
            raise
        finally:
            ACTIVITY.end(task.lane)
        self.results.done(task)
        return read

    def _raise(self, failure: LaneError) -> None:
        cause = failure.__cause__
        assert cause is not None
        if not isinstance(cause, Exception):  # an interrupt stays what it is
            raise cause
        grid = self._plan.schedule.grid(self._plan.graph, mark=failure.task)
        raise TaskError(failure.task, self._rank, failure.waited_s, cause, grid) from cause

    def records(self, step: int = 0) -> list[TaskRecord]:
        """When every task ran, in seconds from the start of the iteration on this rank."""
        ran = [task for times in self._times for task in times()]
        origin_s, rank = self._origin_s, self._rank
        return [TaskRecord(r.task, rank, r.start_s - origin_s, r.end_s - origin_s, step) for r in ran]
