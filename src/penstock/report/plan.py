"""What `penstock plan` prints: the step, the plan in five lines, and how the next ones compare."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config import to_dict
from penstock.decision import Field
from penstock.decision.record import FIELDS
from penstock.plan import Candidate, Explanation, FoundPlan, PlanFile, Subject
from penstock.words import change, gib, milliseconds

LABEL_WIDTH = 9

LEGEND = "R: microbatches; chunks: forward/backward; bound: what no order of the same tasks beats"


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
    return {
        **to_dict(candidate.choice),
        "predicted_s": candidate.predicted_s,
        "lower_bound_s": candidate.bound_s,
        "memory_bytes": candidate.memory_bytes,
    }


def _table(candidates: Sequence[Candidate], *, dispatches: bool) -> str:
    """A row per plan, the best first: what was decided, words to the left and numbers to the right."""
    fields = [each for each in FIELDS.values() if each.cell and (dispatches or each.name != "dispatch")]
    fields.sort(key=lambda each: each.cuts)
    words = 1 + sum(not each.cuts for each in fields)
    head = ("", *(each.head for each in fields), "step", "", "bound", "memory")
    rows = [head, *(_row(candidate, candidates[0].predicted_s, fields) for candidate in candidates)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if column < words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
    return "\n".join([*lines, "   " + LEGEND])


def _row(candidate: Candidate, best_s: float, fields: Sequence[Field]) -> tuple[str, ...]:
    choice, first = candidate.choice, candidate.predicted_s == best_s
    return (
        "→" if first else "",
        *(each.cell(choice) if each.cell and choice.reads(each.name) else each.unread for each in fields),
        milliseconds(candidate.predicted_s),
        "" if first else change(candidate.predicted_s, best_s),
        milliseconds(candidate.bound_s),
        gib(candidate.memory_bytes),
    )


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(
        text, width, subsequent_indent=" " * LABEL_WIDTH, break_on_hyphens=False, break_long_words=False
    )
