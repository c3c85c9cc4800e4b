"""Tokens that `penstock prepare` has written, read in place.

Every block of a shard is compared with its checksum the first time that any part of the block is read, so
that a damaged block is refused whatever the size of the whole, and a start does not read everything.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from penstock.config import ConfigError
from penstock.data.files import Files, TextError
from penstock.data.record import (
    BLOCK_BYTES,
    CRC_BYTES,
    HEADER_BYTES,
    HINT,
    header,
    shard_file,
    sums_file,
    whole_record,
)
from penstock.data.text import Numbers, Offsets
from penstock.data.tokenizer import Bytes


class Tokens:
    """The tokens of a folder, its shards one after another.

    Takes a byte of memory per `BLOCK_BYTES`. Raises ConfigError about `path` where the folder is not whole or
    a shard differs in size from its record.
    """

    def __init__(self, path: str | None, folder: Path) -> None:
        self.record = record = whole_record(folder)
        self.vocabulary, self.digest, self.size = record.vocabulary, record.digest, record.tokens
        numbers = range(len(record.shards))
        self.tokenizer = record.tokenizer
        self.unit = "bytes" if record.tokenizer == Bytes.digest else "tokens"
        self._shards = Files(path, [shard_file(folder, number) for number in numbers])
        self._sums = Files(path, [sums_file(folder, number) for number in numbers])
        self._starts = np.cumsum([0, *(shard.tokens for shard in record.shards)])
        self._width = record.dtype.itemsize
        blocks = [-(-shard.tokens * self._width // BLOCK_BYTES) for shard in record.shards]
        wanted = [HEADER_BYTES + shard.tokens * self._width for shard in record.shards]
        self._check_sizes(path, self._shards, wanted)
        self._check_sizes(path, self._sums, [CRC_BYTES * count for count in blocks])
        self._checked = [bytearray(count) for count in blocks]
        for number, shard in enumerate(record.shards):
            if self._shards.read(number, 0, HEADER_BYTES) != header(record.dtype, shard.tokens):
                why = f"{self._shards.files[number]} is damaged (bytes 0 to {HEADER_BYTES})"
                raise ConfigError("path", path, why, HINT)

    def tokens(self, start: int, stop: int) -> Numbers:
        assert 0 <= start <= stop <= self.size, f"{start} to {stop} of {self.size}"
        pieces, number = [b""], int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            first, end = int(self._starts[number]), min(stop, int(self._starts[number + 1]))
            pieces.append(self._read(number, (start - first) * self._width, (end - first) * self._width))
            start, number = end, number + 1
        found: Numbers = np.frombuffer(b"".join(pieces), dtype=self.record.dtype)
        return found

    def document_starts(self, start: int, stop: int) -> Offsets:
        if stop - start < 2:
            return np.empty(0, dtype=np.int64)
        ends = np.flatnonzero(self.tokens(start, stop - 1) == self.record.end)
        return (ends + start + 1).astype(np.int64)

    def _read(self, number: int, start: int, stop: int) -> bytes:
        """Return bytes of a shard's tokens, after checking the blocks in which they lie."""
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            if not self._checked[number][block]:
                self._check(number, block)
        return self._shards.read(number, HEADER_BYTES + start, HEADER_BYTES + stop)

    def _check(self, number: int, block: int) -> None:
        start = block * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self.record.shards[number].tokens * self._width)
        data = self._shards.read(number, HEADER_BYTES + start, HEADER_BYTES + stop)
        said = self._sums.read(number, CRC_BYTES * block, CRC_BYTES * (block + 1))
        if zlib.crc32(data) != int.from_bytes(said, "little"):
            where = f"bytes {HEADER_BYTES + start:,} to {HEADER_BYTES + stop:,}"
            raise TextError(f"{self._shards.files[number]} is damaged ({where}). {HINT}")
        if np.frombuffer(data, dtype=self.record.dtype).max() >= self.vocabulary:
            raise TextError(f"{self._shards.files[number]} has tokens beyond its vocabulary. {HINT}")
        self._checked[number][block] = 1

    @staticmethod
    def _check_sizes(path: str | None, files: Files, wanted: list[int]) -> None:
        for file, size, due in zip(files.files, files.sizes_bytes, wanted, strict=True):
            if size != due:
                why = f"{file} has {size:,} bytes, and was written with {due:,}"
                raise ConfigError("path", path, why, HINT)


def first_damage(folder: Path) -> str | None:
    """Read a whole folder from beginning to end; return what is wrong with it, None if nothing is."""
    try:
        tokens = Tokens(str(folder), folder)
        for start in range(0, tokens.size, BLOCK_BYTES):
            tokens.tokens(start, min(start + BLOCK_BYTES, tokens.size))
    except (TextError, ConfigError) as error:
        return str(error)
    return None
