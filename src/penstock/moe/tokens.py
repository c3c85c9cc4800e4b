"""What is known of tokens beside their hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.moe.counter import SampleKeys


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A batch of tokens, sample after sample, all samples of one length.

    samples: how many. keys: what noise is keyed by; None draws it from PyTorch's own generator.
    valid_T: bool, False for padding, which goes to no expert and counts for nothing; None: all are valid.
    """

    samples: int = 1
    keys: SampleKeys | None = None
    valid_T: Tensor | None = None
