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
settings.load_profile("penstock")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(4)` is a pool of four processes that have joined over Gloo."""
    pools = Pools()
    yield pools
    pools.close()
