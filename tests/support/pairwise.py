"""Selections of combinations for `make test`; `make soak` runs all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from allpairspy import AllPairs  # type: ignore[import-untyped]


def pairwise(
    fits: Callable[[dict[str, Any]], bool] | None = None, /, **axes: Iterable[Any]
) -> pytest.MarkDecorator:
    """Parametrise a test by cases in which any two values of two axes meet.

    Most faults need one value or two to show. The whole product belongs into a test for `make soak`.
    fits: whether there can be a case with these values, of all axes or of the first few.
    """

    def possible(values: list[Any]) -> bool:
        return fits is None or fits(dict(zip(axes, values, strict=False)))

    pairs = AllPairs([list(values) for values in axes.values()], filter_func=possible)
    return pytest.mark.parametrize(tuple(axes), [tuple(case) for case in pairs])


def leave_to_soak(items: Iterable[pytest.Item]) -> None:
    """Of a test marked `every_value`, keep so many cases that every value of every `parametrize` is met."""
    tests: dict[Any, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("every_value"):
            tests[item.function].append(item)
    for cases in tests.values():
        values = {case: _values(case) for case in cases}
        places = _places(values.values())
        met: set[tuple[str, str]] = set()
        # As a staircase, not one axis after the other: new values of all axes first.
        for case in sorted(cases, key=lambda case: _off_the_stairs([places[each] for each in values[case]])):
            if met.issuperset(values[case]):
                case.add_marker(pytest.mark.soak)
            met.update(values[case])


Place = tuple[int, int]
"""Of a value on its axis, and how many values that axis has."""


def _places(cases: Iterable[list[tuple[str, str]]]) -> dict[tuple[str, str], Place]:
    axes: dict[str, dict[str, None]] = defaultdict(dict)
    for case in cases:
        for axis, value in case:
            axes[axis].setdefault(value)
    return {(axis, v): (i, len(values)) for axis, values in axes.items() for i, v in enumerate(values)}


def _off_the_stairs(places: list[Place]) -> int:
    """On how many axes a case is off the nearest step; a step takes the same turn on all of them."""
    longest = max(length for _, length in places)
    return min(sum(step % length != place for place, length in places) for step in range(longest))


def _values(case: pytest.Function) -> list[tuple[str, str]]:
    """What `case` is called with: for every `parametrize` its names, and the values as text."""
    axes = [mark.args[0] for mark in case.iter_markers("parametrize")]
    names = [(axis,) if isinstance(axis, str) else tuple(axis) for axis in axes]
    return [(",".join(each), repr([case.callspec.params[name] for name in each])) for each in names]
