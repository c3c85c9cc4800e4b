"""The workloads by name: how uneven each is by its settings, and the routing that it gives a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt

from penstock.config import ConfigError, Within, asked, check_bounds, load
from penstock.config.bounds import MOST_STEPS, FilePath, Seed
from penstock.workloads.recorded import recorded_routing
from penstock.workloads.routing import (
    PREFERENCES,
    STAYS,
    Burst,
    DirichletDraw,
    Draw,
    GeneratedRouting,
    HotSpot,
    LogNormalDraw,
    Movement,
    OfLayers,
    Preferences,
    Routing,
    RoutingSizes,
    ZipfDraw,
    inclusion,
)

RoutingName = Literal[
    "even",
    "zipf",
    "gini",
    "dirichlet",
    "hot_rank",
    "hot_expert",
    "rotating",
    "burst",
    "slow_drift",
    "recorded",
]

Exponent = Annotated[float, Within(0, 10, "0 is even, at 10 nearly all choose one expert")]
Concentration = Annotated[float, Within(1e-3, 1e6, "beyond, all samples choose alike, or one expert each")]
Gini = Annotated[float, Within(0, 0.99, "0 is even, at 1 one expert would get all")]
Drift = Annotated[float, Within(0, 1, "1 means new preferences in every step; 0.01, in 100")]
Share = Annotated[float, Within(0.001, 0.999, "it is the part of all token copies at the hot spot")]
Period = Annotated[int, Within(1, MOST_STEPS, "it is a number of steps")]
ChangeStep = Annotated[
    int,
    Within(1, MOST_STEPS, "steps are counted from 0, and before the first there is nothing to change"),
]

MOVES: Final = ("drift", "change_at")
READ_BY: Final[Mapping[RoutingName, tuple[str, ...]]] = {
    "even": (),
    "zipf": ("zipf_exponent", *MOVES),
    "gini": ("gini", *MOVES),
    "dirichlet": ("dirichlet_concentration", *MOVES),
    "hot_rank": ("hot_share",),
    "hot_expert": ("hot_share",),
    "rotating": ("hot_share", "period"),
    "burst": ("hot_share", "period", "burst_steps"),
    "slow_drift": ("zipf_exponent", *MOVES),
    "recorded": ("recorded",),
}
"""The settings that each workload reads, besides the seed; any other setting is refused."""

ABOUT: Final[Mapping[RoutingName, str]] = {
    "even": "every expert is chosen alike, up to chance",
    "zipf": "the expert of popularity rank r is chosen in proportion to r to the power of -zipf_exponent, in "
    "another order in every layer",
    "gini": "log-normal popularity, whose Gini coefficient over the experts of a layer is gini",
    "dirichlet": "every sample has preferences of its own: strong locality with a small concentration, weak "
    "with a large one",
    "hot_rank": "the experts of one rank get hot_share of all rows, in every layer another rank's",
    "hot_expert": "one expert gets hot_share of all rows (at most one copy of every token)",
    "rotating": "a hot rank; after every period steps it is the next rank",
    "burst": "even, with a hot expert in the last burst_steps of every period steps",
    "slow_drift": "zipf, which drifts by 0.01 per step, or by drift",
    "recorded": "what a training run with output.routing=true left",
}
"""One sentence on each workload."""

WORDS: Final = {
    "zipf_exponent": "exponent {:g}",
    "gini": "coefficient {:g}",
    "dirichlet_concentration": "concentration {:g}",
    "hot_share": "{:.0%} at the hot spot",
    "period": "period {} steps",
    "burst_steps": "{} of them hot",
    "drift": "drift {:g} per step",
    "change_at": "redrawn at step {}",
    "recorded": "{}",
}
SLOW_DRIFT: Final = 0.01


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """A workload: where tokens go in every step. `penstock bench`, `penstock plan` and tests name it alike.

    Attributes:
        routing: The name of the workload; `penstock list` has them.
        zipf_exponent: The exponent of zipf: 0 is even, 1 gives the first expert twice the tokens of the
            second.
        gini: The coefficient of the rows of a layer's experts: 0 is even, near 1 few experts get nearly all.
        dirichlet_concentration: The concentration of dirichlet: small numbers send a sample to few experts
            (strong locality), large ones to all alike.
        drift: How far preferences move in one step: 1 / drift steps lead to preferences that have nothing to
            do with the first ones, continuously; 0 = they stay. For zipf and dirichlet.
        change_at: The step (counted from 0) before which all preferences are drawn again; None = never.
        seed: The seed of preferences and of chance.
        recorded: The file that a training run wrote, for `recorded`.
    """

    routing: RoutingName = "even"
    zipf_exponent: Exponent = 1.0
    gini: Gini = 0.3
    dirichlet_concentration: Concentration = 0.3
    hot_share: Share = 0.5
    period: Period = 10
    burst_steps: Period = 2
    drift: Drift = 0.0
    change_at: ChangeStep | None = None
    seed: Seed = 0
    recorded: FilePath | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.routing == "recorded" and self.recorded is None:
            why = "recorded routing needs the file of a run"
            raise ConfigError("recorded", None, why, "Give its path, or use another routing.")
        if self.routing == "burst" and self.burst_steps > self.period:
            why = f"a burst cannot be longer than the period of {self.period} steps"
            raise ConfigError("burst_steps", self.burst_steps, why, f"Use {self.period} or less.")
        for field in fields(RoutingConfig):
            value = getattr(self, field.name)
            if field.name not in WORDS or value == field.default:
                continue
            if field.name not in READ_BY[self.routing]:
                readers = [name for name, read in READ_BY.items() if field.name in read]
                why = f"changes nothing with {self.routing} routing"
                hint = f"Leave it out, or set routing to {' or '.join(readers)}."
                raise ConfigError(field.name, str(value) if isinstance(value, Path) else value, why, hint)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `zipf`, `zipf,zipf_exponent=1.5,seed=3`, `gini=0.3`, or the path of a recorded run.

        Raises:
            ConfigError: For any other text.
        """
        name, *settings = text.split(",")
        if name not in READ_BY and asked(Path(name).is_file):
            return load(cls, None, ["routing=recorded", f"recorded={name}", *settings])
        if name.partition("=")[0] == "gini" != name:  # the one number that the workload has
            return load(cls, None, ["routing=gini", name, *settings])
        return load(cls, None, [f"routing={name}", *settings])

    @property
    def words(self) -> str:
        """The workload in words, as in `zipf routing (exponent 1)`."""
        details = [
            WORDS[key].format(value).replace("%", " %")
            for key in READ_BY[self.routing]
            if (value := getattr(self, key)) not in (None, 0.0)
        ]
        return f"{self.routing} routing" + (f" ({', '.join(details)})" if details else "")


Make = Callable[[RoutingConfig, RoutingSizes], Preferences]


def routing_of(config: RoutingConfig, sizes: RoutingSizes) -> Routing:
    """Return a batch's routing by a workload.

    Raises:
        ConfigError: If a recorded run does not fit the model.
    """
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
        ConfigError: If a recorded run does not fit the model.
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

    Args:
        load_Y: The load by which layers are ordered; equal ones stay in their order.
        count: The number of layers that stand for all.
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


GENERATED: Mapping[str, Make] = {
    "even": lambda config, sizes: _moving(ZipfDraw(0.0, sizes), config, 0.0),
    "zipf": lambda config, sizes: _moving(ZipfDraw(config.zipf_exponent, sizes), config, config.drift),
    "gini": lambda config, sizes: _moving(LogNormalDraw(config.gini, sizes), config, config.drift),
    "dirichlet": lambda config, sizes: _moving(
        DirichletDraw(config.dirichlet_concentration, sizes), config, config.drift
    ),
    "hot_rank": lambda config, sizes: _hot(config, sizes, sizes.holders, STAYS),
    "hot_expert": lambda config, sizes: _hot(config, sizes, sizes.num_experts, STAYS),
    "rotating": lambda config, sizes: _hot(config, sizes, sizes.holders, config.period),
    "burst": lambda config, sizes: Burst(
        _hot(config, sizes, sizes.num_experts, STAYS), config.period, config.burst_steps
    ),
    "slow_drift": lambda config, sizes: _moving(
        ZipfDraw(config.zipf_exponent, sizes), config, config.drift or SLOW_DRIFT
    ),
}
"""All workloads but `recorded`, which is read from a file."""
LAYERS_ALIKE: Final = ("even", "dirichlet")
"""Workloads whose layers differ by chance alone."""


def _moving(draw: Draw, config: RoutingConfig, drift: float) -> Movement:
    return Movement(draw=draw, seed=(config.seed, PREFERENCES), drift=drift, change_at=config.change_at)


def _hot(config: RoutingConfig, sizes: RoutingSizes, spots: int, period: int) -> HotSpot:
    """Return preferences with a hot spot, one of `spots` equal parts of the experts, which lie in order.

    The layers begin with different ones, as long as there are any left.
    """
    rng = np.random.default_rng([config.seed, PREFERENCES])
    return HotSpot(
        spots_SN=np.arange(sizes.num_experts).reshape(spots, -1),
        num_experts=sizes.num_experts,
        first_Y=rng.permutation(spots)[np.arange(sizes.moe_layers) % spots],
        share=config.hot_share,
        period=period,
    )
