"""Whether all ranks do the same next while a step without labels waits for its backward pass.

Such a step's backward half begins when the caller's loss asks for it. A rank that asks, and one that goes on
to another pass instead, would wait for each other in different exchanges. So as long as a backward pass may
come, ranks say what they begin: one small exchange of hosts, and none where backward follows forward.
"""

from __future__ import annotations

from typing import Any, Self

from penstock.runtime.errors import ScheduleMismatchError
from penstock.topology import Control

FORWARD, LABELLED, UNTRAINED, BACKWARD = range(4)

WORDS = {
    FORWARD: "the forward pass of step {} of those without labels",
    LABELLED: "a step with labels",
    UNTRAINED: "a pass without gradients",
    BACKWARD: "the backward pass of step {} of those without labels",
}

MOST = 64
"""Of so many steps backward passes are expected at most; a program may have given up older ones."""


class Turns:
    """What this rank has begun, by the numbers of steps without labels."""

    def __init__(self, control: Control) -> None:
        self._control, self._last = control, 0
        self._open: list[int] = []  # steps whose backward pass may come

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the turns of a copied model, between the same ranks."""
        twin = memo[id(self)] = type(self)(self._control)
        twin._last, twin._open = self._last, [*self._open]
        return twin

    def forward(self) -> None:
        """Begin the forward pass of a step without labels. Raises ScheduleMismatchError on all ranks."""
        self._begin(FORWARD, self._last + 1)
        self._last += 1
        self._open = [*self._open, self._last][-MOST:]

    def labelled(self) -> None:
        """Begin a step with labels. Raises ScheduleMismatchError on all ranks."""
        self._begin(LABELLED)

    def untrained(self) -> None:
        """Begin a pass without gradients. Raises ScheduleMismatchError on all ranks."""
        self._begin(UNTRAINED)

    def backward(self, number: int) -> None:
        """Begin the backward half of a step. Raises ScheduleMismatchError on all ranks."""
        self._begin(BACKWARD, number)
        self._open = [each for each in self._open if each != number]

    @property
    def last(self) -> int:
        """The number of the step that has begun last."""
        return self._last

    def _begin(self, what: int, number: int = 0) -> None:
        if not self._open:
            return
        control, purpose = self._control, "agreeing on the next pass"
        most, least, *numbers = control.largest((what, -what, number, -number), purpose)
        if most == -least and numbers[0] == -numbers[1]:
            return
        words = control.gather(WORDS[what].format(number), purpose)
        mine = words[control.rank]
        rank, other = next((rank, each) for rank, each in enumerate(words) if each != mine)
        raise ScheduleMismatchError(
            f"rank {control.rank} begins {mine}, and rank {rank} {other}: call the model and backward of the "
            "same losses in the same order on all ranks"
        )
