"""What `penstock plan` prints of a plan in pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from penstock.config import to_dict
from penstock.plan import Subject
from penstock.plan.pipeline_search import FoundPipeline
from penstock.plan.stages import PipelinePlan
from penstock.plan.throughput import Throughput
from penstock.report.plan import heading, table
from penstock.words import change, counted, folded, gib, mib, milliseconds

PLANNED_ONLY: Final = "planned only: Penstock does not execute stages yet"


MOST_LISTED: Final = 8
"""The most parts whose layers are listed one by one."""


@dataclass(frozen=True, kw_only=True)
class PipelineReport:
    """A finished search.

    Attributes:
        subject: The whole model on the ranks of one stage.
        found: The best plan, and others beside it.
        node_size: Ranks of a node.
        memory_bytes: What a rank can hold; None = no limit.
        seconds: How long the search took.
        updates: Lines on the choice of the optimiser, where that was open.
        price: The price of a device for an hour; None = not given.
    """

    subject: Subject
    found: FoundPipeline
    node_size: int
    memory_bytes: int | None
    seconds: float
    updates: tuple[str, ...] = ()
    price: float | None = None

    @property
    def throughput(self) -> Throughput:
        """The throughput of the plan that was found."""
        best = self.found.best
        stages = best.pipeline.pipeline_parallel_size
        return Throughput.of_update(self.subject, self._samples, best.update_s, stages, self.price)

    @property
    def _samples(self) -> int:
        """Samples of an update."""
        return self.found.best.pipeline.microbatches * self.subject.problem.workload.samples

    def to_text(self, width: int) -> str:
        """Return the text for a terminal of `width` columns."""
        plans = (self.found.best, *self.found.others)
        stages, ranks = self.found.best.pipeline.pipeline_parallel_size, self.subject.problem.mesh.world_size
        of = f"{stages} stages, each of {self.subject.ranks}"
        parts = [
            heading(self.subject, width, f"{stages * ranks} ranks, {self.node_size} per node; {of}"),
            "\n".join(folded(line, width) for line in self._lines()),
            _table(plans, width),
            f"Search   {self.seconds:.1f} s: {counted(len(plans), 'order')} of microbatches compared",
        ]
        return "\n\n".join(parts) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        return {
            "model": self.subject.title,
            "cluster": self.subject.cluster_name,
            "stages": stages_dict(self.found.best),
            "throughput": self.throughput.to_dict(),
            "updates": list(self.updates),
            "precision": self.subject.precision,
            "why_precision": self.subject.why_precision,
            "notes": [*self.subject.notes, PLANNED_ONLY],
            "others": [stages_dict(plan) for plan in self.found.others],
            "search_s": self.seconds,
            "executable": False,
        }

    def _lines(self) -> Iterator[str]:
        best, tokens = self.found.best, self._samples * self.subject.problem.workload.seq_len
        yield f"Plan     {stages_words(best)}"
        of = f"an update of {self._samples:,} samples ({tokens:,} tokens)"
        apart = f"{milliseconds(best.forward_s)} forward and {milliseconds(best.backward_s)} backward"
        microbatches = (
            f"{counted(best.pipeline.microbatches, 'microbatch', 'es')} of {apart} on the slowest stage"
        )
        microbatches += "" if best.together_s is None else f", {milliseconds(best.together_s)} at once"
        yield f"Time     {milliseconds(best.update_s)} predicted for {of}: {microbatches}"
        yield f"Bubble   {100 * best.run.bubble:.1f} % of an update, in which a stage waits for others"
        if best.link_s:
            beside = ""
            if best.link_s > best.link_alone_s or best.shared_s:
                longer = f", and makes a microbatch {milliseconds(best.shared_s)} longer there"
                beside = (
                    f"; {milliseconds(best.link_alone_s)} alone: it shares the network with the stages' own "
                    f"transfers{longer if best.shared_s else ''}"
                )
            yield f"Links    {milliseconds(best.link_s)} for a microbatch from stage to stage{beside}"
        if best.tied_bytes:
            yield (
                f"Tied     embedding and head are one weight, of which the last stage has a copy: "
                f"{mib(best.tied_bytes)} of gradients meet, {milliseconds(best.tied_s)} an update"
            )
        yield from self.throughput.lines()
        yield f"Memory   {self._memory()}"
        for other in self.found.others[:1]:
            longer = change(other.update_s, best.update_s)
            yield f"Next     {stages_words(other)}; {milliseconds(other.update_s)} ({longer})"
        yield from self.updates
        yield f"Note     {PLANNED_ONLY}"

    def _memory(self) -> str:
        best, stage = self.found.best, self.found.best.largest
        of = "" if self.memory_bytes is None else f" of {gib(self.memory_bytes)}"
        part, size = next(iter(best.memory[stage].parts.items()))
        parts = best.pipeline.virtual_pipeline_parallel_size
        under_way = counted(best.held[stage], "microbatch", "es")
        under_way += f", each in one of {parts} parts," if parts > 1 else ""
        return (
            f"{gib(best.memory_bytes)}{of} per rank of stage {stage}, which needs most (estimated), with "
            f"{under_way} under way; of which {gib(size)} {part}"
        )


def stages_words(plan: PipelinePlan) -> str:
    """Return a plan in stages as text."""
    stages, parts, _ = plan.pipeline.sizes
    of = f" in {parts} parts each, the parts" if parts > 1 else ""
    layers = ", ".join(map(str, plan.layers))  # 12, 13, 13; where there are many: 12, 31 x 13
    if len(plan.layers) > MOST_LISTED:
        runs = ((number, len(list(run))) for number, run in groupby(plan.layers))
        layers = ", ".join(f"{times} x {number}" if times > 1 else str(number) for number, times in runs)
    split = f"{counted(stages, 'stage')}{of} of {layers} layers, {plan.pipeline.words}"
    return f"{split}; each runs {plan.choice.words}"


_TIMES: Final = (
    "update_s",
    "forward_s",
    "backward_s",
    "together_s",
    "link_s",
    "link_alone_s",
    "shared_s",
    "tied_s",
)


def stages_dict(plan: PipelinePlan) -> dict[str, Any]:
    """Return plain data of a plan in stages."""
    pipeline, work = plan.pipeline, plan.problem.workload
    return {
        "pipeline_parallel_size": pipeline.pipeline_parallel_size,
        "virtual_pipeline_parallel_size": pipeline.virtual_pipeline_parallel_size,
        "microbatches": pipeline.microbatches,
        "order": pipeline.words,
        "overlaps": pipeline.overlaps,
        "layers": list(plan.layers),
        "ranks_per_stage": work.world_size,
        "ep_size": work.ep_size,
        "tp_size": work.tp_size,
        "etp_size": work.etp_size,
        "choice": to_dict(plan.choice),
        "plan": stages_words(plan),
        **{name: getattr(plan, name) for name in (*_TIMES, "tied_bytes", "memory_bytes")},
        "bubble": plan.run.bubble,
        "memory_bytes_of_stages": [each.total_bytes for each in plan.memory],
        "microbatches_under_way": list(plan.held),
    }


def _table(plans: Sequence[PipelinePlan], width: int) -> str:
    """Return a row per plan; what does not fit is left out, first decisions in which all plans agree."""
    rows = [_HEAD, *(_row(plan, plans[0]) for plan in plans)]
    return table(rows, left=5, width=width, decisions=(2, 3, 4), then=(6, 4, 2, 3))


_HEAD = ("", "order", "parts", "schedule", "recompute", "update", "", "bubble", "memory")


def _row(plan: PipelinePlan, best: PipelinePlan) -> tuple[str, ...]:
    first = plan is best
    return (
        "→" if first else "",
        plan.pipeline.words.replace("forward and backward ", ""),
        str(plan.pipeline.virtual_pipeline_parallel_size),
        plan.choice.schedule,
        "-" if plan.choice.recompute == "none" else plan.choice.recompute,
        milliseconds(plan.update_s),
        "" if first else change(plan.update_s, best.update_s),
        f"{100 * plan.run.bubble:.1f} %",
        gib(plan.memory_bytes),
    )
