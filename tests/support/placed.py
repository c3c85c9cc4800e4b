"""Experts that are not where they are by default."""

from __future__ import annotations

from random import Random

from penstock.placement import ExpertPlacement


def placement_of(num_experts: int, ranks: int, layer: int, *, scattered: bool) -> ExpertPlacement:
    """Where a layer's experts are: in the order of their numbers, or scattered, in every layer otherwise."""
    experts = list(range(num_experts))
    if scattered:
        Random(layer).shuffle(experts)
    slots = num_experts // ranks
    return ExpertPlacement.of([experts[rank * slots : (rank + 1) * slots] for rank in range(ranks)])
