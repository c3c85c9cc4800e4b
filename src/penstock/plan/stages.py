"""Pipeline stages of a model: their layers, the time of a microbatch on them, and their memory.

A stage is a model of fewer layers on fewer ranks, so its step is built, ordered and priced as any other. The
halves of that step are simulated apart: a forward, a backward, and both of different microbatches together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from penstock.apportion import evenly
from penstock.config import ConfigError
from penstock.cost import ClusterConfig, ClusterFile, Span
from penstock.decision import Decision
from penstock.graph import Graph, Task
from penstock.mesh import MeshError, node_of, stage_nodes, stage_pairs, stage_ranks
from penstock.ops.work import FLOAT32_BYTES
from penstock.plan.memory import MemoryEstimate, estimate_memory
from penstock.plan.pipeline import (
    SIZE,
    VIRTUAL_SIZE,
    Cell,
    Half,
    Pipeline,
    PipelineRun,
    PipelineTimes,
    Slot,
    in_order,
    run_pipeline,
)
from penstock.plan.predict import closing_s, predict_s, task_cost
from penstock.plan.problem import Problem
from penstock.schedule import StepPlan, freeze
from penstock.schedule.flowmoe import all_to_all_first
from penstock.schedule.penstock import remaining_path
from penstock.timing import Issuing, iteration_s, simulate, slowest
from penstock.words import counted


def stage_cluster(file: ClusterFile, stages: int) -> ClusterFile:
    """Return the nodes on which one stage runs.

    Slower ranks in the file are those of all stages, and are left out.

    Raises:
        ConfigError: If stages cannot be alike.
    """
    try:
        ranks = stage_ranks(file.ranks, stages)
        nodes, per_node = stage_nodes(ranks, file.ranks_per_node)
    except MeshError as error:
        valid = [each for each in range(1, file.ranks + 1) if can_have(file, each)]
        near = min(valid, key=lambda each: (abs(each - stages), each))
        why = f"must give stages of as many ranks each, in whole nodes or equal parts of one: {error}"
        raise ConfigError(SIZE, stages, why, f"Nearest valid: {near}.") from None
    if (nodes, per_node) == (file.nodes, file.ranks_per_node):
        return file
    return replace(file, nodes=nodes, ranks_per_node=per_node, slowness=())


def can_have(file: ClusterFile, stages: int) -> bool:
    """Return whether the cluster's ranks divide into so many stages, in whole nodes or equal parts of one."""
    try:
        stage_nodes(stage_ranks(file.ranks, stages), file.ranks_per_node)
    except MeshError:
        return False
    return True


class Part(NamedTuple):
    """Consecutive layers of a model.

    Attributes:
        begins, ends: Whether it has the embedding, and head and loss; these may be all that it has.
    """

    layers: range
    begins: bool = False
    ends: bool = False


@dataclass(frozen=True)
class _Prepared:
    """A part's step, the seconds of its tasks, and how many times longer it takes than simulated."""

    problem: Problem
    plan: StepPlan
    seconds: dict[object, Any]
    beside: dict[object, Any]
    factor: float


@dataclass(frozen=True)
class Stages:
    """A model in stages, all planned alike.

    Attributes:
        problem: The whole model on the ranks of one stage.
        choice: How every stage runs its layers.
    """

    problem: Problem
    choice: Decision
    _parts: dict[object, _Prepared] = field(default_factory=dict)
    _known: dict[object, float] = field(default_factory=dict)
    _pairs: dict[object, tuple[float, float]] = field(default_factory=dict)
    _memory: dict[object, MemoryEstimate] = field(default_factory=dict)
    _network: dict[object, float] = field(default_factory=dict)

    def parts(self, pipeline: Pipeline, layers: Sequence[int] = ()) -> tuple[Part, ...]:
        """Return the parts of all stages.

        Args:
            layers: The number of layers of each part; none = parts that take nearly the same time.

        Raises:
            ConfigError: For more parts than there are layers, embedding and head.
        """
        stages, virtual, _ = pipeline.sizes
        if pipeline.parts > (most := self.problem.shape.num_layers + 2):
            layers_here = counted(self.problem.shape.num_layers, "layer")
            more = f"more than the model has to deal out: {layers_here}, an embedding and a head"
            if stages > most:
                raise ConfigError(SIZE, stages, f"is {more}", f"Use {most} or fewer.")
            why = f"makes {pipeline.parts} parts of {stages} stages, {more}"
            raise ConfigError(VIRTUAL_SIZE, virtual, why, f"Use {most // stages} or fewer.")
        if layers:
            return self.cut(layers)
        # Embedding and head are dealt out as if they were the first and the last layer.
        alone = [Part(range(layer, layer + 1)) for layer in range(self.problem.shape.num_layers)]
        items = [Part(range(0), begins=True), *alone, Part(range(0), ends=True)]
        return self._cut(evenly([self.both_s(each) for each in items], pipeline.parts))

    def cut(self, layers: Sequence[int]) -> tuple[Part, ...]:
        """Return parts with these numbers of layers."""
        return self._cut([size + (i == 0) + (i == len(layers) - 1) for i, size in enumerate(layers)])

    def _cut(self, items: Sequence[int]) -> tuple[Part, ...]:
        """Return parts with these numbers of layers, embedding and head counted as such."""
        last = self.problem.shape.num_layers + 1
        return tuple(
            Part(range(max(0, first - 1), min(last, stop) - 1), first == 0, stop > last)
            for first, stop in pairwise([0, *accumulate(items)])
        )

    def both_s(self, part: Part) -> float:
        """Return the seconds of a forward and a backward of one microbatch, one after the other."""
        return self.half_s(part, forward=True) + self.half_s(part, forward=False)

    def half_s(self, part: Part, *, forward: bool, edge: bool = False) -> float:
        """Return the seconds of a forward or a backward.

        Args:
            edge: Whether it is the first forward, or the last backward, of an update.
        """
        key = self._kind(part), forward, edge
        if key not in self._known:
            self._known[key] = self._run_s(self._prepared(part), self._half(part, forward, edge))
        return self._known[key]

    def network_s(self, part: Part, *, forward: bool, across: bool, edge: bool = False) -> float:
        """Return the seconds in which a half's transfers use what a transfer to another stage uses, too.

        Args:
            edge: See `half_s`.
            across: Whether transfers over the cards of nodes count, or else those over links inside nodes.
        """
        key = self._kind(part), forward, edge, across
        if key not in self._network:
            prepared, half = self._prepared(part), self._half(part, forward, edge)
            between = self.problem.workload.world_nodes > 1
            transfers_s = sum(
                slowest(prepared.seconds[task.name])
                for task in half.of(prepared.plan.graph)
                if task.lane.is_network and across is (between and not task.lane.is_inside)
            )
            self._network[key] = prepared.factor * transfers_s
        return self._network[key]

    def together_s(
        self, ahead: Part, back: Part, *, first: bool = False, last: bool = False
    ) -> tuple[float, float]:
        """Return when a forward and a backward of different microbatches end, that share the lanes.

        Args:
            ahead, back: The part of the forward, and that of the backward.
            first, last: Whether the forward is the first, and the backward the last, of an update.
        """
        key = self._kind(ahead), self._kind(back), first, last
        if key in self._pairs:
            return self._pairs[key]
        forward_s = self.half_s(ahead, forward=True, edge=first)
        ends_s = [(forward_s, forward_s + self.half_s(back, forward=False, edge=last))]
        parts = self._prepared(ahead), self._prepared(back)
        halves = self._half(ahead, True, first), self._half(back, False, last)
        both = [half.of(prepared.plan.graph) for half, prepared in zip(halves, parts, strict=True)]
        if all(both):  # as one graph, by either rule of orders
            seconds = {
                task.name: prepared.factor * prepared.beside[task.name]
                for tasks, prepared in zip(both, parts, strict=True)
                for task in tasks
            }
            graph = Graph((*both[0], *both[1]))

            def cost(task: Task) -> Any:
                return seconds[task.name]

            left_s = remaining_path(graph, cost)
            for rule in (lambda task: (-left_s[task],), all_to_all_first):
                order = freeze(self.choice.schedule, graph, cost, rule)
                times = simulate(order, graph, cost, self.problem.mesh, self._issuing).times
                shared_s, shared_back_s = (
                    max(float(times[task].end.max()) for task in tasks) for tasks in both
                )
                ends_s.append((shared_s, shared_back_s))
        self._pairs[key] = min(ends_s, key=max)
        return self._pairs[key]

    @property
    def _issuing(self) -> Issuing | None:
        """Handing out tasks, of forward and backward as they come."""
        issuing = self.problem.issuing
        return issuing and replace(issuing, halves=False)

    def closing_s(self, part: Part) -> float:
        """Return the seconds of the update of a part, once all gradients of all stages are there."""
        prepared = self._prepared(part)
        updating = prepared.problem.shape.updating
        if updating is None:
            return closing_s(prepared.problem)
        if not updating.clips:
            return 0.0  # every piece is updated when it is summed, in the last backward
        whole = replace(self._half(part, False, True), updates=True)
        return max(0.0, self._run_s(prepared, whole) - self.half_s(part, forward=False, edge=True))

    def memory(self, part: Part) -> MemoryEstimate:
        """Return the memory of a part with the activations of one microbatch."""
        key = self._kind(part)
        if key not in self._memory:
            problem, choice = self._problem(part), self._choice(part)
            without = replace(problem, workload=replace(problem.workload, vocab_size=0))
            of_begin, estimate = (
                estimate_memory(problem if has else without, choice) for has in (part.begins, part.ends)
            )
            estimate = replace(estimate, copies_bytes=of_begin.copies_bytes)
            if not part.layers:
                logits = estimate.activations_bytes - estimate_memory(without, choice).activations_bytes
                estimate = replace(estimate, activations_bytes=logits, buffers_bytes=0)
            self._memory[key] = estimate
        return self._memory[key]

    def _problem(self, part: Part) -> Problem:
        """Return the step of a part; one without layers has a dense one in their place, which never runs."""
        problem = self.problem.only(tuple(part.layers) or (0,))
        work, last = problem.workload, self.problem.shape.num_layers - 1
        sizes = list(work.all_reduce_bytes)
        if not part.layers:
            sizes = [sum(size for size, has in zip(self._ends, part[1:], strict=True) if has)]
            held = work.held and replace(work.held, weights=sizes[0], trained_experts=0)
            work = replace(
                work,
                held=held,
                expert_all_reduce_bytes=(0,),
                partial_all_reduce_bytes=(0,),
                partial_by_form=(),
            )
            problem = replace(problem, shape=replace(problem.shape, moe_layers=(False,)))
        else:  # embedding or head of its layers may be those of another part
            away = [
                size * (layer in part.layers and not has)
                for size, layer, has in zip(self._ends, (0, last), part[1:], strict=True)
            ]
            sizes[0] -= away[0]
            sizes[-1] -= away[1]
            work = replace(work, held=work.held and replace(work.held, weights=work.held.weights - sum(away)))
        if work.tied_embeddings and part.ends and not part.begins:  # it has a copy of the embedding
            sizes[-1] += self._ends[0]
            held = work.held and replace(work.held, weights=work.held.weights + self._ends[0])
            work = replace(work, held=held)
        tied = work.tied_embeddings and part.begins and part.ends
        work = replace(work, tied_embeddings=tied, all_reduce_bytes=tuple(sizes))
        return replace(problem, workload=work)

    @property
    def tied_bytes(self) -> int:
        """Bytes of the gradients of a weight that the first and the last stage both have."""
        work = self.problem.workload
        return self._ends[0] * work.state.gradient_bytes // FLOAT32_BYTES if work.tied_embeddings else 0

    @cached_property
    def _ends(self) -> tuple[int, int]:
        """Bytes of the gradients of embedding and head, which the first and the last layer have besides."""
        work, sizes = self.problem.workload, self.problem.workload.all_reduce_bytes
        whole = work.vocab_size * work.hidden_size * FLOAT32_BYTES // work.tp_size
        begin = min(whole, sizes[0])
        if work.tied_embeddings:
            return begin, 0
        return begin, min(whole, sizes[-1] - (begin if len(sizes) == 1 else 0))

    def _choice(self, part: Part) -> Decision:
        """Return how a part runs: without layers there is nothing to cut."""
        own = self.choice
        return own if part.layers else Decision(dispatch=own.dispatch, recompute=own.recompute)

    def _half(self, part: Part, forward: bool, edge: bool) -> Half:
        updating = self.problem.shape.updating
        sums = edge or (updating is not None and updating.releases)
        updates = edge and updating is not None and not updating.clips
        return Half(
            forward=forward,
            begins=part.begins,
            ends=part.ends,
            blocks=bool(part.layers),
            first=edge or self.problem.workload.state.fully_sharded,
            sums=sums,
            updates=updates,
        )

    def _kind(self, part: Part) -> object:
        """Return what parts have in common that take the same time."""
        layers, last = part.layers, self.problem.shape.num_layers - 1
        outer = 0 in layers, last in layers  # without embedding or head, their gradients are less
        return tuple(self._layer_kinds[layers.start : layers.stop]), part.begins, part.ends, *outer

    @cached_property
    def _layer_kinds(self) -> list[int]:
        numbers: dict[object, int] = {}
        return [numbers.setdefault(kind, len(numbers)) for kind in self.problem.layer_kinds]

    def _prepared(self, part: Part) -> _Prepared:
        key = self._kind(part)
        if key not in self._parts:
            problem, choice = self._problem(part), self._choice(part)
            plan = problem.plan(choice)
            settled, beside = task_cost(problem, choice, plan), problem.cost(choice, plan.shape)
            predicted_s = predict_s(problem, choice, plan)
            simulated_s = iteration_s(plan.schedule, plan.graph, settled, problem.mesh, problem.issuing)
            self._parts[key] = _Prepared(
                problem=problem,
                plan=plan,
                seconds={task.name: settled(task) for task in plan.graph.tasks},
                beside={task.name: beside(task) for task in plan.graph.tasks},
                factor=predicted_s / simulated_s,
            )
        return self._parts[key]

    def _run_s(self, prepared: _Prepared, half: Half) -> float:
        """Return when the last task of a half ends; they are handed out as they come."""
        if not (tasks := half.of(prepared.plan.graph)):
            return 0.0
        order, graph, seconds = in_order(prepared.plan.schedule, tasks), Graph(tuple(tasks)), prepared.seconds
        mesh, issuing = self.problem.mesh, self._issuing
        return prepared.factor * iteration_s(order, graph, lambda task: seconds[task.name], mesh, issuing)


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """A planned update of a model in stages.

    Attributes:
        problem: The whole model on the ranks of one stage.
        choice: How every stage runs its layers.
        layers: The number of layers of every part.
        forward_s, backward_s: The seconds of one microbatch on all parts of the slowest stage.
        together_s: The seconds of a forward and a backward of different microbatches at once; None = they do
            not overlap.
        memory: The memory of every stage.
        held: The most microbatches of which every stage keeps activations, in parts.
        link_s, link_alone_s: The seconds of a microbatch's hidden states to another stage, beside that
            stage's own transfers and without them.
        shared_s: The seconds by which a forward and a backward take longer on the slowest stage, since they
            share the network with such transfers.
        tied_bytes, tied_s: The gradients of a weight that the first and the last stage share, and the seconds
            in which they are summed; 0 where there is none.
    """

    pipeline: Pipeline
    problem: Problem
    choice: Decision
    layers: tuple[int, ...]
    run: PipelineRun
    forward_s: float
    backward_s: float
    together_s: float | None
    memory: tuple[MemoryEstimate, ...]
    held: tuple[int, ...]
    link_s: float = 0.0
    link_alone_s: float = 0.0
    shared_s: float = 0.0
    tied_bytes: int = 0
    tied_s: float = 0.0

    @property
    def update_s(self) -> float:
        """Predicted seconds from the first forward of an update to the end of its last step."""
        return self.run.seconds

    @property
    def largest(self) -> int:
        """The stage that needs most memory."""
        return max(range(len(self.memory)), key=lambda stage: self.memory[stage].total_bytes)

    @property
    def memory_bytes(self) -> int:
        return self.memory[self.largest].total_bytes


def placed(stages: Stages, pipeline: Pipeline, layers: Sequence[int] = ()) -> PipelinePlan:
    """Predict an update of stages, of which parts may be known from another pipeline.

    Args:
        layers: The number of layers of every part; none = parts that take nearly the same time.
    """
    parts = stages.parts(pipeline, layers)
    closing = {part: stages.closing_s(part) for part in parts}
    links = _Links(stages, parts, pipeline)
    last = pipeline.pipeline_parallel_size - 1
    tied_bytes = stages.tied_bytes if last else 0
    times = PipelineTimes(
        slot=_SlotTimes(stages, parts, pipeline.microbatches, links),
        link=links.seconds,
        tied_s=links.sent_s(0, last, tied_bytes) if tied_bytes else 0.0,
        closing=lambda stage: sum(closing[parts[each]] for each in pipeline.parts_of(stage)),
    )
    run = run_pipeline(pipeline, times)
    each = range(pipeline.pipeline_parallel_size)
    both = [
        [sum(stages.half_s(parts[i], forward=way) for i in pipeline.parts_of(stage)) for way in (True, False)]
        for stage in each
    ]
    slowest = max(each, key=lambda stage: sum(both[stage]))
    together_s = None
    if pipeline.overlaps:
        own = [parts[i] for i in pipeline.parts_of(slowest)]
        together_s = sum(max(stages.together_s(part, part)) for part in own)
    held = [max(counts, key=sum) for counts in pipeline.held]
    return PipelinePlan(
        pipeline=pipeline,
        problem=stages.problem,
        choice=stages.choice,
        layers=tuple(len(part.layers) for part in parts),
        run=run,
        forward_s=both[slowest][0],
        backward_s=both[slowest][1],
        together_s=together_s,
        memory=stages_memory(stages, pipeline, parts),
        held=tuple(map(sum, held)),
        link_s=max((links.seconds(*pair) for pair in links.used), default=0.0),
        link_alone_s=max((links.solo_s(*pair) for pair in links.used), default=0.0),
        shared_s=sum(
            links.longer_s((Cell(way, i, 1),), (stages.half_s(parts[i], forward=way),))
            for i in pipeline.parts_of(slowest)
            for way in (True, False)
        ),
        tied_bytes=tied_bytes,
        tied_s=times.tied_s,
    )


@dataclass(frozen=True)
class _SlotTimes:
    """When a forward, a backward, or both at once end; those of parts that have been asked for are kept."""

    stages: Stages
    parts: Sequence[Part]
    microbatches: int
    links: _Links
    _known: dict[object, tuple[float, ...]] = field(default_factory=dict)

    def __call__(self, slot: Slot) -> tuple[float, ...]:
        key = tuple([(cell.forward, cell.part, self._is_edge(cell)) for cell in slot])
        if key not in self._known:
            parts, edges = [self.parts[cell.part] for cell in slot], [*map(self._is_edge, slot)]
            ends_s = (
                (self.stages.half_s(parts[0], forward=slot[0].forward, edge=edges[0]),)
                if len(slot) == 1
                else self.stages.together_s(*parts, first=edges[0], last=edges[1])
            )
            longer_s = self.links.longer_s(slot, ends_s, edges)
            self._known[key] = tuple(end_s + longer_s for end_s in ends_s)
        return self._known[key]

    def _is_edge(self, cell: Cell) -> bool:
        """Return whether it is the first forward of its part in an update, or the last backward."""
        return cell.microbatch == (0 if cell.forward else self.microbatches - 1)


@dataclass(frozen=True)
class _Links:
    """Transfers between stages, which share a node's card, or links inside it, with the stages' own.

    While both are on their way, each gets half of the rate. A stage takes at least as long for a microbatch
    as what they share needs for both.
    """

    stages: Stages
    parts: Sequence[Part]
    pipeline: Pipeline

    @cached_property
    def used(self) -> list[tuple[int, int]]:
        """The pairs of stages between which something is sent."""
        pairs = pairwise(map(self.pipeline.stage_of, range(self.pipeline.parts)))
        both = [pair for one, other in pairs if one != other for pair in ((one, other), (other, one))]
        return list(dict.fromkeys(both))

    def solo_s(self, sender: int, receiver: int) -> float:
        """Return the seconds of one microbatch's hidden states from one stage to another, beside nothing."""
        if sender == receiver:
            return 0.0
        work, sharing = self.stages.problem.workload, self.stages.problem.shape.sharing
        shares = sharing.tp_size if sharing.tokens == "split" else 1
        sent_bytes = work.hidden_bytes(work.tokens(0, 1, shares))
        return self.sent_s(sender, receiver, sent_bytes)

    def sent_s(self, sender: int, receiver: int, sent_bytes: float) -> float:
        """Return the seconds in which every rank of a stage sends its partner of another as many bytes.

        All ranks of a stage send at once, and share the card of their node if its rate is that of a node.
        """
        links = ClusterConfig.all_to_all(self.stages.problem.cluster, self._span(sender, receiver))
        return links.seconds(2 * sent_bytes)  # half stays where it is

    def seconds(self, sender: int, receiver: int) -> float:
        """Return the same beside the transfers of both stages."""
        across = self._across(sender, receiver)
        share = 0.0  # of a stage's time, in which its own transfers use the same way
        for stage in (sender, receiver):
            own = [(self.parts[i], way) for i in self.pipeline.parts_of(stage) for way in (True, False)]
            busy_s = sum(self.stages.network_s(part, forward=way, across=across) for part, way in own)
            all_s = sum(self.stages.half_s(part, forward=way) for part, way in own)
            share = max(share, min(1.0, busy_s / all_s) if all_s else 0.0)
        return self.solo_s(sender, receiver) / (1 - share / 2)

    def longer_s(self, slot: Slot, ends_s: Sequence[float], edges: Sequence[bool] = ()) -> float:
        """Return by how much a slot is longer because of what is sent and received meanwhile.

        ends_s, edges: of its cells.
        """
        longer_s = 0.0
        for across in (True, False):
            # How long cards, or links inside nodes, are busy; what stages send nothing over is not counted.
            own_s = sent_s = 0.0
            for cell, edge in zip(slot, edges or (False,) * len(slot), strict=True):
                forward, stage = cell.forward, self.pipeline.stage_of(cell.part)
                own_s += self.stages.network_s(
                    self.parts[cell.part], forward=forward, edge=edge, across=across
                )
                neighbours = (n for n in (cell.part - 1, cell.part + 1) if 0 <= n < self.pipeline.parts)
                pairs = ((stage, self.pipeline.stage_of(part)) for part in neighbours)
                ways_s = (self.solo_s(*pair) for pair in pairs if self._across(*pair) is across)
                sent_s += max(ways_s, default=0.0)
            longer_s = max(longer_s, own_s + sent_s - max(ends_s) if sent_s else 0.0)
        return longer_s

    def _across(self, sender: int, receiver: int) -> bool:
        """Return whether transfers from one stage to another leave their node."""
        return self._span(sender, receiver).nodes > 1

    def _span(self, sender: int, receiver: int) -> Span:
        """Return the span of the ranks of one stage with their partners of another."""
        work = self.stages.problem.workload
        per_node = self.pipeline.node_size or work.known_per_node or 1
        pairs = stage_pairs(work.world_size, sender, receiver)
        return Span.of([node_of(rank, per_node) for rank in pair] for pair in pairs)


def stages_memory(stages: Stages, pipeline: Pipeline, parts: Sequence[Part]) -> tuple[MemoryEstimate, ...]:
    """Return the memory of every stage: of all its parts, with activations of what is under way at most."""

    def memory(stage: int) -> MemoryEstimate:
        memories = [stages.memory(parts[i]) for i in pipeline.parts_of(stage)]
        return MemoryEstimate(
            weights_bytes=sum(of.weights_bytes for of in memories),
            gradients_bytes=sum(of.gradients_bytes for of in memories),
            optimizer_bytes=sum(of.optimizer_bytes for of in memories),
            activations_bytes=max(
                sum(count * of.activations_bytes for count, of in zip(counts, memories, strict=True))
                for counts in pipeline.held[stage]
            ),
            buffers_bytes=max(of.buffers_bytes for of in memories),
            copies_bytes=sum(of.copies_bytes for of in memories),
        )

    return tuple(map(memory, range(pipeline.pipeline_parallel_size)))
