"""The searches of one `penstock plan`: their effort, their end, and what they show meanwhile."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from penstock.cli.out import Lines
from penstock.config import ConfigError
from penstock.decision import Decision
from penstock.plan import Problem, Progress, Subject, find_plan
from penstock.plan.candidate import whole_s
from penstock.plan.effort import COMMAND_S, Effort, time_limit
from penstock.plan.optimizers import NEAR, Find, find_updated
from penstock.plan.search import Basis, FoundPlan
from penstock.words import milliseconds

KEPT: Final = 4
"""The number of steps of which the basis is kept: with either optimiser, in two layouts."""

LINE_EVERY_S: Final = 10.0
"""Seconds between lines on progress where standard error is no terminal."""


@dataclass(frozen=True, kw_only=True)
class Searching:
    """What the searches of one command share.

    Attributes:
        memory_bytes: What a rank can hold; None = no limit.
        budget: How much to search; 1.0 is the usual effort.
        progress: Is told how far a search is.
        stopped: Tells whether the searches have been asked to end.
        over: Tells whether their processor time is over.
        bases: What later searches reuse of the steps for which plans were sought last.
    """

    memory_bytes: int | None
    budget: float
    progress: Callable[[Progress], None]
    stopped: Callable[[], bool]
    over: Callable[[], bool]
    bases: list[Basis] = field(default_factory=list)

    def with_budget(self, memory_bytes: int | None, budget: float) -> Searching:
        """Return the same for another plan of the command, with time of its own."""
        over = time_limit(time.process_time, budget, COMMAND_S)
        return replace(self, memory_bytes=memory_bytes, budget=budget, over=over)

    def find(
        self, problem: Problem, starts: tuple[Decision, ...] = (), effort: Effort = "usual"
    ) -> FoundPlan:
        """Return the best plan that is found with this effort.

        Args:
            problem: The step for which a plan is sought.
            starts: Decisions from which the search starts; see `find_plan`.
            effort: How thoroughly to search.
        """
        return find_plan(
            problem,
            memory_bytes=self.memory_bytes,
            progress=self.progress,
            budget=self.budget,
            ends=lambda: self.stopped() or self.over(),
            starts=starts,
            effort=effort,
            basis=self._basis(problem),
        )

    def _basis(self, problem: Problem) -> Basis:
        """Return what other searches for this very step have worked out."""
        for basis in self.bases:
            if basis.given is problem:
                return basis
        del self.bases[: -KEPT + 1]
        self.bases.append(Basis(problem, self.memory_bytes))
        return self.bases[-1]

    def quick(self, problem: Problem, starts: tuple[Decision, ...] = ()) -> FoundPlan:
        """Return a plan that is nearly as good as that of a search in full."""
        return self.find(problem, starts, "quick")


@contextmanager
def searching(memory_bytes: int | None = None, budget: float = 1.0) -> Iterator[Searching]:
    """Yield what searches inside share; the first Ctrl-C ends them."""
    over = time_limit(time.process_time, budget, COMMAND_S)
    with _progress() as progress, _stopped_by_hand() as stopped:
        yield Searching(
            memory_bytes=memory_bytes, budget=budget, progress=progress, stopped=stopped, over=over
        )


@contextmanager
def _stopped_by_hand() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C inside end the search alone, so that what it has found is printed.

    Yields what tells whether there was one. The next Ctrl-C ends the command, as usual.
    """
    interrupts, before = list[int](), signal.getsignal(signal.SIGINT)

    def interrupt(number: int, frame: FrameType | None) -> None:
        del frame
        interrupts.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, before)


Planned = tuple[Subject, FoundPlan, tuple[str, ...]]
"""A subject with what was chosen for it, its plan, and lines on the choice."""


def find_best(subject: Subject, find: Find, quick: Find | None = None) -> Planned:
    """Return the subject with the optimiser and in the layout whose plan is faster.

    The given layout is taken only for a faster plan.

    Args:
        subject: The step and cluster, with the given layout beside the best one where that was open.
        find: Searches in full.
        quick: Searches quickly, for comparisons; None = all searches are in full. See `find_updated`.

    Raises:
        ConfigError: If nothing fits.
    """
    if subject.given is None:
        return _updated(subject, find, quick)
    both: list[Planned] = []
    for candidate in (subject, subject.given):
        try:
            both.append(_updated(candidate, quick or find, None))
        except ConfigError as error:
            refused = error
    if not both:
        raise refused
    if quick is not None:
        both = [_in_full(candidate, find, both) for candidate in both]
    best, *others = sorted(both, key=_seconds)
    lines = list(best[2])
    for other, plan, _ in others:
        which = "the given layout" if other.given is None else "the best layout by quick plans"
        seconds = milliseconds(whole_s(other.problem, plan.best))
        lines.append(f"Layout   {which} takes {seconds} for a whole iteration, by its own search")
    return best[0], best[1], tuple(lines)


def _seconds(planned: Planned) -> float:
    return whole_s(planned[0].problem, planned[1].best)


def _in_full(planned: Planned, find: Find, all_quick: Sequence[Planned]) -> Planned:
    """Return a layout by a search in full, if by quick plans it is nearly as fast as any."""
    subject, quick, lines = planned
    if _seconds(planned) > NEAR * min(map(_seconds, all_quick)):
        return planned
    full = find(subject.problem, subject.starts)
    # Of equal plans that of the full search, which knows more of the others.
    return subject, min(full, quick, key=lambda each: each.best.predicted_s), lines


def _updated(subject: Subject, find: Find, quick: Find | None) -> Planned:
    """Return the subject with the given or chosen optimiser, its plan, and a line on any choice."""
    if subject.sharded is None:
        return subject, find(subject.problem, subject.starts), ()
    problem, plans, line = find_updated(subject.problem, subject.sharded, find, quick, subject.starts)
    return replace(subject, problem=problem), plans, (line,)


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """Show on standard error how far a search is: a bar on a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        lines = Lines(LINE_EVERY_S, begins=False)
        yield lambda step: lines.say(f"planning: {_words(step)}")
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[best]}"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=Console(file=sys.stderr, stderr=True), transient=True) as bar:
        line = bar.add_task("planning", total=None, best="")

        def show(step: Progress) -> None:
            bar.update(line, description=step.stage, completed=step.done, total=step.total, best=_best(step))

        yield show


def _words(step: Progress) -> str:
    best = _best(step)
    return f"{step.stage}, {step.done:,} of {step.total:,}" + (f", {best}" if best else "")


def _best(step: Progress) -> str:
    return "" if step.best_s is None else f"best {milliseconds(step.best_s)}"
