"""The name of a start: the same on all ranks, whatever earlier starts have left in the store."""

# ruff: noqa: TID251 - one rank comes later; the outcome is the same if it does not

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from penstock.topology.join import name_of_attempt
from tests.support.patience import HANG_S

SOON = timedelta(seconds=HANG_S)


def start(store: TCPStore, late: int | None = None) -> list[str]:
    """Names that three ranks hear, each with a connection of its own; one of them comes later."""

    def join(rank: int) -> str:
        mine = TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False)
        time.sleep(0.1 if rank == late else 0)
        return name_of_attempt(mine, rank, 3, SOON)

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(join, range(3)))


def test_every_start_has_a_name_of_its_own() -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store.set("greeting/1", "of a rank that was killed before it was answered")
    found = [start(store), start(store, late=2), start(store, late=0)]
    assert [len(set(names)) for names in found] == [1, 1, 1]
    assert len({names[0] for names in found}) == 3


@pytest.mark.slow
def test_ranks_that_do_not_come_end_the_wait() -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for rank in (0, 1):
        with pytest.raises(RuntimeError):
            name_of_attempt(store, rank, 2, timedelta(seconds=0.2))
