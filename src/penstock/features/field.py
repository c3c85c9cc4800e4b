"""The properties of one decision: the values that a search tries, its words, and its effect on the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

from penstock.ops.core import KindName
from penstock.step.rewrite import Pass
from penstock.step.shape import ExpertForm, Recompute, StepShape

PartialByForm = tuple[tuple[ExpertForm, tuple[int, ...]], ...]
"""For expert forms, the bytes of every layer's partial gradients."""


class GradientBytes(NamedTuple):
    """For every layer, the bytes of its gradients that are reduced, by kind.

    Attributes:
        replicated: The bytes that every rank has whole.
        experts: The bytes of the gradients of a rank's experts.
        partial: The bytes to which every rank that shares attention adds a part; empty = there are no such
            ranks.
        partial_by_form: `partial` by expert form, where it depends on that; what is not partial with a form
            is replicated.
        expert: The bytes of all parameters of one expert, or of a rank's shard of it, which travel where
            experts move; 0 = not known.
    """

    replicated: tuple[int, ...]
    experts: tuple[int, ...]
    partial: tuple[int, ...] = ()
    partial_by_form: PartialByForm = ()
    expert: int = 0

    @property
    def by_kind(self) -> dict[KindName, tuple[int, ...]]:
        """The bytes of every kind, by layer."""
        return {"replicated": self.replicated, "partial": self.partial, "experts": self.experts}

    def of_form(self, form: ExpertForm) -> GradientBytes:
        """Return the bytes in a step with this expert form."""
        partial = dict(self.partial_by_form).get(form, self.partial)
        if partial == self.partial:
            return self
        sizes = zip(self.replicated, self.partial, partial, strict=True)
        return self._replace(replicated=tuple(r + p - q for r, p, q in sizes), partial=partial)


@dataclass(frozen=True, kw_only=True)
class Movable:
    """What may move in a step, as values of decisions: those that ranks can run and that are left open."""

    samples: tuple[str, ...] = ("none",)
    experts: tuple[str, ...] = ("none",)
    replica_slots: tuple[int, ...] = (1,)
    split: Literal["auto", "exact", "last_step"] = "auto"

    @property
    def must_move(self) -> bool:
        """Whether every plan has to move samples, or experts."""
        return "none" not in self.samples or "none" not in self.experts


NOTHING_MOVES = Movable()


class Asked(Protocol):
    """The step for which a plan is made, as far as values worth trying depend on it. `plan.Problem` is one.

    Attributes:
        batch: The samples per rank.
        dispatches: The dispatches that the ranks can run.
        least_chunk_bytes: The least bytes of an all-reduce chunk, since smaller ones would be too many tasks.
    """

    @property
    def shape(self) -> StepShape: ...

    @property
    def batch(self) -> int: ...

    @property
    def dispatches(self) -> tuple[str, ...]: ...

    @property
    def comm_dtypes(self) -> tuple[str, ...]:
        """Formats in which rows may travel, "none" = as section [moe] says."""
        ...

    @property
    def gradients(self) -> GradientBytes: ...

    @property
    def least_chunk_bytes(self) -> int: ...

    @property
    def movable(self) -> Movable: ...

    @property
    def recompute(self) -> tuple[Recompute, ...]:
        """What may be recomputed, the fastest choice first."""
        ...


class Choice(Protocol):
    """A decision, as far as other decisions depend on it. `Decision` is one."""

    @property
    def schedule(self) -> str: ...

    @property
    def dispatch(self) -> str: ...

    @property
    def samples(self) -> str: ...

    @property
    def experts(self) -> str: ...

    @property
    def replica_slots(self) -> int: ...

    @property
    def num_replica_slots(self) -> int:
        """Replica slots of a rank; 0 = experts stay."""
        ...

    @property
    def split(self) -> str: ...

    @property
    def form(self) -> ExpertForm:
        """How rows reach all shards of their experts."""
        ...


class Reader(Protocol):
    """What a schedule declares: the fields of a decision that it reads, and its usual number of chunks.

    Attributes:
        expert_form: How rows reach all shards of their experts, where the schedule itself determines that.
    """

    @property
    def name(self) -> str: ...

    @property
    def reads(self) -> tuple[str, ...]: ...

    @property
    def usual_chunks(self) -> int: ...

    @property
    def expert_form(self) -> ExpertForm | None: ...


READERS: dict[str, Reader] = {}
"""The schedules, as far as decisions go; `schedule.SCHEDULES` is the same table with their methods."""


Effect = Literal["cut", "cost", "order", "memory"]
"""What is worked out of a decision: which tasks a step has, the seconds of a task beside how the step is cut,
the order of tasks whose seconds are known, and the bytes that a rank needs."""


@dataclass(frozen=True)
class Unsearched:
    """What depends on a field of a decision that no search varies; see `Field.affects`."""

    affects: tuple[Effect, ...]


@dataclass(frozen=True, kw_only=True)
class Field:
    """One decision, declared once.

    Attributes:
        values: Returns what a search tries, given the step and the decisions of earlier fields; at least one
            value.
        words: Returns the decision as part of a sentence, "" = it is not mentioned; None = it is described
            with another.
        head, cell: The title of its column in the table of plans, and what returns a cell of it.
        unread: The cell where the decision's schedule does not read it.
        cuts: Whether it says how finely the step is cut.
        affects: What depends on it. Whatever is kept of other choices has a key that is derived from this:
            less than everything lets more be kept, and all that it leaves out must really be the same.
        always: Whether every schedule reads it, not only those that declare it.
        may_be_left_out: Whether a plan file need not contain it, since some files are older. It then has a
            column in the table of plans only where a plan has another value than the default.
        name: The name of a registered decision.
        type: The type of a registered decision, such as a Literal or a number Annotated with bounds.
        default: The value of a registered decision that need not be mentioned.
        passes: Returns the passes that a value adds to the step.
    """

    values: Callable[[Asked, Any], Sequence[Any]]
    words: Callable[[Any], str] | None = None
    head: str = ""
    cell: Callable[[Any], str] | None = None
    unread: str = "-"
    cuts: bool = False
    affects: tuple[Effect, ...] = get_args(Effect)
    always: bool = True
    may_be_left_out: bool = False
    name: str = ""
    type: Any = str
    default: Any = None
    passes: Callable[[Any], tuple[Pass, ...]] = lambda value: ()
