"""An op, a pass and a schedule from the documentation: nothing of them stands in the package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.cost import ClusterConfig
from penstock.decision import Decision, ScheduleConfig
from penstock.features.build import build_graph
from penstock.graph import Graph, Lane, Phase, RefusalError, ScheduleError, Task
from penstock.models import ModelConfig, MoEDecoder
from penstock.moe import MoEConfig, SampleKeys
from penstock.ops import OPS, Kind, OpSpec, Work, register
from penstock.plan.problem import Problem
from penstock.report import render_timeline
from penstock.runtime.handlers import HANDLERS
from penstock.schedule import SCHEDULES, Schedule
from penstock.step import Stage, StepShape
from penstock.step.rewrite import insert_after
from penstock.timing import lower_bound
from penstock.train.assemble import build_stack
from penstock.train.config import RunConfig
from tests.cost.test_step import workload
from tests.support.pages import EXTENDING, blocks, run_block
from tests.support.parity import executed_as_planned, logical, machinery
from tests.support.ranks import Pools

HEADING = "An op, a pass and a schedule"
RANKS, BATCH, LENGTH, SEED = 2, 4, 8, 0
MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, seq_len=LENGTH, vocab_size=32)
MOE = MoEConfig(num_experts=4, top_k=2, moe_ffn_hidden_size=12, aux_loss_coeff=0.0, z_loss_coeff=0.0)


@contextmanager
def own_parts() -> Iterator[dict[str, Any]]:
    """What the page defines, registered; everything is as before afterwards."""
    registers: list[dict[Any, Any]] = [OPS, HANDLERS, SCHEDULES]
    before = [dict(register) for register in registers]
    try:
        (code,) = blocks(EXTENDING, HEADING)
        yield run_block(code)
    finally:
        for register, held in zip(registers, before, strict=True):
            register.clear()
            register.update(held)


@pytest.fixture
def page() -> Iterator[dict[str, Any]]:
    with own_parts() as parts:
        yield parts


def problem() -> Problem:
    shape = StepShape(moe_layers=(True, True))
    inside = replace(workload(shape), node_size=0)
    return Problem(shape=shape, workload=inside, cluster=ClusterConfig())


@pytest.mark.usefixtures("page")
def test_it_is_planned_for_printed_and_simulated() -> None:
    asked, choice = problem(), Decision(schedule="mixing", microbatches=2)
    plan = asked.plan(choice)
    mixed = [task for task in plan.graph.tasks if task.op == "MX"]
    assert len(mixed) == 2 * 2 * 2  # layers, microbatches, forward and backward
    assert all(task.lane is Lane.INTRA and task.axes == ("ep_local",) for task in mixed)
    assert "intra    ·   MX0" in plan.schedule.grid(plan.graph)
    assert Schedule.parse(plan.schedule.text(), plan.graph) == plan.schedule
    timeline = asked.simulate(choice, plan)
    cost = asked.cost(choice, plan.shape)
    assert cost(mixed[0]) > 0
    assert timeline.iteration_s >= lower_bound(plan.graph, cost).seconds * (1 - 1e-9)
    usual = asked.simulate(
        Decision(schedule="flowmoe", microbatches=2), asked.plan(Decision(schedule="flowmoe"))
    )
    assert timeline.iteration_s > usual.iteration_s
    shown = render_timeline([record for record in timeline.records() if record.rank == 0])
    assert "MX  mean of hidden states over the ranks of a node" in shown


def test_without_its_handler_it_is_refused_by_name(page: dict[str, Any]) -> None:
    del HANDLERS["MX", page["Phase"].BACKWARD]
    with pytest.raises(ScheduleError, match=r"L\d.MX.m\d.B: op MX has no handler for phase B"):
        stack_on(0, 1).program(training=True)


@dataclass(frozen=True)
class Doubled:
    """Doubles what experts return, chunk by chunk."""

    name = "doubled"
    stage = Stage.INSERT

    def __call__(self, graph: Graph) -> Graph:
        def after(task: Task) -> Task:
            return Task(task.name._replace(op="ZZ"), Lane.COMPUTE, (), {"rows": (task.name,)}, task.cut)

        return insert_after(graph, "X", "rows", after)


@pytest.mark.usefixtures("page")
@pytest.mark.parametrize(("forward", "backward"), [(2, 4), (3, 2)])
def test_what_is_cut_runs_again_where_a_backward_chunk_lies_in_one(forward: int, backward: int) -> None:
    doubles: dict[str, Any] = {"kind": Kind.COPY, "work": lambda *_: Work(), "indices": "mc"}
    register(OpSpec(name="ZZ", title="doubles rows", recomputable=True, **doubles))
    shape = StepShape(
        moe_layers=(True,), chunks=forward, degree_backward=backward, recompute="blocks", more=(Doubled(),)
    )
    if backward % forward:
        with pytest.raises(RefusalError, match="ZZ runs again"):
            build_graph(shape)
    else:
        assert "ZZ" in {task.op for task in build_graph(shape).tasks if task.phase is Phase.RECOMPUTE}


def config() -> RunConfig:
    return RunConfig(model=MODEL, moe=MOE, schedule=ScheduleConfig(name="mixing", microbatches=2))


def stack_on(rank: int, world_size: int) -> Any:
    return build_stack(config(), machinery(world_size, world_size, rank), torch.float64)


def tokens() -> Tensor:
    return torch.randint(32, (RANKS * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(3))


def step(rank: int) -> tuple[float, dict[str, Tensor], bool, set[str]]:
    with own_parts():
        stack = stack_on(rank, RANKS)
        mine = tokens()[rank * BATCH : (rank + 1) * BATCH]
        loss = stack(mine[:, :-1], mine[:, 1:])
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in stack.model.named_parameters()}
        ran = {record.task.op for record in stack.records() if record.lane is Lane.INTRA}
        return loss.item(), logical(stack, gradients), executed_as_planned(stack), ran


def reference() -> tuple[float, dict[str, Tensor]]:
    """The same in one process: every sample's hidden states are averaged with those of its counterpart."""
    model = MoEDecoder(MODEL, MOE).to(torch.float64)
    model.initialise(SEED)
    text, keys = tokens(), SampleKeys(0, torch.arange(RANKS * BATCH))
    hidden_BLM = model.embed(text[:, :-1], keys)
    for block in model.parts:
        by_rank = hidden_BLM.unflatten(0, (RANKS, BATCH))
        hidden_BLM = by_rank.mean(0, keepdim=True).expand_as(by_rank).flatten(0, 1)
        residual_BLM, x_TM = block.attend(hidden_BLM, keys)
        assert block.moe is not None
        hidden_BLM = block.add(residual_BLM, block.moe(x_TM), keys)
    loss = model.head(hidden_BLM, text[:, 1:]) / text[:, 1:].numel()
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), by_logical_name(model, found)


def by_logical_name(model: MoEDecoder, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts under their numbers in the whole model."""
    named: dict[str, Tensor] = {}
    for name, tensor in found.items():
        if ".experts." not in name:
            named[name] = tensor
            continue
        moe = model.parts[int(name.split(".")[2])].moe
        assert moe is not None
        named |= {f"{logical}.{number}": part for logical, number, part in moe.experts.split(name, tensor)}
    return named


def test_two_ranks_run_it_and_its_gradient_is_right(ranks: Pools) -> None:
    loss, gradients = reference()
    for found_loss, found, as_planned, ran in (results := ranks(RANKS).run(step)):
        assert as_planned
        assert ran == {"MX"}
        assert found_loss == pytest.approx(loss, rel=1e-12)
        for name, gradient in found.items():
            assert (gradient - gradients[name]).norm() <= 1e-10 * gradients[name].norm(), name
    assert {name for result in results for name in result[1]} == set(gradients)
