"""A setting that is a table: names and values that this package does not interpret."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self


class Table(tuple[tuple[str, Any], ...]):
    """Pairs of a name and a value, sorted by name, so that equal tables compare equal and can be hashed."""

    def __new__(cls, items: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> Self:
        return super().__new__(cls, sorted(dict(items).items()))
