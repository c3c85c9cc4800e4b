"""Steps on a stand-in for a GPU: their numbers, what a GPU would refuse, and what the host waits for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from penstock.device import Stream, using
from penstock.graph import Task
from penstock.ops import OPS, Op
from penstock.runtime import clip_grad_norm_
from penstock.topology.groups import Summation, TransportName
from penstock.train.optimizer import build_adamw
from tests.steps import PLAIN
from tests.support.card import OPERATIONS, Card, CardDevice, Wait, counted, install
from tests.support.layouts import Layout, engines, layout_case
from tests.support.pairwise import valuewise
from tests.support.parity import CLIP, Case, StepResult, batch_of, check_result, merge, result_of, stack_of
from tests.support.placers import RandomHomes
from tests.support.ranks import Pools, RankPool
from tests.support.recorded import carded_steps, plain_steps
from tests.support.replicas import RandomReplicas
from tests.support.waits import check_waits

LAYOUTS: tuple[Layout, ...] = ((2, 1, 2, 1), (4, 1, 2, 1), (4, 1, 4, 1), (2, 2, 2, 1), (4, 2, 2, 2))
TRANSPORTS: tuple[TransportName, ...] = ("direct", "staged")
NODES = {"node_size": 2}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "capacity": {"capacity_factor": 1.0},
    "bounded rows": {"bound_factor": 2.0},
    "bounded rows, padding": {"bound_factor": 2.0, "padding": True},
    "bounded rows, recomputed": {"bound_factor": 2.0, "recompute": "blocks"},
    "samples move": {"placer": RandomHomes()},
    "samples move, residual apart": {"placer": RandomHomes(), "carried": False},
    "recomputed blocks": {"recompute": "blocks"},
    "recomputed experts": {"recompute": "experts"},
    "hierarchical": {"dispatch": "hierarchical_2d", **NODES},
    "one copy per node": {"dispatch": "node_once", **NODES},
    "scattered experts": {"scattered": True},
    "modules as experts": {"module_experts": True},
    "replicated tokens": {"tokens": "replicated"},
    "packed": {"packed": True},
    "an idle expert": {"idle_expert": 3},
    "padding": {"padding": True},
    "padding, recomputed": {"padding": True, "recompute": "blocks"},
    "one copy per node, recomputed": {"dispatch": "node_once", "recompute": "blocks", **NODES},
}
ENGINES = [pair for pair in engines() if pair[1] == "gather" or pair[0] not in PLAIN or pair[0] == "penstock"]
"""Every schedule, and one of them with every form."""


@dataclass(frozen=True)
class Carded:
    """The result of a step, and what the host waited for in a later one."""

    result: StepResult
    waits: dict[Wait, int]


def step_on_card(rank: int, case: Case, kernel: bool, fault: str = "") -> Carded:
    """Run steps on this rank's stand-in for a GPU. kernel: whether it has grouped kernels."""
    device = install()
    with using(CardDevice(kernel=kernel, shared=case.transport == "staged")):
        stack = stack_of(rank, replace(case, card=True))
        result = result_of(stack, rank, case)
        optimizer = build_adamw(stack.model.named_parameters(), case.config.optimizer)
        mine, (tokens, labels) = case.mine(rank), batch_of(case)
        documents = None if case.documents is None else case.documents[mine].to(device)
        batch, ids = (tokens[mine].to(device), labels[mine].to(device)), torch.arange(len(tokens))[mine]
        ids = ids.to(device) + 0  # so that there is something to wait for, as after any step
        # Where rows are bounded, the first step may have too few of them, and the next one knows of it.
        for _ in range(1 if case.moe.bound_factor is None else 2):
            with counted() as waits:
                loss = stack(*batch, ids, documents_BL=documents)
                if fault == "item":
                    loss.item()
                loss.backward()
                clip_grad_norm_(stack, CLIP)
                optimizer.step()
                optimizer.zero_grad()
        return Carded(result, dict(waits))


def _fits(known: Mapping[str, Any]) -> bool:
    """Whether a layout has what a form of the MoE part, or a feature, is about."""
    world, tp, ep, etp = known.get("layout", (4, 2, 2, 2))
    if "engine" in known and known["engine"][1] != "gather" and tp * etp == 1:
        return False
    more = FEATURES[known.get("feature", "plain")]
    if "node_size" in more:
        return (world, tp, ep, etp) == (4, 1, 4, 1)
    if "placer" in more or "packed" in more or "module_experts" in more:
        return tp * etp == 1 and (world, ep) != (4, 2)
    return tp > 1 if "tokens" in more else tp == 1 or "recompute" not in more


def check_on_card(pools: Pools, case: Case, kernel: bool) -> None:
    """The numbers of a step are those of the reference, through the code that GPUs run, and hosts hardly
    wait."""
    case = replace(case, double=not kernel, schedule=replace(case.schedule, chunks=2))
    done = pools(case.world_size).run(step_on_card, case, kernel)
    check_result(merge([each.result for each in done]), case)
    for each in done:
        check_waits(each.waits, case)


@pytest.mark.slow
@valuewise(_fits, layout=LAYOUTS, engine=ENGINES, kernel=[False, True], transport=TRANSPORTS)
def test_every_schedule(
    cards: Pools, layout: Layout, engine: tuple[str, Any], kernel: bool, transport: TransportName
) -> None:
    check_on_card(cards, layout_case(layout, *engine, transport=transport), kernel)


@pytest.mark.slow
@valuewise(
    _fits, feature=FEATURES, layout=LAYOUTS, schedule=["flowmoe", "fsmoe", "penstock"], transport=TRANSPORTS
)
def test_every_feature(
    cards: Pools, feature: str, layout: Layout, schedule: str, transport: TransportName
) -> None:
    case = layout_case(layout, schedule, "gather", transport=transport, **FEATURES[feature])
    check_on_card(cards, case, kernel=False)


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("engine", engines(), ids="-".join)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_combination(cards: Pools, layout: Layout, engine: tuple[str, Any], feature: str) -> None:
    if not _fits({"layout": layout, "engine": engine, "feature": feature}):
        pytest.skip("there is no such layout")
    check_on_card(cards, layout_case(layout, *engine, **FEATURES[feature]), kernel=True)


@pytest.mark.slow
@pytest.mark.parametrize("summation", ["native", "in_order"])
def test_steps_that_sum_parts(cards: Pools, summation: Summation) -> None:
    """A sharded optimiser's sums, by the network's library or in the order of ranks."""
    case = replace(layout_case((4, 1, 2, 1), "penstock", "gather"), sharded=True, summation=summation)
    hosts, pool = (
        RandomReplicas(slots=0, steps=2),
        cards(4),
    )  # on a card first: autograd counts devices only once
    found, plain = pool.run(carded_steps, case, hosts), pool.run(plain_steps, case, hosts)
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
        assert ours.norms == pytest.approx(theirs.norms, rel=1e-5)


def waits_by_step(rank: int, case: Case) -> list[int]:
    """How often the host waits for the whole device in each of three steps, and kinds of tasks."""
    waits = carded_steps(rank, case, RandomReplicas(slots=0, steps=3)).waits
    return [sum(n for (_, _, what), n in each.items() if what == "wait for the device") for each in waits]


@pytest.mark.slow
def test_the_first_task_of_each_kind_finds_nothing_that_runs() -> None:
    """Loading its kernels may wait for what runs, and that for other ranks."""
    case = layout_case((2, 1, 2, 1), "flowmoe", "gather")
    pool = RankPool(2)  # ranks of which no other test has issued tasks
    first, *later = pool.run(waits_by_step, case)[0]
    pool.close()
    assert (
        first >= len({Op.EMBED, Op.ATTENTION, Op.DISPATCH, Op.EXPERTS, Op.COMBINE, Op.UNORDER, Op.HEAD}) * 2
    )
    assert later == [0, 0]


@pytest.mark.slow
def test_one_more_number_that_is_read_is_counted(cards: Pools) -> None:
    case = layout_case((2, 1, 2, 1), "flowmoe", "gather")
    plain, faulty = (cards(2).run(step_on_card, case, False, fault)[0].waits for fault in ("", "item"))
    assert sum(faulty.values()) == sum(plain.values()) + 1


def two_devices(rank: int) -> tuple[bool, bool, list[float]]:
    """Whether tensors of both are refused, and numpy() of one; and a sum with a number of the host."""
    del rank
    refused = []
    with using(CardDevice()):
        here, there = torch.ones(3), torch.ones(3).to(install())
        assert isinstance(there, Card)
        for error, call in ((RuntimeError, partial(torch.add, here, there)), (TypeError, there.numpy)):
            with pytest.raises(error):
                call()
            refused.append(True)
        return refused[0], refused[1], (there + torch.tensor(1.0)).tolist()


@pytest.mark.slow
def test_tensors_of_two_devices_do_not_meet(cards: Pools) -> None:
    """A number alone may come from the host."""
    assert cards(1).run(two_devices) == [(True, True, [2, 2, 2])]


# ---- operations of tasks -----------------------------------------------------------------------------------


class Counting(CardDevice):
    """Notes what is given to the device for every task."""

    def __init__(self) -> None:
        super().__init__(kernel=True)
        self.begun = 0
        self.operations: dict[Task, int] = {}

    @contextmanager
    def running(self, task: object, stream: Stream) -> Iterator[None]:
        del stream
        before = OPERATIONS.total()
        yield
        assert isinstance(task, Task)
        self.operations[task] = OPERATIONS.total() - before


def operations_of_tasks(rank: int, case: Case) -> dict[str, float]:
    """The mean number of operations of each op's tasks."""
    device, counting = install(), Counting()
    with using(counting):
        stack = stack_of(rank, replace(case, card=True))
        mine, (tokens, labels) = case.mine(rank), batch_of(case)
        ids = torch.arange(len(tokens))[mine].to(device)
        stack(tokens[mine].to(device), labels[mine].to(device), ids).backward()
    found: dict[str, list[int]] = {}
    for task, count in counting.operations.items():
        found.setdefault(task.op, []).append(count)
    return {op: sum(counts) / len(counts) for op, counts in found.items()}


NORMS = {Op.ATTENTION: 4, Op.HEADS: 3, Op.GATE: 1, Op.HEAD: 1, Op.LOGITS: 1}
"""RMS norms in a task. A GPU computes each by one operation, and processors, as they do here, by nine."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "schedule", "form"), [((2, 1, 2, 1), "penstock", "gather"), ((4, 2, 2, 2), "parm_s1", "s1")]
)
def test_tasks_give_a_device_as_many_operations_as_plans_assume(
    cards: Pools, layout: Layout, schedule: str, form: Any
) -> None:
    case = replace(layout_case(layout, schedule, form), double=False)
    for op, each in cards(layout[0]).run(operations_of_tasks, case)[0].items():
        counted_ones = each - 8 * NORMS.get(op, 0)
        assert 0.4 * OPS[op].launches - 2 <= counted_ones <= 1.6 * OPS[op].launches + 2, (op, counted_ones)
