"""Fixtures of the tests of scheduled models."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def always_brief(brief: None) -> None:
    """No test here is about how good an order is."""
    del brief


@pytest.fixture(autouse=True)
def always_alone(alone: None) -> None:
    """Every test here may make a model parallel."""
    del alone
