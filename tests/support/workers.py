"""Which tests stay together where several processes run tests at once."""

from __future__ import annotations

from collections import Counter
from typing import Protocol, TypeVar

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

EMULATED = ("tests/lab/emulate/", "tests/scenarios/test_planning.py", "tests/scenarios/test_two_machines.py")


def group_of(test: str) -> str:
    """What runs in one process: a file, whose tests share runs; all that makes network namespaces.

    test: its id. A cluster that starts removes what dead ones have left: another test may be looking for it.
    """
    file = test.partition("::")[0]
    return EMULATED[0] if file.startswith(EMULATED) else file


class Marked(Protocol):
    """A test, as far as its place depends on it."""

    @property
    def nodeid(self) -> str: ...

    def get_closest_marker(self, name: str) -> object: ...


T = TypeVar("T", bound=Marked)


def slow_first(items: list[T]) -> None:
    """Sort groups by how many of their tests are slow, so that the last ones to begin are short.

    A long one that begins when all others are done would keep one process alone.
    """
    slow = Counter(group_of(item.nodeid) for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[group_of(item.nodeid)])


class GroupScheduling(LoadScopeScheduling):
    """Gives groups to workers. xdist's own way, by markers, changes ids, and pytest 9.2 takes no notice."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
