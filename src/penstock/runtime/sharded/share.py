"""Which part of a layer's flat gradients a rank owns, and the optimiser's state for it.

Every piece that is reduced is cut into nearly equal shares, one for each rank that meets in it. So a share of
a parameter may be several short runs of it, or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from penstock.cost.workload import part_sizes, split_sizes
from penstock.runtime.gradients.buckets import FlatGradients

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Piece:
    """A piece of a flat buffer. start: where it begins. sizes: of every rank's share, back to back."""

    start: int
    sizes: tuple[int, ...]

    @property
    def run(self) -> range:
        """All of it, in the buffer."""
        return range(self.start, self.start + sum(self.sizes))

    def share(self, place: int) -> range:
        """What the rank at a place of the group owns of it, in the buffer."""
        begin = self.start + sum(self.sizes[:place])
        return range(begin, begin + self.sizes[place])


def cut_into(length: int, parts: Sequence[int], owners: int) -> tuple[Piece, ...]:
    """A buffer in pieces of these relative sizes, each shared by so many ranks."""
    ends = accumulate(part_sizes(length, parts), initial=0)
    return tuple(Piece(start, split_sizes(stop - start, owners)) for start, stop in pairwise(ends))


@dataclass(frozen=True)
class Run:
    """Numbers of a parameter that stand together in a buffer. first: in it; place: in the buffer."""

    parameter: nn.Parameter
    first: int
    place: int
    length: int

    @property
    def values(self) -> Tensor:
        """These numbers of the parameter, flat, to read and to write."""
        return self.parameter.data.view(-1).narrow(0, self.first, self.length)


class Share:
    """This rank's share of one flat buffer: the runs that it owns, and AdamW's state for them, flat.

    states: by name, as long as all owned runs together. Numbers of fewer than four bytes have their weights
    here in float32, too (`master`). held: sums of earlier backward passes, where gradients are accumulated.
    """

    def __init__(self, flat: FlatGradients, parts: Sequence[int], owners: int, place: int) -> None:
        self.flat, self.place, self.owners = flat, place, owners
        self.pieces = cut_into(sum(flat.sizes), parts, owners)
        self.runs = tuple(tuple(self.within(piece.share(place))) for piece in self.pieces)
        self.spread = tuple(tuple(self.within(piece.run)) for piece in self.pieces)
        self.places = tuple(accumulate((piece.sizes[place] for piece in self.pieces), initial=0))
        self.kind = flat.parameters[0].dtype
        self.wide = torch.promote_types(self.kind, torch.float32)
        names = MOMENTS if self.wide == self.kind else (*MOMENTS, MASTER)
        device = flat.parameters[0].device
        self.states = {n: torch.zeros(self.places[-1], dtype=self.wide, device=device) for n in names}
        self.held: Tensor | None = None

    def is_of(self, flat: FlatGradients) -> bool:
        """Whether a buffer is of the very same numbers."""
        pairs = zip(self.flat.parameters, flat.parameters, strict=False)
        same = self.flat.sizes == flat.sizes and all(mine is other for mine, other in pairs)
        first, kept = flat.parameters[0], self.states[MOMENTS[0]]
        return (
            same and (first.dtype, first.device) == (self.kind, kept.device) and self.flat.share == flat.share
        )

    def within(self, run: range) -> Iterator[Run]:
        """What parameters have of a part of the buffer."""
        begin = 0
        for parameter, size in zip(self.flat.parameters, self.flat.sizes, strict=True):
            first, last = max(run.start, begin), min(run.stop, begin + size)
            if first < last:
                yield Run(parameter, first - begin, first, last - first)
            begin += size

    def owned(self, piece: int) -> Tensor:
        """The gradients of a piece that are this rank's to sum, in the buffer of the last backward pass."""
        run = self.pieces[piece].share(self.place)
        return self.flat.flat.narrow(0, run.start, len(run))

    def state(self, name: str, piece: int, run: Run) -> Tensor:
        """A state's numbers for an owned run."""
        begin = self.places[piece] + run.place - self.pieces[piece].share(self.place).start
        return self.states[name].narrow(0, begin, run.length)

    def gradient(self, run: Run) -> Tensor:
        """The gradients of a run, in the buffer."""
        return self.flat.flat.narrow(0, run.place, run.length)

    def weights(self, piece: int, run: Run) -> Tensor:
        """What AdamW changes: the parameter's own numbers, or those here that it has in float32.

        Where the parameter was changed from outside since the last update, its own numbers are taken.
        """
        if MASTER not in self.states:
            return run.values
        master = self.state(MASTER, piece, run)
        changed = master.to(self.kind) != run.values
        return master.copy_(torch.where(changed, run.values.to(self.wide), master))

    def keep(self) -> None:
        """Put aside what this rank owns of the sums, before the buffer is used for the next pass."""
        self.held = torch.cat([self.owned(piece) for piece in range(len(self.pieces))])

    def held_of(self, piece: int) -> Tensor | None:
        """What was put aside of a piece."""
        if self.held is None:
            return None
        return self.held.narrow(0, self.places[piece], self.pieces[piece].sizes[self.place])

    def runs_of(self, parameter: nn.Parameter) -> Iterator[tuple[int, Run]]:
        """Every run of a parameter that this rank owns, with the number of its piece."""
        for piece, runs in enumerate(self.runs):
            yield from ((piece, run) for run in runs if run.parameter is parameter)

    def everyones(self, parameter: nn.Parameter) -> list[list[range]]:
        """For every rank of the group what it owns of a parameter, in the parameter's order."""
        return [
            [
                range(run.first, run.first + run.length)
                for piece in self.pieces
                for run in self.within(piece.share(place))
                if run.parameter is parameter
            ]
            for place in range(self.owners)
        ]
