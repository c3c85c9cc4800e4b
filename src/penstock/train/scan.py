"""One pass over a text: what identifies it, and how often each byte stands in it.

A text of at most `WHOLE_BYTES` is read to its last byte. Of a longer one `SAMPLED_BLOCKS` blocks are, evenly
spread from the first to the last, so that a start takes seconds whatever the size; its identity then holds
its size and those blocks.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.train.text import BLOCK_BYTES, Text

WHOLE_BYTES = 2 << 30
SAMPLED_BLOCKS = 512
VOCABULARY_SIZE = 256


@dataclass(frozen=True, kw_only=True)
class Scanned:
    """digest: sha256, of the whole text or of its size and a sample. counts: of every byte, 256 of them.

    scanned_bytes: how much was looked at.
    """

    digest: str
    counts: tuple[int, ...]
    scanned_bytes: int

    @property
    def unigram_entropy_nats(self) -> float:
        """Entropy of the byte distribution, nats per byte: the loss of knowing byte counts alone."""
        counts = np.array(self.counts, dtype=np.int64)
        share = counts[counts > 0] / counts.sum()
        return float(np.log(share) @ -share)


class Scan:
    """A scan that can be interrupted, so that ranks which wait for it hear from this one meanwhile."""

    def __init__(self, text: Text, whole_bytes: int = WHOLE_BYTES) -> None:
        self._hash, self._counts, self._bytes = hashlib.sha256(), np.zeros(VOCABULARY_SIZE, np.int64), 0
        starts: range | list[int] = range(0, text.size, BLOCK_BYTES)
        if text.size > whole_bytes:
            self._hash.update(f"{text.size} bytes, {SAMPLED_BLOCKS} blocks\n".encode())
            last = max(0, text.size - BLOCK_BYTES)
            starts = [last * block // (SAMPLED_BLOCKS - 1) for block in range(SAMPLED_BLOCKS)]
        self._blocks: Iterator[bytes] = text.blocks(starts)
        self.result: Scanned | None = None

    def work(self, seconds: float) -> bool:
        """Go on for about so long, a block at least; whether the scan has ended, and `result` is there."""
        until_s = time.monotonic() + seconds
        while self.result is None:
            block = next(self._blocks, None)
            if block is None:
                counts, digest = tuple(self._counts.tolist()), self._hash.hexdigest()
                self.result = Scanned(digest=digest, counts=counts, scanned_bytes=self._bytes)
                break
            self._hash.update(block)
            self._counts += np.bincount(np.frombuffer(block, dtype=np.uint8), minlength=VOCABULARY_SIZE)
            self._bytes += len(block)
            if time.monotonic() >= until_s:
                break
        return self.result is not None


def scan(text: Text, whole_bytes: int = WHOLE_BYTES) -> Scanned:
    """Scan to the end at once."""
    going = Scan(text, whole_bytes)
    while not going.work(60):
        pass
    assert going.result is not None
    return going.result
