"""The sums over all ranks and microbatches that normalise the loss and judge the balance of experts.

Shapes: Y MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from zlib import crc32

import torch
from torch import Tensor

from penstock.device import device_of
from penstock.moe.balance import Balance
from penstock.moe.choices import RouterSums
from penstock.moe.config import MoEConfig


@dataclass(frozen=True)
class HeadSums:
    """Sums of one microbatch: token losses, labels that count, and tokens that are not padding."""

    loss: Tensor
    valid: Tensor
    tokens: Tensor | int


@dataclass(frozen=True)
class StepStatistics:
    """Statistics of the whole batch, the same on all ranks. All tensors are float64.

    loss: what is minimised: cross_entropy (mean over valid tokens) + aux + z terms with their coefficients.
    aux_Y: the balance loss of every MoE layer. z: the sum over MoE layers of the mean over tokens. Both
    without coefficients. chosen_YE: how often each expert was chosen, per MoE layer. dropped_Y: how many of
    these choices did not fit into the slots of their expert. tokens, labels: counts. valid: the number by
    which the sum of token losses was divided; not zero even where no label counts.
    """

    loss: Tensor
    cross_entropy: Tensor
    aux_Y: Tensor
    z: Tensor
    valid: Tensor
    labels: Tensor
    tokens: Tensor
    chosen_YE: Tensor
    dropped_Y: Tensor

    @property
    def aux(self) -> Tensor:
        """The sum of all layers' balance losses."""
        return self.aux_Y.sum()

    def on_host(self, *more: Tensor) -> tuple[StepStatistics, list[float]]:
        """Return the same on the host, and other numbers of the device, by one copy for which the host
        waits."""
        own = [getattr(self, each.name) for each in fields(self)]
        if not device_of(self.loss).is_gpu:
            return self, [float(each.detach()) for each in more]
        copied = torch.cat([each.detach().double().flatten() for each in (*own, *more)]).cpu()
        *parts, last = copied.split([*(each.numel() for each in own), len(more)])
        shaped = (part.view(each.shape) for part, each in zip(parts, own, strict=True))
        return StepStatistics(*shaped), last.tolist()


HEADER = 4


class StatisticsCodec:
    """Packs one rank's sums into one float64 vector (one small all-reduce) and reads the total.

    valid: replaces the number of valid tokens of all ranks; None: their actual number.
    """

    def __init__(self, config: MoEConfig, balance: Balance, valid: float | None = None) -> None:
        self._config, self._balance, self._valid = config, balance, valid

    @property
    def terms(self) -> int:
        """A number below 2**32 of the terms of the loss, by which ranks compare theirs."""
        known = (
            self._config.aux_loss_coeff,
            self._config.z_loss_coeff,
            self._valid,
            type(self._balance).__name__,
        )
        return crc32(repr(known).encode())

    def pack(self, heads: Sequence[HeadSums], routers: Sequence[Sequence[RouterSums]]) -> Tensor:
        """Return the sums as [HEADER + 2 * Y + 2 * Y * E]. routers: per MoE layer, per microbatch."""
        everything = [sums for layer in routers for sums in layer]
        loss = sum((head.loss.double() for head in heads), start=torch.zeros(()))
        valid = sum((head.valid.double() for head in heads), start=torch.zeros(()))
        tokens = torch.zeros_like(loss) + sum(head.tokens for head in heads)
        z = (
            torch.stack([sums.z for sums in everything]).double().sum()
            if everything
            else torch.zeros_like(loss)
        )
        header = torch.stack([loss, valid, tokens, z])
        pieces = [sum(map(self._piece, layer)) for layer in routers]
        limited = ([s.dropped for s in layer if s.slots is not None] for layer in routers)
        dropped = [sum(layer, start=torch.zeros_like(loss)) for layer in limited]
        chosen = [torch.cat([s.chosen_BE for s in layer]).sum(dim=0) for layer in routers]
        probability = [
            torch.cat([s.probability_BE for s in layer]).sum(dim=0, dtype=torch.float64) for layer in routers
        ]
        layers = (torch.as_tensor(each) for each in (*pieces, *dropped, *chosen, *probability))
        return torch.cat([header, *(each.to(header).reshape(-1) for each in layers)])

    def _piece(self, sums: RouterSums) -> Tensor:
        return self._balance.piece(_judged(sums), sums.probability_BE.double())

    def unpack(self, total: Tensor) -> StepStatistics:
        """Return the statistics of the whole batch. total: the packed vector, summed over ranks."""
        loss, labels, tokens, z_sum = total[:HEADER].unbind()
        experts = self._config.num_experts
        layers = (len(total) - HEADER) // (2 + 2 * experts)
        by_layer, by_expert = total[HEADER:].split([2 * layers, 2 * layers * experts])
        pieces_Y, dropped_Y = by_layer.view(2, layers).unbind()
        chosen_YE, probability_YE = by_expert.view(2, layers, experts).unbind()
        valid = labels.clamp(min=1) if self._valid is None else torch.full_like(labels, self._valid)
        tokens = tokens.clamp(min=1)
        cross_entropy, z = loss / valid, z_sum / tokens
        aux_Y = self._balance.by_layer(pieces_Y, chosen_YE, probability_YE, tokens)
        aux = aux_Y.sum()
        return StepStatistics(
            loss=cross_entropy + self._config.aux_loss_coeff * aux + self._config.z_loss_coeff * z,
            cross_entropy=cross_entropy,
            aux_Y=aux_Y,
            z=z,
            valid=valid,
            labels=labels,
            tokens=tokens,
            chosen_YE=chosen_YE,
            dropped_Y=dropped_Y,
        )


def _judged(sums: RouterSums) -> Tensor:
    return sums.chosen_BE if sums.judged_BE is None else sums.judged_BE
