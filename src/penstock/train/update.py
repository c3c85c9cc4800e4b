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
    """The last part of a training step: gradients and parameters."""

    optimizer: torch.optim.Optimizer

    def backward(self, loss: Tensor, step: int) -> Tensor:
        """Compute gradients; return their norm before clipping, float64. step: counted from 1."""
        ...

    def apply(self, *, accepted: bool) -> None:
        """Change parameters, or drop the step."""
        ...

    def flush(self) -> None:
        """Give every rank the current parameters from here on, without a further step."""
        ...


class WholeUpdate:
    """Keeps all gradients on every rank, which updates all parameters that it holds."""

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
        """Do nothing: no parameters are pending."""


class ShareUpdate:
    """Updates this rank's shares in the backward pass; the next forward pass gathers the others' shares."""

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
        """Raise DivergedError for a step that was not accepted but has already changed parameters."""
        if not (accepted or self._waits) and math.isfinite(float(self._loss)):
            raise DivergedError(
                "gradients were not finite and have been applied: without clipping a sharded optimizer "
                "updates before the norm of all gradients is known. Set optimizer.clip_grad_norm, with which "
                "such steps are skipped, and continue from the last checkpoint (train.resume=true)"
            )

    def flush(self) -> None:
        self._sharded.flush()


def build_update(stack: PipelinedStack, optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> Update:
    """Return the update that the optimiser needs: by shares or whole."""
    if isinstance(optimizer, ShardedAdamW):
        return ShareUpdate(optimizer, config)
    return WholeUpdate(stack, optimizer, config, stack.machinery.control)
