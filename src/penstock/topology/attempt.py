"""A name that all ranks of one start have in common, and no earlier start in the same store has.

torchrun keeps its store when it restarts ranks. What ranks of an earlier start have left there under the same
name looks like an answer: an address at which no rank listens now. The number of torchrun's restarts does
not help, since the agents of several machines count differently.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

# torch.distributed exports it as well, but hides it from type checkers.
from torch._C._distributed_c10d import Store

from penstock.topology.faults import named

POLL_S = 0.005


def name_of_attempt(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return one name on all ranks, which must call this together; every start has a new name.

    Rank 0 makes the name up and tells every rank that greets it. A greeting says under which key its answer
    is expected, so no greeting or answer of an earlier start is mistaken. Raises RuntimeError after the
    timeout.
    """
    if rank == 0:
        return _told(store, world_size, time.monotonic() + timeout.total_seconds())
    greeting = secrets.token_hex(8)
    store.set(f"greeting/{rank}", greeting)
    store.wait([f"answer/{greeting}"], timeout)
    name: str = store.get(f"answer/{greeting}").decode()
    store.set(f"heard/{name}/{rank}", "")
    return name


def _told(store: Store, world_size: int, until_s: float) -> str:
    """Tell a new name to all other ranks until each has confirmed it, and return the name."""
    name, waiting = secrets.token_hex(8), set(range(1, world_size))
    answered: dict[int, bytes] = {}
    while waiting:
        for rank in sorted(waiting):
            if store.check([f"heard/{name}/{rank}"]):
                waiting.remove(rank)
            elif store.check([f"greeting/{rank}"]):
                greeting = store.get(f"greeting/{rank}")
                if answered.get(rank) != greeting:
                    store.set(f"answer/{greeting.decode()}", name)
                    answered[rank] = greeting
        if time.monotonic() > until_s:
            verb = "has" if len(waiting) == 1 else "have"
            raise RuntimeError(f"{named(sorted(waiting))} {verb} not come")
        time.sleep(POLL_S)
    return name
