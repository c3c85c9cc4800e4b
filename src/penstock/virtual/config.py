"""Section `[virtual]`: how tokens are routed between devices whose computation is a sleep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.config import ConfigError

RoutingKind = Literal["uniform", "zipf", "dirichlet", "recorded"]

MOST_EXPONENT = 10
LEAST_CONCENTRATION, MOST_CONCENTRATION = 1e-3, 1e6


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
    zipf_exponent: float = 1.0
    dirichlet_concentration: float = 0.3
    drift: float = 0.0
    change_at: int | None = None
    seed: int = 0
    recorded: Path | None = None

    def __post_init__(self) -> None:
        _check_range("zipf_exponent", self.zipf_exponent, 0, MOST_EXPONENT, "Use 0 for uniform, or 1.")
        concentration = self.dirichlet_concentration
        least, most = LEAST_CONCENTRATION, MOST_CONCENTRATION
        _check_range("dirichlet_concentration", concentration, least, most, "Use 0.3.")
        _check_range("drift", self.drift, 0, 1, "Use 0 for none, or 0.01 for new preferences in 100 steps.")
        if self.change_at is not None and self.change_at < 1:
            why = "steps are counted from 0, and before the first there is nothing to change"
            raise ConfigError("change_at", self.change_at, why, "Use 1 or more, or none.")
        if self.seed < 0:
            raise ConfigError("seed", self.seed, "must not be negative", "Use 0.")
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


def _check_range(key: str, value: float, least: float, most: float, hint: str) -> None:
    if not least <= value <= most:
        raise ConfigError(key, value, f"must be from {least:g} to {most:g}", hint)
