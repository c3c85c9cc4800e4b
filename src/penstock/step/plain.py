"""The plainest step: forward only, one microbatch, one chunk, a flat all-to-all, everything replicated.

One MoE block (a dense one is its AT alone), data to the right, roles on the edges:

    EM ─hidden─ AT ─counts─ N ─route─ D, X, C
                ├──rows── D ─rows─ X ─rows─ C ─rows─ U ─hidden─ (next block) ... HD ─loss─ ST
                ├──residual, weights, order ──────── U
                └──tokens── S ─shared────────────── U          shared experts, if there are any
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.graph import Graph, Lane, Name, Phase, Task
from penstock.graph.task import Inputs
from penstock.mesh import Axes, Group
from penstock.ops import spec_of
from penstock.ops.names import Op

F = Phase.FORWARD


@dataclass(frozen=True, kw_only=True)
class PlainStep:
    """The features of a model that decide which tasks there are.

    moe_layers: for every layer, whether its feed-forward part is an MoE layer. exchange_counts: dropless
    routing sends uneven pieces, so their sizes are exchanged first. shared_experts: every MoE layer has
    shared experts.
    """

    moe_layers: tuple[bool, ...]
    exchange_counts: bool = True
    shared_experts: bool = False

    def graph(self) -> Graph:
        """Return the graph of the forward half."""
        return Graph.of(self._tasks())

    def _tasks(self) -> Iterator[Task]:
        yield (embed := _compute(0, Op.EMBED))
        hidden, routers = embed, []
        for layer, is_moe in enumerate(self.moe_layers):
            yield (attention := _compute(layer, Op.ATTENTION, hidden=hidden))
            hidden = attention
            if is_moe:
                *inner, hidden = self._moe(attention)
                yield from (*inner, hidden)
                routers.append(attention.name)
        last = len(self.moe_layers) - 1
        yield (head := _compute(last, Op.HEAD, hidden=hidden))
        yield statistics(last, {"loss": (head.name,), "routers": tuple(routers)})

    def _moe(self, attention: Task) -> Iterator[Task]:
        layer, knows = attention.layer, attention
        if self.exchange_counts:
            yield (knows := _transfer(layer, Op.COUNTS, chunked=False, counts=attention))
        yield (there := _transfer(layer, Op.DISPATCH, rows=attention, route=knows))
        read = {"residual": attention, "weights": attention, "order": attention}
        if self.shared_experts:
            yield (shared := _compute(layer, Op.SHARED, tokens=attention))
            read["shared"] = shared
        yield (experts := _compute(layer, Op.EXPERTS, chunked=True, rows=there, route=knows))
        yield (home := _transfer(layer, Op.COMBINE, rows=experts, route=knows))
        yield _task(layer, Op.UNPERMUTE, Lane.COMPUTE, (), False, {**read, "rows": home})


def _task(layer: int, op: str, lane: Lane, axes: Axes, chunked: bool, read: dict[str, Task]) -> Task:
    name = Name(layer, op, F, 0, 0 if chunked else None)
    inputs = {role: (task.name,) for role, task in read.items()}
    return Task(name, lane, axes, inputs, reads=spec_of(op).parameters(layer))


def _compute(layer: int, op: str, *, chunked: bool = False, **read: Task) -> Task:
    return _task(layer, op, Lane.COMPUTE, (), chunked, read)


def _transfer(layer: int, op: str, *, chunked: bool = True, **read: Task) -> Task:
    return _task(layer, op, Lane.INTER, Group.EXPERT, chunked, read)


def statistics(last: int, read: Inputs | None = None) -> Task:
    """Return the task that sums over all ranks at the end of a forward half; `last` is the last layer."""
    return Task(Name(last, Op.STATISTICS, F), Lane.INTER, Group.WORLD, read or {})
