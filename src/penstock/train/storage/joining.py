"""Joins tensors of which several ranks have a part, at the rank that writes them.

Parts travel when their tensor's turn comes, so a rank needs memory for one whole tensor. All ranks go through
their tensors in the same order, which is that of the files: otherwise two of them could wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from penstock.mesh import Mesh
from penstock.topology import CommunicationError, Control
from penstock.train.storage.held import Parted
from penstock.train.storage.owned import AnyHeld, HeldShare
from penstock.train.storage.stored import writing_order

PURPOSE = "joining the parts of tensors"


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """A tensor of which this rank has a part. members: the ranks with its parts, in their order."""

    name: str
    held: AnyHeld
    sharding: Parted
    members: tuple[int, ...]
    writer: int


class Joining:
    """The joining of tensors in one save. held: this rank's state."""

    def __init__(self, held: Mapping[str, AnyHeld], mesh: Mesh, control: Control) -> None:
        self._mesh, self._control = mesh, control
        self._parts = {name: each for name, each in held.items() if each.sharding is not None}
        self._shares = any(isinstance(each, HeldShare) for each in held.values())
        self._turns: Iterator[_Turn] = iter(())

    def joins(self, name: str) -> bool:
        """Tell whether this rank has only a part of a tensor."""
        return name in self._parts

    @contextmanager
    def on_behalf_of(self, names: Iterable[str]) -> Iterator[None]:
        """Let this rank write tensors of these names while the context is entered; all ranks enter it.

        Whatever happens inside, the others get the parts for which they wait before the context is left.
        """
        self._turns = iter(self._agree([name for name in names if self.joins(name)]))
        try:
            yield
        except CommunicationError:
            self._turns = iter(())  # a rank is gone, and further turns would only wait for it again
            raise
        finally:
            for turn in self._turns:
                self._serve(turn)

    def take(self, name: str) -> Tensor:
        """Return the whole tensor. Its turn must not have come yet."""
        for turn in self._turns:
            parts = self._serve(turn)
            if turn.name == name:
                return turn.sharding.join(parts)
        raise AssertionError(f"{name} is not this rank's to write, or its turn is over")

    def _serve(self, turn: _Turn) -> list[Tensor]:
        part = turn.held.tensor.detach().cpu()
        return self._control.collect(part, turn.members, turn.writer, PURPOSE)

    def _agree(self, mine: list[str]) -> list[_Turn]:
        """Return all turns in which this rank takes part, as writer or as sender."""
        everyone = self._control.gather(mine, PURPOSE) if self._anywhere else []
        found = []
        for writer, names in enumerate(everyone):
            for name in names:
                held = self._parts.get(name)
                if held is None or held.sharding is None:
                    continue  # an expert of other ranks
                members = self._mesh.members(writer, held.sharding.axes)
                if self._control.rank in members:
                    turn = _Turn(name=name, held=held, sharding=held.sharding, members=members, writer=writer)
                    found.append(turn)
        return sorted(found, key=lambda turn: writing_order(turn.name, turn.held.stand_in.dtype))

    @property
    def _anywhere(self) -> bool:
        """Whether ranks share tensors at all: the same on all ranks, as it depends on mesh and settings."""
        return self._shares or self._mesh.mp_size > 1 or self._mesh.esp_size > 1
