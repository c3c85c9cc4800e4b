"""What ranks that share attention and experts receive: the volumes of Parm's and FSMoE's schedules.

A layer of four expert ranks, whose experts have two shards each, and pairs of ranks that share attention. A
pair has 32 elements of tokens, of which 256 are sent to experts (Parm's BLM and ETM).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from penstock.cost import ClusterConfig, StepCost, Workload
from penstock.features.build import build_graph
from penstock.graph import Graph, Phase, Task
from penstock.ops.work import Collective
from penstock.step import Sharing, StepShape
from penstock.step.shape import ExpertForm, TokenLayout

BLM, ETM = 32, 256
BYTES = 4
NODE = 2
WORK = Workload(
    batch=1,
    seq_len=8,
    hidden_size=4,
    ffn_hidden_size=6,
    vocab_size=32,
    num_experts=4,
    top_k=2,
    expert_matrices=2,
    capacity_factor=4.0,
    min_capacity=0,
    world_size=8,
    ep_size=4,
    tp_size=2,
    etp_size=2,
    devices_per_node=NODE,
    element_bytes=BYTES,
    all_reduce_bytes=(8,),
    expert_all_reduce_bytes=(0,),
)
TIMES: dict[Collective, int] = {
    "": 0,
    "leg": 1,
    "all_to_all": 1,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_reduce": 2,
}
"""How often a rank receives the share of the others of a collective's argument."""

Volumes = dict[str, tuple[float, float]]


@cache
def step(form: ExpertForm, tokens: TokenLayout, capacity: float | None) -> tuple[Graph, StepCost]:
    sharing = Sharing(tp_size=WORK.tp_size, etp_size=WORK.etp_size, tokens=tokens)
    shape = StepShape(moe_layers=(True,), sharing=sharing, expert_form=form)
    work = replace(
        WORK, capacity_factor=capacity, top_k=2 if capacity else 8, num_experts=4 if capacity else 8
    )
    return build_graph(shape), StepCost(shape, work, ClusterConfig())


def received(task: Task, cost: StepCost) -> tuple[float, float]:
    """Elements that a rank receives from its own node and from others, of equal parts for all it meets."""
    work, peers = cost.work(task), cost.workload.mesh.members(0, task.axes)
    inside = sum(peer < NODE for peer in peers) - 1
    each = TIMES[work.collective] * work.sent_bytes / BYTES / len(peers)
    return inside * each, (len(peers) - 1 - inside) * each


def volumes(form: ExpertForm, tokens: TokenLayout, phase: Phase, capacity: float | None = 4.0) -> Volumes:
    """By op, of the tasks of a phase between the gate and the end of the block that receive anything."""
    graph, cost = step(form, tokens, capacity)
    ops = {"D", "C", "XG", "XS", "BG", "BR", "BS", "SD", "SG", "UG", "US", "MG", "MS"}
    tasks = [task for task in graph.tasks if task.op in ops and task.phase is phase]
    found = {task.op: received(task, cost) for task in tasks}
    return {op: volume for op, volume in found.items() if volume != (0, 0)}


FORWARD: dict[tuple[ExpertForm, TokenLayout], Volumes] = {
    ("baseline", "replicated"): {"BG": (256, 0), "D": (0, 384), "BR": (512, 0), "C": (0, 384)},
    ("s1", "replicated"): {"D": (32, 192), "C": (32, 192), "UG": (16, 0)},
    ("s2", "replicated"): {"D": (32, 192), "C": (32, 192), "SG": (128, 0)},
    ("gather", "replicated"): {"D": (0, 96), "XG": (128, 0), "XS": (128, 0), "C": (0, 96), "UG": (16, 0)},
    ("gather", "split"): {"D": (0, 96), "XG": (128, 0), "XS": (128, 0), "C": (0, 96)},
    ("s1", "split"): {"D": (32, 192), "C": (32, 192)},
    ("s2", "split"): {"D": (32, 192), "C": (32, 192), "SG": (128, 0)},
}
"""Of every form, with tokens between blocks as its paper has them, and split."""

BACKWARD: dict[tuple[ExpertForm, TokenLayout], Volumes] = {
    ("baseline", "replicated"): {"BS": (256, 0), "C": (0, 384), "D": (0, 384), "BG": (256, 0)},
    ("s1", "replicated"): {"C": (32, 192), "D": (32, 192), "MS": (16, 0)},
    ("s2", "replicated"): {"C": (32, 192), "D": (32, 192), "SD": (128, 0)},
    ("gather", "replicated"): {"C": (0, 96), "XS": (128, 0), "XG": (128, 0), "D": (0, 96), "MS": (16, 0)},
    ("gather", "split"): {"C": (0, 96), "XS": (128, 0), "XG": (128, 0), "D": (0, 96)},
    ("s1", "split"): {"C": (32, 192), "D": (32, 192)},
    ("s2", "split"): {"C": (32, 192), "D": (32, 192), "SD": (128, 0), "US": (16, 0)},
}
"""A sum to all has its gradients from all that it went to: none is sent for BR. MS is an all-gather here."""


@pytest.mark.parametrize("capacity", [4.0, None])
@pytest.mark.parametrize(("form", "tokens"), FORWARD)
def test_what_a_rank_receives(form: ExpertForm, tokens: TokenLayout, capacity: float | None) -> None:
    assert volumes(form, tokens, Phase.FORWARD, capacity) == FORWARD[form, tokens]
    assert volumes(form, tokens, Phase.BACKWARD, capacity) == BACKWARD[form, tokens]


def test_experts_of_the_baseline_do_the_work_of_every_sharing_rank_again() -> None:
    flops: dict[ExpertForm, float] = {}
    forms: tuple[ExpertForm, ...] = ("baseline", "s1", "s2", "gather")
    for form in forms:
        graph, cost = step(form, "split", 4.0)
        flops[form] = next(cost.work(task).flops for task in graph.tasks if task.op == "X" and task.forward)
    once = ETM / 4 * 2 * 2 * 4 * 6 / WORK.tp_size  # rows of a pair, two matrices, of which a rank has half
    assert flops == {"baseline": once * WORK.tp_size, "s1": once, "s2": once, "gather": once}


@pytest.mark.parametrize("tokens", ["split", "replicated"])
def test_around_attention_every_token_is_gathered_and_summed(tokens: TokenLayout) -> None:
    """An all-gather and a reduce-scatter are half an all-reduce each; both layouts send the same."""
    graph, cost = step("gather", tokens, 4.0)
    half = BLM / 2
    ways = {"TG": half, "TS": half, "HG": half, "ES": half, "TC": 0, "TR": 2 * half, "HC": 0, "ER": 2 * half}
    back = {**ways, "TC": 2 * half, "TR": 0, "HC": 2 * half, "ER": 0}
    if tokens == "replicated":  # the MoE part has its share of the tokens, so attention ends as it has
        ways["TS"] = back["TS"] = half
    sent = [task for task in graph.tasks if task.op in ways]
    assert {task.op for task in sent} == (
        {"ES", "TG", "TS", "HG"} if tokens == "split" else {"ER", "TC", "TS", "HC"}
    )
    for task in sent:
        assert received(task, cost) == ((ways if task.forward else back)[task.op], 0), task


def test_three_numbers_of_every_token_are_all_that_the_vocabulary_sends() -> None:
    graph, cost = step("gather", "split", 4.0)
    (peaks,) = [task for task in graph.tasks if task.op == "HX"]
    assert cost.work(peaks).sent_bytes == 2 * 8 * 3 * 4  # ranks, tokens, numbers, bytes


def test_choices_are_a_number_of_every_sample_and_expert() -> None:
    sharing = Sharing(tp_size=2, etp_size=2, judges_samples=True)
    shape = StepShape(moe_layers=(True,), sharing=sharing, microbatches=3)
    cost = StepCost(shape, replace(WORK, batch=4), ClusterConfig())
    judged = [task for task in build_graph(shape).tasks if task.op == "NC"]
    assert [cost.work(task).sent_bytes for task in judged] == [n * 4 * 8 for n in (2, 1, 1)]
