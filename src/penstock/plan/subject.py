"""The problem for which a plan is sought, made from a published model and a cluster. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, get_args

from penstock.config import ConfigError, IndivisibleError, Within, check_bounds, check_name
from penstock.config.bounds import MOST_RANKS, Ranks
from penstock.cost import ClusterFile, ProfiledCluster, Workload
from penstock.cost.devices import Computing
from penstock.decision import Decision, Movable, PlacementConfig
from penstock.features.dispatch import runnable
from penstock.features.field import NOTHING_MOVES
from penstock.mesh import group_sizes, holders, ranks_per_node
from penstock.ops.work import EXPERT_MATRICES, FLOAT32_BYTES
from penstock.placement import ExpertPlacement
from penstock.plan.candidate import Candidate
from penstock.plan.effort import Searched
from penstock.plan.models import MODELS, PublishedModel
from penstock.plan.plan_file import PlanFile
from penstock.plan.problem import Problem
from penstock.step import StepShape
from penstock.step.shape import Recompute, Sharing
from penstock.words import counted

ELEMENT_BYTES: dict[Computing, int] = {"float32": 4, "bfloat16": 2}
"""Bytes of a number in activations, in memory and on the wire. Gradients and parameters are float32."""

Layers = Annotated[int, Within(1, 1024, "every layer adds dozens of tasks to a step's plan")]
Samples = Annotated[int, Within(1, 1 << 20, "all samples of a step are in memory at once")]
Tokens = Annotated[int, Within(1, 1 << 24, "a sample's attention is computed in one piece")]
Experts = Annotated[int, Within(1, 1 << 20, "the router compares every token with all of them")]
UNITS = {"num_layers": "layers", "seq_len": "tokens per sample"}


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Sizes given by a user instead of the study's; None = as published.

    Attributes:
        nodes, ranks_per_node: The size of the cluster.
        ep_size: The ranks that share the experts of a layer.
        tp_size, etp_size: The ranks that share attention, and every expert; a step has the same samples
            whatever they are.
        recompute: What is recomputed before its backward; None = as much as a plan needs to fit.
        precision: The type in which products are computed; None = that of the cluster file's rates, or else
            what the devices are best at.
    """

    layers: Layers | None = None
    batch: Samples | None = None
    seq_len: Tokens | None = None
    top_k: Experts | None = None
    num_experts: Experts | None = None
    nodes: Ranks | None = None
    ranks_per_node: Ranks | None = None
    ep_size: Ranks | None = None
    tp_size: Ranks | None = None
    etp_size: Ranks | None = None
    recompute: Recompute | None = None
    precision: Computing | None = None

    def __post_init__(self) -> None:
        try:
            check_bounds(self)
        except ConfigError as error:
            key = "--" + error.key.replace("_", "-")
            raise ConfigError(key, error.value, error.why, error.hint) from None

    def applied(self, model: PublishedModel) -> PublishedModel:
        """Return the model with these sizes where they are given."""
        return replace(
            model,
            num_layers=self.layers or model.num_layers,
            batch=self.batch or model.batch,
            seq_len=self.seq_len or model.seq_len,
            top_k=self.top_k or model.top_k,
        )


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A problem with its description.

    Attributes:
        notes: Remarks on the numbers for users.
        precision: The type in which products are computed and rows travel.
        why_precision: The reason, as text.
        device: The name of one device; "" = not known.
        memory_bytes: The memory of a rank; None = not known.
        budget: The budget of the search, if nothing else is said.
        starts: Decisions from which a search starts: the quick plan for which a layout was chosen.
        sharded: The problem with a sharded optimiser, where the faster of the two is sought.
        given: The step in the given layout, where quick plans prefer the one of `problem`.
        movable: What may be moved, to be weighed against a known routing.
        ep_size: The ranks over which experts are to be spread in every layout; None = that is open.
    """

    title: str
    cluster_name: str
    problem: Problem
    precision: Computing = "float32"
    why_precision: str = ""
    sharded: Problem | None = None
    given: Subject | None = None
    memory_bytes: int | None = None
    device: str = ""
    notes: tuple[str, ...] = ()
    movable: Movable = NOTHING_MOVES
    ep_size: int | None = None
    budget: float = 1.0
    starts: tuple[Decision, ...] = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problem with every optimiser that is open."""
        return (self.problem,) if self.sharded is None else (self.problem, self.sharded)

    def plan_file(self, best: Candidate, searched: Searched, why: tuple[str, ...] = ()) -> PlanFile:
        """Return the file of a plan for the problem, with its explanation."""
        named = {"model": self.title, "cluster": self.cluster_name}
        return PlanFile.of(self.problem, best, **named, why=why, search=searched)

    def changed(self, change: Callable[[Problem], Problem], *notes: str) -> Subject:
        """Return the subject with every problem changed, and more notes."""
        return replace(
            self,
            problem=change(self.problem),
            sharded=None if self.sharded is None else change(self.sharded),
            given=None if self.given is None else self.given.changed(change, *notes),
            notes=(*self.notes, *notes),
        )

    def called(self, title: str) -> Subject:
        """Return the subject, and the step in the given layout, with another title."""
        given = None if self.given is None else self.given.called(title)
        return replace(self, title=title, given=given)

    def beside(self, make: Callable[[], Subject]) -> Subject:
        """Return the subject, to be compared with the step in the given layout if that is another one.

        Args:
            make: Makes that step, or raises ConfigError if the given layout is impossible.
        """
        try:
            given = make()
        except ConfigError:
            return self  # what was left open is compared without it
        own, theirs = self.problem, given.problem
        same = (own.workload, own.shape.sharing) == (theirs.workload, theirs.shape.sharing)
        return self if same else replace(self, given=given)

    @property
    def step(self) -> str:
        """The sizes of a step in one line of text."""
        work, shape = self.problem.workload, self.problem.shape
        capacity = "dropless" if work.capacity_factor is None else f"capacity {work.capacity_factor:g}"
        sharing = f"group of {work.tp_size} ranks" if work.tp_size > 1 else "rank"
        return (
            f"{counted(shape.num_layers, 'layer')} ({sum(shape.moe_layers)} MoE), hidden {work.hidden_size}, "
            f"{counted(work.num_experts, 'expert')} of {work.ffn_hidden_size}, top-{work.top_k}, {capacity}; "
            f"{work.batch} x {work.seq_len} tokens per {sharing}"
        )

    @property
    def ranks(self) -> str:
        """The use of the ranks in one line of text."""
        work = self.problem.workload
        parts = [
            f"{counted(work.world_size, 'rank')}, {work.devices_per_node or work.ranks_per_node} per node"
        ]
        shared = {"attention and samples": work.tp_size, "every expert": work.etp_size}
        if work.tp_size == work.etp_size:
            shared = {"attention, samples and every expert": work.tp_size}
        parts += [f"{size} ranks of a node share {what}" for what, size in shared.items() if size > 1]
        places = counted(work.ep_size, "group" if work.etp_size > 1 else "rank")
        of = " of ranks" if work.etp_size > 1 else ""
        return "; ".join([*parts, f"experts spread over {places}{of}"])


def published_problem(name: str, file: ClusterFile, overrides: Overrides | None = None) -> Subject:
    """Return the step of model `name` on the cluster.

    The head is left out, as in the studies, which count blocks only. Replicated gradients of a layer are 4
    M^2 + M E numbers; where ranks share attention, each has its part of the first term.

    Args:
        overrides: The sizes that differ from the published ones; None = no size does.

    Raises:
        ConfigError: For sizes that do not fit together.
    """
    changes = overrides or Overrides()
    check_name("--model", name, MODELS, "published model")
    published = MODELS[name]
    notes = [published.note] if published.note else []
    on_cluster = published.on.get(file.name, {})
    if on_cluster:
        uses = " and ".join(f"{value} {UNITS[key]}" for key, value in on_cluster.items())
        notes.append(f"the study uses {uses} on {file.name}")
    model = changes.applied(replace(published, **on_cluster))
    nodes, per_node = changes.nodes or file.nodes, changes.ranks_per_node or file.ranks_per_node
    if nodes * per_node > MOST_RANKS:
        why = (
            f"with {per_node} ranks per node there would be more than {MOST_RANKS} ranks, the most supported"
        )
        raise ConfigError("--nodes", nodes, why, f"Use {MOST_RANKS // per_node} or fewer.")
    if (nodes, per_node) != (file.nodes, file.ranks_per_node):
        devices = f"{file.nodes} x {file.ranks_per_node}"
        notes.append(f"link times are extrapolated from the {devices} devices in the file")
        if file.slowness:
            notes.append(
                "slower ranks in the file are ignored, because this cluster has another number of ranks"
            )
    if model.experts_per_node and not changes.num_experts:
        notes.append(
            f"{counted(nodes, 'expert')}: the study has one on every node; --num-experts sets another number"
        )
    precision, why = precision_of(file, changes.precision, own=file.precision)
    there = file.computing_in(precision)
    notes += rate_notes(file, precision)
    changes = replace(changes, precision=precision)
    return Subject(
        title=name,
        cluster_name=file.name,
        problem=_problem(model, changes, nodes, per_node, ProfiledCluster.build(there)),
        precision=precision,
        why_precision=why,
        memory_bytes=file.memory_bytes,
        device=file.device_name,
        notes=tuple(notes),
        movable=NOTHING_MOVES if model.capacity_factor is not None else PlacementConfig().weighed,
        ep_size=changes.ep_size,
    )


def precision_of(
    file: ClusterFile, wanted: Computing | None, own: Computing | None = None
) -> tuple[Computing, str]:
    """Return the precision to plan for, and why: the wanted one, else the file's own, else the devices'."""
    if wanted is not None:
        return wanted, "as set"
    return file.usual_precision if own is None else (own, "as the cluster file's rates")


def rate_notes(file: ClusterFile, precision: Computing) -> list[str]:
    """Return remarks on operations per second that the file has for another precision."""
    then = file.computing_in(precision)
    if file.precision in (None, precision):
        return []
    if then is file:
        device = file.device_name or "a device that is not named"
        return [f"no rate of {device} in {precision} is known: the file's {file.precision} rate is taken"]
    times = then.rates.flops_per_s / file.rates.flops_per_s
    return [f"operations per second: {times:.3g} times the file's in {file.precision}, as the device's peaks"]


def _problem(
    model: PublishedModel, changes: Overrides, nodes: int, per_node: int, cluster: ProfiledCluster
) -> Problem:
    work = _workload(model, changes, nodes, per_node)
    shape = StepShape(
        moe_layers=(True,) * model.num_layers,
        exchange_counts=not work.fixed_slots,
        sharing=Sharing(tp_size=work.tp_size, etp_size=work.etp_size),
        carries_residual=True,
    )
    dispatches = tuple(runnable(work.nodes, work.ranks_per_node, joins=work.etp_size == 1))
    slowness = cluster.file.slowness if cluster.file.ranks == nodes * per_node else ()
    return Problem(
        shape=shape,
        workload=work,
        cluster=cluster,
        dispatches=dispatches,
        slowness=slowness,
        recompute=get_args(Recompute) if changes.recompute is None else (changes.recompute,),
    )


def _workload(model: PublishedModel, changes: Overrides, nodes: int, per_node: int) -> Workload:
    usual_shards = per_node if model.sharded else 1
    tp_size, shards = changes.tp_size or usual_shards, changes.etp_size or usual_shards
    if changes.tp_size or changes.etp_size:  # the studies' own sizes need not divide the heads
        _divided("--tp-size", tp_size, per_node, tp_size, "ranks of a node")
        _divided("--etp-size", shards, per_node, shards, "ranks of a node")
        _divided("--tp-size", tp_size, model.num_heads or tp_size, tp_size, "heads")
        _divided("--etp-size", shards, model.ffn_hidden_size, shards, "hidden units of an expert")
    ranks = nodes * per_node
    groups = holders(ranks, shards)
    batch = _divided("--tp-size", tp_size, model.batch * tp_size, usual_shards, "samples of a step")
    usual = model.experts_per_device * ranks + model.experts_per_node * nodes
    experts = changes.num_experts or usual
    if model.top_k > experts:
        why = f"there {'is' if experts == 1 else 'are'} {counted(experts, 'expert')}"
        raise ConfigError("--top-k", model.top_k, why, f"Use {experts} or fewer, or more nodes.")
    valid = [size for size in group_sizes(groups) if experts % size == 0]
    ep_size = changes.ep_size or (max(valid) if changes.etp_size else groups)
    if ep_size not in valid:
        nearest = min(valid, key=lambda n: (abs(n - ep_size), n))
        why = f"must divide the {counted(groups, 'group')} of ranks and the {counted(experts, 'expert')}"
        raise IndivisibleError("--ep-size", ep_size, why, f"Nearest valid: {nearest}.")
    attention, gate = 4 * model.hidden_size**2 * FLOAT32_BYTES, model.hidden_size * experts * FLOAT32_BYTES
    matrices = EXPERT_MATRICES[model.expert]
    expert = matrices * model.hidden_size * model.ffn_hidden_size * FLOAT32_BYTES // shards
    edp = expert * ExpertPlacement.even(experts, ep_size).slots if groups > ep_size else 0
    return Workload(
        batch=batch,
        seq_len=model.seq_len,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        vocab_size=0,
        num_experts=experts,
        top_k=model.top_k,
        expert_matrices=matrices,
        capacity_factor=model.capacity_factor,
        min_capacity=1,
        world_size=ranks,
        ep_size=ep_size,
        element_bytes=ELEMENT_BYTES[changes.precision or "float32"],
        all_reduce_bytes=(attention // tp_size + (gate if tp_size == 1 else 0),) * model.num_layers,
        expert_all_reduce_bytes=(edp,) * model.num_layers,
        partial_all_reduce_bytes=(gate if tp_size > 1 else 0,) * model.num_layers,
        node_size=holders(ranks_per_node(ep_size * shards, per_node), shards),
        devices_per_node=per_node,
        tp_size=tp_size,
        etp_size=shards,
    )


def _divided(option: str, value: int, total: int, by: int, what: str) -> int:
    """Return `total / by`. Raises IndivisibleError naming the option if that is not a whole number."""
    if total % by:
        why = f"does not divide the {what} ({total} by {by})"
        raise IndivisibleError(option, value, why, "Use another size.")
    return total // by
