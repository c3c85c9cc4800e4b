"""Every communicator of every layout that the ranks can have: made, used once, and its memory counted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import torch

from penstock.device import device_of
from penstock.doctor.gpu.here import Case, Here, small_machinery
from penstock.doctor.gpu.outcome import Outcome
from penstock.graph import Lane
from penstock.mesh import Axes, Group, group_sizes, holders
from penstock.runtime import Machinery
from penstock.runtime.transport import Transports
from penstock.words import counted, mib

PAIR: Final = 2
"""Ranks that share something in a layout in which ranks do."""

INSIDE: Final = ("tp_size", "etp_size")
"""Settings of layouts for ranks that share something inside their node."""

GROUPS: Final[dict[Lane, tuple[Axes, ...]]] = {
    Lane.INTER: (
        Group.WORLD,
        Group.EXPERT,
        Group.EXPERT_DATA,
        Group.RAIL,
        Group.DATA,
        Group.EXPERT_SHARDS,
    ),
    Lane.INTRA: (Group.NODE, Group.TENSOR, Group.SHARDS),
}
"""Groups that tasks meet in, by lane."""


def run(here: Here) -> Outcome:
    """Try all layouts, one after the other."""
    named = layouts(here.world_size)
    possible = {name: each for name, each in named.items() if fits(each, here.node_size)}
    results = [
        {"layout": name, **_try(here, Case(name=name, parallel=parallel))}
        for name, parallel in possible.items()
    ]
    wrong = [
        f"{layout['layout']}: group {comm['group']} on lane {comm['lane']} gave {comm['got']}, "
        f"not {comm['wanted']}"
        for layout in results
        for comm in layout["communicators"]
        if comm["got"] != comm["wanted"]
    ]
    number = sum(len(layout["communicators"]) for layout in results)
    seconds = sum(layout["seconds"] for layout in results)
    taken = [layout["bytes"] for layout in results if layout["bytes"] is not None]
    memory = f", {mib(max(0, *taken))} of the device at most" if taken else ""
    lines = [f"{', '.join(possible)}: {counted(number, 'communicator')} made in {seconds:.2f} s{memory}"]
    if len(possible) < len(named):
        out = ", ".join(name for name in named if name not in possible)
        lines.append(f"left out, as nodes have no even number of consecutive ranks: {out}")
    return Outcome.of(lines, {"layouts": results}, wrong="; ".join(wrong))


def fits(parallel: Mapping[str, Any], node_size: int) -> bool:
    """Tell whether ranks of a layout that share something inside nodes do so.

    Args:
        parallel: Its settings of [parallel].
        node_size: Ranks of a node; 0 = nodes differ.
    """
    return not parallel.keys() & INSIDE or PAIR in group_sizes(node_size)


def layouts(world_size: int) -> dict[str, Mapping[str, Any]]:
    """Return the layouts that so many ranks can have, as settings of [parallel]."""
    by_name: dict[str, Mapping[str, Any]] = {"flat": {}}
    if PAIR in group_sizes(world_size):
        by_name["replicas"] = {"ep_size": holders(world_size, PAIR)}
        by_name["hierarchical"] = {"ranks_per_node": holders(world_size, PAIR)}
        by_name["tensor parallel"] = {"tp_size": 2}
        by_name["sharded"] = {"tp_size": 2, "etp_size": 2}
    return by_name


def _try(here: Here, case: Case) -> dict[str, Any]:
    """Return what it took to connect a layout's groups, and what those that have several ranks did."""
    kind = device_of(here.device)
    here.control.barrier(f"making the groups of layout {case.name}")
    before, start_s = kind.used_bytes(here.device), time.monotonic()
    machinery = small_machinery(here, case)
    mesh = machinery.layout.mesh
    pairs = [
        (lane, group)
        for lane, groups in GROUPS.items()
        for group in groups
        if mesh.size(group) > 1 and (group != Group.NODE or machinery.layout.ep_nodes > 1)
    ]
    machinery.transports.open(pairs)
    done = [_use(here, machinery, lane, group) for lane, group in pairs]
    kind.synchronize(here.device)
    seconds, after = time.monotonic() - start_s, kind.used_bytes(here.device)
    machinery.close()
    taken = None if before is None or after is None else after - before
    return {"seconds": seconds, "bytes": taken, "communicators": done}


def _use(here: Here, machinery: Machinery, lane: Lane, group: Axes) -> dict[str, Any]:
    """Return what a sum over a group and an exchange in it brought this rank, and what they should."""
    got = exchanged(machinery.transports, lane, group, here)
    members = machinery.layout.mesh.members(here.info.rank, group)
    place = members.index(here.info.rank)
    return {
        "lane": str(lane),
        "group": Group.name(group),
        "ranks": len(members),
        "got": got,
        "wanted": [sum(each + 1 for each in members), *(each * len(members) + place for each in members)],
    }


def exchanged(transports: Transports, lane: Lane, group: Axes, here: Here) -> list[int]:
    """Return what a group of ranks exchanges by both kinds of collective.

    Returns:
        The sum of the ranks' numbers, counted from 1, then what each rank of the group sent to this one: its
        number times the size of the group, plus the receiver's place.
    """
    transport = transports.of(lane, group)
    size = transport.size(group)
    total = torch.full((1,), float(here.info.rank + 1), device=here.device)
    transport.all_reduce(total, group)
    sent = torch.arange(size, dtype=torch.float32, device=here.device) + here.info.rank * size
    came = transport.all_to_all(sent, [1] * size, [1] * size, group)
    return [int(each) for each in (*total.tolist(), *came.tolist())]
