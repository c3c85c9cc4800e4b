"""What `penstock schedule NAME` prints: a schedule's order, its simulated time, and what it hides."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.config import ConfigError, check_name
from penstock.cost import ClusterConfig, StepCost, Workload
from penstock.decision import Decision, GradientBytes, PlacementConfig
from penstock.mesh import holders
from penstock.plan.optimizers import updating_experts
from penstock.report.timeline import duration_text, render_timeline
from penstock.schedule import SCHEDULES, StepPlan, plan_step
from penstock.step import Sharing, StepShape
from penstock.step.shape import FORM_TOKENS, ExpertForm, Recompute, Updating
from penstock.timing import LowerBound, lower_bound, overlap_efficiency, simulate
from penstock.trace import Occupation, TaskRecord, occupation
from penstock.words import bit_rate, counted, lane_words


def sharing_text(shape: StepShape) -> str:
    """Say which ranks share what."""
    sharing = shape.sharing
    return (
        f"{counted(sharing.tp_size, 'rank')} share attention (tp), {sharing.etp_size} every expert (etp); "
        f"between blocks tokens are {sharing.tokens}; rows reach all shards as in {shape.expert_form}"
    )


def cluster_text(cluster: ClusterConfig, *, nodes: bool) -> str:
    """Give the rates of a cluster."""
    inside = f" between nodes, {bit_rate(cluster.intra_bytes_per_s)} inside" if nodes else ""
    return (
        f"link {bit_rate(cluster.link_bytes_per_s)}{inside}, latency "
        f"{duration_text(cluster.link_latency_s)}; per rank {cluster.flops_per_s / 1e9:g} GFLOP/s, "
        f"memory {cluster.memory_bytes_per_s / 1e9:g} GB/s"
    )


def placement_text(shape: StepShape) -> str:
    """Say what moves; empty if nothing does."""
    samples = ["samples get new homes in every MoE layer"] if shape.moves_samples else []
    slots = f"every rank holds up to {counted(shape.replica_slots, 'replica')} of others per MoE layer"
    return "; ".join([*samples, *([slots] if shape.replica_slots else [])])


def recompute_text(shape: StepShape) -> str:
    """Say what is recomputed."""
    what = "experts run" if shape.recompute == "experts" else "attention, router and experts run"
    return f"{what} a second time before their backward (in lower case), on the rows that have come already"


def updating_text(updating: Updating) -> str:
    """Say what a sharded optimiser adds to a step."""
    text = (
        "every rank owns a share of what is replicated: gradients are summed in shares (RA) and clipped by "
        "their norm (NM), shares are updated (OA; all of a rank's experts: OX), and gathered (PA): the first "
        "layer's at once, all others by the next step"
    )
    room = "; whole gradients of two layers at a time are kept, the others wait for their sums"
    return text + room if updating.releases else text


def pieces_text(shape: StepShape) -> str:
    """Count what a step is cut into."""
    microbatches = counted(shape.microbatches, "microbatch", "es")
    chunks, backward = counted(shape.chunks, "chunk"), shape.backward_chunks
    if backward != shape.chunks:
        chunks = f"{shape.chunks} forward and {counted(backward, 'backward chunk')}"
    if shape.pair_slices > 1:
        chunks = f"{shape.pair_slices} slices of combine and gather (which overlap)"
    reduced = counted(max(shape.pieces["replicated"]), "all-reduce chunk")
    return f"{microbatches}, {chunks} per MoE layer, {reduced} per layer"


SLOW_LINK_BYTES_PER_S = 5e7
"""With this rate the representative step communicates for about half as long as it computes."""

SHARERS = (1, 2, 4, 8)
"""Numbers of ranks that can share the step that is drawn, whose widths are powers of two."""

MICROBATCHES, ALL_REDUCE_CHUNKS = 2, 4
BASELINE = "sequential"
LABEL_WIDTH = 13


@dataclass(frozen=True, kw_only=True)
class ScheduleDescription:
    """One schedule on one workload and one cluster, simulated. Pictures are text; durations are in seconds.

    Attributes:
        shape: What the system made of the request.
        notes: The parts of the request that the schedule does not read.
        grid: The order of the tasks.
        timeline: The simulated step.
        schedule_text: The schedule as `Schedule.parse` reads it.
        sequential_iteration_s: An iteration of `sequential` on the same workload and cluster.
        bound: What no order of the same tasks is faster than.
        communication_s: All communication of an iteration.
        exposed_communication_s: The part of `communication_s` under which nothing is computed.
        width: Columns of the text.
    """

    name: str
    about: str
    shape: StepShape
    workload: Workload
    cluster: ClusterConfig
    notes: tuple[str, ...]
    grid: str
    timeline: str
    schedule_text: str
    iteration_s: float
    sequential_iteration_s: float
    bound: LowerBound
    communication_s: float
    exposed_communication_s: float
    records: tuple[TaskRecord, ...]
    width: int

    @property
    def efficiency(self) -> float:
        """Work of the busiest lane over the iteration: comparable between schedules that cut differently."""
        return self.bound.busiest_lane_s / self.iteration_s

    @property
    def order_efficiency(self) -> float:
        """Lower bound over iteration: at 1.0 no other order of the same tasks is faster.

        A coarse cut has a high bound and is easily ordered well; that does not make it fast.
        """
        return overlap_efficiency(self.bound, self.iteration_s)

    @property
    def speedup(self) -> float:
        """How many times as fast as `sequential` on the same workload and cluster."""
        return self.sequential_iteration_s / self.iteration_s

    def to_text(self) -> str:
        """Return everything but the schedule's text form, for a terminal."""
        parts = [
            textwrap.fill(f"{self.name}: {self.about}", self.width),
            self._table(self._setting()),
            "ORDER\n" + self.grid.rstrip(),
            "TIME (simulated)\n" + self.timeline.rstrip(),
            self._table(self._result()),
        ]
        return "\n\n".join(parts) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for `--json`; `schedule_text` is what `Schedule.parse` reads."""
        return {
            "schedule": self.name,
            "iteration_s": self.iteration_s,
            "sequential_iteration_s": self.sequential_iteration_s,
            "speedup_over_sequential": self.speedup,
            "lower_bound": {**asdict(self.bound), "seconds": self.bound.seconds},
            "efficiency": self.efficiency,
            "order_efficiency": self.order_efficiency,
            "communication_s": self.communication_s,
            "exposed_communication_s": self.exposed_communication_s,
            "notes": list(self.notes),
            "shape": asdict(self.shape) | {"pieces": dict(self.shape.pieces)},
            "workload": asdict(self.workload),
            "cluster": asdict(self.cluster),
            "grid": self.grid,
            "timeline": self.timeline,
            "schedule_text": self.schedule_text,
        }

    def _table(self, rows: Iterator[tuple[str, str]]) -> str:
        """Return labelled lines, the text of each wrapped beside its label."""
        indent = " " * LABEL_WIDTH
        filled = (
            textwrap.fill(f"{label:<{LABEL_WIDTH}}{text}", self.width, subsequent_indent=indent)
            for label, text in rows
        )
        return "\n".join(filled)

    def _setting(self) -> Iterator[tuple[str, str]]:
        work, shape = self.workload, self.shape
        sharers = "rank" if work.tp_size == 1 else f"{work.tp_size} ranks"
        yield (
            "model",
            f"{counted(shape.num_layers, 'MoE layer')}, hidden {work.hidden_size}, "
            f"{work.num_experts} GELU experts of {work.ffn_hidden_size}, top-{work.top_k}, dropless, "
            f"vocabulary {work.vocab_size}",
        )
        yield (
            "step",
            f"batch {work.batch} x {work.seq_len} tokens per {sharers}, float32, on {work.world_size} ranks "
            f"with {work.placement.slots} experts each (ep {work.ep_size})",
        )
        if not shape.sharing.is_none:
            yield "sharing", sharing_text(shape)
        yield "cluster", cluster_text(self.cluster, nodes=not shape.sharing.is_none)
        yield "pieces", pieces_text(shape)
        if shape.moves_samples or shape.replica_slots:
            yield "placement", placement_text(shape)
        if shape.recompute != "none":
            yield "memory", recompute_text(shape)
        if shape.updating is not None:
            yield "optimizer", updating_text(shape.updating)
        yield from (("note", note) for note in self.notes)

    def _result(self) -> Iterator[tuple[str, str]]:
        bound, hidden_s = self.bound, self.communication_s - self.exposed_communication_s
        busiest = lane_words(bound.busiest_lane, nodes=not self.shape.sharing.is_none)
        against = (
            f"{self.speedup:.2f}x the speed of {BASELINE} ({duration_text(self.sequential_iteration_s)})"
        )
        yield (
            "iteration",
            duration_text(self.iteration_s) + ("" if self.name == BASELINE else f", {against}"),
        )
        yield (
            "network",
            f"{duration_text(self.communication_s)} of communication: {duration_text(hidden_s)} hidden under "
            f"computation, {duration_text(self.exposed_communication_s)} exposed",
        )
        yield (
            "efficiency",
            f"{100 * self.efficiency:.0f} % of the limit: {busiest} has "
            f"{duration_text(bound.busiest_lane_s)} of work, which no overlap can shorten",
        )
        yield (
            "lower bound",
            f"{duration_text(bound.seconds)} for any order of these pieces (critical path "
            f"{duration_text(bound.critical_path_s)}); this order takes {1 / self.order_efficiency:.2f}x "
            f"as long",
        )


def describe_schedule(
    name: str,
    *,
    layers: int,
    microbatches: int | None = None,
    chunks: int | None = None,
    backward_chunks: int | None = None,
    all_reduce_chunks: int | None = None,
    sharing: Sharing | None = None,
    expert_form: ExpertForm | None = None,
    placement: PlacementConfig | None = None,
    recompute: Recompute = "none",
    cluster: ClusterConfig | None = None,
    zero_stage: int = 0,
    width: int = 110,
) -> ScheduleDescription:
    """Plan and simulate schedule `name` on a small representative step. Without `cluster`, a slow link.

    Args:
        microbatches, all_reduce_chunks: None = `MICROBATCHES` and `ALL_REDUCE_CHUNKS`, where the schedule
            reads them.
        chunks: None = the schedule's usual number.
        backward_chunks: None = as many as forward.
        sharing: How ranks share attention and experts, on two nodes with as many ranks as that takes; None =
            `usual_sharing`.
        placement: What moves; None = nothing.
        recompute: What is recomputed before its backward.
        zero_stage: From 1 on the step updates parameters, each rank a share, after clipping.

    Raises:
        ConfigError: If the step cannot have these settings.
    """
    given = {"microbatches": microbatches, "all_reduce_chunks": all_reduce_chunks}
    microbatches = MICROBATCHES if microbatches is None else microbatches
    all_reduce_chunks = ALL_REDUCE_CHUNKS if all_reduce_chunks is None else all_reduce_chunks
    sharing = usual_sharing(name) if sharing is None else sharing
    _check_sharing(sharing)
    cluster = cluster or ClusterConfig(link_bytes_per_s=SLOW_LINK_BYTES_PER_S)
    choice = Decision(
        schedule=name,
        microbatches=microbatches,
        chunks=chunks,
        backward_chunks=backward_chunks,
        expert_form=expert_form,
    )
    choice = replace(choice if placement is None else choice.with_placement(placement), recompute=recompute)
    workload = _workload(layers, microbatches, sharing, choice.form)
    updating = Updating(releases=zero_stage == 2) if zero_stage else None
    workload = workload if updating is None else updating_experts(workload, (True,) * layers)
    size = -(-workload.all_reduce_bytes[0] // all_reduce_chunks)
    choice = replace(choice, all_reduce_chunk_bytes=size)
    run = _run(choice, workload, cluster, sharing, updating)
    still = replace(choice, schedule=BASELINE, samples="none", experts="none")
    return ScheduleDescription(
        name=name,
        about=" ".join((inspect.getdoc(type(SCHEDULES[name])) or "").partition("\n\n")[0].split()),
        shape=run.plan.shape,
        workload=workload,
        cluster=cluster,
        notes=tuple(_notes(choice, run.plan.shape, given)),
        grid=run.plan.schedule.grid(run.plan.graph, width=width),
        timeline=render_timeline(run.records, width=width),
        schedule_text=run.plan.schedule.text(),
        iteration_s=run.occupation.iteration_s,
        sequential_iteration_s=_run(still, workload, cluster, sharing, updating).occupation.iteration_s,
        bound=run.bound,
        communication_s=run.occupation.communication_s,
        exposed_communication_s=run.occupation.exposed_s,
        records=tuple(run.records),
        width=width,
    )


# ---- the representative step -------------------------------------------------------------------------------


def usual_sharing(name: str) -> Sharing:
    """Return pairs that share attention and experts where schedule `name` has an expert form, else none.

    Between blocks, tokens lie as the form wants them at the gate.

    Raises:
        ConfigError: If the name is unknown.
    """
    check_name("schedule", name, SCHEDULES)
    form = SCHEDULES[name].expert_form
    return Sharing(tp_size=2, etp_size=2, tokens=FORM_TOKENS[form]) if form else Sharing()


def _check_sharing(sharing: Sharing) -> None:
    for key, value in (("tp_size", sharing.tp_size), ("etp_size", sharing.etp_size)):
        if value not in SHARERS:
            nearest = min(SHARERS, key=lambda size: abs(size - value))
            why = f"the step that is drawn can be shared by {', '.join(map(str, SHARERS))} ranks"
            raise ConfigError(key, value, why, f"Nearest valid: {nearest}.")


def _workload(layers: int, microbatches: int, sharing: Sharing, form: ExpertForm) -> Workload:
    """Return a small float32 step in which neither computing nor a slow link is negligible.

    Every microbatch holds at least one sample. Experts have no replicas, so only what is replicated
    (attention and gate; norms only where ranks have parts of their gradients) is reduced. Ranks that share
    attention or experts fill two nodes.
    """
    hidden_size, node_size = 512, max(sharing.tp_size, sharing.etp_size)
    world_size = 4 if sharing.is_none else 2 * node_size
    ep_size = holders(world_size, sharing.etp_size)
    num_experts = max(8, ep_size)
    gate_bytes, attention_bytes = 4 * hidden_size * num_experts, 4 * 4 * hidden_size**2 // sharing.tp_size
    shared = sharing.tp_size > 1
    gate_parts = shared and FORM_TOKENS[form] == "split"
    norm_bytes = 4 * 2 * hidden_size * shared
    return Workload(
        batch=max(4, microbatches),
        seq_len=256,
        hidden_size=hidden_size,
        ffn_hidden_size=1024,
        vocab_size=256,
        num_experts=num_experts,
        top_k=2,
        expert_matrices=2,
        capacity_factor=None,
        min_capacity=0,
        world_size=world_size,
        ep_size=ep_size,
        tp_size=sharing.tp_size,
        etp_size=sharing.etp_size,
        devices_per_node=0 if sharing.is_none else node_size,
        element_bytes=4,
        all_reduce_bytes=(attention_bytes + gate_bytes * (not gate_parts),) * layers,
        expert_all_reduce_bytes=(0,) * layers,
        partial_all_reduce_bytes=(norm_bytes + gate_bytes * gate_parts,) * layers,
    )


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A planned and simulated step; records and occupation are those of rank 0, as all ranks are alike."""

    plan: StepPlan
    records: list[TaskRecord]
    occupation: Occupation
    bound: LowerBound


def _run(
    choice: Decision, workload: Workload, cluster: ClusterConfig, sharing: Sharing, updating: Updating | None
) -> _Run:
    def cost_of(shape: StepShape) -> StepCost:
        return StepCost(shape, workload, cluster)

    moe_layers = (True,) * len(workload.all_reduce_bytes)
    shape = StepShape(moe_layers=moe_layers, sharing=sharing, updating=updating, carries_residual=True)
    gradients = GradientBytes(
        workload.all_reduce_bytes, workload.expert_all_reduce_bytes, workload.partial_all_reduce_bytes
    )
    plan = plan_step(choice, shape, gradients, cost_of)
    cost, ranks = cost_of(plan.shape), workload.mesh
    timeline = simulate(plan.schedule, plan.graph, cost, ranks)
    records = [record for record in timeline.records() if record.rank == 0]
    bound = lower_bound(plan.graph, cost, ranks)
    return _Run(plan=plan, records=records, occupation=occupation(records), bound=bound)


# ---- words -------------------------------------------------------------------------------------------------


def _notes(choice: Decision, shape: StepShape, given: Mapping[str, int | None]) -> Iterator[str]:
    """Yield the settings that have no effect, by the shape that the system made.

    given: numbers that were asked for; None = no number was given, and the request has the usual one.
    """
    used = {
        "microbatches": (shape.microbatches, given["microbatches"]),
        "chunks": (max(shape.chunks, shape.pair_slices), choice.chunks),
        "backward_chunks": (shape.backward_chunks, choice.backward_chunks),
        "all_reduce_chunks": (max(shape.pieces["replicated"]), given["all_reduce_chunks"]),
        "expert_form": ("gather" if shape.sharing.is_none else shape.expert_form, choice.expert_form),
    }
    for key, (ran, wanted) in used.items():
        if wanted not in (None, ran):
            yield f"{choice.schedule} ignores {key} = {wanted} and runs with {ran}"
