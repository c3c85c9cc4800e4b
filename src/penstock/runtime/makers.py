"""What turns counts into routes on a rank, by how its rows meet all shards of their experts."""

from __future__ import annotations

from penstock.mesh import Group
from penstock.moe import MoELayer, RouteMaker
from penstock.moe.shard_routes import (
    FusedRoutes,
    GatheredRoutes,
    RepeatedRoutes,
    ShardPlace,
    ShardRouteMaker,
)
from penstock.step.shape import ExpertForm
from penstock.topology import Layout

MAKERS: dict[ExpertForm, type[ShardRouteMaker]] = {
    "gather": GatheredRoutes,
    "s1": FusedRoutes,
    "s2": FusedRoutes,
    "baseline": RepeatedRoutes,
}


def maker_of(moe: MoELayer, layout: Layout, form: ExpertForm) -> RouteMaker:
    """What makes the routes of a layer on this rank. Raises ValueError for an order that cannot be shared."""
    shared = layout.esp_size > 1 or (layout.mp_size > 1 and form in ("s2", "baseline"))
    if not shared:
        return RouteMaker(moe.dispatch, layout.place, moe.order.row_counts)
    if moe.order.row_counts:
        raise ValueError(
            f"moe.one_copy_per_rank sends one row for several experts of a rank, and with esp_size = "
            f"{layout.esp_size} and expert_form = {form} rows are counted by expert. Set "
            "moe.one_copy_per_rank=false"
        )
    if moe.hooks.any and layout.esp_size > 1:
        raise ValueError(
            f"hooks around the transfers (moe.compression) change what experts leave, and with esp_size = "
            f"{layout.esp_size} those are partial sums that are still to be added. Remove the hooks, or set "
            "parallel.esp_size=1"
        )
    return MAKERS[form](moe.dispatch, layout.place, False, _place(layout, form))


def _place(layout: Layout, form: ExpertForm) -> ShardPlace:
    mesh, members = layout.mesh, layout.mesh.members(layout.rank, Group.EXPERT_SHARDS)
    turns = [mesh.place(rank, Group.TENSOR) for rank in members]
    by_shard = tuple(tuple(turns[i : i + layout.esp_size]) for i in range(0, len(turns), layout.esp_size))
    dealt = layout.mp_size if form == "s2" else 1
    return ShardPlace(layout.esp_size, layout.esp_rank, dealt, by_shard)
