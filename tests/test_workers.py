"""Where several processes run tests, those of a file and those with network namespaces stay together."""

from __future__ import annotations

import pytest

from tests.support.workers import group_of


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        ("tests/a/test_b.py::test_c", "tests/a/test_b.py::test_d[1-x::y]", True),
        ("tests/a/test_b.py::test_c", "tests/a/test_d.py::test_c", False),
        ("tests/emulate/test_a.py::test_b", "tests/emulate/test_c.py::test_d", True),
        ("tests/emulate/test_a.py::test_b", "tests/moe/test_a.py::test_b", False),
    ],
)
def test_what_one_worker_runs(first: str, second: str, together: bool) -> None:
    assert (group_of(first) == group_of(second)) is together
