"""What is ordered in a log, by brute force: all entries that lead to each, as the bits of a number."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from penstock.runtime.recorded.hazards import overlap
from penstock.runtime.recorded.log import (
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
    ended = before(log, without)
    left = [each for each in accesses(log) if each[0] not in without]
    found = set()
    for i, (first, _, one) in enumerate(left):
        for second, _, other in left[i + 1 :]:
            conflict = (
                one.block is other.block and (one.writes or other.writes) and overlap(one.span, other.span)
            )
            if conflict and first != second and not ended[second] >> first & 1:
                found.add((first, second))
    for place, entry in enumerate(log):
        if isinstance(entry, Free):
            for use, actor, access in left:
                if access.block is entry.block and _is_at_risk(log, entry.block, actor, without):
                    found.update([(use, place)] if not ended[place] >> use & 1 else [])
    return found


def _is_at_risk(log: Sequence[Entry], block: Block, actor: Actor, without: Collection[int]) -> bool:
    kept = (
        isinstance(entry, Keep) and entry.block is block and entry.stream is actor
        for place, entry in enumerate(log)
        if place not in without
    )
    return actor.on_device and actor is not block.stream and not block.in_host and not any(kept)
