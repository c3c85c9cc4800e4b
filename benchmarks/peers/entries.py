"""What takes part in a comparison beside schedules: to_try as shipped, and on Penstock's transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Final

from benchmarks.peers.build import build_peer
from benchmarks.peers.peer import Work
from benchmarks.peers.shipped import ShippedTransport
from penstock.lab.bench.contender import Entry, TransportName
from penstock.lab.bench.scheduled import Stacks
from penstock.runtime import PipelinedStack
from penstock.runtime.executor import ThreadLanes
from penstock.runtime.transport import Transports
from penstock.topology import lane_groups

UPDATING: Final = ("deepspeed",)
"""Peers that clip and update in a comparison, with their own sharded optimiser."""

END: Final = "clipping and update, since its distributed optimiser takes GPU tensors alone"
TRANSPORTS: Final[tuple[TransportName, ...]] = ("penstock", "gloo")


def peer_entries(stacks: Stacks, entries: Sequence[Entry]) -> list[Entry]:
    """Return `sequential` on Gloo's own all-to-all, if an entry has it, then the peers in both columns.

    Collective. Whoever asks for them closes their contenders.
    """
    selected = [_shipped(stacks, entry) for entry in entries if entry.name == "sequential"]
    work = Work(
        config=stacks.config,
        layout=stacks.layout,
        model=stacks.model,
        batch=stacks.batch,
        max_norm=stacks.run_config.optimizer.clip_grad_norm,
    )
    for name, transport in product(stacks.config.compare.peers, TRANSPORTS):
        own = work if name in UPDATING else replace(work, max_norm=None)
        selected.append(Entry(name=name, transport=transport, contender=build_peer(name, own, transport)))
    return selected


def peer_notes(names: Sequence[str]) -> tuple[str, ...]:
    """Return what a table has to say of iterations that end early."""
    early = [name for name in names if name not in UPDATING]
    return tuple(f"{name}: its iterations end with the sums of gradients, without {END}" for name in early)


def shipped_stack(stacks: Stacks) -> PipelinedStack:
    """Return the same model on Gloo's own all-to-all, with process groups of its own. Collective."""
    transport = ShippedTransport(partial(lane_groups, stacks.layout, stacks.config.parallel.timeout_s))
    lanes = ThreadLanes(transport.abort)
    return stacks.build(replace(stacks.machinery, transports=Transports(transport), lanes=lanes))


def _shipped(stacks: Stacks, entry: Entry) -> Entry:
    """Return the same plan on Gloo's own all-to-all, whose speed nobody can predict."""
    assert entry.plan is not None, "only a schedule has a plan"
    stack = shipped_stack(stacks)
    contender = stacks.of_stack(stack, entry.plan)
    return Entry(name=entry.name, transport="gloo", contender=contender, plan=entry.plan)
