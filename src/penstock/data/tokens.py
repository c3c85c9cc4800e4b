"""A folder of prepared tokens: its record, while it is written and when it is whole, and its tokens in place.

tokens.json         the record of a whole folder; it is written last, so without it the folder is not whole
unfinished.json     the record of what is finished so far, while more is to come
tokens-00000.npy    a shard: a NumPy array of unsigned integers, as wide as the vocabulary needs
tokens-00000.crc32  CRC-32 of every `BLOCK_BYTES` of its tokens, four bytes each

Every block of a shard is compared with its checksum the first time that any part of the block is read, so
that a damaged block is refused whatever the size of the whole, and a start does not read everything.
"""

from __future__ import annotations

import hashlib
import io
import json
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np

from penstock.config import UNSET, Checked, ConfigError, Items, Within, from_dict, read_json, to_dict
from penstock.data.files import Files, TextError
from penstock.data.text import Numbers, Offsets
from penstock.data.tokenizer import Bytes
from penstock.writing import write_whole

WHOLE, UNFINISHED = "tokens.json", "unfinished.json"
VERSION: Final = 1
BLOCK_BYTES: Final = 1 << 16
HEADER_BYTES: Final = 128
"""Size of NumPy's header of any array of one dimension."""

CRC_BYTES: Final = 4
SUM: Final = "sha256"
"""Key of the record's digest in its file."""

HINT: Final = "Copy the folder again, or delete it and run `penstock prepare` once more."
MOST_SHARDS: Final = 100_000
Count = Annotated[int, Within(0, 2**62, "no disk holds more")]
Symbol = Annotated[int, Within(0, 2**32 - 1, "tokens have at most four bytes")]


@dataclass(frozen=True, kw_only=True)
class Shard(Checked):
    """One file of tokens.

    Attributes:
        tokens: Number of tokens.
        sha256: Sha256 of the tokens.
    """

    tokens: Count
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Position(Checked):
    """Where reading continues: in file number `file`, at this byte, or at this row of a Parquet file."""

    file: Count = 0
    at: Count = 0


@dataclass(frozen=True, kw_only=True)
class Record(Checked):
    """The description of a folder of prepared tokens.

    Attributes:
        made_from: Digest of settings and inputs.
        source: A description of the inputs.
        tokenizer: Sha256 of the tokenizer, or `bytes`.
        vocabulary: Size of the vocabulary; every token is below it.
        end: The token that ends a document.
        documents: Number of documents.
        position: Where reading continues.
    """

    version: Annotated[int, Within(VERSION, VERSION, "of the format of these files")] = VERSION
    made_from: str
    source: str
    tokenizer: str
    vocabulary: Annotated[int, Within(1, 2**32, "tokens have at most four bytes")]
    end: Symbol
    documents: Count = 0
    shards: Annotated[tuple[Shard, ...], Items(MOST_SHARDS, "use larger shards")] = ()
    position: Position = Position()

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Narrowest type that holds every token."""
        return width_of(self.vocabulary)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def digest(self) -> str:
        """The sha256 of everything that determines what is read, wherever it came from."""
        facts = to_dict(replace(self, made_from="", source="", position=Position()))
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def width_of(vocabulary: int) -> np.dtype[np.unsignedinteger]:
    """Return the narrowest type for tokens below `vocabulary`: one, two or four bytes."""
    sizes = ((1 << 8, "<u1"), (1 << 16, "<u2"), (1 << 32, "<u4"))
    return np.dtype(next(name for most, name in sizes if vocabulary <= most))


def header(dtype: np.dtype[np.unsignedinteger], tokens: int) -> bytes:
    """Return what NumPy writes before the numbers of a shard."""
    written = io.BytesIO()
    facts = {"descr": dtype.str, "fortran_order": False, "shape": (tokens,)}
    np.lib.format.write_array_header_1_0(written, facts)
    assert written.tell() == HEADER_BYTES, "NumPy pads it to that"
    return written.getvalue()


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"tokens-{number:05d}.npy"


def sums_file(folder: Path, number: int) -> Path:
    return folder / f"tokens-{number:05d}.crc32"


def read_record(path: Path) -> Record:
    """Read a record; raise ConfigError that begins with its path, even if a single digit is wrong."""
    table = read_json(path, HINT)
    said = table.pop(SUM, None) if isinstance(table, dict) else None
    record = from_dict(Record, table, str(path))
    if said != _sum_of(record):
        raise ConfigError(str(path), UNSET, "is damaged", HINT)
    return record


def is_prepared(folder: Path) -> bool:
    """Tell whether a folder holds tokens, or unfinished ones, which may not be read."""
    return (folder / WHOLE).exists() or (folder / UNFINISHED).exists()


def whole_record(folder: Path) -> Record:
    """Return the record of a whole folder; raise ConfigError about `path` for an unfinished one."""
    if not (folder / WHOLE).exists():
        why = "holds tokens whose preparation has not ended"
        raise ConfigError("path", str(folder), why, "Run the same `penstock prepare` again: it goes on.")
    return read_record(folder / WHOLE)


def write_record(record: Record, path: Path) -> None:
    """Write the record as a whole or not at all, even if the power fails."""
    text = json.dumps({**to_dict(record), SUM: _sum_of(record)}, indent=1)
    write_whole(path, text + "\n", durable=True)


def _sum_of(record: Record) -> str:
    return hashlib.sha256(json.dumps(to_dict(record), sort_keys=True).encode()).hexdigest()


class Tokens:
    """The tokens of a folder, its shards one after another.

    Takes a byte of memory per `BLOCK_BYTES`.

    Args:
        path: The setting that named the folder, for messages.

    Raises:
        ConfigError: About `path`, if the folder is not whole or a shard differs in size from its record.
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
        tokens: Numbers = np.frombuffer(b"".join(pieces), dtype=self.record.dtype)
        return tokens

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
