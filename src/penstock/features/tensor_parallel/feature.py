"""Attention, dense feed-forward parts and vocabulary, distributed over the ranks that share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.features.feature import Feature
from penstock.features.tensor_parallel import ops as tensor
from penstock.features.tensor_parallel.ops import OPS, ROUTED, Ways
from penstock.graph import Graph, Lane, Name, Task
from penstock.mesh import Group
from penstock.ops import spec_of
from penstock.ops.base import Op, parameters_of
from penstock.ops.core import PARTIAL, REPLICATED
from penstock.step.rewrite import Pass, Stage
from penstock.step.shape import FORM_TOKENS, StepShape

Names = tuple[Name, ...]
METADATA = "metadata"


@dataclass(frozen=True)
class TensorParallel:
    """A computation on shards of weights gets all tokens before it; its partial sums are added after it.

    before  EM ─hidden─ AT ─rows─ D ... U ─hidden─ HD ─loss─ ST
    after   EM ─hidden─ ES ─hidden─ TG ─hidden─ TA ─attended─ TS ─attended─ GT ─rows─ D
            ES ─hidden─ GT ... U ─hidden─ HG ─hidden─ HV ─peaks─ HX ─peaks─ HL ─loss─ ST ... HV ─logits─ HL

    AT of a dense block becomes TG, TA, TS, FN ─tokens─ FG ─tokens─ FF ─out─ FS ─out─ FA, FN ─residual─ FA.
    With replicated tokens TC and TR stand for TG and TS, FC and FR for FG and FS, ER for ES, HC for HG.

    Attributes:
        ranks: The ranks that share attention.
        split: Whether each of them has its part of samples' tokens between blocks.
        moe_split: Whether each of them has its part in the MoE part, from gate to unpermute. Where the two
            differ, the gate has the tokens that attention has gathered (`MG`; gradients are complete on every
            rank, which keeps its own) or this rank's alone (`MS`), and after unpermute tokens are gathered
            (`UG`) or all but this rank's left out (`US`).
        judges_samples: Whether balance is judged by sample or microbatch: where the MoE part has parts of
            them, choices are summed over ranks (`NC`).
        copies_differ: See `StepShape`.
    """

    ranks: int
    split: bool
    moe_split: bool
    judges_samples: bool = False
    copies_differ: bool = False
    name = "tensor_parallel"
    stage = Stage.INSERT

    def __call__(self, graph: Graph) -> Graph:
        chunked = {task.layer for task in graph.tasks if task.chunk is not None}
        return Graph.of(_Rewriting(self, chunked).tasks(graph))


class _Rewriting:
    """The rewriting of one graph. moved: by the name of a task, the task that leaves its outputs now."""

    def __init__(self, how: TensorParallel, moe_layers: set[int]) -> None:
        self._how, self._moe_layers = how, moe_layers
        self._moved: dict[Name, Name] = {}
        self._judged: list[Name] = []
        self._rules: dict[str, Callable[[Task], Iterator[Task]]] = {
            Op.EMBED: self._embedding,
            Op.ATTENTION: self._block,
            Op.UNPERMUTE: self._unpermute,
            Op.HEAD: self._head,
            Op.STATISTICS: self._statistics,
        }

    def tasks(self, graph: Graph) -> Iterator[Task]:
        for task in graph.tasks:
            moved = {r: tuple(self._moved.get(n, n) for n in names) for r, names in task.inputs.items()}
            made = list(self._rules.get(task.op, self._inside)(task.reading(moved)))
            last = next(each.name for each in reversed(made) if each.op != Op.CHOICES)
            if last != task.name:
                self._moved[task.name] = last
            yield from made

    def _embedding(self, task: Task) -> Iterator[Task]:
        """Sum the shards' rows; one rank adds positions, whose gradients it alone has."""
        yield replace(task, reads=(*task.reads, _parameters(PARTIAL, task.layer)))
        yield self._after(task, tensor.EMBED, "hidden", split=self._how.split)

    def _block(self, task: Task) -> Iterator[Task]:
        """Yield the attention part, then the rest of a dense block, or the router of an MoE block."""
        how, hidden = self._how, task.inputs["hidden"]
        moe = task.layer in self._moe_layers
        yield (before := self._before(task, tensor.ATTENTION, hidden=hidden))
        if moe and how.split != how.moe_split:  # overlaps with attention, which does not need it
            op = Op.GATHER_TOKENS if how.split else Op.KEEP_TOKENS
            gathered = {"gathered": (before.name,)} if how.split else {}
            yield (converted := self._transfer(task, op, split=how.moe_split, hidden=hidden, **gathered))
            hidden = (converted.name,)
        yield (heads := _knowing(task, self._computing(task, Op.HEADS, hidden=(before.name,))))
        split = how.moe_split if moe else how.split
        yield (after := self._after(heads, tensor.ATTENTION, "attended", split=split))
        if not moe:
            read = {"hidden": task.inputs["hidden"], "attended": (after.name,)}
            yield (norm := _knowing(task, self._computing(task, Op.DENSE_NORM, split=split, **read)))
            yield (before := self._before(task, tensor.DENSE, tokens=(norm.name,)))
            yield (wide := self._computing(task, Op.DENSE, tokens=(before.name,)))
            yield (after := self._after(wide, tensor.DENSE, "out", split=split))
            read = {"residual": (norm.name,), "out": (after.name,)}
            yield _knowing(task, self._computing(task, Op.DENSE_ADD, split=split, **read))
            return
        read = {"hidden": hidden, "attended": (after.name,)}
        yield (gate := _knowing(task, self._computing(task, Op.GATE, split=split, **read)))
        if how.judges_samples and how.moe_split:
            yield self._transfer(task, Op.CHOICES, split=True, choices=(gate.name,))
            self._judged.append(task.name._replace(op=Op.CHOICES))

    def _unpermute(self, task: Task) -> Iterator[Task]:
        how = self._how
        yield (inside := next(self._inside(task)))
        if how.split != how.moe_split:
            op = Op.KEEP_OUTPUT if how.split else Op.GATHER_OUTPUT
            yield self._transfer(task, op, split=how.split, hidden=(inside.name,))

    def _head(self, task: Task) -> Iterator[Task]:
        yield (before := self._before(task, tensor.HEAD, hidden=task.inputs["hidden"]))
        yield (logits := _knowing(task, self._computing(task, Op.LOGITS, hidden=(before.name,))))
        yield (peaks := self._transfer(task, Op.PEAKS, split=False, peaks=(logits.name,)))
        loss = self._computing(task, Op.LOSS, logits=(logits.name,), peaks=(peaks.name,))
        yield _knowing(task, loss)

    def _statistics(self, task: Task) -> Iterator[Task]:
        judged = {"choices": tuple(self._judged)} if self._judged else {}
        yield task.reading({**task.inputs, **judged})

    def _inside(self, task: Task) -> Iterator[Task]:
        """Yield a task; one of an MoE part works on this rank's tokens or on all of them."""
        inside = task.layer in self._moe_layers
        yield self._settled(task, split=self._how.moe_split) if inside else task

    # ---- making tasks --------------------------------------------------------------------------------------

    def _before(self, task: Task, ways: Ways, **inputs: Names) -> Task:
        op = ways.gather if self._how.split else ways.copy
        return self._transfer(task, op, split=False, **inputs)

    def _after(self, task: Task, ways: Ways, role: str, *, split: bool) -> Task:
        op = ways.scatter if split else ways.reduce
        return self._transfer(task, op, split=split, **{role: (task.name,)})

    def _transfer(self, task: Task, op: str, *, split: bool, **inputs: Names) -> Task:
        made = Task(task.name._replace(op=op), Lane.INTRA, Group.TENSOR, inputs)
        return self._on_part(made) if split else made

    def _computing(self, task: Task, op: str, *, split: bool = False, **inputs: Names) -> Task:
        reads = spec_of(op).parameters(task.layer)
        made = Task(task.name._replace(op=op), Lane.COMPUTE, (), inputs, reads=reads)
        tokenwise = op in (Op.GATE, Op.DENSE_NORM)
        return self._settled(made, split=split) if tokenwise else self._on_part(made) if split else made

    def _settled(self, task: Task, *, split: bool) -> Task:
        """Return a task with whole parameters, its own or the next layer's; their gradients are partial."""
        reads = task.reads
        if split or self._how.copies_differ:
            layers = self._moe_layers | {task.layer}
            partial = {_parameters(REPLICATED, layer): _parameters(PARTIAL, layer) for layer in layers}
            reads = tuple(partial.get(state, state) for state in reads)
        settled = replace(task, reads=reads)
        return self._on_part(settled) if split else settled

    def _on_part(self, task: Task) -> Task:
        """Return the task on this rank's tokens."""
        return replace(task, cut=replace(task.cut, token_shards=self._how.ranks))


def _knowing(task: Task, made: Task) -> Task:
    """Return `made` with the metadata that `task` reads, where samples move."""
    if METADATA not in task.inputs:
        return made
    return made.reading({**made.inputs, METADATA: task.inputs[METADATA]})


def _parameters(state: str, layer: int) -> str:
    """Return the parameters of a layer whose gradients are `state`."""
    return parameters_of(state.format(layer=layer))


# ---- tensor parallelism: ranks that share attention, dense parts, embedding and head ----------------------


def _passes(shape: StepShape) -> Sequence[Pass]:
    sharing = shape.sharing
    if sharing.tp_size == 1:
        return ()
    split, moe_split = sharing.tokens == "split", FORM_TOKENS[shape.expert_form] == "split"
    by_sample, differ = sharing.judges_samples, shape.copies_differ
    return (TensorParallel(sharing.tp_size, split, moe_split, by_sample, differ),)


FEATURE = Feature(
    name="tensor_parallel",
    title="cuts attention, dense parts and the vocabulary over the ranks of a group",
    source="Megatron-LM; Parm, section 3",
    ops=OPS,
    passes=_passes,
    routed=ROUTED,
)
