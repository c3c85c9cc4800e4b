"""Processes of their own for the peers: their packages change a process that imports them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.peers import require
from penstock.config import ConfigError
from penstock.lab.bench.config import PEERS
from tests.support.ranks import Pools


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What imports a peer is left out of `make quick`."""
    for item in items:
        if "peer" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=PEERS)
def peer(request: pytest.FixtureRequest) -> str:
    """Every peer whose package is installed; the others are skipped with what `require` says."""
    try:
        require(request.param)
    except ConfigError as error:
        pytest.skip(str(error))
    return str(request.param)


@pytest.fixture(scope="session")
def peer_ranks() -> Iterator[Pools]:
    """Like `ranks`, for functions that import peers."""
    pools = Pools()
    yield pools
    pools.close()
