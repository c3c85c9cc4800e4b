"""The text of BENCHMARKS.md. Pure: the same input gives the same text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.machine import Machine

INTRODUCTION: Final = """\
# Benchmarks

This file was written by `python -m benchmarks.suite .`. Each section shows a command, and below it the
table of that command's result. Cases of one table ran in turns (A B C A B C ...) with the same weights
and data, so that noise falls on all of them alike; an interval in brackets holds the median with 95 %
confidence."""

READING: Final = """\
## How to read the tables

- **iteration**: forward, backward, sums of gradients, clipping and AdamW's update, where the section does
  not say otherwise; the slowest rank of each round, median of the rounds.
- **speed-up**: against the first row, round by round. **[low, high]** is its interval: if it holds 1,
  neither of the two is shown to be faster.
- **efficiency**: physical limit / iteration. The limit is the larger of computation alone (all ranks at
  once, nothing sent) and the bytes of the busiest uplink over its rate. At 1.00 no schedule can be faster.
- **exposed**: time in which something was sent and nothing was computed, and its part of the iteration.
  **beyond compute**: the part of the iteration by which it is longer than the computation alone; known of
  other systems, too. **overhead**: time in which the next computation was ready and did not start. **peak**:
  memory of a step above what was held before it.
- **simulated**: the iteration that the simulator predicted from costs which were measured apart from
  these runs, and how much longer the real one took."""

LAST: Final = "What these tables do not show"
LIMITS: Final = f"""\
## {LAST}

- **No real cluster.** Nodes are network namespaces of one machine, links are rate limits of its kernel. There
  is no switch and hardly any latency. Traffic is real, and costs processor time that a card would not take.
- **Shared cores.** With more ranks than cores, computation is slower than on devices of their own, so
  communication hides more easily than it would there. Believe ratios, not times.
- **Virtual devices** sleep for as long as a cost model says instead of computing. They show order and
  traffic for more ranks than there are cores, not that a processor keeps up.
- **No GPU.** NCCL, streams and copies between host and device behave differently.
- **Even routing** where a capacity factor stands, from random data; real routing changes in training.
- **Small models.** With another ratio of computation to traffic every number changes.
- **Few rounds.** Intervals cover the noise of this run, not that of another day or machine.
- **Other systems** run at this size and on CPUs, which is not what they were made for: their rows show their
  order of communication, not their quality."""

ANSWERED: Final = (Path(__file__).parent / "answered.md").read_text(encoding="utf-8").rstrip()
"""Questions that were answered once, without their tables."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One run. Of table and failure exactly one is there.

    Attributes:
        command: The command as a person would type it.
        note: Why this run is here.
        table: The table in Markdown, as the command prints it.
        failure: Why there is no table, in one line.
        picture: The path of a figure, relative to the document.
    """

    title: str
    command: str
    note: str
    table: str | None = None
    failure: str | None = None
    picture: str | None = None

    def __post_init__(self) -> None:
        assert (self.table is None) != (self.failure is None), f"{self.title}: a table or a failure"


def write_document(
    machine: Machine, sections: Sequence[Section], overview: Sequence[tuple[str, str]] = (), page: str = ""
) -> str:
    """Return the whole document; all paths are relative to it.

    Args:
        machine: The machine that the results are from.
        sections: One section per run.
        overview: Titles and paths of figures over several runs.
        page: The path of the interactive page; "" = there is none.
    """
    parts = [INTRODUCTION, *_failures(sections), _machine(machine), *_overview(overview, page), READING]
    parts += [_section(section) for section in sections]
    return "\n\n".join([*parts, ANSWERED, LIMITS]) + "\n"


def put_section(document: str, section: Section, later: Sequence[str]) -> str:
    """Return the document with one new section: in its old place, or before the first of `later` there is.

    Args:
        document: The text of the document.
        section: The section to put there.
        later: Titles of the sections that come after it.
    """
    parts = re.split(r"^(?=## )", document, flags=re.MULTILINE)
    places = {part.partition("\n")[0].removeprefix("## "): number for number, part in enumerate(parts)}
    text = f"{_section(section)}\n\n"
    if section.title in places:
        parts[places[section.title]] = text
    else:
        ends = (ANSWERED.partition("\n")[0].removeprefix("## "), LAST)
        parts.insert(min(places[title] for title in (*later, *ends) if title in places), text)
    return "".join(parts)


def _failures(sections: Sequence[Section]) -> Iterator[str]:
    """Yield what is missing."""
    failed = [section.title for section in sections if section.failure is not None]
    if failed:
        which = "; ".join(failed)
        yield f"**{len(failed)} of {len(sections)} runs failed: {which}.** The others are complete."


def _machine(machine: Machine) -> str:
    rows = [f"| {name} | {value} |" for name, value in machine.lines()]
    return "\n".join(["## Machine", "", "| | |", "|---|---|", *rows])


def _overview(overview: Sequence[tuple[str, str]], page: str) -> Iterator[str]:
    if overview or page:
        yield "## At a glance"
    yield from (f"![{title}]({path})" for title, path in overview)
    if page:
        yield (
            f"The command also writes `{page}`: the same figures with all numbers, as a page for a browser.\n"
            "It holds its plotting library, works without a network, and is too large for the repository."
        )


def _section(section: Section) -> str:
    parts = [f"## {section.title}", section.note, f"```\n{section.command}\n```"]
    if section.failure is not None:
        parts.append(f"**This run failed:** {section.failure}")
    if section.table is not None:
        parts.append(_paragraphs(section.table))
    if section.picture is not None:
        parts.append(f"![{section.title}]({section.picture})")
    return "\n\n".join(parts)


def _paragraphs(table: str) -> str:
    """Return what stands above a table, line by line: Markdown would join those lines."""
    return "\n".join(
        line if line.startswith("|") or not line else f"- {line}" for line in table.strip("\n").splitlines()
    )
