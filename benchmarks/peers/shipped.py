"""Gloo's own all-to-all, on connections as the system makes them: what other systems run on."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from penstock.runtime.transport import GlooTransport


class ShippedTransport(GlooTransport):
    """The column `as shipped`: nothing of Penstock's under a schedule but the schedule itself."""

    def _fill(
        self,
        received: Tensor,
        output_splits: list[int],
        rows: Tensor,
        input_splits: list[int],
        group: dist.ProcessGroup,
    ) -> None:
        dist.all_to_all_single(received, rows, output_splits, input_splits, group)
