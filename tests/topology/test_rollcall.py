"""Ranks that ask each other who still answers, all in one process; real ones are in test_silent_ranks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from penstock.topology import rollcall
from penstock.topology.blame import answer_calls, explain, give_up
from penstock.topology.rollcall import (
    ACTIVITY,
    Activity,
    PeerLostError,
    Roll,
    RollCall,
    is_transport_error,
    named,
    new_token,
    open_listener,
)
from penstock.topology.watch import Watch

HERE = ("127.0.0.1", 1)
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1."


class Ranks:
    """Some ranks that answer; their listeners."""

    def __init__(self, world_size: int) -> None:
        self.listeners = [open_listener(HERE) for _ in range(world_size)]
        self.addresses = [listener.getsockname()[:2] for listener in self.listeners]
        self.token, self.started = new_token(), list[RollCall]()

    def start(self, rank: int) -> RollCall:
        made = RollCall(rank, self.listeners[rank], self.addresses, self.token)
        self.started.append(made)
        return made


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(rollcall, "ANSWER_S", 0.5)
    monkeypatch.setattr(ACTIVITY, "failure", None)  # another test's step may have failed in this process
    made = Ranks(3)
    yield made
    answer_calls(None)
    for each in made.started:
        each.close()
    for listener in made.listeners:
        listener.close()


def test_all_answer_at_once(three: Ranks) -> None:
    first, _, _ = (three.start(rank) for rank in range(3))
    with ACTIVITY.exchanging("waiting for the others"):
        found = first.give_up()
    assert (found.silent, found.culprits, found.verdict()) == ((), (), "")
    assert found.answers.keys() == {1, 2}


def test_a_stopped_and_a_dead_rank_are_silent(three: Ranks) -> None:
    """A stopped process still has its socket: it is connected to, and says nothing."""
    three.listeners[2].close()
    found = three.start(0).give_up()
    assert found.silent == found.culprits == (1, 2)
    assert found.verdict() == "ranks 1 and 2 do not answer: they are stopped, disconnected or dead"


def test_who_has_given_up_before_is_not_taken_for_the_culprit(three: Ranks) -> None:
    first, second = three.start(0), three.start(1)
    second.give_up()
    three.started.remove(second)
    second.close()
    found = first.give_up()
    assert found.silent == (2,)
    assert found.gone == {1: None}


def test_a_rank_that_fails_by_itself_leaves_its_reason(three: Ranks) -> None:
    first, second, _ = (three.start(rank) for rank in range(3))
    ACTIVITY.fail("task L0.X.m0.c0.F", ZeroDivisionError("division by zero"))
    second.give_up()
    ACTIVITY.failure = None
    found = first.give_up()
    assert found.verdict() == "rank 1 had failed: task L0.X.m0.c0.F: ZeroDivisionError: division by zero"
    assert found.culprits == ()


def test_a_stranger_hears_nothing(three: Ranks) -> None:
    three.start(0)
    with socket.create_connection(three.addresses[0]) as stranger:
        stranger.sendall(b"x" * 32 + b'{"rank": 1, "failure": "a lie"}\n')
        assert stranger.recv(100) == b""
    three.start(1), three.start(2)
    assert three.started[0].give_up().gone == {}


def test_a_neighbour_is_reached_or_not(three: Ranks) -> None:
    first, _ = three.start(0), three.start(1)
    assert first.reaches(1)
    assert not first.reaches(2)
    assert three.started[1].give_up().gone == {}  # trying is not giving up


def test_who_takes_no_part_is_busy() -> None:
    activity = Activity()
    activity.begin("compute", "L0.X.m0.c0.F")
    time.sleep(0.01)
    said = activity.answer()
    assert not said["exchanging"] and said["busy_s"] >= 0.01
    roll = Roll((), {1: {**said, "busy_s": 7.25}}, {})
    assert roll.verdict() == "rank 1 answers, but was in L0.X.m0.c0.F for 7.2 s"
    assert roll.culprits == (1,)
    with activity.exchanging("saving"):
        with activity.exchanging("waiting to save"):
            pass
        assert activity.answer()["exchanging"]
    assert not activity.answer()["exchanging"]


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError(GLOO), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("shapes do not fit"), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_errors_of_transports_are_known(error: Exception, is_one: bool) -> None:
    assert is_transport_error(error) is is_one


def test_a_broken_exchange_is_explained_by_who_is_missing(three: Ranks) -> None:
    three.start(2)
    answer_calls(RollCall(0, three.listeners[0], three.addresses, three.token))
    assert explain(OSError("No space left on device")) == "No space left on device"  # nobody is asked
    assert explain(RuntimeError(GLOO)) == (
        "rank 1 does not answer: it is stopped, disconnected or dead "
        "(Connection closed by peer [127.0.0.1]:1.)"
    )
    give_up("said already")
    assert ACTIVITY.failure is None


def test_without_a_roll_call_the_transport_has_the_word() -> None:
    assert explain(RuntimeError(GLOO)) == "Connection closed by peer [127.0.0.1]:1."


@pytest.mark.parametrize("end", ["leaves", "breaks off", "gives up"])
def test_a_rank_that_watches_ends_its_exchanges_when_another_does_not_go_on(
    three: Ranks, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    ended = threading.Event()
    monkeypatch.setattr("penstock.topology.watch.END_EXCHANGES", [ended.set])
    monkeypatch.setattr(ACTIVITY, "lost", None)
    first, second, third = (three.start(rank) for rank in range(3))
    watch = Watch(first, 60.0, lambda error: None)
    while not second._watchers:
        time.sleep(0.001)
    if end == "leaves":
        second.close()
        while watch._neighbour is not None:
            time.sleep(0.001)
        ACTIVITY.check()
    elif end == "breaks off":
        second._watchers.pop().close()
    else:
        monkeypatch.setattr(ACTIVITY, "failure", "task L0.X failed")
        third.give_up()
    if end != "leaves":
        assert ended.wait(60.0)
        with pytest.raises(PeerLostError, match="next rank" if end == "breaks off" else "rank 2 .*L0.X"):
            ACTIVITY.check()
    watch.stop()
    assert ended.is_set() == (end != "leaves")


def test_ranks_are_named() -> None:
    assert [named(ranks) for ranks in ([1], [1, 3], [1, 2, 3])] == [
        "rank 1",
        "ranks 1 and 3",
        "ranks 1, 2 and 3",
    ]
