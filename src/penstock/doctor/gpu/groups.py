"""Every communicator of every layout that the ranks can have: made, used once, and its memory counted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from penstock.device import device_of
from penstock.doctor.gpu.here import Here
from penstock.doctor.gpu.outcome import Outcome
from penstock.doctor.gpu.small import Case, small_machinery
from penstock.graph import Lane
from penstock.mesh import Axes, Group
from penstock.runtime import Machinery
from penstock.runtime.transport import Transports
from penstock.words import counted, mib

GROUPS: Final[dict[Lane, tuple[Axes, ...]]] = {
    Lane.INTER: (
        Group.WORLD,
        Group.EXPERT,
        Group.EXPERT_REPLICAS,
        Group.RAIL,
        Group.DATA,
        Group.EXPERT_SHARDS,
    ),
    Lane.INTRA: (Group.NODE, Group.TENSOR, Group.SHARDS),
}
"""Groups that tasks meet in, by lane."""


def run(here: Here) -> Outcome:
    """Try all layouts, one after the other."""
    found = [
        {"layout": name, **each}
        for name, parallel in layouts(here.world_size).items()
        for each in _try(here, Case(name=name, parallel=parallel))
    ]
    wrong = [
        f"{each['layout']}: group {each['group']} on lane {each['lane']} gave {each['got']}, "
        f"not {each['wanted']}"
        for each in found
        if each["got"] != each["wanted"]
    ]
    seconds = sum(each["seconds"] for each in found)
    taken = [each["bytes"] for each in found if each["bytes"] is not None]
    memory = f", {mib(max(0, sum(taken)))} of the device" if taken else ""
    of = ", ".join(layouts(here.world_size))
    line = f"{of}: {counted(len(found), 'communicator')}, first use {seconds:.2f} s{memory}"
    return Outcome.of([line], {"communicators": found}, wrong="; ".join(wrong))


def layouts(world_size: int) -> dict[str, Mapping[str, Any]]:
    """Return the layouts that so many ranks can have, as settings of [parallel]."""
    found: dict[str, Mapping[str, Any]] = {"flat": {}}
    if world_size % 2 == 0:
        found["replicas"] = {"ep_size": world_size // 2}
        found["hierarchical"] = {"ranks_per_node": world_size // 2}
        found["tensor parallel"] = {"mp_size": 2}
        found["sharded"] = {"mp_size": 2, "esp_size": 2}
    return found


def _try(here: Here, case: Case) -> Iterator[dict[str, Any]]:
    """Yield what the groups of a layout that have several ranks did."""
    machinery = small_machinery(here, case)
    mesh = machinery.layout.mesh
    pairs = [
        (lane, group)
        for lane, groups in GROUPS.items()
        for group in groups
        if mesh.size(group) > 1 and (group != Group.NODE or machinery.layout.ep_nodes > 1)
    ]
    machinery.transports.open(pairs)
    for lane, group in pairs:
        yield _use(here, machinery, lane, group)
    machinery.close()


def _use(here: Here, machinery: Machinery, lane: Lane, group: Axes) -> dict[str, Any]:
    """Sum over a group and exchange in it, once each; the first use makes the communicator."""
    kind = device_of(here.device)
    here.control.barrier(f"using group {Group.name(group)}")
    before, start_s = kind.used_bytes(here.device), time.monotonic()
    got = exchanged(machinery.transports, lane, group, here)
    kind.synchronize(here.device)
    after = kind.used_bytes(here.device)
    members = machinery.layout.mesh.members(here.info.rank, group)
    place = members.index(here.info.rank)
    return {
        "lane": str(lane),
        "group": Group.name(group),
        "ranks": len(members),
        "seconds": time.monotonic() - start_s,
        "bytes": None if before is None or after is None else after - before,
        "got": got,
        "wanted": [sum(each + 1 for each in members), *(each * len(members) + place for each in members)],
    }


def exchanged(transports: Transports, lane: Lane, group: Axes, here: Here) -> list[int]:
    """Return the sum of the ranks' numbers, counted from 1, and what each rank of the group sent to this one:
    its number times the size of the group, plus the receiver's place."""
    transport = transports.of(lane, group)
    size = transport.size(group)
    total = torch.full((1,), float(here.info.rank + 1), device=here.device)
    transport.all_reduce(total, group)
    sent = torch.arange(size, dtype=torch.float32, device=here.device) + here.info.rank * size
    came = transport.all_to_all(sent, [1] * size, [1] * size, group)
    return [int(each) for each in (*total.tolist(), *came.tolist())]
