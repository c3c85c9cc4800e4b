"""What a backward pass that failed has spoilt of a sharded optimiser's sums and parameters."""

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
    """Remembers it until it is cleared."""

    def __init__(self) -> None:
        self._words = ""

    def note(self, *, updates: bool) -> str:
        """A pass has failed; updates: that was to update parameters, too. Returns what is to be done."""
        self._words = PARAMETERS if updates else SUMS
        return self._words

    def forget_sums(self) -> None:
        """Sums are not used any more; parameters are."""
        self._words = "" if self._words == SUMS else self._words

    def refuse(self) -> None:
        """Raise RuntimeError if anything is spoilt."""
        if self._words:
            raise RuntimeError(self._words)

    def refuse_parameters(self) -> None:
        """Raise RuntimeError if parameters are spoilt, before they or their state are handed on."""
        if self._words == PARAMETERS:
            raise RuntimeError(self._words)
