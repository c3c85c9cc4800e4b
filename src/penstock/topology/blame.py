"""What to say about a failed exchange: the transport's own words, and which rank was waited for in vain."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from typing import Final

# torch.distributed has it as well, but hides it from type checkers.
from torch._C._distributed_c10d import Store, TCPStore

from penstock.topology.rollcall import ACTIVITY, MOST_REASON, RollCall, is_transport_error

CULPRITS_KEY: Final = "penstock/culprits"
"""Where ranks that our launcher started leave the numbers of those that do not answer."""


class _Process:
    """What this process has joined with; none in a program that did not use `join`."""

    roll_call: RollCall | None = None
    store: Store | None = None
    has_given_up = False


def answer_calls(roll_call: RollCall | None, store: Store | None = None) -> None:
    """Make this the roll call of this process, and the store that it met the others at; None ends both.

    What has failed earlier is past.
    """
    if _Process.roll_call is not None:
        _Process.roll_call.close()
    _Process.roll_call, _Process.store, _Process.has_given_up = roll_call, store, False
    ACTIVITY.failure = None


def explain(error: BaseException) -> str:
    """The reason of an error; for a broken exchange preceded by the ranks that do not answer.

    Takes up to `rollcall.ANSWER_S` then, since silent ranks are given that time.
    """
    if not is_transport_error(error):
        if ACTIVITY.failure is not None:
            give_up(ACTIVITY.failure)
        return reason(error)
    verdict = _hear()
    return f"{verdict} ({reason(error)})" if verdict else reason(error)


def give_up(why: str) -> None:
    """Tell the other ranks that this one ends for a reason of its own, if they have not been told yet."""
    if not _Process.has_given_up:
        ACTIVITY.failure = why[:MOST_REASON]
        _hear()


def is_first_to_say(text: str) -> bool:
    """Whether no other rank has asked this about the same text, which all of them may have to say.

    A rank that has not joined the others cannot know, and is.
    """
    if _Process.store is None:
        return True
    try:
        return _Process.store.add(f"said/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1
    except RuntimeError:  # the rank that keeps the store has ended, and said with what
        return False


def _hear() -> str:
    """Give up, and hear who is at fault."""
    if _Process.roll_call is None:
        return ""
    _Process.has_given_up = True
    roll = _Process.roll_call.give_up()
    # A rank that fails for a reason of its own kept nobody waiting; others may soon find the same fault.
    _tell_launcher(roll.culprits if ACTIVITY.failure is None else roll.silent)
    return roll.verdict()


def reason(error: BaseException) -> str:
    """The first line of an error without what Gloo puts around it: a source file before, advice after."""
    line = (str(error).strip().splitlines() or ["no reason given"])[0]
    return re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", line).split(" This is typically")[0]


def _tell_launcher(culprits: Sequence[int]) -> None:
    """Our launcher ends ranks that do not answer; only it can, and its store outlives every rank."""
    if culprits and os.environ.get("PENSTOCK_LAUNCHED") == "1":
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
        store.set(CULPRITS_KEY, ",".join(map(str, culprits)))
