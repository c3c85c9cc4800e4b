"""What a host may wait for in a step on a GPU, and a check of what it did wait for."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.schedule import SCHEDULES
from tests.support.card import Wait
from tests.support.parity import Case

STAGING = "runtime/groups.py"
AHEAD = "runtime/streams.py", "wait for an event"
"""Where the host lets the device come to within two layers of it; enough is then left for it to do."""
MORE = 2
"""Waits of a step beside those for the counts of dropless routing."""
PLANS = 2
"""More waits of a step that plans replicas: for the sizes of what ranks have found, and for the plans."""


def allowed(case: Case) -> int:
    """Waits for counts, once for every MoE layer and microbatch, unless slots are fixed; and a few more."""
    microbatches = case.schedule.microbatches if "microbatches" in SCHEDULES[case.schedule.name].reads else 1
    known = case.fixed_slots or case.moe.bound_factor is not None
    counts = 0 if known else case.model.num_layers * microbatches
    # How many rows there are depends on the routing where rows are joined, and on what is no padding: that
    # the host is told once; where samples move with it, there are rows for padding, too, and again at home.
    joined = case.moe.dispatch == "node_once" or case.moe.one_copy_per_rank
    known_late = counts if joined else 0
    if case.padding:
        shares = min(case.tp_size, 2)  # a rank may need its part of the tokens, and all of its group's
        known_late += shares * microbatches if case.placer is None else 2 * counts
    return counts + known_late + MORE + (case.moe.bound_factor is not None)


def check_waits(waits: Mapping[Wait, int], case: Case, more: int = 0) -> None:
    staged = sum(count for (file, *_), count in waits.items() if file == STAGING)
    ahead = sum(count for (file, _, what), count in waits.items() if (file, what) == AHEAD)
    assert sum(waits.values()) - staged - ahead <= allowed(case) + more, waits
    assert bool(staged) == (case.transport == "staged"), "then every transfer waits for its copy"
