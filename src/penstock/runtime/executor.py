"""What runs a step: its plan, compiled into calls by lane; the interpreter of calls; lanes of a CPU.

There every communication lane is a thread and the compute lane is the caller's thread; `streams` is for GPUs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from types import MappingProxyType
from typing import Any, ClassVar, Protocol
from weakref import WeakSet, finalize

from penstock.graph import Graph, Lane, Name, Phase, Task
from penstock.mesh import Axes, Group
from penstock.ops import Op, spec_of
from penstock.runtime.handlers import Handler, Handlers, Inputs, Missing, check_handlers
from penstock.schedule import StepPlan
from penstock.timing import issue_order
from penstock.topology.faults import ACTIVITY, END_S, HEARERS, PeerLostError, explain
from penstock.trace import TaskRecord

MOST_KEPT = 32
"""Compiled plans that a stack remembers: a comparison runs several in turn."""

GRADIENT = "d_"

Reads = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One task, ready to run.

    Attributes:
        reads: The slots on the task's edges, by role.
        writes: The outputs that are read, and their slots.
        frees: Slots that nothing reads after this call.
        shared: Slots that several lanes read; their readers find out which is the last.
        waits: How many calls of other lanes in this span must have ended before.
    """

    task: Task
    handler: Callable[..., Mapping[str, Any]]
    reads: Reads
    writes: tuple[tuple[str, int], ...]
    frees: tuple[int, ...]
    shared: tuple[int, ...]
    waits: tuple[tuple[Lane, int], ...]


Span = Mapping[Lane, tuple[Call, ...]]
"""The calls of every lane between two stops."""


# ---- a compiled step plan: a flat list of calls per lane, with numbered slots for what they hand on -------
#
# What a task waits for, reads, leaves and frees is worked out once, when a plan is adopted. While a step
# runs, nothing is looked up by name, and a lane asks another only where a value or an order really comes from
# it.


@dataclass(frozen=True)
class Program:
    """A compiled plan: its calls, by span.

    Attributes:
        slots: The number of slots.
        shared: The number of lanes that read a slot, where there are several.
        recomputes: Whether tasks run a second time in backward.
    """

    spans: tuple[Span, ...]
    slots: int
    shared: Mapping[int, int]
    recomputes: bool = False


def compile_plan(
    plan: StepPlan,
    handlers: Handlers,
    stops: Sequence[Name],
    silent: Collection[Axes] = (),
    *,
    all: bool = True,
    twice: Handlers = MappingProxyType({}),
) -> Program:
    """Compile `plan` into spans that end with the tasks of `stops`; tasks that depend on the last one follow.

    A span holds the tasks that do not depend on its stop, and the stop.

    Args:
        stops: The tasks that end spans, in their order.
        silent: The kinds of groups of one rank. A lane that has no other tasks runs on the compute lane,
            where it costs no switch of threads.
        all: Whether to include what follows the last stop; without it, nothing is kept for readers there.
        twice: The handlers of both runs of tasks that run a second time, where they differ from `handlers`.

    Raises:
        ScheduleError: If no handler can run a task.
    """
    check_handlers(plan.graph.tasks, {**handlers, **twice})
    number: dict[Task, int] = {}  # of stops that must have run before a task
    stop_numbers = {name: i for i, name in enumerate(stops)}
    for task in plan.graph.tasks:
        number[task] = max(
            (max(number[need], stop_numbers.get(need.name, -1) + 1) for need in plan.graph.needs[task]),
            default=0,
        )
    kept = [task for task in plan.graph.tasks if all or number[task] < len(stops)]
    # Of a task that runs twice, both runs have their handler in `twice`.
    recomputed = [task for task in kept if task.phase is Phase.RECOMPUTE] if twice and all else []
    run_twice = {name for task in recomputed for name in (task.name, *task.inputs["kept"])}
    handler_of = {t: (twice if t.name in run_twice else handlers)[t.op, t.phase] for t in kept}
    lanes = _lanes(plan, kept, silent)
    # A slot for every output that is read, by the task and the output's name.
    slots: dict[tuple[Name, str], int] = {}
    reads: dict[Task, Reads] = {}
    for task in kept:
        reads[task] = tuple(
            (role, tuple(slots.setdefault((name, role.removeprefix(GRADIENT)), len(slots)) for name in names))
            for role, names in task.inputs.items()
        )
    writes: dict[Name, list[tuple[str, int]]] = defaultdict(list)
    for (name, output), slot in slots.items():
        writes[name].append((output, slot))
    # Of every slot its last reader on every lane that reads it.
    readers: dict[int, dict[Lane, Task]] = defaultdict(dict)
    for lane, order in lanes.items():
        for task in order:
            for slot in chain.from_iterable(numbers for _, numbers in reads[task]):
                readers[slot][lane] = task
    spans = []
    for span in range(len(stops) + all):
        orders = {lane: [t for t in order if number[t] == span] for lane, order in lanes.items()}
        spans.append(_calls(orders, plan.graph, handler_of, reads, writes, readers))
    shared = {slot: len(ends) for slot, ends in readers.items() if len(ends) > 1}
    return Program(tuple(spans), len(slots), shared, bool(recomputed))


def _lanes(plan: StepPlan, kept: Iterable[Task], silent: Collection[Axes]) -> dict[Lane, list[Task]]:
    """Return the order in which threads run the tasks; silent lanes are merged into the compute lane."""
    wanted, quiet = set(kept), set(silent)
    home = {
        lane: Lane.COMPUTE if all(task.axes in quiet for task in order) else lane
        for lane, order in plan.schedule.lanes.items()
    }
    lanes: dict[Lane, list[Task]] = {}
    for place in issue_order(plan.schedule.lanes, plan.graph):
        if (task := plan.graph.tasks[place]) in wanted:
            lanes.setdefault(home[task.lane], []).append(task)
    return lanes


def _calls(
    orders: Mapping[Lane, Sequence[Task]],
    graph: Graph,
    handler_of: Mapping[Task, Handler],
    reads: Mapping[Task, Reads],
    writes: Mapping[Name, Sequence[tuple[str, int]]],
    readers: Mapping[int, Mapping[Lane, Task]],
) -> Span:
    place = {task: (lane, i) for lane, order in orders.items() for i, task in enumerate(order)}
    span: dict[Lane, tuple[Call, ...]] = {}
    for lane, order in orders.items():
        awaited: dict[Lane, int] = {}
        calls = []
        for task in order:
            # How far other lanes must be, unless an earlier task of this lane has waited for that already.
            wanted: dict[Lane, int] = {}
            for need in graph.needs[task]:
                if need in place:
                    other, i = place[need]
                    if other is not lane and i + 1 > awaited.get(other, 0):
                        wanted[other] = max(wanted.get(other, 0), i + 1)
            awaited.update(wanted)
            read = {slot for _, numbers in reads[task] for slot in numbers}
            ended = [slot for slot in read if readers[slot][lane] is task]
            calls.append(
                Call(
                    task,
                    handler_of[task],
                    reads[task],
                    tuple(writes.get(task.name, ())),
                    tuple(slot for slot in ended if len(readers[slot]) == 1),
                    tuple(slot for slot in ended if len(readers[slot]) > 1),
                    tuple(wanted.items()),
                )
            )
        span[lane] = tuple(calls)
    return span


class Programs:
    """Compiled plans, each made when it is first asked for.

    Args:
        silent: The kinds of groups of one rank.
        twice: See `compile_plan`.
    """

    def __init__(
        self, handlers: Handlers, silent: Collection[Axes], twice: Handlers = MappingProxyType({})
    ) -> None:
        self._handlers, self._silent, self._twice = handlers, silent, twice
        self._known: dict[tuple[int, bool], tuple[StepPlan, Program]] = {}

    def of(self, plan: StepPlan, *, training: bool) -> Program:
        """Return the program for training or forward alone.

        Raises:
            ScheduleError: If no handler can run a task.
        """
        key = id(plan), training
        if key not in self._known:
            stops = [task.name for task in plan.graph.tasks if task.op == Op.STATISTICS]
            if len(self._known) >= MOST_KEPT:
                self._known.pop(next(iter(self._known)))
            program = compile_plan(plan, self._handlers, stops, self._silent, all=training, twice=self._twice)
            self._known[key] = plan, program  # kept with the plan, or another could get its id
        return self._known[key][1]


# ---- the interpreter: runs a compiled plan's calls, and hands every task the outputs on its edges ---------


class TaskError(RuntimeError):
    """A task failed; the step on this rank is stopped. `str()` ends with the grid, the task in >brackets<.

    Attributes:
        task: The task that failed first on this rank.
        rank: This rank.
        waited_s: How long the task had been running.
    """

    def __init__(self, task: Task, rank: int, waited_s: float, cause: BaseException, grid: str) -> None:
        partners = f" with the {Group.name(task.axes)} group" if task.axes else ""
        super().__init__(
            f"rank {rank}: task {task} ({spec_of(task.op).title}) failed on lane {task.lane}{partners} "
            f"after {waited_s:.2f} s: {type(cause).__name__}: {explain(cause)}\n\n{grid}"
        )
        self.task, self.rank, self.waited_s = task, rank, waited_s


@dataclass
class Times:
    """When the tasks of one iteration ran on a rank, without anything that they work on.

    Attributes:
        spans: Each returns the times of a span that has run.
    """

    rank: int
    origin_s: float
    spans: list[Callable[[], list[Ran]]]

    def records(self, step: int = 0) -> list[TaskRecord]:
        """Return when every task ran, in seconds from the start of the iteration on this rank.

        Args:
            step: The number of the step, for the records.

        Returns:
            One record per task; [] if times were not measured.
        """
        ran, rank, origin_s = chain.from_iterable(times() for times in self.spans), self.rank, self.origin_s
        return [TaskRecord(r.task, rank, r.start_s - origin_s, r.end_s - origin_s, step) for r in ran]


class Execution:
    """One iteration: `run` its spans one after the other.

    Args:
        context: What handlers work on.
        timed: Whether times will be read; without it a GPU measures none.
    """

    def __init__(
        self, plan: StepPlan, program: Program, lanes: Lanes, context: Any, rank: int, *, timed: bool = True
    ) -> None:
        self._plan, self._program, self._lanes, self._rank = plan, program, lanes, rank
        self._context, self._timed = context, timed
        self.values: list[Any] = [None] * program.slots
        # `list.pop` is atomic: the readers of a slot on several lanes need no lock to find out who is last.
        self._readers = {slot: [None] * count for slot, count in program.shared.items()}
        self._next = 0
        self.times = Times(rank, time.perf_counter(), [])

    def run(self) -> None:
        """Run the next span.

        Raises:
            TaskError: If a task fails; it names the task.
        """
        span = self._program.spans[self._next]
        self._next += 1
        try:
            self.times.spans.append(self._lanes.run(span, self._execute, timed=self._timed))
        except LaneError as failure:
            cause = failure.__cause__
            assert cause is not None
            if not isinstance(cause, Exception):  # an interrupt is raised unchanged
                raise cause from cause.__cause__
            grid = self._plan.schedule.grid(self._plan.graph, mark=failure.task)
            raise TaskError(failure.task, self._rank, failure.waited_s, cause, grid) from cause

    def drop(self) -> None:
        """Let go of what tasks have handed on, and of the context: no further span will run."""
        self.values.clear()
        self._context = None

    def _execute(self, call: Call) -> Inputs:
        values = self.values
        inputs = Inputs({role: tuple([values[slot] for slot in slots]) for role, slots in call.reads})
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
            try:
                values[slot] = outputs[name]
            except KeyError:
                values[slot] = Missing(task, name)
        for slot in call.frees:
            values[slot] = None
        for slot in call.shared:
            readers = self._readers[slot]
            readers.pop()
            if not readers:
                values[slot] = None
        return inputs


# ---- lanes, on which tasks really run, and threads of the CPU for them ------------------------------------


Execute = Callable[[Call], Any]
"""Runs a call; returns what it read, whose memory must outlive the stream that reads it."""


@dataclass(frozen=True)
class Ran:
    """When a task ran, in seconds on the clock of `time.perf_counter`; on a GPU measured by its events."""

    task: Task
    start_s: float
    end_s: float


class LaneError(Exception):
    """A task raised an error. Carries the task, how long it ran, and the error as `__cause__`."""

    def __init__(self, task: Task, waited_s: float) -> None:
        super().__init__(str(task))
        self.task, self.waited_s = task, waited_s


class Lanes(Protocol):
    """Runs the calls of a span; each starts when the call before it and those that it waits for are done.

    Attributes:
        issued_s: How long, by task, the thread that issues all tasks was busy with it when times were last
            asked for, waits for the device included; empty where every lane has a thread of its own.
    """

    issued_s: dict[Task, float]

    def run(self, span: Span, execute: Execute, *, timed: bool = True) -> Callable[[], list[Ran]]:
        """Run all calls, then return a function that gives their times.

        Args:
            timed: Whether times will be asked for; without it there are none where they cost something.

        Raises:
            LaneError: If a task fails.
        """
        ...

    def close(self) -> None: ...


class ThreadLanes:
    """CPU lanes. `on_failure` must wake the threads that wait in a collective, as far as that can be done.

    Gloo wakes no thread whose message is partly on its way when the connection breaks: such a one waits for
    the timeout. Its lane is left alone after `END_S`, and gets another thread. So a step does not depend on
    it, neither on the rank that fails nor on one that hears of it.
    """

    _live: ClassVar[WeakSet[ThreadLanes]] = WeakSet()
    """Those of this process that meet other ranks."""

    def __init__(self, on_failure: Callable[[], None], *, alone: bool = False) -> None:
        self._on_failure = on_failure
        self._workers: dict[Lane, _Worker] = {}
        finalize(self, _leave_alone, self._workers).atexit = False
        self.issued_s: dict[Task, float] = {}
        self._run: _ThreadRun | None = None
        self._lost = ""
        if not alone:
            self._live.add(self)

    def run(self, span: Span, execute: Execute, *, timed: bool = True) -> Callable[[], list[Ran]]:
        del timed  # two looks at the clock cost less than to ask whether they are wanted
        self._run = run = _ThreadRun(span, execute, self._on_failure)
        try:
            if self._lost:  # after `_run` is set: news that come between the two are seen twice, not missed
                run.lose(self._lost)
            busy: list[Lane] = []
            try:
                for lane, calls in run.span.items():
                    if calls and not lane.computes:
                        worker = self._workers.get(lane) or self._workers.setdefault(lane, _Worker(lane))
                        worker.jobs.put(run.walk_to_end)
                        busy.append(lane)
                run.walk(Lane.COMPUTE)
            except BaseException as error:  # an interrupt between two tasks, or before all lanes have theirs
                run.interrupt(Lane.COMPUTE, error)
            for lane in run.settle(busy):  # after a failure those that could not be woken
                self._workers.pop(lane).leave_alone()
        finally:
            self._run = None
        if run.failure is not None:
            raise run.failure from run.failure.__cause__
        # What follows keeps not `run`, which refers to `execute`: a cycle would keep a step's tensors.
        times = {lane: progress.times for lane, progress in run.lanes.items()}
        return lambda: [
            Ran(call.task, start_s, end_s)
            for lane, calls in span.items()
            for call, (start_s, end_s) in zip(calls, times[lane], strict=True)
        ]

    @classmethod
    def hear(cls, told: str) -> None:
        """End the runs of this process that meet other ranks: a rank has given up.

        Runs to come on the same connections end, too.

        Args:
            told: What is known of it, in words.
        """
        for lanes in list(cls._live):
            lanes._lost = told
            run = lanes._run
            if run is not None:
                run.lose(told)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.stop()
        self._workers.clear()


HEARERS.append(ThreadLanes.hear)


def _leave_alone(workers: Mapping[Lane, _Worker]) -> None:
    """Let the threads of lanes that nobody holds any more end."""
    for worker in workers.values():
        worker.leave_alone()


class _Worker:
    """The thread of one communication lane; lives as long as its lanes."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.jobs: SimpleQueue[Callable[[Lane], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._loop, name=f"penstock-{lane}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.leave_alone()
        self._thread.join()

    def leave_alone(self) -> None:
        """Let the thread end when its job does, whenever that is."""
        self.jobs.put(None)

    def _loop(self) -> None:
        while (job := self.jobs.get()) is not None:
            job(self.lane)
            del job  # or it would keep the tensors of its step until the next


class _Progress:
    """How far one lane is, and what it waits for. Only its own thread writes `done` and `wanted`.

    A lane that waits names the lane and the count in `wanted`, then looks once more, then sleeps; a lane that
    ends a call counts it, then looks which lanes want it. One of the two sees the other, so no wake-up is
    lost.
    """

    __slots__ = ("done", "times", "wake", "wanted")

    def __init__(self) -> None:
        self.done = 0
        self.wanted: tuple[Lane, int] | None = None
        self.wake: SimpleQueue[None] = SimpleQueue()
        self.times: list[tuple[float, float]] = []


class _ThreadRun:
    """One span on thread lanes: how far each lane is, and the first failure."""

    def __init__(self, span: Span, execute: Execute, on_failure: Callable[[], None]) -> None:
        self.span, self._execute, self._on_failure = span, execute, on_failure
        self.lanes = {lane: _Progress() for lane in span}
        self._ended: SimpleQueue[Lane | None] = SimpleQueue()
        self._failing = Lock()
        self.failure: LaneError | None = None

    def walk(self, lane: Lane) -> None:
        """Run one lane's calls from front to back; stop early if any lane has failed."""
        if lane not in self.span:
            return
        progress = self.lanes[lane]
        others = [other for name, other in self.lanes.items() if name is not lane]
        execute, times, clock = self._execute, progress.times, time.perf_counter
        for call in self.span[lane]:
            try:
                for name, count in call.waits:
                    awaited = self.lanes[name]
                    if awaited.done < count:
                        progress.wanted = (name, count)
                        while awaited.done < count and self.failure is None:
                            progress.wake.get()
                        progress.wanted = None
                if self.failure is not None:
                    return
            except BaseException as error:  # an interrupt while waiting stops all lanes, too
                self._fail(call.task, 0.0, error)
                return
            start_s = clock()
            try:
                execute(call)
            except BaseException as error:
                self._fail(call.task, clock() - start_s, error)
                return
            times.append((start_s, clock()))
            progress.done += 1
            for other in others:
                wanted = other.wanted
                if wanted is not None and wanted[0] is lane and wanted[1] <= progress.done:
                    other.wake.put(None)

    def walk_to_end(self, lane: Lane) -> None:
        """Run one lane's calls, and say so when that is over."""
        try:
            self.walk(lane)
        finally:
            self._ended.put(lane)

    def settle(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Wait until these lanes have ended. Return those that a failure has not woken from a transfer.

        An interrupt that comes meanwhile stops all lanes first.
        """
        while lanes:
            # What runs on this host alone ends by itself, and works on what its caller goes on with.
            stuck = self.failure is not None and all(lane.is_network for lane in lanes)
            try:
                ended = self._ended.get(timeout=END_S if stuck else None)
            except Empty:
                break
            except BaseException as error:
                self.interrupt(lanes[0], error)
            else:
                lanes = [lane for lane in lanes if lane is not ended]
        return lanes

    def interrupt(self, lane: Lane, error: BaseException, waited_s: float = 0.0) -> None:
        """Stop all lanes because of an interruption from outside while `lane` was running."""
        lane = lane if self.span.get(lane) else next(each for each, calls in self.span.items() if calls)
        calls, done = self.span[lane], self.lanes[lane].done
        self._fail(calls[min(done, len(calls) - 1)].task, waited_s, error)

    def lose(self, told: str) -> None:
        """Stop all lanes as another rank no longer takes part; the first that may wait for it says so."""
        going = (
            lane for lane in self.span if lane.is_network and self.lanes[lane].done < len(self.span[lane])
        )
        self.interrupt(next(going, Lane.COMPUTE), PeerLostError(told), ACTIVITY.waited_s)

    def _fail(self, task: Task, waited_s: float, error: BaseException) -> None:
        with self._failing:
            first = self.failure is None
            if first:
                failure = LaneError(task, waited_s)
                failure.__cause__ = error
                self.failure = failure
        for lane in self.lanes.values():
            lane.wake.put(None)
        self._ended.put(None)
        if first and self.failure is not None:
            stop_others(self._on_failure, self.failure)


def stop_others(on_failure: Callable[[], None], failure: LaneError) -> None:
    try:
        on_failure()
    except Exception as error:  # the first failure is the one to report
        failure.add_note(f"while stopping the other lanes: {type(error).__name__}: {error}")
