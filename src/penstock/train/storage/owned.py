"""Moments in shares of data-parallel ranks, as a checkpoint has them: whole, by logical name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn

from penstock.mesh import Axes
from penstock.runtime import PipelinedStack, ShardedAdamW
from penstock.runtime.sharded.share import Share
from penstock.sharding import Sharding
from penstock.train.storage.held import Held

MOMENTS = ("exp_avg", "exp_avg_sq")
Split = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
"""Splits a local tensor into logical ones, by their names: every expert has its own."""


@dataclass(frozen=True, kw_only=True)
class Owned:
    """Which numbers of a tensor the ranks along `axes` own.

    shape: of the whole tensor. local: of the part of the parameter that every rank has. runs: by place of the
    owners, in the local tensor. inner: where ranks share the parameter too, which part of it the local tensor
    is.
    """

    axes: Axes
    shape: tuple[int, ...]
    local: tuple[int, ...]
    runs: tuple[tuple[range, ...], ...]
    place: int
    inner: Sharding | None

    @property
    def longest(self) -> int:
        """Largest count of numbers that any rank owns."""
        return max(sum(map(len, runs)) for runs in self.runs)

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's numbers of a whole tensor, flat."""
        flat = (whole if self.inner is None else self.inner.part(whole)).reshape(-1)
        return torch.cat([flat[:0], *(flat[run.start : run.stop] for run in self.runs[self.place])])

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor made of the parts of all ranks, in the order of their places."""
        if self.inner is None:
            return self._joined(parts)
        count = self.inner.count  # the ranks that share the parameter stand next to each other
        return self.inner.join([self._joined(parts[i::count]) for i in range(count)])

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        found = parts[0].new_empty(prod(self.local))
        for runs, part in zip(self.runs, parts, strict=True):
            begin = 0
            for run in runs:
                found[run.start : run.stop] = part[begin : begin + len(run)]
                begin += len(run)
        return found.view(self.local)


@dataclass(frozen=True)
class HeldShare:
    """This rank's own numbers of a tensor of the run's state. views: the runs, to read and to write."""

    views: tuple[Tensor, ...]
    sharding: Owned

    @property
    def tensor(self) -> Tensor:
        """The numbers, followed by zeros, since all ranks send equally many."""
        found = self.views[0].new_zeros(self.sharding.longest)
        flat = torch.cat(self.views)
        found[: len(flat)] = flat
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.sharding.shape

    @property
    def stand_in(self) -> Tensor:
        """See `Held.stand_in`."""
        return torch.empty((), dtype=self.views[0].dtype).expand(self.shape)

    def fill(self, whole: Tensor) -> None:
        """Copy this rank's numbers from the whole tensor."""
        parts = self.sharding.part(whole).split([len(view) for view in self.views])
        for view, part in zip(self.views, parts, strict=True):
            view.copy_(part)


AnyHeld = Held | HeldShare


class MomentsOf(Protocol):
    """The optimiser's state, as part of a run's state."""

    def settle(self) -> None:
        """Prepare the state to be looked at; all ranks call it."""
        ...

    def held(
        self, name: str, parameter: nn.Parameter, sharding: Sharding | None, split: Split
    ) -> Iterator[tuple[str, AnyHeld]]:
        """Yield the state of a parameter, by logical name."""
        ...


class WholeMoments:
    """Moments of torch's optimiser: every rank has the moments of all parameters that it holds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def settle(self) -> None:
        """Do nothing: no work is pending."""

    def held(
        self, name: str, parameter: nn.Parameter, sharding: Sharding | None, split: Split
    ) -> Iterator[tuple[str, AnyHeld]]:
        moments = self._optimizer.state.get(parameter)
        if not moments:  # a frozen parameter has none
            return
        yield f"optimizer.{name}.step", Held(moments["step"])
        for moment in MOMENTS:
            for logical, part in split(f"optimizer.{name}.{moment}", moments[moment]):
                yield logical, Held(part, sharding)


class ShareMoments:
    """Moments of a sharded optimiser."""

    def __init__(self, stack: PipelinedStack, optimizer: ShardedAdamW) -> None:
        self._stack, self._optimizer = stack, optimizer

    def settle(self) -> None:
        """Gather parameters that are still to be gathered, and deal shares as the next step will."""
        self._optimizer.flush()
        self._stack.settle()

    def held(
        self, name: str, parameter: nn.Parameter, sharding: Sharding | None, split: Split
    ) -> Iterator[tuple[str, AnyHeld]]:
        updates = self._optimizer.updates
        found = updates.share_of(parameter)
        if found is None:  # a frozen parameter has none
            return
        axes, share = found
        yield f"optimizer.{name}.step", Held(updates.steps[parameter])
        for state in share.states:
            for logical, part in split(f"optimizer.{name}.{state}", parameter.data):
                yield logical, _held_share(share, state, parameter, part, (axes, sharding))


def _held_share(
    share: Share, state: str, parameter: nn.Parameter, part: Tensor, where: tuple[Axes, Sharding | None]
) -> HeldShare:
    """Return this rank's share of one logical tensor's state.

    part: the logical tensor's view of the parameter, which is contiguous.
    """
    assert part.is_contiguous(), "experts are stacked"
    first = part.storage_offset() - parameter.data.storage_offset()
    mine = range(first, first + part.numel())
    axes, inner = where
    owned = Owned(
        axes=axes if inner is None else (*axes, *(axis for axis in inner.axes if axis not in axes)),
        shape=tuple(part.shape) if inner is None else inner.shape,
        local=tuple(part.shape),
        runs=tuple(tuple(_within(run, mine) for run in runs) for runs in share.everyones(parameter)),
        place=share.place,
        inner=inner,
    )
    views = [share.states[state][:0]]
    for piece, run in share.runs_of(parameter):
        found, begin = share.state(state, piece, run), mine.start - run.first
        views.append(found[max(begin, 0) : max(begin + len(mine), 0)])
    return HeldShare(tuple(views), owned)


def _within(run: range, mine: range) -> range:
    """Return the part of a run that lies in `mine`, counted from the beginning of `mine`."""
    first, last = max(run.start, mine.start), min(run.stop, mine.stop)
    return range(first - mine.start, max(first, last) - mine.start)
