"""Turns files of text into a folder of tokens: in constant memory, safe to kill, and resumable.

A shard is finished when it has its final name and the record lists it; what comes after it is written again.
Pieces of text and shards begin and end in the same places however often the work was interrupted, so the
result is the same to the last byte. So where nothing keeps two processes apart, both write the same, and a
shard that has its name stays: a run may read it already.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from penstock.config import ConfigError
from penstock.data.documents import Piece, check_readable, pieces
from penstock.data.files import HINT, TextError
from penstock.data.tokenizer import Tokenizer, as_array
from penstock.data.tokens import (
    BLOCK_BYTES,
    CRC_BYTES,
    MOST_SHARDS,
    UNFINISHED,
    WHOLE,
    Record,
    Shard,
    header,
    read_record,
    shard_file,
    sums_file,
    write_record,
)
from penstock.writing import DRAFT, Draft, naming, open_lock, remove_drafts, take_lock, write_whole

logger = logging.getLogger(__name__)


class ShardWriter:
    """A shard to which tokens are added; `finish` gives it its name. At most one block waits in memory.

    Args:
        yields: See `Draft.settle`.
    """

    def __init__(
        self, folder: Path, number: int, dtype: np.dtype[np.unsignedinteger], *, yields: bool
    ) -> None:
        self._path, self._sums_path, self.dtype = (
            shard_file(folder, number),
            sums_file(folder, number),
            dtype,
        )
        self._draft, self._yields = Draft(self._path), yields
        self._file = self._draft.file
        self._waiting, self._hash, self._sums = bytearray(), hashlib.sha256(), bytearray()
        self.tokens = 0
        self._write_header()

    def add(self, tokens: npt.NDArray[np.unsignedinteger]) -> None:
        """Append tokens to the shard."""
        self.tokens += tokens.size
        self._waiting += tokens.tobytes()
        whole = len(self._waiting) - len(self._waiting) % BLOCK_BYTES
        with naming(self._path):
            for start in range(0, whole, BLOCK_BYTES):
                self._write(bytes(self._waiting[start : start + BLOCK_BYTES]))
        del self._waiting[:whole]

    def finish(self) -> Shard:
        """Finish the shard on the disk, and return its entry for the record."""
        with naming(self._path):
            if self._waiting:
                self._write(bytes(self._waiting))
            self._file.seek(0)
            self._write_header()
            write_whole(self._sums_path, bytes(self._sums), durable=True, yields=self._yields)
            self._draft.settle(durable=True, yields=self._yields)
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


SHARD_TOKENS: Final = 1 << 27
BATCH_CHARACTERS: Final = 1 << 20
"""Characters that are given to the tokenizer at once, which processes them with several threads."""

LOCK: Final = ".lock"
WAIT_S: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a preparation is.

    Attributes:
        read_bytes: Bytes of the inputs that were read.
        total_bytes: Bytes of all inputs.
        tokens, documents: Numbers of those that were written.
    """

    read_bytes: int
    total_bytes: int
    tokens: int
    documents: int


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Some files, and how they become tokens.

    Attributes:
        source: A description of the files.
        field: Name of the field with the text, in files that have fields.
        shard_tokens: Number of tokens with which a shard is closed.
    """

    files: tuple[Path, ...]
    source: str
    field: str
    tokenizer: Tokenizer
    shard_tokens: int = SHARD_TOKENS

    def check(self) -> None:
        """Raise ConfigError if an input cannot be opened, or lacks the field."""
        for file in self.files:
            check_readable(file, self.field)

    @property
    def made_from(self) -> str:
        """Digest of everything on which the tokens depend; files by name, size and time of last change.

        Raises ConfigError about `path` for a file that is not there, such as one to which a link leads.
        """
        facts = [self.field, self.tokenizer.digest, self.tokenizer.end, self.shard_tokens]
        for file in self.files:
            try:
                status = file.stat()
            except OSError as error:
                raise ConfigError("path", str(file), f"cannot be read ({error.strerror})", HINT) from error
            facts += [str(file.resolve()), status.st_size, status.st_mtime_ns]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def run(self, folder: Path, *, waits: bool = False) -> Iterator[Progress]:
        """Write the folder, or what is missing in it; a whole folder made from the same files stays as it is.

        Args:
            waits: Whether to wait for another process that writes there, instead of refusing.

        Yields:
            How far it is, from time to time.

        Raises:
            ConfigError: About `--out`, if the folder holds something else.
            TextError: If an input cannot be used, or has changed meanwhile.
        """
        made_from = self.made_from
        folder.mkdir(parents=True, exist_ok=True)
        with _opened_lock(folder) as lock:
            while (taken := take_lock(lock)) is False:
                if not waits:
                    raise _refused(folder, "another process is writing there", "Wait until it has ended.")
                yield Progress(read_bytes=0, total_bytes=self._total_bytes, tokens=0, documents=0)
                time.sleep(WAIT_S)
            record = self._begun(folder, made_from)
            if record is None:
                return
            if taken:
                remove_drafts(folder)
            else:
                logger.warning(f"nothing keeps others out of {folder}: its file system has no locks")
            record = yield from self._write(folder, record, yields=not taken)
            if self.made_from != made_from:
                raise TextError(f"{self.source}: a file has changed while it was read; leave them alone")
            if not record.tokens:
                raise TextError(f"{self.source} holds no text; name files that hold some")
            write_record(record, folder / WHOLE)
            (folder / UNFINISHED).unlink(missing_ok=True)

    @property
    def _total_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def _begun(self, folder: Path, made_from: str) -> Record | None:
        """Return the record from which to continue; None where the folder is whole.

        Without locks another process may write there meanwhile. Whatever its shards that are seen here, one
        of the records that are looked for after them is there, in this order.
        """
        names = {each.name for each in folder.iterdir()} - {LOCK, UNFINISHED}
        for name in (WHOLE, UNFINISHED, WHOLE):
            if (earlier := _earlier(folder / name)) is not None:
                if earlier.made_from == made_from:
                    return None if name == WHOLE else earlier
                if earlier.shards:  # else an input was refused, and may be right by now
                    why = "holds tokens of other files or settings, or a file has changed since"
                    raise _refused(folder, why, "Choose another folder, or delete this one.")
        if not all(map(DRAFT.fullmatch, names)):
            raise _refused(folder, "is not empty", "Choose a new folder.")
        record = Record(
            made_from=made_from,
            source=self.source,
            tokenizer=self.tokenizer.digest,
            vocabulary=self.tokenizer.vocabulary,
            end=self.tokenizer.end,
        )
        write_record(record, folder / UNFINISHED)
        return record

    def _write(self, folder: Path, record: Record, *, yields: bool) -> Generator[Progress, None, Record]:
        """Write what the record lacks, and return the record with it."""
        before = sum(file.stat().st_size for file in self.files[: record.position.file])
        total, read = self._total_bytes, min(before + record.position.at, self._total_bytes)
        coming = pieces(self.files, self.field, record.position)
        while (piece := next(coming, None)) is not None:
            if len(record.shards) == MOST_SHARDS:
                raise _refused(folder, f"has {MOST_SHARDS:,} shards", "Use a larger --shard-tokens.")
            batches = _batches(chain([piece], coming))
            with ShardWriter(folder, len(record.shards), record.dtype, yields=yields) as shard:
                documents, position = record.documents, record.position
                for batch in batches:
                    self._add(batch, shard)
                    read += sum(each.read_bytes for each in batch)
                    documents += sum(each.ends for each in batch)
                    position = batch[-1].after
                    tokens = record.tokens + shard.tokens
                    yield Progress(read_bytes=read, total_bytes=total, tokens=tokens, documents=documents)
                    if shard.tokens >= self.shard_tokens:
                        break
                shards = (*record.shards, shard.finish()) if shard.tokens else record.shards
            record = replace(record, shards=shards, documents=documents, position=position)
            write_record(record, folder / UNFINISHED)
        return record

    def _add(self, batch: Sequence[Piece], shard: ShardWriter) -> None:
        for piece, ids in zip(batch, self.tokenizer.encode([each.text for each in batch]), strict=True):
            shard.add(as_array(self.tokenizer, ids, shard.dtype, ends=piece.ends))


def _earlier(path: Path) -> Record | None:
    """Return a record; None where there is none, or another process has removed it meanwhile."""
    try:
        return read_record(path) if path.exists() else None
    except ConfigError:
        if path.exists():
            raise
        return None


def _batches(coming: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Yield runs of pieces with about `BATCH_CHARACTERS` of text. A new one starts after the previous one."""
    batch: list[Piece] = []
    length = 0
    for piece in coming:
        batch.append(piece)
        length += len(piece.text) + 1
        if length >= BATCH_CHARACTERS:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _opened_lock(folder: Path) -> BinaryIO:
    """Return the file of a folder's lock, which the system releases when the file is closed."""
    try:
        return open_lock(folder / LOCK)
    except OSError as error:
        raise _refused(folder, f"cannot be written to: {error.strerror}", "Choose another folder.") from error


def _refused(folder: Path, why: str, hint: str) -> ConfigError:
    return ConfigError("--out", str(folder), why, hint)
