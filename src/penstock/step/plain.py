"""The plainest step: forward only, one microbatch, one chunk, a flat all-to-all, everything replicated.

One MoE block (a dense one is its AT alone), data to the right, roles on the edges:

    EM ─hidden─ AT ─counts─ N ─route─ D, X, C
                ├──rows── D ─rows─ X ─rows─ C ─rows─ U ─hidden─ (next block) ... HD ─loss─ ST
                ├──residual, weights, order ──────── U
                └──tokens── S ─shared────────────── U          shared experts, if there are any
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.graph import Graph, Lane, Name, Phase, Task
from penstock.graph.task import Inputs
from penstock.mesh import Group
from penstock.ops import Kind, spec_of
from penstock.ops.base import Op

F = Phase.FORWARD


@dataclass(frozen=True, kw_only=True)
class PlainStep:
    """The features of a model that decide which tasks there are.

    Attributes:
        moe_layers: For every layer, whether its feed-forward part is an MoE layer.
        exchange_counts: Whether sizes of pieces are exchanged first, since dropless routing sends uneven
            ones.
        shared_experts: Whether every MoE layer has shared experts.
    """

    moe_layers: tuple[bool, ...]
    exchange_counts: bool = True
    shared_experts: bool = False

    def graph(self) -> Graph:
        """Return the graph of the forward half."""
        made: list[Task] = []

        def task(layer: int, op: str, **read: Task) -> Task:
            spec = spec_of(op)
            lane, axes = (Lane.INTER, Group.EXPERT) if spec.kind is Kind.COLLECTIVE else (Lane.COMPUTE, ())
            name = Name(layer, op, F, 0, 0 if "c" in spec.indices else None)
            inputs = {role: (source.name,) for role, source in read.items()}
            made.append(Task(name, lane, axes, inputs, reads=spec.parameters(layer)))
            return made[-1]

        hidden, routers = task(0, Op.EMBED), []
        for layer, is_moe in enumerate(self.moe_layers):
            hidden = attention = task(layer, Op.ATTENTION, hidden=hidden)
            if not is_moe:
                continue
            routers.append(attention.name)
            knows = task(layer, Op.COUNTS, counts=attention) if self.exchange_counts else attention
            there = task(layer, Op.DISPATCH, rows=attention, route=knows)
            read = {"residual": attention, "weights": attention, "order": attention}
            if self.shared_experts:
                read["shared"] = task(layer, Op.SHARED, tokens=attention)
            experts = task(layer, Op.EXPERTS, rows=there, route=knows)
            home = task(layer, Op.COMBINE, rows=experts, route=knows)
            hidden = task(layer, Op.UNPERMUTE, **read, rows=home)
        last = len(self.moe_layers) - 1
        head = task(last, Op.HEAD, hidden=hidden)
        ends: Inputs = {"loss": (head.name,), "routers": tuple(routers)}
        return Graph.of([*made, Task(Name(last, Op.STATISTICS, F), Lane.INTER, Group.WORLD, ends)])
