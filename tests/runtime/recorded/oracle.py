"""What is ordered in a log, by brute force: all entries that lead to each, as the bits of a number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations

from tests.support.recording.hazards import overlap
from tests.support.recording.recorder import (
    Access,
    Actor,
    Allocate,
    Block,
    Entry,
    Free,
    Keep,
    Launch,
    Record,
    Span,
    Wait,
)

WHOLE = Span(0, 1 << 40)


def _actors(entry: Entry) -> tuple[Actor, ...]:
    """Whose turn an entry is, and the thread that asks for it."""
    match entry:
        case Launch() | Record() | Wait():
            return entry.actor, entry.thread
        case Allocate() | Free():
            return entry.block.stream, entry.thread
    return ()


def before(log: Sequence[Entry], without: Collection[int] = ()) -> list[int]:
    """Of every entry, a number with the bits of all entries that have ended when it begins.

    A `Free` begins what comes next in the stream of its block.
    """
    found, last, events = [0] * len(log), dict[int, int](), dict[int, int]()
    for place, entry in enumerate(log):
        if place in without:
            continue
        sources = [last[actor.number] for actor in _actors(entry) if actor.number in last]
        if isinstance(entry, Wait) and entry.event in events:
            sources.append(events[entry.event])
        for source in sources:
            found[place] |= found[source] | 1 << source
        if isinstance(entry, Record):
            events[entry.event] = place
        if not isinstance(entry, Free | Keep):
            last[_actors(entry)[0].number] = place
    return found


def accesses(log: Sequence[Entry]) -> Iterator[tuple[int, Actor, Access]]:
    for place, entry in enumerate(log):
        if isinstance(entry, Launch):
            yield from ((place, entry.actor, access) for access in entry.accesses)
        elif isinstance(entry, Allocate):
            yield place, entry.block.stream, Access(entry.block, WHOLE, writes=True)


def hazards(log: Sequence[Entry], without: Collection[int] = ()) -> set[tuple[int, int]]:
    """Places of all two entries that need an order and have none."""
    ended, found = before(log, without), set[tuple[int, int]]()
    uses: dict[Block, list[tuple[int, Actor, Access]]] = defaultdict(list)
    keeps: dict[Block, list[Actor]] = defaultdict(list)
    for each in accesses(log):
        uses[each[2].block].append(each)
    for place, entry in enumerate(log):
        if isinstance(entry, Keep) and place not in without:
            keeps[entry.block].append(entry.stream)
    for same in uses.values():
        for (first, _, one), (second, _, other) in combinations(same, 2):
            conflict = (one.writes or other.writes) and overlap(one.span, other.span)
            if conflict and first != second and not ended[second] >> first & 1:
                found.add((first, second))
    for place, entry in enumerate(log):
        if isinstance(entry, Free) and not entry.block.in_host:
            for use, actor, _ in uses[entry.block]:
                safe = actor in (entry.block.stream, *keeps[entry.block]) or not actor.on_device
                if not safe and not ended[place] >> use & 1:
                    found.add((use, place))
    return found
