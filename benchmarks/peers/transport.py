"""Receives first: the all-to-all of Penstock's CPU transport, put under systems that call torch's.

Gloo's own all-to-all often falls into half duplex. A peer that is measured with it only would look slow for a
reason that has nothing to do with its scheduling, so every peer is measured with both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.scoped import replaced
from penstock.runtime.transport import exchange


@contextmanager
def receives_first() -> Iterator[None]:
    """Inside, `torch.distributed.all_to_all_single` posts every receive before the first send.

    The whole process sees it, so only one thread may run collectives. The original returns on any exit.
    """
    with replaced(dist, "all_to_all_single", all_to_all_single):
        yield


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> None:
    """Do what torch's function of this name does to CPU tensors, by point-to-point operations."""
    if async_op:
        raise NotImplementedError(
            "receives first: only blocking calls are replaced, this one is async_op=True"
        )
    group = dist.group.WORLD if group is None else group
    received = _shares(output, output_split_sizes, group.size(), "output")
    exchange(received, _shares(input.contiguous(), input_split_sizes, group.size(), "input"), group)


def _shares(rows: Tensor, sizes: Sequence[int] | None, ranks: int, what: str) -> Sequence[Tensor]:
    """Return the part of each rank, in place."""
    if not rows.is_contiguous():
        raise ValueError(f"receives first: the {what} tensor must be contiguous")
    if sizes:
        return torch.split(rows, [int(size) for size in sizes])
    if len(rows) % ranks:
        raise ValueError(f"receives first: {len(rows)} {what} rows cannot be shared evenly by {ranks} ranks")
    return torch.split(rows, [len(rows) // ranks] * ranks)
