"""The check that all ranks run the same step on the same parameters, without an exchange of its own.

Every rank adds some numbers to the sums of the statistics task, weighted so that they cancel where ranks
agree. A rank that froze, replaced or added something by itself is seen before any gradient is reduced.

All ranks must have parameters of the same names and shapes, and replicas of an expert must be trained alike.
What values they have is compared by `fingerprints.values`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.mesh import Axes, Group
from penstock.runtime.errors import ParameterMismatchError
from penstock.runtime.fingerprints.values import BEGAN, weight_among
from penstock.topology import CommunicationError, Control, Layout

RANKS, PARAMETERS, EXPERTS, REPLAN, TRAINING, LOSS, NEW, CHANGES = range(8)
"""Places of the facts that the host knows: a one (to count ranks); names and shapes of parameters outside
experts, then of experts that have replicas; whether the rank requests for another plan, see
`checks.requests`; whether it trains; the terms of its loss; whether it has taken up new parameters; how often
values were changed in place since the last step."""
FACTS = 8
SAMPLES, SLOPE, VALUES = range(FACTS, FACTS + 3)
"""Places of what the device knows: the step's samples, and the gradient with which the last backward pass
began, see `checks.samples`; values, see `fingerprints.values`."""
FIELDS = FACTS + 3


@dataclass(frozen=True)
class Entry:
    """The facts of one parameter that all ranks must have alike."""

    name: str
    layer: int
    trained: bool
    dtype: str
    shape: tuple[int, ...]

    @property
    def line(self) -> str:
        """All facts on one line."""
        return f"{self.layer} {self.name} {self.trained} {self.dtype} {self.shape}"

    def differs(self, other: Entry) -> str | None:
        """Return what is different, in words about self and other; None if nothing is."""
        if self.trained != other.trained:
            there, here = ("trained", "frozen") if self.trained else ("frozen", "trained")
            return f"is {there} there and {here} here"
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return f"is {self.dtype} {list(self.shape)} there and {other.dtype} {list(other.shape)} here"
        if self.layer != other.layer:
            return f"is used by layer {self.layer} there and by layer {other.layer} here"
        return None


@dataclass(frozen=True)
class Marks:
    """The entries of one rank: those of parameters outside experts, and of experts that have replicas."""

    replicated: tuple[Entry, ...]
    experts: tuple[Entry, ...]

    def numbers(self, layout: Layout) -> tuple[float, float]:
        """Return what this rank adds to the sums of PARAMETERS and EXPERTS, whole and below 2**53."""
        world, edp = weight_among(Group.WORLD, layout), weight_among(Group.EXPERT_DATA, layout)
        return float(world * _digest(self.replicated)), float(edp * _digest(self.experts))


COMPARED: Mapping[str, Axes] = {"replicated": Group.WORLD, "experts": Group.EXPERT_DATA}
"""By property of `Marks`, the axes along which its entries must be alike."""


def check_count(facts: Sequence[float], layout: Layout) -> None:
    """Raise CommunicationError, on all ranks, unless every rank is in the sums once."""
    if facts[RANKS] != layout.world_size:
        raise CommunicationError(
            f"the sums of a step's statistics count {facts[RANKS]:g} ranks, and there are "
            f"{layout.world_size}: what a rank sent was lost or counted twice, so losses and comparisons of "
            "this step are wrong. Look for a fault of the transport; begin again from the last checkpoint"
        )


def agree(facts: Sequence[float]) -> bool:
    """Return whether the sums over ranks say that all have the same parameters."""
    return facts[PARAMETERS] == facts[EXPERTS] == 0


def raise_mismatch(mine: Marks, layout: Layout, control: Control) -> None:
    """Raise ParameterMismatchError that names a parameter. Every rank must call it."""
    everyone = control.gather(mine, "comparing parameters")
    for rank, theirs in enumerate(everyone):
        for kind, axes in COMPARED.items():
            first = layout.mesh.members(rank, axes)[0]
            found = _difference(getattr(theirs, kind), getattr(everyone[first], kind))
            if found is not None:
                raise _mismatch(f"on rank {rank} against rank {first}: {found}")
    raise _mismatch("they differ in more ways than one message can say")


def _mismatch(what: str) -> ParameterMismatchError:
    return ParameterMismatchError(f"ranks train different parameters: {what}. {BEGAN}.")


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


def _digest(entries: Iterable[Entry]) -> int:
    lines = "\n".join(entry.line for entry in entries)
    return int.from_bytes(hashlib.blake2b(lines.encode(), digest_size=4).digest(), "big")
