"""The maker of routes from counts on a rank, by how its rows meet all shards of their experts."""

from __future__ import annotations

from penstock.mesh import Group
from penstock.moe import MoELayer, RouteMaker
from penstock.moe.gates.soft import SoftGate
from penstock.moe.node_routes import route_maker
from penstock.moe.shard_routes import (
    FusedRoutes,
    GatheredRoutes,
    RepeatedRoutes,
    ShardPlace,
    ShardRouteMaker,
)
from penstock.step.shape import FORM_TOKENS, ExpertForm
from penstock.topology import Layout

MAKERS: dict[ExpertForm, type[ShardRouteMaker]] = {
    "gather": GatheredRoutes,
    "s1": FusedRoutes,
    "s2": FusedRoutes,
    "baseline": RepeatedRoutes,
}


def maker_of(moe: MoELayer, layout: Layout, form: ExpertForm) -> RouteMaker:
    """Return the maker of a layer's routes. Raises ValueError where order or gate cannot be shared."""
    _check_whole_samples(moe, layout, form)
    shared = layout.esp_size > 1 or (layout.mp_size > 1 and form in ("s2", "baseline"))
    if not shared:
        return route_maker(moe.dispatch, layout.place, moe.order)
    if moe.order.row_counts:
        raise ValueError(
            f"one copy per rank or node is one row for several experts, and with esp_size = "
            f"{layout.esp_size} and expert_form = {form} rows are counted by expert. Set "
            "moe.one_copy_per_rank=false and another moe.dispatch than node_once"
        )
    if moe.hooks.any and layout.esp_size > 1:
        raise ValueError(
            f"hooks around the transfers (moe.compression) change what experts leave, and with esp_size = "
            f"{layout.esp_size} those are partial sums that are still to be added. Remove the hooks, or set "
            "parallel.esp_size=1"
        )
    return MAKERS[form](moe.dispatch, layout.place, False, _place(layout, form))


def _check_whole_samples(moe: MoELayer, layout: Layout, form: ExpertForm) -> None:
    """Raise ValueError for a soft gate on parts of samples: its slots are means over all tokens of one."""
    if layout.mp_size > 1 and FORM_TOKENS[form] == "split" and isinstance(moe.gate, SoftGate):
        raise ValueError(
            f"moe.gate = soft mixes all tokens of a sample, and with mp_size = {layout.mp_size} and "
            f"expert_form = {form} every rank routes its own part of them. Set schedule.expert_form=s2, or "
            "parallel.mp_size=1"
        )


def _place(layout: Layout, form: ExpertForm) -> ShardPlace:
    mesh, members = layout.mesh, layout.mesh.members(layout.rank, Group.EXPERT_SHARDS)
    turns = [mesh.place(rank, Group.TENSOR) for rank in members]
    by_shard = tuple(tuple(turns[i : i + layout.esp_size]) for i in range(0, len(turns), layout.esp_size))
    dealt = layout.mp_size if form == "s2" else 1
    return ShardPlace(layout.esp_size, layout.esp_rank, dealt, by_shard)
