"""What ranks have learnt of samples that move, as a checkpoint keeps it: a run that goes on expects the same.

Ranks that exchange counts have learnt the same, so it is there once by group. Where there are other groups,
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
"""How names begin of what a checkpoint need not have, and a run need not want: those of other ranks."""


def learnt(stack: PipelinedStack) -> dict[str, Held]:
    """Which experts follow on which, by layer, as views; nothing where that is not learnt."""
    relocation, layout = stack.relocation, stack.machinery.layout
    if relocation is None or relocation.how.prediction != "conditional":
        return {}
    group = layout.mesh.group(layout.rank, Group.EXPERT_SHARDS)
    sizes = {n: moe.placement.num_experts for n, moe in enumerate(stack.moe_layers) if moe is not None}
    tables = {n: relocation.habits.table(n, experts).seen for n, experts in sizes.items()}
    return {f"{FOLLOWING}{group}.L{n}": Held(torch.from_numpy(seen)) for n, seen in tables.items()}


def generator_name(rank: int) -> str:
    """Of a rank's random numbers."""
    return f"{GENERATOR}{rank}"


def dispensable(name: str, saved: Container[str]) -> bool:
    """Whether a run goes on without what a checkpoint lacks."""
    return name.startswith(OPTIONAL) and name not in saved
