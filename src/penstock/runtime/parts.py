"""What the engine needs of a model: its pieces between transfers. Any model that has them can be scheduled.

Shapes: B samples, L tokens per sample, M hidden size, T = B * L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from penstock.moe import MoELayer, SampleKeys


class BlockParts(Protocol):
    """One transformer block. `moe` is None in a dense block."""

    @property
    def moe(self) -> MoELayer | None: ...

    def attend(self, h_BLM: Tensor, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        """Attention: the new residual stream [B, L, M], and its norm as tokens [T, M]."""
        ...

    def add(self, residual_BLM: Tensor, out_TM: Tensor, keys: SampleKeys) -> Tensor:
        """The output of the feed-forward part added to the residual stream."""
        ...

    def dense(self, x_TM: Tensor) -> Tensor:
        """The feed-forward part of a dense block."""
        ...


class ModelParts(Protocol):
    """A decoder in pieces."""

    @property
    def parts(self) -> Sequence[BlockParts]: ...

    def embed(self, tokens_BL: Tensor, keys: SampleKeys) -> Tensor:
        """Token ids to hidden states [B, L, M]."""
        ...

    def head(self, h_BLM: Tensor, labels_BL: Tensor) -> Tensor:
        """The sum (not the mean) of the token losses; labels of -100 count for nothing."""
        ...

    def replicated_parameters(self, layer: int) -> list[nn.Parameter]:
        """Parameters that every rank holds, by layer; embedding with the first, head with the last.

        A layer names all that it uses, also what other layers use: the stack counts it once.
        """
        ...

    def expert_parameters(self, layer: int) -> list[nn.Parameter]:
        """Parameters of this rank's experts of one layer."""
        ...
