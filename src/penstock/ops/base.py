"""The names of ops, the definition of an op, and the registry of all ops. The core's ops are in `core.py`.

An op says what its tasks mean before anything runs: title, kind, and what its backward is. What really
happens is its handler's affair (`runtime/ops.py`). `register` adds an op; everything that lists ops reads
`OPS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from penstock.graph.task import ScheduleError
from penstock.ops.work import WorkOf


class Op:
    """The op names of the tasks in Penstock's own steps."""

    EMBED: Final = "EM"
    ATTENTION: Final = "AT"
    COUNTS: Final = "N"
    DISPATCH_GATHER: Final = "DG"
    DISPATCH: Final = "D"
    DISPATCH_SCATTER: Final = "DS"
    SHARED: Final = "S"
    EXPERTS: Final = "X"
    COMBINE_GATHER: Final = "CG"
    COMBINE: Final = "C"
    COMBINE_SCATTER: Final = "CS"
    UNPERMUTE: Final = "U"
    HEAD: Final = "HD"
    STATISTICS: Final = "ST"
    ALL_REDUCE: Final = "AR"
    PARTIAL_ALL_REDUCE: Final = "PR"
    EXPERT_ALL_REDUCE: Final = "XR"
    LOADS: Final = "LG"

    # an optimiser of which every rank owns a share: see `features.sharded_optimizer.feature`
    SCATTER: Final = "RA"
    PARTIAL_SCATTER: Final = "RP"
    EXPERT_SCATTER: Final = "RX"
    NORM: Final = "NM"
    UPDATE: Final = "OA"
    PARTIAL_UPDATE: Final = "OP"
    EXPERT_UPDATE: Final = "OX"
    PARAMETERS: Final = "PA"
    PARTIAL_PARAMETERS: Final = "PP"
    EXPERT_PARAMETERS: Final = "PX"

    # experts as replicas: see `features.expert_replicas.feature`
    REPLICA_PARAMETERS: Final = "GP"
    REPLICA_GRADIENTS: Final = "GG"
    PLAN_REPLICAS: Final = "PE"
    COMPARE_REPLICAS: Final = "PH"

    # tensor parallelism: see `features.tensor_parallel.feature`
    EMBED_SCATTER: Final = "ES"
    EMBED_REDUCE: Final = "ER"
    TOKEN_GATHER: Final = "TG"
    TOKEN_COPY: Final = "TC"
    HEADS: Final = "TA"
    TOKEN_SCATTER: Final = "TS"
    TOKEN_REDUCE: Final = "TR"
    GATE: Final = "GT"
    DENSE_NORM: Final = "FN"
    DENSE_GATHER: Final = "FG"
    DENSE_COPY: Final = "FC"
    DENSE: Final = "FF"
    DENSE_SCATTER: Final = "FS"
    DENSE_REDUCE: Final = "FR"
    DENSE_ADD: Final = "FA"
    HEAD_GATHER: Final = "HG"
    HEAD_COPY: Final = "HC"
    LOGITS: Final = "HV"
    PEAKS: Final = "HX"
    LOSS: Final = "HL"
    CHOICES: Final = "NC"
    KEEP_TOKENS: Final = "MS"
    GATHER_TOKENS: Final = "MG"
    KEEP_OUTPUT: Final = "US"
    GATHER_OUTPUT: Final = "UG"

    # shards of experts: see `features.expert_sharding.feature`
    SHARD_GATHER: Final = "XG"
    SHARD_SCATTER: Final = "XS"
    DEAL_SLOTS: Final = "SD"
    GATHER_SLOTS: Final = "SG"
    ROWS_GATHER: Final = "BG"
    ROWS_REDUCE: Final = "BR"
    ROWS_KEEP: Final = "BS"

    # samples that move: see `features.sample_placement.feature`
    SAMPLE_COUNTS: Final = "SC"
    SAMPLE_LOADS: Final = "SN"
    SAMPLE_PLACES: Final = "SP"
    SAMPLE_HOMES: Final = "SH"
    SAMPLE_MOVE: Final = "SM"
    ROW_ORDER: Final = "RO"


class Kind(StrEnum):
    """What an op occupies: the processor, memory, the network, or the host."""

    COMPUTE = "compute"
    COPY = "copy"
    COLLECTIVE = "collective"
    HOST = "host"


class Backward(StrEnum):
    """What the backward of an op is.

    Attributes:
        TASK: A task of its own.
        VALUE: None, since the value of the forward task is all that the backward of its inputs needs (sums
            that normalise a loss).
        NONE: None, since nothing is differentiated (counts, solvers).
    """

    TASK = "task"
    VALUE = "value"
    NONE = "none"


class Family(StrEnum):
    """Ops that people think of as one group, in the few words of a legend."""

    ATTENTION = "attention"
    EXPERTS = "experts"
    MODEL = "rest of the model"
    ROWS = "dispatch and combine"
    GRADIENTS = "sums of gradients"
    OPTIMIZER = "optimiser"
    EXCHANGES = "other exchanges"
    HOST = "placement"


Place = Literal["input", "block", "after", "beside", "output"]
"""input, output: below the first layer, above the last layer. after, beside: in a layer, after its experts,
or while other tasks wait for its experts. block: everything else."""

Turn = Literal["gated", "routed", "computed"]
"""How several ops of a layer take turns in program order.

gated: in the forward half, a microbatch's rows are counted as soon as they are known, since all ranks wait
for that. routed: in the forward half, a microbatch passes all of these ops before the next one does, since
its experts wait for them. computed: a chunk passes these ops before the next one does, so that it leaves
while the next is computed.
"""


USUAL = {Kind.COLLECTIVE: Family.EXCHANGES, Kind.HOST: Family.HOST}
"""The family of ops that name none, by what they occupy; others belong to the rest of the model."""


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """The facts of an op.

    Attributes:
        name: Its name, of upper-case letters and digits, as in a task's name.
        title: What it does, for people.
        kind: What it occupies.
        work: Returns what one of its tasks asks of a rank; every op needs one.
        backward: What its backward is.
        transpose: The op whose work the backward does, where that is another op (a gather's is a
            reduce-scatter).
        given: The roles that are not differentiated; the backward of an op that saves nothing reads them
            again.
        indices: The axes that its names carry, out of `mcp`.
        gradients: The state that its backward adds to, `{layer}` for the layer's number. A task that reads
            other parameters adds to the gradients of those.
        recomputable: Whether a plan may recompute its tasks before their backward, so that they keep nothing
            for it but their inputs. Then its handler must leave the same outputs both times, and change
            nothing else.
        launches: The operations that one of its tasks gives to a GPU, counted for Penstock's ops on a
            stand-in for one (its own decoder, grouped products); forward and backward differ by less than a
            half. The default is that of a collective, and of what puts its rows in order.
        sizes_transfers: Whether transfers are cut by its results, which the host must know before it can
            issue them.
        family: The group in which pictures show it; None = by its kind.
        place: Where its tasks stand in a step.
        once: Whether a step has one task of it, however many its layers.
        turn: The other ops of its layer with which it takes turns in program order; None = it does with none.
    """

    name: str
    title: str
    kind: Kind
    work: WorkOf | None = None
    backward: Backward = Backward.TASK
    transpose: str = ""
    given: frozenset[str] = frozenset()
    indices: str = "m"
    gradients: str | tuple[str, ...] = ""
    recomputable: bool = False
    launches: int = 3
    sizes_transfers: bool = False
    family: Family | None = None
    place: Place = "block"
    once: bool = False
    turn: Turn | None = None

    @property
    def normalises(self) -> bool:
        """Whether its sums over the whole batch normalise the loss: every backward task waits for them."""
        return self.once and self.backward is Backward.VALUE

    @property
    def saves(self) -> bool:
        """Whether the backward reads what forward saved: computation does, a transfer needs nothing."""
        return self.kind in (Kind.COMPUTE, Kind.COPY)

    def parameters(self, layer: int) -> tuple[str, ...]:
        """Return the state that its tasks read, forward and backward: the parameters of `gradients`."""
        return tuple(parameters_of(state) for state in self.states(layer) if "gradients" in state)

    def states(self, layer: int) -> tuple[str, ...]:
        """Return the state that its backward adds to."""
        given = (self.gradients,) if isinstance(self.gradients, str) else self.gradients
        return tuple(state.format(layer=layer) for state in given if state)


def parameters_of(state: str) -> str:
    """Return the name of the parameters whose gradients are `state`."""
    return state.replace("gradients", "parameters")


def gradients_of(state: str) -> str:
    """Return the name of the gradients of the parameters that are `state`."""
    return state.replace("parameters", "gradients")


OPS: dict[str, OpSpec] = {}
"""Every op by its name, in the order in which they were registered."""


def register(*specs: OpSpec) -> None:
    """Register ops.

    Raises:
        ScheduleError: For a name that is taken by another op, or that no task can carry, for an op without
            `work`, and for a collective with a backward but no transpose.
    """
    for spec in specs:
        name = spec.name
        if not (name.isascii() and name.isalnum() and name.isupper() and name[0].isalpha()):
            raise ScheduleError(f"op {name!r}: use upper-case letters and digits, a letter first")
        if spec.work is None:
            raise ScheduleError(f"op {spec.name} does not say what work its tasks are: give it `work`")
        if spec.kind is Kind.COLLECTIVE and spec.backward is Backward.TASK and not spec.transpose:
            raise ScheduleError(
                f"op {spec.name} is a collective with a backward and no transpose: name the op that its "
                "backward is, or itself"
            )
        if OPS.get(spec.name, spec) != spec:
            raise ScheduleError(f"op {spec.name} is registered already: {OPS[spec.name].title}")
        OPS[spec.name] = spec


def spec_of(name: str) -> OpSpec:
    """Return the facts of an op.

    Raises:
        ScheduleError: For an unregistered op, which it names.
    """
    if name not in OPS:
        raise ScheduleError(f"no op is called {name}; there are {', '.join(OPS)}. Add it with ops.register.")
    return OPS[name]


def family_of(op: str) -> Family:
    """Return the family of an op; an op that is not registered belongs to the rest of the model."""
    spec = OPS.get(op)
    if spec is None:
        return Family.MODEL
    return spec.family or USUAL.get(spec.kind, Family.MODEL)


def place_of(op: str) -> Place:
    """Return where tasks of an op stand in a step."""
    return OPS[op].place if op in OPS else "block"
