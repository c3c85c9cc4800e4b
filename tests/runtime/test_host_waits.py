"""What a stand-in for a GPU refuses and is given to do, and what the host waits for.

`tests.runtime.recorded.test_steps` runs steps of every kind on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.device import Stream, using
from penstock.graph import Task
from penstock.ops import OPS, Op
from penstock.runtime.batch import Samples
from penstock.runtime.features.expert_sharding import _turn
from tests.support.card import OPERATIONS, Card, CardDevice, counted, install
from tests.support.layouts import Layout, layout_case
from tests.support.parity import Case, batch_of, stack_of
from tests.support.ranks import Pools, RankPool
from tests.support.recorded import carded_steps
from tests.support.replicas import RandomReplicas


def waits_by_step(rank: int, case: Case) -> list[int]:
    """How often the host waits for the whole device in each of three steps, and kinds of tasks."""
    waits = carded_steps(rank, case, RandomReplicas(slots=0, steps=3)).waits
    return [sum(n for (_, _, what), n in each.items() if what == "wait for the device") for each in waits]


@pytest.mark.slow
def test_the_first_task_of_each_kind_finds_nothing_that_runs() -> None:
    """Loading its kernels may wait for what runs, and that for other ranks."""
    case = layout_case((2, 1, 2, 1), "flowmoe", "gather")
    pool = RankPool(2)  # ranks of which no other test has issued tasks
    first, *later = pool.run(waits_by_step, case)[0]
    pool.close()
    assert (
        first >= len({Op.EMBED, Op.ATTENTION, Op.DISPATCH, Op.EXPERTS, Op.COMBINE, Op.UNPERMUTE, Op.HEAD}) * 2
    )
    assert later == [0, 0]


def waits_of_a_step(rank: int, case: Case, reads: bool, on_host: bool = False) -> int:
    """How often the host waits in a second step, which may read its loss, or get its batch on the host."""
    device = install()
    with using(CardDevice()):
        stack = stack_of(rank, replace(case, card=True))
        batch = [whole[case.mine(rank)] for whole in batch_of(case)]
        if not on_host:
            batch = [each.to(device) for each in batch]
        stack(*batch).backward()
        with counted() as waits:
            loss = stack(*batch)
            if reads:
                loss.item()
            loss.backward()
    return waits.total()


@pytest.mark.slow
def test_one_more_number_that_is_read_is_counted(cards: Pools) -> None:
    case = layout_case((2, 1, 2, 1), "flowmoe", "gather", num_layers=1)
    plain, more = (cards(2).run(waits_of_a_step, case, reads) for reads in (False, True))
    assert more == [number + 1 for number in plain]


@pytest.mark.slow
def test_a_batch_of_the_host_travels_without_a_wait(cards: Pools) -> None:
    """From memory as a loader of data returns it, which copies to a GPU wait for."""
    case = layout_case((2, 1, 2, 1), "flowmoe", "gather", num_layers=1)
    there, here = (cards(2).run(waits_of_a_step, case, False, on_host) for on_host in (False, True))
    assert here == there


def numbers_after_the_caller_wrote_again(rank: int) -> list[int]:
    """Pinned tokens of the caller, who writes to them as soon as the call has returned, before the copy."""
    del rank
    device, copies = install(), []

    class Late(CardDevice):
        """Copies from pinned memory when `copies` say so."""

        def from_host(self, numbers: Tensor, device: torch.device) -> Tensor:
            there, held = torch.empty(numbers.shape, dtype=numbers.dtype, device=device), numbers.clone()
            copies.append(lambda: there.copy_(held))
            return there

    with using(Late()):
        tokens = Late().pinned((1, 3), torch.int64).fill_(1)
        sent = Samples(tokens, tokens, tokens[:, 0], None).to(device)
        tokens.fill_(2)
        for copy in copies:
            copy()
        return [*sent.tokens_BL.flatten().tolist(), len(copies)]


@pytest.mark.slow
def test_a_batch_is_the_caller_s_again_when_the_call_returns(cards: Pools) -> None:
    assert cards(1).run(numbers_after_the_caller_wrote_again) == [[1, 1, 1, 3]]


def waits_of_the_second_step(rank: int, case: Case) -> int:
    return sum(carded_steps(rank, case, RandomReplicas(slots=0, steps=2)).waits[1].values())


@pytest.mark.slow
def test_padding_makes_the_host_wait_no_more_often_for_more_layers(cards: Pools) -> None:
    """Also where ranks share the tokens of a sample, and each needs its own part of the mask."""
    more = []
    for padding in (False, True):
        cases = [
            layout_case((2, 2, 2, 1), "flowmoe", "gather", num_layers=layers, padding=padding)
            for layers in (2, 4)
        ]
        few, many = (cards(2).run(waits_of_the_second_step, case) for case in cases)
        more.append([after - before for before, after in zip(few, many, strict=True)])
    assert more[0] == more[1]


def two_devices(rank: int) -> tuple[bool, bool, list[float]]:
    """Whether tensors of both are refused, and numpy() of one; and a sum with a number of the host."""
    del rank
    refused = []
    with using(CardDevice()):
        here, there = torch.ones(3), torch.ones(3).to(install())
        assert isinstance(there, Card)
        for error, call in ((RuntimeError, partial(torch.add, here, there)), (TypeError, there.numpy)):
            with pytest.raises(error):
                call()
            refused.append(True)
        return refused[0], refused[1], (there + torch.tensor(1.0)).tolist()


@pytest.mark.slow
def test_tensors_of_two_devices_do_not_meet(cards: Pools) -> None:
    """A number alone may come from the host."""
    assert cards(1).run(two_devices) == [(True, True, [2, 2, 2])]


class OtherStreams(CardDevice):
    """Every time it is asked, another stream is the current one."""

    def current_stream(self, device: torch.device) -> Stream:
        return self.new_stream(device, "other")


def turns_by_stream(rank: int, streams: bool) -> bool:
    """Whether numbers that one stream has copied are given to the next, too."""
    del rank
    with using(OtherStreams() if streams else CardDevice()):
        first, second = (_turn((2, 3), 0, 2, install()) for _ in range(2))
    return first is second


@pytest.mark.slow
def test_numbers_that_are_kept_belong_to_one_stream(cards: Pools) -> None:
    assert [cards(1).run(turns_by_stream, streams)[0] for streams in (False, True)] == [True, False]


# ---- operations of tasks -----------------------------------------------------------------------------------


class Counting(CardDevice):
    """Notes what is given to the device for every task."""

    def __init__(self) -> None:
        super().__init__(kernel=True)
        self.begun = 0
        self.operations: dict[Task, int] = {}

    @contextmanager
    def running(self, task: object, stream: Stream) -> Iterator[None]:
        del stream
        before = OPERATIONS.total()
        yield
        assert isinstance(task, Task)
        self.operations[task] = OPERATIONS.total() - before


def operations_of_tasks(rank: int, case: Case) -> dict[str, float]:
    """The mean number of operations of each op's tasks."""
    device, counting = install(), Counting()
    with using(counting):
        stack = stack_of(rank, replace(case, card=True))
        mine, (tokens, labels) = case.mine(rank), batch_of(case)
        ids = torch.arange(len(tokens))[mine].to(device)
        stack(tokens[mine].to(device), labels[mine].to(device), ids).backward()
    found: dict[str, list[int]] = {}
    for task, count in counting.operations.items():
        found.setdefault(task.op, []).append(count)
    return {op: sum(counts) / len(counts) for op, counts in found.items()}


NORMS = {Op.ATTENTION: 4, Op.HEADS: 3, Op.GATE: 1, Op.HEAD: 1, Op.LOGITS: 1}
"""RMS norms in a task. A GPU computes each by one operation, and processors, as they do here, by nine."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "schedule", "form"), [((2, 1, 2, 1), "penstock", "gather"), ((4, 2, 2, 2), "parm_s1", "s1")]
)
def test_tasks_give_a_device_as_many_operations_as_plans_assume(
    cards: Pools, layout: Layout, schedule: str, form: Any
) -> None:
    case = replace(layout_case(layout, schedule, form), double=False)
    for op, each in cards(layout[0]).run(operations_of_tasks, case)[0].items():
        counted_ones = each - 8 * NORMS.get(op, 0)
        assert 0.4 * OPS[op].launches - 2 <= counted_ones <= 1.6 * OPS[op].launches + 2, (op, counted_ones)
