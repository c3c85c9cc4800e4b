"""What ranks tell each other of guests: read as it was, and little where little was decided."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from penstock.placement import ExpertPlacement, Hosting
from penstock.runtime.hosting_text import share_of, text_of
from tests.support.hosted import random_hosting

EVEN = ExpertPlacement.even(6, 3)


@given(st.integers(0, 2**32 - 1), st.integers(1, 2), st.booleans())
def test_what_is_told_is_read(seed: int, slots: int, hosted: bool) -> None:
    random = Random(seed)
    known = [Hosting.none(EVEN, slots), random_hosting(EVEN, slots, random)]
    share = ((random_hosting(EVEN, slots, random), hosted), (known[1], not hosted))
    found = share_of(text_of(share, known), known)
    assert found == share and found[1][0] is known[1]


def test_guests_for_rows_of_their_own_ranks_take_few_bytes() -> None:
    local = Hosting.local(EVEN, [[2], [4], [0]])
    assert len(text_of(((local, True),), [Hosting.none(EVEN, 1)])) < 80
    assert text_of((), []) == b"[]"
