"""`Decision`: the record of everything that a plan decides, each field declared in one line.

The search takes its dimensions from these fields, section `[schedule]` its settings, a plan file its choice,
and descriptions of plans their words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as given
from functools import cache
from itertools import chain
from math import lcm
from typing import Annotated, Any, Final, Literal, Self

from penstock.config import ConfigError, Items, Table, Within, check_bounds, check_name, check_value
from penstock.config.bounds import Steps, types_of
from penstock.decision.partition import Partition
from penstock.decision.placement import PlacementConfig
from penstock.features.dispatch import DISPATCHES
from penstock.features.dispatch.feature import COMPRESSION, DISPATCH
from penstock.features.expert_replicas.feature import (
    EXPERTS,
    REPLICA_SLOTS,
    SPLIT,
    ExpertMoves,
    ReplicaSlots,
    Split,
)
from penstock.features.expert_sharding.feature import EXPERT_FORM, expert_forms
from penstock.features.field import READERS, Asked, Effect, Field, Unsearched
from penstock.features.recompute.feature import RECOMPUTE
from penstock.features.sample_placement.feature import SAMPLES, SampleMoves
from penstock.step.rewrite import Pass
from penstock.step.shape import ExpertForm, Recompute
from penstock.words import counted, mib

MOST_PIECES = 256
MOST_SLICES = 64
"""The most slices into which forward and backward chunks may cut the tensors that they share."""

MOST_MICROBATCHES = 8
CHUNKS = (1, 2, 3, 4, 6, 8)
TRIED_SLICES = 24
ALL_REDUCE_PIECES = (1, 2, 4, 8, 16, 32)
LEAST_ALL_REDUCE_BYTES = 1 << 16
"""Values that a search tries: numbers of microbatches, chunks and slices, sizes of all-reduce chunks."""

NOTHING = Table()
RULES = ("critical_path", "all_to_all_first")
"""Priority rules that are quick; `search` is tried on the best few plans only."""

PieceCount = Annotated[int, Within(1, MOST_PIECES, "each piece costs a start-up")]
ChunkBytes = Annotated[
    int,
    Within(
        512,
        1 << 40,
        "every chunk costs a start-up, so chunks under 512 bytes never pay",
        hint="Use 512 or more; 1048576 is a good default.",
    ),
]
PriorityName = Literal["search", "critical_path", "all_to_all_first"]
RowForm = Literal["none", "bfloat16", "int8"]
ORDERS = {
    "search": ("order: local search", "local search"),
    "critical_path": ("order: longest remaining path first", "longest path"),
    "all_to_all_first": ("order: all-to-all before all-reduce", "all-to-all first"),
}


def _schedules(asked: Asked, choice: Decision) -> Sequence[str]:
    del choice
    tried = (None, *expert_forms(asked, asked.dispatches))
    return [name for name, reader in READERS.items() if reader.expert_form in tried]


def _chunks(asked: Asked, choice: Decision) -> Sequence[int]:
    alone = READERS[choice.schedule].expert_form == "s2" and asked.shape.sharing.tp_size == 1
    return CHUNKS if any(asked.shape.moe_layers) and not alone else (1,)  # s2 cuts only what tp ranks gather


def all_reduce_sizes(asked: Asked, choice: Decision | None = None) -> Sequence[int]:
    """Return the bytes of the largest layer's gradients whole, in halves, quarters and so on."""
    del choice
    whole = max(LEAST_ALL_REDUCE_BYTES, *chain.from_iterable(asked.gradients.by_kind.values()))
    least = max(LEAST_ALL_REDUCE_BYTES, asked.least_chunk_bytes)
    return [size for n in ALL_REDUCE_PIECES if (size := -(-whole // n)) >= least or n == 1]


def _chunk_words(choice: Decision) -> str:
    forward, backward = choice.degrees
    if forward == backward:
        return "no chunks" if forward == 1 else f"{forward} chunks"
    return f"{counted(forward, 'forward chunk')} and {counted(backward, 'backward chunk')}"


SCHEDULE = Field(
    values=_schedules, head="schedule", cell=lambda d: d.schedule, affects=("cut", "order", "memory")
)
MICROBATCHES = Field(
    values=lambda asked, _: [
        n for n in range(1, min(asked.batch, MOST_MICROBATCHES) + 1) if asked.batch % n == 0
    ],
    words=lambda d: counted(d.microbatches, "microbatch", "es"),
    head="R",
    cell=lambda d: str(d.microbatches),
    cuts=True,
    affects=("cut", "memory"),
    always=False,
)
CHUNK_NUMBERS = Field(
    values=_chunks,
    words=_chunk_words,
    head="chunks",
    cell=lambda d: "{}/{}".format(*d.degrees),
    cuts=True,
    affects=("cut",),
    always=False,
)
BACKWARD_CHUNKS = Field(
    values=lambda asked, choice: [
        n for n in _chunks(asked, choice) if lcm(choice.chunks or 1, n) <= TRIED_SLICES
    ],
    affects=("cut",),
    always=False,
)
ALL_REDUCE = Field(
    values=all_reduce_sizes,
    words=lambda d: f"all-reduce in pieces of {mib(d.all_reduce_chunk_bytes)}",
    head="all-reduce",
    cell=lambda d: mib(d.all_reduce_chunk_bytes),
    cuts=True,
    affects=("cut",),
    always=False,
)
PRIORITY = Field(
    values=lambda asked, choice: RULES,
    words=lambda d: ORDERS[d.priority][0],
    head="order",
    cell=lambda d: ORDERS[d.priority][1],
    unread="fixed",
    affects=("order",),
    always=False,
)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Everything that a plan decides.

    A schedule declares which fields it reads; the others have no effect.
    """

    schedule: Annotated[str, SCHEDULE] = "sequential"
    """One of SCHEDULES."""
    microbatches: Annotated[PieceCount, MICROBATCHES] = 1
    """Pieces of the batch that pass through whole blocks (flowmoe's R)."""
    chunks: Annotated[PieceCount | None, CHUNK_NUMBERS] = 1
    """Pieces of the tokens inside an MoE layer; none = the schedule's usual number."""
    backward_chunks: Annotated[PieceCount | None, BACKWARD_CHUNKS] = 1
    """Chunks in the backward pass; none = as many as forward. What is saved between the passes is cut into
    the least common multiple of both numbers, and experts compute each slice separately; MOST_SLICES at most.
    """
    all_reduce_chunk_bytes: Annotated[ChunkBytes, ALL_REDUCE] = 1 << 20
    """Size of an all-reduce piece (flowmoe, lina, penstock; FlowMoE's S_p)."""
    dispatch: Annotated[str, DISPATCH] = "flat"
    """How rows travel."""
    comm_dtype: Annotated[RowForm, COMPRESSION] = "none"
    """The format in which rows travel; none = as section [moe] says. Others only where
    plan.comm_dtype=auto allows it."""
    expert_form: Annotated[ExpertForm | None, EXPERT_FORM] = None
    """Where ranks share attention or experts, how rows reach every shard of their experts
    ([more](parallelism.md#what-a-step-does)); none = the schedule's usual form, which is "gather"; all others
    need a flat dispatch."""
    recompute: Annotated[Recompute, RECOMPUTE] = "none"
    """What runs a second time before its backward, so that memory need not hold what it saves until then; no
    rows are sent again."""
    priority: Annotated[PriorityName, PRIORITY] = "search"
    """The rule by which penstock orders tasks: "critical_path" (the longest chain of work after a task),
    "all_to_all_first" (FlowMoE's), or "search", a local search from both, which takes the most time."""
    samples: Annotated[SampleMoves, SAMPLES] = "none"
    """What moves samples."""
    experts: Annotated[ExpertMoves, EXPERTS] = "none"
    """What moves experts."""
    replica_slots: Annotated[ReplicaSlots, REPLICA_SLOTS] = 1
    """Experts of other ranks that a rank has room for in every MoE layer, where experts move."""
    split: Annotated[Split, SPLIT] = "auto"
    """By which loads rows are shared among replicas."""
    partition: Annotated[Partition | None, Unsearched(("cut", "order"))] = None
    """The gradients in each gap, for fsmoe; none = all of a layer's in the next gap below."""
    more: Annotated[Table, Items(100, "one per registered decision")] = NOTHING
    """Decisions that your own code registered, such as `schedule.more.late_weights=true`
    ([more](extending.md#a-decision)), where they differ from the default."""

    def reads(self, name: str) -> bool:
        """Return whether the field has an effect with this schedule."""
        field = FIELDS.get(name)
        return (field is not None and field.always) or name in READERS[self.schedule].reads

    def value(self, name: str) -> Any:
        """Return the value of a field or of a registered decision."""
        return getattr(self, name) if name in BUILT_IN else dict(self.more).get(name, FIELDS[name].default)

    def deciding(self, name: str, value: Any) -> Self:
        """Return the decision with another value for field `name`."""
        if name in BUILT_IN:
            # Searches mostly give a field the value that it has.
            return self if getattr(self, name) == value else self._with({name: value})
        more = {each: held for each, held in self.more if each != name}
        if value != FIELDS[name].default:
            more[name] = value
        return replace(self, more=Table(more))

    def affecting(self, *effects: Effect, **others: Any) -> Self:
        """Return the decision in which all fields that have none of these effects have their defaults.

        Whatever is worked out of a decision and kept has this as its key: what it depends on, and no more.

        Args:
            others: The fields that get another value, by name.
        """
        left_out = {name: usual for name, usual in _without(effects).items() if getattr(self, name) != usual}
        if self.more:
            kept = {name: value for name, value in self.more if _affects(FIELDS[name].affects, effects)}
            left_out["more"] = Table(kept)
        return self._with({**left_out, **others}) if left_out or others else self

    def _with(self, values: Mapping[str, Any]) -> Self:
        """Return the decision with these values: `replace` in a fifth of its time, of which searches make
        hundreds of thousands."""
        made = object.__new__(type(self))
        vars(made).update({**vars(self), **values})
        return made

    def with_placement(self, placement: PlacementConfig) -> Self:
        """Return the decision with what section `[placement]` says; what that leaves open does not move."""
        return replace(
            self,
            samples="none" if placement.samples == "auto" else placement.samples,
            experts="none" if placement.experts == "auto" else placement.experts,
            replica_slots=placement.replica_slots,
            split=placement.split,
        )

    def in_placement(self, placement: PlacementConfig) -> PlacementConfig:
        """Return section `[placement]` with what the decision says."""
        return replace(
            placement,
            samples=self.samples,
            experts=self.experts,
            replica_slots=self.replica_slots,
            split=self.split,
        )

    @property
    def deciding_fields(self) -> tuple[str, ...]:
        """The names of the decision's own fields that its schedule reads."""
        return tuple(name for name in FIELDS if name in BUILT_IN and self.reads(name))

    @property
    def degrees(self) -> tuple[int, int]:
        """Chunks of an MoE layer forward and backward, as the schedule cuts."""
        if not self.reads("chunks"):
            return 1, 1
        forward = self.chunks or READERS[self.schedule].usual_chunks
        backward = self.backward_chunks if self.reads("backward_chunks") else None
        return forward, backward or forward

    @property
    def form(self) -> ExpertForm:
        """How rows reach all shards of their experts: as the schedule says, else as decided."""
        decided = self.expert_form if self.reads("expert_form") else None
        return READERS[self.schedule].expert_form or decided or "gather"

    @property
    def num_replica_slots(self) -> int:
        """Replica slots of every rank in every MoE layer; 0 where experts stay."""
        return 0 if self.experts == "none" else self.replica_slots

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes that registered decisions add to the step."""
        own = [name for name in FIELDS if name not in BUILT_IN and self.reads(name)]
        return tuple(each for name in own for each in FIELDS[name].passes(self.value(name)))

    @property
    def words(self) -> str:
        """The plan in words: everything that its schedule reads, and nothing else."""
        read = [each for name, each in FIELDS.items() if self.reads(name)]
        described = [(each.cuts, text) for each in read if each.words and (text := each.words(self))]
        cut, rest = ([text for cuts, text in described if cuts is wanted] for wanted in (True, False))
        return f"{self.schedule}: {', '.join((cut or ['whole batch']) + rest)}"

    def check(self) -> None:
        """Raise ConfigError for the first field with an impossible value."""
        check_bounds(self)
        check_name("schedule", self.schedule, READERS)
        check_name("dispatch", self.dispatch, DISPATCHES)
        # Numbers of chunks with few common factors cut shared tensors too finely.
        forward, backward = self.degrees
        if _crumbles(forward, backward):
            fitting = [b for b in range(1, MOST_PIECES + 1) if not _crumbles(forward, b)]
            nearest = min(fitting, key=lambda b: (abs(b - backward), b))
            raise ConfigError(
                "backward_chunks",
                backward,
                f"with chunks = {forward} what is saved would be cut into {lcm(forward, backward)} slices "
                f"(their least common multiple), and experts compute every slice for itself; at most "
                f"{MOST_SLICES}",
                f"Nearest valid: {nearest}. A multiple or a divisor of {forward} fits best.",
            )
        for name, value in self.more:
            if name not in FIELDS or name in BUILT_IN:
                own = [each for each in FIELDS if each not in BUILT_IN]
                hint = f"Registered: {', '.join(own)}." if own else "Register it first, or remove it."
                hint = "Set it beside more." if name in BUILT_IN else hint
                raise ConfigError(f"more.{name}", value, "no such decision is registered", hint)
            check_value(FIELDS[name].type, value, f"more.{name}")


def _affects(affects: Iterable[Effect], effects: Iterable[Effect]) -> bool:
    return not set(effects).isdisjoint(affects)


@cache
def _without(effects: tuple[Effect, ...]) -> Mapping[str, Any]:
    """Return the defaults of the decision's own fields that have none of these effects."""
    return {
        name: getattr(Decision, name)
        for name, tp in types_of(Decision).items()
        for mark in getattr(tp, "__metadata__", ())
        if isinstance(mark, Field | Unsearched) and not _affects(mark.affects, effects)
    }


def _crumbles(forward: int, backward: int) -> bool:
    """Return whether two numbers of chunks need over MOST_SLICES slices, and more than either of them."""
    return lcm(forward, backward) > max(MOST_SLICES, forward, backward)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Decision):
    """Section `[schedule]`: a decision without the fields that other sections (`[moe]`, `[placement]`,
    `[plan]`) or no section can set.
    """

    name: str = "flowmoe"
    """The schedule ([more](schedules.md))."""
    microbatches: PieceCount = 2
    """Pieces of the batch that pass through whole blocks (flowmoe, penstock); 1 for a batch of one sample."""
    chunks: PieceCount | None = None
    """Chunks of the tokens inside an MoE layer; none = the schedule's default (moe_pipeline, dense_overlap,
    lina 2; fsmoe, penstock 1; sequential, flowmoe, baseline_esp and parm_s1 have no chunks). In parm_s2:
    slices of combine and of the gather beside it (2); no effect with tp_size = 1."""
    backward_chunks: PieceCount | None = None
    """Chunks in the backward pass; none = as in the forward pass. Experts compute in slices; their number,
    the least common multiple of both, is at most 64."""
    refine_after: Steps = 4
    """Re-order the schedule with measured task durations after this number of steps; 0 = never."""
    schedule: str = given(init=False)
    dispatch: str = given(default="flat", init=False)
    comm_dtype: RowForm = given(default="none", init=False)
    samples: SampleMoves = given(default="none", init=False)
    experts: ExpertMoves = given(default="none", init=False)
    replica_slots: int = given(default=1, init=False)
    split: Split = given(default="auto", init=False)
    recompute: Recompute = given(default="none", init=False)
    partition: Partition | None = given(default=None, init=False)

    def __post_init__(self) -> None:
        check_name("name", self.name, READERS)
        object.__setattr__(self, "schedule", self.name)
        self.check()

    def decision(
        self, dispatch: str, placement: PlacementConfig | None = None, recompute: Recompute = "none"
    ) -> Decision:
        """Return the decision as a plan has it, with every number set.

        Args:
            placement: What moves; None = nothing does.
        """
        said = {name: getattr(self, name) for name in types_of(Decision)}
        chunks, backward_chunks = self.degrees
        elsewhere = {"dispatch": dispatch, "recompute": recompute}
        decided = Decision(**{**said, **elsewhere, "chunks": chunks, "backward_chunks": backward_chunks})
        return decided if placement is None else decided.with_placement(placement)

    def saying(self, choice: Decision) -> Self:
        """Return the section that stands for `choice`."""
        names = types_of(Decision).keys() & types_of(type(self)).keys()
        return replace(self, name=choice.schedule, **{name: getattr(choice, name) for name in names})


# ---- the register ------------------------------------------------------------------------------------------


BUILT_IN: Final = frozenset(types_of(Decision))
FIELDS: dict[str, Field] = {
    name: replace(mark, name=name, default=getattr(Decision, name))
    for name, tp in types_of(Decision).items()
    for mark in getattr(tp, "__metadata__", ())
    if isinstance(mark, Field)
}
"""Every decision by name, in the order in which a search makes them, with registered ones last."""


def register(own: Field) -> None:
    """Let every plan make this decision, too, after those registered before it.

    It is searched, set by `[schedule]` (`schedule.more.NAME=...`), saved in plan files, described and shown
    with a plan, and its passes become part of the step.

    Raises:
        ValueError: For a name that is taken or invalid.
    """
    if own.name in FIELDS or own.name in BUILT_IN:
        raise ValueError(f"a decision {own.name!r} is registered already; give yours another name")
    if not own.name.isidentifier():
        raise ValueError(
            f"{own.name!r} is not a valid name for a decision; use letters, digits and underscores"
        )
    check_value(own.type, own.default, own.name)
    FIELDS[own.name] = replace(
        own,
        words=own.words or (lambda d: f"{own.name} {d.value(own.name)}"),
        head=own.head or own.name,
        cell=own.cell or (lambda d: str(d.value(own.name))),
    )


def unregister(name: str) -> None:
    """Remove a registered decision."""
    assert name not in BUILT_IN, f"{name} is a field of every decision"
    del FIELDS[name]
