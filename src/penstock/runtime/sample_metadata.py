"""Facts about samples beside their hidden states, which travel with the samples where these move.

Shapes: B samples of a microbatch, L tokens per sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from penstock.moe import SampleKeys, Tokens
from penstock.routing.sizes import split_sizes


@dataclass(frozen=True)
class SampleMetadata:
    """The samples of a microbatch on one rank.

    labels_BL: [B, L]. keys: those of their random numbers. valid_BL: bool, False for padding; None if there
    is none. longest: tokens per sample of the rank that has most, where ranks share those of every sample;
    None = all have as many. stay_whole: no chunk has only a part of a sample.
    """

    labels_BL: Tensor
    keys: SampleKeys
    valid_BL: Tensor | None = None
    longest: int | None = None
    stay_whole: bool = False

    @cached_property
    def info(self) -> Tokens:
        """What an MoE layer is told about the samples: every layer the same."""
        samples = len(self.labels_BL)
        return Tokens(
            samples=samples,
            keys=self.keys,
            valid_T=None if self.valid_BL is None else self.valid_BL.flatten(),
            most=None if self.longest is None else samples * self.longest,
            stay_whole=self.stay_whole,
        )

    def part(self, rank: int, ranks: int) -> SampleMetadata:
        """Return what is known of this rank's tokens, where `ranks` share those of every sample."""
        length = self.labels_BL.shape[1]
        here = part_of(length, rank, ranks)
        return replace(
            self,
            labels_BL=self.labels_BL[:, here],
            keys=replace(self.keys, first_token=here.start),
            valid_BL=None if self.valid_BL is None else self.valid_BL[:, here],
            longest=max(split_sizes(length, ranks)),
        )

    def num_tokens(self) -> Tensor | int:
        """Return the number of tokens that are not padding."""
        return self.labels_BL.numel() if self.valid_BL is None else self.valid_BL.sum()


def part_of(length: int, rank: int, ranks: int) -> slice:
    """Return the tokens that one of `ranks` ranks has of a sample with `length`."""
    sizes = split_sizes(length, ranks)
    first = sum(sizes[:rank])
    return slice(first, first + sizes[rank])
