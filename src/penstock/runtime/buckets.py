"""Gradients of one layer in one flat buffer, so that an all-reduce chunk is a view and copies nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from penstock.cost.workload import part_sizes


class GradientBucket:
    """The gradients of some parameters, back to back. `param.grad` becomes a view of the buffer.

    `begin` before a backward pass, `chunk(c)` for the pieces to reduce, `finish` after the last of them.
    Gradients that were there before (gradient accumulation) are kept aside and added by `finish`, so that
    they are not reduced twice.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        types = {(p.dtype, p.device) for p in self.parameters}
        if len(types) > 1:
            raise ValueError(
                f"parameters of one layer must share type and device, found {sorted(map(str, types))}"
            )
        dtype, device = next(iter(types), (torch.float32, torch.device("cpu")))
        sizes = [p.numel() for p in self.parameters]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self._views = (
            [part.view_as(p) for part, p in zip(self.flat.split(sizes), self.parameters, strict=True)]
            if sizes
            else []
        )
        self._before: list[Tensor | None] = []
        self._parts: tuple[int, ...] = ()
        self._pieces: list[tuple[int, int]] = []

    @property
    def size_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    def begin(self) -> None:
        """Point every `param.grad` at its zeroed part of the buffer."""
        self._before = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def chunk(self, index: int, parts: tuple[int, ...]) -> Tensor:
        """Piece `index` of as many as `parts` has, of these relative sizes.

        A step asks for every piece with the same tuple, so where they begin is worked out once.
        """
        if parts is not self._parts:
            sizes = part_sizes(self.flat.numel(), parts)
            starts = accumulate(sizes, initial=0)
            self._parts, self._pieces = parts, list(zip(starts, sizes, strict=False))
        return self.flat.narrow(0, *self._pieces[index])

    def finish(self) -> None:
        """Add what was there before."""
        for view, before in zip(self._views, self._before, strict=True):
            if before is not None:
                view.add_(before)
        self._before = []
