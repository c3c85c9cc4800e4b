"""Bounds of the rows of every expert from earlier steps, so that a step's sizes are known before its routing.

A step whose rows are bounded (`penstock.moe.permute.slots`) exchanges no counts. The most rows that any rank
wanted in any microbatch travel behind the sums of the step, and are read when the forward half has ended or
backward has been issued. Where they exceed the bounds, all ranks know it, and run the step again, counted.
Shapes: Y MoE layers, N positions of a layer, X positions of all layers, layer by layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch

from penstock.apportion import Counts
from penstock.mesh import Axes
from penstock.moe import MoELayer
from penstock.moe.permute.slots import BoundedPermutation, Bounds
from penstock.runtime.handlers import BySum, Counted, StepBounds
from penstock.runtime.transport import HostCounts, Transport

STEPS_KEPT = 32
"""Steps whose loads decide on bounds."""
MULTIPLE = 8
"""Bounds are multiples of this: they change seldom, and so do the sizes of tensors."""


class RowBounds:
    """The bounds of a stack's layers, from the loads of its last steps; all ranks have the same.

    Attributes:
        repeats: Training steps that ran again because a rank wanted more rows than it had.
        repeats_steps: Whether steps may run again.
        late: Whether the host issues backward before it learns that a step must run again. Otherwise it waits
            for the end of forward to learn that. The loss of a step that learns it late must not be read
            before backward.
    """

    repeats_steps = True

    def __init__(self, orders: Sequence[BoundedPermutation]) -> None:
        self.orders, self.repeats, self.late = orders, 0, False
        self.histories: dict[Passes, History] = {}

    def of_step(self, microbatches: int, *, training: bool, counted: bool = False) -> StepBounds:
        """Return the bounds of the next step.

        Args:
            counted: Whether the step has no bounds, as the first one with that many microbatches.
        """
        return BoundedStep(self, Passes(microbatches, training), counted=counted)

    def history(self, passes: Passes) -> History:
        """Return what passes of this kind have wanted."""
        return self.histories.setdefault(passes, History(self.orders))


class Passes(NamedTuple):
    """Passes whose rows are bounded by one another's.

    Plans of other numbers of microbatches are tried between steps. Evaluations have bounds of their own: how
    training rounds must not depend on when they are run.
    """

    microbatches: int
    training: bool


class History:
    """What the last steps have wanted, and the bounds that follow.

    Attributes:
        wanted_X: The rows that each kept step wanted, [X], the oldest first; X counts the positions of all
            MoE layers.
        bounds: The bounds of every MoE layer; () before the first step.
        rows_X: The same bounds in one array.
    """

    def __init__(self, orders: Sequence[BoundedPermutation]) -> None:
        positions_Y = [order.num_experts for order in orders]
        self._factor_X = np.repeat([order.factor for order in orders], positions_Y)
        self._cuts = np.cumsum(positions_Y)[:-1]
        self.wanted_X: deque[Counts] = deque(maxlen=STEPS_KEPT)
        self.bounds: tuple[Bounds, ...] = ()
        self.rows_X: Counts = np.zeros(sum(positions_Y), dtype=np.int64)

    def add(self, wanted_X: Counts) -> None:
        """Add what a step wanted; the bounds of the next ones follow from the largest that is known."""
        self.wanted_X.append(wanted_X)
        least_X = np.ceil(np.max(self.wanted_X, axis=0) * self._factor_X / MULTIPLE)
        self.use((np.maximum(least_X, 1) * MULTIPLE).astype(np.int64))

    def use(self, rows_X: Counts) -> None:
        """Bound the rows of the next steps by these; the same on all ranks."""
        if not self.bounds or not np.array_equal(rows_X, self.rows_X):
            self.rows_X = rows_X
            self.bounds = tuple(Bounds(rows_N.tolist()) for rows_N in np.split(rows_X, self._cuts))


class BoundedStep(StepBounds):
    """The bounds of one step of a stack.

    Args:
        counted: Whether rows are counted, and have no bounds.
    """

    def __init__(self, owner: RowBounds, passes: Passes, *, counted: bool) -> None:
        self._owner, self._training = owner, passes.training
        self._history = history = owner.history(passes)
        self._bounds = () if counted else history.bounds
        self._rows_X = history.rows_X
        self._wanted: HostCounts | None = None
        self._exceeded = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as orders:
            for place, order in enumerate(self._owner.orders):
                orders.enter_context(order.bounded(self._bounds[place] if self._bounds else None))
            yield

    def tell(self, sums: BySum, transport: Transport, axes: Axes) -> None:
        most_N = []
        for microbatches in sums.values():
            wanted = [each.wanted_N for each in microbatches if each.wanted_N is not None]
            assert len(wanted) == len(microbatches), "orders of these layers count what they want"
            most_N.append(torch.stack(wanted).amax(dim=0))
        wanted_X = torch.cat(most_N)
        transport.maximum(wanted_X, axes)
        self._wanted = HostCounts(wanted_X)

    def exceeded(self) -> bool:
        if self._wanted is not None:
            wanted_X, self._wanted = self._wanted.numbers.copy(), None
            self._exceeded = bool(self._bounds) and bool((wanted_X > self._rows_X).any())
            if self._exceeded:  # behind rows that were left out gates had other tokens than they should have
                self._owner.repeats += self._training
            else:
                self._history.add(wanted_X)
        return self._exceeded


def bounds_of(layers: Sequence[MoELayer | None]) -> Counted | RowBounds:
    """Return how the rows of a stack's layers are sized.

    Raises:
        ValueError: If some layers bound their rows and others do not.
    """
    orders = [layer.permutation for layer in layers if layer is not None]
    bounded = [order for order in orders if isinstance(order, BoundedPermutation)]
    if not bounded:
        return Counted()
    if len(bounded) < len(orders):
        raise ValueError(
            f"{len(bounded)} of {len(orders)} MoE layers bound their rows by those of earlier steps "
            "(BoundedPermutation, moe.bound_factor): let all of them do so, or none"
        )
    return RowBounds(bounded)
