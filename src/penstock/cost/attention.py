"""The sizes of attention: what every token is multiplied by, and what its heads compare it with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Form = Literal["all", "window", "chunk", "state"]


@dataclass(frozen=True)
class Reach:
    """How far some of a model's layers look back.

    share: of all layers; what is left has no heads. form: at "all" tokens before; at a "window" of the last
    `size`; at those of the same "chunk" of `size`; or at a "state" of so many columns, as linear attention
    has it, whose reading and writing takes as many operations as comparing with so many keys.
    """

    share: float
    form: Form = "all"
    size: int = 0

    def keys(self, seq_len: int) -> float:
        """Return the number of keys that a token meets on average, itself left out."""
        if self.form == "state":
            return self.size
        size = min(self.size, seq_len) if self.form != "all" else seq_len
        return size / 2 if self.form != "window" else size - size * size / (2 * seq_len)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The attention of a model's layers, as the mean over all of them.

    matrices: what multiplies every token outside of feed-forward parts: columns in, columns out, and the
    number of such matrices in a layer. queries, values: of all heads; width: of one head of values. kept:
    numbers that the heads keep of every token until backward. moved: numbers that they read and write in
    memory on the way from projections to scores.
    """

    matrices: tuple[tuple[int, int, float], ...]
    queries: float
    values: float
    kept: float
    moved: float
    width: float = 128
    reaches: tuple[Reach, ...] = (Reach(1.0),)

    @staticmethod
    def of_heads(hidden_size: int, queries: int, keys: int) -> Attention:
        """Return usual attention with heads of queries, and of keys and values, of these widths together.

        Queries and keys are kept as projected, scaled and turned; values and the output once.
        """
        outward = ((hidden_size, queries, 1.0), (hidden_size, keys, 2.0), (queries, hidden_size, 1.0))
        kept = 4 * (queries + keys)
        return Attention(matrices=outward, queries=queries, values=queries, kept=kept, moved=kept)

    @property
    def weights(self) -> float:
        """Numbers in the matrices of a layer."""
        return sum(rows * columns * number for rows, columns, number in self.matrices)

    def keys(self, seq_len: int) -> float:
        """Return the number of keys that a token meets in a layer, on average over tokens and layers."""
        return sum(each.share * each.keys(seq_len) for each in self.reaches)

    def score_flops(self, seq_len: int) -> float:
        """Return the operations of a token's scores and of its sum of values."""
        return 2 * (self.queries + self.values) * self.keys(seq_len)
