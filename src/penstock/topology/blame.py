"""Explains a failed exchange: the transport's own words, and which rank was waited for in vain."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

# torch.distributed exports it as well, but hides it from type checkers.
from torch._C._distributed_c10d import Store

from penstock.topology.meeting_point import open_store, within
from penstock.topology.rollcall import (
    ACTIVITY,
    ANSWER_S,
    MOST_REASON,
    PeerLostError,
    RollCall,
    is_transport_error,
)
from penstock.topology.watch import Watch

CULPRITS_KEY: Final = "penstock/culprits"
"""Key under which ranks started by Penstock's launcher leave the numbers of ranks that do not answer."""

OF_DEVICE: Final = (
    "A check on this rank's GPU has failed, perhaps of an earlier task: what it checked stands above in the "
    "standard error (a label or token outside of the vocabulary, for example)"
)
"""Words about an error that the host learns of late and without a reason."""


class _Process:
    """What connects this process with the others; nothing in a program that did not use `join`."""

    roll_call: RollCall | None = None
    watch: Watch | None = None
    store: Store | None = None
    has_given_up = False


def answer_calls(
    roll_call: RollCall | None, store: Store | None = None, *, watches_s: float | None = None
) -> None:
    """Set this process's roll call and the store at which it met the others; None ends both.

    Earlier failures are forgotten. watches_s: the timeout of exchanges that only this rank can end, so that
    it has to watch the others; None = those of others end them.
    """
    if _Process.watch is not None:
        _Process.watch.stop()
    if _Process.roll_call is not None:
        _Process.roll_call.close()
    _Process.roll_call, _Process.store, _Process.has_given_up = roll_call, store, False
    ACTIVITY.failure = ACTIVITY.lost = None
    _Process.watch = None
    if roll_call is not None and watches_s is not None:
        _Process.watch = Watch(roll_call, watches_s, _end_by)


def is_watched() -> bool:
    """Return whether this rank ends its exchanges itself when others fail."""
    return _Process.watch is not None


def has_ended() -> bool:
    """Return whether this rank or another has told that it ends, so that nobody is watched any more."""
    return _Process.has_given_up or ACTIVITY.lost is not None


def _end_by(error: BaseException) -> None:
    give_up(f"{type(error).__name__}: {reason(error)}")


def explain(error: BaseException) -> str:
    """Return the reason of an error; for a broken exchange preceded by the ranks that do not answer.

    In that case it takes up to `rollcall.ANSWER_S`, since silent ranks are given that time.
    """
    if not is_transport_error(error):
        if ACTIVITY.failure is not None:
            give_up(ACTIVITY.failure)
        return reason(error)
    verdict = _hear()
    if isinstance(error, PeerLostError):
        return verdict or reason(error)
    return f"{verdict} ({reason(error)})" if verdict else reason(error)


def give_up(why: str) -> None:
    """Tell the other ranks that this one ends for a reason of its own, if they have not been told yet."""
    if not _Process.has_given_up:
        ACTIVITY.failure = why[:MOST_REASON]
        _hear()


def is_first_to_say(text: str) -> bool:
    """Tell whether no other rank has asked this about the same text, which all of them may have to print.

    A rank that has not joined the others cannot know, and counts as the first.
    """
    if _Process.store is None:
        return True
    store, key = _Process.store, f"said/{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        return within(ANSWER_S, lambda: store.add(key, 1)) == 1
    except RuntimeError:  # the rank that keeps the store has ended, and has reported why
        return False


def _hear() -> str:
    """Give up, and return which ranks are at fault."""
    if _Process.roll_call is None:
        return ""
    _Process.has_given_up = True
    roll = _Process.roll_call.give_up()
    # A rank that fails by itself kept no other rank waiting; others may soon find the same fault.
    _tell_launcher(roll.culprits if ACTIVITY.failure is None else roll.silent)
    return roll.verdict()


def reason(error: BaseException) -> str:
    """Return the first line of an error without Gloo's additions: a source file in front, advice after.

    A check that has failed on a device gives its reason elsewhere, which is added.
    """
    line = (str(error).strip().splitlines() or ["no reason given"])[0]
    found = re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", line).split(" This is typically")[0]
    return f"{found}. {OF_DEVICE}" if "device-side assert" in found else found


def _tell_launcher(culprits: Sequence[int]) -> None:
    """Name silent ranks to Penstock's launcher: only it can end them, and its store outlives every rank."""
    if not culprits or os.environ.get("PENSTOCK_LAUNCHED") != "1":
        return
    with suppress(RuntimeError):  # the launcher has ended, or is stopped: it could kill nobody
        store = open_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ANSWER_S)
        store.set(CULPRITS_KEY, ",".join(map(str, culprits)))
