"""Numbers and sizes for people, and lines that fit a terminal."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TextIO

NARROWEST, UNKNOWN, WIDEST = 60, 100, 130
"""Columns: lines are never wrapped to fewer than NARROWEST nor made longer than WIDEST; UNKNOWN is the width
where there is no terminal."""

LANE_WORDS = {
    "compute": "computation",
    "inter": "network",
    "intra": "network inside nodes",
    "host": "planning",
}
"""What lanes are called for people. "network" is that between ranks, where there is one node."""
BETWEEN_NODES = "network between nodes"

MOST_NAMED = 4
"""Most names in a message."""

MOST_DIGITS = 20
"""Most digits of a number that is counted with; Python refuses to read thousands."""

HELD = "\N{NO-BREAK SPACE}%"
LAST_COLUMN = re.compile(r"(?:.*\S)? {2,}(?=\S)")
NUMBER = re.compile(r"[<>+-]?\d|[-?]?$")
"""How a cell begins that has a number, or in its place nothing."""


def lane_words(lane: str, *, nodes: bool) -> str:
    """Return what a lane is called for people.

    Args:
        nodes: Whether there are several nodes.
    """
    return BETWEEN_NODES if nodes and lane == "inter" else LANE_WORDS.get(lane, lane)


def whole_number(text: str) -> int | None:
    """Return the whole number from 0 that a text spells; None for another text, and for endless digits."""
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else None


def some_of(names: Sequence[str]) -> str:
    """Return the first few of some names, such as those of tensors, and how many more there are."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "") or "nothing"


def counted(number: int, word: str, plural: str = "s") -> str:
    """Return a number with its noun in the singular or plural: `1 chunk`, `2 chunks`."""
    return f"{number} {word}{plural if number != 1 else ''}"


def mib(size_bytes: float) -> str:
    """Format bytes in MiB, in KiB below one MiB, or as bytes where they round to no KiB."""
    if size_bytes >= 2**20:
        return f"{size_bytes / 2**20:.1f} MiB"
    kib = f"{size_bytes / 2**10:.0f} KiB"
    return kib if kib != "0 KiB" else counted(round(size_bytes), "byte")


def gib(size_bytes: float) -> str:
    """Format bytes in GiB, in MiB below one GiB, or in smaller units where they round to no MiB."""
    size = size_bytes / 2**30
    if size < 1:
        whole = f"{1024 * size:.0f} MiB"
        return whole if whole != "0 MiB" or size <= 0 else mib(size_bytes)
    return f"{size:.2f} GiB" if size < 10 else f"{size:.1f} GiB"


def bit_rate(bytes_per_s: float) -> str:
    """Format the rate of a link in Mbit/s, from 10 Gbit/s in Gbit/s, as `--inter-rate` takes it."""
    mega = 8 * bytes_per_s / 1e6
    rate, unit = (mega, "Mbit/s") if mega < 10_000 else (mega / 1000, "Gbit/s")
    return f"{rate:,.0f} {unit}" if rate >= 100 else f"{round(rate, 1):g} {unit}"


def flop_rate(flops_per_s: float) -> str:
    """Format floating-point operations per second in GFLOP/s, from a tera in TFLOP/s."""
    rate, unit = (flops_per_s / 1e9, "GFLOP/s") if flops_per_s < 1e12 else (flops_per_s / 1e12, "TFLOP/s")
    return f"{rate:.3g} {unit}"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds, with at least four digits."""
    value = 1000 * seconds
    places = 0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 10 else 3
    return f"{value:,.{places}f} ms"


def within(seconds: float, interval_s: tuple[float, float] | None) -> str:
    """Format seconds as milliseconds, with the interval that is expected: `812.0 ms (780 to 845)`.

    One that is narrower than these digits is left out.
    """
    low, high = (milliseconds(end).removesuffix(" ms") for end in interval_s or (seconds, seconds))
    return milliseconds(seconds) + (f" ({low} to {high})" if low != high else "")


def percent(share: float) -> str:
    """Format a share of 1: `62 %`."""
    return f"{100 * share:.0f} %"


def change(seconds: float, base_s: float) -> str:
    """Format the relative change from `base_s` to `seconds`: `+3.2 %`, `-31 %`."""
    percent = round(100 * (seconds / base_s - 1), 1) + 0.0  # no -0.0
    return f"{percent:+.0f} %" if abs(percent) >= 10 else f"{percent:+.1f} %"


def terminal_width(stream: TextIO | None = None) -> int:
    """Return the columns of the terminal behind `stream` (standard output), within NARROWEST and WIDEST.

    The variable COLUMNS overrides the terminal's width.
    """
    columns = shutil.get_terminal_size((UNKNOWN, 24)).columns
    if stream is not None and "COLUMNS" not in os.environ:
        columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    return min(max(columns or UNKNOWN, NARROWEST), WIDEST)


def printable(text: str) -> str:
    """Return `text`, such as a name from a file, with what a terminal would obey written as `\\x1b`."""
    return "".join(
        f"\\x{ord(char):02x}" if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") else char
        for char in text
    )


def folded(text: str, width: int) -> str:
    """Return `text` with each line that is longer than `width` wrapped, and continued under its last column.

    What a terminal would obey is escaped, other than ends of lines. Columns are separated by two spaces or
    more. A word, such as a path, is never broken, nor is `26 %`.
    """
    lines = []
    for line in map(printable, text.split("\n")):
        columns = LAST_COLUMN.match(line)
        indent = columns.end() if columns is not None and columns.end() <= width // 2 else 4
        filled = textwrap.fill(
            line.replace(" %", HELD),
            width,
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
        lines.append(filled.replace(HELD, " %") if len(line) > width else line)
    return "\n".join(lines)


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose first row is the head; numbers stand on the right."""
    columns = [*zip(*rows, strict=True)]
    sides = [">" if all(map(NUMBER.match, column[1:])) else "<" for column in columns]
    widths = [max(map(len, column)) for column in columns]
    lines = [
        " | ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
        for row in rows
    ]
    rule = "|".join("-" * (w + 1) + ("-" if s == "<" else ":") for s, w in zip(sides, widths, strict=True))
    head, *body = (f"| {line} |" for line in lines)
    return [head, f"|{rule}|", *body]


def stacked(rows: Sequence[Sequence[str]], width: int, *, keep: int = 1) -> Iterator[list[list[str]]]:
    """Yield the table in parts that are at most `width` wide in Markdown, each with the first `keep` columns.

    A part has at least one further column, however wide that is.

    Args:
        rows: Cells by row; the first row is the header.
        width: Most characters of a line.
        keep: Number of columns that every part begins with.
    """
    columns = [list(column) for column in zip(*rows, strict=True)]
    head, part = columns[:keep], list[list[str]]()
    for column in columns[keep:]:
        if part and 1 + sum(3 + max(map(len, each)) for each in (*head, *part, column)) > width:
            yield [list(row) for row in zip(*head, *part, strict=True)]
            part = []
        part.append(column)
    yield [list(row) for row in zip(*head, *part, strict=True)]
