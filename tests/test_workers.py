"""Where several processes run tests: what stays together, and what begins first."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from penstock.topology import leave
from penstock.topology.join import ALONE, join
from tests.support.left import left_group
from tests.support.workers import group_of, slow_first


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ("tests/a/test_b.py::test_c", "tests/a/test_b.py::test_d[1-x::y]", True),
        ("tests/a/test_b.py::test_c", "tests/a/test_d.py::test_c", False),
        ("tests/lab/emulate/test_a.py::test_b", "tests/lab/emulate/test_c.py::test_d", True),
        ("tests/lab/emulate/test_a.py::test_b", "tests/scenarios/test_two_machines.py::test_c", True),
        ("tests/lab/emulate/test_a.py::test_b", "tests/moe/test_a.py::test_b", False),
    ],
)
def test_what_one_worker_runs(first: str, second: str, together: bool) -> None:
    assert (group_of(first) == group_of(second)) is together


@dataclass(frozen=True)
class Test:
    """What of a test its place depends on."""

    __test__ = False
    nodeid: str
    slow: bool

    def get_closest_marker(self, name: str) -> object:
        return (name == "slow" and self.slow) or None


def test_what_is_slow_begins_first() -> None:
    """Groups with more slow tests first; groups stay whole, and tests in the order of their file."""
    slow = {"a::1": False, "b::1": True, "b::2": False, "c::1": True, "c::2": True, "d::1": False}
    tests = [Test(*each) for each in slow.items()]
    slow_first(tests)
    assert [test.nodeid for test in tests] == ["c::1", "c::2", "b::1", "b::2", "a::1", "d::1"]


def test_a_file_that_leaves_a_group_is_told_and_the_next_one_finds_none() -> None:
    assert left_group() == ""
    join(ALONE, 60.0, torch.device("cpu"))
    try:
        assert "left a process group" in left_group()
        assert not dist.is_initialized()
    finally:
        leave()
