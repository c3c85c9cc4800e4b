"""What the test of recorded orders compares: cases, fixed durations, and the line that a case gives.

Durations depend on nothing but task names, so that neither cost models nor machines change a recording.
`python -m tests.schedule.recording` writes the file again; a difference has to be explained.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np

from penstock.decision import TAIL, Decision, GradientBytes, Partition, Portion, Slot
from penstock.features.dispatch import DISPATCHES
from penstock.graph import Task
from penstock.mesh import Mesh, Seconds
from penstock.schedule import SCHEDULES, StepPlan, plan_step
from penstock.step import Sharing, StepShape
from penstock.timing import simulate

RECORDED = Path(__file__).parent / "recorded" / "orders.txt"
RECORDED_DISPATCHES = ("flat", "hierarchical_1d", "hierarchical_2d")
"""Those that there were when orders were recorded: another one must not change which step is which."""

SHARED = Path(__file__).parent / "recorded" / "shared_orders.txt"
"""Of steps whose ranks share attention or experts."""
BYTES = 1000
"""Size of an all-reduce piece: gradients of a layer are a number of thousands."""
SEARCHED = 8
"""In so many cases penstock's order is searched for, which takes a hundred times as long as a rule."""
MESH = Mesh(world_size=8, ep_size=4, ep_local_size=2)
SHARED_MESH = Mesh(world_size=8, ep_size=2, tp_size=2, etp_size=2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """An uncut step and how finely it is cut, FSMoE's partition among it."""

    shape: StepShape
    gradients: GradientBytes
    choice: Decision


def cases() -> list[Case]:
    """Seventy-two steps: every dispatch with and without counts, shared experts and dense layers."""
    rng = random.Random(20261122)
    made = []
    for number in range(72):
        layers = 1 + number % 4
        moe_layers = tuple(rng.random() < 0.75 for _ in range(layers))
        gradients = tuple(BYTES * rng.randint(0, 4) for _ in range(layers))
        shape = StepShape(
            moe_layers=moe_layers,
            exchange_counts=number % 2 == 0,
            dispatch=DISPATCHES[RECORDED_DISPATCHES[number // 2 % len(RECORDED_DISPATCHES)]].hops,
            shared_experts=number % 5 < 2,
        )
        choice = Decision(
            microbatches=rng.choice([1, 2, 2, 3, 4]),
            chunks=rng.choice([None, 1, 2, 3]),
            backward_chunks=rng.choice([None, 1, 2, 3, 4]),
            all_reduce_chunk_bytes=BYTES,
        )
        reduced = GradientBytes(gradients, tuple(BYTES * rng.choice([0, 0, 1, 2]) for _ in range(layers)))
        partition = _partition(moe_layers, gradients, rng) if number % 3 == 0 else None
        made.append(Case(shape=shape, gradients=reduced, choice=replace(choice, partition=partition)))
    return made


def shared_cases() -> list[Case]:
    """Twelve steps of ranks that share attention, experts or both, with the forms that differ for them."""
    rng = random.Random(12)
    made = []
    for number in range(12):
        layers = 1 + number % 3
        moe_layers = tuple(rng.random() < 0.75 for _ in range(layers))
        gradients, partial, experts = (
            tuple(BYTES * rng.randint(1, 3) for _ in range(layers)) for _ in range(3)
        )
        shape = StepShape(
            moe_layers=moe_layers,
            exchange_counts=number % 2 == 0,
            shared_experts=number % 5 < 2,
            sharing=Sharing(
                tp_size=(2, 2, 1)[number % 3],
                etp_size=(2, 1, 2)[number % 3],
                tokens="split" if number % 4 < 2 else "replicated",
            ),
        )
        choice = Decision(
            microbatches=rng.choice([1, 2, 3]),
            chunks=rng.choice([None, 1, 2, 3]),
            backward_chunks=rng.choice([None, 1, 2, 3]),
            all_reduce_chunk_bytes=BYTES,
            expert_form=(*shape.sharing.forms, None)[number // 3],
        )
        reduced = GradientBytes(gradients, experts, partial if shape.sharing.tp_size > 1 else ())
        partition = _partition(moe_layers, gradients, rng) if number % 3 == 0 else None
        made.append(Case(shape=shape, gradients=reduced, choice=replace(choice, partition=partition)))
    return made


def _partition(moe_layers: tuple[bool, ...], gradients: tuple[int, ...], rng: random.Random) -> Partition:
    """Every layer's gradients in one to three unequal portions, each in a gap that the layer may use."""
    portions = []
    for layer, size in enumerate(gradients):
        below = [Slot(layer=low, part="moe") for low in range(layer) if moe_layers[low]]
        dense = [Slot(layer=low, part="dense") for low in range(layer)]
        cut = sorted(rng.sample(range(1, size), rng.randint(0, 2))) if size > 1 else []
        sizes = [end - start for start, end in zip([0, *cut], [*cut, size], strict=True) if end > start]
        slots = sorted((rng.choice([*below, *dense, TAIL]) for _ in sizes), key=_place)
        portions.append(tuple(Portion(size_bytes=s, slot=at) for s, at in zip(sizes, slots, strict=True)))
    return Partition(tuple(portions))


def _place(slot: Slot) -> tuple[bool, int, bool]:
    """Gaps in the order in which the backward pass meets them."""
    return slot.part == "tail", -slot.layer, slot.part == "dense"


def choices(case: Case, number: int) -> Iterator[tuple[str, Decision]]:
    """All schedules that differ; penstock by its rules, and by its search in every ninth case."""
    for name, system in SCHEDULES.items():
        if name != "penstock" and system.expert_form in (None, *case.shape.sharing.forms):
            yield name, replace(case.choice, schedule=name)
    own = replace(case.choice, schedule="penstock")
    yield "penstock/critical_path", replace(own, priority="critical_path")
    yield "penstock/all_to_all_first", replace(own, priority="all_to_all_first")
    if number % (len(cases()) // SEARCHED) == 0:
        yield "penstock/search", replace(own, priority="search")


def recorded_name(task: Task) -> str:
    """What the task was called when orders were recorded: pieces of a buffer counted as chunks."""
    return str(task).replace(".p", ".c")


def seconds(task: Task) -> float:
    """A fixed duration between 0.1 and 1.1 by the task's name."""
    return 0.1 + crc32(recorded_name(task).encode()) / 2**32


def seconds_by_rank(task: Task) -> Seconds:
    """The same with a difference of up to a half between ranks."""
    ranks = range(MESH.world_size)
    return np.array(
        [seconds(task) * (1 + crc32(f"{recorded_name(task)} on {rank}".encode()) / 2**33) for rank in ranks]
    )


def plan_of(case: Case, choice: Decision) -> StepPlan:
    """The plan of a case under the fixed durations."""
    return plan_step(choice, case.shape, case.gradients, lambda _: seconds)


def line(number: int, name: str, plan: StepPlan) -> str:
    """Case, schedule, number of tasks, hash of the order, seconds on equal ranks and on ranks that differ."""
    order = replace(plan.schedule, name=name).text().replace(".p", ".c").encode()
    digest = hashlib.sha256(order).hexdigest()[:16]
    mesh = MESH if plan.shape.sharing.is_none else SHARED_MESH
    even_s = simulate(plan.schedule, plan.graph, seconds, mesh).iteration_s
    uneven_s = simulate(plan.schedule, plan.graph, seconds_by_rank, mesh).iteration_s
    return f"{number} {name} {len(plan.graph.tasks)} {digest} {even_s:.6f} {uneven_s:.6f}"


def recording(number: int, case: Case) -> list[str]:
    """All lines of a case."""
    return [line(number, name, plan_of(case, choice)) for name, choice in choices(case, number)]


if __name__ == "__main__":
    for file, made in ((RECORDED, cases()), (SHARED, shared_cases())):
        file.write_text("".join(f"{each}\n" for n, case in enumerate(made) for each in recording(n, case)))
