"""From a loss to changed parameters: by whole gradients between steps, or by shares while backward runs."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from penstock.runtime import PipelinedStack, ShardedAdamW
from penstock.topology import Control
from penstock.train.clip import clip_grad_norm
from penstock.train.health import DivergedError
from penstock.train.optimizer import OptimizerConfig


class Update(Protocol):
    """The end of a training step."""

    optimizer: torch.optim.Optimizer

    def backward(self, loss: Tensor, step: int) -> Tensor:
        """Make gradients; returns their norm before clipping, float64. step: counted from 1."""
        ...

    def apply(self, *, accepted: bool) -> None:
        """Change parameters, or forget the step."""
        ...

    def flush(self) -> None:
        """From here on every rank has the current parameters, without a further step."""
        ...


class WholeUpdate:
    """Every rank has all gradients, and updates all parameters that it holds."""

    def __init__(
        self,
        stack: PipelinedStack,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        control: Control,
    ) -> None:
        self.optimizer = optimizer
        self._stack, self._max_norm, self._control = stack, config.clip_grad_norm, control

    def backward(self, loss: Tensor, step: int) -> Tensor:
        loss.backward()
        with self._control.naming(f"the gradient norm of step {step}"):
            return clip_grad_norm(self._stack, self._max_norm)

    def apply(self, *, accepted: bool) -> None:
        if accepted:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def flush(self) -> None:
        """Nothing waits."""


class ShareUpdate:
    """Tasks of the backward pass update this rank's shares; the next forward pass gathers the others'."""

    def __init__(self, optimizer: ShardedAdamW, config: OptimizerConfig) -> None:
        self.optimizer: torch.optim.Optimizer = optimizer
        self._sharded, self._waits = optimizer, config.clip_grad_norm is not None
        self._loss = torch.zeros(())

    def backward(self, loss: Tensor, step: int) -> Tensor:
        del step
        self._loss = loss.detach()
        with self._sharded.in_backward():
            loss.backward()
        return self._sharded.norm

    def apply(self, *, accepted: bool) -> None:
        """Raises DivergedError for a step that has changed parameters and should not have."""
        if not (accepted or self._waits) and math.isfinite(float(self._loss)):
            raise DivergedError(
                "gradients were not finite and have been applied: without clipping a sharded optimizer "
                "updates before the norm of all gradients is known. Set optimizer.clip_grad_norm, with which "
                "such steps are skipped, and continue from the last checkpoint (train.resume=true)"
            )

    def flush(self) -> None:
        self._sharded.flush()


def build_update(stack: PipelinedStack, optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> Update:
    """What the configuration asks for."""
    if isinstance(optimizer, ShardedAdamW):
        return ShareUpdate(optimizer, config)
    return WholeUpdate(stack, optimizer, config, stack.machinery.control)
