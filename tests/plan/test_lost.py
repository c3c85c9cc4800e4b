"""Trials that were lost correct the prediction of what moved, until it promises more than they fell short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.decision import Decision, Movable
from penstock.plan import evaluate
from penstock.plan.moving import WORTH, weigh
from penstock.plan.plan_file import LostTrial, corrected, miss
from tests.plan.test_moving import CHOICE, routed

STILL = CHOICE
REPLICAS = replace(CHOICE, experts="planned", replica_slots=1)
SAMPLES = replace(CHOICE, samples="netmoe")
MOVABLE = Movable(experts=("none", "planned"), replica_slots=(1,))


def lost(slower: Decision, faster: Decision, *, predicted: float, measured: float) -> LostTrial:
    return LostTrial.of(slower, faster, predicted=predicted, measured=measured)


def test_a_trial_tells_by_how_much_the_prediction_of_a_move_errs() -> None:
    trial = lost(REPLICAS, STILL, predicted=0.9, measured=1.08)
    assert miss([trial], REPLICAS, STILL) == pytest.approx(1.2)
    assert miss([trial], replace(REPLICAS, replica_slots=2), STILL) == pytest.approx(1.2)
    assert miss([trial], STILL, STILL) == miss([trial], SAMPLES, STILL) == miss([], REPLICAS, STILL) == 1.0


def test_what_was_never_tried_is_told_by_what_is_like_it() -> None:
    """Another planner's replicas travel alike, with samples that move, too."""
    replicas = lost(REPLICAS, STILL, predicted=0.9, measured=1.08)
    samples = lost(SAMPLES, STILL, predicted=1.0, measured=1.5)
    other = replace(REPLICAS, experts="least_loaded")
    assert miss([replicas], other, STILL) == pytest.approx(1.2)
    assert miss([replicas], replace(other, samples="netmoe"), STILL) == pytest.approx(1.2)
    assert miss([replicas, samples], replace(other, samples="netmoe"), STILL) == pytest.approx(1.2 * 1.5)
    better = lost(REPLICAS, other, predicted=1.0, measured=1.1)
    assert miss([lost(other, STILL, predicted=0.9, measured=0.99), better], REPLICAS, STILL) == pytest.approx(
        1.21
    )
    assert miss([replicas, better], replace(REPLICAS, experts="shadowing"), STILL) == pytest.approx(1.1)


def test_a_plan_without_moves_that_lost_tells_of_those_of_the_other() -> None:
    trial = lost(STILL, REPLICAS, predicted=0.8, measured=1.0)
    assert miss([trial], REPLICAS, STILL) == pytest.approx(0.8)


def test_what_lost_to_another_move_is_told_by_both_trials() -> None:
    first, second = (
        lost(REPLICAS, STILL, predicted=0.8, measured=1.0),
        lost(SAMPLES, REPLICAS, predicted=1.0, measured=1.5),
    )
    assert miss([first, second], SAMPLES, STILL) == pytest.approx(1.25 * 1.5)
    assert second.settles(REPLICAS, SAMPLES) and not second.settles(STILL, SAMPLES)


def test_what_lost_is_not_wanted_again_before_it_promises_more() -> None:
    """The same loads: no; a hotter expert, which promises more than the trial fell short: yes."""
    each, hotter = (routed(f"hot_expert,hot_share={share}", MOVABLE) for share in (0.3, 0.5))
    free = weigh(each, [CHOICE])
    promised = free.best.predicted_s / free.still.predicted_s
    assert free.moves and promised < WORTH
    trial = lost(REPLICAS, STILL, predicted=promised, measured=1.02)
    again = weigh(each, [CHOICE], lost=[trial])
    assert not again.moves and again.still.predicted_s == free.still.predicted_s
    told = f"does not pay by a trial, whose steps took {1.02 / promised:.2f} times as long as predicted; "
    assert told in again.lines[1] and "(+2.0 %)" in again.lines[1]
    more = weigh(hotter, [CHOICE], lost=[trial])
    assert more.moves and ", pays by a trial, whose steps took " in more.lines[1]


def test_a_correction_is_of_the_prediction_and_its_interval() -> None:
    found = replace(evaluate(routed("even", MOVABLE), STILL), interval_s=(1.0, 3.0))
    twice = corrected(found, 2.0)
    assert (twice.predicted_s, twice.interval_s) == (2 * found.predicted_s, (2.0, 6.0))
    assert twice == replace(found, predicted_s=2 * found.predicted_s, interval_s=(2.0, 6.0))


def test_no_bound_lies_above_a_prediction_that_trials_made_shorter() -> None:
    found = evaluate(routed("even", MOVABLE), STILL)
    half = corrected(found, 0.5)
    assert half.bound_s == half.predicted_s < found.bound_s <= found.predicted_s
