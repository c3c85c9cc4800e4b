"""One pass over a text: what identifies it, and how often each token occurs in it.

A text of at most `WHOLE_BYTES` is read completely. Of a longer one `SAMPLED_BLOCKS` blocks are read, evenly
spread from the first to the last, so that a start takes seconds whatever the size; its identity then consists
of its size and those blocks.
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
    """The result of a scan.

    digest: sha256, of the whole text or of its size and a sample; or the digest of a prepared text. counts:
    of every token of the vocabulary. seen: number of tokens that were read.
    """

    digest: str
    counts: npt.NDArray[np.int64]
    seen: int


def entropy_nats(parts: Sequence[Scanned], weights: Sequence[float]) -> float:
    """Return the entropy of a mixture's tokens, in nats: the loss of a model that knows only token counts."""
    widest = max(part.counts.size for part in parts)
    whole = np.zeros(widest)
    for part, weight in zip(parts, weights, strict=True):
        whole[: part.counts.size] += weight * part.counts / part.counts.sum()
    share = whole[whole > 0] / whole.sum()
    return float(np.log(share) @ -share)


class Scan:
    """A scan in portions, between which ranks that wait for it can hear from this one."""

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
        """Scan for about `seconds`, at least one block; return whether the scan has ended, with `result`."""
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
    """Scan a text to its end at once."""
    going = Scan(text, whole_bytes)
    while not going.work(60):
        pass
    assert going.result is not None
    return going.result
