"""`python -m benchmarks.published.refit [FILE ...]`: rates of clusters from tasks that the papers measured.

A row is what a paper says a task took. The same task is priced by `StepCost`, and the rates are those that
miss the rows least, as ratios. Iterations of plain expert parallelism are among them, since nothing overlaps
in those: what attention and all-reduce leave of one is experts and all-to-alls. Iterations of systems that
overlap are not: they are to be predicted. Other rates for these clusters can be given as files. No torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.cost import ClusterConfig, ClusterFile
from penstock.cost.clusters import find_cluster
from penstock.decision import Decision
from penstock.graph import Phase, Task
from penstock.ops import Op
from penstock.plan import published_problem
from penstock.plan.subject import Overrides
from penstock.step import build_graph

DIGITS: Final = 4
"""Significant digits of the rates that are written into the files."""

Kind = Callable[[Task], bool]


def _of(*ops: str, phase: Phase | None = None) -> Kind:
    return lambda task: task.op in ops and phase in (None, task.phase)


OUTSIDE: Final = (Op.EMBED, Op.HEAD, Op.STATISTICS)
"""What the studies' blocks do not have."""

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
KINDS: Final[Mapping[str, Kind]] = {
    "attention and gate": _of(Op.ATTENTION),
    "all-reduce": _of(Op.ALL_REDUCE),
    "iteration": lambda task: task.op not in OUTSIDE,
    "all-to-all, forward": _of(Op.DISPATCH, Op.COMBINE, phase=FORWARD),
    "all-gather, forward": _of(Op.SHARD_GATHER, phase=FORWARD),
    "reduce-scatter, forward": _of(Op.SHARD_SCATTER, phase=FORWARD),
    "experts, forward": _of(Op.EXPERTS, phase=FORWARD),
    "experts, backward": _of(Op.EXPERTS, phase=BACKWARD),
}


AS_PUBLISHED: Final = Overrides()


@dataclass(frozen=True)
class Row:
    """What a paper says that all tasks of a kind took together. left_out: why it tells no rate."""

    cluster: str
    model: str
    what: str
    measured_ms: float
    sizes: Overrides = AS_PUBLISHED
    left_out: str = ""

    def predicted_ms(self, file: ClusterFile) -> float:
        """The sum of these tasks, uncut, one behind the other."""
        problem = published_problem(self.model, file, self.sizes).problem
        cut = problem.cut(Decision(schedule="sequential"))
        cost, kind = problem.cost(Decision(), cut), KINDS[self.what]
        return 1e3 * sum(float(np.max(cost(task))) for task in build_graph(cut).tasks if kind(task))


TOKENS: Final = "takes twice as long as four samples of 256 tokens do at the other models' speed"
GROUPED: Final = "4 M^2 gradients would not pass the card in that time; grouped-query attention has 2.5 M^2"


def _flowmoe(model: str, attention: float, all_reduce: float, iteration: float, odd: str = "") -> list[Row]:
    """The study's table of where the time of plain expert parallelism goes, cluster 1 with 16 devices."""
    cluster = "flowmoe-cluster-1"
    return [
        Row(cluster, model, "attention and gate", attention, left_out=odd),
        Row(cluster, model, "all-reduce", all_reduce),
        Row(cluster, model, "iteration", iteration, left_out=odd),
    ]


def _fsmoe(cluster: str, model: str, milliseconds: Sequence[float], odd: str = "") -> list[Row]:
    """The study's table of the tasks of one layer with 4 samples of 1,024 tokens per node. All-to-all stands
    for both of a layer's: one alone would leave two thirds of the card unused."""
    layer = Overrides(layers=1, batch=4, seq_len=1024)
    whats = (
        "all-to-all, forward",
        "all-gather, forward",
        "reduce-scatter, forward",
        "experts, forward",
        "all-reduce",
        "experts, backward",
    )
    rows = [Row(cluster, model, what, ms, layer) for what, ms in zip(whats, milliseconds, strict=True)]
    return [replace(row, left_out=odd) if row.what == "all-reduce" else row for row in rows]


ROWS: Final = (
    *_flowmoe("flowmoe/gpt2-tiny", 23.5, 32.6, 169.5),
    *_flowmoe("flowmoe/bert-large", 61.9, 98.3, 537.8),
    *_flowmoe("flowmoe/llama2-layers", 308.4, 368.8, 1987.7),
    *_flowmoe("flowmoe/deepseek-v2-layers-s", 870.2, 1247.8, 5843.3, TOKENS),
    *_fsmoe("fsmoe-testbed-a", "fsmoe/gpt2-xl", (6.9, 4.6, 5.4, 3.1, 5.26, 6.1)),
    *_fsmoe("fsmoe-testbed-b", "fsmoe/gpt2-xl", (11.2, 15.5, 15.7, 6.7, 7.3, 13)),
    *_fsmoe("fsmoe-testbed-b", "fsmoe/mixtral-7b-layers", (28.3, 39.6, 40.8, 58.5, 32.1, 119.7), GROUPED),
)

FREE: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "flowmoe-cluster-1": (
        ("flops_per_s",),
        ("task_overhead_s",),
        ("intra_latency_s",),
        ("link_bytes_per_s",),
        ("intra_bytes_per_s",),
    ),
    "fsmoe-testbed-a": (("flops_per_s",), ("link_bytes_per_s",), ("intra_bytes_per_s",)),
    "fsmoe-testbed-b": (("flops_per_s",), ("link_bytes_per_s",), ("intra_bytes_per_s",)),
}
"""Which rates the rows of a cluster tell; those in one bracket are equal, since no row tells them apart."""


def refit(file: ClusterFile) -> ClusterFile:
    """The file with the rates that its rows say; the others stay. Raises KeyError where there are no rows."""
    from scipy.optimize import least_squares  # half a second that not every process needs

    free = FREE[file.name]
    rows = [row for row in ROWS if row.cluster == file.name and not row.left_out]

    def tried(logs: npt.NDArray[np.float64]) -> ClusterFile:
        changes = {
            name: math.exp(log) for names, log in zip(free, logs.tolist(), strict=True) for name in names
        }
        return replace(file, rates=_with(file.rates, changes))

    def missed(logs: npt.NDArray[np.float64]) -> list[float]:
        there = tried(logs)
        return [math.log(row.predicted_ms(there) / row.measured_ms) for row in rows]

    start = [math.log(getattr(file.rates, names[0])) for names in free]
    found = tried(least_squares(missed, start, x_scale=1.0).x)
    rounded = {name: float(f"{getattr(found.rates, name):.{DIGITS}g}") for names in free for name in names}
    return replace(file, rates=_with(file.rates, rounded))


def _with(rates: ClusterConfig, changes: Mapping[str, float]) -> ClusterConfig:
    values = {**vars(rates), **changes}
    return ClusterConfig(**values)


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
        return f"{len(self.errors)} rows, {low:+.0f} to {high:+.0f} %, median {middle:+.0f} %"


def misses(file: ClusterFile, *, fitted: bool) -> Misses:
    """What the file's prices miss: the rows that rates are fitted to, or those that are left out."""
    rows = [row for row in ROWS if row.cluster == file.name and bool(row.left_out) is not fitted]
    return Misses(tuple(row.predicted_ms(file) / row.measured_ms - 1 for row in rows))


def table(file: ClusterFile) -> str:
    """Every row of a cluster as measured and as its file prices it, in Markdown."""
    head = "| model | task | measured ms | priced ms | ratio | |"
    lines = [head, "|---|---|---:|---:|---:|---|"]
    for row in (row for row in ROWS if row.cluster == file.name):
        priced_ms = row.predicted_ms(file)
        ratio, note = priced_ms / row.measured_ms, f"not fitted: {row.left_out}" if row.left_out else ""
        lines.append(
            f"| {row.model} | {row.what} | {row.measured_ms:g} | {priced_ms:.1f} | {ratio:.2f} | {note} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Prints the rates that the rows say, and how well the given or the shipped files price the rows."""
    for name in sys.argv[1:] or FREE:
        file = find_cluster(name)
        rates = refit(file).rates
        fitted = (f"{each} {getattr(rates, each):g}" for names in FREE[file.name] for each in names)
        print(f"{name}: {', '.join(fitted)}\n\n{table(file)}\n")
        for what, is_fitted in (("fitted", True), ("left out", False)):
            print(f"{what}: {misses(file, fitted=is_fitted).words}")
        print()


if __name__ == "__main__":
    main()
