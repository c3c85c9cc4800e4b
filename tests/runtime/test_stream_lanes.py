"""Stream lanes without a GPU: what is issued when, and the host's own tasks on a thread beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from penstock.device import Cuda, Event, Stream, numbered, using
from penstock.graph import Lane, Task
from penstock.runtime.executor import Call, LaneError, Ran
from penstock.runtime.handlers import Inputs
from penstock.runtime.machinery import build_lanes
from penstock.runtime.streams import StreamLanes
from penstock.step import StepShape
from penstock.topology.faults import ACTIVITY
from tests.runtime.programs import plan_in, program_of
from tests.steps import random_orders

SHAPE = StepShape(moe_layers=(True, True), moves_samples=True, microbatches=2)
PATIENCE_S = 60.0


class Behind:
    """A stream and an event, which happens when the device has `reached` it."""

    def __init__(self, reached: threading.Event) -> None:
        self.reached, self.waits = reached, False

    def record_event(self, event: Any) -> Any:
        return event

    def wait_event(self, event: Any) -> None:
        del event
        self.waits = True

    def elapsed_time(self, other: Any) -> float:
        del other
        return 1.0

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        assert self.reached.wait(PATIENCE_S)


class SlowDevice(Cuda):
    """What lanes ask of a GPU. An event happens when `behind` says so. Its kernels are loaded."""

    loads_lazily = False

    def __init__(self, *, behind: bool) -> None:
        self.reached = threading.Event()
        if not behind:
            self.reached.set()
        self.made = list[Behind]()

    def current_stream(self, device: torch.device) -> Stream:
        del device
        return Behind(self.reached)

    def new_stream(self, device: torch.device, name: str) -> Stream:
        del device, name
        self.made.append(Behind(self.reached))
        return self.made[-1]

    def event(self, *, timed: bool) -> Event:
        del timed
        return Behind(self.reached)

    def running(self, task: object, stream: Stream) -> AbstractContextManager[None]:
        del task, stream
        return nullcontext()

    def synchronize(self, device: torch.device) -> None:
        del device
        assert self.reached.wait(PATIENCE_S)


def issued(device: SlowDevice, execute: Callable[[Call], Any], failures: list[int]) -> Sequence[Task]:
    """Run the forward half of a step that moves samples; the tasks of which times are known."""
    plan = plan_in(SHAPE, lambda graph: random_orders(graph, 0))
    with using(device):
        made = build_lanes(torch.device("cuda"), lambda: failures.append(1))
        assert isinstance(made, StreamLanes)
        try:
            return [ran.task for ran in made.run(program_of(plan).spans[0], execute)()]
        finally:
            made.close()


def test_a_task_of_the_host_waits_for_the_device_and_its_readers_for_it() -> None:
    device, begun, lock = SlowDevice(behind=True), list[Task](), threading.Lock()
    threads: dict[Task, str] = {}
    waits: list[bool] = []

    def execute(call: Call) -> Inputs:
        if not device.reached.is_set():
            waits.append(ACTIVITY.waited_s > 0)
        with lock:
            begun.append(call.task)
        threads[call.task] = threading.current_thread().name
        if any(waits):  # the device is far behind what is issued
            device.reached.set()
        return Inputs()

    known = issued(device, execute, [])
    assert set(known) == set(begun)
    assert device.made and all(stream.waits for stream in device.made), "what came before the step is done"
    # An exchange that the device has not ended is known while later tasks are issued.
    assert waits == [any(task.lane.is_network for task in begun[:place]) for place in range(len(waits))]
    assert any(waits) and ACTIVITY.waited_s == 0
    place = {task: i for i, task in enumerate(begun)}
    for task in begun:
        assert threads[task].startswith("penstock-host") == (task.lane is Lane.HOST)
        readers = [other for other in begun if task.name in other.sources()]
        assert all(place[task] < place[reader] for reader in readers), str(task)


def test_a_task_of_the_host_that_fails_stops_the_step() -> None:
    failures: list[int] = []

    def execute(call: Call) -> Inputs:
        if call.task.lane is Lane.HOST:
            raise ValueError("no homes")
        return Inputs()

    with pytest.raises(LaneError) as caught:
        issued(SlowDevice(behind=False), execute, failures)
    assert caught.value.task.lane is Lane.HOST and str(caught.value.__cause__) == "no homes"
    assert failures == [1]


def test_a_gpu_without_a_number_is_that_of_the_rank_unless_one_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(device.index))
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [numbered(gpu, 6), numbered(gpu, 3), numbered(torch.device("cuda", 1), 3)] == [
        torch.device("cuda", 2),
        torch.device("cuda", 2),
        torch.device("cuda", 1),
    ]
    assert numbered(cpu, 3) is cpu and chosen == [0, 2]


class Clock:
    """Time of the host and of a device, which does at once what is asked of it, but `behind_s` later."""

    def __init__(self, behind_s: float) -> None:
        self.host_s, self.behind_s = 100.0, behind_s

    def perf_counter(self) -> float:
        self.host_s += 1e-3
        return self.host_s


class ClockEvent:
    """An event that happens when the device is as far as the host was when it was recorded."""

    def __init__(self, clock: Clock, *, timed: bool) -> None:
        self.clock, self.timed, self.at_s = clock, timed, 0.0

    def synchronize(self) -> None:
        self.clock.host_s = max(self.clock.host_s, self.at_s)

    def query(self) -> bool:
        return self.at_s <= self.clock.host_s

    def elapsed_time(self, end_event: Any) -> float:
        assert self.timed and end_event.timed
        elapsed_ms: float = 1e3 * (end_event.at_s - self.at_s)
        return elapsed_ms


class ClockStream:
    """Counts the events that are recorded in it."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.events = clock, list[ClockEvent]()

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any) -> Any:
        event.at_s = self.clock.host_s + self.clock.behind_s
        self.events.append(event)
        return event


class LateDevice(SlowDevice):
    """A device with a clock, and one stream for everything."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(behind=False)
        self.clock, self.stream = clock, ClockStream(clock)

    def current_stream(self, device: torch.device) -> Stream:
        del device
        return self.stream

    def new_stream(self, device: torch.device, name: str) -> Stream:
        del device, name
        return self.stream

    def event(self, *, timed: bool) -> Event:
        return ClockEvent(self.clock, timed=timed)

    def synchronize(self, device: torch.device) -> None:
        del device
        self.clock.host_s += self.clock.behind_s


def run_late(
    monkeypatch: pytest.MonkeyPatch, *, timed: bool
) -> tuple[LateDevice, list[Ran], dict[Task, float]]:
    """A step on a device that is half a second behind; and when the host issued each task."""
    clock, begun = Clock(behind_s=0.5), dict[Task, float]()
    monkeypatch.setattr("penstock.runtime.streams.time", clock)
    plan, device = (
        plan_in(StepShape(moe_layers=(True,)), lambda graph: random_orders(graph, 0)),
        LateDevice(clock),
    )

    def execute(call: Call) -> Inputs:
        begun[call.task] = clock.host_s
        clock.host_s += 0.01
        return Inputs()

    with using(device):
        lanes = build_lanes(torch.device("cuda"), lambda: None)
        ran = lanes.run(program_of(plan).spans[0], execute, timed=timed)
        lanes.close()
        return device, ran(), begun


def test_times_are_those_of_the_device_on_the_clock_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    device, ran, begun = run_late(monkeypatch, timed=True)
    assert {each.task for each in ran} == set(begun)
    for each in ran:
        assert each.start_s == pytest.approx(begun[each.task] + device.clock.behind_s, abs=5e-3)
        assert each.end_s > each.start_s


def test_where_no_times_are_wanted_there_are_no_timed_events(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, _, begun = run_late(monkeypatch, timed=True)
    device, ran, _ = run_late(monkeypatch, timed=False)
    assert ran == []
    assert sum(event.timed for event in measured.stream.events) > 2 * len(begun)
    assert not any(event.timed for event in device.stream.events)
    assert len(device.stream.events) <= len(begun) + 1  # the last tells a watcher that the device is busy
