"""Process groups that take tensors of a GPU and no others, on real ranks: see `tests.support.cardccl`."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import penstock
from penstock.device import using
from penstock.models import GPT
from penstock.runtime.errors import TaskError
from penstock.topology import CommunicationError, Control
from penstock.topology.control import host_group
from penstock.topology.join import joined
from tests.support.adapted import Batch, distance, grads_of, share_of, small
from tests.support.card import CardDevice, install
from tests.support.cardccl import as_default
from tests.support.faulty import before, fail, loop
from tests.support.layouts import layout_case
from tests.support.parity import batch_of, stack_of
from tests.support.ranks import Pools, RankPool

pytestmark = pytest.mark.slow


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
        again = Control(rank, 2).group is control.group is host_group()
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


def of_others(rank: int) -> tuple[float, str, list[float]]:
    """A step of a model of transformers, and a layer's sum, in a group of GPUs that others have made."""
    device, whole, batch = install(), small("mixtral"), Batch()
    whole(**batch.inputs()).loss.backward()
    mine = {name: each.to(device) for name, each in batch.inputs(2 * rank, 2 * rank + 2).items()}
    with using(CardDevice()), as_default():
        model = penstock.parallelize(small("mixtral").to(device), ep_size=2, plan="flowmoe")
        model(**mine).loss.backward()
        wanted = grads_of(whole)
        far = [distance(each.cpu(), share_of(wanted[n], each, rank)) for n, each in grads_of(model).items()]
        exchange = penstock.ExpertParallel(num_experts=4)
        total = exchange.sum_over_ranks(torch.ones(3).to(device))
        exchange.close()
        return max(far), total.device.type, total.tolist()


def test_models_and_layers_run_in_a_group_of_gpus_that_others_made(cards: Pools) -> None:
    for far, kind, total in cards(2).run(of_others):
        assert far < 1e-5
        assert (kind, total) == ("card", [2, 2, 2])


# ---- one rank is lost --------------------------------------------------------------------------------------

TIMEOUT_S = 4.0
LOST = 1


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
            before(GPT, "head", partial(in_trouble, trouble), calls=1)
        try:
            stack(tokens[mine].to(device), labels[mine].to(device), ids).backward()
        except TaskError as error:
            return str(error.task), str(error).splitlines()[0]
        return "", "the step has ended"


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("fails", "rank 1 had failed: task L1.HD.m0.F: ZeroDivisionError"),
        ("is killed", "rank 1 does not answer: it is stopped, disconnected or dead"),
        ("is stopped", "rank 1 does not answer: it is stopped, disconnected or dead"),
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
