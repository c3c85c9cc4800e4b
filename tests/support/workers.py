"""Which tests stay together where several processes run tests at once."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

EMULATED = "tests/emulate/"


def group_of(test: str) -> str:
    """What runs in one process: a file, whose tests share runs; all that makes network namespaces.

    test: its id. A cluster that starts removes what dead ones have left: another test may be looking for it.
    """
    file = test.partition("::")[0]
    return EMULATED if file.startswith(EMULATED) else file


class GroupScheduling(LoadScopeScheduling):
    """Gives groups to workers. xdist's own way, by markers, changes ids, and pytest 9.2 takes no notice."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
