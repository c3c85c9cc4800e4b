"""Steps whose numbers are not finite: they are skipped on all ranks together, and counted.

A skipped step leaves parameters, optimiser state and the experts' biases as they were. Everything that is a
function of the step goes on: its samples are not seen again, the learning rate follows its curve, dropout has
the next step's keys. AdamW's own step count, by which it corrects its averages, does not advance.
"""

from __future__ import annotations

import math

from torch import nn

from penstock.moe import MoELayer
from penstock.topology import Control

ADVICE = "A lower optimizer.lr or more optimizer.warmup_steps may help."


class DivergedError(RuntimeError):
    """The run has no finite numbers left with which to continue; continuing would only save useless state."""


class StepGuard:
    """Decides whether a step may change anything. most_in_a_row: consecutive steps that may be skipped."""

    def __init__(self, control: Control, most_in_a_row: int) -> None:
        self._control, self._most = control, most_in_a_row
        self._in_a_row = 0

    def accepts(self, step: int, loss: float, norm: float) -> bool:
        """Tell whether all ranks apply this step: its loss and gradient norm are finite on each of them.

        It costs one all-reduce of 8 bytes, so that no rank updates alone and diverges from the others.
        """
        broken = not (math.isfinite(loss) and math.isfinite(norm))
        broken = self._control.any(broken, f"agreeing whether step {step} is finite")
        self._in_a_row = self._in_a_row + 1 if broken else 0
        return not broken

    @property
    def gives_up(self) -> bool:
        """Whether more consecutive steps were not finite than are allowed."""
        return self._in_a_row > self._most

    def describe(self, step: int, loss: float, norm: float) -> str:
        """Return the message about a step that was skipped."""
        return (
            f"step {step} skipped: loss {loss}, gradient norm {norm}; nothing was updated "
            f"({self._in_a_row} in a row, train.max_skipped_steps = {self._most})"
        )


def forget_choices(model: nn.Module) -> None:
    """Drop what loss-free balancing has counted since the last update: a skipped step moves no bias."""
    for module in model.modules():
        if isinstance(module, MoELayer) and module.gate.bias is not None:
            module.gate.bias.forget()
