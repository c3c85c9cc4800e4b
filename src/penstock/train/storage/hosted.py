"""Which experts ranks host, as kept in a checkpoint: a continued run hosts what it would have hosted.

Guests have no state of their own, so without this file nothing but one step is lost. Where ranks, slots or
owners have changed, a run starts without guests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.mesh import Group
from penstock.placement import Hosting
from penstock.placing.told import hosting_of, plain_of
from penstock.runtime import PipelinedStack
from penstock.runtime.moving import Plans
from penstock.train.storage.files import DamagedError, read_table
from penstock.writing import write_whole

HOSTED = "guests.json"
MOST_BYTES = 1 << 26


def gather_hosted(stack: PipelinedStack) -> list[Mapping[str, Any]]:
    """Return what every expert group hosts next; [] if a fresh start does the same. All ranks call it."""
    plans, layout = stack.host.plans, stack.machinery.layout
    as_at_first = all(hosting.is_empty for hosting in plans.made) and not plans.age_steps
    everyone = stack.machinery.control.gather((as_at_first, _plain(plans)), "gathering what ranks host")
    if all(at_first for at_first, _ in everyone):
        return []
    return [everyone[ranks[0]][1] for ranks in layout.mesh.groups(Group.EXPERT_SHARDS)]


def write_hosted(folder: Path, by_group: Sequence[Mapping[str, Any]]) -> None:
    """Write the groups' plans into a checkpoint's folder, unless they are too large to be read again."""
    text = json.dumps({"groups": list(by_group)}, separators=(",", ":"), default=int, allow_nan=False)
    if by_group and len(text) < MOST_BYTES:
        write_whole(folder / HOSTED, text, durable=True)


def host_again(stack: PipelinedStack, plans: Plans | None) -> bool:
    """Host these plans, from `read_hosted`, if all ranks have read some; return whether. All ranks call it.

    A rank that has read none (its folder is another, or not up to date) would wait for others in another
    exchange.
    """
    everyone = stack.machinery.control.gather(plans is not None, "agreeing whom ranks host")
    if plans is not None and all(everyone):
        stack.host.follow(plans)
    return all(everyone)


def read_hosted(folder: Path, stack: PipelinedStack) -> Plans | None:
    """Return what this rank's group hosted when the checkpoint was written; None if nothing there fits.

    Raises DamagedError for a file with other content.
    """
    now, layout = stack.host.plans, stack.machinery.layout
    if not (folder / HOSTED).exists() or not now.made:
        return None
    groups = read_table(folder / HOSTED, MOST_BYTES).get("groups")
    if not isinstance(groups, list):
        raise DamagedError(f"{HOSTED} names no groups of ranks")
    if len(groups) != len(layout.mesh.groups(Group.EXPERT_SHARDS)):
        return None
    try:
        return _plans(groups[layout.mesh.group(layout.rank, Group.EXPERT_SHARDS)], now.made)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise DamagedError(f"{HOSTED} is not what a checkpoint says of guests: {error}") from error


def _plain(plans: Plans) -> dict[str, Any]:
    """Return the plans as JSON values."""
    layers = [
        {"owners": hosting.placement.digest, **plain_of(hosting), "hosted": hosted}
        for hosting, hosted in zip(plans.made, plans.hosted, strict=True)
    ]
    return {"age_steps": plans.age_steps, "layers": layers}


def _plans(table: Mapping[str, Any], now: Sequence[Hosting]) -> Plans | None:
    """Return the plans read from JSON values; None where layers, owners or slots have changed."""
    layers = table["layers"]
    if len(layers) != len(now):
        return None
    made = []
    for layer, hosting in zip(layers, now, strict=True):
        slots = {len(held) for held in layer["guests"]}
        if layer["owners"] != hosting.placement.digest or slots != {hosting.guest_slots}:
            return None
        made.append(hosting_of(layer, hosting.placement))
    return Plans(tuple(made), tuple(bool(layer["hosted"]) for layer in layers), int(table["age_steps"]))
