"""Group-limited choice against brute force."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.moe.gates import SigmoidRouter
from penstock.moe.routers import ExpertGroups, SoftmaxRouter
from tests.moe.routers.plain import Case, Row, check_token_choice, decide, dot
from tests.support.draws import draws


@st.composite
def grouped(draw: st.DrawFn) -> tuple[Case, ExpertGroups]:
    size, groups = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    limit_to = draw(st.integers(1, groups))
    made = ExpertGroups(groups=groups, limit_to=limit_to, best=draw(st.integers(1, 3)))
    top_k = draw(st.integers(1, limit_to * size))
    return Case(2, 3, size * groups, top_k, padded=draw(st.booleans()), seed=draw(st.integers(0, 9999))), made


def brute_force(score: Row, case: Case, groups: ExpertGroups) -> list[int]:
    """Of all sets of groups the one worth most; its k best experts."""
    score = [value.detach() for value in score]
    size = case.num_experts // groups.groups
    members = [range(g * size, (g + 1) * size) for g in range(groups.groups)]

    def worth(group: int) -> float:
        return sum(sorted((float(score[e]) for e in members[group]), reverse=True)[: groups.best])

    allowed = max(combinations(range(groups.groups), groups.limit_to), key=lambda c: sum(map(worth, c)))
    experts = [e for g in allowed for e in members[g]]
    return sorted(experts, key=lambda e: -float(score[e]))[: case.top_k]


@draws(40)
@given(grouped())
def test_against_brute_force(made: tuple[Case, ExpertGroups]) -> None:
    case, groups = made
    gate = SoftmaxRouter(4, case.num_experts, case.top_k, groups=groups)
    case.fill(gate)
    x_TM = case.x()
    logits = [[dot(weight, x_TM[t]) for weight in gate.weight] for t in range(case.count)]
    expected = decide(case, logits, select=lambda score: brute_force(score, case, groups))
    check_token_choice(case, gate, x_TM, expected)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (ExpertGroups(groups=3, limit_to=1), "3 groups do not divide 8 experts; nearest: 2"),
        (ExpertGroups(groups=4, limit_to=1), "top_k = 3; use 2 to 4"),
        (ExpertGroups(groups=4, limit_to=5), "use 2 to 4"),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups: ExpertGroups, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SigmoidRouter(4, 8, 3, groups=groups)
