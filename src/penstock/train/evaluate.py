"""The loss on held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import stdtrit

from penstock.config import UNSET, ConfigError
from penstock.runtime import PipelinedStack
from penstock.train.batches import Batch

CONFIDENCE = 0.95


def batch_loss(stack: PipelinedStack, batch: Batch) -> torch.Tensor:
    """Run one batch of this rank, on its device, through the stack and return its loss."""
    loss: torch.Tensor = stack(
        batch.tokens_BL,
        batch.labels_BL,
        batch.sample_ids_B,
        largest_batch=batch.largest_batch,
        documents_BL=batch.documents_BL,
    )
    return loss


class Evaluation(NamedTuple):
    """The loss on held-out text.

    loss: mean cross entropy per token, nats, the same on all ranks, without balance terms. noise: the loss of
    all held-out text is below `loss + noise` with 95 % confidence, judged by how batches differ (Student's
    t); None for a single batch.
    """

    loss: float
    noise: float | None


def evaluate(stack: PipelinedStack, batches: Iterable[Batch]) -> Evaluation:
    """Return the loss on some batches, without training on them. Raises ConfigError if none has a label."""
    stack.eval()
    totals, counts = [], []
    with torch.no_grad():
        for batch in batches:
            batch_loss(stack, batch.on(stack.machinery.device))
            assert stack.statistics is not None
            statistics, _ = stack.statistics.on_host()
            totals.append(float(statistics.cross_entropy * statistics.valid))
            counts.append(float(statistics.labels))
    stack.train()
    if not sum(counts):
        why = f"no token is to be predicted in {len(counts)} batches of held-out text: no label counts"
        raise ConfigError("data.held_out_fraction", UNSET, why, "Give more text, or longer documents.")
    losses = [total / count for total, count in zip(totals, counts, strict=True) if count]
    noise = None
    if len(losses) > 1:
        reach = float(stdtrit(len(losses) - 1, CONFIDENCE))
        noise = reach * float(np.std(losses, ddof=1)) / math.sqrt(len(losses))
    return Evaluation(sum(totals) / sum(counts), noise)
