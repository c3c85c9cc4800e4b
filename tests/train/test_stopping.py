"""Stop requests: noted, agreed between ranks, and gone without a trace."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from penstock.stops import SAME_REQUEST_S, SIGNALS
from penstock.topology import Control
from penstock.train.stopping import StopRequests
from tests.support.ranks import Pools


class HitError(Exception):
    """What the handler before ours raises."""


def _hit(number: int, frame: object) -> None:
    del frame
    raise HitError(number)


@pytest.fixture
def earlier() -> Iterator[None]:
    """A handler of our own under all signals, whatever runs these tests has installed."""
    before = {number: signal.signal(number, _hit) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("earlier")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_stays_noted(number: signal.Signals) -> None:
    with StopRequests(Control(0, 1)) as requests:
        signal.raise_signal(number)
        assert requests.agreed(1).stop
        assert requests.agreed(2).stop


@pytest.mark.usefixtures("earlier")
@pytest.mark.parametrize("number", SIGNALS)
def test_an_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    """As under nohup, and as Ctrl-C for a program in the background of a script."""
    signal.signal(number, signal.SIG_IGN)
    with StopRequests(Control(0, 1)) as requests:
        signal.raise_signal(number)
        assert not requests.agreed(1).stop
    assert signal.getsignal(number) == signal.SIG_IGN


@pytest.fixture
def clock_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock shows by which signals are told apart."""
    now_s = [100.0]
    monkeypatch.setattr("penstock.train.stopping.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


@pytest.mark.usefixtures("earlier")
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGHUP])
def test_two_signals_close_together_count_as_one(second: signal.Signals, clock_s: list[float]) -> None:
    with StopRequests(Control(0, 1)) as requests:
        signal.raise_signal(signal.SIGINT)
        clock_s[0] += 0.9 * SAME_REQUEST_S
        signal.raise_signal(second)
        assert requests.agreed(1).stop


@pytest.mark.usefixtures("earlier")
def test_a_later_second_signal_acts_as_before(clock_s: list[float]) -> None:
    with StopRequests(Control(0, 1)) as requests:
        signal.raise_signal(signal.SIGINT)
        clock_s[0] += 1.1 * SAME_REQUEST_S
        with pytest.raises(HitError):
            signal.raise_signal(signal.SIGTERM)
        assert requests.agreed(1).stop
        assert [signal.getsignal(number) for number in SIGNALS] == [_hit] * len(SIGNALS)


@pytest.mark.usefixtures("earlier")
@pytest.mark.parametrize("fails", [False, True])
def test_handlers_are_restored(fails: bool) -> None:
    try:
        with StopRequests(Control(0, 1)):
            assert all(signal.getsignal(number) is not _hit for number in SIGNALS)
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    for number in SIGNALS:
        with pytest.raises(HitError):
            signal.raise_signal(number)


def agreed_on(rank: int, asked: int | None) -> list[bool]:
    """What this rank hears after two steps, if rank `asked` got a signal during the second."""
    with StopRequests(Control(rank, 2)) as requests:
        heard = [requests.agreed(1).stop]
        if rank == asked:
            signal.raise_signal(signal.SIGTERM)
        return [*heard, requests.agreed(2).stop]


def slowest_of(rank: int, times_s: list[float]) -> list[float]:
    """The step times that this rank hears of, each rank having taken its own."""
    with StopRequests(Control(rank, 2)) as requests:
        return [requests.agreed(1, times_s[rank]).slowest_s, requests.agreed(2, times_s[1 - rank]).slowest_s]


def test_all_ranks_hear_the_time_of_the_slowest(ranks: Pools) -> None:
    assert ranks(2).run(slowest_of, [0.1, 1 / 3]) == [[1 / 3, 1 / 3]] * 2


@pytest.mark.parametrize("asked", [None, 0, 1])
def test_all_ranks_hear_the_same_behind_the_same_step(ranks: Pools, asked: int | None) -> None:
    assert ranks(2).run(agreed_on, asked) == [[False, asked is not None]] * 2
