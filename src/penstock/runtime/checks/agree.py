"""Comparisons of all ranks before they act: layout and plan before first use, and turns of open steps.

Different orders or tasks would deadlock.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, Self

from penstock.runtime.errors import ScheduleMismatchError
from penstock.schedule import StepPlan
from penstock.schedule.schedule import parse_orders
from penstock.topology import Control, Layout


def check_agreement(plan: StepPlan, control: Control) -> None:
    """Raise ScheduleMismatchError, on every rank, naming the first task that differs from rank 0's plan.

    The order is compared, and what every task is: its lane, axes and inputs. Costs one exchange of 64 bytes
    when all agree.
    """
    digests = control.gather(plan.digest, "comparing schedules")
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if not different:
        return
    texts = control.gather((plan.schedule.text(), plan.graph.facts()), "comparing schedules")
    rank = different[0]
    raise ScheduleMismatchError(
        f"schedule {plan.schedule.name!r} differs between ranks: "
        f"{first_difference(texts[0], texts[rank], rank)}. "
        f"Ranks that differ from rank 0: {different}. Start all ranks with the same "
        "configuration and version."
    )


def check_layouts(layout: Layout, samples: int, control: Control) -> None:
    """Raise ScheduleMismatchError, on every rank, unless all have the same layout and samples per rank.

    Ranks with different groups would wait for each other. Costs one exchange of a few bytes.
    """
    mine = asdict(replace(layout, rank=0)) | {"samples": samples}
    everyone = control.gather(mine, "comparing layouts")
    for rank, other in enumerate(everyone):
        for name, value in other.items():
            if value != (first := everyone[0][name]):
                raise ScheduleMismatchError(
                    f"ranks have different layouts: {name} = {first} on rank 0, {value} on rank {rank}. "
                    "Start all ranks with the same configuration and version."
                )


def first_difference(ours: tuple[str, str], theirs: tuple[str, str], rank: int) -> str:
    """Return where two plans differ first, in words. Each is its schedule's text and its graph's facts."""
    (name, mine), (other_name, other) = parse_orders(ours[0]), parse_orders(theirs[0])
    for lane in {**mine, **other}:
        left, right = list(map(str, mine.get(lane, ()))), list(map(str, other.get(lane, ())))
        for place in range(max(len(left), len(right))):
            here = left[place] if place < len(left) else "nothing"
            there = right[place] if place < len(right) else "nothing"
            if here != there:
                return f"lane {lane}, place {place}: rank 0 runs {here}, rank {rank} runs {there}"
    for here, there in zip(ours[1].splitlines(), theirs[1].splitlines(), strict=False):
        if here != there:
            plain = [line.partition(" | ")[0] for line in (here, there)]
            first, second = plain if plain[0] != plain[1] else (here, there)
            return f"rank 0 has the task `{first}`, rank {rank} has `{second}`"
    return f"names {name!r} and {other_name!r}"


# ---- whether all ranks do the same next while a step without labels waits for its backward pass -----------
#
# Such a step's backward half begins when the caller's loss asks for it. A rank that asks, and one that goes
# on to another pass instead, would wait for each other in different exchanges. So as long as a backward
# pass may come, ranks say what they begin: one small exchange of hosts, and none where backward follows
# forward.


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
