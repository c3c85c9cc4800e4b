"""Fixtures of the tests of training."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def always_brief(brief: None) -> None:
    """No test here is about how good an order is."""
    del brief


@pytest.fixture(scope="module")
def joined() -> Iterator[None]:
    """This process has joined as the command does it, and is afterwards as it was."""
    # Here, since what only hands out tests to workers needs no torch.
    import torch

    from penstock.topology.join import ALONE, join, leave

    before = os.environ.copy()
    join(ALONE, 60.0, torch.device("cpu"))
    yield
    leave()
    os.environ.clear()
    os.environ.update(before)
