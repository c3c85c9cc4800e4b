"""Selections of combinations: every pair of values of two axes at least once, not every combination."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from allpairspy import AllPairs  # type: ignore[import-untyped]


def pairwise(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by cases in which any two values of two axes meet.

    Most faults need one value or two to show. The whole product belongs into a test for `make soak`.
    """
    cases = [tuple(case) for case in AllPairs([list(values) for values in axes.values()])]
    return pytest.mark.parametrize(tuple(axes), cases)
