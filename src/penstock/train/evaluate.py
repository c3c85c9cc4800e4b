"""The loss on held-out text."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from penstock.runtime import PipelinedStack
from penstock.train.batches import Batch


def batch_loss(stack: PipelinedStack, batch: Batch) -> torch.Tensor:
    """Run one batch of this rank through the stack."""
    device = stack.machinery.device
    tokens_BL, labels_BL = batch.tokens_BL.to(device), batch.labels_BL.to(device)
    ids_B, largest = batch.sample_ids_B.to(device), batch.largest_batch
    loss: torch.Tensor = stack(tokens_BL, labels_BL, ids_B, largest_batch=largest)
    return loss


def evaluate(stack: PipelinedStack, batches: Iterable[Batch]) -> float:
    """Mean cross entropy per token, the same on all ranks; balance terms do not count. nats."""
    stack.eval()
    total = count = 0.0
    with torch.no_grad():
        for batch in batches:
            batch_loss(stack, batch)
            assert stack.statistics is not None
            total += float(stack.statistics.cross_entropy * stack.statistics.valid)
            count += float(stack.statistics.valid)
    stack.train()
    return total / count
