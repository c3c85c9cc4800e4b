"""Shows a run on the screen: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

from penstock.stops import mute
from penstock.train.metrics import StepMetrics
from penstock.words import folded, percent, terminal_width

logger = logging.getLogger(__name__)

SHOWN_STEPS = 10
LEAST_BAR = 10
"""Least width of the bar, in columns."""


class Progress:
    """Shows a run while it goes on, on standard error: standard output belongs to a command's result.

    On a terminal it is one line that changes::

        ━━━━━━━━━━━━━━━━━━━━╺━━━━━ 160/200 loss 1.871  12,345 tokens/s  network hidden 93 %  eta 0:01:12

    Elsewhere, such as in a log file, it is a line every `every` steps, at every evaluation and at the end.
    Where nothing more can be shown (a terminal is closed, a pipe has no reader, a disk is full), the run goes
    on and nothing is shown.

    Args:
        total_steps: Steps of the run, counted from the very first one, also in a run that resumes.
        every: Steps from one line to the next; 0 = none but those of evaluations and the end.
        quiet: Whether to show nothing.
    """

    def __init__(self, total_steps: int, *, every: int = 10, quiet: bool = False) -> None:
        self._total_steps, self._every = total_steps, every
        self._stream = None if quiet else sys.stderr
        self._bar = _bar(total_steps) if self._stream is not None and self._stream.isatty() else None
        self._recent: deque[StepMetrics] = deque(maxlen=SHOWN_STEPS)

    def update(self, metrics: StepMetrics) -> None:
        """Show a step that has ended: its loss, and speed and overlap over the last ten steps."""
        self._recent.append(metrics)
        # Times are averaged: a single step says little about speed.
        newest, count = self._recent[-1], len(self._recent)
        total_s = sum(m.iteration_s for m in self._recent)
        shown = replace(
            newest,
            iteration_s=total_s / count,
            tokens_per_s=sum(m.tokens_per_s * m.iteration_s for m in self._recent) / total_s,
            communication_s=sum(m.communication_s for m in self._recent) / count,
            exposed_communication_s=sum(m.exposed_communication_s for m in self._recent) / count,
        )
        left = self._total_steps - metrics.step
        due = left == 0 or metrics.eval_loss is not None or (self._every and metrics.step % self._every == 0)
        if due:
            description = describe(shown, left * shown.iteration_s)
            logger.debug(f"step {metrics.step}/{self._total_steps}  {description}")
        with self._unless_lost():
            if self._bar is not None:  # the line changes with every step
                (task,) = self._bar.tasks
                width = self._bar.console.width - LEAST_BAR - 2 * len(f" {task.total}")
                description = describe(shown, left * shown.iteration_s, width)
                self._bar.update(task.id, completed=metrics.step, description=description)
            elif due and self._stream is not None:
                head = f"step {metrics.step}/{self._total_steps}  "
                width = terminal_width(self._stream) - len(head)
                description = describe(shown, left * shown.iteration_s, width)
                print(head + description, file=self._stream, flush=True)

    def say(self, message: str) -> None:
        """Show a message that stays, above the line that changes."""
        with self._unless_lost():
            if self._bar is not None:
                console = self._bar.console
                console.print(folded(message, console.width), soft_wrap=True)
            elif self._stream is not None:
                print(folded(message, terminal_width(self._stream)), file=self._stream, flush=True)

    def __enter__(self) -> Self:
        with self._unless_lost():
            if self._bar is not None:
                self._bar.start()
        return self

    def __exit__(self, *failure: object) -> None:
        with self._unless_lost():
            if self._bar is not None:
                self._bar.stop()

    @contextmanager
    def _unless_lost(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._bar = self._stream = None
            with suppress(OSError, ValueError):  # what Python still holds back would be an error at the end
                mute(sys.stderr.fileno())


def describe(metrics: StepMetrics, eta_s: float, width: int = sys.maxsize) -> str:
    """Return the step on one line: loss, speed, share of hidden communication if there is any, time left.

    Args:
        eta_s: Seconds that are left.
        width: Characters that fit. Where the line is longer, the communication is left out first, then the
            speed, then the time left.
    """
    parts = [f"loss {metrics.loss:.3f}"]
    if metrics.eval_loss is not None:
        parts.append(f"held-out loss {metrics.eval_loss:.3f}")
    eta = [f"eta {timedelta(seconds=round(eta_s))}"]
    more = [f"{metrics.tokens_per_s:,.0f} tokens/s"]
    if metrics.communication_s > 0:
        more.append(f"network hidden {percent(metrics.hidden_communication)}")
    while (more or eta) and len("  ".join([*parts, *more, *eta])) > width:
        (more or eta).pop()
    return "  ".join([*parts, *more, *eta])


def _bar(total_steps: int) -> RichProgress:
    """Return the line of a terminal, for one task."""
    bar = RichProgress(
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
        # Markup is off: a message may contain brackets, and they are not styles.
        console=Console(stderr=True, force_terminal=True, markup=False, highlight=False),
        expand=True,
        refresh_per_second=4,  # drawn by a thread that takes time from training
        redirect_stdout=False,  # printed results must not end up on standard error
    )
    bar.add_task("", total=total_steps)
    return bar
