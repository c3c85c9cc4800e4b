"""The record of a folder of prepared tokens, when it is whole and while it is being written.

tokens.json         the record of a whole folder; it is written last, so without it the folder is not whole
unfinished.json     the record of what is finished so far, while more is to come
tokens-00000.npy    a shard: a NumPy array of unsigned integers, as wide as the vocabulary needs
tokens-00000.crc32  CRC-32 of every `BLOCK_BYTES` of its tokens, four bytes each
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np

from penstock.config import UNSET, ConfigError, Items, Within, check_bounds, from_dict, read_json, to_dict
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
class Shard:
    """One file of tokens. tokens: their number. sha256: of the tokens."""

    tokens: Count
    sha256: str

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where reading continues: in file number `file`, at this byte, or at this row of a Parquet file."""

    file: Count = 0
    at: Count = 0

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, kw_only=True)
class Record:
    """The description of a folder of prepared tokens.

    made_from: digest of settings and inputs. source: a description of the inputs. tokenizer: its sha256, or
    `bytes`. end: the token that ends a document; every token is below `vocabulary`. position: where reading
    continues.
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

    def __post_init__(self) -> None:
        check_bounds(self)

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
    found = from_dict(Record, table, str(path))
    if said != _sum_of(found):
        raise ConfigError(str(path), UNSET, "is damaged", HINT)
    return found


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
