"""Ranks that tell each other who is at fault, all in one process; real ones are in test_silent_ranks."""

# ruff: noqa: TID251 - a time that has passed is at least as long as a sleep

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from penstock.topology import faults
from penstock.topology.faults import (
    ACTIVITY,
    Activity,
    FaultWatcher,
    PeerLostError,
    Roll,
    explain,
    give_up,
    is_transport_error,
    named,
    unless_lost,
    watch,
)
from penstock.topology.meeting_point import in_thread
from penstock.topology.notes import JOB_KEY, cause, report_killed, silent_ranks
from tests.support.patience import HANG_S, wait_for

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1."


class Ranks:
    """Some ranks that have met at a store, and the watchers of those that run."""

    def __init__(self, world_size: int) -> None:
        self.root = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.root.set(JOB_KEY, "job")
        self.world_size, self.started = world_size, list[FaultWatcher]()

    def start(self, rank: int, exchange_timeout_s: float | None = None) -> FaultWatcher:
        mine = PrefixStore("job", TCPStore("127.0.0.1", self.root.port, None, False, wait_for_workers=False))
        made = FaultWatcher(mine, rank, self.world_size, exchange_timeout_s=exchange_timeout_s)
        self.started.append(made)
        return made


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(faults, "ANSWER_S", 0.5)
    made = Ranks(3)
    yield made
    watch(None)
    for each in made.started:
        each.close()
    ACTIVITY.failure = ACTIVITY.waited_in = ACTIVITY.lost = None


def test_all_answer_at_once(three: Ranks) -> None:
    first, _, _ = (three.start(rank) for rank in range(3))
    with ACTIVITY.exchanging("waiting for the others"):
        found = first.give_up()
    assert (found.silent, found.culprits) == ((), ())
    assert found.verdict() == "ranks 1 and 2 were waiting for the others"
    assert found.answers.keys() == {1, 2}


@pytest.mark.slow
def test_ranks_that_fail_at_once_make_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call wakes all ranks, which all answer: hundreds of calls would be millions of answers."""
    monkeypatch.setattr(faults, "ANSWER_S", HANG_S)
    many = Ranks(12)
    watchers = [many.start(rank) for rank in range(many.world_size)]
    with ThreadPoolExecutor(many.world_size) as pool:
        found = list(pool.map(FaultWatcher.give_up, watchers))
    assert [each.silent for each in found] == [()] * many.world_size
    calls = [PrefixStore("job", many.root).check([f"call/{number}"]) for number in (1, 2)]
    assert calls == [True, False]
    for each in watchers:
        each.close()


def test_a_store_of_one_process_serves_as_well() -> None:
    store = HashStore()
    first, second = (FaultWatcher(store, rank, 2) for rank in range(2))
    assert first.give_up().answers.keys() == {1}
    first.close()
    second.close()


@pytest.mark.slow
def test_ranks_that_do_not_run_are_silent(three: Ranks) -> None:
    found = three.start(0).give_up()
    assert found.silent == found.culprits == (1, 2)
    assert found.verdict() == "ranks 1 and 2 do not answer: they are stopped, disconnected or dead"


@pytest.mark.slow
def test_who_has_given_up_before_is_not_taken_for_the_culprit(three: Ranks) -> None:
    first, second = three.start(0), three.start(1)
    second.give_up()
    second.close()
    found = first.give_up()
    assert found.silent == (2,)
    assert found.gone == {1: None}


def test_ranks_that_wait_elsewhere_are_said_to(three: Ranks) -> None:
    three.world_size = 2
    first, second = three.start(0), three.start(1)
    ACTIVITY.fail("task L1.N.m0.F", RuntimeError(GLOO))
    second.give_up()
    found = first.give_up()
    assert (found.culprits, found.verdict()) == ((), "rank 1 had given up in L1.N.m0.F")
    waits = {
        rank: {"doing": "saving" if rank == 7 else "in L0.N.m0.F", "failure": None, "exchanging": True}
        for rank in range(9)
    }
    assert Roll((), waits, {}).verdict().startswith("rank 7 was saving; ranks 0, 1, ")


def test_a_rank_that_fails_by_itself_leaves_its_reason(three: Ranks) -> None:
    three.world_size = 2
    first, second = three.start(0), three.start(1)
    ACTIVITY.fail("task L0.X.m0.c0.F", ZeroDivisionError("division by zero"))
    second.give_up()
    ACTIVITY.failure = None
    found = first.give_up()
    assert found.verdict() == "rank 1 had failed: task L0.X.m0.c0.F: ZeroDivisionError: division by zero"
    assert found.culprits == ()
    assert cause(three.root) == (1, "task L0.X.m0.c0.F: ZeroDivisionError: division by zero")


@pytest.mark.slow
def test_the_launcher_learns_who_is_silent_and_what_was_waited_for(three: Ranks) -> None:
    assert (cause(three.root), silent_ranks(three.root)) == ((None, ""), [])
    watch(three.start(0))
    three.start(1)
    ACTIVITY.fail("task L0.N.m0.F", RuntimeError(GLOO))
    explain(RuntimeError(GLOO))
    assert cause(three.root) == (None, "rank 0 waited in task L0.N.m0.F")
    assert silent_ranks(three.root) == [2]


@pytest.mark.slow
def test_ranks_are_told_by_the_launcher_which_of_them_was_killed(
    three: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr("penstock.topology.faults.HEARERS", [heard.append])
    first, second = three.start(0), three.start(1)
    report_killed(three.root, 2, 3, "killed by signal 9 (SIGKILL)")
    wait_for(lambda: len(heard) == 2)
    assert heard == ["rank 2 has ended: killed by signal 9 (SIGKILL)"] * 2
    assert cause(three.root) == (None, "")
    ACTIVITY.fail("task L0.N.m0.F", RuntimeError(GLOO))
    assert first.give_up().verdict() == "rank 2 had failed: killed by signal 9 (SIGKILL)"
    assert cause(three.root) == (None, "rank 0 waited in task L0.N.m0.F")
    assert second.give_up().gone == {0: None, 2: "killed by signal 9 (SIGKILL)"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("held_by", "told"),
    [(0, "rank 0 does not answer: it is stopped, disconnected or dead"), (None, "launcher that keeps")],
)
def test_a_rank_whose_store_has_gone_names_who_kept_it(held_by: int | None, told: str) -> None:
    root = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    watcher = FaultWatcher(
        TCPStore("127.0.0.1", root.port, None, False, wait_for_workers=False), 1, 2, held_by=held_by
    )
    del root
    assert told in watcher.give_up().verdict()
    watcher.close()


def test_a_rank_waits_for_the_oldest_of_what_its_device_has_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """That counts from when all before it was done: the host may be far ahead of a device that works."""
    now_s, done, activity = [0.0], [False, False, False], Activity()
    monkeypatch.setattr(faults, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    for lane in ("inter", "device"):  # a task of a lane that reads what its device will have made
        activity.begin(lane, "L0.D.m0.c0.F")
    for place in range(len(done)):
        activity.issued(partial(done.__getitem__, place))
    for now_s[0], ended, before_s in [(50.0, 1, 50.0), (90.0, 0, 40.0), (100.0, 2, 50.0), (150.0, 0, 50.0)]:
        assert activity.waited_s == before_s
        done[: sum(done) + ended] = [True] * (sum(done) + ended)
        assert activity.waited_s == (0 if ended else before_s)
    for lane in ("inter", "device"):
        activity.end(lane)
    assert activity.waited_s == 0


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


@pytest.mark.slow
def test_a_broken_exchange_is_explained_by_who_is_missing(three: Ranks) -> None:
    three.start(2)
    watch(three.start(0))
    assert explain(OSError("No space left on device")) == "No space left on device"  # nobody is asked
    assert explain(RuntimeError(GLOO)) == (
        "rank 1 does not answer: it is stopped, disconnected or dead "
        "(Connection closed by peer [127.0.0.1]:1.)"
    )
    give_up("said already")
    assert ACTIVITY.failure is None


def test_without_others_the_transport_has_the_word() -> None:
    assert explain(RuntimeError(GLOO)) == "Connection closed by peer [127.0.0.1]:1."


@pytest.mark.parametrize("end", ["leaves", "is late", "gives up"])
def test_a_rank_that_watches_ends_its_exchanges_when_another_does_not_go_on(
    three: Ranks, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    ended = threading.Event()
    monkeypatch.setattr("penstock.topology.faults.END_EXCHANGES", [ended.set])
    three.start(0, exchange_timeout_s=0.2 if end == "is late" else 60.0)
    _, third = three.start(1), three.start(2)
    if end == "leaves":
        third.close()
        ACTIVITY.check()
    elif end == "is late":
        with ACTIVITY.exchanging("inter"):
            assert ended.wait(60.0)
    else:
        monkeypatch.setattr(ACTIVITY, "failure", "task L0.X failed")
        third.give_up()
    if end != "leaves":
        assert ended.wait(60.0)
        with pytest.raises(PeerLostError, match="lasted" if end == "is late" else "rank 2 .*L0.X"):
            ACTIVITY.check()
    assert ended.is_set() == (end != "leaves")


def test_a_rank_whose_exchanges_end_slowly_answers_meanwhile(
    three: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    three.world_size, over = 2, threading.Event()
    monkeypatch.setattr("penstock.topology.faults.END_EXCHANGES", [partial(over.wait, HANG_S)])
    three.start(0, exchange_timeout_s=60.0)
    assert three.start(1).give_up().silent == ()
    over.set()


@pytest.mark.slow
def test_an_exchange_to_which_nobody_comes_any_more_ends(
    three: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "END_S", 0.1)
    watch(three.start(0))
    waiting = in_thread(lambda: unless_lost(partial(threading.Event().wait, HANG_S)))
    three.start(1).give_up()
    with pytest.raises(PeerLostError, match="rank 1 has ended"):
        waiting.result(HANG_S)


@pytest.mark.slow
def test_an_exchange_to_which_a_rank_had_come_before_it_ended_ends_well(three: Ranks) -> None:
    watch(three.start(0))
    arrives = threading.Event()
    waiting = in_thread(lambda: unless_lost(lambda: arrives.wait() and "arrived"))
    three.start(1).give_up()
    arrives.set()
    assert waiting.result(HANG_S) == "arrived"


@pytest.mark.slow
def test_ranks_that_have_survived_a_failure_are_given_time_to_meet_again(
    three: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "END_S", 0.1)
    watch(own := three.start(0))
    three.start(1).give_up()
    own.others_end.result(HANG_S)

    def save() -> str:
        time.sleep(0.5)
        return "saved"

    assert unless_lost(save) == "saved"
    report_killed(three.root, 2, 3, "killed by signal 9 (SIGKILL)")
    with pytest.raises(PeerLostError, match="rank 1 has ended"):
        unless_lost(partial(threading.Event().wait, HANG_S))


@pytest.mark.parametrize("fails", [False, True])
def test_without_a_fault_an_exchange_returns_and_raises_what_it_does(three: Ranks, fails: bool) -> None:
    def exchange() -> str:
        if fails:
            raise RuntimeError(GLOO)
        return "done"

    watch(three.start(0))
    if fails:
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            unless_lost(exchange)
    else:
        assert unless_lost(exchange) == "done"


def test_ranks_are_named() -> None:
    assert [named(ranks) for ranks in ([1], [1, 3], [1, 2, 3])] == [
        "rank 1",
        "ranks 1 and 3",
        "ranks 1, 2 and 3",
    ]
