"""Names of contenders: a schedule, and what moves in its steps."""

from __future__ import annotations

import pytest

from penstock.config import ConfigError
from penstock.decision import PlacementConfig
from penstock.lab.bench.config import CompareConfig, Named
from penstock.moe import MoEConfig
from penstock.train.optimizer import OptimizerConfig


def test_a_name_says_what_moves() -> None:
    named = Named.of("penstock+planned+netmoe")
    assert named == Named(schedule="penstock", samples="netmoe", experts="planned")
    placement = named.placement(PlacementConfig(replica_slots=3))
    assert (placement.samples, placement.experts, placement.replica_slots) == ("netmoe", "planned", 3)


def test_a_name_says_how_rows_travel() -> None:
    given = MoEConfig(dispatch="flat")
    assert Named.of("penstock+node_once").moe(given).dispatch == "node_once"
    assert Named.of("penstock").moe(given) is given


def test_without_a_plus_everything_stays() -> None:
    placement = Named.of("sequential").placement(PlacementConfig(samples="netmoe", experts="planned"))
    assert (placement.samples, placement.experts) == ("none", "none")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("penstok", "no such schedule. Nearest: penstock"),
        ("penstock+netmo", "nothing is moved by 'netmo'"),
        ("penstock+", "nothing is moved by ''"),
        ("penstock+flat+node_once", "rows have one dispatch"),
        ("penstock+netmoe+netmoe", "samples can be moved in one way only"),
        ("penstock+planned+shadowing", "samples can be moved in one way only, experts too"),
        ("auto+netmoe", "no such schedule"),
    ],
)
def test_what_is_no_name_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CompareConfig(schedules=("sequential", name))


def test_a_name_may_say_whose_updates() -> None:
    plain, shares, gradients = map(Named.of, ("penstock", "penstock+zero1", "penstock+node_once+zero2"))
    settled = [each.optimizer(OptimizerConfig()) for each in (plain, shares, gradients)]
    assert [each.zero_stage for each in settled] == [0, 1, 2]
    assert [each.moves for each in (plain, shares, gradients)] == [False, False, True]
    with pytest.raises(ConfigError, match="one owner"):
        Named.of("penstock+zero1+zero2")
