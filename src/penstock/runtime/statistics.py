"""The loss and the statistics of a step: sums over ranks, losses over a vocabulary, loads of experts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.device import device_of
from penstock.moe.config import MoEConfig
from penstock.moe.routers import Balance, RouterSums
from penstock.placement import Replication
from penstock.runtime.batch import NO_LABEL, check_vocabulary

# ---- sums over all ranks and microbatches that normalise the loss and judge the balance of experts --------
#
# Shapes: Y MoE layers, E experts.


@dataclass(frozen=True)
class HeadSums:
    """Sums of one microbatch: token losses, labels that count, and tokens that are not padding."""

    loss: Tensor
    valid: Tensor
    tokens: Tensor | int


@dataclass(frozen=True)
class StepStatistics:
    """Statistics of the whole batch, the same on all ranks. All tensors are float64.

    `aux_Y` and `z` are without coefficients.

    Attributes:
        loss: What is minimised: `cross_entropy` + aux + z terms with their coefficients.
        cross_entropy: The mean over valid tokens.
        aux_Y: The balance loss of every MoE layer.
        z: The sum over MoE layers of the mean over tokens.
        valid: The number by which the sum of token losses was divided; not zero even where no label counts.
        labels: The number of labels that count.
        tokens: The number of tokens that are not padding, at least 1.
        chosen_YE: How often each expert was chosen, per MoE layer.
        dropped_Y: How many of these choices did not fit into the slots of their expert.
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
        """Return the same on the host, and other numbers of the device.

        One copy brings all of them, and the host waits for it.

        Args:
            more: Scalars on the device.
        """
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

    Args:
        valid: A divisor in place of the number of valid tokens of all ranks; None: that number.
    """

    def __init__(self, config: MoEConfig, balance: Balance, valid: float | None = None) -> None:
        self._config, self._balance, self._valid = config, balance, valid

    @property
    def terms(self) -> int:
        """A number below 2**32 of the terms of the loss, by which ranks compare theirs."""
        terms = (
            self._config.aux_loss_coeff,
            self._config.z_loss_coeff,
            self._valid,
            type(self._balance).__name__,
            self._balance.group,
        )
        return crc32(repr(terms).encode())

    def pack(self, heads: Sequence[HeadSums], routers: Sequence[Sequence[RouterSums]]) -> Tensor:
        """Return the sums as [HEADER + 2 * Y + 2 * Y * E].

        Args:
            heads: The sums of the head, by microbatch.
            routers: The sums of routers, by MoE layer, then by microbatch.
        """
        everything = [sums for layer in routers for sums in layer]
        loss = sum((head.loss.double() for head in heads), start=torch.zeros((), device="cpu"))
        valid = sum((head.valid.double() for head in heads), start=torch.zeros((), device="cpu"))
        tokens = torch.zeros_like(loss) + sum(head.tokens for head in heads)
        z = (
            torch.stack([sums.z for sums in everything]).double().sum()
            if everything
            else torch.zeros_like(loss)
        )
        header = torch.stack([loss, valid, tokens, z])
        pieces = [
            sum(
                self._balance.piece(
                    s.chosen_BE if s.judged_BE is None else s.judged_BE, s.probability_BE.double()
                )
                for s in layer
            )
            for layer in routers
        ]
        limited = ([s.dropped for s in layer if s.slots is not None] for layer in routers)
        dropped = [sum(layer, start=torch.zeros_like(loss)) for layer in limited]
        chosen = [torch.cat([s.chosen_BE for s in layer]).sum(dim=0) for layer in routers]
        probability = [
            torch.cat([s.probability_BE for s in layer]).sum(dim=0, dtype=torch.float64) for layer in routers
        ]
        layers = (*pieces, *dropped, *chosen, *probability)
        return torch.cat(
            [header, *(torch.as_tensor(each, device=header.device).to(header).reshape(-1) for each in layers)]
        )

    def unpack(self, total: Tensor) -> StepStatistics:
        """Return the statistics of the whole batch.

        Args:
            total: The packed vector, summed over ranks.
        """
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


# ---- the loss over a vocabulary, computed a piece of the tokens at a time ---------------------------------
#
# Shapes: T tokens, V vocabulary.


NUMBERS_AT_ONCE = 1 << 24
"""Logits of a piece: 64 MiB in float32, which keeps a GPU busy and is small beside the logits of a
microbatch."""


def cross_entropy_sum(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Return the sum of all tokens' cross entropies, computed in float32 or wider.

    PyTorch's own function keeps the logarithms of all probabilities for backward, and needs logits that are
    in float32 before: of bfloat16 logits 16 bytes per number at the peak. Pieces need 4: the logits, and
    their gradient.

    Args:
        logits_TV: [T, V], of any floating type.
        labels_T: [T], tokens of the vocabulary or -100.

    Raises:
        IndexError: On a CPU, for a label outside the vocabulary; a GPU ends with an assertion on the device.
    """
    try:
        if logits_TV.numel() > NUMBERS_AT_ONCE:
            loss: Tensor = _InPieces.apply(logits_TV, labels_T)
            return loss
        precise_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        return F.cross_entropy(precise_TV, labels_T, ignore_index=NO_LABEL, reduction="sum")
    except IndexError:
        check_vocabulary("label", labels_T, logits_TV.shape[1], besides=NO_LABEL)
        raise


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        losses, totals = [], []  # every token's cross entropy, and the logarithm of its exponentials' sum
        for piece_TV, piece_T in in_pieces(logits_TV, labels_T):
            precise_TV = piece_TV.to(torch.promote_types(piece_TV.dtype, torch.float32))
            totals.append(precise_TV.logsumexp(dim=1))
            loss_T = F.nll_loss(precise_TV, piece_T, ignore_index=NO_LABEL, reduction="none")
            losses.append((totals[-1] + loss_T).masked_fill_(piece_T == NO_LABEL, 0))
        losses_T, totals_T = torch.cat(losses), torch.cat(totals)
        ctx.save_for_backward(logits_TV, labels_T, totals_T)
        return losses_T.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits_TV, labels_T, totals_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        for piece_TV, piece_T, total_T, out_TV in in_pieces(logits_TV, labels_T, totals_T, grad_TV):
            labelled_T1 = (piece_T != NO_LABEL).unsqueeze(1)
            slope_TV = (piece_TV.to(total_T.dtype) - total_T.unsqueeze(1)).exp_()
            label_T1 = piece_T.unsqueeze(1).where(labelled_T1, 0)
            slope_TV.scatter_add_(1, label_T1, -torch.ones_like(total_T).unsqueeze(1))
            out_TV.copy_(slope_TV.mul_(labelled_T1 * grads[0]))
        return grad_TV, None


def in_pieces(logits_TV: Tensor, *more: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the pieces of several tensors, cut by tokens so that a piece has not too many logits."""
    tokens = max(1, NUMBERS_AT_ONCE // logits_TV.shape[1])
    return zip(*(each.split(tokens) for each in (logits_TV, *more)), strict=True)


# ---- the loads of experts in the last steps of a stack, as its steps gather them --------------------------
#
# Shapes: P ranks, B samples, Y MoE layers, E experts.


Loads = npt.NDArray[np.int32]


@dataclass(frozen=True)
class SampleLoads:
    """How often each of some samples chose each expert, [B, E].

    Attributes:
        ids_B: The numbers of the samples.
    """

    ids_B: Tensor
    chosen_BE: Tensor


LayerLoads = Sequence[Sequence[SampleLoads]]
"""By MoE layer and microbatch."""


class LoadHistory:
    """How often tokens of each rank chose each expert, [P, Y, E] for the last two steps, before any drop.

    P are the ranks of the world; of ranks that have the same tokens the first one counts them. All ranks have
    the same history. It has only steps that were trained on, and whose graph gathers loads.

    Attributes:
        of_samples: Loads of the samples that this rank had in the last step, by MoE layer and microbatch.
        replications: The replications of the last step, by MoE layer; () where no replicas may be held.
    """

    def __init__(self) -> None:
        self._kept: deque[Tensor | Loads] = deque(maxlen=2)
        self.of_samples: LayerLoads = ()
        self.replications: tuple[Replication, ...] = ()

    def add(
        self, loads_PYE: Tensor, of_samples: LayerLoads = (), replications: Sequence[Replication | None] = ()
    ) -> None:
        """Add the loads of one more step. They stay on their device until they are first read."""
        self._kept.append(loads_PYE)
        self.of_samples = of_samples
        self.replications = tuple(replication for replication in replications if replication is not None)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Loads:
        """Return the loads of a kept step: -1 = the last. Costs a copy from a GPU when first read."""
        loads = self._kept[index]
        if isinstance(loads, Tensor):
            loads = self._kept[index] = loads.cpu().numpy()
        return loads

    @property
    def last(self) -> Loads | None:
        """The loads of the last step; None before the first."""
        return self[-1] if self._kept else None
