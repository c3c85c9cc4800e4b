"""What papers say that single tasks took, as rows that a cluster file prices.

The same task is priced by `StepCost`. Iterations of plain expert parallelism are among them, since nothing
overlaps in those: what attention and all-reduce leave of one is experts and all-to-alls. Iterations of
systems that overlap are not: they are to be predicted. No torch.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from penstock.cost import ClusterFile, ProfiledCluster
from penstock.decision import Decision
from penstock.features.build import build_graph
from penstock.graph import Phase, Task
from penstock.ops import Op
from penstock.plan import published_problem
from penstock.plan.subject import Overrides

DATA: Final = Path(__file__).parent.parent / "data"

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
"""Tasks by the words of a row. All-to-all stands for both of a layer's: one alone would leave two thirds of
the card unused."""

TENSORS: Final = 5
"""Messages in which plain expert parallelism sums the gradients of a block: four matrices of attention and
the gate's, each when it is there."""

MODELS: Final = {
    "GPT2-Tiny": "flowmoe/gpt2-tiny",
    "BERT-Large": "flowmoe/bert-large",
    "LLaMA2-MoE": "flowmoe/llama2-layers",
    "DeepSeek-V2-S": "flowmoe/deepseek-v2-layers-s",
    "GPT2-XL": "fsmoe/gpt2-xl",
    "Mixtral-7B": "fsmoe/mixtral-7b-layers",
}
"""What the papers' models are called here."""

OF_TASKS, OF_ITERATIONS = 0.1, 0.2
"""Noise of rows that time one task, and of those that add up the tasks of an iteration and their waits."""

AS_PUBLISHED: Final = Overrides()
LAYER: Final = Overrides(layers=1, batch=4, seq_len=1024)
"""Of FSMoE's table: 4 samples of 1,024 tokens per node."""

LEFT_OUT: Final = {
    ("DeepSeek-V2-S", "attention and gate"): "takes twice as long as four samples of 256 tokens do at the "
    "other models' speed",
    ("DeepSeek-V2-S", "iteration"): "takes twice as long as four samples of 256 tokens do at the other "
    "models' speed",
    ("Mixtral-7B", "all-reduce"): "4 M^2 gradients would not pass the card in that time; grouped-query "
    "attention has 2.5 M^2",
}
"""Rows that tell no rate, and why."""


@dataclass(frozen=True)
class Row:
    """What a paper says that all tasks of a kind took together.

    Attributes:
        what: The kind of task.
        sizes: What differs from the published sizes.
        messages: How many messages each all-reduce takes.
        left_out: Why the row tells no rate; "" if it does.
        noise: Standard deviation of the logarithm, by which prices may be off.
    """

    cluster: str
    model: str
    what: str
    measured_ms: float
    sizes: Overrides = AS_PUBLISHED
    messages: int = 1
    left_out: str = ""
    noise: float = OF_TASKS

    def predicted_ms(self, file: ClusterFile) -> float:
        """Return the sum of these tasks, uncut, one behind the other."""
        problem = published_problem(self.model, file, self.sizes).problem
        cut = problem.cut(Decision(schedule="sequential"))
        cost, kind = problem.cost(Decision(), cut), KINDS[self.what]
        tasks = [task for task in build_graph(cut).tasks if kind(task)]
        sums = filter(KINDS["all-reduce"], tasks) if self.messages > 1 else ()
        cluster, work = ProfiledCluster.build(file), problem.workload
        more_s = sum((self.messages - 1) * cluster.all_reduce(work.span(task.axes)).alpha_s for task in sums)
        return 1e3 * (more_s + sum(float(np.max(cost(task))) for task in tasks))


def table(name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file in `benchmarks/data`, without its comments."""
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


@cache
def rows() -> tuple[Row, ...]:
    """Return what the papers measured of single tasks."""
    return tuple(_rows())


def _rows() -> Iterator[Row]:
    for entry in table("measured_tasks.csv"):
        cluster = f"{entry['paper']}-{entry['cluster'].split(' (')[0]}".lower()
        model = next(name for name in MODELS if entry["setting"].startswith(name))
        what, forward = entry["what"], entry["setting"].endswith("forward")
        of_flowmoe = entry["paper"] == "FlowMoE"
        if not of_flowmoe and what != "all-reduce":
            what += ", forward" if forward else ", backward"
        yield Row(
            cluster,
            MODELS[model],
            what,
            float(entry["ms"]),
            AS_PUBLISHED if of_flowmoe else LAYER,
            TENSORS if of_flowmoe else 1,
            LEFT_OUT.get((model, entry["what"]), ""),
            OF_ITERATIONS if of_flowmoe else OF_TASKS,
        )
