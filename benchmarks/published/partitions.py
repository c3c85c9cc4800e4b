"""Partitions of gradients to compare FSMoE's with, by name, and what each is worth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.decision import TAIL, Partition, Slot
from penstock.plan.published.degree import Backward, Degree, common_degree, exact
from penstock.plan.published.partition import (
    Filling,
    PartitionPlanner,
    adaptive,
    fill_idle,
    idle_only,
    loaded_parts,
    seconds_by_slot,
    spread_rest,
)
from penstock.plan.published.spread import Rest
from penstock.plan.published.table import LINA_BYTES
from penstock.routing.sizes import Floats


@dataclass(frozen=True, kw_only=True)
class PlannedPartition:
    """A partition and its degrees.

    Attributes:
        apart: The best degree of each gap's layer, in backward order.
        common: The best degree that all layers share, which is what a schedule runs; its seconds are those of
            all MoE parts.
        apart_s: Seconds of all MoE parts with degrees apart; `common.seconds / apart_s` is what sharing
            costs.
        tail_s: Seconds of reductions that are exposed behind everything.
    """

    partition: Partition
    apart: tuple[int, ...]
    apart_s: float
    common: Degree
    tail_s: float


def dense_only(backward: Backward) -> Partition:
    """Put reductions under attention and dense blocks alone, as much as fits."""
    return fill_idle(backward, parts=("dense",))[0].partition()


def fixed_chunks(backward: Backward) -> Partition:
    """Cut as Lina does: chunks of a fixed size, whole ones into gaps that hide them."""
    return fill_idle(backward, unit_bytes=LINA_BYTES)[0].partition()


def everything_at_the_tail(backward: Backward) -> Partition:
    """Put everything at the tail: nothing is hidden."""
    filling = Filling(backward)
    for gap in backward.gaps:
        filling.make(gap.made)
    return filling.partition()


def adaptive_greedy(backward: Backward) -> Partition:
    """Fill gaps as FSMoE does, and put the rest where the degree shrinks most cheaply, layer by layer."""
    return spread_rest(backward, greedy)


def greedy(rest: Rest) -> list[float]:
    """Put, again and again, into the gap where most is gained as much as a smaller degree still hides."""
    gaps = len(rest.left_bytes)
    extra = np.zeros(gaps)
    for _ in range(gaps):
        options = [option for gap in range(gaps) if not extra[gap] for option in _options(rest, extra, gap)]
        best = min(options, key=lambda option: float(rest.seconds(option)), default=extra)
        if rest.seconds(best) >= rest.seconds(extra):
            break
        extra = best
    return [float(size) for size in extra]


def _options(rest: Rest, extra: Floats, gap: int) -> list[Floats]:
    """Return what a gap could take in: all that is there, or as much as some degree hides."""
    model = rest.all_reduce
    free = (rest.left_bytes - np.cumsum(extra))[gap:].min()  # gaps behind must still find what they take
    spare_s = rest.floor_s[gap] - rest.busy_s[gap] - rest.filled_s[gap]
    hidden = (spare_s - model.alpha_s) / model.beta_s_per_byte
    sizes = {float(size) for size in hidden if 0 < size < free} | ({float(free)} if free > 0 else set())
    options = []
    for size in sorted(sizes):
        option = extra.copy()
        option[gap] = size
        options.append(option)
    return options


PARTITION_PLANNERS: dict[str, PartitionPlanner] = {
    "fsmoe": adaptive,
    "fsmoe_greedy": adaptive_greedy,
    "fsmoe_idle": idle_only,
    "lina": fixed_chunks,
    "dense": dense_only,
    "tail": everything_at_the_tail,
}


def plan_partition(backward: Backward, planner: str = "fsmoe") -> PlannedPartition:
    """Return the partition of one of PARTITION_PLANNERS, and the backward degrees that suit it best."""
    partition = PARTITION_PLANNERS[planner](backward)
    parts = loaded_parts(backward, partition)
    apart = [exact(part, seconds, backward.degrees) for part, seconds in parts]
    return PlannedPartition(
        partition=partition,
        apart=tuple(each.chunks for each in apart),
        apart_s=sum(each.seconds for each in apart),
        common=common_degree(parts, backward.degrees),
        tail_s=reductions_s(backward, partition, TAIL),
    )


def reductions_s(backward: Backward, partition: Partition, slot: Slot) -> float:
    """Return seconds of all reductions in one gap."""
    return seconds_by_slot(backward, partition).get(slot, 0.0)
