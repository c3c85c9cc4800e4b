"""What a layer knows about tokens besides their hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.moe.counter import SampleKeys


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A batch of tokens, sample after sample, all samples of one length.

    samples: their number, possibly 0. keys: of random noise; None draws it from PyTorch's own generator.
    valid_T: bool, False for padding, which goes to no expert and is not counted; None: all are valid. most:
    tokens of the rank that has most, where ranks have different numbers of tokens and equal numbers of slots;
    None = all ranks have equally many. stay_whole: chunks are made of whole samples. clean: gates add no
    noise.
    """

    samples: int = 1
    keys: SampleKeys | None = None
    valid_T: Tensor | None = None
    most: int | None = None
    stay_whole: bool = False
    clean: bool = False

    def inseparable(self, tokens: int) -> int:
        """Return the number of consecutive tokens, of `tokens`, that no chunk splits."""
        return max(1, tokens // max(1, self.samples)) if self.stay_whole else 1

    def by_sample(self, values: Tensor) -> Tensor:
        """Return values [T, ...] as [B, L, ...]; without samples there are no tokens, and L is 0."""
        length = values.shape[0] // max(1, self.samples)
        return values.view(self.samples, length, *values.shape[1:])
