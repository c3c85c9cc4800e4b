"""Exchanges between all ranks outside the steps, and the errors they end in."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

from penstock.config import ConfigError
from penstock.topology import CommunicationError, Control
from tests.support.patience import HANG_S
from tests.support.ranks import Pools, RankPool

pytestmark = pytest.mark.slow


def vote(rank: int, flags: list[bool]) -> bool:
    return Control(rank, len(flags)).any(flags[rank], "voting")


@pytest.mark.parametrize("flags", [[False, False], [True, False], [False, True], [True, True]])
def test_any_is_the_same_everywhere(ranks: Pools, flags: list[bool]) -> None:
    assert ranks(2).run(vote, flags) == [any(flags)] * 2


def collect(rank: int, world_size: int, objects: list[Any]) -> list[Any]:
    control = Control(rank, world_size)
    control.barrier("meeting")
    return control.gather(objects[rank], "collecting")


@pytest.mark.parametrize("world_size", [2, 4])
def test_gather_brings_one_object_of_every_rank_in_their_order(ranks: Pools, world_size: int) -> None:
    objects = [None, {"key": [1, 2]}, 3.5, "text"][:world_size]  # also where a rank has nothing to say
    assert ranks(world_size).run(collect, world_size, objects) == [objects] * world_size


def test_one_rank_alone_asks_nobody() -> None:
    control = Control(0, 1)
    assert control.any(True, "voting") is True
    assert control.any(False, "voting") is False
    assert control.gather("mine", "collecting") == ["mine"]
    control.barrier("meeting")


@pytest.mark.parametrize(
    ("raised", "reason"), [("first line\nsecond", "first line"), ("  \n ", "no reason given")]
)
def test_a_bare_error_gets_a_rank_and_a_purpose(raised: str, reason: str) -> None:
    error = RuntimeError(raised)
    with pytest.raises(CommunicationError) as caught, Control(5, 1).naming("comparing schedules"):
        raise error
    assert str(caught.value) == f"rank 5: comparing schedules failed: {reason}"
    assert caught.value.__cause__ is error


def test_an_error_of_another_kind_stays_as_it_is() -> None:
    with pytest.raises(KeyError), Control(0, 1).naming("anything"):
        raise KeyError("not the network")


def lose_a_peer(rank: int, what: str) -> str:
    """Rank 1 leaves; rank 0 finds out in an exchange."""
    control = Control(rank, 2)
    if rank == 1:
        dist.destroy_process_group()
        return ""
    try:
        if what == "gather":
            control.gather("mine", "collecting answers")
        else:
            control.barrier("meeting")
    except CommunicationError as error:
        return f"{error} / {type(error.__cause__).__name__}"
    return "no error"


@pytest.mark.parametrize(("what", "purpose"), [("gather", "collecting answers"), ("barrier", "meeting")])
def test_a_peer_that_left_is_an_error_that_says_what_for(what: str, purpose: str) -> None:
    pool = RankPool(2)  # of its own: it is of no use afterwards
    try:
        message, _ = pool.run(lose_a_peer, what)
    finally:
        pool.close()
    assert message.startswith(f"rank 0: {purpose} failed: ")
    assert message.endswith(" / RuntimeError")


LIMIT_S = 0.75


def wait_in_vain(rank: int, how: str) -> str:
    """What rank 0 says of an exchange to which rank 1 does not come."""
    control, store = Control(rank, 2), _get_default_store()
    usual_s, limit_s = (LIMIT_S, HANG_S) if how == "afterwards" else (HANG_S, LIMIT_S)
    _set_pg_timeout(timedelta(seconds=usual_s))
    with control.waiting(limit_s):
        control.barrier("meeting")
        if rank == 1 and how != "afterwards":
            store.wait(["failed"])
        elif rank == 0 and how != "afterwards":
            return _failure(control, how, store)
    if rank == 1:
        store.wait(["failed"])
        return ""
    return _failure(control, "vote", store)


def _failure(control: Control, how: str, store: Store) -> str:
    with pytest.raises(CommunicationError) as caught:
        if how == "vote":
            control.any(False, "voting")
        else:
            control.collect(torch.zeros(1), (0, 1), 0, "collecting")
    store.set("failed", "")
    return str(caught.value)


@pytest.mark.parametrize("how", ["vote", "collect", "afterwards"])
def test_an_exchange_may_have_a_limit_of_its_own(how: str) -> None:
    pool = RankPool(2)
    try:
        said, _ = pool.run(wait_in_vain, how)
    finally:
        pool.close()
    assert f"Timed out waiting {LIMIT_S * 1000:.0f}ms" in said


def agree(rank: int, problems: list[str | None], by: int | None) -> str | None:
    def work() -> None:
        if problems[rank] == "bare":
            raise ValueError("bare")
        if problems[rank] is not None:
            raise ConfigError("train.steps", 3, problems[rank] or "", "Use 4.")

    try:
        Control(rank, len(problems)).agreed(work, "judging", by=by)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("problems", "by", "says"),
    [
        ([None, None], None, None),
        (["is odd", "is odd"], None, "train.steps = 3: is odd. Use 4."),
        ([None, "is odd"], None, "train.steps = 3: on rank 1, is odd. Use 4."),
        (["is odd", None], None, "train.steps = 3: on rank 0, is odd. Use 4."),
        (["is odd", None], 0, "train.steps = 3: is odd. Use 4."),
        ([None, "is odd"], 0, None),
        ([None, "bare"], None, "on rank 1, bare"),
        (["bare", "bare"], None, "bare"),
    ],
)
def test_what_one_rank_refuses_all_do(
    ranks: Pools, problems: list[str | None], by: int | None, says: str | None
) -> None:
    assert ranks(2).run(agree, problems, by) == [says] * 2
