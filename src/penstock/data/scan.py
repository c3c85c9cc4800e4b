"""One pass over a text: what identifies it, and how often each token stands in it.

A text of at most `WHOLE_BYTES` is read to its last token. Of a longer one `SAMPLED_BLOCKS` blocks are, evenly
spread from the first to the last, so that a start takes seconds whatever the size; its identity then holds
its size and those blocks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.data.text import BLOCK_BYTES, Numbers, Readable

WHOLE_BYTES = 2 << 30
SAMPLED_BLOCKS = 512


@dataclass(frozen=True, eq=False, kw_only=True)
class Scanned:
    """digest: sha256, of the whole text or of its size and a sample; or what a prepared text is known by.

    counts: of every token of the vocabulary. seen: how many tokens were looked at.
    """

    digest: str
    counts: npt.NDArray[np.int64]
    seen: int


def entropy_nats(parts: Sequence[Scanned], weights: Sequence[float]) -> float:
    """Entropy of the token distribution of a mixture: the loss of knowing token counts alone. nats."""
    widest = max(part.counts.size for part in parts)
    whole = np.zeros(widest)
    for part, weight in zip(parts, weights, strict=True):
        whole[: part.counts.size] += weight * part.counts / part.counts.sum()
    share = whole[whole > 0] / whole.sum()
    return float(np.log(share) @ -share)


class Scan:
    """A scan that can be interrupted, so that ranks which wait for it hear from this one meanwhile."""

    def __init__(self, text: Readable, whole_bytes: int = WHOLE_BYTES) -> None:
        self._text, self._hash, self._seen = text, hashlib.sha256(), 0
        self._counts = np.zeros(text.vocabulary, np.int64)
        starts: range | list[int] = range(0, text.size, BLOCK_BYTES)
        if text.size > whole_bytes:
            self._hash.update(f"{text.size} bytes, {SAMPLED_BLOCKS} blocks\n".encode())
            last = max(0, text.size - BLOCK_BYTES)
            starts = [last * block // (SAMPLED_BLOCKS - 1) for block in range(SAMPLED_BLOCKS)]
        self._blocks: Iterator[Numbers] = (
            text.tokens(start, min(start + BLOCK_BYTES, text.size)) for start in starts
        )
        self.result: Scanned | None = None

    def work(self, seconds: float) -> bool:
        """Go on for about so long, a block at least; whether the scan has ended, and `result` is there."""
        until_s = time.monotonic() + seconds
        while self.result is None:
            block = next(self._blocks, None)
            if block is None:
                digest = self._text.digest or self._hash.hexdigest()
                self.result = Scanned(digest=digest, counts=self._counts, seen=self._seen)
                break
            if self._text.digest is None:
                self._hash.update(block.tobytes())
            self._counts += np.bincount(block, minlength=self._text.vocabulary)
            self._seen += block.size
            if time.monotonic() >= until_s:
                break
        return self.result is not None


def scan(text: Readable, whole_bytes: int = WHOLE_BYTES) -> Scanned:
    """Scan to the end at once."""
    going = Scan(text, whole_bytes)
    while not going.work(60):
        pass
    assert going.result is not None
    return going.result
