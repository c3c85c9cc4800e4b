"""A known routing of a large step by a sample of it: the expert groups that stand for all, and some layers.

Moves are weighed exactly up to EXACT_CELLS rows from rank to rank. Beyond that
- one expert group stands for all (as many as fill whole nodes): all have equal experts and links, and their
  samples differ by chance alone;
- layers are ordered by the load of their busiest rank and cut into as many equal parts as SAMPLED_CELLS
  allows, but at least LEAST_LAYERS. The middle layer of a part stands for all layers of the part.

So time and memory to weigh moves grow as K P (P + E) + T P, with P ranks of an expert group, E experts, K
layers of the sample and T tasks of the whole step; neither grows with the number of expert groups, and K P P
stays below max(EXACT_CELLS, LEAST_LAYERS P P). Replicas are planned and samples assigned K times.
"""

from __future__ import annotations

from typing import Final

from penstock.cost import routing_sizes
from penstock.cost.placed import Evidence
from penstock.mesh import Group, holders, standing_ranks
from penstock.plan.problem import Problem
from penstock.words import counted
from penstock.workloads import RoutingConfig, RoutingSizes, routing_of, routing_of_layers

EXACT_CELLS: Final = 1 << 18
"""Numbers of rows from rank to rank, in all layers, up to which every layer and rank is weighed."""
SAMPLED_CELLS: Final = 1 << 16
"""The same in the sample of a larger step."""
LEAST_LAYERS: Final = 2
"""The fewest layers of a sample: one of the more even half of the layers, one of the others."""


def known_routing(problem: Problem, routing: RoutingConfig) -> Evidence:
    """Return a workload's first two steps as evidence: of the whole step, or of a sample of a large one."""
    sizes = sample_sizes(problem)
    moe_layers = sum(problem.shape.moe_layers)
    if sizes.moe_layers == moe_layers:
        found = routing_of(routing, sizes)
        return Evidence(found.counts(0), found.counts(1))
    found, columns = routing_of_layers(routing, sizes, moe_layers)
    return Evidence(found.counts(0), found.counts(1), columns)


def sample_sizes(problem: Problem) -> RoutingSizes:
    """Return the groups of ranks and the layers whose routing is worked out: all, unless these are many."""
    work, moe_layers = problem.workload, sum(problem.shape.moe_layers)
    if work.world_size * work.ep_size * moe_layers <= EXACT_CELLS:
        return routing_sizes(work, moe_layers)
    known = work.world_size if problem.slowness else standing_ranks(work.mesh, work.known_per_node)
    cells = known * work.ep_size
    layers = min(moe_layers, max(LEAST_LAYERS, SAMPLED_CELLS // cells))
    return routing_sizes(work.part(holders(known, work.tp_size)), layers)


def sample_words(problem: Problem) -> str:
    """Return which part of a step its evidence is, such as `4 of 64 MoE layers`; "" for all of it."""
    evidence, work, moe_layers = problem.evidence, problem.workload, sum(problem.shape.moe_layers)
    if evidence is None:
        return ""
    words = []
    if evidence.columns:
        words.append(f"{evidence.known_layers} of {counted(moe_layers, 'MoE layer')}")
    known, groups = (each.mesh.size(Group.EXPERT_DATA) for each in (evidence.part_of(work), work))
    if known < groups:
        words.append(f"{known} of {counted(groups, 'expert group')}")
    return " and ".join(words)
