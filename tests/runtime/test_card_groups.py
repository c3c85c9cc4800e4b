"""Process groups that take tensors of a GPU and no others, on real ranks: see `tests.support.cardccl`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import penstock
from penstock.device import using
from penstock.topology import CommunicationError, Control
from penstock.topology.control import host_group
from tests.support.adapted import Batch, distance, grads_of, share_of, small
from tests.support.card import CardDevice, install
from tests.support.cardccl import as_default
from tests.support.ranks import Pools

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
