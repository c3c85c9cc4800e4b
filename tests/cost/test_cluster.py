"""What a cluster costs: alpha-beta models, and the volume that each collective moves."""

from __future__ import annotations

import math
from dataclasses import fields
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError
from penstock.cost import AlphaBeta, ClusterConfig

UNIT = ClusterConfig(link_latency_s=1.0, link_bytes_per_s=1.0)
"""One second for a round and one for a byte."""

ranks = st.integers(1, 64)


def ring_all_reduce(size: int) -> tuple[int, int]:
    """Rounds, and pieces received by rank 0, of a ring that really sums `size` pieces on `size` ranks."""
    held = [[1 << rank] * size for rank in range(size)]
    rounds = received = 0
    for gathering in (False, True):
        for step in range(size - 1):
            sent = [(rank - step + gathering) % size for rank in range(size)]
            pieces = [held[rank][sent[rank]] for rank in range(size)]
            for rank in range(size):
                source = (rank - 1) % size
                held[rank][sent[source]] = pieces[source] + (0 if gathering else held[rank][sent[source]])
            rounds, received = rounds + 1, received + 1
    assert held == [[(1 << size) - 1] * size] * size
    return rounds, received


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_all_reduce_costs_what_a_ring_moves(size: int) -> None:
    rounds, received = ring_all_reduce(size)
    model = UNIT.all_reduce(size)
    assert model.alpha_s == rounds
    assert model.beta_s_per_byte == pytest.approx(Fraction(received, size))


@given(ranks)
def test_all_to_all_costs_what_leaves_the_rank(size: int) -> None:
    """The buffer has one share per rank, and its own share stays where it is."""
    shares = [target for target in range(size) if target != 0]
    model = UNIT.all_to_all(size)
    assert model.alpha_s == len(shares)
    assert model.beta_s_per_byte == pytest.approx(len(shares) / size)


@given(ranks, st.integers(1, 10**12))
def test_an_all_reduce_moves_twice_what_an_all_to_all_of_the_same_bytes_does(size: int, sent: int) -> None:
    cluster = ClusterConfig()
    once, twice = cluster.all_to_all(size).seconds(sent), cluster.all_reduce(size).seconds(sent)
    assert twice == pytest.approx(2 * once)


def test_seconds_are_the_link_s() -> None:
    cluster = ClusterConfig(link_latency_s=1e-3, link_bytes_per_s=1e6)
    assert cluster.all_to_all(4).seconds(8e6) == pytest.approx(3e-3 + 6.0)
    assert cluster.all_reduce(4).seconds(8e6) == pytest.approx(6e-3 + 12.0)


@given(st.integers(0, 10**12))
def test_one_rank_has_nobody_to_send_to(size_bytes: int) -> None:
    assert ClusterConfig().all_to_all(1).seconds(size_bytes) == 0.0
    assert ClusterConfig().all_reduce(1).seconds(size_bytes) == 0.0


def test_nothing_to_move_costs_nothing() -> None:
    model = AlphaBeta(alpha_s=1.0, beta_s_per_byte=1.0)
    assert (model.seconds(0), model.seconds(1)) == (0.0, 2.0)


@pytest.mark.parametrize("name", [field.name for field in fields(ClusterConfig)])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_every_setting_must_be_positive(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name} = .*: must be positive. The default is "):
        ClusterConfig(**{name: value})
