"""What ranks tell each other of guests: read as it was, and little where little was decided."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from penstock.placement import SPLIT, ExpertPlacement, Hosting
from penstock.placing.told import hosting_of, numbers_of, plain_of, share_of, told_bytes
from tests.support.hosted import random_hosting

EVEN = ExpertPlacement.even(6, 3)


def hostings() -> st.SearchStrategy[Hosting]:
    """Some with a limit."""

    def drawn(seed: int, limit: int | None) -> Hosting:
        return replace(random_hosting(EVEN, 1 + seed % 2, Random(seed)), limit=limit)

    return st.builds(drawn, st.integers(0, 2**32 - 1), st.none() | st.just(SPLIT + 1))


@given(st.integers(0, 2**32 - 1), st.integers(1, 2), st.booleans())
def test_what_is_told_is_read(seed: int, slots: int, hosted: bool) -> None:
    random = Random(seed)
    known = [Hosting.none(EVEN, slots), random_hosting(EVEN, slots, random)]
    share = ((random_hosting(EVEN, slots, random), hosted), (known[1], not hosted))
    found = share_of(numbers_of(share, known), known)
    assert found == share and found[1][0] is known[1]


@given(hostings())
def test_what_a_file_says_is_read(hosting: Hosting) -> None:
    assert hosting_of(json.loads(json.dumps(plain_of(hosting))), EVEN) == hosting


@given(hostings())
def test_the_price_is_of_what_is_told(hosting: Hosting) -> None:
    assert told_bytes(hosting) == numbers_of(((hosting, True),), [Hosting.none(EVEN, 1)]).nbytes


def test_guests_for_rows_of_their_own_ranks_take_few_bytes() -> None:
    local = Hosting.local(EVEN, [[2], [4], [0]])
    assert numbers_of(((local, True),), [Hosting.none(EVEN, 1)]).nbytes == 4 * (3 + 3)
    assert not numbers_of((), []).size
