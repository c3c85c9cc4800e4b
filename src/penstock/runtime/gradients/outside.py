"""Gradients of parameters that a model's own code uses outside of steps: of a head on hidden states, say.

Autograd makes them with this rank's samples alone, and would put them where a step puts sums over ranks. So
they are caught before they are accumulated. The step whose backward comes next adds them to its own, and
sums both; where none comes, as with layers that are frozen, they are summed when the backward pass ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.autograd.variable import Variable

from penstock.graph import Lane
from penstock.mesh import Group
from penstock.runtime.gradients.assignment import names_of
from penstock.runtime.gradients.model_gradients import Gradients
from penstock.runtime.machinery import Machinery
from penstock.sharding import sharding_of

_ENGINE = Variable._execution_engine


@dataclass(frozen=True)
class _Watched:
    """The node that accumulates a parameter's gradient. While it is kept, autograd makes no other."""

    node: Node
    shape: torch.Size


class OutsideGradients:
    """Catches gradients that a model's own code makes outside of steps, and sums them over ranks.

    Attributes:
        averaged: Over how many ranks they are averaged; 1: they are summed.
    """

    def __init__(self, gradients: Gradients, machinery: Machinery) -> None:
        self._gradients, self._machinery = gradients, machinery
        self.averaged = machinery.layout.dp_size
        self._watched: dict[nn.Parameter, _Watched] = {}
        self._caught: dict[nn.Parameter, Tensor] = {}
        self._apart = 0
        self._ends = -1  # the backward pass at whose end the rest is summed

    def begin(self, parameters: Iterable[nn.Parameter], *, averaged: int) -> None:
        """Begin a forward pass that uses these parameters outside of a step, and no others.

        What a backward pass that failed has left is forgotten.
        """
        self.averaged = averaged
        if torch._C._current_graph_task_id() == -1:
            self._caught.clear()
        known, self._watched = self._watched, {}
        for parameter in parameters:
            if not (parameter.requires_grad and parameter.is_leaf):
                continue
            before = known.get(parameter)
            if before is not None and before.shape != parameter.shape:
                before = None
                del known[parameter]  # autograd makes a node of the present shape when this one is gone
            node = get_gradient_edge(parameter).node
            if before is None or before.node is not node:
                node.register_prehook(partial(self._catch, parameter))
            self._watched[parameter] = _Watched(node, parameter.shape)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let gradients be accumulated inside this context, where a step makes them."""
        self._apart += 1
        try:
            yield
        finally:
            self._apart -= 1

    def add(self) -> None:
        """Add what was caught to gradients that a step will sum."""
        caught, self._caught = self._caught, {}
        for parameter, grad in caught.items():
            _accumulate(parameter, grad, self._share(parameter))

    def _share(self, parameter: nn.Parameter) -> float:
        """Return what part of the sum over the ranks that hold a parameter is its gradient.

        Ranks that share samples make a loss of all of them each, and their mean counts.
        """
        alike = 1 if sharding_of(parameter) is not None else self._machinery.layout.tp_size
        return 1 / (self.averaged * alike)

    def _catch(self, parameter: nn.Parameter, grads: tuple[Tensor | None, ...]) -> Any:
        (grad,) = grads
        if self._apart or grad is None:
            return None  # accumulated as usual
        known = self._caught.get(parameter)
        self._caught[parameter] = grad.detach() if known is None else known + grad
        if self._ends != (task := torch._C._current_graph_task_id()):
            self._ends = task
            _ENGINE.queue_callback(self._finish)
        return (None,)

    @torch.no_grad()
    def _finish(self) -> None:
        """Sum over ranks what no step has taken; all ranks come here with gradients of the same."""
        self._ends = -1
        caught, self._caught = self._caught, {}
        if not caught:
            return
        if self._gradients.in_shares:
            raise RuntimeError(
                f"{self._name_of(next(iter(caught)))} is trained by a loss that no step of the "
                "model is a part of, and a sharded optimizer knows gradients of steps alone: use another "
                "optimizer"
            )
        names = {self._name_of(parameter): parameter for parameter in caught}
        transports = self._machinery.transports
        axes = {name: Group.WORLD if sharding_of(p) is None else Group.DATA for name, p in names.items()}
        transports.open((Lane.INTER, each) for each in axes.values())
        what = f"summing gradients of {min(names)} and {len(names) - 1} more"
        with self._machinery.control.naming(what):
            for name in sorted(names):
                total = caught[names[name]].clone(memory_format=torch.contiguous_format)
                transports.of(Lane.INTER, axes[name]).all_reduce(total, axes[name])
                _accumulate(names[name], total, self._share(names[name]))

    def _name_of(self, parameter: nn.Parameter) -> str:
        """Return the name in the model as it is now: no step may have taken the parameter up."""
        return names_of(self._gradients.model, [parameter])[id(parameter)]


def _accumulate(parameter: nn.Parameter, grad: Tensor, share: float) -> None:
    """Add a share of what may be another's tensor."""
    if parameter.grad is None:
        parameter.grad = grad * share
    else:
        parameter.grad.add_(grad, alpha=share)
