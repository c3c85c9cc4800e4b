"""What samples want of the next layer, learnt from what samples like them wanted."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.apportion import Counts
from penstock.placement import ExpertPlacement, Replication
from penstock.runtime.features.sample_placement import Habits, Visit

HOSTING = Replication.none(ExpertPlacement.even(4, 2), 0)
HERE = np.array([[6, 0, 0, 0], [0, 6, 0, 0], [3, 0, 3, 0]])
THERE = np.array([[0, 0, 6, 0], [6, 0, 0, 0], [0, 0, 3, 3]])
"""Rows of three samples in two layers: expert 0 is followed by 2, expert 1 by 0, expert 2 by 3 and 2."""


def visit(layer: int, *, training: bool = True) -> Visit:
    return Visit(layer=layer, microbatch=0, here=HOSTING, following=HOSTING, training=training)


def passed(habits: Habits, order: list[int], *, training: bool = True) -> Counts:
    """What is expected of layer 2 when samples are in layer 0; they come there in another order."""
    expected = habits.expected(HERE, visit(0, training=training))
    habits.left(HERE[order], visit(0, training=training))
    habits.expected(THERE[order], visit(2, training=training))
    habits.left(THERE[order], visit(2, training=training))
    return expected


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_what_followed_once_is_expected_again(order: list[int]) -> None:
    habits = Habits()
    assert not passed(habits, order).any()
    expected = passed(habits, order)
    assert expected[0].argmax() == 2 and expected[1].tolist() == [6, 0, 0, 0]
    assert expected[2, 3] >= 1
    assert not habits.expected(np.array([[0, 0, 0, 6]]), visit(0)).any(), "nothing is known of expert 3"


def test_evaluation_teaches_nothing() -> None:
    habits = Habits()
    passed(habits, [0, 1, 2], training=False)
    assert not passed(habits, [0, 1, 2], training=False).any()
