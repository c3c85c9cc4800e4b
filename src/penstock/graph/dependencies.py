"""`dependencies(task, shape)`: the only rule that says what a task waits for.

Forward, one block and one microbatch (a dense block is its AT alone):

    EM ─ AT ─ N ─ D.c ─ X.c ─ C.c ─ U ─ (next block) ... HD ─ ST
         ├──────────────────────────┤  residual and gate weights
         └─ S ──────────────────────┘  shared experts, if there are any

A dispatch may have legs inside the node before and behind D (DG, DS); combine takes them backwards.
Backward is the mirror; AT.B and HD.B also need ST (the sums that normalise the loss), and a layer's
all-reduce chunks need all its microbatches. The simulator and the executor both read this rule.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.graph.shape import StepShape
from penstock.graph.task import BACK_AGAIN, Op, Phase, Task

TRANSFERS = (*BACK_AGAIN, *BACK_AGAIN.values())
"""Every op that moves rows."""
LINKS = (*TRANSFERS, Op.EXPERTS)
F, B, INPUT, WEIGHT = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT, Phase.WEIGHT


def dependencies(task: Task, shape: StepShape) -> tuple[Task, ...]:
    """The tasks whose results `task` needs, in a fixed order. Data dependencies only."""
    return tuple(_RULES[task.op, task.phase](task, shape))


def statistics_task(shape: StepShape) -> Task:
    return Task(shape.last, Op.STATISTICS, F)


def block_output(layer: int, microbatch: int, shape: StepShape) -> Task:
    """The forward task that makes the hidden state leaving `layer` (-1: the embedding)."""
    if layer < 0:
        return Task(0, Op.EMBED, F, microbatch)
    return Task(layer, Op.UNORDER if shape.moe_layers[layer] else Op.ATTENTION, F, microbatch)


def block_gradient(layer: int, microbatch: int, shape: StepShape) -> Task:
    """The backward task that makes the gradient of the hidden state leaving `layer`."""
    if layer == shape.last:
        return Task(layer, Op.HEAD, B, microbatch)
    return Task(layer + 1, Op.ATTENTION, B, microbatch)


def routing(layer: int, microbatch: int, shape: StepShape) -> Task:
    """The task that knows how many tokens go where: the count exchange, or AT if sizes are fixed."""
    return Task(layer, Op.COUNTS if shape.exchange_counts else Op.ATTENTION, F, microbatch)


def experts_input(task: Task, shape: StepShape) -> Task:
    """The task that makes the gradient of what a chunk's experts received."""
    return _at(task, Op.EXPERTS, INPUT if shape.split_experts else B)


def _at(task: Task, op: Op, phase: Phase) -> Task:
    return Task(task.layer, op, phase, task.microbatch, task.chunk)


def _whole(task: Task, op: Op, phase: Phase) -> Task:
    return Task(task.layer, op, phase, task.microbatch)


def _chunks(task: Task, op: Op, phase: Phase, shape: StepShape) -> list[Task]:
    return [Task(task.layer, op, phase, task.microbatch, c) for c in range(shape.chunks_of(phase))]


def _microbatch(task: Task) -> int:
    assert task.microbatch is not None, task
    return task.microbatch


def _routing(task: Task, shape: StepShape) -> Task:
    return routing(task.layer, _microbatch(task), shape)


def _attention_forward(task: Task, shape: StepShape) -> list[Task]:
    return [block_output(task.layer - 1, _microbatch(task), shape)]


def _chain_forward(task: Task, shape: StepShape) -> list[Task]:
    """A link of the chain needs the one before it, and to know how much goes where."""
    chain = shape.moe_chain
    place = chain.index(task.op)
    before = _at(task, chain[place - 1], F) if place else _whole(task, Op.ATTENTION, F)
    route = _routing(task, shape)
    return [before] if before == route else [before, route]


def _chain_backward(task: Task, shape: StepShape) -> list[Task]:
    """Mirrored: a link needs the gradient that comes from the one behind it."""
    chain = shape.moe_chain
    place = chain.index(task.op)
    if place + 1 == len(chain):
        return [_whole(task, Op.UNORDER, B), _routing(task, shape)]
    behind = chain[place + 1]
    made = experts_input(task, shape) if behind is Op.EXPERTS else _at(task, behind, B)
    return [made, _routing(task, shape)]


def _experts_backward(task: Task, shape: StepShape) -> list[Task]:
    assert task.chunk is not None, task
    forward = [
        Task(task.layer, Op.EXPERTS, F, task.microbatch, chunk) for chunk in shape.overlapping(task.chunk)
    ]
    return [*forward, _at(task, shape.combine[0], B)]


def _shared(task: Task, op: Op, phase: Phase, shape: StepShape) -> list[Task]:
    """The task of the shared experts where there are any."""
    return [_whole(task, op, phase)] if shape.shared_experts else []


def _unorder_forward(task: Task, shape: StepShape) -> list[Task]:
    combined = _chunks(task, shape.combine[-1], F, shape)
    return [_at(task, Op.ATTENTION, F), *_shared(task, Op.SHARED, F, shape), *combined]


def _statistics(_: Task, shape: StepShape) -> list[Task]:
    pieces = range(shape.microbatches)
    heads = [Task(shape.last, Op.HEAD, F, m) for m in pieces]
    routers = [
        Task(layer, Op.ATTENTION, F, m)
        for layer, is_moe in enumerate(shape.moe_layers)
        if is_moe
        for m in pieces
    ]
    return [*heads, *routers]


def _attention_backward(task: Task, shape: StepShape) -> list[Task]:
    forward = _at(task, Op.ATTENTION, F)
    if not shape.moe_layers[task.layer]:
        return [forward, block_gradient(task.layer, _microbatch(task), shape)]
    chunks = _chunks(task, shape.dispatch[0], B, shape)
    mirrored = [_at(task, Op.UNORDER, B), *_shared(task, Op.SHARED, B, shape), *chunks]
    return [forward, *mirrored, statistics_task(shape)]


def _all_reduce(task: Task, shape: StepShape) -> list[Task]:
    needs = [Task(task.layer, Op.ATTENTION, B, m) for m in range(shape.microbatches)]
    if task.layer == 0:
        needs += [Task(0, Op.EMBED, B, m) for m in range(shape.microbatches)]
    return needs


def _expert_all_reduce(task: Task, shape: StepShape) -> list[Task]:
    phase = WEIGHT if shape.split_experts else B
    return [
        Task(task.layer, Op.EXPERTS, phase, m, c)
        for m in range(shape.microbatches)
        for c in range(shape.chunks_of(phase))
    ]


Rule = Callable[[Task, StepShape], list[Task]]

_RULES: dict[tuple[Op, Phase], Rule] = {
    (Op.EMBED, F): lambda t, s: [],
    (Op.ATTENTION, F): _attention_forward,
    (Op.COUNTS, F): lambda t, s: [_at(t, Op.ATTENTION, F)],
    (Op.SHARED, F): lambda t, s: [_at(t, Op.ATTENTION, F)],
    **{(op, F): _chain_forward for op in LINKS},
    (Op.UNORDER, F): _unorder_forward,
    (Op.HEAD, F): lambda t, s: [block_output(s.last, _microbatch(t), s)],
    (Op.STATISTICS, F): _statistics,
    (Op.HEAD, B): lambda t, s: [_at(t, Op.HEAD, F), statistics_task(s)],
    (Op.UNORDER, B): lambda t, s: [_at(t, Op.UNORDER, F), block_gradient(t.layer, _microbatch(t), s)],
    (Op.SHARED, B): lambda t, s: [_at(t, Op.SHARED, F), _at(t, Op.UNORDER, B)],
    **{(op, B): _chain_backward for op in TRANSFERS},
    (Op.EXPERTS, B): _experts_backward,
    (Op.EXPERTS, INPUT): _experts_backward,
    (Op.EXPERTS, WEIGHT): lambda t, s: [_at(t, Op.EXPERTS, INPUT)],
    (Op.ATTENTION, B): _attention_backward,
    (Op.EMBED, B): lambda t, s: [_at(t, Op.EMBED, F), Task(0, Op.ATTENTION, B, t.microbatch)],
    (Op.ALL_REDUCE, B): _all_reduce,
    (Op.EXPERT_ALL_REDUCE, B): _expert_all_reduce,
}
