"""What `penstock plan` prints: the step, the plan in five lines, and how the next ones compare."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.plan import Candidate, Explanation, FoundPlan, PlanFile, Subject
from penstock.plan.words import change, cut_cells, gib, milliseconds
from penstock.schedule import Penstock

LABEL_WIDTH = 9
HEAD = ("", "schedule", "dispatch", "order", "R", "chunks", "all-reduce", "step", "", "bound", "memory")
LEFT = 4
"""Columns with words; the rest are numbers, aligned to the right."""

LEGEND = "R: microbatches; chunks: forward/backward; bound: what no order of the same tasks beats"
RULES = {"search": "searched", "critical_path": "longest path", "all_to_all_first": "all-to-all first"}


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A search that has ended. seconds: what it took; saved: where the plan was written."""

    subject: Subject
    found: FoundPlan
    explanation: Explanation
    seconds: float
    saved: str | None = None

    def to_text(self, width: int) -> str:
        """For a terminal."""
        candidates = (self.found.best, *self.found.others)
        dispatches = len(self.subject.problem.dispatches) > 1
        parts = [
            heading(self.subject, width),
            "\n".join(_wrapped(line, width) for line in self.explanation.lines),
            _table(candidates, dispatches=dispatches),
            _wrapped("Search   " + self._search(), width),
        ]
        return "\n\n".join(parts) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        subject, found = self.subject, self.found
        file = PlanFile.of(
            subject.problem,
            found.best,
            model=subject.title,
            cluster=subject.cluster_name,
            search=found.searched,
        ).to_dict()
        del file["schedule"]
        return {
            **file,
            "why": self.explanation.to_dict(),
            "notes": list(subject.notes),
            "others": [_plain(candidate) for candidate in found.others],
            "complete": found.searched.complete,
            "search_s": self.seconds,
            "saved": self.saved,
        }

    def _search(self) -> str:
        saved = "" if self.saved is None else f"; saved to {self.saved}"
        return f"{self.found.searched.words}; {self.seconds:.1f} s{saved}"


def saved_plan(file: PlanFile, name: str, width: int) -> str:
    """A plan file for people."""
    sizes, order = file.sizes, "as saved" if file.schedule is not None else "to be made anew"
    lines = [
        f"{name}: {file.model} on {file.cluster}",
        f"step     {sizes.layers} layers, {sizes.batch_per_rank} x {sizes.seq_len} tokens, "
        f"hidden {sizes.hidden_size}, {sizes.num_experts} experts, {sizes.ranks} x {sizes.shard_size} ranks",
        f"order    {order}",
        *file.why,
    ]
    return "\n".join(_wrapped(line, width) for line in lines) + "\n"


def heading(subject: Subject, width: int) -> str:
    """What the plan is for."""
    lines = [
        f"{subject.title} on {subject.cluster_name}",
        f"step     {subject.step}",
        f"ranks    {subject.ranks}",
    ]
    lines += [f"note     {note}" for note in subject.notes]
    return "\n".join(_wrapped(line, width) for line in lines)


def _plain(candidate: Candidate) -> dict[str, Any]:
    choice = candidate.choice
    return {
        "schedule": choice.schedule,
        "microbatches": choice.microbatches,
        "chunks": choice.chunks,
        "backward_chunks": choice.backward_chunks,
        "all_reduce_chunk_bytes": choice.all_reduce_chunk_bytes,
        "dispatch": choice.dispatch,
        "priority": choice.priority,
        "predicted_s": candidate.predicted_s,
        "lower_bound_s": candidate.bound_s,
        "memory_bytes": candidate.memory_bytes,
    }


def _table(candidates: Sequence[Candidate], *, dispatches: bool) -> str:
    """A row per plan, the best first."""
    best_s = candidates[0].predicted_s
    rows = [HEAD, *(_row(candidate, best_s) for candidate in candidates)]
    shown = [column for column, name in enumerate(HEAD) if dispatches or name != "dispatch"]
    widths = {column: max(len(row[column]) for row in rows) for column in shown}
    return "\n".join([*("  ".join(_cells(row, widths)).rstrip() for row in rows), "   " + LEGEND])


def _cells(row: Sequence[str], widths: dict[int, int]) -> Iterator[str]:
    for column, width in widths.items():
        yield row[column].ljust(width) if column < LEFT else row[column].rjust(width)


def _row(candidate: Candidate, best_s: float) -> tuple[str, ...]:
    choice, first = candidate.choice, candidate.predicted_s == best_s
    return (
        "→" if first else "",
        choice.schedule,
        choice.dispatch.replace("_", " "),
        RULES[choice.priority] if choice.schedule == Penstock.name else "its own",
        *cut_cells(choice),
        milliseconds(candidate.predicted_s),
        "" if first else change(candidate.predicted_s, best_s),
        milliseconds(candidate.bound_s),
        gib(candidate.memory_bytes),
    )


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(
        text, width, subsequent_indent=" " * LABEL_WIDTH, break_on_hyphens=False, break_long_words=False
    )
