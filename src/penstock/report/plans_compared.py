"""Plans beside each other: two of them with what differs, or one for every value of a setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.config import to_dict
from penstock.decision.record import FIELDS
from penstock.mesh import holders
from penstock.plan import Explanation, FoundPlan, PlanFile, Subject
from penstock.plan.candidate import whole_s
from penstock.plan.predict import closing_s
from penstock.plan.throughput import Throughput
from penstock.report.plan import table
from penstock.words import change, folded, gib, lane_words, milliseconds, printable

LEAST_S = 5e-4
"""Seconds by which two sides must differ in the work of a lane for that to be told."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A plan with its step.

    Attributes:
        busy_s: Seconds of work of a step by lane, in words; empty where only a plan file is known.
        limit: What limits the step, in words.
    """

    file: PlanFile
    tokens_per_s: float
    utilisation: float | None = None
    busy_s: dict[str, float] = field(default_factory=dict)
    limit: str = ""

    @staticmethod
    def of(subject: Subject, found: FoundPlan, explanation: Explanation) -> Side:
        """Return the side of a plan that was searched."""
        speed, nodes = Throughput.of(subject, found.best), subject.problem.has_nodes
        step_s = whole_s(subject.problem, found.best) - closing_s(subject.problem)
        return Side(
            file=subject.plan_file(found.best, found.searched),
            tokens_per_s=speed.tokens_per_s,
            utilisation=speed.utilisation,
            busy_s={lane_words(each, nodes=nodes): of * step_s for each, of in explanation.busy.items()},
            limit=explanation.binds,
        )

    @staticmethod
    def of_file(file: PlanFile) -> Side:
        """Return the side of a saved plan: as it was predicted when it was saved."""
        sizes = file.sizes
        tokens = sizes.passes * sizes.batch_per_rank * sizes.seq_len * holders(sizes.ranks, sizes.tp_size)
        limits = [line for line in file.why if line.startswith("Limit ")]
        limit = limits[-1].removeprefix("Limit ").strip().partition(";")[0] if limits else ""
        return Side(file=file, tokens_per_s=tokens / file.predicted_s, limit=limit)

    @property
    def layout(self) -> str:
        """Which ranks share what, in a few letters."""
        sizes = self.file.sizes
        return f"ep {sizes.ep_size}, tp {sizes.tp_size}, etp {sizes.etp_size}"

    def facts(self) -> dict[str, str]:
        """Return all that may differ, in words, by name."""
        sizes, choice = self.file.sizes, self.file.choice
        facts = {"model": self.file.model, "cluster": self.file.cluster}
        facts |= {key: str(value) for key, value in to_dict(sizes).items()}
        for name, decision in FIELDS.items():
            facts[name] = decision.cell(choice) if decision.cell and choice.reads(name) else decision.unread
        return {key: printable(value) for key, value in facts.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        file = self.file
        return {
            "model": file.model,
            "cluster": file.cluster,
            "step_s": file.predicted_s,
            "tokens_per_s": self.tokens_per_s,
            "utilisation_of_data_sheet": self.utilisation,
            "memory_bytes": file.memory_bytes,
            "limit": self.limit,
            "busy_s": self.busy_s,
            "sizes": to_dict(file.sizes),
            "choice": to_dict(file.choice),
            "plan": file.choice.words,
        }


@dataclass(frozen=True, kw_only=True)
class TwoPlans:
    """Two plans; the second is compared with the first."""

    one: Side
    other: Side

    @property
    def differing(self) -> dict[str, tuple[str, str]]:
        """What differs, in words, by name."""
        one, other = self.one.facts(), self.other.facts()
        return {key: (one[key], other[key]) for key in one if one[key] != other[key]}

    def why(self) -> Iterator[str]:
        """Yield lines on what makes one of the steps longer."""
        one, other = self.one, self.other
        for which, side in (("A", one), ("B", other)):
            if side.limit:
                yield f"{which}: {side.limit}"
        if one.busy_s and other.busy_s:
            for lane in dict.fromkeys((*one.busy_s, *other.busy_s)):
                one_s, other_s = one.busy_s.get(lane, 0.0), other.busy_s.get(lane, 0.0)
                if abs(other_s - one_s) >= LEAST_S:
                    both = f"{milliseconds(one_s)} of a step in A, {milliseconds(other_s)} in B"
                    yield f"{lane}: busy for {both}"

    def to_text(self, width: int) -> str:
        """Return the text for a terminal of `width` columns."""
        one, other = self.one, self.other
        one_s, other_s = one.file.predicted_s, other.file.predicted_s
        rows = [
            ("", "A", "B", "B against A"),
            ("step", milliseconds(one_s), milliseconds(other_s), change(other_s, one_s)),
            (
                "tokens/s",
                f"{one.tokens_per_s:,.0f}",
                f"{other.tokens_per_s:,.0f}",
                change(other.tokens_per_s, one.tokens_per_s),
            ),
            (
                "memory",
                gib(one.file.memory_bytes),
                gib(other.file.memory_bytes),
                change(other.file.memory_bytes, one.file.memory_bytes),
            ),
            *((key, *both, "") for key, both in self.differing.items()),
        ]
        titles = [
            folded(f"{which}: {side.file.model} on {side.file.cluster}: {side.file.choice.words}", width)
            for which, side in (("A", one), ("B", other))
        ]
        why = [folded(f"why      {line}", width) for line in self.why()]
        return "\n".join([*titles, "", table(rows, left=4), "", *why]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "a": self.one.to_dict(),
            "b": self.other.to_dict(),
            "differing": {key: list(both) for key, both in self.differing.items()},
            "why": list(self.why()),
        }


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A plan for every value of a setting.

    Attributes:
        name: The setting.
        sides: Every value with its plan, or with the reason why it has none.
    """

    name: str
    sides: Sequence[tuple[str, Side | str]]

    def to_text(self, width: int) -> str:
        """Return the text for a terminal of `width` columns."""
        planned = [side for _, side in self.sides if isinstance(side, Side)]
        head = (self.name, "step", "", "tokens/s", "MFU", "memory", "layout", "plan")
        rows = [
            head,
            *(self._row(value, side, planned[0]) for value, side in self.sides if isinstance(side, Side)),
        ]
        lines = [line[:width].rstrip() for line in table(rows, left=len(head)).split("\n")]
        plans = [
            folded(
                f"{self.name}={value}: {side.file.choice.words if isinstance(side, Side) else side}", width
            )
            for value, side in self.sides
        ]
        first = [f"{planned[0].file.model}, planned for each {self.name}", ""] if planned else []
        return "\n".join([*first, *(lines if planned else []), *([""] if planned else []), *plans]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        rows = [
            {"value": value, **(side.to_dict() if isinstance(side, Side) else {"refused": side})}
            for value, side in self.sides
        ]
        return {"sweep": self.name, "rows": rows}

    @staticmethod
    def _row(value: str, side: Side, first: Side) -> tuple[str, ...]:
        file, used = side.file, side.utilisation
        return (
            value,
            milliseconds(file.predicted_s),
            "" if side is first else change(file.predicted_s, first.file.predicted_s),
            f"{side.tokens_per_s:,.0f}",
            "-" if used is None else f"{100 * used:.2g} %",
            gib(file.memory_bytes),
            side.layout,
            file.choice.schedule,
        )
