"""What a recorded device writes into its log, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.device import device_of, gpu_of
from tests.support.recording.gpu import recorded
from tests.support.recording.hazards import find_hazards
from tests.support.recording.recorder import Allocate, Entry, Free, Launch, Recorder

CPU = torch.device("cpu")
Touched = list[tuple[str, bool, int, int]]
"""Which tensor, whether it is written, and the bytes from where to where."""


def touched(act: Callable[..., Any], **tensors: Tensor) -> Touched:
    """What an operation does to the memory of tensors; to other memory under the name `new`."""
    with recorded() as recorder:
        recorder.know(tensors.values())
        blocks = {recorder._block(tensor): name for name, tensor in tensors.items()}
        begun = len(recorder.log)
        act(**tensors)
        return [
            (blocks.get(access.block, "new"), access.writes, access.span.first, access.span.end)
            for entry in recorder.log[begun:]
            if isinstance(entry, Launch)
            for access in entry.accesses
        ]


@pytest.mark.parametrize(
    ("act", "found"),
    [
        (lambda a, b: a + b, [("new", True, 0, 16), ("a", False, 0, 16), ("b", False, 0, 16)]),
        (lambda a, b: a.add_(b), [("a", True, 0, 16), ("b", False, 0, 16)]),
        (lambda a, b: torch.neg(a, out=b), [("b", True, 0, 16), ("a", False, 0, 16)]),
        (lambda a, b: a[1:3].copy_(b[:2]), [("a", True, 4, 12), ("b", False, 0, 8)]),
        (lambda a, b: torch._foreach_mul_([a, b], 2.0), [("a", True, 0, 16), ("b", True, 0, 16)]),
        (lambda a, b: (a.view(2, 2).t(), b.split(2), a.detach(), a.expand(2, 4)), []),
        (lambda a, b: (torch.empty_like(a), b.new_empty(3)), []),
        (lambda a, b: a.zero_(), [("a", True, 0, 16)]),
        (lambda a, b: a.sum().item(), [("new", True, 0, 4), ("a", False, 0, 16), ("new", False, 0, 4)]),
    ],
)
def test_reads_and_writes(act: Callable[..., Any], found: Touched) -> None:
    assert touched(act, a=torch.ones(4), b=torch.ones(4)) == found


def test_the_backward_of_autograd_is_seen() -> None:
    weight = torch.ones(4, requires_grad=True)
    assert ("weight", False, 0, 16) in touched(
        lambda weight: (weight * weight).sum().backward(), weight=weight
    )
    assert weight.grad is not None


def test_memory_lives_as_long_as_whatever_holds_it() -> None:
    def ends(log: list[Entry]) -> int:
        return sum(isinstance(entry, Free) for entry in log)

    with recorded() as recorder:
        base = torch.ones(4)
        view, counts = base[1:], []
        made = sum(isinstance(entry, Allocate) for entry in recorder.log)
        for name in ("base", "view"):
            counts.append(ends(recorder.log))
            if name == "base":
                del base
            else:
                del view
        counts.append(ends(recorder.log))
    assert (made, counts) == (1, [0, 0, 1])


class Two:
    """A recorded device with two streams."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.gpu = recorder, gpu_of(CPU)
        self.main, self.side = self.gpu.current_stream(CPU), self.gpu.new_stream(CPU, "side")

    def wait(self) -> None:
        self.side.wait_event(self.main.record_event(self.gpu.event(timed=False)))


def kinds(act: Callable[[Two], object]) -> list[str]:
    with recorded() as recorder:
        act(Two(recorder))
    return [hazard.kind for hazard in find_hazards(recorder.log)]


def read_aside(two: Two, *, waits: bool, keeps: bool) -> None:
    made = torch.ones(4)
    if waits:
        two.wait()
    with two.gpu.running("reader", two.side):
        found = made + 1  # kept until the end, so that only `made` is freed early
        if keeps:
            two.gpu.record_stream(made, two.side)
    del made
    two.gpu.synchronize(CPU)
    del found


@pytest.mark.parametrize(
    ("waits", "keeps", "found"),
    [
        (True, True, []),
        (True, False, ["freed too early"]),
        (False, True, ["read too early"] * 2),  # after it was allocated, and after it was filled
    ],
)
def test_a_tensor_that_another_stream_reads(waits: bool, keeps: bool, found: list[str]) -> None:
    assert kinds(lambda two: read_aside(two, waits=waits, keeps=keeps)) == found


def test_hazards_name_tasks_and_streams() -> None:
    with recorded() as recorder:
        two = Two(recorder)
        with two.gpu.running("writer", two.main):
            made = torch.ones(4)
        read_aside_of(two, made)
    hazard = find_hazards(recorder.log)[-1]
    assert (hazard.first.task, hazard.second.task) == ("writer", "reader")
    assert (hazard.first.actor, hazard.second.actor) == ("stream main", "stream side")
    assert "allocated by writer on stream main" in hazard.tensor


def read_aside_of(two: Two, made: Tensor) -> None:
    with two.gpu.running("reader", two.side):
        made.sum()


def read_in_host(two: Two, *, waits: bool) -> None:
    host, there = two.gpu.to_host(torch.ones(4))
    assert there is not None
    if waits:
        there.synchronize()
    host.numpy()


def copy_and_read(two: Two, *, non_blocking: bool) -> None:
    host = two.gpu.pinned((4,), torch.float32)
    host.copy_(torch.ones(4), non_blocking=non_blocking)
    host.tolist()


def read_on_a_thread(two: Two, *, joins: bool) -> None:
    """Memory of the host that a thread fills."""
    host = two.gpu.pinned((4,), torch.float32)
    with ThreadPoolExecutor(1) as threads:
        pending = two.gpu.submit(threads, "filler", lambda: host.fill_(1.0))
        if joins:
            pending.result()
    host.tolist()


@pytest.mark.parametrize(
    ("act", "found"),
    [
        (lambda two: read_in_host(two, waits=True), []),
        (lambda two: read_in_host(two, waits=False), ["read too early"]),
        (lambda two: copy_and_read(two, non_blocking=False), []),
        (lambda two: copy_and_read(two, non_blocking=True), ["read too early"]),
        (lambda two: read_on_a_thread(two, joins=True), []),
        (lambda two: read_on_a_thread(two, joins=False), ["read too early"]),
        (lambda two: torch.ones(4).tolist(), []),
    ],
)
def test_the_host_reads(act: Callable[[Two], object], found: list[str]) -> None:
    assert kinds(act) == found


def test_afterwards_the_cpu_is_what_it_was() -> None:
    before = device_of(CPU), Tensor.numpy, Tensor.tolist, Tensor.cpu
    with recorded() as recorder:
        assert device_of(CPU).is_gpu
        torch.ones(4)
    size = len(recorder.log)
    torch.ones(4)
    assert (device_of(CPU), Tensor.numpy, Tensor.tolist, Tensor.cpu) == before
    assert len(recorder.log) == size
