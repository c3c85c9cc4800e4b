"""Two lanes of communication and one of computation at once, many rounds, each task late by chance.

NCCL hangs where ranks start kernels of two communicators in different orders and these cannot run side by
side. Ranks differ here in everything but the order of issue.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor

from penstock.device import device_of
from penstock.doctor.gpu.here import Case, Here, small_machinery, timed
from penstock.doctor.gpu.outcome import Outcome
from penstock.graph import Lane, Name, Phase, Task
from penstock.mesh import Group
from penstock.runtime import Machinery
from penstock.runtime.executor import Call, Span
from penstock.runtime.groups import build_transport
from penstock.runtime.handlers import Handler
from penstock.runtime.transport import Transport
from penstock.words import percent

SIZE: Final = 1024
DELAY_S: Final = 3e-4
LATE_S: Final = 3e-3
"""A delay beside which a sum takes no time. Large sums would share a link, and gain nothing on lanes that run
at the same time."""

TIMED: Final = 5
AT_ONCE: Final = 0.75
"""The part of both lanes' time, one after the other, from which on they do not run at the same time: of those
that do it is half."""


def run(here: Here) -> Outcome:
    """Run the rounds, then time each lane alone and both at once."""
    case = Case(name="lanes")
    machinery = small_machinery(here, case)
    make = partial(build_transport, machinery.layout, here.device, case.config(here).parallel)
    transports = {lane: make((Group.WORLD,)) for lane in (Lane.INTER, Lane.INTRA)}
    wrong = rounds(here, machinery, transports)
    alone = [seconds(here, machinery, {lane: transport}) for lane, transport in transports.items()]
    both = seconds(here, machinery, transports)
    for transport in transports.values():
        transport.close()
    machinery.close()
    share = both / sum(alone)
    figures = {"rounds": here.scale.rounds, "wrong": wrong, "alone_s": alone, "both_s": both}
    line = f"{here.scale.rounds} rounds; both lanes at once take {percent(share)} of one after the other"
    slow = "the two lanes do not run at the same time" if here.world_size > 1 and share > AT_ONCE else ""
    return Outcome.of(
        [line],
        figures,
        slow=slow if here.scale.judged else "",
        wrong=f"{wrong} of {here.scale.rounds} rounds gave wrong numbers" if wrong else "",
    )


def rounds(here: Here, machinery: Machinery, transports: dict[Lane, Transport]) -> int:
    """Return how many rounds gave wrong numbers on this rank. Nothing waits for the device until the end."""
    draws, kind = random.Random(here.info.rank), device_of(here.device)
    right = torch.ones(here.scale.rounds, dtype=torch.bool, device=here.device)
    square = torch.eye(64, device=here.device)
    ranks = torch.arange(here.world_size, device=here.device, dtype=torch.float32)

    def work(number: int, call: Call) -> Any:
        if draws.random() < 0.5:
            kind.delay(draws.random() * DELAY_S)
        lane = call.task.lane
        if lane.computes:
            return (square @ square,)
        if not lane.is_inside:
            values = torch.full((SIZE,), float(number + here.info.rank), device=here.device)
            transports[lane].all_reduce(values, Group.WORLD)
            wanted = (ranks + number).sum().expand(SIZE)
        else:
            rows = torch.full((here.world_size, 8), float(number + here.info.rank), device=here.device)
            one_each = [1] * here.world_size
            values = transports[lane].all_to_all(rows, one_each, one_each, Group.WORLD)
            wanted = (ranks + number).unsqueeze(1).expand(-1, 8)
        outcome[lane][number] = (values == wanted).all()
        return (values, wanted)

    outcome: dict[Lane, Tensor] = {lane: right.clone() for lane in transports}
    span = _span(Lane.COMPUTE, *transports)
    for number in range(here.scale.rounds):
        machinery.lanes.run(span, partial(work, number), timed=False)
    kind.synchronize(here.device)
    all_right = torch.stack([*outcome.values()]).all(dim=0)
    return here.scale.rounds - int(all_right.sum())


def seconds(here: Here, machinery: Machinery, transports: dict[Lane, Transport]) -> float:
    """Return the seconds of a sum on each of the lanes, late and at once, on the slowest rank."""
    values = {lane: torch.zeros(SIZE, device=here.device) for lane in transports}
    span = _span(*transports)

    def work(call: Call) -> Any:
        device_of(here.device).delay(LATE_S)
        transports[call.task.lane].all_reduce(values[call.task.lane], Group.WORLD)
        return (values[call.task.lane],)

    times = []
    for _ in range(TIMED):
        action = partial(machinery.lanes.run, span, work, timed=False)
        times.append(timed(here, action)[1])
    return here.control.largest([min(times[1:])], "comparing late sums")[0]


def _span(*lanes: Lane) -> Span:
    """Return one task on each lane; none waits for another."""
    span: dict[Lane, tuple[Call, ...]] = {Lane.COMPUTE: ()}
    for number, lane in enumerate(lanes):
        task = Task(Name(number, "D", Phase.FORWARD), lane)
        nothing = cast(Handler, None)
        span[lane] = (Call(task, nothing, reads=(), writes=(), frees=(), shared=(), waits=()),)
    return span
