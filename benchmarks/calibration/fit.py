"""Rates and start-ups of the papers' clusters: the likeliest, by the tasks that were measured and by beliefs.

Serial runs do not tell bandwidth from start-up: many pairs price a few sizes equally well. So what is
believed of the class of network, library and device counts as rows do: every row may be off by its noise
and every constant by the factor of its belief, both in logarithms; the sum of squares is made least.
Start-ups that a paper prints are taken as they are. Where no task was measured, beliefs are all there is, or
what a like cluster reaches of its own rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.calibration.hardware import COPIES, HARDWARE, Belief, Hardware
from benchmarks.calibration.tasks import rows
from penstock.cost import ClusterConfig, ClusterFile

DIGITS: Final = 6
"""Significant digits of what is written into the files."""

NARROW: Final = {"A800": 1555e9}
"""Memory's bytes per second where the papers' devices have less than the data sheet's largest."""


@dataclass(frozen=True)
class Fitted:
    """A cluster with the likeliest constants.

    Attributes:
        factors: By constant, the factor within which it is known: one standard deviation.
    """

    file: ClusterFile
    factors: Mapping[str, float]


@cache
def fitted(name: str) -> Fitted:
    """Return the cluster of a paper. Deterministic, so that the shipped files can be made again."""
    hardware = HARDWARE[name]
    wholes, starts = hardware.wholes(), dict(hardware.starts)
    beliefs = {rate: belief for rate, belief in _beliefs(hardware).items() if rate not in starts}
    if not hardware.between[0]:  # one node: nothing leaves it
        for inside, between in (
            ("intra_latency_s", "link_latency_s"),
            ("intra_bytes_per_s", "link_bytes_per_s"),
        ):
            beliefs[between] = beliefs[inside]
    fitted = [row for row in rows() if row.cluster == name and not row.left_out]

    def built(logs: npt.NDArray[np.float64]) -> ClusterFile:
        solution = {
            rate: beliefs[rate].middle * wholes.get(rate, 1.0) * math.exp(log)
            for rate, log in zip(beliefs, logs.tolist(), strict=True)
        }
        return _file(name, hardware, {**starts, **solution})

    def missed(logs: npt.NDArray[np.float64]) -> list[float]:
        file = built(logs)
        of_rows = [math.log(row.predicted_ms(file) / row.measured_ms) / row.noise for row in fitted]
        widths = [math.log(belief.factor) for belief in beliefs.values()]
        return [*of_rows, *(log / width for log, width in zip(logs.tolist(), widths, strict=True))]

    if not fitted:
        file = built(np.zeros(len(beliefs)))
        factors = {rate: belief.factor for rate, belief in beliefs.items()}
        return _described(Fitted(_rounded(file), factors), beliefs)
    from scipy.optimize import least_squares  # half a second that not every process needs

    solution = least_squares(missed, np.zeros(len(beliefs)))
    spread = np.sqrt(np.diag(np.linalg.inv(solution.jac.T @ solution.jac)))
    factors = {rate: math.exp(width) for rate, width in zip(beliefs, spread.tolist(), strict=True)}
    return _described(Fitted(_rounded(built(solution.x)), factors), beliefs)


def _beliefs(hardware: Hardware) -> dict[str, Belief]:
    """Return beliefs by rate, with what a like cluster reaches in the place of those of the class."""
    beliefs = hardware.beliefs()
    if hardware.like:
        lender, wholes = fitted(hardware.like), HARDWARE[hardware.like].wholes()
        for name in hardware.lent:
            middle = getattr(lender.file.rates, name) / wholes.get(name, 1.0)
            beliefs[name] = Belief(middle, lender.factors.get(name, 1.1), hardware.why_like)
    return beliefs


def _file(name: str, hardware: Hardware, rates: Mapping[str, float]) -> ClusterFile:
    memory = NARROW.get(hardware.device, hardware.sheet.memory_gb_per_s * 1e9)
    values = {**rates, "memory_bytes_per_s": COPIES * memory}
    values["link_bytes_per_s"] = min(values["link_bytes_per_s"], hardware.between[1])
    return ClusterFile(
        version=1,
        name=name,
        nodes=hardware.nodes,
        ranks_per_node=hardware.per_node,
        rates=ClusterConfig(**values, link_rate_of="node"),
        memory_bytes=hardware.memory_gib << 30,
        device=hardware.device,
        precision="float32",
        source=f"{hardware.title}.",
    )


def _rounded(file: ClusterFile) -> ClusterFile:
    rates = {name: value for name, value in vars(file.rates).items() if isinstance(value, float)}
    rounded = {name: float(f"{value:.{DIGITS}g}") for name, value in rates.items()}
    return replace(file, rates=file.rates.measured(**rounded))


# ---- in words ----------------------------------------------------------------------------------------------

WORDS: Final = {
    "flops_per_s": "operations per second",
    "task_overhead_s": "overhead of a task",
    "link_latency_s": "start-up between nodes",
    "link_bytes_per_s": "bandwidth between nodes",
    "intra_latency_s": "start-up inside",
    "intra_bytes_per_s": "bandwidth inside",
}


@dataclass(frozen=True)
class Misses:
    """How far some rows are from their prices, as parts of what was measured."""

    errors: tuple[float, ...]

    @property
    def words(self) -> str:
        """The least, the median and the most of them as text."""
        if not self.errors:
            return "none"
        low, middle, high = (100 * f(self.errors) for f in (min, median, max))
        if len(self.errors) == 1:
            return f"1 row, {low:+.0f} %"
        return f"{len(self.errors)} rows, {low:+.0f} to {high:+.0f} %, median {middle:+.0f} %"


def misses(file: ClusterFile, *, left_out: bool = False) -> Misses:
    """Return what the file's prices miss: of the rows that it is fitted to, or of those that are left out."""
    tasks = [row for row in rows() if row.cluster == file.name and bool(row.left_out) is left_out]
    return Misses(tuple(row.predicted_ms(file) / row.measured_ms - 1 for row in tasks))


def _described(found: Fitted, beliefs: Mapping[str, Belief]) -> Fitted:
    """Return the cluster with its source: what is published, fitted, lent and assumed, and what it misses."""
    file, hardware = found.file, HARDWARE[found.file.name]
    deviations = ", ".join(f"{WORDS[rate]} x{factor:.2f}" for rate, factor in found.factors.items())
    parts = [file.source, f"Published: {hardware.published}."]
    errors = misses(file)
    if errors.errors:
        parts.append(
            f"Likeliest by {len(errors.errors)} tasks that the study timed and by what is believed of the "
            f"class of its links and programs. One standard deviation: {deviations}."
        )
    else:
        parts.append("No time of a task of this cluster is published, so nothing is fitted.")
        if hardware.like:
            lent = ", ".join(WORDS[rate] for rate in hardware.lent)
            parts.append(f"{hardware.like} lends its shares of peak rates ({hardware.why_like}): {lent}.")
        parts.append(f"One standard deviation: {deviations}.")
    if hardware.starts:
        parts.append(
            "Start-ups are those of the study's linear models of all-to-all, all-gather and products."
        )
    assumed = [
        f"{WORDS[rate]} ({belief.why})"
        for rate, belief in beliefs.items()
        if not errors.errors and rate not in hardware.lent
    ]
    copies = "copies at half of the memory's rate, since every byte is read and written"
    parts.append(f"Assumed: {', '.join([*assumed, copies])}.")
    if errors.errors:
        others = misses(file, left_out=True)
        parts.append(f"Errors of these constants: {errors.words}; tasks left out: {others.words}.")
    parts.append(
        "`benchmarks/data/priced_tasks.csv` has every task beside its price, docs/calibration.md what is "
        "held out."
    )
    return replace(found, file=replace(file, source=" ".join(parts)))
