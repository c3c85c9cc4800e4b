"""From a loss to changed parameters: by whole gradients between steps, or by shares while backward runs.

A step whose numbers are not finite is skipped on all ranks together, and counted. It leaves parameters,
optimiser state and the experts' biases as they were. Everything that is a function of the step goes on: its
samples are not seen again, the learning rate follows its curve, dropout has the next step's keys. AdamW's own
step count, by which it corrects its averages, does not advance.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.runtime import PipelinedStack, ShardedAdamW, clip_grad_norm_
from penstock.train.optimizer import OptimizerConfig

ADVICE = "A lower optimizer.lr or more optimizer.warmup_steps may help."


class DivergedError(RuntimeError):
    """The run has no finite numbers left with which to continue; continuing would only save useless state."""


class Update:
    """The last part of a training step: whole gradients on every rank, which updates all that it holds."""

    def __init__(
        self, stack: PipelinedStack, optimizer: torch.optim.Optimizer, config: OptimizerConfig
    ) -> None:
        self.stack, self.optimizer, self.max_norm = stack, optimizer, config.clip_grad_norm

    def backward(self, loss: Tensor, step: int) -> Tensor:
        """Compute gradients; return their norm before clipping, float64. step: counted from 1."""
        loss.backward()
        with self.stack.machinery.control.naming(f"the gradient norm of step {step}"):
            return clip_grad_norm_(self.stack, math.inf if self.max_norm is None else self.max_norm)

    def apply(self, *, accepted: bool) -> None:
        """Change parameters, or drop the step."""
        if accepted:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def flush(self) -> None:
        """Give every rank the current parameters from here on, without a further step."""


class ShareUpdate(Update):
    """Updates this rank's shares in the backward pass; the next forward pass gathers the others' shares."""

    optimizer: ShardedAdamW
    _loss: Tensor

    def backward(self, loss: Tensor, step: int) -> Tensor:
        del step
        self._loss = loss.detach()
        with self.optimizer.in_backward():
            loss.backward()
        return self.optimizer.norm

    def apply(self, *, accepted: bool) -> None:
        """Raise DivergedError for a step that was not accepted but has already changed parameters."""
        if not (accepted or self.max_norm is not None) and math.isfinite(float(self._loss)):
            raise DivergedError(
                "gradients were not finite and have been applied: without clipping a sharded optimizer "
                "updates before the norm of all gradients is known. Set optimizer.clip_grad_norm, with which "
                "such steps are skipped, and continue from the last checkpoint (train.resume=true)"
            )

    def flush(self) -> None:
        self.optimizer.flush()


def build_update(stack: PipelinedStack, optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> Update:
    """Return the update that the optimiser needs: by shares or whole."""
    return (ShareUpdate if isinstance(optimizer, ShardedAdamW) else Update)(stack, optimizer, config)
