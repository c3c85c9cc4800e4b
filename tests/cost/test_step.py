"""The predicted cost of every task: what is cut costs in total what the whole costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError, load
from penstock.cost import ClusterConfig, Span, StateTypes, StepCost, UnevenRanks, Workload, slowed
from penstock.cost.cluster_file import LinkModel
from penstock.cost.moves import ROW_MOVES
from penstock.cost.span import even_leg
from penstock.decision import Decision
from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES, HierarchicalDispatch2D
from penstock.features.sharded_optimizer.feature import of_optimizer
from penstock.graph import Lane, Phase, Task
from penstock.mesh import Group
from penstock.ops import Op
from penstock.ops.core import TRANSFERS
from penstock.plan import find_plan
from penstock.plan.optimizers import sharing_updates
from penstock.step import StepShape
from penstock.step.shape import FORM_TOKENS, ExpertForm, Sharing
from penstock.train.config import RunConfig
from tests.plan.problems import problem, with_sharing
from tests.steps import shapes, task_at

CLUSTER = ClusterConfig(
    flops_per_s=1e9, memory_bytes_per_s=1e8, link_latency_s=1e-3, link_bytes_per_s=1e7, task_overhead_s=1e-2
)


def workload(shape: StepShape, *, ep_size: int = 2, capacity_factor: float | None = None) -> Workload:
    """Two nodes per expert group where the shape's dispatch has legs inside them."""
    layers = range(shape.num_layers)
    names = {dispatch.hops: name for name, dispatch in DISPATCHES.items()}
    return Workload(
        batch=5,
        seq_len=131,  # enough for every slice to hold some tokens
        hidden_size=16,
        ffn_hidden_size=24,
        vocab_size=50,
        num_experts=4,
        top_k=2,
        expert_matrices=3,
        capacity_factor=capacity_factor,
        min_capacity=4,
        world_size=4,
        ep_size=ep_size,
        dispatch=names[shape.dispatch],
        node_size=max(ep_size // 2, 1),
        shared_ffn_hidden_size=12,
        element_bytes=4,
        all_reduce_bytes=tuple(
            4 * (1000 + layer) if shape.pieces["replicated"][layer] else 0 for layer in layers
        ),
        expert_all_reduce_bytes=tuple(
            4 * (500 + layer) if shape.pieces["experts"][layer] else 0 for layer in layers
        ),
    )


def cost_of(shape: StepShape) -> StepCost:
    return StepCost(shape, workload(shape), CLUSTER)


def alpha_s(task: Task, work: Workload) -> float:
    """What the task costs however small it is."""
    if task.lane is Lane.COMPUTE:
        return CLUSTER.task_overhead_s
    if task.op in TRANSFERS:
        return CLUSTER.leg(work.dispatch, task.op, work.span(Group.EXPERT)).alpha_s
    if task.op == Op.COUNTS:
        return CLUSTER.all_to_all(work.span(Group.EXPERT)).alpha_s
    group = Group.EXPERT_DATA if task.op == Op.EXPERT_ALL_REDUCE else Group.WORLD
    return CLUSTER.all_reduce(work.span(group)).alpha_s


def volume_s(shape: StepShape) -> dict[tuple[int, str, Phase], float]:
    """Seconds per layer, op and phase without start-ups."""
    cost, total = cost_of(shape), defaultdict[tuple[int, str, Phase], float](float)
    for task in build_graph(shape).tasks:
        total[task.layer, task.op, task.phase] += cost(task) - alpha_s(task, cost.workload)
    return total


@given(shapes(), st.integers(1, 5), st.integers(1, 4))
def test_totals_do_not_depend_on_the_cut(shape: StepShape, microbatches: int, chunks: int) -> None:
    """Bytes and floating-point operations are conserved; counts are sent by every microbatch."""
    whole = replace(shape, microbatches=1, chunks=1, exchange_counts=False)
    cut = replace(shape, microbatches=microbatches, chunks=chunks, exchange_counts=False)
    assert volume_s(cut) == pytest.approx(volume_s(whole))


@given(shapes(), st.lists(st.integers(1, 9), min_size=3, max_size=3))
def test_an_all_reduce_moves_the_same_in_any_number_of_chunks(shape: StepShape, chunks: list[int]) -> None:
    layers = shape.num_layers
    whole = replace(shape, pieces={"replicated": (1,) * layers, "experts": (1,) * layers})
    cut = replace(whole, pieces={"replicated": tuple(chunks[:layers]), "experts": tuple(chunks[:layers])})
    assert volume_s(cut) == pytest.approx(volume_s(whole))


@given(shapes())
def test_backward_computes_twice_and_sends_the_same(shape: StepShape) -> None:
    total = volume_s(shape)
    for (layer, op, phase), seconds in total.items():
        if phase is Phase.FORWARD and (layer, op, Phase.BACKWARD) in total:
            factor = 1 if op in TRANSFERS else 2
            assert total[layer, op, Phase.BACKWARD] == pytest.approx(factor * seconds)


@given(shapes(), st.sampled_from([1, 2, 4]), st.sampled_from([None, 0.5, 1.0]))
def test_every_task_has_a_cost(shape: StepShape, ep_size: int, factor: float | None) -> None:
    cost = StepCost(shape, workload(shape, ep_size=ep_size, capacity_factor=factor), CLUSTER)
    for task in build_graph(shape).tasks:
        minimum = CLUSTER.task_overhead_s if task.lane is Lane.COMPUTE else 0.0
        assert minimum <= cost(task) < 60.0


def test_seconds_written_out() -> None:
    shape = StepShape(moe_layers=(True, False), chunks=5, pieces={"replicated": (3, 1)})
    cost, graph = cost_of(shape), build_graph(shape)
    tokens, hidden_bytes = 5 * 131, 16 * 4
    rows = tokens // 5 * 2

    def seconds(name: str) -> float:
        return cost(task_at(graph, name))

    assert seconds("L0.D.m0.c0.F") == pytest.approx(1e-3 + rows * hidden_bytes / 2 / 1e7)
    assert seconds("L0.C.m0.c4.B") == seconds("L0.D.m0.c0.F")
    assert seconds("L0.N.m0.F") == pytest.approx(1e-3 + 4 * 5 * 8 / 2 / 1e7)
    expert = 6 * 16 * 24 * rows / 1e9 + 2 * rows * hidden_bytes / 1e8
    assert seconds("L0.X.m0.c1.F") == pytest.approx(1e-2 + expert)
    assert seconds("L0.X.m0.c1.B") == pytest.approx(1e-2 + 2 * expert)
    assert seconds("L0.AR.p0.B") == pytest.approx(6e-3 + 1.5 * 4 * 334 / 1e7)
    assert seconds("L0.AR.p2.B") == pytest.approx(6e-3 + 1.5 * 4 * 333 / 1e7)
    assert seconds("L1.ST.F") == pytest.approx(6e-3 + 1.5 * (1 * 2 * (1 + 4) * 8) / 1e7)


def test_a_dense_block_computes_its_feed_forward_part_itself() -> None:
    shape = StepShape(moe_layers=(True, False))
    cost = StepCost(shape, replace(workload(shape), dense_ffn_hidden_size=40), CLUSTER)
    moe, dense = (cost(task_at(build_graph(shape), f"L{layer}.AT.m0.F")) for layer in (0, 1))
    assert dense - moe == pytest.approx(5 * 131 * 2 * 3 * 16 * 40 / 1e9)


def test_legs_of_four_nodes_of_two() -> None:
    """Bytes over the busiest rank's link, worked out by hand for 800 bytes of rows per rank."""
    seen = {
        (name, hop.op): CLUSTER.leg(name, hop.op, Span.regular(4, 2)).seconds(800)
        for name, dispatch in DISPATCHES.items()
        for hop in dispatch.hops
    }
    link, inside = CLUSTER.link_latency_s, CLUSTER.intra_latency_s
    rate, inside_rate = CLUSTER.link_bytes_per_s, CLUSTER.intra_bytes_per_s
    assert seen == pytest.approx(
        {
            # One round inside and six across, 600 through a card of its own.
            ("flat", "D"): inside + 6 * link + 600 / rate,
            # The first of two gathers 800, sends 3/4 of 1600 through its card.
            ("hierarchical_1d", "DG"): inside + 800 / inside_rate,
            ("hierarchical_1d", "D"): 3 * link + 1200 / rate,
            ("hierarchical_1d", "DS"): inside + 800 / inside_rate,
            ("hierarchical_2d", "DG"): inside + 400 / inside_rate,
            ("hierarchical_2d", "D"): 3 * link + 600 / rate,
            # Per byte that is sent; how many rows are sent is another matter.
            ("node_once", "D"): 3 * link + 600 / rate,
            ("node_once", "DS"): inside + 400 / inside_rate,
        }
    )
    for name, dispatch in DISPATCHES.items():
        for hop in dispatch.hops:
            back = CLUSTER.leg(name, hop.home.op, Span.regular(4, 2))
            assert back == CLUSTER.leg(name, hop.op, Span.regular(4, 2))


def test_rows_under_way_may_be_smaller_than_hidden_states() -> None:
    shape = StepShape(moe_layers=(True,))
    work = workload(shape, ep_size=4)
    plain, small = (StepCost(shape, w, CLUSTER) for w in (work, replace(work, wire_row_bytes=20)))
    move, experts = (task_at(build_graph(shape), name) for name in ("L0.D.m0.c0.F", "L0.X.m0.c0.F"))
    alpha = CLUSTER.all_to_all(work.span(Group.EXPERT)).alpha_s
    assert (small(move) - alpha) / (plain(move) - alpha) == pytest.approx(20 / 64)
    assert small(experts) == plain(experts)


@pytest.mark.parametrize(("form", "slots"), [("gather", 4), ("s1", 4), ("s2", 2)])
def test_few_tokens_have_slots_by_form(form: ExpertForm, slots: int) -> None:
    """Ranks that split 20 tokens have four slots each at 64 experts; those that deal them, four together."""
    shape = StepShape(moe_layers=(True,), sharing=Sharing(tp_size=2, etp_size=2), expert_form=form)
    work = replace(workload(shape, capacity_factor=1.0), batch=1, seq_len=20, num_experts=64)
    work = replace(work, tp_size=2, etp_size=2, partial_all_reduce_bytes=(0,))
    move = task_at(build_graph(shape), "L0.D.m0.c0.F")
    copies = 1 if form == "gather" else 2
    assert StepCost(shape, work, CLUSTER).work(move).sent_bytes == work.wire_bytes(64 * slots * copies)


def test_soft_slots_are_counted_by_sample() -> None:
    work = replace(workload(StepShape(moe_layers=(True,))), slots_per_sample=3)
    rows = [work.rows(m, 2, c, 2) for m in range(2) for c in range(2)]
    assert rows == [4 * n for n in (5, 4, 3, 3)]  # 3 and 2 samples of 3 slots each, in two chunks, 4 experts


# ---- ranks that differ -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "pieces", "shards"), [(1, 1, 1), (3, 2, 1), (2, 5, 2)])
def test_replicas_cost_their_room_in_any_number_of_pieces(slots: int, pieces: int, shards: int) -> None:
    """Experts of 3 x 16 x 24 numbers."""
    shape = StepShape(moe_layers=(True,), replica_slots=slots, replica_pieces=pieces)
    cost = StepCost(shape, replace(workload(shape), etp_size=shards), CLUSTER)
    for op in (Op.REPLICA_PARAMETERS, Op.REPLICA_GRADIENTS):
        tasks = [task for task in build_graph(shape).tasks if task.op == op]
        assert len(tasks) == pieces
        found = sum(cost.work(task).sent_bytes for task in tasks)
        assert found == pytest.approx(slots * 3 * 16 * 24 * 4 / shards)


def test_a_popular_rank_computes_longer_and_holds_up_transfers() -> None:
    """Twice the rows take twice the time but for the fixed part; the other tasks stay as they are."""
    shape = StepShape(moe_layers=(True,))
    even = StepCost(shape, workload(shape), CLUSTER)
    uneven = UnevenRanks(even, load=(2.0, 1.0, 0.5, 0.5))
    for task in build_graph(shape).tasks:
        usual_s, found = even(task), np.asarray(uneven(task))
        if task.op == Op.EXPERTS:
            fixed_s = CLUSTER.task_overhead_s
            np.testing.assert_allclose(found - fixed_s, (usual_s - fixed_s) * np.array([2.0, 1.0, 0.5, 0.5]))
        elif task.op in (Op.DISPATCH, Op.COMBINE):
            start_s = CLUSTER.all_to_all(Span.regular(2, 1)).alpha_s
            assert found - start_s == pytest.approx(2 * (usual_s - start_s))
        else:
            assert found == pytest.approx(usual_s)


@pytest.mark.parametrize("form", FORM_TOKENS)
def test_a_popular_rank_holds_up_what_moves_rows_and_no_more(form: ExpertForm) -> None:
    """With all tokens on every rank between blocks, some transfers are copies in one direction."""
    each = with_sharing(problem(), 2, 2, "replicated")
    shape = replace(each.shape, expert_form=form)
    even = StepCost(shape, each.workload, CLUSTER)
    uneven = UnevenRanks(even, load=(4.0, *[0.5] * (each.workload.world_size - 1)))
    copied = set[str]()
    for task in build_graph(shape).tasks:
        if not task.lane.computes:
            assert (float(np.max(uneven(task))) > even(task)) is (task.op in ROW_MOVES), task
            copied |= {task.op} if not even.work(task).collective else set()
    assert copied - {*ROW_MOVES}


def test_a_slow_rank_with_few_tokens() -> None:
    shape = StepShape(moe_layers=(True,))
    even = StepCost(shape, workload(shape), replace(CLUSTER, task_overhead_s=1e-12))
    both = slowed(UnevenRanks(even, load=(1.5, 0.5)), (1.0, 4.0))
    for task in (t for t in build_graph(shape).tasks if t.op == Op.EXPERTS):
        np.testing.assert_allclose(both(task), even(task) * np.array([1.5, 2.0]), rtol=1e-6)


def test_loads_from_all_nodes_take_the_links_between_them() -> None:
    """Four ranks tell each other about two MoE layers of four experts, four bytes each."""
    shape = StepShape(moe_layers=(True, False, True), gathers_loads=True)
    cost = cost_of(shape)
    every = cost.cluster.all_to_all(cost.workload.span(Group.WORLD), Group.WORLD)
    assert cost(task_at(build_graph(shape), "L2.LG.B")) == every.seconds(4 * 2 * 4 * 4)


def test_others_types_change_what_is_sent_and_not_what_is_updated() -> None:
    """Sums are as wide as gradients, gathers as parameters, twice where these are gathered for every use."""
    shape = sharing_updates(problem()).shape
    graph, plain = build_graph(shape), problem().workload
    state = StateTypes(parameter_bytes=2, gradient_bytes=2, fully_sharded=True)
    costs = [StepCost(shape, each, CLUSTER) for each in (plain, replace(plain, state=state))]
    seen = set[str]()
    for task in graph.tasks:
        if (part := of_optimizer(task)) in ("update", "gather") or task.op == Op.SCATTER:
            before, after = (each.reduced_bytes(task) for each in costs)
            assert after == (before // 2 if task.op == Op.SCATTER else before), task
            seen.add(part)
    assert seen == {"", "update", "gather"}


# ---- a dispatch of one's own -------------------------------------------------------------------------------


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
