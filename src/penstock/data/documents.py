"""Documents in files (plain text, JSON lines, Parquet): in pieces, in a fixed order, from any position.

A text file is one document; a long one comes in several pieces, cut after a line. A line of JSON or a row of
a Parquet file is a document: the text of its field. A document without a text is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.config import ConfigError, open_regular
from penstock.data.files import HINT, TextError
from penstock.data.tokens import Position
from penstock.extras import install, needs

if TYPE_CHECKING:
    import pyarrow.parquet

JSON_LINES: Final = (".jsonl", ".ndjson")
PARQUET: Final = (".parquet",)
TABLES: Final = (*JSON_LINES, *PARQUET)
"""Extensions of files that hold documents in a field."""

PIECE_BYTES: Final = 1 << 20
MOST_LINE_BYTES: Final = 1 << 28
ROWS: Final = 64
"""Rows of a Parquet file that are read at once."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of a document.

    Attributes:
        text: The piece's text, up to the document's end if `ends`.
        after: Where reading continues.
        read_bytes: Size of what was read for this piece.
    """

    text: str
    ends: bool
    after: Position
    read_bytes: int


def is_table(file: Path, kinds: Sequence[str] = TABLES) -> bool:
    """Tell whether a file holds documents in a field, by its extension in lower or upper case."""
    return file.suffix.lower() in kinds


def pieces(files: Sequence[Path], field: str, start: Position) -> Iterator[Piece]:
    """Yield all documents from `start` on.

    Args:
        field: Name of the field with the text, in files that have fields.

    Raises:
        TextError: For content that cannot be read or used, naming file and place.
    """
    for number in range(start.file, len(files)):
        file, at = files[number], start.at if number == start.file else 0
        try:
            if is_table(file, PARQUET):
                yield from _parquet(file, number, field, at)
            elif is_table(file, JSON_LINES):
                yield from _json_lines(file, number, field, at)
            else:
                yield from _text(file, number, at)
        except OSError as error:
            raise TextError(f"cannot read {file} any more: {error.strerror or error}") from error


def check_readable(file: Path, field: str) -> None:
    """Raise ConfigError about `path` if a file cannot be opened, or the package that reads it is missing."""
    if is_table(file, PARQUET):
        _table(file, field)
    else:
        with open_regular(file, "path", HINT, str(file)):
            pass


def _text(file: Path, number: int, at: int) -> Iterator[Piece]:
    with file.open("rb") as opened:
        # The end of a piece depends on its beginning alone, however reading arrived there.
        while opened.seek(at) == at and (data := opened.read(PIECE_BYTES + 1)):
            more = len(data) > PIECE_BYTES
            cut = len(data)
            if more and not (cut := data.rfind(b"\n", 0, PIECE_BYTES) + 1):  # after the last line
                ends = range(PIECE_BYTES - 1, PIECE_BYTES - 5, -1)
                cut = next(
                    (end for end in ends if data[end] & 0xC0 != 0x80), PIECE_BYTES
                )  # between characters
            at += cut
            text, after = data[:cut].decode("utf-8", "replace"), Position(file=number, at=at)
            yield Piece(text=text, ends=not more, after=after, read_bytes=cut)


def _json_lines(file: Path, number: int, field: str, at: int) -> Iterator[Piece]:
    with file.open("rb") as opened:
        opened.seek(at)
        while line := opened.readline(MOST_LINE_BYTES + 1):
            place, at = at, at + len(line)
            text = _field(file, line, field, place) if line.strip() else ""
            after = Position(file=number, at=at)
            yield Piece(text=text, ends=bool(text), after=after, read_bytes=len(line))


def _field(file: Path, line: bytes, field: str, at: int) -> str:
    """Return the text of a line of JSON; "" for null."""
    where = f"{file}, the line from byte {at:,} on"
    if len(line) > MOST_LINE_BYTES:
        raise TextError(f"{where}: is longer than {MOST_LINE_BYTES >> 20} MiB")
    try:
        table = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TextError(f"{where}: is not JSON ({error})") from error
    if not isinstance(table, dict) or field not in table:
        raise TextError(f"{where}: has no field {field!r}; name the one with the text (data.field, --field)")
    text = table[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise TextError(f"{where}: field {field!r} is no text")
    return text.encode("utf-8", "replace").decode()  # JSON may hold half of a surrogate pair


def _parquet(file: Path, number: int, field: str, at: int) -> Iterator[Piece]:
    table, first = _table(file, field), 0
    rows_bytes = file.stat().st_size / max(1, table.metadata.num_rows)
    for group in range(table.metadata.num_row_groups):
        beyond = first + table.metadata.row_group(group).num_rows
        if beyond > at:
            for row, text in enumerate(_column(file, table, group, field), start=first):
                if row >= at:
                    after = Position(file=number, at=row + 1)
                    read = round((row + 1) * rows_bytes) - round(row * rows_bytes)
                    yield Piece(text=text or "", ends=bool(text), after=after, read_bytes=read)
        first = beyond


def _column(file: Path, table: pyarrow.parquet.ParquetFile, group: int, field: str) -> Iterator[str | None]:
    import pyarrow

    try:
        for batch in table.iter_batches(batch_size=ROWS, row_groups=[group], columns=[field]):
            yield from batch.column(field).to_pylist()  # m.x also selects the x inside of a column m
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise TextError(f"{file}: rows of group {group} cannot be read ({error})") from error


def _table(file: Path, field: str) -> pyarrow.parquet.ParquetFile:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("path", str(file), needs("pyarrow"), install("pyarrow")) from None
    with open_regular(file, "path", HINT, str(file)):
        pass
    try:
        # Otherwise it reads all of a row group at once, which may be the whole file.
        table = pyarrow.parquet.ParquetFile(file, buffer_size=PIECE_BYTES, pre_buffer=False)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError("path", str(file), f"is no Parquet file ({error})", HINT) from error
    names = table.schema_arrow.names
    if names.count(field) != 1:
        why = f"{file} has columns {', '.join(names)}"
        raise ConfigError("field", field, why, "Name the one with the text.")
    kind, types = table.schema_arrow.field(field).type, pyarrow.types
    text = kind.value_type if types.is_dictionary(kind) else kind  # categories, each of which stands once
    if not (types.is_string(text) or types.is_large_string(text) or types.is_string_view(text)):
        raise ConfigError("field", field, f"is no text in {file}, but {kind}", "Name the one with the text.")
    return table
