"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.pairwise import leave_to_soak
from tests.support.ranks import Pools

settings.register_profile(
    "penstock",
    deadline=None,  # no timing assertions: machines are shared
    print_blob=True,
    # A temporary folder or captured output may serve all examples of a property.
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
EXAMPLES = {"quick": 10, "test": 40, "soak": 400}
"""How often `make quick`, `make test` and `make soak` try a property; see also tests/support/draws.py."""


def pytest_configure(config: pytest.Config) -> None:
    """Draw as many examples as what was asked for, by its markers, has time for."""
    markers = config.getoption("markexpr")
    kind = "quick" if "not slow" in markers else "soak" if "soak or" in markers else "test"
    settings.register_profile(kind, settings.get_profile("penstock"), max_examples=EXAMPLES[kind])
    settings.load_profile(kind)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs in one process, if there are several: a file, whose tests share runs; all namespaces."""
    for item in items:
        file = item.nodeid.partition("::")[0]
        emulated = file.startswith("tests/emulate/") or "emulation" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("namespaces" if emulated else file))
    leave_to_soak(items)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(4)` is a pool of four processes that have joined over Gloo."""
    pools = Pools()
    yield pools
    pools.close()
