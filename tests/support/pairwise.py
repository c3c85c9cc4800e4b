"""Selections of combinations for `make test`; `make soak` runs all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from random import Random
from typing import Any

import pytest

Case = dict[str, Any]
Fits = Callable[[Case], bool]


def pairwise(fits: Fits | None = None, /, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by cases in which any two values of two axes meet, if they can.

    Most faults need one value or two to show. The whole product belongs into a test for `make soak`.
    fits: whether there can be a case with these values, of all axes or of some.
    """
    values = {axis: list(each) for axis, each in axes.items()}
    return pytest.mark.parametrize(tuple(axes), [tuple(case.values()) for case in covering(values, fits)])


def valuewise(fits: Fits | None = None, /, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """So many cases that every value is met; in `make soak` also those in which any two values meet."""
    values = {axis: list(each) for axis, each in axes.items()}
    few = [*each_value(values, fits)]
    more = [case for case in covering(values, fits) if case not in few]
    cases = [tuple(case.values()) for case in few]
    cases += [pytest.param(*case.values(), marks=pytest.mark.soak) for case in more]
    return pytest.mark.parametrize(tuple(axes), cases)


def covering(axes: Mapping[str, Sequence[Any]], fits: Fits | None = None, tries: int = 8) -> Iterator[Case]:
    """Few cases that have all pairs of values for which there is a case.

    Each is the one of several tries that has most of the pairs that are missing (AETG, Cohen et al. 1997).
    Axes keep their order, which finds soon what fits; of values that are worth the same a try takes any.
    """
    chosen, random = fits or (lambda _: True), Random(0)
    values = [(axis, place) for axis, each in axes.items() for place in range(len(each))]
    number = {value: i for i, value in enumerate(values)}
    # By value, the values that it has not met, as bits.
    missing = [sum(1 << j for j, (axis, _) in enumerate(values) if axis != mine) for mine, _ in values]

    def worth(axis: str, known: Places) -> list[float]:
        bits = sum(1 << number[each] for each in known.items())
        places = range(len(axes[axis]))
        return [(missing[number[axis, place]] & bits).bit_count() + random.random() for place in places]

    while any(missing):
        first = next(i for i, others in enumerate(missing) if others)
        least = (missing[first] & -missing[first]).bit_length() - 1
        seed = dict((values[first], values[least]))
        best: list[int] | None = None
        for _ in range(tries):
            case = _completed({}, seed, axes, chosen, worth)
            if case is None:  # there is none with these two values
                break
            met = [number[value] for value in case.items()]
            if best is None or _new(met, missing) > _new(best, missing):
                best = met
        for one, other in permutations(best or [number[value] for value in seed.items()], 2):
            missing[one] &= ~(1 << other)
        if best is not None:
            places = dict(values[i] for i in best)
            yield {axis: axes[axis][places[axis]] for axis in axes}


def _new(case: list[int], missing: Sequence[int]) -> int:
    bits = sum(1 << one for one in case)
    return sum((missing[one] & bits).bit_count() for one in case)


def each_value(axes: Mapping[str, Sequence[Any]], fits: Fits | None = None) -> Iterator[Case]:
    """Few cases in which every value is met, for what another test has in pairs."""
    missing = {(axis, place): None for axis, values in axes.items() for place in range(len(values))}

    def worth(axis: str, known: Places) -> list[float]:
        del known
        return [(axis, place) in missing for place in range(len(axes[axis]))]

    while missing:
        seed = dict([next(iter(missing))])
        case = _completed({}, seed, axes, fits or (lambda _: True), worth)
        for value in (seed if case is None else case).items():
            missing.pop(value, None)
        if case is not None:
            yield {axis: axes[axis][case[axis]] for axis in axes}


Places = Mapping[str, int]
"""By axis, the place of a value on it."""


def _completed(
    begun: Places,
    seed: Places,
    axes: Mapping[str, Sequence[Any]],
    fits: Fits,
    worth: Callable[[str, Places], list[float]],
) -> Places | None:
    """`begun`, which has the first axes, with a place on each of the others; None if no case
    fits. Of several places first the one that is worth most beside those known.

    worth: of all places of an axis.
    """
    if len(begun) == len(axes):
        return begun
    axis, known = list(axes)[len(begun)], {**seed, **begun}
    worths = worth(axis, known)
    ranked = sorted(range(len(worths)), key=worths.__getitem__, reverse=True)
    for place in [seed[axis]] if axis in seed else ranked:
        longer = {**begun, axis: place}
        if fits({name: axes[name][at] for name, at in {**longer, **seed}.items()}):
            case = _completed(longer, seed, axes, fits, worth)
            if case is not None:
                return case
    return None


def leave_to_soak(items: Iterable[pytest.Item]) -> None:
    """Of a test marked `every_value`, keep so many cases that every value of every `parametrize` is met.

    Of one marked `few(n)`, keep n of its cases, all over the list.
    """
    tests: dict[Any, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and not item.get_closest_marker("soak"):
            tests[item.function].append(item)
    for cases in tests.values():
        if mark := cases[0].get_closest_marker("few"):
            kept = {place * len(cases) // mark.args[0] for place in range(mark.args[0])}
            left = [case for place, case in enumerate(cases) if place not in kept]
        elif cases[0].get_closest_marker("every_value"):
            left = [*_repeating(cases)]
        else:
            continue
        for case in left:
            case.add_marker(pytest.mark.soak)


def _repeating(cases: Iterable[pytest.Function]) -> Iterator[pytest.Function]:
    """Cases of which others have every value."""
    values = {case: _values(case) for case in cases}
    places = _places(values.values())
    met: set[tuple[str, str]] = set()
    # As a staircase, not one axis after the other: new values of all axes first.
    for case in sorted(values, key=lambda case: _off_the_stairs([places[each] for each in values[case]])):
        if met.issuperset(values[case]):
            yield case
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
