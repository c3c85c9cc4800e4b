"""Faults planted in real logs one at a time: a lost wait, a lost `record_stream`, another order on one rank.

What is left out of a log could as well be left out by a device: nothing that is computed depends on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from penstock.runtime.recorded.hazards import find_hazards
from penstock.runtime.recorded.log import Actor, Block, Entry, Free, Keep, Launch, Record, Wait
from penstock.runtime.recorded.order import Issued, calls_of, find_disorder
from tests.runtime.recorded import oracle
from tests.runtime.recorded.test_steps import case_of, hosts_of
from tests.support.hosted import Hosts
from tests.support.parity import Case
from tests.support.ranks import Pools
from tests.support.recorded import log_of_steps

PLAIN: Mapping[str, Any] = {
    "schedule": "penstock",
    "dispatch": "flat",
    "layout": "two nodes of one",
    "moves": "nothing",
    "sharded": False,
    "recompute": "none",
    "capacity_factor": None,
    "routing": "even",
    "samples": "even",
    "transport": "direct",
}
CASES: Mapping[str, Mapping[str, Any]] = {
    "two streams": PLAIN,
    "a thread of the host": {**PLAIN, "schedule": "flowmoe", "moves": "both"},
    "three streams": {
        **PLAIN,
        "schedule": "fsmoe",
        "dispatch": "hierarchical_2d",
        "layout": "two nodes of two",
        "sharded": True,
    },
}


@dataclass
class Planted:
    """Faults in the log of a rank, and in words those that are judged wrongly.

    reported: how many are found. missed: not found, though brute force finds them. invented: found, though
    they do not change what is ordered. order_only: how many change it for tasks that share no memory.
    """

    reported: int = 0
    order_only: int = 0
    missed: list[str] = field(default_factory=list)
    invented: list[str] = field(default_factory=list)


def lost_waits(log: Sequence[Entry]) -> Planted:
    """Lose every wait of a stream in turn.

    It changes what is ordered if something would not be over where the stream goes on.
    """
    ended, planted = oracle.before(log), Planted()
    records = {entry.event: place for place, entry in enumerate(log) if isinstance(entry, Record)}
    for place, entry in enumerate(log):
        following = _following(log, place) if isinstance(entry, Wait) and entry.actor.on_device else None
        if not isinstance(entry, Wait) or following is None:
            continue
        without = oracle.before(log[: following + 1], {place})[following]
        lost = {each.task for each in _launches(log, ended[records[entry.event]] & ~without)}
        text = f"{entry.actor} no longer waits for {sorted(lost)}"
        if find_hazards(log, {place}):
            planted.reported += 1
            planted.invented += [] if lost else [text]
        elif lost:
            planted.order_only += 1
            planted.missed += [text] if oracle.hazards(log, {place}) else []
    return planted


def lost_keeps(log: Sequence[Entry]) -> Planted:
    """Lose every `record_stream` of a tensor on a stream in turn.

    It is needed if the stream may still use the tensor where its memory is freed.
    """
    ended, planted = oracle.before(log), Planted()
    keeps: dict[tuple[Block, Actor], set[int]] = defaultdict(set)
    for place, entry in enumerate(log):
        if isinstance(entry, Keep):
            keeps[entry.block, entry.stream].add(place)
    ends = {entry.block: place for place, entry in enumerate(log) if isinstance(entry, Free)}
    uses: dict[tuple[Block, Actor], list[int]] = defaultdict(list)
    for place, actor, access in oracle.accesses(log):
        uses[access.block, actor].append(place)
    for (block, stream), places in keeps.items():
        late = [use for use in uses[block, stream] if block in ends and not ended[ends[block]] >> use & 1]
        is_needed, found = bool(late) and stream is not block.stream, bool(find_hazards(log, places))
        planted.reported += found
        if is_needed != found:
            (planted.missed if is_needed else planted.invented).append(f"{block} on {stream}")
    return planted


def _following(log: Sequence[Entry], wait: int) -> int | None:
    """The next operation of the stream that waits."""
    actor = log[wait].actor  # type: ignore[union-attr]  # a wait
    later = range(wait + 1, len(log))
    return next(
        (place for place in later if isinstance(found := log[place], Launch) and found.actor == actor), None
    )


def _launches(log: Sequence[Entry], bits: int) -> Iterator[Launch]:
    for place, entry in enumerate(log):
        if bits >> place & 1 and isinstance(entry, Launch):
            yield entry


def faults(rank: int, case: Case, hosts: Hosts) -> tuple[Planted, Planted, list[Issued]]:
    """Of the first rank; the others only take part."""
    log = log_of_steps(rank, case, hosts)
    assert find_hazards(log) == []
    if rank:
        return Planted(), Planted(), calls_of(log)
    return lost_waits(log), lost_keeps(log), calls_of(log)


def swapped(calls: Sequence[Issued], place: int) -> list[Issued]:
    """Two neighbours in the other order."""
    return [*calls[:place], calls[place + 1], calls[place], *calls[place + 2 :]]


def is_harmless(one: Issued, other: Issued) -> bool:
    """Whether no rank can tell in which order another issues these calls."""
    (_, first), (_, second) = one, other
    if first.communicator == second.communicator:
        return first == second
    return len({*first.ranks} & {*second.ranks}) < 2


@pytest.mark.parametrize("name", CASES)
def test_every_fault_that_matters_is_reported(ranks: Pools, name: str) -> None:
    case = case_of(**CASES[name])
    case = replace(case, model=replace(case.model, num_layers=1))
    hosts = replace(hosts_of(case, CASES[name]["moves"]), steps=1)
    found = ranks(case.world_size).run(faults, case, hosts)
    waits, keeps, _ = found[0]
    for planted in (waits, keeps):
        assert (planted.missed, planted.invented) == ([], [])
        assert planted.reported > 10
    assert waits.order_only < waits.reported / 4, "of memory, and of nothing else, are most waits"
    calls = [each[2] for each in found]
    assert find_disorder(calls) == []
    swaps = [place for place in range(len(calls[0]) - 1) if not is_harmless(*calls[0][place : place + 2])]
    assert len(swaps) > 1
    for place in swaps:
        assert find_disorder([swapped(calls[0], place), *calls[1:]]) != [], str(calls[0][place : place + 2])
