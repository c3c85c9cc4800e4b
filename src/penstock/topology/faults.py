"""Finds which rank is at fault when an exchange fails, by way of the job's own store.

A transport only knows that its own peer was late or has gone, and that peer is often a survivor that was
waiting itself. So every rank has a thread that waits at the store at which the ranks have met, on a
connection of its own, as a wait blocks whatever shares its connection. A rank that gives up leaves a note
there and wakes these threads. Each tells its own rank, ends what waits for the rank that has given up, and
answers with what its rank is doing: not if the process is stopped, disconnected or dead. Nothing is sent
until something has failed, and then a few messages per rank.

Nothing wakes a kernel of NCCL: it waits on the device, and the host behind it in a copy or an event. So on
GPUs the thread also ends this rank's exchanges, when a rank has given up and when an exchange lasts longer
than the timeout. What waited goes on with any numbers, and whoever reads them asks `ACTIVITY.check` first.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from typing import Any, Final, TypeVar

import torch.distributed as dist

# torch.distributed exports it as well, but hides it from type checkers.
from penstock.topology.meeting_point import in_thread, within
from penstock.topology.notes import CULPRITS_KEY, Store, call, leave_note, lines, notes, underlying

T = TypeVar("T")

ANSWER_S: Final = 2.0
"""Seconds that a rank may take to answer."""
BUSY_S: Final = 1.0
"""A rank that has been in no exchange for longer than this kept the others waiting."""
POLL_S, MOST_POLLS_PER_S, LONGEST_POLL_S = 0.02, 2000, 0.5
"""How often a rank that asks looks whether all have answered; how often all ranks together do, as one store
serves them; and after how many seconds it does in any case."""
WATCH_S: Final = 0.1
"""How often a rank on a GPU looks whether an exchange has lasted too long."""
LEAVE_S: Final = 1.0
"""How long the rank that keeps the store waits for the others to leave before it."""
IDLE: Final = timedelta(days=24)
"""How long a thread waits at the store; torch warns when that is over, and cannot count more milliseconds."""
END_S: Final = 1.0
"""How long a transfer or an exchange of hosts may still last once a rank has given up. What can be woken ends
in milliseconds by an error of Gloo, and that to which the rank has come already ends well."""
SURVIVED_S: Final = 30.0
"""The same for one that begins afterwards: programs may survive a failure together, and save their work."""
STORE_GONE_S: Final = 5.0
"""How long an exchange may last on GPUs once the store has gone, and with it the machine that kept it."""
EXCHANGES: Final = frozenset({"inter", "intra", "device"})
"""What may wait for other ranks in a step: lanes, and the host for the device."""
MOST_REASON: Final = 500
MOST_TOLD: Final = 2
LEAVING: Final = "leaving"
"""What the rank that keeps the store calls before it ends in order."""
OF_DEVICE: Final = (
    "A check on this rank's GPU has failed, perhaps of an earlier task: what it checked stands above in the "
    "standard error (a label or token outside of the vocabulary, for example)"
)
"""Words about an error that the host learns of late and without a reason."""

HEARERS: Final[list[Callable[[str], None]]] = []
"""Who is told at once that another rank has given up, in words: exchanges with it may never end."""
END_EXCHANGES: Final[list[Callable[[], None]]] = []
"""What ends all exchanges that this process has begun on devices."""


class PeerLostError(dist.DistError):
    """Exchanges of this rank were ended, as another rank no longer takes part in them."""


class Activity:
    """What this rank is doing, for its answer. Every lane writes it, so writing must cost next to nothing.

    Attributes:
        failure: Why this rank ends, unless for the end of another.
        waited_in: The task or exchange in which this rank waited for others that did not come.
        lost: Why exchanges of this rank were ended from outside: another rank no longer takes part, and what
            they were to bring is then anything.
    """

    def __init__(self) -> None:
        self._now: dict[str, tuple[object, float]] = {}
        self._left_s = time.monotonic()
        self._issued: deque[tuple[Callable[[], bool], float]] = deque()
        self._asking = threading.RLock()  # of the same thread, too, where a signal is handled
        self._done_s = float("-inf")  # when some of it was last found done
        self.failure: str | None = None
        self.waited_in: str | None = None
        self.lost: str | None = None

    def begin(self, lane: str, what: object) -> None:
        """Note that `lane` has begun with `what`, whose `str` is only made for an answer."""
        self._now[lane] = (what, time.monotonic())

    def end(self, lane: str) -> None:
        self._now.pop(lane, None)
        self._left_s = time.monotonic()

    def fail(self, what: str, error: BaseException) -> None:
        """Remember why this rank stops, unless the error is only the effect of another rank's end."""
        if self.lost is None and not is_transport_error(error):
            self.failure = f"{what}: {type(error).__name__}: {error}".splitlines()[0][:MOST_REASON]
        else:
            self.waited_in = self.waited_in or what

    def issued(self, is_done: Callable[[], bool]) -> None:
        """Note that an exchange, or the rest of a half step, has been given to the device.

        Args:
            is_done: Returns whether the device has done it.
        """
        with self._asking:
            self._forget_done()
            self._issued.append((is_done, time.monotonic()))

    def _forget_done(self) -> None:
        try:
            while self._issued and self._issued[0][0]():
                self._issued.popleft()
                self._done_s = time.monotonic()
        except RuntimeError:  # the device has failed, which the thread that reads from it tells
            self._issued.clear()

    def check(self) -> None:
        """Raise PeerLostError if exchanges of this rank were ended from outside."""
        if self.lost is not None:
            raise PeerLostError(self.lost)

    @property
    def waited_s(self) -> float:
        """How long this rank has been in an exchange of a step, or its device with what it does next.

        The host may be minutes ahead of a device that works, so that counts from when all before was done.
        """
        begun = [since_s for lane, (_, since_s) in dict(self._now).items() if lane in EXCHANGES]
        with self._asking:
            self._forget_done()
            begun += [since_s for _, since_s in islice(self._issued, 1)]
            now_s, done_s = time.monotonic(), self._done_s
        return now_s - max(done_s, min(begun)) if begun else 0.0

    def begin_step(self) -> None:
        """Forget earlier failures when a step begins: they were caught, and do not explain a later end."""
        self.failure = self.waited_in = None

    @contextmanager
    def exchanging(self, what: str) -> Iterator[None]:
        """Note an exchange outside the steps while entered; one may be part of another."""
        self.begin(what, what)
        try:
            yield
        except RuntimeError as error:
            if what not in EXCHANGES and is_transport_error(error):
                self.waited_in = self.waited_in or what
            raise
        finally:
            self.end(what)

    def answer(self) -> dict[str, Any]:
        """Return what other ranks are told."""
        now, now_s = dict(self._now), time.monotonic()
        computing = None if "device" in now else now.pop("compute", None)
        doing, since_s = "outside every exchange and task", self._left_s
        if computing:
            doing, since_s = f"in {computing[0]}", computing[1]
        if now:  # what others may never come to has lasted longest
            place, (what, since_s) = min(now.items(), key=lambda each: each[1][1])
            doing = {"device": "waiting for its device", what: str(what)}.get(place, f"in {what}")
        return {
            "exchanging": bool(now) or self.waited_s > 0,
            "doing": doing,
            "busy_s": now_s - since_s,
            "failure": self.failure,
        }


ACTIVITY: Final = Activity()


@dataclass(frozen=True)
class Roll:
    """What ranks say of themselves.

    Attributes:
        silent: Ranks that do not answer.
        answers: What the others said, by rank.
        gone: Ranks that had given up, with the reason if it was their own.
        stuck: What ranks were doing that gave up as others did not come.
        launcher_is_silent: Whether the launcher's store did not answer, so that nobody could be asked.
    """

    silent: tuple[int, ...]
    answers: Mapping[int, Mapping[str, Any]]
    gone: Mapping[int, str | None]
    stuck: Mapping[int, str] = field(default_factory=dict)
    launcher_is_silent: bool = False

    @property
    def failed(self) -> dict[int, str]:
        """Ranks that failed for a reason of their own, with the reason."""
        failures = [*((rank, said["failure"]) for rank, said in self.answers.items()), *self.gone.items()]
        return {rank: why for rank, why in sorted(failures, key=lambda each: each[0]) if why}

    @property
    def waiting(self) -> str:
        """What ranks are doing of which none is to blame: of many, those who do what the fewest do."""
        doing = {rank: ("", said["doing"]) for rank, said in self.answers.items() if rank not in self.gone}
        doing |= {rank: ("had given up", what) for rank, what in self.stuck.items()}
        ranks = {each: [rank for rank in sorted(doing) if doing[rank] == each] for each in doing.values()}
        fewest = sorted(ranks.items(), key=lambda each: len(each[1]))[:MOST_TOLD]
        verbs = ("was", "were")
        return "; ".join(f"{named(at)} {verb or verbs[len(at) > 1]} {what}" for (verb, what), at in fewest)

    @property
    def busy(self) -> dict[int, str]:
        """Ranks that run, but have been in no exchange for long, with what they were doing."""
        return {
            rank: f"{said['doing']} for {said['busy_s']:.1f} s"
            for rank, said in sorted(self.answers.items())
            if not said["exchanging"] and rank not in self.gone and said["busy_s"] > BUSY_S
        }

    @property
    def culprits(self) -> tuple[int, ...]:
        """Ranks that no longer run, or run and do not take part."""
        return self.silent or (() if self.failed else tuple(self.busy))

    def verdict(self) -> str:
        """Return one clause that names the ranks at fault, or says where they are if all answer and wait."""
        if self.failed:
            return "; ".join(f"rank {rank} had failed: {why}" for rank, why in self.failed.items())
        if self.silent:
            verb = "does not answer: it is" if len(self.silent) == 1 else "do not answer: they are"
            return f"{named(self.silent)} {verb} stopped, disconnected or dead"
        if self.launcher_is_silent:
            return "the launcher that keeps the ranks' store is stopped, disconnected or dead"
        busy = (f"rank {rank} answers, but was {what}" for rank, what in self.busy.items())
        return "; ".join(busy) or self.waiting


class FaultWatcher:
    """This rank's part in finding faults: a thread at the store that hears, answers, and ends exchanges.

    Keys of the store: `callers/N` counts the ranks that make call N, `call/N` has one of them; `wake/R/N`
    wakes the thread of rank R for it; `ended` has a line for every rank that has given up, `answers/N` one
    for every answer; `ended/count` and `answers/N/count` tell without reading them whether they are complete.
    However many ranks fail at once, they make one call together, and ask the store at one rate.

    Args:
        store: The store at which these ranks have met; its keys are used by no other ranks and no earlier
            start.
        held_by: The rank whose process keeps the store; None = another process, such as a launcher.
        exchange_timeout_s: Seconds that an exchange of a step may last that only this rank can end; None =
            exchanges end by themselves, as on CPUs.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        held_by: int | None = None,
        exchange_timeout_s: float | None = None,
    ) -> None:
        self.store, self.has_given_up = store, False
        self.watches = exchange_timeout_s is not None
        self._rank, self._world_size, self._held_by = rank, world_size, held_by
        self._timeout_s = float("inf") if exchange_timeout_s is None else exchange_timeout_s
        self.others_end: Future[str] = Future()  # how the first that gave up did, in words
        self.killed = False  # whether one of them was killed, so that the program does not survive it
        self._gone: dict[int, str | None] = {}
        self._heard, self._heard_s = 0, float("-inf")  # the last call, and when this rank heard of it
        self._poll_s = min(max(POLL_S, world_size / MOST_POLLS_PER_S), LONGEST_POLL_S)
        self._stopped = threading.Event()
        ACTIVITY.failure = ACTIVITY.waited_in = ACTIVITY.lost = None
        self._connection = store.clone()
        self._threads = [threading.Thread(target=self._run, name="penstock-faults", daemon=True)]
        if self.watches:
            self._threads.append(threading.Thread(target=self._watch, name="penstock-watch", daemon=True))
        for thread in self._threads:
            thread.start()
        atexit.register(self._at_exit)

    def close(self) -> None:
        """Watch and answer no longer. The rank whose process keeps the store ends after the others."""
        atexit.unregister(self._at_exit)
        self._stopped.set()
        if self._threads[0].is_alive():
            with suppress(RuntimeError):  # the store goes just now, which ends the thread as well
                within(ANSWER_S, self._leave)
        for thread in self._threads:
            thread.join(ANSWER_S)  # no longer: the machine that keeps the store may be stopped

    def _leave(self) -> None:
        store = self.store.clone()
        if self._held_by == self._rank:
            call(store, self._world_size, self._heard + 1, LEAVING)
            self._until(lambda: store.add("left", 0) >= self._world_size - 1, LEAVE_S)
        else:
            store.add("left", 1)
        store.set(f"wake/{self._rank}/{self._heard + 1}", "")

    def give_up(self) -> Roll:
        """Tell all other ranks that this one ends, and return what they do, within `ANSWER_S`."""
        self.has_given_up = True
        note = {"rank": self._rank, "failure": ACTIVITY.failure, "waited_in": ACTIVITY.waited_in}
        rolls: list[Roll] = []
        try:
            within(ANSWER_S + 2 * self._poll_s, lambda: self._ask(self.store.clone(), note, rolls))
        except RuntimeError:  # the process that keeps the store is stopped or gone
            if not rolls:
                gone, held_by = dict(self._gone), self._held_by
                silent = () if held_by is None or held_by in gone else (held_by,)
                return Roll(silent, {}, gone, launcher_is_silent=held_by is None)
        return rolls[-1]

    # ---- asking --------------------------------------------------------------------------------------------

    def _ask(self, store: Store, note: Mapping[str, Any], found: list[Roll]) -> None:
        """Leave a note and collect answers; a call that another rank has just made serves this one, too."""
        leave_note(store, note)
        number, since_s = self._heard, self._heard_s
        if time.monotonic() - since_s > ANSWER_S / 2:
            number, since_s = self._heard + 1, time.monotonic()
            call(store, self._world_size, number, str(self._rank))

        def complete() -> bool:
            heard = store.add(f"answers/{number}/count", 0) + store.add("ended/count", 0)
            if heard < self._world_size:
                return False
            found.append(self._read(store, number))
            return not found[-1].silent

        if not self._until(complete, since_s + ANSWER_S - time.monotonic()):
            found.append(self._read(store, number))
        if self._held_by == self._rank:  # others have yet to ask, and can only do it while this one lasts
            silent = len(found[-1].silent)
            self._until(lambda: store.add("ended/count", 0) + silent >= self._world_size, ANSWER_S)

    def _until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something at the store holds, and tell whether it does within the time."""
        until_s = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() >= until_s:
                return False
            time.sleep(self._poll_s)
        return True

    def _read(self, store: Store, number: int) -> Roll:
        left = notes(store)
        left.pop(self._rank, None)
        gone = {**self._gone, **{rank: note["failure"] for rank, note in left.items()}}
        said = lines(store, f"answers/{number}") if store.add(f"answers/{number}/count", 0) else []
        answers = {each["rank"]: each for each in said if each["rank"] != self._rank}
        stuck = {
            rank: re.sub("^task ", "in ", note["waited_in"])
            for rank, note in left.items()
            if note["waited_in"]
        }
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        return Roll(tuple(r for r in others if r not in answers and r not in gone), answers, gone, stuck)

    # ---- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Wait for calls until this rank leaves, or the store goes."""
        while not self._stopped.is_set():
            try:
                self._connection.wait([f"wake/{self._rank}/{self._heard + 1}"], IDLE)
                self._answer(self._connection)
            except dist.DistStoreError:  # nobody has called for long
                continue
            except RuntimeError:
                self._timeout_s = min(self._timeout_s, STORE_GONE_S)
                return

    def _watch(self) -> None:
        """End this rank's exchanges if one of them has lasted for too long."""
        while not self._stopped.wait(WATCH_S) and ACTIVITY.lost is None:
            if (waited_s := ACTIVITY.waited_s) > self._timeout_s:
                # Its own thread: ranks that are stopped take their time to be found silent.
                threading.Thread(target=self.give_up, name="penstock-tell", daemon=True).start()
                self._lose(f"an exchange has lasted for {waited_s:.1f} s")

    def _answer(self, store: Store) -> None:
        """Hear a call: begin to end what waits for ranks that have given up, and answer."""
        if self._stopped.is_set():
            return
        self._heard, self._heard_s = self._heard + 1, time.monotonic()
        if store.get(f"call/{self._heard}") == LEAVING.encode():
            self._stopped.set()
            store.add("left", 1)
            return
        answer = json.dumps({"rank": self._rank, **ACTIVITY.answer()}) + "\n"
        for rank, note in notes(store).items():
            if rank != self._rank and rank not in self._gone:
                failure = self._gone[rank] = note["failure"]
                message = f"rank {rank} has ended" + (f": {failure}" if failure else "")
                for hear in HEARERS:
                    hear(message)
                self.killed = self.killed or note.get("killed", False)
                if not self.others_end.done():
                    self.others_end.set_result(message)
                self._lose(message)
        store.append(f"answers/{self._heard}", answer)
        store.add(f"answers/{self._heard}/count", 1)

    def _lose(self, why: str) -> None:
        """Begin to end this rank's exchanges. Whoever is freed by that must find the reason."""
        if self.watches and ACTIVITY.lost is None:
            ACTIVITY.lost = why
            for end in END_EXCHANGES:
                in_thread(end)  # it may take longer than others wait for this rank's answer

    def _at_exit(self) -> None:
        """Tell the others the error by which Python ends; end the thread in any case."""
        error = getattr(sys, "last_value", None)
        if error is not None and not self.has_given_up:
            give_up(f"{type(error).__name__}: {reason(error)}")
        self.close()


# ---- what a process asks -----------------------------------------------------------------------------------


class _Process:
    """The watcher of this process; None in a program that has not joined others."""

    watcher: FaultWatcher | None = None


def watch(watcher: FaultWatcher | None) -> None:
    """Set this process's watcher, in place of an earlier one, which is closed and leaves no trace."""
    if _Process.watcher is not None and _Process.watcher is not watcher:
        _Process.watcher.close()
    if watcher is None:  # else it has begun anew itself
        ACTIVITY.failure = ACTIVITY.waited_in = ACTIVITY.lost = None
    _Process.watcher = watcher


def is_watched() -> bool:
    """Return whether this rank ends its exchanges itself when others fail."""
    return _Process.watcher is not None and _Process.watcher.watches


def has_ended() -> bool:
    """Return whether this rank or another has told that it ends, so that nobody is watched any more."""
    return ACTIVITY.lost is not None or (_Process.watcher is not None and _Process.watcher.has_given_up)


def explain(error: BaseException) -> str:
    """Return the reason of an error; for a broken exchange preceded by the ranks that do not answer.

    In that case it takes up to `ANSWER_S`, since silent ranks are given that time.
    """
    if not is_transport_error(error):
        if ACTIVITY.failure is not None:
            give_up(ACTIVITY.failure)
        return reason(error)
    verdict = _ask_others()
    if isinstance(error, PeerLostError):
        return verdict or reason(error)
    return f"{verdict} ({reason(error)})" if verdict else reason(error)


def give_up(why: str) -> None:
    """Tell the other ranks that this one ends for a reason of its own, if they have not been told yet."""
    if _Process.watcher is None or not _Process.watcher.has_given_up:
        ACTIVITY.failure = why[:MOST_REASON]
        _ask_others()


def unless_lost(exchange: Callable[[], T]) -> T:
    """Return what an exchange of hosts returns, which does not outlast the end of another rank.

    When a connection ends, Gloo does not tell who waits to send what the other rank has not asked for yet,
    and leaves it to the timeout. Such a wait goes on in a thread that is left behind. Another thread costs
    about 0.1 ms, so lanes do it otherwise (`ThreadLanes`); on GPUs exchanges are ended from outside, and this
    thread has the device that is meant.

    Args:
        exchange: Exchanges tensors that it makes itself, as modes of torch belong to a thread.

    Raises:
        PeerLostError: Another rank has given up, and the exchange has not ended soon after.
    """
    watcher = _Process.watcher
    if watcher is None or watcher.watches:
        return exchange()
    late, begun_s = watcher.others_end.done(), time.monotonic()
    outcome = in_thread(exchange)
    either: tuple[Future[Any], ...] = (outcome, watcher.others_end)
    wait(either, return_when=FIRST_COMPLETED)
    lost_s = begun_s if late else time.monotonic()
    while not outcome.done():
        grace_s = SURVIVED_S if late and not watcher.killed else END_S
        if time.monotonic() - lost_s > grace_s:
            raise PeerLostError(watcher.others_end.result())
        wait((outcome,), POLL_S)
    return outcome.result()


def is_first_to_say(text: str) -> bool:
    """Tell whether no other rank has asked this about the same text, which all of them may have to print.

    A rank that has not joined the others cannot know, and counts as the first.
    """
    if _Process.watcher is None:
        return True
    store, key = _Process.watcher.store, f"said/{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        return bool(within(ANSWER_S, lambda: store.add(key, 1)) == 1)
    except RuntimeError:  # the rank that keeps the store has ended, and has reported why
        return False


def is_transport_error(error: BaseException) -> bool:
    """Tell whether an exchange with other ranks broke, or others did not come to it."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and re.match(r"\[[^\]]*\.cc:\d+\] ", str(error)) is not None
    )


def reason(error: BaseException) -> str:
    """Return the first line of an error without Gloo's additions: a source file in front, advice after.

    A check that has failed on a device gives its reason elsewhere, which is added.
    """
    line = (str(error).strip().splitlines() or ["no reason given"])[0]
    message = re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", line).split(" This is typically")[0]
    return f"{message}. {OF_DEVICE}" if "device-side assert" in message else message


def named(ranks: Sequence[int]) -> str:
    """Return ranks in words, such as `rank 1`, `ranks 1 and 3`, `ranks 1, 2 and 3`."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _ask_others() -> str:
    """Give up, and return which ranks are at fault."""
    watcher = _Process.watcher
    if watcher is None:
        return ""
    roll = watcher.give_up()
    # A rank that fails by itself kept no other rank waiting; others may soon find the same fault.
    culprits = roll.culprits if ACTIVITY.failure is None else roll.silent
    if culprits:
        with suppress(RuntimeError):  # the launcher has ended, or is stopped: it could kill nobody
            root = underlying(watcher.store)
            within(ANSWER_S, lambda: root.set(CULPRITS_KEY, ",".join(map(str, culprits))))
    return roll.verdict()
