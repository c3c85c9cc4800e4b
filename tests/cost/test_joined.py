"""How many rows there are where one is for all of a token's experts in a node: formulas and estimates."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.routing.joined import distinct_parts, distinct_rows


@pytest.mark.parametrize(("top_k", "nodes", "fewer"), [(8, 4, 2.22), (2, 2, 1.33), (8, 8, 1.52), (1, 4, 1.0)])
def test_with_many_experts_it_is_the_closed_formula(top_k: int, nodes: int, fewer: float) -> None:
    """k / (n (1 - (1 - 1 / n)^k)) times fewer rows."""
    exact = top_k / distinct_parts(nodes, nodes << 14, top_k)
    assert exact == pytest.approx(top_k / (nodes * (1 - (1 - 1 / nodes) ** top_k)), rel=1e-3)
    assert exact == pytest.approx(fewer, abs=0.01)


@pytest.mark.parametrize(
    ("parts", "experts", "top_k", "groups", "limit"),
    [(2, 6, 3, 1, 1), (3, 6, 2, 2, 1), (2, 12, 3, 4, 2), (4, 12, 2, 6, 2), (3, 12, 4, 4, 3)],
)
def test_it_is_the_mean_over_all_choices(
    parts: int, experts: int, top_k: int, groups: int, limit: int
) -> None:
    size, found = experts // groups, []
    for chosen in combinations(range(groups), limit):
        allowed = [e for g in chosen for e in range(g * size, (g + 1) * size)]
        found += [len({e * parts // experts for e in each}) for each in combinations(allowed, top_k)]
    assert len(found) == comb(groups, limit) * comb(limit * size, top_k)
    assert distinct_parts(parts, experts, top_k, groups, limit) == pytest.approx(np.mean(found))


@pytest.mark.parametrize("parts", [2, 4, 16])
def test_even_counts_give_even_rows(parts: int) -> None:
    inputs = np.full((3, parts, 64 // parts), 512 * 8 // 64)
    assert (distinct_rows(inputs, 8) == round(512 * distinct_parts(parts, 64, 8) / parts)).all()


@pytest.mark.parametrize("shape", [0.3, 1.0, 5.0])
def test_of_uneven_counts_it_is_near_what_tokens_choose(shape: float) -> None:
    """Tokens choose by popularity, and a bit by themselves: only the counts are known."""
    draw = np.random.default_rng(1)
    liking = np.log(draw.gamma(shape, 1, 64)) + draw.gumbel(size=(4096, 64))
    chosen = np.argsort(-liking, axis=1)[:, :8]
    for parts in (4, 16):
        true = [int((chosen * parts // 64 == part).any(axis=1).sum()) for part in range(parts)]
        inputs = np.bincount(chosen.ravel(), minlength=64).reshape(1, parts, -1)
        assert distinct_rows(inputs, 8)[0] == pytest.approx(true, rel=0.06, abs=4)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 9), st.integers(0, 9999), st.sampled_from([1, 3]))
def test_it_is_never_what_no_choice_can_give(
    parts: int, held: int, tokens: int, seed: int, top_k: int
) -> None:
    experts, top_k = parts * held, min(top_k, parts * held)
    draw = np.random.default_rng(seed)
    crowd = draw.random(experts) * draw.integers(0, 3)
    chosen = np.argsort(draw.random((tokens, experts)) - crowd, axis=1)[:, :top_k]
    inputs = np.bincount(chosen.ravel(), minlength=experts).reshape(1, parts, held)
    rows = distinct_rows(inputs, top_k)[0]
    assert (rows >= inputs[0].max(axis=1)).all() and (rows <= inputs[0].sum(axis=1)).all()
    assert (rows <= tokens).all()
    if top_k == 1:
        assert rows.tolist() == inputs[0].sum(axis=1).tolist()
