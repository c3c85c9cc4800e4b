"""The gap of the backward pass in which each gradient is reduced: FSMoE's adaptive partition.

Everything here is in backward order: the highest layer comes first. A gap takes gradients of layers that come
before its own. `T(R, G)` is `makespan_s`; Section 4 of FSMoE (ASPLOS 2025), with corrected recurrences.

A reduction of several layers' gradients is one task for each of them, with a start-up each, since an executor
reduces the buffer of one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.decision import TAIL, Partition, Portion, Slot
from penstock.decision.partition import Part
from penstock.ops.work import FLOAT32_BYTES
from penstock.plan.published.degree import Backward, GapLayer, Made, MoEPart, idle_s
from penstock.plan.published.spread import Rest, evolved


class Filling:
    """Gradients on their way into gaps: those made first are reduced first."""

    def __init__(self, backward: Backward) -> None:
        self._all_reduce = backward.all_reduce
        self._queue = [[made.layer, made.size_bytes] for made in backward.above]
        self._portions: list[list[Portion]] = [[] for _ in range(backward.num_layers)]

    @property
    def pending_bytes(self) -> int:
        return sum(size for _, size in self._queue)

    def make(self, gradients: Sequence[Made]) -> None:
        self._queue += [[made.layer, made.size_bytes] for made in gradients]

    def fill(self, slot: Slot, spare_s: float) -> float:
        """Put in as much as fits into `spare_s`; return the seconds that are left.

        Args:
            spare_s: The seconds that reductions may take in the gap.
        """
        while self._queue:
            size = self._fitting(spare_s)
            if not size:
                break
            spare_s -= self._all_reduce.seconds(size)
            self.take(slot, size)
        return spare_s

    def take(self, slot: Slot, size_bytes: int) -> None:
        """Put the next `size_bytes` into `slot`, or as many as are left."""
        while size_bytes > 0 and self._queue:
            layer, rest = self._queue[0]
            size = min(rest, size_bytes)
            portions = self._portions[layer]
            joined = portions.pop().size_bytes if portions and portions[-1].slot == slot else 0
            portions.append(Portion(size_bytes=joined + size, slot=slot))  # one for each layer and gap
            self._queue[0][1] -= size
            size_bytes -= size
            if not self._queue[0][1]:
                self._queue.pop(0)

    def partition(self) -> Partition:
        """Return the partition; what is still pending is reduced at the tail."""
        self.take(TAIL, self.pending_bytes)
        return Partition(tuple(map(tuple, self._portions)))

    def _fitting(self, spare_s: float) -> int:
        """Return the bytes of the next layer that fit into `spare_s`; 0 if the start-up alone does not."""
        model, rest = self._all_reduce, self._queue[0][1]
        if model.seconds(rest) <= spare_s:
            return rest
        if spare_s <= model.alpha_s:
            return 0
        size = min(rest, int((spare_s - model.alpha_s) / model.beta_s_per_byte))
        size -= size % FLOAT32_BYTES
        return size if model.seconds(size) <= spare_s else size - FLOAT32_BYTES


# ---- partitions --------------------------------------------------------------------------------------------


def fill_idle(backward: Backward) -> tuple[Filling, list[float], list[int]]:
    """Fill every gap with as much as it hides (step 1; Eq. 3 and 4, g_inv never negative).

    No layer gets longer.

    Returns:
        The gradients in their gaps; by gap, the seconds of reductions in its MoE part; and by gap, the bytes
        that could have been added there beyond those that fitted: what is left when the gap is over.
    """
    filling, reduce_s, left = Filling(backward), [], []
    for gap in backward.gaps:
        spare_s = idle_s(gap.part, backward.degree(gap).chunks)
        reduce_s.append(spare_s - filling.fill(_slot(gap, "moe"), spare_s))
        filling.fill(_slot(gap, "dense"), gap.dense_s)
        left.append(filling.pending_bytes)
        filling.make(gap.made)
    return filling, reduce_s, left


def idle_only(backward: Backward) -> Partition:
    """Return the partition of step 1 alone: what does not fit is reduced at the tail."""
    return fill_idle(backward)[0].partition()


def adaptive(backward: Backward) -> Partition:
    """Return FSMoE's partition: step 1, then the rest in MoE parts by differential evolution (step 2): x_q
    more bytes in that of layer q, at most what is left by then."""
    _, reduce_s, left = fill_idle(backward)
    extra = [0.0] * len(left)
    if any(left):
        extra = list(evolved(Rest.of(backward, reduce_s, left)))
    # Every gap is filled as step 1 did, and `extra` more bytes are put into MoE parts.
    filling = Filling(backward)
    for gap, spare_s, more in zip(backward.gaps, reduce_s, extra, strict=True):
        filling.fill(_slot(gap, "moe"), spare_s)
        filling.take(_slot(gap, "moe"), int(more) // FLOAT32_BYTES * FLOAT32_BYTES)
        filling.fill(_slot(gap, "dense"), gap.dense_s)
        filling.make(gap.made)
    return filling.partition()


def _slot(gap: GapLayer, part: Part) -> Slot:
    return Slot(layer=gap.layer, part=part)


PartitionPlanner = Callable[[Backward], Partition]


def loaded_parts(backward: Backward, partition: Partition) -> list[tuple[MoEPart, float]]:
    """Return every MoE part with the seconds of reductions in it, in backward order."""
    seconds = seconds_by_slot(backward, partition)
    return [(gap.part, seconds.get(_slot(gap, "moe"), 0.0)) for gap in backward.gaps]


def seconds_by_slot(backward: Backward, partition: Partition) -> dict[Slot, float]:
    """Return the seconds of all reductions in every gap that has any."""
    seconds: dict[Slot, float] = {}
    for portion in (portion for portions in partition.portions for portion in portions):
        added_s = backward.all_reduce.seconds(portion.size_bytes)
        seconds[portion.slot] = seconds.get(portion.slot, 0.0) + added_s
    return seconds
