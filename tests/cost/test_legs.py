"""What legs move is read off them, so a dispatch of one's own is priced, planned for and set by its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.config import ConfigError, load
from penstock.cost.cluster_file import LinkModel
from penstock.cost.span import even_leg
from penstock.decision import Decision
from penstock.features.dispatch import DISPATCHES, HierarchicalDispatch2D
from penstock.graph import Lane
from penstock.ops import Op
from penstock.plan import find_plan
from penstock.train.config import RunConfig
from tests.plan.problems import problem


class Own(HierarchicalDispatch2D):
    """Tutel's under a name of its own."""

    name = "own"


@pytest.fixture
def own() -> Iterator[None]:
    DISPATCHES[Own.name] = Own()
    yield
    del DISPATCHES[Own.name]


@pytest.mark.parametrize("nodes", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_shares_are_those_of_the_formulas(nodes: int, size: int) -> None:
    inside, ranks = (size - 1) / size, nodes * size
    assert even_leg("flat", Op.COMBINE, nodes, size).share == (ranks - 1) / ranks
    for op in (Op.DISPATCH_GATHER, Op.COMBINE_SCATTER):
        two = even_leg("hierarchical_2d", op, nodes, size)
        assert (two.lane, two.share, two.messages) == (Lane.INTRA, inside, size - 1)
        one = even_leg("hierarchical_1d", op, nodes, size)
        assert (one.lane, one.share, one.messages) == (Lane.INTRA, size - 1, size - 1)
    two = even_leg("hierarchical_2d", Op.DISPATCH, nodes, size)
    one = even_leg("hierarchical_1d", Op.DISPATCH, nodes, size)
    assert (two.share, one.share) == ((nodes - 1) / nodes, size * (nodes - 1) / nodes)
    if nodes > 1:
        assert (two.messages, two.sharing, one.messages, one.sharing) == (nodes - 1, size, nodes - 1, 1)


@pytest.mark.usefixtures("own")
def test_a_dispatch_of_ones_own_costs_what_it_moves() -> None:
    each = problem(dispatches=("flat", "own", "hierarchical_2d"))
    plans = {name: each.plan(Decision(dispatch=name)) for name in each.dispatches}
    seconds = {name: each.simulate(Decision(dispatch=name), plan).iteration_s for name, plan in plans.items()}
    assert seconds["own"] == seconds["hierarchical_2d"] != seconds["flat"]
    assert find_plan(replace(each, dispatches=("own",)), effort="low").best.choice.dispatch == "own"
    assert load(RunConfig, None, ["moe.dispatch=own"]).moe.dispatch == "own"
    assert (
        LinkModel(
            collective="own", group="ep", lane="inter", ranks=4, alpha_s=1e-5, beta_s_per_byte=1e-9, op="D"
        ).model.alpha_s
        == 1e-5
    )


def test_without_it_the_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"moe\.dispatch = \"own\": no such dispatch"):
        load(RunConfig, None, ["moe.dispatch=own"])
