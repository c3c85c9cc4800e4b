"""Selections of combinations: every pair of values is met that can be met, and nothing that cannot be."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.pairwise import covering, each_value


def pairs(case: dict[str, int]) -> set[tuple[tuple[str, int], ...]]:
    return set(combinations(case.items(), 2))


@given(st.data(), st.lists(st.integers(1, 4), min_size=2, max_size=5))
def test_every_pair_is_met_that_fits(data: st.DataObject, sizes: list[int]) -> None:
    axes = {f"axis {number}": list(range(size)) for number, size in enumerate(sizes)}
    drawn = data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1, max_size=3))
    bound = [name for number, name in enumerate(axes) if number in drawn]
    refused = data.draw(st.sets(st.tuples(*(st.sampled_from(axes[name]) for name in bound)), max_size=6))

    def fits(known: dict[str, Any]) -> bool:
        return not known.keys() >= set(bound) or tuple(known[name] for name in bound) not in refused

    whole = [case for each in product(*axes.values()) if fits(case := dict(zip(axes, each, strict=True)))]
    chosen = list(covering(axes, fits))
    assert all(case in whole for case in chosen) and len(chosen) <= len(whole)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, whole))
    few = list(each_value(axes, fits))
    assert all(case in whole for case in few) and len(few) <= max(1, sum(sizes))
    assert {value for case in few for value in case.items()} == {v for case in whole for v in case.items()}


def test_there_are_few_of_them() -> None:
    """Of 3 * 3 * 2 ** 6 combinations; two of three values need nine."""
    axes = {"a": "abc", "b": "abc"} | {str(number): "yn" for number in range(6)}
    assert 9 <= len(list(covering(axes))) <= 12
