"""Selections of combinations for `make test`; `make soak` runs all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Case = dict[str, Any]
Fits = Callable[[Case], bool]
Pair = frozenset[tuple[str, int]]
"""Two axes, and the place on each of a value."""


def pairwise(fits: Fits | None = None, /, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by cases in which any two values of two axes meet, if they can.

    Most faults need one value or two to show. The whole product belongs into a test for `make soak`.
    fits: whether there can be a case with these values, of all axes or of some.
    """
    values = {axis: list(each) for axis, each in axes.items()}
    return pytest.mark.parametrize(tuple(axes), [tuple(case.values()) for case in covering(values, fits)])


def valuewise(fits: Fits | None = None, /, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """The same cases for `make soak`, of which `make test` takes so many that every value is met."""
    values = {axis: list(each) for axis, each in axes.items()}
    few = [*each_value(values, fits)]
    cases = [
        pytest.param(*case.values(), marks=() if case in few else pytest.mark.soak)
        for case in covering(values, fits)
    ]
    return pytest.mark.parametrize(tuple(axes), cases)


def covering(axes: Mapping[str, Sequence[Any]], fits: Fits | None = None) -> Iterator[Case]:
    """Few cases that have all pairs of values for which there is a case."""
    places = {axis: [(axis, place) for place in range(len(values))] for axis, values in axes.items()}
    missing = dict.fromkeys(
        frozenset(pair)
        for one, other in combinations(places, 2)
        for pair in product(places[one], places[other])
    )
    while missing:
        seed = next(iter(missing))
        case = _completed({}, dict(seed), axes, fits or (lambda _: True), missing)
        for pair in [seed] if case is None else map(frozenset, combinations(case.items(), 2)):
            missing.pop(pair, None)
        if case is not None:
            yield {axis: axes[axis][place] for axis, place in case.items()}


def each_value(axes: Mapping[str, Sequence[Any]], fits: Fits | None = None) -> Iterator[Case]:
    """The fewer of these cases in which every value is met, for what another test has in pairs."""
    missing = [({(axis, repr(value)) for axis, value in case.items()}, case) for case in covering(axes, fits)]
    met: set[tuple[str, str]] = set()
    while missing:
        values, case = max(missing, key=lambda each: len(each[0] - met))
        if met.issuperset(values):
            return
        met |= values
        yield case


def _completed(
    begun: dict[str, int],
    seed: Mapping[str, int],
    axes: Mapping[str, Sequence[Any]],
    fits: Fits,
    missing: Container[Pair],
) -> dict[str, int] | None:
    """`begun`, which has the first axes, with a place on each of the others; None if no case fits.

    Of several places first the one that meets most of what is missing.
    """
    if len(begun) == len(axes):
        return begun
    axis = list(axes)[len(begun)]
    known = [*begun.items(), *seed.items()]

    def worth(place: int) -> int:
        return sum(frozenset(((axis, place), other)) in missing for other in known)

    every = [seed[axis]] if axis in seed else sorted(range(len(axes[axis])), key=worth, reverse=True)
    for place in every:
        longer = {**begun, axis: place}
        if fits({name: axes[name][at] for name, at in {**longer, **seed}.items()}):
            case = _completed(longer, seed, axes, fits, missing)
            if case is not None:
                return case
    return None


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
