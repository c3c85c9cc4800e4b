"""What `penstock plan` prints: the step, the plan in five lines, and how the next best plans compare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config import to_dict
from penstock.decision import Field
from penstock.decision.record import FIELDS
from penstock.plan import Candidate, Explanation, FoundPlan, PlanFile, Problem, Subject
from penstock.plan.candidate import whole_bound_s, whole_s
from penstock.plan.moving import Weighed
from penstock.plan.predict import interval_s
from penstock.plan.throughput import Throughput
from penstock.words import change, counted, folded, gib, milliseconds, printable

LEGEND = {
    "R": "microbatches",
    "chunks": "forward/backward",
    "bound": "lower bound for any order of the same tasks",
}
"""The meaning of column heads that do not explain themselves."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A finished search.

    Attributes:
        subject: The step and cluster that were planned for.
        found: The best plan, and others beside it.
        explanation: Why the best plan takes as long as it does.
        seconds: How long the search took.
        saved: The file to which the plan was saved; None = it was not.
        price: The price of a device for an hour; None = not given.
        updates: Lines on the choice of the optimiser and on stages, where those were open.
        weighed: The best plan with and without moving, where a routing was given.
        stages: What pipeline stages would bring, as plain data; None = nothing.
    """

    subject: Subject
    found: FoundPlan
    explanation: Explanation
    seconds: float
    saved: str | None = None
    price: float | None = None
    updates: tuple[str, ...] = ()
    weighed: Weighed | None = None
    stages: dict[str, Any] | None = None

    @property
    def throughput(self) -> Throughput:
        """The throughput of the plan that was found."""
        return Throughput.of(self.subject, self.found.best, self.price)

    def to_text(self, width: int) -> str:
        """Return the text for a terminal of `width` columns."""
        candidates = (self.found.best, *self.found.others)
        dispatches = len(self.subject.problem.dispatches) > 1
        plan, time, *others = self.explanation.lines
        why = (plan, time, *self._passes(), *self.throughput.lines(), *others, *self.updates)

        def block(lines: Iterable[str]) -> str:
            return "\n".join(folded(line, width) for line in lines)

        parts = [heading(self.subject, width), block(why), _table(candidates, width, dispatches=dispatches)]
        # What moving would bring with the given routing, and the plan that follows.
        if self.weighed is not None:
            moving = self.weighed.lines or ("Moving   nothing may move: rows have slots of a fixed number",)
            parts.append(block((*moving, self.weighed.verdict)))
        search = [f"Search   {self.seconds:.1f} s: {self.found.searched.words}"]
        search += [] if self.saved is None else [f"Saved    {self.saved}"]
        return "\n\n".join([*parts, block(search)]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        subject, plans = self.subject, self.found
        file = subject.plan_file(plans.best, plans.searched).to_dict()
        del file["schedule"]
        return {
            **file,
            "throughput": self.throughput.to_dict(),
            "why": self.explanation.to_dict(),
            "updates": list(self.updates),
            "moving": None if self.weighed is None else _weighed(self.weighed),
            "stages": self.stages,
            "precision": subject.precision,
            "why_precision": subject.why_precision,
            "notes": list(subject.notes),
            "others": [_plain(subject.problem, candidate) for candidate in plans.others],
            "complete": plans.searched.complete,
            "search_s": self.seconds,
            "saved": self.saved,
        }

    def _passes(self) -> Iterator[str]:
        """Yield a line on accumulated gradients, where there are such."""
        problem, best = self.subject.problem, self.found.best
        if problem.passes > 1:
            work = problem.workload
            samples = problem.passes * work.samples
            of = f"{samples:,} samples ({samples * work.seq_len:,} tokens) for each update"
            whole = milliseconds(whole_s(problem, best))
            yield f"Batch    {of}: {problem.passes} passes, whose gradients are accumulated; {whole}"


def saved_plan(file: PlanFile, name: str, width: int) -> str:
    """Return a plan file as text."""
    kept = "the task order in the file"
    sizes = file.sizes
    shared = [(sizes.tp_size, "attention"), (sizes.etp_size, "every expert")]
    ranks = ", ".join(
        [counted(sizes.ranks, "rank"), *(f"{size} share {what}" for size, what in shared if size > 1)]
    )
    order = kept if file.schedule is not None else "computed when the plan is used"
    lines = [
        f"{name}: {file.model} on {file.cluster}",
        f"step     {counted(sizes.layers, 'layer')}, {sizes.batch_per_rank} x {sizes.seq_len} tokens, "
        f"hidden {sizes.hidden_size}, {counted(sizes.num_experts, 'expert')}, {ranks}",
        f"order    {order}",
        *file.why,
    ]
    return "\n".join(folded(printable(line), width) for line in lines) + "\n"


def heading(subject: Subject, width: int, ranks: str = "") -> str:
    """Return text on what the plan is for.

    Args:
        ranks: How the ranks are used; "" = as the subject says.
    """
    lines = [
        f"{subject.title} on {subject.cluster_name}",
        f"step     {subject.step}",
        f"ranks    {ranks or subject.ranks}",
        f"dtype    {subject.precision}" + (f" ({subject.why_precision})" if subject.why_precision else ""),
    ]
    lines += [f"note     {note}" for note in subject.notes]
    return "\n".join(folded(printable(line), width) for line in lines)


def _plain(problem: Problem, candidate: Candidate) -> dict[str, Any]:
    """Return plain data of a plan for whole steps, as in a plan file."""
    predicted_s = whole_s(problem, candidate)
    return {
        **to_dict(candidate.choice),
        "predicted_s": predicted_s,
        "interval_s": interval_s(problem, predicted_s),
        "lower_bound_s": whole_bound_s(problem, candidate),
        "memory_bytes": candidate.memory_bytes,
    }


def _weighed(weighed: Weighed) -> dict[str, Any]:
    """Return plain data: with the given routing the best plan without moves, and the best of all."""
    plans = {"still": weighed.still, "best": weighed.best}
    plain = {name: _plain(weighed.problem, plan) for name, plan in plans.items()}
    return {"lines": list(weighed.lines), "pays": weighed.moves, **plain}


def _table(candidates: Sequence[Candidate], width: int, *, dispatches: bool) -> str:
    """Return a row per plan, the best first: decisions, words to the left and numbers to the right.

    Where that is wider than `width`, decisions in which all plans agree are left out, then
    memory, bound, change, and decisions from the right.
    """
    choices = [each.choice for each in candidates]
    hidden = {
        name
        for name, field in FIELDS.items()
        if field.may_be_left_out and all(choice.value(name) == field.default for choice in choices)
    }
    hidden |= set() if dispatches else {"dispatch"}
    fields = [each for each in FIELDS.values() if each.cell and each.name not in hidden]
    fields.sort(key=lambda each: each.cuts)
    left = 1 + sum(not each.cuts for each in fields)
    head = ("", *(each.head for each in fields), "step", "", "bound", "memory")
    rows = [head, *(_row(candidate, candidates[0], fields) for candidate in candidates)]
    last = len(head) - 1
    rest = last, last - 1, last - 2, *range(len(fields), 1, -1)
    text = table(rows, left=left, width=width, decisions=range(2, len(fields) + 1), then=rest)
    heads = text.split("\n", 1)[0].split()
    legend = "; ".join(f"{name}: {meaning}" for name, meaning in LEGEND.items() if name in heads)
    return "\n".join([text, *([folded("   " + legend, width)] if legend else [])])


def table(
    rows: Sequence[Sequence[str]],
    *,
    left: int,
    width: int | None = None,
    decisions: Sequence[int] = (),
    then: Sequence[int] = (),
) -> str:
    """Return rows as text, heads first, with two spaces between columns.

    Args:
        rows: Cells by row; the first row has the heads.
        left: How many leading columns have words; the others have numbers.
        width: Most columns of a line; None = no limit.
        decisions: The columns of which those with the same word in every row are left out, one by one, as
            long as the table is wider than `width`.
        then: The columns that are left out after these.
    """
    columns = [padded(each, left=place < left) for place, each in enumerate(zip(*rows, strict=True))]
    agreed = [place for place in decisions if len(set(columns[place][1:])) == 1]
    shown = dict(enumerate(columns))
    for place in dict.fromkeys((*agreed, *then)):
        if width is not None and sum(2 + len(column[0]) for column in shown.values()) - 2 > width:
            del shown[place]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*shown.values(), strict=True))


def padded(cells: Sequence[str], *, left: bool) -> list[str]:
    """Return the cells of one column, all as wide as the widest."""
    width = max(map(len, cells))
    return [cell.ljust(width) if left else cell.rjust(width) for cell in cells]


def _row(candidate: Candidate, best: Candidate, fields: Sequence[Field]) -> tuple[str, ...]:
    choice, first = candidate.choice, candidate is best  # by identity: another plan may take as long
    return (
        "→" if first else "",
        *(each.cell(choice) if each.cell and choice.reads(each.name) else each.unread for each in fields),
        candidate.predicted,
        "" if first else change(candidate.predicted_s, best.predicted_s),
        milliseconds(candidate.bound_s),
        gib(candidate.memory_bytes),
    )
