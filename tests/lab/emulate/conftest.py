"""Real namespaces, where this machine allows them; and nothing of them left behind."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from penstock.lab.emulate import EmulationUnavailable, check_available
from penstock.lab.emulate.links import BRIDGE, INTERFACE, UPLINK
from penstock.lab.emulate.state import recorded
from penstock.lab.emulate.system import NAMESPACES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What makes real namespaces is left out of `make quick`."""
    for item in items:
        if "emulation" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def emulation() -> None:
    """What every test with real namespaces asks for: the one reason for which they are skipped."""
    try:
        check_available()
    except EmulationUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """Namespaces and records of this process are gone after each test, and so are links outside them."""
    yield
    ours = f"pen{os.getpid()}-"
    names = [path.name for path in NAMESPACES.iterdir()] if NAMESPACES.exists() else []
    assert [name for name in names if name.startswith(ours)] == []
    assert [state.name for state in recorded() if state.name.startswith(ours)] == []
    assert {name for _, name in socket.if_nameindex()} & {BRIDGE, INTERFACE, UPLINK} == set()
