"""Section `[virtual]`: how tokens are routed between devices whose computation is a sleep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from penstock.config import ConfigError, Within, check_bounds
from penstock.config.bounds import MOST_STEPS, Seed

RoutingKind = Literal["uniform", "zipf", "dirichlet", "recorded"]

Exponent = Annotated[float, Within(0, 10, "0 is uniform, at 10 nearly all choose one expert")]
Concentration = Annotated[float, Within(1e-3, 1e6, "beyond, all samples choose alike, or one expert each")]
Drift = Annotated[float, Within(0, 1, "1 means new preferences in every step; 0.01, in 100")]
ChangeStep = Annotated[
    int,
    Within(1, MOST_STEPS, "steps are counted from 0, and before the first there is nothing to change"),
]


@dataclass(frozen=True, kw_only=True)
class VirtualConfig:
    """Virtual devices: compute tasks sleep as long as the cost model says, transfers move real bytes.

    routing: where tokens go. `uniform`: every expert is chosen alike, up to chance. `zipf`: the expert of
        popularity rank r is chosen in proportion to r ** -zipf_exponent, in another order in every layer.
        `dirichlet`: every sample has preferences of its own. `recorded`: the loads of a training run.
    zipf_exponent: 0 is uniform, 1 gives the first expert twice the tokens of the second.
    dirichlet_concentration: small numbers send a sample to few experts, large ones to all alike.
    drift: how far preferences move in one step: 1 / drift steps lead to preferences that have nothing to do
        with the first ones, continuously; 0 = they stay. For zipf and dirichlet.
    change_at: the step (counted from 0) before which all preferences are drawn again; none = never.
    seed: of preferences and of chance. recorded: the file that a training run wrote, for `recorded`.
    """

    routing: RoutingKind = "uniform"
    zipf_exponent: Exponent = 1.0
    dirichlet_concentration: Concentration = 0.3
    drift: Drift = 0.0
    change_at: ChangeStep | None = None
    seed: Seed = 0
    recorded: Path | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        self._check_what_belongs_together()

    @property
    def label(self) -> str:
        """What every output of such a run says, as in `virtual devices, zipf routing (exponent 1)`."""
        details = {
            "uniform": [],
            "zipf": [f"exponent {self.zipf_exponent:g}"],
            "dirichlet": [f"concentration {self.dirichlet_concentration:g}"],
            "recorded": [str(self.recorded)],
        }[self.routing]
        details += [f"drift {self.drift:g} per step"] if self.drift else []
        details += [] if self.change_at is None else [f"redrawn at step {self.change_at}"]
        return f"virtual devices, {self.routing} routing" + (f" ({', '.join(details)})" if details else "")

    def _check_what_belongs_together(self) -> None:
        """A setting that would silently do nothing is refused."""
        if self.routing == "recorded" and self.recorded is None:
            why = "recorded routing needs the file of a run"
            raise ConfigError("recorded", None, why, "Give its path, or use another virtual.routing.")
        if self.routing != "recorded" and self.recorded is not None:
            why = f"is read with recorded routing only, and routing is {self.routing}"
            raise ConfigError("recorded", str(self.recorded), why, "Set virtual.routing=recorded, or none.")
        if self.routing in ("zipf", "dirichlet"):
            return
        why = f"{self.routing} routing has no preferences that could move"
        if self.drift:
            raise ConfigError("drift", self.drift, why, "Use 0, or zipf or dirichlet routing.")
        if self.change_at is not None:
            raise ConfigError("change_at", self.change_at, why, "Use none, or zipf or dirichlet routing.")
