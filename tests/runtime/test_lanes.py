"""Thread lanes: order, overlap, and what happens to everybody else when one task fails."""

# ruff: noqa: TID251 - lets the caller reach its wait; the outcome is the same if it does not

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given

from penstock.graph import Lane, Task
from penstock.runtime.executor import Call, LaneError, ThreadLanes, _ThreadRun, _Worker
from penstock.runtime.handlers import Inputs
from penstock.runtime.streams import tensors_in
from penstock.runtime.transport import Later
from penstock.schedule import StepPlan
from penstock.step import StepShape
from tests.runtime.programs import plan_in, program_of, span_of
from tests.steps import lone_task, random_orders, seeds, shapes
from tests.support.draws import draws

PATIENCE_S = 60.0
"""For waits that end at once unless something is broken."""

COMPUTE = lone_task("L0.AT.m0.F"), lone_task("L0.X.m0.c0.F")
INTER = lone_task("L0.D.m0.c0.F"), lone_task("L0.C.m0.c0.F")


@dataclass
class Spy:
    """Counts failures; its event is what a blocked handler waits for."""

    calls: int = 0
    failed: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> None:
        self.calls += 1
        self.failed.set()


@pytest.fixture
def spy() -> Spy:
    return Spy()


@pytest.fixture
def lanes(spy: Spy) -> Iterator[ThreadLanes]:
    made = ThreadLanes(spy)
    yield made
    made.close()


def run(
    lanes: ThreadLanes,
    handlers: dict[Task, Callable[[], Any]],
    needs: Mapping[Task, tuple[Task, ...]] | None = None,
) -> list[Task]:
    """Run the tasks of `handlers`, on their lanes, in their order; returns those that ended."""
    span = span_of({lane: [t for t in handlers if t.lane is lane] for lane in Lane}, needs)
    return [ran.task for ran in lanes.run(span, lambda call: handlers[call.task]())()]


def raising(error: BaseException) -> Callable[[], None]:
    def handler() -> None:
        raise error

    return handler


# ---- order -------------------------------------------------------------------------------------------------


def events_of(plan: StepPlan) -> list[tuple[str, Task]]:
    """Starts and ends of all tasks as they happened, span by span."""
    lanes, events = ThreadLanes(lambda: None), list[tuple[str, Task]]()

    def execute(call: Call) -> None:
        events.append(("start", call.task))
        events.append(("end", call.task))

    try:
        ran = [r for span in program_of(plan).spans for r in lanes.run(span, execute)()]
    finally:
        lanes.close()
    assert sorted(map(str, (r.task for r in ran))) == sorted(map(str, plan.graph.tasks))
    return events


@draws(30)
@given(shapes(layers=2), seeds)
def test_every_lane_runs_its_list_and_nothing_starts_before_its_inputs(shape: StepShape, seed: int) -> None:
    plan = plan_in(shape, lambda graph: random_orders(graph, seed))
    events, needs = events_of(plan), plan.graph.needs
    for lane, order in plan.schedule.lanes.items():
        assert tuple(t for what, t in events if what == "start" and t.lane is lane) == order
    place = {event: i for i, event in enumerate(events)}
    for task in plan.graph.tasks:
        for need in needs[task]:
            assert place["end", need] < place["start", task]


def test_lanes_run_at_the_same_time(lanes: ThreadLanes) -> None:
    """Both tasks must be inside at once for either to get out."""
    meeting = threading.Barrier(2)

    def meet() -> None:
        meeting.wait(PATIENCE_S)

    assert set(run(lanes, {COMPUTE[0]: meet, INTER[0]: meet})) == {COMPUTE[0], INTER[0]}


def test_computation_stays_on_the_thread_of_the_caller(lanes: ThreadLanes) -> None:
    threads: dict[Task, threading.Thread] = {}
    tasks = [*COMPUTE, *INTER]

    def note(task: Task) -> None:
        threads[task] = threading.current_thread()

    for _ in range(2):
        run(lanes, {t: partial(note, t) for t in tasks})
        assert {threads[t] for t in COMPUTE} == {threading.main_thread()}
        communication = {threads[t] for t in INTER}
        assert len(communication) == 1
        assert threading.main_thread() not in communication


# ---- failures ----------------------------------------------------------------------------------------------


def test_an_error_in_communication_reaches_the_caller(lanes: ThreadLanes, spy: Spy) -> None:
    """The compute lane waits for the task that fails; it is stopped, and nothing behind it runs."""
    error, ran = OSError("cable"), list[Task]()
    needs: dict[Task, tuple[Task, ...]] = {
        COMPUTE[0]: (),
        COMPUTE[1]: (INTER[0],),
        INTER[0]: (COMPUTE[0],),
        INTER[1]: (),
    }
    handlers: dict[Task, Callable[[], Any]] = {t: partial(ran.append, t) for t in needs}
    handlers[INTER[0]] = raising(error)
    with pytest.raises(LaneError) as caught:
        run(lanes, handlers, needs)
    assert caught.value.task == INTER[0]
    assert caught.value.__cause__ is error
    assert caught.value.waited_s >= 0
    assert ran == [COMPUTE[0]]
    assert spy.calls == 1


def test_an_error_in_computation_wakes_blocked_communication(lanes: ThreadLanes, spy: Spy) -> None:
    """The first failure is the one that is reported, though the woken task fails as well."""
    inside = threading.Event()

    def blocked() -> None:
        inside.set()
        assert spy.failed.wait(PATIENCE_S)
        raise OSError("connection closed")

    def broken() -> None:
        assert inside.wait(PATIENCE_S)
        raise ValueError("computation")

    with pytest.raises(LaneError) as caught:
        run(lanes, {COMPUTE[0]: broken, INTER[0]: blocked})
    assert caught.value.task == COMPUTE[0]
    assert isinstance(caught.value.__cause__, ValueError)
    assert spy.calls == 1


@pytest.mark.parametrize("failing", [COMPUTE[0], INTER[0]], ids=str)
def test_after_a_failure_the_lanes_are_idle_and_usable(lanes: ThreadLanes, failing: Task) -> None:
    handlers: dict[Task, Callable[[], Any]] = dict.fromkeys([*COMPUTE, *INTER], lambda: None)
    for _ in range(2):
        with pytest.raises(LaneError):
            run(lanes, handlers | {failing: raising(OSError())})
        assert len(run(lanes, handlers)) == 4


@pytest.mark.parametrize("fails", [False, True])
def test_close_ends_the_threads(spy: Spy, fails: bool) -> None:
    before = set(threading.enumerate())
    lanes = ThreadLanes(spy)
    if fails:
        with pytest.raises(LaneError):
            run(lanes, {INTER[0]: raising(OSError())})
    else:
        run(lanes, {INTER[0]: lambda: None})
    (worker,) = set(threading.enumerate()) - before
    lanes.close()
    assert not worker.is_alive()


@pytest.mark.parametrize("task", [COMPUTE[0], INTER[0]], ids=str)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_interrupts_stop_all_lanes_too(
    lanes: ThreadLanes, spy: Spy, task: Task, error: BaseException
) -> None:
    with pytest.raises(LaneError) as caught:
        run(lanes, dict.fromkeys([*COMPUTE, *INTER], lambda: None) | {task: raising(error)})
    assert caught.value.task == task
    assert caught.value.__cause__ is error
    assert spy.calls == 1


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, whatever handler the test run has."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupting(spy: Spy) -> Callable[[], None]:
    """Ctrl-C, then blocks as a collective does, until the lanes' failure wakes it."""

    def handler() -> None:
        time.sleep(0.05)  # the caller has reached its wait by now; the outcome must be the same if not
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        spy.failed.wait(PATIENCE_S)

    return handler


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_while_computation_waits_for_an_input_stops_all_lanes(lanes: ThreadLanes, spy: Spy) -> None:
    needs: dict[Task, tuple[Task, ...]] = {COMPUTE[1]: (INTER[0],)}
    with pytest.raises(LaneError) as caught:
        run(lanes, {INTER[0]: interrupting(spy), COMPUTE[1]: lambda: None}, needs)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert spy.calls == 1


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_while_only_communication_is_left_stops_all_lanes(lanes: ThreadLanes, spy: Spy) -> None:
    """The usual place: every step ends with all-reduces that nothing computes under."""
    with pytest.raises((LaneError, KeyboardInterrupt)):
        run(lanes, {COMPUTE[0]: lambda: None, INTER[0]: interrupting(spy)})
    assert spy.calls == 1, "the communication thread was left in its collective"
    assert run(lanes, {INTER[1]: lambda: None}) == [INTER[1]]


def test_an_interrupt_where_nothing_is_computed_stops_all_lanes(
    lanes: ThreadLanes, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the instant before the caller waits for the others; it has no task of its own to name."""
    walk = _ThreadRun.walk

    def interrupted(run: _ThreadRun, lane: Lane) -> None:
        if lane is Lane.COMPUTE:
            raise KeyboardInterrupt
        walk(run, lane)

    monkeypatch.setattr(_ThreadRun, "walk", interrupted)
    with pytest.raises(LaneError) as caught:
        run(lanes, {INTER[0]: lambda: spy.failed.wait(PATIENCE_S)})
    assert caught.value.task == INTER[0]
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert spy.calls == 1


def test_an_interrupt_while_lanes_are_started_stops_those_that_run(
    lanes: ThreadLanes, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    host = replace(lone_task("L0.PE.F"), lane=Lane.HOST)
    handlers: dict[Task, Callable[[], Any]] = dict.fromkeys([COMPUTE[0], INTER[0], host], lambda: None)
    run(lanes, {INTER[0]: lambda: None})  # it has a thread then; that of the host is yet to come
    with monkeypatch.context() as patch:
        patch.setattr(_Worker, "__init__", interrupted)
        with pytest.raises(LaneError) as caught:
            run(lanes, handlers, {INTER[0]: (COMPUTE[0],)})
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert (spy.calls, len(run(lanes, handlers))) == (1, 3)


# ---- what cannot be woken ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_transfer_that_cannot_be_woken_is_left_alone(lanes: ThreadLanes, spy: Spy) -> None:
    inside, let_go = threading.Event(), threading.Event()

    def stay() -> None:
        inside.set()
        let_go.wait()

    def fail() -> None:
        inside.wait()
        raise ValueError("alone")

    with pytest.raises(LaneError) as caught:
        run(lanes, {COMPUTE[0]: fail, INTER[0]: stay})
    assert (caught.value.task, spy.calls) == (COMPUTE[0], 1)
    assert run(lanes, {INTER[0]: lambda: None}) == [INTER[0]], "the lane has another thread"
    let_go.set()


def test_work_of_the_host_is_waited_for(
    lanes: ThreadLanes, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends by itself, and works on what its caller goes on with."""
    monkeypatch.setattr("penstock.runtime.executor.END_S", 0.0)
    host, inside, ended = replace(lone_task("L0.PE.F"), lane=Lane.HOST), threading.Event(), list[bool]()

    def plan() -> None:
        inside.set()
        ended.append(spy.failed.wait())

    def fail() -> None:
        inside.wait()
        raise ValueError("alone")

    with pytest.raises(LaneError):
        run(lanes, {COMPUTE[0]: fail, host: plan})
    assert ended == [True]


def test_news_of_a_rank_that_has_given_up_end_the_step_and_those_to_come(
    lanes: ThreadLanes, spy: Spy
) -> None:
    """What waits for that rank never ends by itself here."""
    said, let_go = "rank 1 has ended: ValueError: alone", threading.Event()
    handlers: dict[Task, Callable[[], Any]] = {
        COMPUTE[0]: lambda: ThreadLanes.hear(said),
        INTER[0]: let_go.wait,
        COMPUTE[1]: lambda: None,
    }
    for _ in range(2):
        with pytest.raises(LaneError) as caught:
            run(lanes, handlers, {COMPUTE[1]: (INTER[0],)})
        assert (caught.value.task, repr(caught.value.__cause__)) == (INTER[0], f"PeerLostError({said!r})")
    assert spy.calls == 2
    others = ThreadLanes(spy)
    assert run(others, {COMPUTE[0]: lambda: None}) == [COMPUTE[0]], "lanes that were made later know nothing"
    others.close()
    by_itself = ThreadLanes(spy, alone=True)
    ThreadLanes.hear(said)
    assert run(by_itself, {COMPUTE[0]: lambda: None}) == [COMPUTE[0]], "nor do those without other ranks"
    by_itself.close()
    let_go.set()


# ---- tensors inside results --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holder:
    """A result of a handler's own."""

    one: Any
    other: Any


def test_tensors_in_finds_every_tensor_of_a_result() -> None:
    first, second, third, fourth = (torch.full((1,), float(i)) for i in range(4))
    inputs = Inputs(rows=(first, (Holder(second, None), "text")), saved=(Holder({3: third}, [fourth]), 5))
    assert [id(t) for t in tensors_in(inputs)] == [id(t) for t in (first, second, third, fourth)]
    later = Later(lambda: first + second, (first, Holder(second, 3)))
    for _ in range(2):  # what is held outlives the stream that reads the value, so it stays
        assert [id(t) for t in tensors_in(Inputs(order=(later,)))] == [id(first), id(second)]
        assert later.value == 1.0
