"""What ranks have learnt about samples that move, as kept in a checkpoint: a continued run expects the same.

Ranks that exchange counts have learnt the same, so it is saved once per group. Where there are other groups,
or none was kept, what is missing is learnt again.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

import torch

from penstock.mesh import Group
from penstock.runtime import PipelinedStack
from penstock.train.storage.held import Held

GENERATOR: Final = "generator.rank"
FOLLOWING: Final = "following.group"
OPTIONAL: Final = (GENERATOR, FOLLOWING)
"""Prefixes of names that a checkpoint may lack, or that a run may not need: those of other ranks."""


def learnt(stack: PipelinedStack) -> dict[str, Held]:
    """Return which experts follow which, by layer, as views; nothing where that is not learnt."""
    relocation, layout = stack.relocation, stack.machinery.layout
    if relocation is None or relocation.how.prediction != "conditional":
        return {}
    group = layout.mesh.group(layout.rank, Group.EXPERT_SHARDS)
    sizes = {n: moe.placement.num_experts for n, moe in enumerate(stack.moe_layers) if moe is not None}
    tables = {n: relocation.habits.table(n, experts).seen for n, experts in sizes.items()}
    return {f"{FOLLOWING}{group}.L{n}": Held(torch.from_numpy(seen)) for n, seen in tables.items()}


def generator_name(rank: int, *, on_device: bool = False) -> str:
    """Return the name of a rank's random generator: the host's, or that of its GPU."""
    return f"{GENERATOR}{rank}.device" if on_device else f"{GENERATOR}{rank}"


def dispensable(name: str, saved: Container[str]) -> bool:
    """Tell whether a run can go on without what a checkpoint lacks."""
    return name.startswith(OPTIONAL) and name not in saved
