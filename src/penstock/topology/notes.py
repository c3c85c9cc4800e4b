"""What ranks leave at their job's store as they end: for each other (`faults`), and for their launcher.

`ended` has a note for every rank that has given up, `ended/count` their number; `callers/N`, `call/N` and
`wake/R/N` are a call that wakes the threads of all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from typing import Any, Final

from torch._C._distributed_c10d import PrefixStore

Store = Any
"""One of torch's stores, of which type checkers know neither `clone` nor `append` nor `multi_set`."""

CALLERS: Final = 2
"""How many of the ranks that ask at once wake the others: one may die over it."""
JOB_KEY: Final = "penstock/job"
"""Key under which ranks leave the prefix of their notes, for the launcher that keeps the store."""
MET_KEY: Final = "penstock/met"
"""Key under which ranks count those that have connected to all others, for that launcher."""
CULPRITS_KEY: Final = "penstock/culprits"
"""Key under which ranks leave the numbers of ranks that do not answer, for that launcher."""


def underlying(store: Store) -> Store:
    """Return the store behind all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def lines(store: Store, key: str) -> list[dict[str, Any]]:
    """Return what ranks have said under a key, a line each."""
    return [json.loads(line) for line in store.get(key).decode().splitlines()]


def leave_note(store: Store, note: Mapping[str, Any]) -> None:
    """Say that a rank ends: `rank`, `failure` if it has a reason of its own, `waited_in` as in `Activity`."""
    store.append("ended", json.dumps(note) + "\n")
    store.add("ended/count", 1)


def notes(store: Store) -> dict[int, dict[str, Any]]:
    """Return what ranks that end have said; of several notes about a rank the first with a reason counts."""
    by_rank: dict[int, dict[str, Any]] = {}
    for note in lines(store, "ended") if store.add("ended/count", 0) else ():
        if not by_rank.get(note["rank"], {}).get("failure"):
            by_rank[note["rank"]] = note
    return by_rank


def call(store: Store, world_size: int, number: int, by: str) -> None:
    """Wake the threads of all ranks for call `number`, unless others who ask at the same time do.

    Args:
        by: Who calls: a rank, or what is said in its place.
    """
    if store.add(f"callers/{number}", 1) > CALLERS:
        return
    store.set(f"call/{number}", by)
    keys = [f"wake/{rank}/{number}" for rank in range(world_size)]
    if store.has_extended_api():
        store.multi_set(keys, [""] * len(keys))
    else:
        for key in keys:
            store.set(key, "")


# ---- for the launcher that keeps the store -----------------------------------------------------------------


def report_killed(root: Store, rank: int, world_size: int, how: str) -> None:
    """Tell the ranks of a job, once they have met, that one was killed and could not say so itself.

    Args:
        root: The launcher's store.
        rank: The rank that was killed.
        how: What killed it, in words.
    """
    job = _job_of(root)
    if job is not None and rank not in notes(job):
        leave_note(job, {"rank": rank, "failure": how, "waited_in": None, "killed": True})
        number = next(number for number in count(1) if not job.check([f"call/{number}"]))
        call(job, world_size, number, "launcher")


def have_met(root: Store, world_size: int) -> bool:
    """Return whether all ranks have connected to each other; before, they do not hear how others end."""
    return bool(root.add(MET_KEY, 0) >= world_size)


def silent_ranks(root: Store) -> list[int]:
    """Return the ranks that others have found silent."""
    return [int(rank) for rank in root.get(CULPRITS_KEY).split(b",")] if root.check([CULPRITS_KEY]) else []


def cause(root: Store) -> tuple[int | None, str]:
    """Return which rank failed first for a reason of its own, with the reason.

    Where none did, return None, with what one of the others waited for.
    """
    job = _job_of(root)
    said = {} if job is None else notes(job)
    for rank, note in said.items():
        if note["failure"] and not note.get("killed"):
            return rank, note["failure"]
    waiting = ((rank, note["waited_in"]) for rank, note in said.items() if note["waited_in"])
    rank, what = next(waiting, (0, ""))
    doing = "waited in" if what.startswith("task ") else "was"
    return None, f"rank {rank} {doing} {what}" if what else ""


def _job_of(root: Store) -> Store | None:
    return PrefixStore(root.get(JOB_KEY).decode(), root) if root.check([JOB_KEY]) else None
