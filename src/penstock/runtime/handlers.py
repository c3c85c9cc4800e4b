"""Handlers: what really happens when a task runs, for every op and phase, found by name.

A handler gets what its task reads by role, and returns its outputs by name; it never asks who made them. An
output is read as the role of the same name, or, as a gradient, as `d_` and the name: the `rows` of D.F are
the `rows` of X.F, and the `rows` of X.B are the `d_rows` of D.B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, ClassVar, Final, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.autograd.variable import Variable

from penstock.graph import Phase, ScheduleError, Task
from penstock.mesh import Axes
from penstock.moe import ChunkRoute, MoELayer, Product, RouteMaker, Tokens
from penstock.moe.config import MoEConfig
from penstock.moe.layer import RoutedTokens
from penstock.moe.products import AutogradWeights, WeightGradients
from penstock.moe.routers import Balance, RouterSums
from penstock.ops import OPS
from penstock.placement import Replication
from penstock.routing.replicas import ExactSplit
from penstock.routing.routes import Degrees
from penstock.routing.sizes import split_sizes
from penstock.runtime.batch import Batch, SampleMetadata
from penstock.runtime.buckets import Buckets
from penstock.runtime.parts import BlockParts, ModelParts
from penstock.runtime.statistics import LayerLoads, StatisticsCodec, StepStatistics
from penstock.runtime.transport import HostCounts, Transport, Transports

# ---- a compute segment: a piece of the model between two transfers, run forward under autograd on its own
#
# Its backward is called by a task and not by the autograd engine, so the order of backward is the schedule's.
# Neither the inputs nor the outputs of a segment stay in memory for its backward, only what its operators
# save: inputs enter through a node that catches their gradients, outputs are remembered as edges of the
# graph.


_ENGINE: Final = Variable._execution_engine


def anchor_on(device: torch.device) -> Tensor:
    """Return what makes inputs differentiable: nothing, that requires a gradient. One serves all segments."""
    return torch.empty(0, device=device, requires_grad=True)


class _Entry(torch.autograd.Function):
    """Identity whose backward puts the gradients of all inputs into `caught`."""

    @staticmethod
    def forward(ctx: Any, caught: list[Tensor | None], anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        del anchor  # its only use is to make the outputs differentiable
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        return tuple([tensor.view_as(tensor) for tensor in inputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.caught.extend(grads)
        return (None,) * (len(grads) + 2)


class Segment:
    """One forward run. `enter` its inputs, compute, `leave` with its outputs, later call `backward` once.

    Args:
        anchor: See `anchor_on`.
    """

    def __init__(self, anchor: Tensor) -> None:
        self._caught: list[Tensor | None] = []
        self._anchor = anchor
        self._edges: list[GradientEdge | None] = []

    def enter(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs, cut off from whatever made them, to compute with."""
        entered: tuple[Tensor, ...] = _Entry.apply(self._caught, self._anchor, *inputs)
        return entered

    def leave(self, *outputs: Tensor) -> tuple[Tensor, ...]:
        """Remember how the outputs were made; return them without their history.

        An output that depends on nothing trainable (a frozen embedding) has no history and gets no gradient.
        """
        self._edges = [get_gradient_edge(output) if output.requires_grad else None for output in outputs]
        return tuple([output.detach() for output in outputs])

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return gradients of the inputs for gradients of the outputs (None: no gradient of that output).

        Parameter gradients are accumulated.
        """
        pairs = zip(self._edges, grads, strict=True)
        reached = [(edge, grad) for edge, grad in pairs if edge is not None and grad is not None]
        self._edges = []
        if reached:
            edges, given = zip(*reached, strict=True)
            # The engine is entered directly: `torch.autograd.backward` checks in Python, for 20 us a segment,
            # what the engine checks again. It copies the context of the thread, too, for threads of devices;
            # the backward pass of the loss, inside of which segments run theirs, has done that.
            _ENGINE.run_backward(edges, given, False, False, (), allow_unreachable=True, accumulate_grad=True)
        return self._caught


class PassThrough:
    """A segment for evaluation: nothing is remembered, and there is no backward."""

    def enter(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs

    def leave(self, *outputs: Tensor) -> tuple[Tensor, ...]:
        return outputs

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        del grads
        raise RuntimeError("evaluation has no backward: call the model in training mode")


AnySegment = Segment | PassThrough


# ---- bounds of rows, and steps whose rows have none -------------------------------------------------------


BySum = Mapping[int, Sequence[RouterSums]]
"""The sums of gates by layer and microbatch."""


class StepBounds:
    """The bounds of one step; here there are none."""

    def applied(self) -> AbstractContextManager[None]:
        """Bound the rows of the step's layers inside."""
        return nullcontext()

    def tell(self, sums: BySum, transport: Transport, axes: Axes) -> None:
        """Tell all ranks what the gates of this one wanted."""

    def exceeded(self) -> bool:
        """Return whether a rank wanted more rows than it had, the same on all ranks.

        The host waits for the end of the forward half.
        """
        return False


class Counted(StepBounds):
    """The steps of a stack, and each of them, whose rows are always counted."""

    repeats, repeats_steps, late = 0, False, False

    def of_step(self, microbatches: int, *, training: bool, counted: bool = False) -> StepBounds:
        """Return the bounds of the next step."""
        del microbatches, training, counted
        return self


# ---- the layers of a step's model -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer as a step finds it: between two steps its modules may be replaced.

    Tasks ask hundreds of times for what a step looks up once; an attribute of a module is searched for in
    several dictionaries.

    Attributes:
        moe: The MoE layer; None in a dense layer.
        before: The number of MoE layers before it.
    """

    block: BlockParts
    moe: MoELayer | None
    before: int

    @property
    def experts(self) -> MoELayer:
        """The MoE layer, for tasks that only a layer with experts has."""
        assert self.moe is not None, "tasks of experts are those of MoE layers"
        return self.moe


# ---- how the residual stream of a token gets to where its experts' outputs are added to it ----------------
#
# Shapes: B samples, L tokens per sample, M hidden size, T = B * L tokens, R rows.


@dataclass(frozen=True)
class ResidualTransport:
    """What leaves the ranks of tokens, and what their experts' ranks send.

    Here the residual stream stays at home, or follows its sample.

    Attributes:
        wire_dtype: The type of rows in transit; None: unchanged.
        separate_bytes: Bytes per number of the residual stream that follow a sample beside its rows.
    """

    wire_dtype: torch.dtype | None = None
    separate_bytes: ClassVar[int] = torch.float32.itemsize

    def route(
        self, layer: Layer, residual_BLM: Tensor, x_TM: Tensor, tokens: Tokens, slices: int
    ) -> RoutedTokens:
        """Choose experts for tokens x, and order rows of the tokens or of the residual stream."""
        del residual_BLM
        return layer.experts.route(in_dtype(x_TM, self.wire_dtype), tokens, slices)

    def compute(self, layer: Layer, rows: Tensor, route: ChunkRoute, product: Product) -> Tensor:
        """Return what goes home for rows that have come to this rank's experts, [R, M]."""
        return layer.experts.expert_rows(rows, route, product)


def in_dtype(x_TM: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return x in another type; None = unchanged."""
    return x_TM if dtype is None else x_TM.to(dtype)


# ---- what handlers read, leave and work on ----------------------------------------------------------------


Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Missing:
    """Stands in the slot of an output that its handler did not leave."""

    task: Task
    output: str

    def refuse(self) -> NoReturn:
        """Raise ScheduleError: a None would count as no gradient, and training would go on without it."""
        raise ScheduleError(
            f"{self.task} has left no output {self.output!r}, which is read: its handler must return one of "
            "that name"
        )


class Inputs(dict[str, tuple[Any, ...]]):
    """What a task reads: for every role the outputs of the tasks on its edges, in their order.

    Raises:
        ScheduleError: If an output was not left, or if one edge is wanted and there are others.
    """

    def one(self, role: str) -> Any:
        """Return the output of a role that has one edge."""
        try:
            (value,) = self[role]
        except (KeyError, ValueError):
            edges = len(self.get(role, ()))
            raise ScheduleError(f"the handler needs one edge {role}, and the task has {edges}") from None
        if type(value) is Missing:
            value.refuse()
        return value

    def all(self, role: str) -> tuple[Any, ...]:
        """Return the outputs of a role; () if the task has no such edge."""
        values = self.get(role, ())
        for value in values:
            if type(value) is Missing:
                value.refuse()
        return values

    def maybe(self, role: str) -> Any:
        """Return the output of a role with one edge; None if the task has no such edge."""
        return self.one(role) if role in self else None


Outputs = Mapping[str, Any]
"""What a task leaves, by name; `saved` is for its own backward."""

NOTHING: Outputs = {}


@dataclass(frozen=True)
class LossGradients:
    """Gradients of terms of the loss, scalars.

    Attributes:
        loss: The gradient of the mean token loss.
        balance: The gradient of the terms that judge routing.
        alike: What must be the same on all ranks; None: there is nothing.
    """

    loss: Tensor
    balance: Tensor
    alike: Tensor | None = None


class Ending(Protocol):
    """What a step ends with; see `endings`.

    Attributes:
        tells_at_once: Whether what the step returns must be right before backward, even where rows are
            bounded.
    """

    tells_at_once: bool

    @property
    def averaged(self) -> int | None:
        """The number of ranks over which gradients of the caller's loss are averaged; 1: they are summed;
        None: the loss is the step's own, and a term beside it is alike on all ranks."""
        ...

    def forward(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs: ...

    def backward(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs: ...

    def take(self, task: Task, logits_TE: Tensor) -> None:
        """Take the logits of a router, in a step that hands them out."""
        ...

    def router_gradients(self, task: Task) -> list[Tensor]:
        """Return the gradient of the logits that a task's forward pass has handed out, if it has."""
        ...

    def outputs(self, context: StepContext, statistics: StepStatistics) -> tuple[Tensor, ...]:
        """Return what the step returns, when its forward half has run."""
        ...

    def slopes(self, *grads: Tensor) -> LossGradients:
        """Take the gradients of the outputs, and return those that tasks start from."""
        ...


@dataclass
class StepContext:
    """What handlers work on in one step, in addition to what tasks hand to each other.

    Attributes:
        parts: The parts of the model.
        batch: The samples of this rank, cut into microbatches.
        part: The batch with the tokens that are this rank's own, where ranks share those of every sample.
        tensor: This rank's place among the ranks that share tokens.
        makers: The makers of each layer's routes; None for a dense layer.
        segment: Makes a compute segment.
        autocast: Returns the context in which tasks compute.
        wire_dtype: The type of rows in transit; None: unchanged.
        residual_transport: How residual streams get to where outputs are.
        degrees: The numbers of chunks in which rows of an MoE layer travel.
        weights: Makes the object to which a slice's weight gradients are left.
        marks: What is summed with the statistics, float64 [FIELDS], see `fingerprints`.
        ending: What the step ends with.
        replications: The places of experts, replicas among them, by layer; () if there are no replicas.
        split: Returns how rows of an MoE layer are split among replicas when all ranks' counts are known;
            None where each rank knows before.
        fingerprint: Makes the fingerprint of the values that ranks hold alike; None in steps that do not
            compare them.
        bounds: The bounds of rows.
        training: Whether backward follows.
        slopes: The gradients that the backward half starts from, known when it begins.
        total, marks_total: The statistics and the marks of all ranks, known when the statistics task has run.
        loads_PYE: Choices by rank, MoE layer and expert; known when the loads task has run, if there is one.
        sample_loads: The choices of this rank's samples, known at the same time.
        features: What handlers of features work on, by class; see `of`.
    """

    parts: ModelParts
    batch: Batch
    part: Batch
    tensor: TensorPlace
    moe: MoEConfig
    makers: Sequence[RouteMaker | None]
    balance: Balance
    segment: Callable[[], AnySegment]
    autocast: Callable[[], AbstractContextManager[Any]]
    wire_dtype: torch.dtype | None
    residual_transport: ResidualTransport
    degrees: Degrees
    weights: Callable[[], WeightGradients | AutogradWeights]
    transports: Transports
    buckets: Buckets
    codec: StatisticsCodec
    marks: Tensor
    ending: Ending
    replications: Sequence[Replication | None] = ()
    split: Callable[[int], ExactSplit | None] = lambda layer: None
    fingerprint: Callable[[], Tensor] | None = None
    bounds: StepBounds = field(default_factory=Counted)
    training: bool = True
    slopes: LossGradients = field(default_factory=lambda: LossGradients(torch.ones(()), torch.ones(())))
    total: StepStatistics = field(init=False, repr=False)
    marks_total: HostCounts = field(init=False, repr=False)
    loads_PYE: Tensor | None = None
    sample_loads: LayerLoads = ()
    features: dict[type, object] = field(default_factory=dict)

    @cached_property
    def layers(self) -> Sequence[Layer]:
        """The layers of the model, as they are in this step."""
        layers = list[Layer]()
        before = 0
        for block in self.parts.parts:
            layers.append(Layer(block, block.moe, before))
            before += block.moe is not None
        return layers

    @cached_property
    def balance_slope(self) -> Tensor:
        """The gradient of every term of balance, in a backward pass."""
        return self.slopes.balance * self.moe.aux_loss_coeff

    @cached_property
    def z_slope(self) -> Tensor:
        """The gradient of every sum of squared log-partitions, in a backward pass."""
        return self.slopes.balance * (self.moe.z_loss_coeff / self.total.tokens)

    def maybe(self, kind: type[Part]) -> Part | None:
        """Return what a feature works on in this step: the object of this class; None if there is none."""
        part = self.features.get(kind)
        assert part is None or isinstance(part, kind), kind
        return part

    def of(self, kind: type[Part]) -> Part:
        """Return what a feature works on in this step, as `maybe` does; a step with its tasks has one."""
        part = self.maybe(kind)
        assert part is not None, f"a step whose tasks need {kind.__name__} is given one"
        return part

    def metadata_of(self, task: Task, inputs: Inputs) -> SampleMetadata:
        """Return a task's samples, as far as it has their tokens: this rank's tokens, or all of them."""
        if task.cut.token_shards == 1:
            return self.moved_metadata(task, inputs)
        assert task.microbatch is not None, task
        moved: SampleMetadata | None = inputs.maybe("metadata")
        known = self.part.metadata[task.microbatch]  # whose copies for the host began before the first task
        return known if moved is None else moved.part(self.tensor.rank, self.tensor.size)

    def moved_metadata(self, task: Task, inputs: Inputs) -> SampleMetadata:
        """Return a task's samples with all their tokens.

        Where samples have moved, these are the ones that came, else those of the batch.
        """
        assert task.microbatch is not None, task
        moved: SampleMetadata | None = inputs.maybe("metadata")
        return self.batch.metadata[task.microbatch] if moved is None else moved

    def counts_once(self, task: Task) -> bool:
        """Return whether this rank counts the task's tokens in sums: several ranks may have the same."""
        return task.cut.token_shards > 1 or self.tensor.rank == 0

    def following(self, layer: int) -> int | None:
        """Return the number of the next MoE layer; None after the last."""
        numbers = range(layer + 1, len(self.layers))
        return next((number for number in numbers if self.layers[number].moe is not None), None)

    def replication(self, layer: int) -> Replication:
        """Return where the experts of an MoE layer are, replicas among them."""
        replication = self.replications[layer] if self.replications else None
        return replication or Replication.none(self.layers[layer].experts.placement, 0)

    def transport(self, task: Task) -> Transport:
        """Return the transport by which a task meets other ranks."""
        return self.transports.of(task.lane, task.axes)

    def maker(self, layer: int) -> RouteMaker:
        """Return the maker of the routes of an MoE layer."""
        maker = self.makers[layer]
        assert maker is not None, layer
        return maker

    def counting(self, layer: int) -> RouteMaker:
        """Return the object that makes routes from the counts that ranks exchange."""
        maker, split = self.maker(layer), self.split(layer)
        return maker if split is None else replace(maker, split=split)


@dataclass(frozen=True)
class TensorPlace:
    """This rank's place among the `size` ranks that share attention and have the same samples."""

    rank: int = 0
    size: int = 1

    def lengths(self, length: int) -> tuple[int, ...]:
        """Return the tokens of a sample on each of these ranks."""
        return split_sizes(length, self.size)


class Handler(Protocol):
    """Runs a task. `context` is what the step's owner works on: a StepContext in a real step."""

    def __call__(self, context: Any, task: Task, inputs: Inputs, /) -> Outputs: ...


Handlers = Mapping[tuple[str, Phase], Handler]

HANDLERS: dict[tuple[str, Phase], Handler] = {}
"""The handlers of a real step."""


def handles(op: str | Iterable[str], *phases: Phase) -> Callable[[Handler], Handler]:
    """Register a handler for ops in some phases.

    Raises:
        ScheduleError: If an op has a handler in one of the phases already.
    """
    ops = (op,) if isinstance(op, str) else tuple(op)

    def register(handler: Handler) -> Handler:
        for key in product(ops, phases):
            if HANDLERS.get(key, handler) is not handler:
                raise ScheduleError(f"op {key[0]} has a handler for phase {key[1]} already")
            HANDLERS[key] = handler
        return handler

    return register


def check_handlers(tasks: Iterable[Task], handlers: Handlers) -> None:
    """Raise ScheduleError naming the first task that no handler can run, or whose op is not registered."""
    for task in tasks:
        if task.op not in OPS:
            raise ScheduleError(f"{task}: no op is called {task.op}. Add it with ops.register.")
        if (task.op, task.phase) not in handlers:
            raise ScheduleError(
                f"{task}: op {task.op} has no handler for phase {task.phase}. Add one with runtime.handles."
            )
