"""Process groups that take tensors of a GPU and no others, on real ranks: see `tests.support.cardccl`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import penstock
from penstock.autotune.profile.links import exchanges
from penstock.device import using
from penstock.mesh import Group
from penstock.models import MoEDecoder
from penstock.runtime.executor import TaskError
from penstock.runtime.groups import build_transport
from penstock.topology import CommunicationError, Control, Layout, ParallelConfig
from penstock.topology.control import host_group
from penstock.topology.groups import Summation
from penstock.topology.join import joined
from penstock.topology.meeting_point import in_thread
from tests.support import cardccl
from tests.support.adapted import Batch, distance, grads_of, share_of, small
from tests.support.card import CardDevice, install
from tests.support.cardccl import as_default
from tests.support.faulty import before, fail, loop
from tests.support.layouts import layout_case
from tests.support.parity import batch_of, stack_of
from tests.support.patience import HANG_S, outcome_of, wait_for
from tests.support.ranks import Pools, RankPool

pytestmark = pytest.mark.slow
LOST = 1


def control_beside_cards(rank: int) -> list[Any]:
    """What hosts exchange, where the default group refuses their tensors."""
    install()
    with as_default():
        with pytest.raises(RuntimeError, match="No backend type"):
            dist.all_reduce(torch.ones(1))
        control = Control(rank, 2)
        later = control.sum_later([1.0, rank], "summing")
        found = [control.gather(rank, "collecting"), control.largest([rank, -rank], "voting"), later()]
        parts = control.collect(torch.tensor([rank + 0.5]), (0, 1), 0, "saving")
        again = host_group() is host_group()
        return [*found, [part.item() for part in parts], again]


def test_control_has_a_group_of_its_own_beside_one_of_gpus(cards: Pools) -> None:
    shared = [[0, 1], [1, 0], [2, 1]]
    assert cards(2).run(control_beside_cards) == [[*shared, [0.5, 1.5], True], [*shared, [], True]]


def absent(rank: int) -> str:
    """Rank 1 does not come to the group for hosts."""
    install()
    with as_default():
        if rank == 1:
            return ""
        with pytest.raises(CommunicationError) as caught:
            host_group(timeout_s=1.0)
        return str(caught.value)


def test_who_does_not_come_to_the_group_of_hosts_is_named(cards: Pools) -> None:
    pool = cards(2)
    try:
        message, _ = pool.run(absent)
    finally:
        pool.close()  # its ranks have made different numbers of groups
    assert "rank 1 did not come" in message
    assert "cpu:gloo,cuda:nccl" in message, "what to do instead"


class Noting(CardDevice):
    """Notes which devices were made the current one, and whether variables were set."""

    def __init__(self) -> None:
        super().__init__()
        self.made_current, self.prepared = list[torch.device](), False

    def set_environment(self, environ: MutableMapping[str, str]) -> None:
        del environ
        self.prepared = True

    def make_current(self, device: torch.device) -> None:
        self.made_current.append(device)


def of_others(rank: int) -> tuple[float, str, list[float], bool]:
    """A step of a model of transformers, and a layer's sum, in a group of GPUs that others have made."""
    device, whole, batch, noting = install(), small("mixtral"), Batch(), Noting()
    whole(**batch.inputs()).loss.backward()
    mine = {name: each.to(device) for name, each in batch.inputs(2 * rank, 2 * rank + 2).items()}
    with using(noting), as_default():
        model = penstock.parallelize(small("mixtral").to(device), ep_size=2, plan="flowmoe")
        model(**mine).loss.backward()
        wanted = grads_of(whole)
        far = [distance(each.cpu(), share_of(wanted[n], each, rank)) for n, each in grads_of(model).items()]
        noting.prepared = False
        exchange = penstock.ExpertParallel(num_experts=4)
        total = exchange.sum_over_ranks(torch.ones(3).to(device))
        exchange.close()
        return max(far), total.device.type, total.tolist(), noting.prepared


def test_models_and_layers_run_in_a_group_of_gpus_that_others_made(cards: Pools) -> None:
    for far, kind, total, prepared in cards(2).run(of_others):
        assert far < 1e-5
        assert (kind, total, prepared) == ("card", [2, 2, 2], True)


def in_group_of_others(rank: int) -> bool:
    del rank
    device, noting = install(), Noting()
    with using(noting), as_default():
        joined(TIMEOUT_S, device)
    return noting.made_current[:1] == [device]


def test_this_ranks_gpu_is_the_current_one_in_a_group_of_others(cards: Pools) -> None:
    """Whatever names no device would otherwise open the first GPU from every rank."""
    assert all(cards(2).run(in_group_of_others))


# ---- sums --------------------------------------------------------------------------------------------------

SIZES = {"even": [2, 2, 2, 2], "uneven": [1, 0, 3, 2], "empty": [0, 0, 0, 0]}


def sums_of_parts(rank: int, how: Summation, dtype: torch.dtype) -> dict[str, tuple[bool, Tensor, Tensor]]:
    """Whether the back end has summed, this rank's part, and what it should be; by the sizes of parts."""
    device, layout, found = install(), Layout(world_size=4, ep_size=4, rank=rank), {}
    with using(CardDevice()):
        parallel = ParallelConfig(reduce_scatter=how)
        transport = build_transport(layout, device, parallel, (Group.WORLD,))
        for name, sizes in SIZES.items():
            everyone = [torch.randn(sum(sizes), 3, generator=seed_of(r)).to(dtype) for r in range(4)]
            with asked_for() as asked:
                mine = transport.reduce_scatter(everyone[rank].to(device), sizes, Group.WORLD)
            natively = any("reduce_scatter" in str(each) for each in asked)
            wanted = torch.stack([rows.double() for rows in everyone]).sum(0).split(sizes)[rank]
            found[name] = natively, mine.cpu().double(), wanted
        with asked_for() as asked:
            exchanges(transport, Group.WORLD, rank, device)["reduce_scatter"](8)()
        measures_native = any("reduce_scatter" in str(each) for each in asked)
        assert measures_native == (how == "native"), "a profile times what runs"
        transport.close()
    return found


@contextmanager
def asked_for() -> Iterator[list[object]]:
    """What is asked of the back end."""
    asked, exchange = list[object](), cardccl.exchange

    def noted(func: Any, *given: Any) -> Any:
        asked.append(func)
        return exchange(func, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cardccl, "exchange", noted)
        yield asked


def seed_of(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("how", get_args(Summation))
def test_sums_of_parts_natively_and_in_order(cards: Pools, how: Summation, dtype: torch.dtype) -> None:
    for found in cards(4).run(sums_of_parts, how, dtype):
        for name, (natively, mine, wanted) in found.items():
            assert natively == (how == "native" and name == "even")
            assert mine.shape == wanted.shape
            assert torch.allclose(mine, wanted, atol=1e-12 if dtype is torch.float64 else 0.1)


# ---- aborts ------------------------------------------------------------------------------------------------


def aborted(rank: int) -> list[bool]:
    """Rank 1 comes to no exchange of two groups. Whether each of them has ended on rank 0."""
    device, layout, kinds = install(), Layout(world_size=2, ep_size=2, rank=rank), (Group.WORLD, Group.EXPERT)
    with using(CardDevice()):
        transport = build_transport(layout, device, ParallelConfig(), kinds)
        if rank == LOST:
            return []
        numbers = torch.ones(1).to(device)
        waiting = [in_thread(partial(transport.all_reduce, numbers.clone(), kind)) for kind in kinds]
        wait_for(lambda: sum(len(each.running) for each in cardccl.COMMUNICATORS.values()) == len(kinds))
        outcome_of(transport.abort)
        return [each.result(HANG_S) is None for each in waiting]


def test_groups_are_aborted_together(cards: Pools) -> None:
    """One after the other, the first abort would wait for an exchange that only the second ends."""
    pool = cards(2)
    try:
        assert pool.run(aborted) == [[True, True], []]
    finally:
        pool.close()  # what its ranks have is left in different states


# ---- one rank is lost --------------------------------------------------------------------------------------

TIMEOUT_S = 4.0
SILENT = "rank 1 does not answer: it is stopped, disconnected or dead"


def in_trouble(trouble: str) -> None:
    number = {"is killed": signal.SIGKILL, "is stopped": signal.SIGSTOP}.get(trouble)
    if number is not None:
        os.kill(os.getpid(), number)
    fail() if trouble == "fails" else loop()


def step_of_four(rank: int, trouble: str) -> tuple[str, str]:
    """In which task a step ends, and the reason. Rank 1 gets into trouble in its forward half."""
    case = replace(layout_case((4, 1, 4, 1), "flowmoe", "gather"), card=True)
    device = install()
    with using(CardDevice()), as_default():
        joined(TIMEOUT_S, device)
        stack = stack_of(rank, case)
        mine, (tokens, labels) = case.mine(rank), batch_of(case)
        ids = torch.arange(len(tokens))[mine].to(device)
        if rank == LOST:
            before(MoEDecoder, "head", partial(in_trouble, trouble), calls=1)
        try:
            stack(tokens[mine].to(device), labels[mine].to(device), ids).backward()
        except TaskError as error:
            return str(error.task), str(error).splitlines()[0]
        return "", "the step has ended"


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("fails", "rank 1 had failed: task L1.HD.m0.F: ZeroDivisionError"),
        pytest.param("is killed", SILENT, marks=pytest.mark.soak),
        ("is stopped", SILENT),
        ("does not come", "rank 1 answers, but was in L1.HD.m0.F for "),
    ],
)
def test_ranks_that_wait_on_a_device_learn_who_is_lost(trouble: str, reason: str) -> None:
    """Nothing but an abort of its own ends an exchange of theirs, and it has no error then."""
    pool = RankPool(4)
    try:
        others = pool.run(step_of_four, trouble, lost=LOST)
    finally:
        pool.close()
    for task, said in others:
        assert task, "it ends in a task"
        assert reason in said, said
