"""Stream lanes without a GPU: what is issued when, and the host's own tasks on a thread beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from penstock.graph import Lane, Task
from penstock.runtime.handlers import Inputs
from penstock.runtime.lanes import LaneError, StreamLanes
from penstock.runtime.program import Call
from penstock.step import StepShape
from tests.runtime.programs import plan_in, program_of
from tests.steps import random_orders

SHAPE = StepShape(moe_layers=(True, True), moves_samples=True, microbatches=2)
PATIENCE_S = 60.0


class Device:
    """What lanes ask of `torch.cuda`. An event happens when `behind` says so."""

    def __init__(self, *, behind: bool) -> None:
        self.reached = threading.Event()
        if not behind:
            self.reached.set()

    def current_stream(self, device: Any) -> Device:
        del device
        return self

    def Stream(self, device: Any) -> Device:  # noqa: N802  # torch's name
        del device
        return self

    def Event(self, *, enable_timing: bool) -> Device:  # noqa: N802  # torch's name
        del enable_timing
        return self

    def record_event(self, event: Any) -> Any:
        return event

    def wait_event(self, event: Any) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        del other
        return 1.0

    def synchronize(self) -> None:
        assert self.reached.wait(PATIENCE_S)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        del stream
        yield


def issued(
    monkeypatch: pytest.MonkeyPatch, device: Device, execute: Callable[[Call], Any], failures: list[int]
) -> Sequence[Task]:
    """Run the forward half of a step that moves samples; the tasks of which times are known."""
    monkeypatch.setattr(torch, "cuda", device)
    plan = plan_in(SHAPE, lambda graph: random_orders(graph, 0))
    made = StreamLanes(torch.device("cuda"), lambda: failures.append(1))
    try:
        return [ran.task for ran in made.run(program_of(plan).spans[0], execute)()]
    finally:
        made.close()


def test_a_task_of_the_host_waits_for_the_device_and_its_readers_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, begun, lock = Device(behind=True), list[Task](), threading.Lock()
    threads: dict[Task, str] = {}

    def execute(call: Call) -> Inputs:
        with lock:
            begun.append(call.task)
        threads[call.task] = threading.current_thread().name
        if len(begun) > 2:  # the device is far behind what is issued
            device.reached.set()
        return Inputs()

    known = issued(monkeypatch, device, execute, [])
    assert set(known) == set(begun)
    place = {task: i for i, task in enumerate(begun)}
    for task in begun:
        assert threads[task].startswith("penstock-host") == (task.lane is Lane.HOST)
        readers = [other for other in begun if task.name in other.sources()]
        assert all(place[task] < place[reader] for reader in readers), str(task)


def test_a_task_of_the_host_that_fails_stops_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[int] = []

    def execute(call: Call) -> Inputs:
        if call.task.lane is Lane.HOST:
            raise ValueError("no homes")
        return Inputs()

    with pytest.raises(LaneError) as caught:
        issued(monkeypatch, Device(behind=False), execute, failures)
    assert caught.value.task.lane is Lane.HOST and str(caught.value.__cause__) == "no homes"
    assert failures == [1]
