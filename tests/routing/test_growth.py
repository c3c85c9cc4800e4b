"""What routes of a rank take in memory, by what is allocated: nothing is P x P x C."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from penstock.apportion import Counts
from penstock.cost import RoutedCost, Workload
from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES, Place
from penstock.mesh import Mesh
from penstock.ops import Op
from penstock.routing.joined import num_sets
from penstock.routing.routes import RouteMaker, ShardPlace
from penstock.step import StepShape
from penstock.step.shape import ExpertForm
from tests.workloads.strategies import CLUSTER

SLICES, NODE, DEGREES = 8, 8, (1, 2, 8)
RANKS = (256, 1024)
MOST = 5.0
"""Four times as many ranks may need this many times the memory; with P x P it would be sixteen."""


def allocated(act: Callable[[], object]) -> int:
    """The most bytes that are held at once, after what depends on the plan alone has been worked out."""
    act()
    tracemalloc.start()
    act()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def drawn(*shape: int) -> Counts:
    return np.random.default_rng(0).integers(0, 9, shape)


def of_dispatch(name: str, ranks: int) -> int:
    """Bytes of one microbatch's routes in one layer, on a rank through which others' rows pass, where any do;
    what ranks have told it is there."""
    dispatch, place = DISPATCHES[name], Place(0, ranks, NODE)
    if dispatch.joins_rows:
        maker, rows = (
            RouteMaker(dispatch, place, row_counts=True),
            np.zeros((ranks, SLICES, 1 + num_sets(NODE))),
        )
        told = rows.astype(np.int64)
        told[:, :, :17] = drawn(ranks, SLICES, 17)  # most sets of places are empty
        return allocated(lambda: maker.from_pair(told, told, DEGREES))
    maker = RouteMaker(dispatch, place)
    if not maker.needs_table:
        told = drawn(ranks, SLICES, 1)
        return allocated(lambda: maker.from_pair(told, told, DEGREES))
    gathered = drawn(ranks, SLICES, ranks)
    return allocated(lambda: maker.from_everyone(gathered, DEGREES))


@pytest.mark.parametrize("name", sorted(DISPATCHES))
def test_memory_grows_with_the_ranks_and_not_with_their_square(name: str) -> None:
    few, many = (of_dispatch(name, ranks) for ranks in RANKS)
    assert many < MOST * few
    assert many < 100 << 20


@pytest.mark.parametrize("form", ["gather", "s1", "s2", "baseline"])
def test_neither_do_shards_of_experts_need_it(form: ExpertForm) -> None:
    def bytes_of(ranks: int) -> int:
        mesh = Mesh(world_size=4 * ranks, ep_size=ranks, ep_local_size=2, tp_size=4, etp_size=4)
        shards = ShardPlace.of(form, mesh, 5)
        maker = RouteMaker(DISPATCHES["flat"], Place(1, ranks, 2), shards=shards)
        gathered = drawn(4 * ranks, SLICES, ranks)
        return allocated(lambda: maker.from_everyone(gathered, DEGREES))

    few, many = (bytes_of(ranks) for ranks in (64, 256))
    assert many < MOST * few
    assert many < 100 << 20


def test_fixed_sizes_are_worked_out_once() -> None:
    maker = RouteMaker(DISPATCHES["hierarchical_1d"], Place(0, 64, NODE))
    assert maker.even((3, 2), 2, (1, 2)) is maker.even((3, 2), 2, (1, 2))


@pytest.mark.parametrize("name", sorted(DISPATCHES))
def test_what_one_of_a_thousand_ranks_tells_the_others(name: str) -> None:
    """1,024 ranks, 256 experts: counts of a microbatch by expert, rank by rank, and no table of all sets."""
    work = Workload(
        batch=2, seq_len=8, hidden_size=8, ffn_hidden_size=8, vocab_size=8, num_experts=256, top_k=2,
        expert_matrices=2, capacity_factor=None, min_capacity=1, world_size=1024, ep_size=256,
        element_bytes=4, all_reduce_bytes=(4,), expert_all_reduce_bytes=(0,), dispatch=name, node_size=NODE,
    )  # fmt: skip
    shape = StepShape(moe_layers=(True,), microbatches=2, dispatch=DISPATCHES[name].hops)
    counts = np.zeros((1024, 2, 1, 256), np.int64)
    counts[..., :16] = 1
    cost = RoutedCost(shape, work, CLUSTER, counts)
    task = next(task for task in build_graph(shape).tasks if task.op == Op.COUNTS)
    assert allocated(lambda: cost.exchanged_counts(task, 5)) < 8 << 20
