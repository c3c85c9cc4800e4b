"""The workloads by name: the routing that each gives a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from penstock.apportion import Counts
from penstock.workloads.config import SLOW_DRIFT, RoutingConfig
from penstock.workloads.hot_spots import STAYS, Burst, HotSpot, each_expert, each_holder, starts
from penstock.workloads.preferences import DirichletDraw, Draw, LogNormalDraw, Movement, Preferences, ZipfDraw
from penstock.workloads.recorded import recorded_routing
from penstock.workloads.routing import PREFERENCES, GeneratedRouting, Routing, RoutingSizes

Make = Callable[[RoutingConfig, RoutingSizes], Preferences]


def routing_of(config: RoutingConfig, sizes: RoutingSizes) -> Routing:
    """Return a batch's routing by a workload. Raises ConfigError if a recorded run does not fit the model."""
    if config.recorded is not None:
        return recorded_routing(config.recorded, sizes)
    return GeneratedRouting(sizes, GENERATED[config.routing](config, sizes), config.seed)


def _zipf(config: RoutingConfig, sizes: RoutingSizes) -> Movement:
    return _moving(_zipf_draw(config.zipf_exponent, sizes), config, config.drift)


def _slow_drift(config: RoutingConfig, sizes: RoutingSizes) -> Movement:
    return _moving(_zipf_draw(config.zipf_exponent, sizes), config, config.drift or SLOW_DRIFT)


def _even(config: RoutingConfig, sizes: RoutingSizes) -> Movement:
    return _moving(_zipf_draw(0.0, sizes), config, 0.0)


def _gini(config: RoutingConfig, sizes: RoutingSizes) -> Movement:
    draw = LogNormalDraw(
        gini=config.gini, moe_layers=sizes.moe_layers, num_experts=sizes.num_experts, top_k=sizes.top_k
    )
    return _moving(draw, config, config.drift)


def _dirichlet(config: RoutingConfig, sizes: RoutingSizes) -> Movement:
    draw = DirichletDraw(concentration=config.dirichlet_concentration, shape=sizes.shape)
    return _moving(draw, config, config.drift)


def _hot_rank(config: RoutingConfig, sizes: RoutingSizes) -> HotSpot:
    return _hot(config, sizes, each_holder(sizes.num_experts, sizes.holders))


def _hot_expert(config: RoutingConfig, sizes: RoutingSizes) -> HotSpot:
    return _hot(config, sizes, each_expert(sizes.num_experts))


def _rotating(config: RoutingConfig, sizes: RoutingSizes) -> HotSpot:
    return _hot(config, sizes, each_holder(sizes.num_experts, sizes.holders), config.period)


def _burst(config: RoutingConfig, sizes: RoutingSizes) -> Burst:
    return Burst(hot=_hot_expert(config, sizes), period=config.period, length=config.burst_steps)


GENERATED: Mapping[str, Make] = {
    "even": _even,
    "zipf": _zipf,
    "gini": _gini,
    "dirichlet": _dirichlet,
    "hot_rank": _hot_rank,
    "hot_expert": _hot_expert,
    "rotating": _rotating,
    "burst": _burst,
    "slow_drift": _slow_drift,
}
"""All workloads but `recorded`, which is read from a file."""


def _zipf_draw(exponent: float, sizes: RoutingSizes) -> ZipfDraw:
    return ZipfDraw(exponent=exponent, moe_layers=sizes.moe_layers, num_experts=sizes.num_experts)


def _moving(draw: Draw, config: RoutingConfig, drift: float) -> Movement:
    return Movement(draw=draw, seed=(config.seed, PREFERENCES), drift=drift, change_at=config.change_at)


def _hot(config: RoutingConfig, sizes: RoutingSizes, spots_SN: Counts, period: int = STAYS) -> HotSpot:
    rng = np.random.default_rng([config.seed, PREFERENCES])
    return HotSpot(
        spots_SN=spots_SN,
        num_experts=sizes.num_experts,
        first_Y=starts(rng, len(spots_SN), sizes.moe_layers),
        share=config.hot_share,
        period=period,
    )
