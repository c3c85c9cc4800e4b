"""Virtual devices on real ranks: the schedule's order, true bytes, sleeps as long as the cost, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from penstock.cost import ClusterConfig
from penstock.graph import Lane, Task
from penstock.lab.virtual import VirtualConfig, VirtualStack, build_virtual
from penstock.mesh import Group
from penstock.ops import Op
from penstock.runtime import ShardedAdamW
from penstock.runtime.fingerprints import FIELDS
from penstock.topology import Layout
from penstock.train.assemble import build_optimizer, first_plan
from tests.steps import PLAIN
from tests.support import cases
from tests.support.cases import step_of
from tests.support.layouts import tiny_case
from tests.support.pairwise import valuewise
from tests.support.parity import Case, machinery, machinery_of, own_batch, stack_of
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

NAMES = sorted(PLAIN)
LAYOUTS = [(4, 4), (4, 2)]
SLEEPS = ClusterConfig(task_overhead_s=5e-4, flops_per_s=1e8)
ZIPF = VirtualConfig(routing="zipf", zipf_exponent=1.2, drift=0.1)


def case_of(name: str = "flowmoe", *, world_size: int = 4, ep_size: int = 4, **moe: Any) -> Case:
    sizes = {"num_layers": 3, "hidden_size": 16, "seq_len": 6, "vocab_size": 13, "moe_layers": (0, 2)}
    sizes |= {"num_experts": 8, "top_k": 2, "batch": 3, "chunks": 2, "all_reduce_chunk_bytes": 1024}
    return tiny_case(world_size, name, ep_size=ep_size, **sizes, **moe)


def virtual_of(rank: int, case: Case, virtual: VirtualConfig = ZIPF) -> VirtualStack:
    config = replace(case.config, cluster=SLEEPS)
    return build_virtual(config, virtual, machinery_of(rank, case))


@dataclass(frozen=True)
class Ran:
    """What a step left on one rank. expected: bytes that the cost model says this rank sends."""

    as_planned: bool
    sleeps: list[tuple[float, float]]
    traffic: Counter[int]
    expected: Counter[int]


def run_virtual(rank: int, case: Case, number: int = 3) -> Ran:
    stack = virtual_of(rank, case)
    transport = stack.machinery.transports.inter
    before = transport.traffic.copy()
    stack.step(number)
    cost = stack.cost(number)
    return Ran(
        in_order(stack),
        [(r.duration_s, float(cost(r.task)[rank])) for r in stack.records() if r.lane is Lane.COMPUTE],
        Counter(transport.traffic - before),
        expected_traffic(rank, stack, number),
    )


def expected_traffic(rank: int, stack: VirtualStack, number: int) -> Counter[int]:
    """Written out: rows to every peer, and what a ring all-reduce sends to the neighbour."""
    cost, work, layout = stack.cost(number), stack.workload, stack.machinery.layout
    sent: Counter[int] = Counter()
    for task in stack.plan.graph.tasks:
        if task.op in (Op.DISPATCH, Op.COMBINE, Op.COUNTS):
            local = work.num_experts // work.ep_size
            row = cost.shape.slices * local * 8 if task.op == Op.COUNTS else work.hidden_size * 4
            group = next(g for g in layout.mesh.groups(Group.EXPERT) if rank in g)
            once = (1,) * work.ep_size
            splits = once if task.op == Op.COUNTS else cost.moves.move(task, rank).input_splits
            for peer, rows in zip(group, splits, strict=True):
                sent[peer] += rows * row if peer != rank else 0
        elif task.lane is Lane.INTER:
            group = next(g for g in layout.mesh.groups(task.axes) if rank in g)
            size = 2 * (len(group) - 1) * reduced_bytes(task, stack) // len(group)
            sent[group[(group.index(rank) + 1) % len(group)]] += size
    return +sent


def reduced_bytes(task: Task, stack: VirtualStack) -> int:
    work, shape = stack.workload, stack.plan.shape
    if task.op == Op.STATISTICS:
        return 8 * (4 + FIELDS + 2 * sum(shape.moe_layers) * (1 + work.num_experts))
    replicated = task.op == Op.ALL_REDUCE
    sizes = work.all_reduce_bytes if replicated else work.expert_all_reduce_bytes
    pieces = shape.pieces["replicated"] if replicated else shape.pieces["experts"]
    slices = torch.empty(sizes[task.layer] // 4).tensor_split(pieces[task.layer])
    assert task.piece is not None
    return slices[task.piece].nbytes


def check_ran(result: Ran) -> None:
    assert result.as_planned, "a lane ran another order than its list"
    assert all(slept_s >= cost_s for slept_s, cost_s in result.sleeps)
    assert result.traffic == result.expected


# ---- every schedule ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dispatch", ["hierarchical_1d", "hierarchical_2d", "node_once"])
def test_uneven_routing_takes_the_legs_too(ranks: Pools, dispatch: str) -> None:
    """Dropless: all must know what the others send, or partners would wait for other sizes."""
    case = replace(case_of("penstock", dispatch=dispatch), node_size=2)
    for result in ranks(4).run(run_legs, case):
        assert result


def run_legs(rank: int, case: Case) -> bool:
    """Also with the loads gathered, as planners want them."""
    stack = virtual_of(rank, case)
    shape, layout = replace(stack.base_shape, gathers_loads=True), stack.machinery.layout
    stack.adopt(first_plan(case.config, layout, shape, stack.bucket_sizes))
    stack.step(3)
    ops = {record.task.op for record in stack.records()}
    return {*(hop.op for hop in shape.dispatch), Op.LOADS} <= ops and in_order(stack)


def in_order(stack: VirtualStack) -> bool:
    """Whether every lane ran its list."""
    records = sorted(stack.records(), key=lambda record: record.start_s)
    lanes = stack.plan.schedule.lanes
    return all([r.task for r in records if r.lane is lane] == list(order) for lane, order in lanes.items())


@pytest.mark.every_value
@pytest.mark.parametrize(("world_size", "ep_size"), [*LAYOUTS, (4, 1)])
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_runs_with_uneven_routing(
    ranks: Pools, name: str, world_size: int, ep_size: int
) -> None:
    """Dropless: counts are exchanged, ranks send and sleep differently."""
    results = ranks(world_size).run(run_virtual, case_of(name, world_size=world_size, ep_size=ep_size))
    for result in results:
        check_ran(result)
    if ep_size > 1:
        assert len({tuple(cost_s for _, cost_s in r.sleeps) for r in results}) > 1
        assert len({r.traffic.total() for r in results}) > 1


def real_and_virtual(rank: int, case: Case) -> tuple[Counter[int], Counter[int], bool]:
    """Bytes sent by a real step and by a virtual one; whether their first plans are the same.

    A step that gathers parameters follows one that has updated them.
    """
    real, virtual = stack_of(rank, case), virtual_of(rank, case, VirtualConfig())
    transport = real.machinery.transports
    optimizer = build_optimizer(real, case.config.optimizer)
    updating = optimizer.in_backward if isinstance(optimizer, ShardedAdamW) else nullcontext

    def train() -> None:
        with updating():
            real(*own_batch(rank, case)).backward()

    train()
    optimizer.zero_grad()
    sent = []
    for step in (train, lambda: virtual.step(0)):
        before = transport.traffic.copy()
        step()
        sent.append(Counter(transport.traffic - before))
    same = virtual.plan.graph == real.plan.graph and virtual.base_shape == real.base_shape
    return sent[0], sent[1], same


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_alone(name: str) -> None:
    check_ran(run_virtual(0, case_of(name, world_size=1, ep_size=1)))


# ---- every step --------------------------------------------------------------------------------------------

SAME = ("layout", "form", "dispatch", "schedule", "degrees", "group", "tokens", "moe_layers", "sharded")
AXES: dict[str, Any] = {
    **{axis: cases.AXES[axis] for axis in SAME},
    "order": ("index", "sort"),
    "shared_ffn_hidden_size": (0, 6),
    "comm_dtype": (None, "int8"),
    "seq_len": (5, 8),
}
"""What a virtual step can differ in. order: with slots, which every rank fills, or dropless and uneven."""


def fits(known: Mapping[str, Any]) -> bool:
    """Whether there is such a step; some values may be missing."""
    rounded, layout = known.get("comm_dtype") is not None, known.get("layout", "four ranks")
    if rounded and (known.get("dispatch") == cases.JOINED or cases.LAYOUTS[layout][3] > 1):
        return False
    return cases.fits(known)


@pytest.mark.few(7)
@valuewise(fits, **AXES)
def test_a_virtual_step_is_sent_as_a_real_one(
    ranks: Pools,
    layout: str,
    form: str,
    dispatch: str,
    schedule: str,
    degrees: tuple[int, int | None],
    group: str,
    tokens: str,
    moe_layers: tuple[int, ...] | None,
    sharded: bool,
    order: str,
    shared_ffn_hidden_size: int,
    comm_dtype: str | None,
    seq_len: int,
) -> None:
    """The same bytes to the same ranks, by the same plan; where routing is uneven, in the planned order.

    Every rank works out for itself what its partners send: another number would never arrive.
    """
    known = {name: value for name, value in locals().items() if name in cases.AXES}
    case = step_of(known, comm_dtype=comm_dtype, seq_len=seq_len).case
    case, pool = replace(case, double=False), ranks(case.world_size)
    if order == "sort" or dispatch == cases.JOINED:  # how many rows are joined is up to the routing
        assert all(pool.run(run_uneven, case))
        return
    for real, virtual, same in pool.run(real_and_virtual, case):
        assert same
        assert real == virtual
        assert (real.total() > 0) == (case.world_size > 1)


def run_uneven(rank: int, case: Case) -> bool:
    """Whether a dropless virtual step has run as planned."""
    stack = virtual_of(rank, case)
    stack.step(3)
    return in_order(stack)


# ---- steps -------------------------------------------------------------------------------------------------


def test_every_step_has_its_own_routing() -> None:
    stack = virtual_of(0, case_of(world_size=1, ep_size=1))
    assert stack.records() == []
    for number in (0, 5):
        stack.prepare(number)
        stack.step(number)
        assert {record.step for record in stack.records(number + 1)} == {number + 1}
        assert len(stack.records()) == len(stack.plan.graph.tasks)
    assert (stack.cost(0).counts_DBYE != stack.cost(5).counts_DBYE).any()


def test_plans_may_be_exchanged_between_steps() -> None:
    case = case_of(world_size=1, ep_size=1)
    stack = virtual_of(0, case)
    layout = stack.machinery.layout
    for name in NAMES:
        config = replace(case.config, schedule=replace(case.schedule, name=name))
        stack.adopt(first_plan(config, layout, stack.base_shape, stack.bucket_sizes))
        stack.step(0)
        assert {record.task for record in stack.records()} == set(stack.plan.graph.tasks)


def test_fewer_samples_than_microbatches() -> None:
    case = case_of(world_size=1, ep_size=1)
    with pytest.raises(ValueError, match=r"microbatches = 2: a batch of 1 samples .* Use 1 or fewer"):
        layout = Layout(world_size=1, ep_size=1, rank=0)
        device = machinery(1, 1, 0)
        stack = virtual_of(0, replace(case, schedule=replace(case.schedule, microbatches=1), batch=1))
        assert stack.machinery.lanes is device.lanes
        stack.adopt(first_plan(case.config, layout, stack.base_shape, stack.bucket_sizes))
