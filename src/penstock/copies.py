"""What a deep copy of a model shares with the model: the ranks and threads that both run on."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Self


class Shared:
    """Base of what a copy refers to as the original does."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        del memo
        return self


class Mark(Shared):
    """Base of what is set on a parameter to say what it is; a copy of the parameter is the same."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle the mark as an empty OrderedDict, a type that torch.load always accepts."""
        return OrderedDict, ()
