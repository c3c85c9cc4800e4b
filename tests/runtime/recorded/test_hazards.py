"""Hazards in logs that are written by hand, and in any logs against brute force."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given

from tests.runtime.recorded import oracle
from tests.steps import seeds
from tests.support.recording.hazards import find_hazards, overlap
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

HOST, OTHER = Actor(0, "host", on_device=False), Actor(1, "other", on_device=False)
MAIN, SIDE, THIRD = (
    Actor(number, name, on_device=True) for number, name in enumerate(("main", "side", "third"), 2)
)
STREAMS, THREADS = (MAIN, SIDE, THIRD), (HOST, OTHER)
HALVES = Span(0, 8), Span(8, 16)
ALL = Span(0, 16)


def block(number: int = 0, stream: Actor = MAIN, *, in_host: bool = False) -> Block:
    return Block(number, "T", stream, (4,), "float32", in_host)


def use(actor: Actor, task: str, memory: Block, span: Span = ALL, *, writes: bool = False) -> Launch:
    return Launch(actor, HOST, task, "op", (Access(memory, span, writes),))


def wait(event: int, first: Actor, second: Actor) -> tuple[Entry, Entry]:
    return Record(event, first, HOST), Wait(event, second, HOST)


def kinds(log: Sequence[Entry], without: tuple[int, ...] = ()) -> list[tuple[str, str, str]]:
    return [(each.kind, each.first.task, each.second.task) for each in find_hazards(log, without)]


X = block()
WRITTEN = use(MAIN, "A", X, writes=True)


@pytest.mark.parametrize(
    ("log", "found"),
    [
        ([WRITTEN, use(SIDE, "B", X)], [("read too early", "A", "B")]),
        ([WRITTEN, use(MAIN, "B", X)], []),
        ([WRITTEN, *wait(1, MAIN, SIDE), use(SIDE, "B", X)], []),
        ([*wait(1, MAIN, SIDE), WRITTEN, use(SIDE, "B", X)], [("read too early", "A", "B")]),
        ([WRITTEN, *wait(1, MAIN, THIRD), *wait(2, THIRD, SIDE), use(SIDE, "B", X)], []),
        ([WRITTEN, *wait(1, MAIN, HOST), use(SIDE, "B", X)], []),
        ([use(MAIN, "A", X), use(SIDE, "B", X)], []),
        ([use(MAIN, "A", X), use(SIDE, "B", X, writes=True)], [("write too early", "A", "B")]),
        ([WRITTEN, use(SIDE, "B", X, writes=True)], [("write too early", "A", "B")]),
        ([use(MAIN, "A", X, HALVES[0], writes=True), use(SIDE, "B", X, HALVES[1])], []),
        ([Allocate(X, HOST), use(SIDE, "B", X, writes=True)], [("write too early", "T", "B")]),
        ([use(SIDE, "A", X), Free(X, "F", HOST)], [("freed too early", "A", "F")]),
        ([use(SIDE, "A", X), Keep(X, SIDE, "A"), Free(X, "F", HOST)], []),
        ([use(SIDE, "A", X), Keep(X, THIRD, "A"), Free(X, "F", HOST)], [("freed too early", "A", "F")]),
        ([use(SIDE, "A", X), *wait(1, SIDE, MAIN), Free(X, "F", HOST)], []),
        ([use(SIDE, "A", X), Free(X, "F", HOST), *wait(1, SIDE, MAIN)], [("freed too early", "A", "F")]),
    ],
)
def test_two_uses(log: list[Entry], found: list[tuple[str, str, str]]) -> None:
    assert kinds(log) == found
    assert bool(oracle.hazards(log)) == bool(found)


def test_both_sides_and_the_memory_are_named() -> None:
    (hazard,) = find_hazards([WRITTEN, use(SIDE, "B", X)])
    assert (hazard.first.actor, hazard.second.actor) == (str(MAIN), str(SIDE))
    assert hazard.first.writes and not hazard.second.writes
    assert hazard.tensor == str(X)


def test_memory_of_the_host() -> None:
    """A copy to it must have ended before a thread reads it; its allocator learns of copies by itself."""
    memory = block(stream=SIDE, in_host=True)
    copy = use(SIDE, "copy", memory, writes=True)
    read = Launch(HOST, HOST, "reader", "numpy", (Access(memory, ALL, writes=False),))
    assert kinds([copy, read]) == [("read too early", "copy", "reader")]
    assert kinds([copy, *wait(1, SIDE, HOST), read, use(MAIN, "late", memory), Free(memory, "F", HOST)]) == []


def test_what_is_left_out_may_be_needed() -> None:
    log = [WRITTEN, *wait(1, MAIN, SIDE), use(SIDE, "B", X), Keep(X, SIDE, "B"), Free(X, "F", HOST)]
    assert [bool(find_hazards(log, [place])) for place in range(len(log))] == [
        False,
        True,
        True,
        False,
        True,
        False,
    ]


PARTS = [*HALVES, ALL, Span(0, 16, (2,), (8,), 4), Span(4, 16, (2,), (8,), 4)]


def any_log(random: Random) -> list[Entry]:
    """Any log of two threads and three streams, in which nothing is used after it was freed."""
    memory = [block(number, random.choice(STREAMS)) for number in range(2)]
    found, events = list[Entry](), 0
    for _ in range(random.randint(4, 30)):
        thread, kind = random.choice(THREADS), random.choice(["use", "use", "record", "wait", "keep", "free"])
        actor, stream = random.choice([*STREAMS, thread]), random.choice(STREAMS)
        if kind == "record":
            events += 1
            found.append(Record(events, actor, thread))
        elif kind == "wait":
            found.append(Wait(random.randint(0, events), actor, thread))
        elif memory and kind == "use":
            used = random.sample(memory, random.randint(1, len(memory)))
            parts = tuple(Access(each, random.choice(PARTS), random.random() < 0.4) for each in used)
            found.append(Launch(stream, thread, str(len(found)), "op", parts))
        elif memory and kind == "keep":
            found.append(Keep(random.choice(memory), stream, "keep"))
        elif memory and random.random() < 0.3:
            gone = memory.pop(random.randrange(len(memory)))
            found.append(Free(gone, str(len(found)), thread))
    return found


@given(seeds)
def test_any_log_against_brute_force(seed: int) -> None:
    random = Random(seed)
    for log in (any_log(random) for _ in range(50)):
        found = {(int(each.first.task), int(each.second.task)) for each in find_hazards(log)}
        wanted = oracle.hazards(log)
        assert found <= wanted
        assert bool(found) == bool(wanted), "of several that follow from each other one is enough"


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (Span(0, 8), Span(4, 12), True),
        (Span(0, 8), Span(8, 12), False),
        (Span(0, 28, (2, 1), (16, 4), 4), Span(4, 32, (2, 1), (16, 4), 4), False),  # columns of a matrix
        (Span(0, 28, (2, 2), (16, 4), 4), Span(4, 32, (2, 1), (16, 4), 4), True),
        (Span(0, 28, (2, 1), (16, 4), 4), Span(4, 16), False),
        (Span(0, 28, (2, 1), (16, 4), 4), Span(4, 17), True),
    ],
)
def test_parts_of_a_block(one: Span, other: Span, shared: bool) -> None:
    assert overlap(one, other) is overlap(other, one) is shared
