"""A compute segment: a piece of the model between two transfers, run forward under autograd on its own.

Its backward is called by a task and not by the autograd engine, so the order of backward is the schedule's.
Neither the inputs nor the outputs of a segment stay in memory for its backward, only what its operators save:
inputs enter through a node that catches their gradients, outputs are remembered as edges of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.autograd.variable import Variable

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
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.caught.extend(grads)
        return (None,) * (len(grads) + 2)


class Segment:
    """One forward run. `enter` its inputs, compute, `leave` with its outputs, later call `backward` once.

    anchor: see `anchor_on`.
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
        return tuple(output.detach() for output in outputs)

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
