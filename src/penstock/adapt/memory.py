"""What a step keeps of a layer for its backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Memory:
    """Whether layers keep what their backward needs, or compute it again (gradient checkpointing).

    Experts that are computed again get the rows that have come already, and choices stay as they were made.
    """

    def __init__(self) -> None:
        self.recomputes = False

    def run(self, function: Callable[[Tensor], tuple[Tensor, ...]], given: Tensor) -> tuple[Tensor, ...]:
        """`function(given)`."""
        if not (self.recomputes and torch.is_grad_enabled()):
            return function(given)
        found: tuple[Tensor, ...] = checkpoint(function, given, use_reentrant=False)
        return found
