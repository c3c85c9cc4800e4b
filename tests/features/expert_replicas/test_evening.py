"""One more copy on its way costs what all of them cost together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.expert_replicas.planners import Ways
from tests.features.problems import costs_of

NODES = (0, 0, 0, 1, 1, 2)


@pytest.mark.parametrize("card_per_rank", [False, True])
@given(st.integers(0, 2**32 - 1))
def test_one_by_one_as_all_at_once(card_per_rank: bool, seed: int) -> None:
    links, rng = replace(costs_of(NODES).links, card_per_rank=card_per_rank), np.random.default_rng(seed)
    copies = rng.integers(0, 3, (6, 6)) * (1 - np.eye(6, dtype=np.int64))
    ways = Ways(links, copies)
    for _ in range(6):
        owner, home = map(int, rng.choice(6, 2, replace=False))
        copies[owner, home] += 1
        assert ways.with_one_more(owner, home) == links.seconds(copies)
        ways.add(owner, home)
