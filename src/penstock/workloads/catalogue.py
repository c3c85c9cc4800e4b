"""The workloads by name: the routing that each gives a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.apportion import Counts
from penstock.workloads.config import SLOW_DRIFT, RoutingConfig
from penstock.workloads.hot_spots import STAYS, Burst, HotSpot, each_expert, each_holder, starts
from penstock.workloads.preferences import (
    DirichletDraw,
    Draw,
    LogNormalDraw,
    Movement,
    OfLayers,
    Preferences,
    ZipfDraw,
    inclusion,
)
from penstock.workloads.recorded import recorded_routing
from penstock.workloads.routing import PREFERENCES, GeneratedRouting, Routing, RoutingSizes

Make = Callable[[RoutingConfig, RoutingSizes], Preferences]


def routing_of(config: RoutingConfig, sizes: RoutingSizes) -> Routing:
    """Return a batch's routing by a workload. Raises ConfigError if a recorded run does not fit the model."""
    if config.recorded is not None:
        return recorded_routing(config.recorded, sizes)
    return GeneratedRouting(sizes, GENERATED[config.routing](config, sizes), config.seed)


def routing_of_layers(
    config: RoutingConfig, sizes: RoutingSizes, moe_layers: int
) -> tuple[Routing, tuple[int, ...]]:
    """Return the routing of some layers of a model, and which of these stands for each of its layers.

    The model's layers are ordered by the load of their busiest rank and cut into equal parts. The middle
    layer of a part stands for all of the part. Layers that differ by chance alone need no order.

    Args:
        config: The workload.
        sizes: The batch; as many layers as are wanted.
        moe_layers: Layers of the model.

    Raises:
        ConfigError: A recorded run does not fit the model.
    """
    whole = replace(sizes, moe_layers=moe_layers)
    if config.routing in LAYERS_ALIKE:
        return routing_of(config, sizes), representatives(np.zeros(moe_layers), sizes.moe_layers)[1]
    if config.recorded is not None:
        recorded = recorded_routing(config.recorded, whole)
        chosen, columns = representatives(_busiest(recorded.loads(1), sizes), sizes.moe_layers)
        return recorded.of_layers(chosen), columns
    preferences = GENERATED[config.routing](config, whole)
    loads_YE = inclusion(preferences.at(1), sizes.top_k)[0, 0]
    chosen, columns = representatives(_busiest(loads_YE, sizes), sizes.moe_layers)
    return GeneratedRouting(sizes, OfLayers(preferences, chosen), config.seed), columns


def representatives(load_Y: npt.NDArray[Any], count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return `count` layers that stand for all, ascending, and which of them (from 0) stands for each layer.

    load_Y: by which layers are ordered; equal ones stay in their order.
    """
    parts = np.array_split(np.argsort(load_Y, kind="stable"), count)
    parts.sort(key=lambda part: int(part[len(part) // 2]))
    columns = np.empty(len(load_Y), np.int64)
    for column, part in enumerate(parts):
        columns[part] = column
    return tuple(int(part[len(part) // 2]) for part in parts), tuple(columns.tolist())


def _busiest(loads_YE: npt.NDArray[Any], sizes: RoutingSizes) -> npt.NDArray[Any]:
    """Return the load of every layer's busiest rank, [Y]; experts are spread in order."""
    busiest_Y: npt.NDArray[Any] = loads_YE.reshape(len(loads_YE), sizes.holders, -1).sum(axis=2).max(axis=1)
    return busiest_Y


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
LAYERS_ALIKE: Final = ("even", "dirichlet")
"""Workloads whose layers differ by chance alone."""


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
