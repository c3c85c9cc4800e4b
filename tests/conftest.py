"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.ranks import Pools

settings.register_profile(
    "penstock",
    deadline=None,  # no timing assertions: machines are shared
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("quick", settings.get_profile("penstock"), max_examples=20)
settings.load_profile("penstock")


def pytest_configure(config: pytest.Config) -> None:
    """`make quick` draws fewer examples than `make test`."""
    if "not slow" in config.getoption("markexpr"):
        settings.load_profile("quick")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs in one process, if there are several: a file, whose tests share runs; all namespaces."""
    for item in items:
        file = item.nodeid.partition("::")[0]
        emulated = file.startswith("tests/emulate/") or "emulation" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("namespaces" if emulated else file))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(4)` is a pool of four processes that have joined over Gloo."""
    pools = Pools()
    yield pools
    pools.close()
