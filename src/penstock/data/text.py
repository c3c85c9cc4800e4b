"""What a run reads: tokens, numbers below a vocabulary's size, at places from 0 on; and text as tokens.

Every byte of a text is a token, so a text of any size needs no tokenizer and no preparation.

One pass over a text (`scan`) says what identifies it, and how often each token occurs. A text of at most
`WHOLE_BYTES` is read completely. Of a longer one `SAMPLED_BLOCKS` blocks are read, evenly spread from the
first to the last, so that a start takes seconds whatever the size; its identity then consists of its size and
those blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from penstock.data.files import Files, TextError

__all__ = ["BLOCK_BYTES", "BYTES", "NEWLINE", "Numbers", "Offsets", "Readable", "Text", "TextError"]

Numbers = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]

BLOCK_BYTES: Final = 1 << 20
BYTES: Final = 256
"""Number of values of a byte."""

NEWLINE: Final = b"\n"


class Readable(Protocol):
    """Tokens that can be read at any place. Only what is asked for is read.

    Attributes:
        size: Number of tokens.
        vocabulary: Size of the vocabulary; every token is below it.
        unit: What a token is, in words.
        tokenizer: Sha256 of the tokenizer, or `bytes`.
        digest: What identifies the tokens without reading them; None if they must be read for it.
    """

    @property
    def size(self) -> int: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def unit(self) -> str: ...

    @property
    def tokenizer(self) -> str: ...

    @property
    def digest(self) -> str | None: ...

    def tokens(self, start: int, stop: int) -> Numbers:
        """Return the tokens at places `start` to `stop`; raise TextError if they are damaged or gone."""
        ...

    def document_starts(self, start: int, stop: int) -> Offsets:
        """Return the places above `start` and below `stop` at which a document begins."""
        ...


class Text:
    """All bytes of some files, with a newline between two so that no line runs into the next file.

    Raises the errors of `Files`.

    Args:
        path: The setting that named the files, for messages.
    """

    vocabulary, unit, tokenizer, digest = BYTES, "bytes", "bytes", None

    def __init__(self, path: str | None, files: Sequence[Path]) -> None:
        self._files = Files(path, files)
        sizes = np.array(self._files.sizes_bytes, dtype=np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes + 1)])
        self._ends = self._starts[:-1] + sizes
        self.size = int(self._starts[-1]) - 1 if files else 0

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`."""
        assert 0 <= start <= stop <= self.size, f"{start} to {stop} of {self.size}"
        pieces, number = [], int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            first, end = int(self._starts[number]), int(self._ends[number])
            if start < end:
                pieces.append(self._files.read(number, start - first, min(stop, end) - first))
            if stop > end:
                pieces.append(NEWLINE)
            start, number = end + 1, number + 1
        return b"".join(pieces)

    def tokens(self, start: int, stop: int) -> Numbers:
        return np.frombuffer(self.read(start, stop), dtype=np.uint8)

    def document_starts(self, start: int, stop: int) -> Offsets:
        first, last = np.searchsorted(self._starts[:-1], (start, stop - 1), side="right")
        return self._starts[first:last]


WHOLE_BYTES = 2 << 30
SAMPLED_BLOCKS = 512


@dataclass(frozen=True, eq=False, kw_only=True)
class Scanned:
    """The result of a scan.

    Attributes:
        digest: Sha256 of the whole text, or of its size and a sample; or the digest of a prepared text.
        counts: Number of occurrences of every token of the vocabulary.
        seen: Number of tokens that were read.
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


def scan(text: Readable, whole_bytes: int = WHOLE_BYTES) -> Scanned:
    """Scan a text, or of one longer than `whole_bytes` a sample."""
    digest, seen, counts = hashlib.sha256(), 0, np.zeros(text.vocabulary, np.int64)
    starts: range | list[int] = range(0, text.size, BLOCK_BYTES)
    if text.size > whole_bytes:
        digest.update(f"{text.size} bytes, {SAMPLED_BLOCKS} blocks\n".encode())
        last = max(0, text.size - BLOCK_BYTES)
        starts = [last * block // (SAMPLED_BLOCKS - 1) for block in range(SAMPLED_BLOCKS)]
    for start in starts:
        block = text.tokens(start, min(start + BLOCK_BYTES, text.size))
        if text.digest is None:
            digest.update(block.tobytes())
        counts += np.bincount(block, minlength=text.vocabulary)
        seen += block.size
    return Scanned(digest=text.digest or digest.hexdigest(), counts=counts, seen=seen)
