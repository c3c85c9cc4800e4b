"""Values that are made when they are read, and counts that are numbers where they are on the host."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from penstock.runtime.transport import Later, to_host

PATIENCE_S = 60.0


def test_two_threads_that_read_a_value_make_it_once() -> None:
    making, may_end, made = threading.Semaphore(0), threading.Event(), list[int]()

    def make() -> list[int]:
        making.release()
        assert may_end.wait(PATIENCE_S)
        made.append(len(made))
        return made

    later = Later(make)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: later.value)
        assert making.acquire(timeout=PATIENCE_S)
        second = threads.submit(lambda: later.value)
        others_make_it_too = making.acquire(timeout=0.2)
        may_end.set()
        assert first.result() is second.result()
    assert made == [0] and not others_make_it_too


def test_a_value_that_could_not_be_made_is_tried_again() -> None:
    tries = iter([ZeroDivisionError(), None])

    def make() -> str:
        if (error := next(tries)) is not None:
            raise error
        return "made"

    later = Later(make)
    with pytest.raises(ZeroDivisionError):
        _ = later.value
    assert later.value == "made"


def test_what_is_there_is_used_at_once() -> None:
    """In the task that has it, so that its time is that task's; of a GPU's counts only when they are read."""
    made = list[int]()

    def make(number: int) -> int:
        made.append(number)
        return number + 1

    numbers = to_host(torch.tensor([3, 4]))
    assert not isinstance(numbers, Later) and numbers.tolist() == [3, 4]
    assert Later.after(3, make) == 4 and made == [3]
    later = Later.after(Later(lambda: 5), make)
    assert isinstance(later, Later) and made == [3]
    assert (later.value, later.value, made) == (6, 6, [3, 5])
