"""What a run reads: tokens, numbers below a vocabulary's size, at places from 0 on; and text as tokens.

Every byte of a text is a token, so a text of any size needs no tokenizer and no preparation.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    size: number of tokens. vocabulary: every token is below it. unit: what a token is, in words. tokenizer:
    its sha256, or `bytes`. digest: identifies the tokens without reading them; None if they must be read for
    it.
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

    Raises the errors of `Files`. path: the setting that named the files, for messages.
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
