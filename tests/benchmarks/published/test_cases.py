"""FSMoE's four cases against the exact formula."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published.cases import case_slacks, case_times, closed_form_s, fsmoe_cases
from penstock.plan.published import Linear, MoEPart, makespan_s
from penstock.plan.published.degree import Degree, exact
from tests.plan.published.layers import random_part, random_reduce_s

SOLVED = 60
DEGREES = range(1, 9)


@given(seed=st.integers(0, 2**32), degree=st.integers(1, 8))
def test_the_four_cases_are_exact_where_both_collectives_in_the_node_are_alike(
    seed: int, degree: int
) -> None:
    rng = random.Random(seed)
    part, reduce_s = random_part(rng, alike=True), random_reduce_s(rng)
    assert closed_form_s(part, degree, reduce_s) == pytest.approx(makespan_s(part, degree, reduce_s))


@given(seed=st.integers(0, 2**32), degree=st.integers(1, 8))
def test_the_four_cases_are_never_too_long_and_one_of_them_holds(seed: int, degree: int) -> None:
    rng = random.Random(seed)
    part, reduce_s = random_part(rng), random_reduce_s(rng)
    expected_s = closed_form_s(part, degree, reduce_s)
    assert expected_s <= makespan_s(part, degree, reduce_s) * (1 + 1e-12)
    slacks = case_slacks(part, degree, reduce_s)
    holding = [t for t, s in zip(case_times(part, degree, reduce_s), slacks, strict=True) if s > 0]
    assert holding == [expected_s]


def test_the_share_of_wrong_cases_is_as_reported() -> None:
    """21.7 % of draws with AG and RS apart, up to 82 % too short; none of one chunk."""
    rng = random.Random(0)
    wrong, draws = [], 20_000
    for _ in range(draws):
        part, reduce_s, degree = _flat_part(rng), random_reduce_s(rng), rng.randint(1, 8)
        error = closed_form_s(part, degree, reduce_s) / makespan_s(part, degree, reduce_s) - 1
        if abs(error) > 1e-12:
            assert degree > 1
            wrong.append(error)
    assert 0.15 < len(wrong) / draws < 0.28
    assert -0.9 < min(wrong) < -0.6
    assert -0.25 < mean(wrong) < -0.08


def _flat_part(rng: random.Random) -> MoEPart:
    """Chunks that take log-uniform times over two decades whatever the degree."""
    a2a, ag, rs, experts = (Linear(alpha_s=10 ** rng.uniform(-2, 0)) for _ in range(4))
    return MoEPart(a2a=a2a, ag=ag, rs=rs, experts=experts)


def test_at_a_tie_the_paper_s_strict_conditions_do_not_hold() -> None:
    """All-to-all and AG equally long: Q1 fails, and case 4, not case 3, counts."""
    same, short = Linear(alpha_s=1.0), Linear(alpha_s=0.25)
    part = MoEPart(a2a=same, ag=same, rs=same, experts=short)
    assert closed_form_s(part, 4) == makespan_s(part, 4) == 10.0


@pytest.mark.slow
@pytest.mark.parametrize(("alike", "worst", "usual"), [(True, 0.04, 1e-3), (False, 2.0, 0.06)])
def test_what_the_published_search_costs(alike: bool, worst: float, usual: float) -> None:
    """Its degree against the exact one, both simulated: close where AG and RS are alike, not elsewhere."""
    rng = random.Random(1)
    regrets = []
    for _ in range(SOLVED):
        part, reduce_s = random_part(rng, alike=alike), random_reduce_s(rng)
        chosen = fsmoe_cases(part, reduce_s, DEGREES).chunks
        regrets.append(makespan_s(part, chosen, reduce_s) / exact(part, reduce_s, DEGREES).seconds - 1)
    assert min(regrets) >= -1e-12
    assert max(regrets) <= worst
    assert mean(regrets) <= usual


@pytest.mark.parametrize("plan", [exact, fsmoe_cases])
def test_a_planner_keeps_to_the_allowed_degrees(plan: Callable[..., Degree]) -> None:
    rng = random.Random(2)
    for _ in range(8):
        assert plan(random_part(rng), random_reduce_s(rng), (1, 2, 4)).chunks in (1, 2, 4)
