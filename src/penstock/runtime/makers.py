"""The maker of routes from counts on a rank, by how its rows meet all shards of their experts."""

from __future__ import annotations

from penstock.config import ConfigError
from penstock.moe import MoELayer, RouteMaker
from penstock.moe.compatibility import route_maker
from penstock.moe.routers import SoftGate
from penstock.routing.routes import ShardPlace
from penstock.step.shape import FORM_TOKENS, ExpertForm
from penstock.topology import Layout


def maker_of(moe: MoELayer, layout: Layout, form: ExpertForm) -> RouteMaker:
    """Return the maker of a layer's routes. Raises ConfigError for parts that cannot be shared."""
    # The slots of a soft gate are means over all tokens of a sample.
    if layout.tp_size > 1 and FORM_TOKENS[form] == "split" and isinstance(moe.gate, SoftGate):
        why = (
            f"mixes all tokens of a sample, and with parallel.tp_size = {layout.tp_size} and "
            f"expert form {form} every rank routes its own part of them"
        )
        raise ConfigError("moe.gate", "soft", why, "Set schedule.expert_form=s2, or parallel.tp_size=1.")
    shards = ShardPlace.of(form, layout.mesh, layout.rank)
    if shards is None:
        return route_maker(moe.dispatch, layout.place, moe.order)
    if moe.order.row_counts:
        joined = moe.dispatch.joins_rows
        raise ConfigError(
            "moe.dispatch" if joined else "moe.one_copy_per_rank",
            moe.dispatch.name if joined else True,
            f"sends one row for several experts, and with parallel.etp_size = {layout.etp_size} and "
            f"expert form {form} rows are counted by expert",
            "Use another dispatch." if joined else "Use false.",
        )
    if moe.hooks.any and layout.etp_size > 1:
        why = (
            "hooks around transfers (moe.comm_dtype) change what experts leave, and with "
            f"{layout.etp_size} shards of every expert those are partial sums that are still to be added"
        )
        hint = "Use 1, or no hooks (moe.comm_dtype=none)."
        raise ConfigError("parallel.etp_size", layout.etp_size, why, hint)
    return RouteMaker(moe.dispatch, layout.place, shards=shards)
