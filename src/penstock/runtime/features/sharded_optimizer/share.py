"""The part of a layer's flat gradients that a rank owns, and the optimiser's state for it.

Every piece that is reduced is cut into nearly equal shares, one for each rank that meets in it. So a share
may have several short runs of a parameter, or none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from penstock.device import Gpu, device_of
from penstock.routing.sizes import part_sizes, split_sizes
from penstock.runtime.buckets import FlatGradients

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Piece:
    """A piece of a flat buffer.

    Attributes:
        start: Where it begins.
        sizes: Of every rank's share, back to back.
    """

    start: int
    sizes: tuple[int, ...]

    @property
    def run(self) -> range:
        """The range of the whole piece in the buffer."""
        return range(self.start, self.start + sum(self.sizes))

    def share(self, place: int) -> range:
        """Return the range, in the buffer, that the rank at `place` of the group owns."""
        begin = self.start + sum(self.sizes[:place])
        return range(begin, begin + self.sizes[place])


@dataclass(frozen=True)
class Run:
    """Consecutive numbers of a parameter in a buffer.

    Attributes:
        first: Place in the parameter.
        place: In the buffer.
    """

    parameter: nn.Parameter
    first: int
    place: int
    length: int

    @property
    def values(self) -> Tensor:
        """The parameter's numbers of this run, flat, to read and to write."""
        return self.parameter.data.view(-1).narrow(0, self.first, self.length)


class Share:
    """This rank's share of one flat buffer: the runs that it owns, and AdamW's state for them, flat.

    Attributes:
        states: By name, as long as all owned runs together. For parameters with fewer than four bytes per
            number they include the weights in float32 (`master`).
        held: Sums of earlier backward passes, where gradients are accumulated.
    """

    def __init__(self, flat: FlatGradients, parts: Sequence[int], owners: int, place: int) -> None:
        self.flat, self.place, self.owners = flat, place, owners
        # Pieces of these relative sizes, each shared by `owners` ranks.
        ends = accumulate(part_sizes(sum(flat.sizes), parts), initial=0)
        self.pieces = tuple(Piece(start, split_sizes(stop - start, owners)) for start, stop in pairwise(ends))
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
        """Return whether a buffer is of the very same parameters, of the same type, device and share."""
        pairs = zip(self.flat.parameters, flat.parameters, strict=False)
        same = self.flat.sizes == flat.sizes and all(mine is other for mine, other in pairs)
        first, kept = flat.parameters[0], self.states[MOMENTS[0]]
        return (
            same and (first.dtype, first.device) == (self.kind, kept.device) and self.flat.share == flat.share
        )

    def within(self, run: range) -> Iterator[Run]:
        """Yield the runs of parameters in a part of the buffer."""
        begin = 0
        for parameter, size in zip(self.flat.parameters, self.flat.sizes, strict=True):
            first, last = max(run.start, begin), min(run.stop, begin + size)
            if first < last:
                yield Run(parameter, first - begin, first, last - first)
            begin += size

    def owned(self, piece: int) -> Tensor:
        """Return the gradients of a piece that this rank sums, in the buffer of the last backward pass."""
        run = self.pieces[piece].share(self.place)
        return self.flat.flat.narrow(0, run.start, len(run))

    def state(self, name: str, piece: int, run: Run) -> Tensor:
        """Return a state's numbers for an owned run."""
        begin = self.places[piece] + run.place - self.pieces[piece].share(self.place).start
        return self.states[name].narrow(0, begin, run.length)

    def rows(self, piece: int) -> Tensor:
        """Return what this rank has added to the gradients of a piece, flat."""
        run = self.pieces[piece].run
        return self.flat.flat.narrow(0, run.start, len(run))

    def take(self, piece: int, total: Tensor) -> None:
        """Keep the sum of what all ranks have added to this rank's part of a piece."""
        mine = self.owned(piece)
        if total.data_ptr() != mine.data_ptr():
            mine.copy_(total)
        if self.flat.share != 1.0:
            mine.mul_(self.flat.share)
        if self.held is not None:
            mine.add_(self.held.narrow(0, self.places[piece], len(mine)))

    def gradient(self, piece: int, run: Run) -> Tensor:
        """Return the sums of an owned run."""
        begin = run.place - self.pieces[piece].share(self.place).start
        return self.owned(piece).narrow(0, begin, run.length)

    def weights(self, piece: int) -> list[Tensor]:
        """Return the numbers of all owned runs that AdamW changes: parameters' own, or copies in float32.

        Where a parameter was changed from outside since the last update, its own numbers replace the copy.
        """
        own, lengths = [run.values for run in self.runs[piece]], [run.length for run in self.runs[piece]]
        if MASTER not in self.states or not own:
            return own
        master, values = self.states[MASTER].narrow(0, self.places[piece], sum(lengths)), torch.cat(own)
        changed = master.to(self.kind) != values
        return list(torch.where(changed, values, master, out=master).split(lengths))

    def begin(self, *, adds: bool) -> None:
        """Prepare for a backward pass.

        Args:
            adds: Put the present sums aside here, for the pass to add to.
        """
        self.held = None
        if adds:
            self.held = torch.cat([self.owned(piece) for piece in range(len(self.pieces))])

    def runs_of(self, parameter: nn.Parameter) -> Iterator[tuple[int, Run]]:
        """Yield every run of a parameter that this rank owns, with the number of its piece."""
        for piece, runs in enumerate(self.runs):
            yield from ((piece, run) for run in runs if run.parameter is parameter)


class ReleasingShare(Share):
    """A share whose sums are all that is kept of gradients.

    A gradient is freed with the last piece that it is in. One to which no task has added is missing: zero.
    """

    def __init__(self, flat: FlatGradients, parts: Sequence[int], owners: int, place: int) -> None:
        super().__init__(flat, parts, owners, place)
        self._sums = torch.zeros(self.places[-1], dtype=self.kind, device=flat.parameters[0].device)
        self._adds = False
        self._left: Counter[nn.Parameter] = Counter()

    def begin(self, *, adds: bool) -> None:
        self._adds = adds
        self._left = Counter(run.parameter for runs in self.spread for run in runs)

    def owned(self, piece: int) -> Tensor:
        """Return this rank's sums of a piece."""
        return self._sums.narrow(0, self.places[piece], self.pieces[piece].sizes[self.place])

    def rows(self, piece: int) -> Tensor:
        parts = list[Tensor]()
        for run in self.spread[piece]:
            gradient = run.parameter.grad
            if gradient is None:
                parts.append(run.parameter.new_zeros(run.length))
            else:
                parts.append(gradient.reshape(-1).narrow(0, run.first, run.length))
        if not parts:  # the buffer has fewer numbers than pieces
            return self._sums[:0]
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def take(self, piece: int, total: Tensor) -> None:
        mine, total = self.owned(piece), total.to(self.kind)
        if self.flat.share != 1.0:
            total = total * self.flat.share
        mine.add_(total) if self._adds else mine.copy_(total)
        for run in self.spread[piece]:
            self._left[run.parameter] -= 1
            if not self._left[run.parameter]:
                parameter, here = run.parameter, device_of(run.parameter)
                if parameter.grad is not None and isinstance(here, Gpu):  # this stream may still read it
                    here.record_stream(parameter.grad, here.current_stream(parameter.device))
                parameter.grad = None
