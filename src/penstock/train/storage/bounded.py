"""What the last steps have wanted of rows that are bounded by it, as kept in a checkpoint.

How many rows are padding decides how products round. So a continued run has the losses of an uninterrupted
one, bit by bit, only if its rows are bounded as they would have been.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.moe.routes import Counts
from penstock.runtime import PipelinedStack
from penstock.runtime.bounds import STEPS_KEPT, Passes, RowBounds
from penstock.train.storage.files import DamagedError, read_table
from penstock.writing import write_whole

BOUNDED = "bounds.json"
MOST_BYTES = 1 << 26
MOST_ROWS = 1 << 40

Known = Mapping[Passes, Sequence[Counts]]
"""What the last steps of each kind have wanted, the oldest first."""


def write_bounds(folder: Path, stack: PipelinedStack) -> None:
    """Write what steps have wanted into a checkpoint's folder, on one rank, since all have the same."""
    if isinstance(stack.bounds, RowBounds):
        passes = [
            {**kind._asdict(), "wanted": [wanted_X.tolist() for wanted_X in history.wanted_X]}
            for kind, history in stack.bounds.histories.items()
        ]
        text = json.dumps({"passes": passes}, separators=(",", ":"))
        if len(text) < MOST_BYTES:
            write_whole(folder / BOUNDED, text, durable=True)


def read_bounds(folder: Path, stack: PipelinedStack) -> Known | None:
    """Return what was written; None if there is nothing, or it is of other experts.

    Raises DamagedError for a file with other content.
    """
    if not isinstance(stack.bounds, RowBounds) or not (folder / BOUNDED).exists():
        return None
    positions = sum(order.num_experts for order in stack.bounds.orders)
    try:
        passes = read_table(folder / BOUNDED, MOST_BYTES)["passes"]
        found = {_kind(each): [_counts(row) for row in each["wanted"][-STEPS_KEPT:]] for each in passes}
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise DamagedError(f"{BOUNDED} is not what a checkpoint says of rows: {error}") from error
    return found if all(len(row) == positions for rows in found.values() for row in rows) else None


def bound_again(stack: PipelinedStack, known: Known | None) -> bool:
    """Bound rows by this, from `read_bounds`, if all ranks have read the same; return whether.

    All ranks call it: ranks of other bounds would send each other other numbers of rows.
    """
    everyone = stack.machinery.control.gather(_digest(known), "agreeing by what rows are bounded")
    agreed = known is not None and len(set(everyone)) == 1
    if agreed and known is not None and isinstance(stack.bounds, RowBounds):
        stack.bounds.histories.clear()
        for kind, rows in known.items():
            for wanted_X in rows:
                stack.bounds.history(kind).add(wanted_X)
    return agreed


def _kind(table: Mapping[str, Any]) -> Passes:
    kind = Passes(table["microbatches"], table["training"])
    if type(kind.microbatches) is not int or type(kind.training) is not bool:
        raise TypeError(f"no steps are of {kind}")
    return kind


def _counts(row: Sequence[Any]) -> Counts:
    if not all(type(each) is int and 0 <= each < MOST_ROWS for each in row):
        raise TypeError("there are numbers of rows that no step has")
    return np.array(row, dtype=np.int64)


def _digest(known: Known | None) -> str:
    found = hashlib.sha256()
    for kind, rows in (known or {}).items():
        found.update(repr(kind).encode() + b"".join(row.tobytes() for row in rows))
    return f"{known is None} {found.hexdigest()}"
