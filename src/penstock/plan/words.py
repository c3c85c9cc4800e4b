"""A choice and sizes in words."""

from __future__ import annotations

from penstock.plan.choice import Choice
from penstock.plan.dimensions import CUTS_ALL_REDUCE, CUTS_BATCH, CUTS_TOKENS
from penstock.schedule import Penstock

ORDERS = {
    "search": "order by local search",
    "critical_path": "longest remaining path first",
    "all_to_all_first": "all-to-all before all-reduce",
}


def cut_words(choice: Choice) -> str:
    """How a step is cut: what its schedule reads of the choice, and nothing else."""
    words = []
    if choice.schedule in CUTS_BATCH:
        words.append(counted(choice.microbatches, "microbatch", "es"))
    if choice.schedule in CUTS_TOKENS:
        words.append(_chunk_words(choice))
    if choice.schedule in CUTS_ALL_REDUCE:
        words.append(f"all-reduce by {mib(choice.all_reduce_chunk_bytes)}")
    return ", ".join(words) or "uncut"


def cut_cells(choice: Choice) -> tuple[str, str, str]:
    """The same for a table: microbatches, chunks forward/backward, bytes of an all-reduce chunk."""
    return (
        str(choice.microbatches) if choice.schedule in CUTS_BATCH else "-",
        f"{choice.chunks}/{choice.backward_chunks}" if choice.schedule in CUTS_TOKENS else "-",
        mib(choice.all_reduce_chunk_bytes) if choice.schedule in CUTS_ALL_REDUCE else "-",
    )


def _chunk_words(choice: Choice) -> str:
    if choice.chunks == choice.backward_chunks:
        return "no chunks" if choice.chunks == 1 else f"{choice.chunks} chunks"
    return f"{counted(choice.chunks, 'chunk')} forward and {choice.backward_chunks} back"


def choice_words(choice: Choice) -> str:
    """Everything that a choice decides."""
    words = [cut_words(choice), f"{choice.dispatch.replace('_', ' ')} dispatch"]
    if choice.schedule == Penstock.name:
        words.append(ORDERS[choice.priority])
    words += [f"{name} {value}" for name, value in choice.more]
    return f"{choice.schedule}: {', '.join(words)}"


def counted(number: int, word: str, plural: str = "s") -> str:
    """`1 chunk`, `2 chunks`."""
    return f"{number} {word}{plural if number != 1 else ''}"


def mib(size_bytes: float) -> str:
    """For people."""
    return f"{size_bytes / 2**20:.1f} MiB" if size_bytes >= 2**20 else f"{size_bytes / 2**10:.0f} KiB"


def gib(size_bytes: float) -> str:
    """For people."""
    size = size_bytes / 2**30
    if size < 1:
        return f"{1024 * size:.0f} MiB"
    return f"{size:.2f} GiB" if size < 10 else f"{size:.1f} GiB"


def milliseconds(seconds: float) -> str:
    """For people: four digits or more."""
    value = 1000 * seconds
    places = 0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 10 else 3
    return f"{value:.{places}f} ms"


def change(seconds: float, base_s: float) -> str:
    """`+3 %`, `-31 %`; one digit behind the point where it is small."""
    percent = 100 * (seconds / base_s - 1)
    return f"{percent:+.0f} %" if abs(percent) >= 10 else f"{percent:+.1f} %"
