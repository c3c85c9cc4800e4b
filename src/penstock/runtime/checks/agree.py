"""Comparison of layout and plan by all ranks before first use. Different orders or tasks would deadlock."""

from __future__ import annotations

from dataclasses import asdict, replace

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
