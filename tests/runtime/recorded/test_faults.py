"""Faults planted in real logs one at a time: a lost wait, a lost `record_stream`, another order on one rank.

What is left out of a log could as well be left out by a device: nothing that is computed depends on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.runtime.recorded import oracle
from tests.runtime.recorded.test_steps import device_step
from tests.support.parity import Case
from tests.support.ranks import Pools
from tests.support.recorded import log_of_steps
from tests.support.recording.hazards import Issued, calls_of, find_disorder, find_hazards
from tests.support.recording.recorder import Actor, Block, Entry, Free, Keep, Launch, Record, Wait
from tests.support.replicas import RandomReplicas

pytestmark = pytest.mark.slow

CASES: Mapping[str, Mapping[str, Any]] = {
    "two streams": {"layout": "two ranks"},
    "a thread of the host": {
        "layout": "two ranks",
        "schedule": "flowmoe",
        "moves": "random",
        "replicas": 2,
        "planned": True,
    },
    "three streams": {
        "layout": "four ranks",
        "schedule": "fsmoe",
        "dispatch": "hierarchical_2d",
        "sharded": True,
    },
    "through the host": {"layout": "two ranks", "transport": "staged"},
}
LEAST = {"stream": 10, "host": 2, "keep": 10}
"""How many faults of every kind are reported at the least."""


@dataclass
class Planted:
    """Faults in the log of a rank, and in words those that are judged wrongly.

    reported: how many are found. missed: not found, though brute force finds them. invented: found, though
    they do not change what is ordered. apart: they change it for tasks that share no memory. implied: other
    waits order the same.
    """

    reported: int = 0
    apart: list[str] = field(default_factory=list)
    implied: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    invented: list[str] = field(default_factory=list)


def lost_waits(log: Sequence[Entry], share: slice, *, on_device: bool) -> Planted:
    """Lose every wait of a share of those of streams, or of threads of the host, in turn.

    It changes what is ordered if something would not be over where the stream, or what the thread does and
    issues, goes on. If not there, it is over wherever the wait could matter.
    """
    ended, planted = oracle.before(log), Planted()
    records = {entry.event: place for place, entry in enumerate(log) if isinstance(entry, Record)}
    waits = [
        (place, entry)
        for place, entry in enumerate(log)
        if isinstance(entry, Wait) and entry.actor.on_device == on_device and entry.event in records
    ]
    for place, entry in waits[share]:
        following = _following(log, place)
        if following is None:
            continue
        without = oracle.before(log[: following + 1], {place})[following]
        lost = {each.task for each in _launches(log, ended[records[entry.event]] & ~without)}
        text = f"{entry.actor} no longer waits for {sorted(lost)}"
        if find_hazards(log, {place}):
            planted.reported += 1
            planted.invented += [] if lost else [text]
        elif not lost:
            planted.implied.append(f"{entry.actor} for {log[records[entry.event]].actor}")  # type: ignore[union-attr]
        elif oracle.hazards(log, {place}):
            planted.missed.append(text)
        else:
            planted.apart.append(text)
    return planted


def lost_keeps(log: Sequence[Entry], share: slice) -> Planted:
    """Lose every `record_stream` of a tensor on a stream in turn, or those of a share of tensors.

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
    for (block, stream), places in [*keeps.items()][share]:
        late = [use for use in uses[block, stream] if block in ends and not ended[ends[block]] >> use & 1]
        is_needed, found = bool(late) and stream is not block.stream, bool(find_hazards(log, places))
        planted.reported += found
        if is_needed != found:
            (planted.missed if is_needed else planted.invented).append(f"{block} on {stream}")
    return planted


def _following(log: Sequence[Entry], wait: int) -> int | None:
    """The next operation of the stream that waits, or that the thread which waits does or issues."""
    actor = log[wait].actor  # type: ignore[union-attr]  # a wait
    for place in range(wait + 1, len(log)):
        found = log[place]
        if isinstance(found, Launch) and actor in (found.actor, found.thread):
            return place
    return None


def _launches(log: Sequence[Entry], bits: int) -> Iterator[Launch]:
    for place, entry in enumerate(log):
        if bits >> place & 1 and isinstance(entry, Launch):
            yield entry


def faults(rank: int, case: Case, hosts: RandomReplicas) -> tuple[dict[str, Planted], list[Issued]]:
    """Each rank plants a share of them in its own log, which is like those of the others."""
    log, share = log_of_steps(rank, case, hosts), slice(rank, None, case.world_size)
    assert find_hazards(log) == []
    waits = {where: lost_waits(log, share, on_device=where == "stream") for where in ("stream", "host")}
    return {**waits, "keep": lost_keeps(log, share)}, calls_of(log)


def swapped(calls: Sequence[Issued], place: int) -> list[Issued]:
    """Two neighbours in the other order."""
    return [*calls[:place], calls[place + 1], calls[place], *calls[place + 2 :]]


def is_harmless(one: Issued, other: Issued) -> bool:
    """Whether no rank can tell in which order another issues these calls."""
    (task, first), (other_task, second) = one, other
    if first.exchange and (task, first.exchange) == (other_task, second.exchange):
        return first.communicator != second.communicator or first == second
    if first.communicator == second.communicator:
        return first == second
    return len({*first.ranks} & {*second.ranks}) < 2


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_every_fault_that_matters_is_reported(ranks: Pools, name: str) -> None:
    step = device_step({"schedule": "penstock", **CASES[name]}, num_layers=1)
    assert step.hosts is not None
    case, hosts = step.case, replace(step.hosts, steps=1)
    found = ranks(case.world_size).run(faults, case, hosts)
    for kind, least in LEAST.items():
        planted = [kinds[kind] for kinds, _ in found]
        reported = sum(each.reported for each in planted)
        assert all((each.missed, each.invented) == ([], []) for each in planted), (kind, planted)
        assert reported >= least, kind
        apart = sum(len(each.apart) for each in planted)
        assert apart <= reported / 2, "most waits are for what is read or written"
    calls = [calls for _, calls in found]
    assert find_disorder(calls) == []
    swaps = [place for place in range(len(calls[0]) - 1) if not is_harmless(*calls[0][place : place + 2])]
    assert len(swaps) > 1
    for place in swaps:
        assert find_disorder([swapped(calls[0], place), *calls[1:]]) != [], str(calls[0][place : place + 2])
