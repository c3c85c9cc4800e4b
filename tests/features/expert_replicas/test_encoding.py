"""What ranks tell each other of replicas: read as it was, and little where little was decided."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from penstock.features.expert_replicas.encoding import (
    numbers_of,
    plain_of,
    replication_of,
    share_of,
    told_bytes,
)
from penstock.placement import SPLIT, ExpertPlacement, Replication
from tests.support.replicas import random_replication

EVEN = ExpertPlacement.even(6, 3)


def replications() -> st.SearchStrategy[Replication]:
    """Some with a limit."""

    def drawn(seed: int, limit: int | None) -> Replication:
        return replace(random_replication(EVEN, 1 + seed % 2, Random(seed)), limit=limit)

    return st.builds(drawn, st.integers(0, 2**32 - 1), st.none() | st.just(SPLIT + 1))


@given(st.integers(0, 2**32 - 1), st.integers(1, 2), st.booleans())
def test_what_is_told_is_read(seed: int, slots: int, in_use: bool) -> None:
    random = Random(seed)
    known = [Replication.none(EVEN, slots), random_replication(EVEN, slots, random)]
    share = ((random_replication(EVEN, slots, random), in_use), (known[1], not in_use))
    found = share_of(numbers_of(share, known), known)
    assert found == share and found[1][0] is known[1]


@given(replications())
def test_what_a_file_says_is_read(replication: Replication) -> None:
    assert replication_of(json.loads(json.dumps(plain_of(replication))), EVEN) == replication


@given(replications())
def test_the_price_is_of_what_is_told(replication: Replication) -> None:
    assert told_bytes(replication) == numbers_of(((replication, True),), [Replication.none(EVEN, 1)]).nbytes


def test_replicas_for_rows_of_their_own_ranks_take_few_bytes() -> None:
    local = Replication.local(EVEN, [[2], [4], [0]])
    assert numbers_of(((local, True),), [Replication.none(EVEN, 1)]).nbytes == 4 * (3 + 3)
    assert not numbers_of((), []).size
