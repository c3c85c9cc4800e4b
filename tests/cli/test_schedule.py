"""`penstock schedule`: what it prints, and what it says to bad arguments."""

from __future__ import annotations

import pytest

from penstock.cli import main
from penstock.graph import Lane
from penstock.schedule import SCHEDULES
from penstock.schedule.schedule import parse_orders
from tests.support.cli import Cli


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.slow
def test_prints_grid_and_timeline(name: str, cli: Cli) -> None:
    text = cli.prints(["schedule", name, "--layers", "2", "--microbatches", "2", "--chunks", "2"])
    own = SCHEDULES[name].expert_form is not None
    assert "compute" in text and "inter" in text and ("TA0" if own else "AT0") in text
    assert "TIME (simulated)" in text
    assert ("intra " in text) is own


def test_ranks_that_share_are_drawn_on_the_lane_inside_nodes(cli: Cli) -> None:
    sharing = ["--tp-size", "4", "--etp-size", "2", "--tokens", "replicated", "--expert-form", "s1"]
    text = " ".join(cli.prints(["schedule", "lina", *sharing]).split())
    assert "4 ranks share attention (tp), 2 every expert (etp); between blocks tokens are replicated" in text
    assert "rows reach all shards as in s1" in text and "on 8 ranks with 2 experts each (ep 4)" in text
    assert "intra " not in cli.prints(["schedule", "fsmoe", "--tp-size", "1", "--etp-size", "1"])


def test_what_moves_is_drawn(cli: Cli) -> None:
    moves = ["--samples", "netmoe", "--experts", "planned", "--replica-slots", "2"]
    text = " ".join(cli.prints(["schedule", "flowmoe", "--microbatches", "1", *moves]).split())
    assert "SP new homes of all samples" in text and "GP parameters of experts" in text
    assert "samples get new homes in every MoE layer; every rank holds up to 2 replicas of others" in text
    with pytest.raises(SystemExit):
        main(["schedule", "flowmoe", "--samples", "somehow"])


def test_sizes_that_the_drawn_step_cannot_have_are_refused(cli: Cli) -> None:
    error = cli.refuses(["schedule", "parm_s1", "--etp-size", "5"])
    assert "penstock: --etp-size = 5: " in error and "Nearest valid: 4" in error


def test_json_holds_the_schedule_itself(cli: Cli) -> None:
    name, orders = parse_orders(cli.finds(["schedule", "flowmoe"])["schedule_text"])
    assert name == "flowmoe"
    assert list(map(str, orders[Lane.COMPUTE][:2])) == ["L0.EM.m0.F", "L0.EM.m1.F"]


def test_degrees_of_both_directions(cli: Cli) -> None:
    assert "4 forward and 2 backward chunks" in cli.prints(
        ["schedule", "fsmoe", "--microbatches", "1", "--chunks", "4", "--backward-chunks", "2"]
    )
    assert "flowmoe ignores backward_chunks = 2" in cli.prints(
        ["schedule", "flowmoe", "--backward-chunks", "2"]
    )


def test_unknown_name_is_answered_with_the_nearest(cli: Cli) -> None:
    error = cli.refuses(["schedule", "flowmo"])
    assert "flowmo" in error and "flowmoe" in error


def test_less_than_one_piece_is_refused(cli: Cli) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["schedule", "flowmoe", "--microbatches", "0"])
    assert stop.value.code == 2
    assert "must be from 1 to 64" in cli.capsys.readouterr().err
