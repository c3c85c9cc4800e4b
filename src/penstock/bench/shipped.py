"""Gloo's own all-to-all, on connections as the system makes them: what other systems run on."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from penstock.graph import Group
from penstock.runtime.transport import GlooTransport


class ShippedTransport(GlooTransport):
    """The column `as shipped`: nothing of Penstock's under a schedule but the schedule itself."""

    def all_to_all(
        self,
        rows: Tensor,
        input_splits: Sequence[int],
        output_splits: Sequence[int],
        group: Group = Group.EXPERT,
    ) -> Tensor:
        self._count_all_to_all(rows, input_splits, group)
        received = rows.new_empty(sum(output_splits), *rows.shape[1:])
        dist.all_to_all_single(
            received,
            rows.contiguous(),
            list(output_splits),
            list(input_splits),
            group=self._groups[group],
        )
        return received
