"""Times an action on all ranks at once, repeatedly, with decisions that all ranks take alike.

Clocks differ by rank: everything that decides how to go on is exchanged first.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import NormalDist, median

import torch

from penstock import __version__
from penstock.cost.cluster_file import Fit, Machine
from penstock.cost.fit import LineFit, fit_line
from penstock.device import device_of
from penstock.topology import Control
from penstock.train.assemble import device_bytes

CONFIDENCE = 0.95
NARROW = 0.05
UNTIMED, IN_A_ROW, BLOCKS = 2, 4, 4
SHORT_S = 0.02
"""Actions that take longer than this in a row are timed in one block per round."""

PURPOSE = "measuring the cluster"
CPU_INFO = Path("/proc/cpuinfo")

GRACE_S = 20.0
"""The least that a file needs may exceed a budget by as much again, or by this many seconds."""

Action = Callable[[], None]
"""An action of all ranks together; it has ended when it returns, on a GPU when the device is idle."""


def ignore(text: str) -> None:
    """Do nothing with a message."""
    del text


@dataclass
class Limits:
    """What ends a measurement, besides its budget.

    Attributes:
        stopped: Returns whether this rank is to measure no more than it must.
        clock: The clock, in seconds, by which budgets are kept.
        overran: Whether a budget was so much exceeded that not even the least was measured; budgets note it.
    """

    stopped: Callable[[], bool] = bool
    clock: Callable[[], float] = time.perf_counter
    overran: bool = False


class Budget:
    """Seconds that are left, as all ranks agree; none once a rank is asked to end.

    Where nothing is left only the least is measured, and `late` ends that, too: a busy machine must not hold
    a run for as long as it likes.
    """

    def __init__(self, control: Control, budget_s: float, limits: Limits | None = None) -> None:
        self.control, self.limits = control, limits or Limits()
        self.clock = self.limits.clock
        self._end_s, self._grace_s = self.clock() + budget_s, max(budget_s, GRACE_S)
        self.left_s = self.agree()

    @property
    def late(self) -> bool:
        """Whether measuring has to end with what there is, as far as ranks have agreed last."""
        late = self.left_s < -self._grace_s
        self.limits.overran |= late
        return late

    def agree(self) -> float:
        """Exchange the remaining seconds, and return those of the rank that has least."""
        self.left_s = min(self.control.gather(self._mine_s, PURPOSE))
        return self.left_s

    def agree_late(self) -> bool:
        """Exchange the remaining seconds, and return whether measuring has to end."""
        self.agree()
        return self.late

    @property
    def _mine_s(self) -> float:
        left_s = self._end_s - self.clock()
        return min(0.0, left_s) if self.limits.stopped() else left_s

    def timed(self, action: Action, blocks: int, device: torch.device) -> list[float]:
        """Return seconds per action, of the slowest rank, for every block; all ranks start together.

        A link that has rested lets a burst pass faster than its rate, and a cold cache is slow: some actions
        run before the clock starts, and a block is a few actions in a row.
        """
        settle = partial(device_of(device).synchronize, device)
        self.control.barrier(PURPOSE)
        for _ in range(UNTIMED):
            action()
        own_s = []
        for _ in range(blocks):
            settle()
            start_s = self.clock()
            for _ in range(IN_A_ROW):
                action()
            settle()
            own_s.append((self.clock() - start_s) / IN_A_ROW)
        everyone = self.control.gather((own_s, self._mine_s), PURPOSE)
        self.left_s = min(left_s for _, left_s in everyone)
        return [max(times) for times in zip(*(times for times, _ in everyone), strict=True)]


@dataclass
class Point:
    """One size of one action: durations of its blocks so far."""

    size: int
    action: Action
    times_s: list[float]

    @property
    def typical_s(self) -> float:
        return median(self.times_s)

    @property
    def doubt(self) -> float:
        """Half width of the median's confidence interval, relative to the median."""
        low_s, high_s = median_interval(self.times_s)
        return (high_s - low_s) / 2 / self.typical_s

    def more(self, budget: Budget, device: torch.device) -> None:
        """Run one more round of blocks."""
        self.times_s += budget.timed(self.action, self._blocks, device)

    @property
    def round_s(self) -> float:
        """Estimated seconds of one more round."""
        return (UNTIMED + IN_A_ROW * self._blocks) * self.typical_s

    @property
    def _blocks(self) -> int:
        return BLOCKS if self.times_s and self.typical_s * IN_A_ROW < SHORT_S else 1


def median_interval(times_s: Sequence[float]) -> tuple[float, float]:
    """Return order statistics that contain the median with 95 %; (0, infinity) if there are too few times."""
    count = len(times_s)
    below = math.floor((count - NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(count)) / 2)
    if below < 0 or count < 6:
        return 0.0, math.inf
    ordered = sorted(times_s)
    return ordered[below], ordered[count - 1 - below]


def measure_sizes(
    make: Callable[[int], Action],
    sizes: Sequence[int],
    budget: Budget,
    share_s: float,
    *,
    device: torch.device,
    least: int = 2,
    longest_s: float = math.inf,
) -> list[tuple[int, float]]:
    """Return (size, typical seconds) of `make(size)` for as many of `sizes` as fit, but at least `least`.

    There are fewer, or none, where the budget is `late`. Time that remains goes to the point with the widest
    confidence interval until all are narrow.

    Args:
        make: Returns the action of a size.
        sizes: The sizes, in the order of how much they tell.
        share_s: Seconds into which they must fit.
        longest_s: Sizes whose action would take longer are left out.
    """
    until_s = budget.left_s - share_s
    points: list[Point] = []
    for size in sizes:
        if budget.late:
            break
        expected_s = 0.0
        if points:  # by the nearest measured size: a larger one takes longer in proportion, a smaller as long
            near = min(points, key=lambda point: abs(math.log(point.size / size)))
            expected_s = near.typical_s * max(1.0, size / near.size)
        fits = (UNTIMED + IN_A_ROW) * expected_s <= budget.left_s - until_s and expected_s <= longest_s
        if len(points) >= least and not fits:
            continue
        points.append(Point(size, make(size), []))
        points[-1].more(budget, device)
    while doubtful := [p for p in points if p.doubt >= NARROW and p.round_s <= budget.left_s - until_s]:
        max(doubtful, key=lambda point: point.doubt).more(budget, device)
    return sorted((point.size, point.typical_s) for point in points)


def fitted(points: Iterable[tuple[float, float]], *, trusted: int = 0) -> tuple[LineFit, Fit]:
    """Return the line through points of a size and seconds, and how well it fits.

    Args:
        trusted: See `fit_line`.
    """
    ordered = sorted(points)
    line = fit_line(ordered, trusted=trusted)
    return line, Fit(r2=line.r2, residual=line.residual, points=tuple(ordered))


# ---- the machine that a cluster file names -----------------------------------------------------------------


def here(device: torch.device) -> Machine:
    """Describe this machine as it is now."""
    return Machine(
        host=platform.node(),
        date=datetime.now(UTC).date().isoformat(),
        processor=_cpu_name() or platform.machine(),
        device=device_of(device).name(device),
        python=platform.python_version(),
        torch=torch.__version__,
        penstock=__version__,
    )


def memory_bytes(control: Control, device: torch.device) -> int:
    """Return the memory in bytes of the rank that has least, on all ranks; all call it together.

    A rank has what is free of its GPU, its part of that, or of what its machine, container or job may use.
    Call it when process groups have been used: communicators of GPUs take memory beside tensors.
    """
    hosts = control.gather(platform.node(), "counting ranks per host")
    sharing = 1 if device_of(device).is_gpu else hosts.count(platform.node())
    return min(control.gather(device_bytes(device, control) // sharing, "comparing memory of ranks"))


def _cpu_name() -> str | None:
    """Return the name of the first processor; None outside Linux, or where it has none."""
    if not CPU_INFO.exists():
        return None
    lines = (line.partition(":") for line in CPU_INFO.read_text(encoding="utf-8").splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == "model name"), None)
