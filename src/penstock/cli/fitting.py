"""What to change where no plan fits into memory: the fewest options with which one would, by estimates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.config import ConfigError
from penstock.plan import MemoryBudget, Subject
from penstock.plan.candidate import least_memory
from penstock.plan.layouts import layout_sizes
from penstock.words import gib

Changes = Mapping[str, Any]
"""New values of options, by name."""

SAVING: Final[Sequence[Changes]] = (
    {"precision": "bfloat16"},
    {"recompute": "auto"},
    {"zero_stage": "1"},
    {"zero_stage": "2"},
)
"""Changes that keep layout and batch."""

SAID: Final = 3
"""The most changes that are named beside each other."""


@dataclass(frozen=True)
class Fitting:
    """The memory of a step with changed options.

    subject_of: returns the changed step, or raises ConfigError. ends: tells whether the time is over.
    of_study: whether the step has the same samples whatever the layout.
    """

    subject_of: Callable[[Changes], Subject]
    memory: MemoryBudget
    words: Callable[[Changes], str]
    of_study: bool
    ends: Callable[[], bool]
    _known: dict[str, int | None] = field(default_factory=dict)

    def advice(self) -> str:
        """Return what would fit, with its memory, or what needs least."""
        try:
            first = self.subject_of({})
        except ConfigError:
            return ""  # the layout was open, and the given one is impossible
        layouts, batches = list(other_layouts(first, of_study=self.of_study)), list(_batches(first))
        alone = [each for each in (*SAVING, *layouts, *batches) if self._fits(each)]
        if alone:
            return f"It would fit with {', or with '.join(map(self._told, alone[:SAID]))}."
        saving: Changes = {}
        for each in SAVING:
            saving = {**saving, **each} if self._bytes({**saving, **each}) is not None else saving
        together = [{**saving, **layout} for layout in ({}, *layouts)]
        together += [{**each, **batch} for each in together for batch in batches[-1:]]
        possible = [each for each in together if self._bytes(each) is not None]
        for each in possible:
            if self._fits(each):
                return f"It would fit with {self._told(self._needed(each))}."
        if not possible:
            return ""
        least = min(possible, key=lambda each: self._bytes(each) or 0)
        return f"Use more ranks: the nearest to fit is {self._told(least)}."

    def _needed(self, changes: Changes) -> Changes:
        """Return the changes without those that are not needed."""
        for name in changes:
            fewer = {key: value for key, value in changes.items() if key != name}
            if self._fits(fewer):
                return self._needed(fewer)
        return changes

    def _fits(self, changes: Changes) -> bool:
        needed = self._bytes(changes)
        return needed is not None and needed <= self.memory.bytes

    def _told(self, changes: Changes) -> str:
        return f"{self.words(changes)} ({gib(self._bytes(changes) or 0)} per rank)"

    def _bytes(self, changes: Changes) -> int | None:
        """Return the least memory of a rank with these changes; None if they are impossible, or no time."""
        key = self.words(changes)
        if key not in self._known:
            self._known[key] = None if self.ends() else self._estimated(changes)
        return self._known[key]

    def _estimated(self, changes: Changes) -> int | None:
        try:
            subject = self.subject_of(changes)
        except ConfigError:
            return None  # a size does not divide, or this step cannot have it
        problems = (subject.problem,) if subject.sharded is None else (subject.problem, subject.sharded)
        return min(least_memory(each).total_bytes for each in problems)


def other_layouts(subject: Subject, *, of_study: bool) -> Iterator[Changes]:
    """Yield other layouts, with the same samples per step; a study's model has them by itself."""
    work = subject.problem.workload
    own = work.tp_size, work.ep_size, work.etp_size
    for each in layout_sizes(work.world_size, work.devices_per_node, work.num_experts):
        sizes = {"tp_size": each.tp_size, "ep_size": each.ep_size, "etp_size": each.etp_size}
        if tuple(sizes.values()) == own or each.tokens != "split":
            continue
        samples = work.batch * each.tp_size
        if of_study:
            yield sizes
        elif samples % work.tp_size == 0:
            yield sizes if each.tp_size == work.tp_size else {**sizes, "batch": samples // work.tp_size}


def _batches(subject: Subject) -> Iterator[Changes]:
    """Yield smaller batches, halved again and again."""
    batch = subject.problem.batch
    while batch > 1:
        batch //= 2
        yield {"batch": batch}
