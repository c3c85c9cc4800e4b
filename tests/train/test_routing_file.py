"""Routing of every sample, put together from what ranks know."""

from __future__ import annotations

import numpy as np

from penstock.train.measuring import _joined

ONE, TWO = np.array([[1, 0]]), np.array([[0, 2]])


def test_samples_that_move_between_layers_keep_their_numbers() -> None:
    """Two ranks with a sample each, which they exchange between two layers."""
    first = [(np.array([7]), ONE), (np.array([3]), TWO)]
    second = [(np.array([3]), TWO), (np.array([7]), ONE)]
    assert _joined([first, second]).tolist() == [[[1, 0], [1, 0]], [[0, 2], [0, 2]]]


def test_parts_of_a_sample_on_several_ranks_are_added() -> None:
    shared = [[(np.array([7]), ONE)], [(np.array([7]), TWO)]]
    assert _joined(shared).tolist() == [[[1, 2]]]
