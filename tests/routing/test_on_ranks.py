"""Real ranks over Gloo, virtual ranks and the simulator: the same bytes, task by task and member by member.

A real step runs dropless, by its own router. What its ranks have told each other is then the routing of a
virtual step, and of the cost model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from threading import local
from typing import Any

import numpy as np
import pytest
import torch

from penstock.apportion import Counts
from penstock.cost import ClusterConfig, RoutedCost
from penstock.cost.moves import ROW_MOVES
from penstock.decision import PlacementConfig, ScheduleConfig
from penstock.features.tensor_parallel.ops import ROUTED as TOKENS
from penstock.graph import Task
from penstock.lab.virtual import VirtualConfig, VirtualStack, build_virtual
from penstock.lab.virtual.handlers import virtual_handlers
from penstock.mesh import Axes, Group
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.ops import Op
from penstock.placement import SPLIT, ExpertPlacement, Replication
from penstock.routing.rows import Placed
from penstock.runtime.executor import Programs
from penstock.runtime.features.expert_replicas.manager import ExpertReplicas
from penstock.runtime.handlers import HANDLERS, Handlers, Inputs, Outputs
from penstock.runtime.transport import GroupTransport
from penstock.schedule import StepPlan
from penstock.topology import Layout
from penstock.train.assemble import workload
from penstock.train.config import TrainConfig
from tests.support.parity import Case, batch_of, machinery_of, stack_of
from tests.support.placers import Rotated
from tests.support.ranks import Pools
from tests.support.replicas import RandomReplicas, random_replication, stack_with_replicas

pytestmark = pytest.mark.slow

OPS = (*ROW_MOVES, *TOKENS, Op.REPLICA_PARAMETERS, Op.REPLICA_GRADIENTS)
Sent = dict[str, list[tuple[Axes, tuple[int, ...]]]]
"""By task, the bytes for every member in each exchange; none for the rank itself."""


@dataclass(frozen=True)
class Measured(RoutedCost):
    """The cost of a step whose rows were counted. counted: by rank, as `rows`."""

    counted: Counts | None = None

    @cached_property
    def rows(self) -> Counts:
        assert self.counted is not None
        return self.counted


@dataclass(frozen=True)
class Told:
    """What a rank sent in a real step, and its rows by microbatch, slice, MoE layer and expert."""

    sent: Sent
    rows_RCYE: Counts


def case_of(world_size: int = 4, **own: Any) -> Case:
    cut: dict[str, Any] = {"microbatches": 2, "chunks": own.pop("chunks", 2)}
    cut["backward_chunks"] = own.pop("backward_chunks", 3)
    schedule = ScheduleConfig(name=own.pop("schedule", "fsmoe"), all_reduce_chunk_bytes=2048, **cut)
    sizes: dict[str, Any] = {"num_layers": 3, "hidden_size": 16, "num_heads": 4, "seq_len": 8}
    model = ModelConfig(**sizes, vocab_size=16, ffn_hidden_size=16, moe_layers=(0, 2))
    moe: dict[str, Any] = {"num_experts": 8, "top_k": 2, "moe_ffn_hidden_size": 8}
    moe["dispatch"] = own.pop("dispatch", "flat")
    if own.get("tp_size", 1) > 1:
        moe["aux_loss_group"] = "sequence"
    return Case(
        world_size=world_size,
        ep_size=own.pop("ep_size", world_size),
        schedule=schedule,
        model=model,
        moe=MoEConfig(**moe),
        batch=own.pop("batch", 3),
        **own,
    )


def watched(
    handlers: Handlers, sent: Sent, patch: pytest.MonkeyPatch, rows: dict[Task, Counts] | None = None
) -> Handlers:
    """Handlers that note what their tasks hand to a transport, and what is told of rows."""
    now, count = local(), GroupTransport._count

    def counting(self: GroupTransport, given: torch.Tensor, splits: Any, group: Axes) -> None:
        count(self, given, splits, group)
        own, row_bytes = self.place(group), given[:1].nbytes
        sizes = tuple(0 if n == own else int(rows) * row_bytes for n, rows in enumerate(splits))
        if any(sizes):
            sent[str(now.task.name)].append((group, sizes))

    def noting(handler: Any) -> Any:
        def run(context: Any, task: Task, inputs: Inputs) -> Outputs:
            now.task = task
            if task.op == Op.COUNTS and rows is not None:
                rows[task] = inputs.one("counts").numpy().copy()
            left: Outputs = handler(context, task, inputs)
            return left

        return run

    patch.setattr(GroupTransport, "_count", counting)
    return {key: noting(handler) for key, handler in handlers.items()}


def replications_of(case: Case, hosts: bool) -> tuple[Replication, ...]:
    """Replications of both MoE layers whose rows are split by the loads of the step; () = experts stay."""
    if not hosts:
        return ()
    placement = ExpertPlacement.even(case.moe.num_experts, case.holders)
    made = (random_replication(placement, 1, Random(layer)) for layer in range(2))
    return tuple(replace(replication, limit=SPLIT + 100) for replication in made)


def real_step(rank: int, case: Case, hosts: bool) -> tuple[Told, StepPlan]:
    stack = stack_with_replicas(rank, case, RandomReplicas(steps=1)) if hosts else stack_of(rank, case)
    if hosts:
        found = iter(replications_of(case, hosts))
        stack.of(ExpertReplicas).use(
            tuple(None if layer is None else next(found) for layer in stack.moe_layers)
        )
    tokens, labels = batch_of(case)
    sent: Sent = defaultdict(list)
    mine, rows = case.mine(rank), dict[Task, Counts]()
    with pytest.MonkeyPatch.context() as patch:
        handlers = watched(HANDLERS, sent, patch, rows)
        stack._programs = Programs(handlers, stack.machinery.layout.mesh.silent)
        stack(tokens[mine], labels[mine]).backward()
    shape = stack.plan.shape
    counted = np.zeros((shape.microbatches, shape.slices, 2, case.moe.num_experts), np.int64)
    for task, counts_CX in rows.items():
        assert task.microbatch is not None
        counted[task.microbatch, :, task.layer // 2] = counts_CX
    return Told(dict(sent), counted), stack.plan


def virtual_step(rank: int, case: Case, plan: StepPlan, rows: Counts, hosts: bool) -> tuple[Sent, Sent]:
    """What a virtual rank sends in the same step, and what the cost model says that it sends."""
    placement = PlacementConfig(experts="planned" if hosts else "none")
    config = replace(case.config, placement=placement)
    stack: VirtualStack = build_virtual(config, VirtualConfig(), machinery_of(rank, case))
    stack.adopt(plan)
    plain = stack.cost(0)
    replications = replications_of(case, hosts)
    placed = Placed.still(plain.counts_DBYE, replications) if hosts else None
    cost = Measured(plan.shape, plain.workload, plain.cluster, plain.counts_DBYE, placed=placed, counted=rows)
    stack.cost = lambda number: cost  # type: ignore[method-assign]  # of this one step
    sent: Sent = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        handlers = watched(virtual_handlers(), sent, patch)
        stack._programs = Programs(handlers, stack.machinery.layout.mesh.silent)
        stack.step(0)
    return dict(sent), as_priced(cost, plan, rank, OPS)


def as_priced(cost: RoutedCost, plan: StepPlan, rank: int, ops: Collection[str]) -> Sent:
    """What the cost model says that a rank sends in tasks of these ops."""
    found: Sent = {}
    for task in plan.graph.tasks:
        if task.op not in ops:
            continue
        move = cost.moves.move(task, rank)
        splits = move.input_splits
        if move.collective == "all_gather":
            splits = splits * len(move.output_splits)
        own = cost.workload.mesh.place(rank, move.group)
        sizes = tuple(0 if n == own else rows * move.row_bytes for n, rows in enumerate(splits))
        if move.collective in ("all_to_all", "all_gather") and any(sizes):
            found[str(task.name)] = [(move.group, sizes)]
    return found


def of_ops(sent: Sent, ops: Collection[str] = OPS) -> Sent:
    """What tasks of these ops sent: without others those that move rows, tokens or replicas."""
    return {name: each for name, each in sent.items() if name.split(".")[1] in {str(op) for op in ops}}


def check(pools: Pools, case: Case, hosts: bool = False) -> None:
    told = pools(case.world_size).run(real_step, case, hosts)
    plan, rows = told[0][1], np.stack([each.rows_RCYE for each, _ in told])
    assert rows.any() and len({each.tobytes() for each in rows}) > 1, "ranks route otherwise"
    found = pools(case.world_size).run(virtual_step, case, plan, rows, hosts)
    for rank, ((real, _), (virtual, priced)) in enumerate(zip(told, found, strict=True)):
        assert of_ops(real.sent) == of_ops(virtual) == priced, rank
        assert real.sent.keys() == virtual.keys()
        assert priced, "something was sent"


@pytest.mark.parametrize("dispatch", ["flat", "hierarchical_1d", "hierarchical_2d"])
def test_every_dispatch(ranks: Pools, dispatch: str) -> None:
    check(ranks, case_of(dispatch=dispatch, node_size=2, ep_size=4))


@pytest.mark.parametrize(("chunks", "backward_chunks"), [(1, 1), (3, 2)])
def test_chunks_in_replicated_expert_groups(ranks: Pools, chunks: int, backward_chunks: int) -> None:
    check(ranks, case_of(chunks=chunks, backward_chunks=backward_chunks, ep_size=2))


@pytest.mark.few(2)
@pytest.mark.parametrize("schedule", ["fsmoe", "parm_s1", "parm_s2", "baseline_esp"])
@pytest.mark.parametrize(
    ("tp_size", "etp_size", "ep_size"),
    [(2, 2, 2), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((1, 2, 2), (2, 1, 4), (4, 2, 1)))],
)
def test_shards_of_experts(ranks: Pools, schedule: str, tp_size: int, etp_size: int, ep_size: int) -> None:
    layout = {"tp_size": tp_size, "etp_size": etp_size, "ep_size": ep_size}
    check(ranks, case_of(schedule=schedule, chunks=1, backward_chunks=1, **layout))


@pytest.mark.parametrize("dispatch", ["flat", pytest.param("hierarchical_2d", marks=pytest.mark.soak)])
def test_replicas_whose_rows_are_split_by_their_own_loads(ranks: Pools, dispatch: str) -> None:
    case = case_of(schedule="flowmoe", chunks=1, backward_chunks=1, dispatch=dispatch, node_size=2)
    check(ranks, case, hosts=True)


# ---- samples -----------------------------------------------------------------------------------------------


def moving_step(rank: int, case: Case, rounds: bool) -> tuple[Sent, StepPlan]:
    """What a rank sends that follows samples, under autocast if it `rounds`."""
    stack = stack_of(rank, case)
    stack.compute_in(torch.bfloat16 if rounds else None)
    tokens, labels = batch_of(case)
    sent: Sent = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        stack._programs = Programs(watched(HANDLERS, sent, patch), stack.machinery.layout.mesh.silent)
        stack(tokens[case.mine(rank)], labels[case.mine(rank)]).backward()
    return of_ops(sent, [Op.SAMPLE_MOVE]), stack.plan


def rotated(case: Case, plan: StepPlan) -> Placed:
    """Where `Rotated` brings the samples of a step without slices."""
    devices = case.mesh.size(Group.DATA)
    held = [np.arange(devices * case.batch).reshape(devices, case.batch)]
    for _ in range(sum(plan.shape.moe_layers)):
        held.append(held[-1].copy())
        for here_DB in np.split(held[-1], plan.shape.microbatches, axis=1):
            homes = np.repeat(np.arange(devices), here_DB.shape[1])
            order = np.argsort(np.roll(homes, 1 + here_DB.shape[1]), kind="stable")
            here_DB[:] = here_DB.reshape(-1)[order].reshape(here_DB.shape)
    return Placed(np.stack(held))


@pytest.mark.parametrize(
    ("way", "tp_size", "etp_size", "ep_size"),
    [("apart, rounded", 1, 1, 4), ("packed", 2, 1, 4), ("apart", 2, 2, 2)],
)
def test_what_follows_samples(ranks: Pools, way: str, tp_size: int, etp_size: int, ep_size: int) -> None:
    """Ranks that share samples have four and three of their tokens, and each all of their labels."""
    layout = {"tp_size": tp_size, "etp_size": etp_size, "ep_size": ep_size}
    rounds = way == "apart, rounded"
    case = case_of(chunks=1, backward_chunks=1, batch=4, placer=Rotated(), carried=way == "packed", **layout)
    model, moe = replace(case.model, seq_len=7), replace(case.moe, shared_ffn_hidden_size=8)
    case = replace(case, model=model, moe=replace(moe, aux_loss_group="sequence"))
    told = ranks(4).run(moving_step, case, rounds)
    train = TrainConfig(precision="bfloat16" if rounds else "float32")
    plan, config = told[0][1], replace(case.config, train=train)
    work = workload(config, Layout.build(config.parallel, 4, 0, moe.num_experts))
    counts = np.zeros((case.mesh.size(Group.DATA), case.batch, 2, moe.num_experts), np.int64)
    cost = RoutedCost(plan.shape, work, ClusterConfig(), counts, placed=rotated(case, plan))
    for rank, (sent, _) in enumerate(told):
        assert sent == as_priced(cost, plan, rank, [Op.SAMPLE_MOVE]), rank
    assert any(sent for sent, _ in told)
