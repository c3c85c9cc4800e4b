"""Who takes part in a comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from penstock.bench import checkout
from penstock.bench.calibrate import Calibration
from penstock.bench.config import BenchConfig
from penstock.bench.contender import Entry
from penstock.bench.scheduled import Scheduled, Stacks, timed
from penstock.topology import Control, Layout


class Field(Protocol):
    """All contenders of one comparison on this rank."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """In the order in which they take turns; the first is the base of all ratios."""
        ...

    @property
    def control(self) -> Control: ...

    @property
    def label(self) -> str | None:
        """What every output says of virtual devices; None for real ones."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What the table ends with."""
        ...

    @property
    def traffic(self) -> Counter[int]:
        """Bytes that the entries on Penstock's transport have sent from here, by receiving rank."""
        ...

    def compute_alone_s(self, number: int) -> float:
        """The computation of step `number` without a network, on all ranks at once."""
        ...

    def close(self) -> None: ...


class ModelField:
    """Real computation on the stacks of one model."""

    label: str | None = None

    def __init__(self, stacks: Stacks, entries: Sequence[Entry], notes: tuple[str, ...] = ()) -> None:
        self.control, self.entries, self.notes = stacks.machinery.control, tuple(entries), notes
        plan = entries[0].plan
        assert plan is not None, "the first entry is a schedule"
        self._stacks, self._alone = stacks, Scheduled(stacks.silent, plan, stacks.batch)

    @property
    def traffic(self) -> Counter[int]:
        return self._stacks.machinery.transports.traffic

    def compute_alone_s(self, number: int) -> float:
        self.control.barrier("starting computation alone")
        return timed(self._alone.step, number)

    def close(self) -> None:
        self._stacks.close()


class RealField(ModelField):
    """The schedules of one model, and other systems with the same weights.

    Where peers take part, `sequential` runs on Gloo's own all-to-all, too: every rival in both columns.
    """

    def __init__(self, config: BenchConfig, layout: Layout) -> None:
        stacks = Stacks(config, layout)
        calibration = Calibration(stacks)
        entries = [calibration.entry(name) for name in config.compare.schedules]
        self._others: list[Entry] = []
        if names := config.compare.peers:
            self._others = checkout.peers(",".join(names)).peer_entries(stacks, entries)
        super().__init__(stacks, [*entries, *self._others])

    def close(self) -> None:
        for entry in self._others:
            entry.contender.close()
        super().close()
