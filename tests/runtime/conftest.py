"""Fixtures of the tests of the engine."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def always_brief(brief: None) -> None:
    """No test here is about how good an order is."""
    del brief
