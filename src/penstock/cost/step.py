"""The predicted cost of every task of a step, from a workload and a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from penstock.cost.cluster import AlphaBeta, ClusterConfig
from penstock.cost.parts import kernels_of
from penstock.cost.workload import Workload
from penstock.features.sharded_optimizer.feature import of_optimizer
from penstock.features.table import FEATURES
from penstock.graph import Task
from penstock.mesh import Group, stays_inside
from penstock.ops import Work, spec_of
from penstock.ops.core import KindName, kind_of_task
from penstock.ops.work import FLOAT32_BYTES
from penstock.routing.sizes import part_sizes, split_sizes
from penstock.step import StepShape
from penstock.step.shape import FORM_TOKENS
from penstock.timing import Cost


@dataclass(frozen=True)
class StepCost:
    """`cost(task)` in seconds, the same on all ranks. Tasks that are alike are computed once.

    Attributes:
        shared: The seconds of tasks in other cuts of the same step, with the same workload and cluster; the
            cost adds its own.
    """

    shape: StepShape
    workload: Workload
    cluster: ClusterConfig
    shared: dict[object, float] = field(default_factory=dict, repr=False, compare=False)
    _seconds: dict[int, tuple[float, Task]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _alike: dict[object, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _lines: dict[object, AlphaBeta] = field(default_factory=dict, init=False, repr=False, compare=False)
    _reduced: dict[tuple[int, str], tuple[int, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __call__(self, task: Task) -> float:
        entry = self._seconds.get(id(task))  # quicker than by its name; kept, it keeps its id
        if entry is not None:
            return entry[0]
        layer, op, phase, microbatch, chunk, piece = task.name
        samples = None if microbatch is None else self._samples[microbatch]
        kind: tuple[object, ...] = self._kinds[layer], op, phase, samples, chunk, piece
        if self.shape.more:  # passes of one's own may treat layers differently that are alike
            kind = (*kind, task.lane, task.axes, task.cut, tuple(task.inputs))
        seconds = self._alike.get(kind)
        if seconds is None:
            facts = task.lane, task.axes, task.cut, tuple(task.inputs)
            key = self._layers[layer], op, phase, samples, chunk, piece, facts
            seconds = self.shared.get(key)
            if seconds is None:
                computes = task.lane.computes
                seconds = self.shared[key] = self.compute_s(task) if computes else self.communication_s(task)
            self._alike[kind] = seconds
        self._seconds[id(task)] = seconds, task
        return seconds

    @cached_property
    def _layers(self) -> list[tuple[object, ...]]:
        """For every layer, what prices its tasks, however it is cut."""
        shape = self.shape
        common = shape.expert_form, shape.replica_slots, shape.packed_residual
        kinds = zip(shape.moe_layers, *self._gradients.values(), strict=True)
        return [(*kind, *common) for kind in kinds]

    @cached_property
    def _samples(self) -> tuple[int, ...]:
        """Samples of every microbatch."""
        return split_sizes(self.workload.batch, self.shape.microbatches)

    @cached_property
    def _gradients(self) -> Mapping[KindName, tuple[int, ...]]:
        """Bytes of gradients by kind and layer."""
        return self.workload.gradients_of(self.shape.expert_form)

    @cached_property
    def _sizes(self) -> StepSizes:
        return StepSizes(self)

    @cached_property
    def _kinds(self) -> list[int]:
        """The first layer that is like it, for every layer."""
        shape = self.shape
        columns: list[Sequence[object]] = [
            shape.moe_layers,
            *self._gradients.values(),
            *shape.pieces.values(),
        ]
        if shape.all_reduce_parts:
            columns.append(shape.all_reduce_parts)
        first: dict[object, int] = {}
        return [first.setdefault(kind, i) for i, kind in enumerate(zip(*columns, strict=True))]

    def work(self, task: Task) -> Work:
        """Return what the task asks of a rank.

        Raises:
            ScheduleError: For an unregistered op.
        """
        spec = spec_of(task.op)
        assert spec.work is not None, "an op is registered with its work"
        return spec.work(task, self._sizes)

    def communication_s(self, task: Task, load: float = 1.0) -> float:
        """Return seconds of a communication task.

        Args:
            load: The rows, as a multiple of those under even routing.
        """
        return self._transfer_s(task, self.work(task), load)

    def scaled_s(self, task: Task, load: float) -> float:
        """Return the seconds of a transfer with `load` times its bytes, whether or not they follow rows."""
        return self._transfer_s(task, replace(self.work(task), follows_rows=True), load)

    def compute_s(self, task: Task) -> float:
        seconds: float = self.cluster.task_s(task.op, task.phase, self.work(task), 1.0)
        return seconds

    def loaded_s(self, task: Task, load: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return seconds per rank when its experts receive `load` times the even share of rows."""
        return np.asarray(self.cluster.task_s(task.op, task.phase, self.work(task), load))

    def _transfer_s(self, task: Task, work: Work, load: float) -> float:
        """Return the seconds of the task's collective in its groups; without a collective, of its copies."""
        prolonged = self.cluster.prolonged(task.op)
        load = load if work.follows_rows else 1.0
        if not work.collective:
            return self.cluster.nominal_s(0.0, load * work.copied_bytes) * prolonged
        collective, axes = work.collective, task.axes
        key = collective, task.op, axes
        if key not in self._lines:
            cluster, sizes = self.cluster, self.workload
            match collective:
                case "leg":
                    met = Group.EXPERT_SHARDS if axes == Group.EXPERT_SHARDS else Group.EXPERT
                    line = cluster.leg(sizes.dispatch, task.op, sizes.span(met), met)
                case "all_to_all":
                    line = cluster.all_to_all(sizes.span(axes), axes)
                case "all_reduce" if not stays_inside(axes):
                    line = cluster.all_reduce(sizes.span(axes))
                case "all_gather" | "reduce_scatter" if not stays_inside(axes):
                    line = cluster.parts(sizes.span(axes), axes)
                case _:
                    line = cluster.inside(collective, sizes.mesh.size(axes))
            self._lines[key] = line
        return self._lines[key].seconds(load * work.sent_bytes) * prolonged

    def row_bytes(self, *, outward: bool) -> float:
        """Return bytes of a row in transit, with what it brings along, see `Workload.row_bytes`."""
        columns = self._row_columns if outward else 0
        return self.workload.row_bytes(outward=outward) + columns * self.workload.element_bytes

    @cached_property
    def _row_columns(self) -> int:
        """Numbers that a row brings to experts beside its hidden state."""
        return sum(feature.row_columns(self.shape) for feature in FEATURES)

    def leg_bytes(self, rows: float, *, outward: bool, between: bool) -> float:
        """Return bytes in one leg of a dispatch, see `Workload.leg_bytes`."""
        work = self.workload
        plain_bytes = work.row_bytes(outward=outward)
        per_row = self.row_bytes(outward=outward) / plain_bytes
        return per_row * work.leg_bytes(rows, outward=outward, between=between)

    def rows(self, task: Task) -> float:
        """Return token copies that a rank sends to all experts in the task's chunk."""
        assert task.microbatch is not None and task.chunk is not None, task
        cut, sizes = task.cut, self.workload
        whole, shards = (task.microbatch, cut.microbatches), cut.token_shards
        split = FORM_TOKENS[self.shape.expert_form] == "split"
        ranks = (shards, 1) if split else (1, shards)
        return sum(sizes.rows(*whole, s, cut.slices, *ranks) for s in cut.held)

    def reduced_bytes(self, task: Task) -> int:
        """Return bytes of gradients, or of their parameters, in one of a layer's pieces.

        A layer is cut once, however many its pieces.
        """
        assert task.piece is not None, task
        whole = self._kinds[task.layer], task.op
        if whole not in self._reduced:
            sizes = self._gradients[kind_of_task(task).name]
            self._reduced[whole] = part_sizes(sizes[task.layer] // FLOAT32_BYTES, task.cut.parts)
        return self._reduced[whole][task.piece] * self._state_bytes[of_optimizer(task)]

    @cached_property
    def _state_bytes(self) -> dict[str, int]:
        """Bytes of a number that a task sends or updates, by its part in the optimiser."""
        state = self.workload.state
        gathered = state.parameter_bytes * (2 if state.fully_sharded else 1)
        return {"gather": gathered, "update": FLOAT32_BYTES, "": state.gradient_bytes}


class StepSizes:
    """Sizes that ops ask for, of a step's workload and shape."""

    def __init__(self, step: StepCost) -> None:
        work = step.workload
        self.num_experts, self.top_k = work.num_experts, work.top_k
        self.tp_size, self.etp_size = work.tp_size, work.etp_size
        self.moe_layers = step.shape.moe_layers
        self.rows, self.reduced_bytes = step.rows, step.reduced_bytes
        self.hidden_bytes, self.wire_bytes = work.hidden_bytes, work.wire_bytes
        self.leg_bytes, self.coding_bytes = step.leg_bytes, work.coding_bytes
        self.packed_residual = step.shape.packed_residual
        self.attention_flops, self.dense_flops = work.attention_flops, work.dense_flops
        self.router_flops = work.router_flops
        self.shared_flops, self.expert_flops = work.shared_flops, work.expert_flops
        self.head_flops, self._tokens = work.head_flops, work.tokens
        self.kernels = partial(kernels_of, work)
        self.logit_bytes, self.replica_bytes = work.logit_bytes, work.expert_bytes * step.shape.replica_slots
        self.num_replica_slots = work.ep_size * step.shape.replica_slots
        self._mesh, self._samples = work.mesh, step._samples

    def tokens(self, task: Task) -> int:
        """Return the tokens of the task's microbatch, or this rank's part where ranks share them."""
        assert task.microbatch is not None, task
        return self._tokens(task.microbatch, task.cut.microbatches, task.cut.token_shards)

    def samples(self, task: Task) -> int:
        """Return the samples of the task's microbatch on a rank."""
        assert task.microbatch is not None, task
        return self._samples[task.microbatch]

    def members(self, task: Task) -> int:
        """Return the number of ranks that meet in the task."""
        return self._mesh.size(task.axes)

    def owners(self, task: Task) -> int:
        """Return the number of ranks that share what the task updates or gathers."""
        return self._mesh.size(kind_of_task(task).axes_of(sharing=self.tp_size > 1))


@dataclass(frozen=True)
class UnevenRanks:
    """A cost on ranks whose experts have different loads: an array [ranks] for the tasks of experts.

    Attributes:
        load: The tokens of every rank's experts, as a multiple of those under even routing; a transfer takes
            as long as the busiest rank's.
    """

    even: StepCost
    load: tuple[float, ...]

    def __call__(self, task: Task) -> float | npt.NDArray[np.float64]:
        if task.lane.computes:
            loaded = self.even.work(task).follows_rows
            return self.even.loaded_s(task, np.array(self.load)) if loaded else self.even(task)
        busiest = max(1.0, *self.load)
        return self.even(task) if busiest == 1.0 else self.even.communication_s(task, busiest)


def slowed(cost: Cost, slowness: Sequence[float]) -> Cost:
    """Return the cost on ranks whose computation takes longer.

    Args:
        slowness: How many times as long every rank's computation takes.
    """
    times_P = np.array(slowness)
    return lambda task: cost(task) * times_P if task.lane.computes else cost(task)
