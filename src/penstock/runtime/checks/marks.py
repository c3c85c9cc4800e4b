"""The check that all ranks train the same parameters from the same values, without an exchange of its own.

Every rank adds seven numbers to the sums of the statistics task, weighted so that they cancel where ranks
agree. A rank that froze, replaced or added something by itself is seen before any gradient is reduced.

All ranks must have parameters of the same names and shapes; values are compared between ranks that hold the
same ones: whole parameters between all ranks, a part of a larger parameter between those with the same part,
an expert between its replicas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from penstock.mesh import Axes, Group
from penstock.runtime.errors import ParameterMismatchError
from penstock.topology import Control, Layout

FIELDS = 7
"""A one (to count ranks); names with shapes, and values, of parameters outside experts, then of experts;
whether the rank wishes for another plan, see `checks.wishes`; the step's samples, see `checks.samples`."""
WISH = 5
"""The index of the field that says whether the rank wishes for another plan."""
PIECE = 1 << 20
TOLERANCE = 1e-3
"""Values drawn independently differ by about one; those of one seed on different processors by rounding."""


@dataclass(frozen=True)
class Entry:
    """The facts of one parameter that all ranks must have alike.

    value: the mark of its values when it was taken up. part: whether other ranks hold other parts of a larger
    parameter.
    """

    name: str
    layer: int
    trained: bool
    dtype: str
    shape: tuple[int, ...]
    value: float
    part: bool = False

    @property
    def line(self) -> str:
        """All facts but the values, on one line."""
        return f"{self.layer} {self.name} {self.trained} {self.dtype} {self.shape}"

    def differs(self, other: Entry) -> str | None:
        """Return what is different, in words about self and other; None if nothing is."""
        if self.trained != other.trained:
            return f"is {_state(self.trained)} there and {_state(other.trained)} here"
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return f"is {self.dtype} {list(self.shape)} there and {other.dtype} {list(other.shape)} here"
        if self.layer != other.layer:
            return f"is used by layer {self.layer} there and by layer {other.layer} here"
        if abs(self.value - other.value) > TOLERANCE:
            return "got other values there than here, or was replaced on one of the two only"
        return None


@dataclass(frozen=True)
class Marks:
    """The entries of one rank: those of parameters outside experts, and of experts that have replicas."""

    replicated: tuple[Entry, ...]
    experts: tuple[Entry, ...]

    def numbers(self, layout: Layout) -> list[float]:
        """Return what this rank adds to the sums, [FIELDS]. Exact fields are whole and below 2**53."""
        world, replicas = weight_among(Group.WORLD, layout), weight_among(Group.EXPERT_REPLICAS, layout)
        of_parts = weight_among(Group.DATA, layout) * _values(self.parts)
        return [
            1.0,
            float(world * _digest(self.replicated)),
            world * _values(self.whole) + of_parts,
            float(replicas * _digest(self.experts)),
            replicas * _values(self.experts),
            0.0,
            0.0,
        ]

    @property
    def whole(self) -> tuple[Entry, ...]:
        """The entries of parameters whose values all ranks have alike."""
        return tuple(entry for entry in self.replicated if not entry.part)

    @property
    def parts(self) -> tuple[Entry, ...]:
        """The entries of parts of larger parameters: only ranks with other samples have the same values."""
        return tuple(entry for entry in self.replicated if entry.part)

    @property
    def outlines(self) -> tuple[Entry, ...]:
        """All entries outside experts, without the values of parts."""
        return tuple(replace(entry, value=0.0) if entry.part else entry for entry in self.replicated)


COMPARED: Mapping[str, Axes] = {
    "outlines": Group.WORLD,
    "parts": Group.DATA,
    "experts": Group.EXPERT_REPLICAS,
}
"""By property of `Marks`, the axes along which its entries must be alike."""


def weight_among(axes: Axes, layout: Layout) -> int:
    """Return this rank's weight: equal numbers of a group then add up to 0, and those of two groups do not
    make up for each other."""
    mesh, rank = layout.mesh, layout.rank
    alike = 1 - mesh.size(axes) if mesh.place(rank, axes) == 0 else 1
    return alike * (2 * mesh.group(rank, axes) + 1)


def agree(total: Sequence[float], layout: Layout) -> bool:
    """Return whether the sums over ranks say that all are alike. True where a transport sums nothing."""
    if total[0] != layout.world_size:
        return True
    _, layouts, values, expert_layouts, expert_values, *_ = total
    return layouts == expert_layouts == 0 and abs(values) < TOLERANCE and abs(expert_values) < TOLERANCE


def value_marks(parameters: Sequence[nn.Parameter]) -> list[float]:
    """Return for every parameter the sum of its values over their norm; one wait for the device."""
    if not parameters:
        return []
    with torch.no_grad():
        found = torch.stack([_value_mark(p.detach()) for p in parameters])
    marks: list[float] = torch.nan_to_num(found).tolist()
    return marks


def raise_mismatch(mine: Marks, layout: Layout, control: Control) -> None:
    """Raise ParameterMismatchError that names a parameter. Every rank must call it."""
    everyone = control.gather(mine, "comparing parameters")
    for rank, theirs in enumerate(everyone):
        for kind, axes in COMPARED.items():
            first = layout.mesh.members(rank, axes)[0]
            found = _difference(getattr(theirs, kind), getattr(everyone[first], kind))
            if found is not None:
                raise mismatch(f"on rank {rank} against rank {first}: {found}")
    raise mismatch("they differ in more ways than one message can say")


def mismatch(what: str) -> ParameterMismatchError:
    """Return the error, with what to do."""
    return ParameterMismatchError(
        f"ranks train different parameters: {what}. Freeze, thaw, replace and add parameters on all ranks "
        "before the same step, and give new ones equal values (the same seed on all ranks, or rank 0's "
        "values by torch.distributed.broadcast)."
    )


def _difference(entries: Iterable[Entry], reference: Iterable[Entry]) -> str | None:
    there: Mapping[str, Entry] = {entry.name: entry for entry in entries}
    here: Mapping[str, Entry] = {entry.name: entry for entry in reference}
    for name in (*here, *there):
        if name not in there:
            return f"{name} does not exist there"
        if name not in here:
            return f"{name} exists there only"
        problem = there[name].differs(here[name])
        if problem is not None:
            return f"{name} {problem}"
    return None


def _value_mark(values: Tensor) -> Tensor:
    if values.is_complex():
        values = torch.view_as_real(values)
    # Summed in pieces, since each is converted to float64.
    total = norm = torch.zeros((), dtype=torch.float64, device=values.device)
    for piece in values.reshape(-1).split(PIECE):
        exact = piece.double()
        total, norm = total + exact.sum(), norm + exact.square().sum()
    return total / norm.sqrt().clamp(min=torch.finfo(torch.float64).tiny)


def _digest(entries: Iterable[Entry]) -> int:
    lines = "\n".join(entry.line for entry in entries)
    return int.from_bytes(hashlib.blake2b(lines.encode(), digest_size=4).digest(), "big")


def _values(entries: Iterable[Entry]) -> float:
    """Return the sum of values weighted by name, so that two parameters that have changed places are seen."""
    return sum(entry.value * _weight(entry.name) for entry in entries)


def _weight(name: str) -> float:
    digest = hashlib.blake2b(name.encode(), digest_size=2).digest()
    return 1 + int.from_bytes(digest, "big") / 2**16


def _state(trained: bool) -> str:
    return "trained" if trained else "frozen"
