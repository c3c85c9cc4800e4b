"""Writes one shard of tokens: an unfinished shard has another name, and is overwritten."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from penstock.data.record import (
    BLOCK_BYTES,
    CRC_BYTES,
    Shard,
    header,
    shard_file,
    sums_file,
)
from penstock.writing import Draft, write_whole


class ShardWriter:
    """A shard to which tokens are added; `finish` gives it its name. At most one block waits in memory."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype[np.unsignedinteger]) -> None:
        self._path, self._sums_path, self.dtype = (
            shard_file(folder, number),
            sums_file(folder, number),
            dtype,
        )
        self._draft = Draft(self._path)
        self._file = self._draft.file
        self._waiting, self._hash, self._sums = bytearray(), hashlib.sha256(), bytearray()
        self.tokens = 0
        self._write_header()

    def add(self, tokens: npt.NDArray[np.unsignedinteger]) -> None:
        """Append tokens to the shard."""
        self.tokens += tokens.size
        self._waiting += tokens.tobytes()
        whole = len(self._waiting) - len(self._waiting) % BLOCK_BYTES
        for start in range(0, whole, BLOCK_BYTES):
            self._write(bytes(self._waiting[start : start + BLOCK_BYTES]))
        del self._waiting[:whole]

    def finish(self) -> Shard:
        """Finish the shard on the disk, and return its entry for the record."""
        if self._waiting:
            self._write(bytes(self._waiting))
        self._file.seek(0)
        self._write_header()
        write_whole(self._sums_path, bytes(self._sums), durable=True)
        self._draft.settle(durable=True)
        return Shard(tokens=self.tokens, sha256=self._hash.hexdigest())

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draft.discard()

    def _write(self, block: bytes) -> None:
        self._sums += zlib.crc32(block).to_bytes(CRC_BYTES, "little")
        self._hash.update(block)
        self._file.write(block)

    def _write_header(self) -> None:
        self._file.write(header(self.dtype, self.tokens))
