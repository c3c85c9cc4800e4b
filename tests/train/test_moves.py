"""Section [placement]: what would do nothing is refused."""

from __future__ import annotations

import pytest

from penstock.config import ConfigError, load
from penstock.train.config import RunConfig


@pytest.mark.parametrize(
    ("settings", "ranks", "key", "words"),
    [
        (
            ["placement.solver=kuhn_munkres"],
            2,
            "solver",
            r'samples = auto, which means "none" with plan.source',
        ),
        (["placement.prediction=none", "placement.samples=none"], 2, "prediction", "where samples stay"),
        (["placement.guest_slots=2"], 2, "guest_slots", "where experts stay"),
        (["placement.split=exact"], 2, "split", "where experts stay"),
        (
            ["placement.every=3", "placement.experts=none", "plan.source=auto"],
            2,
            "every",
            r"experts = none\)\. Leave it out, or let experts move",
        ),
        (["placement.experts=planned", "parallel.ep_size=1"], 2, "experts", "every rank has all of them"),
        (["placement.samples=netmoe"], 1, "samples", "every rank has all of them"),
    ],
)
def test_what_would_change_nothing_is_refused(settings: list[str], ranks: int, key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(RunConfig, None, settings).resolved(ranks)
    assert caught.value.key == f"placement.{key}"


@pytest.mark.parametrize(
    "settings",
    [
        ["placement.samples=netmoe", "placement.solver=kuhn_munkres"],
        ["placement.experts=planned", "placement.guest_slots=2", "placement.every=3"],
        ["placement.guest_slots=2", "placement.prediction=none", "plan.source=auto"],
        ["placement.guest_slots=2", "parallel.ep_size=1", "placement.samples=netmoe", "plan.source=p.json"],
    ],
)
def test_what_may_count_is_taken(settings: list[str]) -> None:
    assert load(RunConfig, None, settings).resolved(2).placement.guest_slots in (1, 2)


def test_rounding_that_nothing_chooses_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan\.lossy = true: .*nothing is searched.*moe\.compression"):
        load(RunConfig, None, ["plan.lossy=true"])
    assert load(RunConfig, None, ["plan.lossy=true", "plan.source=auto"]).plan.lossy
