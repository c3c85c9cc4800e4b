"""Fixtures of the tests of scheduled models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.topology import leave


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process by itself joins no others for longer than a test: other tests join here, too."""
    yield
    leave()
