"""The damage that a failed backward pass has done to a sharded optimiser's sums and parameters."""

from __future__ import annotations

SUMS = (
    "a backward pass failed after it had begun to sum gradients: call optimizer.zero_grad() and "
    "compute again what was accumulated since the last update"
)
PARAMETERS = (
    "a backward pass failed that was to update parameters (optimizer.in_backward()), so some are updated and "
    "others are not: load the last checkpoint into a new stack and optimizer"
)


class Failed:
    """Remembers the damage until it is cleared."""

    def __init__(self) -> None:
        self._words = ""

    def note(self, *, updates: bool) -> str:
        """Note that a pass failed, and return what to do. updates: whether it was to update parameters."""
        self._words = PARAMETERS if updates else SUMS
        return self._words

    def forget_sums(self) -> None:
        """Clear damage to sums, which are no longer used; damage to parameters stays."""
        self._words = "" if self._words == SUMS else self._words

    def refuse(self) -> None:
        """Raise RuntimeError if sums or parameters are damaged."""
        if self._words:
            raise RuntimeError(self._words)

    def refuse_parameters(self) -> None:
        """Raise RuntimeError if parameters are damaged, before they or their state are handed on."""
        if self._words == PARAMETERS:
            raise RuntimeError(self._words)
