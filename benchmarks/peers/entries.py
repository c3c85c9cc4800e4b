"""What takes part in a comparison beside schedules: rivals as shipped, and on Penstock's transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Final

from benchmarks.peers.build import build_peer
from benchmarks.peers.peer import Work
from benchmarks.peers.shipped import ShippedTransport
from penstock.bench.contender import Entry, TransportName
from penstock.bench.scheduled import Scheduled, Stacks
from penstock.runtime import PipelinedStack
from penstock.runtime.lanes import ThreadLanes
from penstock.runtime.transport import Transports
from penstock.topology import lane_groups

TRANSPORTS: Final[tuple[TransportName, ...]] = ("penstock", "gloo")


def peer_entries(stacks: Stacks, entries: Sequence[Entry]) -> list[Entry]:
    """`sequential` on Gloo's own all-to-all, if it is among the entries, then the peers in both columns.

    Collective. Whoever asks for them closes their contenders.
    """
    found = [_shipped(stacks, entry) for entry in entries if entry.name == "sequential"]
    work = Work(config=stacks.config, layout=stacks.layout, model=stacks.model, batch=stacks.batch)
    for name, transport in product(stacks.config.compare.peers, TRANSPORTS):
        found.append(Entry(name=name, transport=transport, contender=build_peer(name, work, transport)))
    return found


def shipped_stack(stacks: Stacks) -> PipelinedStack:
    """The same model on Gloo's own all-to-all, with process groups of its own. Collective."""
    transport = ShippedTransport(partial(lane_groups, stacks.layout, stacks.config.parallel.timeout_s))
    lanes = ThreadLanes(transport.abort)
    return stacks.build(replace(stacks.machinery, transports=Transports(transport), lanes=lanes))


def _shipped(stacks: Stacks, entry: Entry) -> Entry:
    """The same plan on Gloo's own all-to-all, whose speed is a matter of luck: nothing is predicted."""
    assert entry.plan is not None, "only a schedule has a plan"
    stack = shipped_stack(stacks)
    contender = Scheduled(stack, stack.adopt(entry.plan), stacks.batch)
    return Entry(name=entry.name, transport="gloo", contender=contender, plan=entry.plan)
