"""Which text a sample is from is a function of its number."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.order import CYCLE, Dealer

shares = st.lists(st.floats(0.01, 1), min_size=1, max_size=6).map(lambda each: [x / sum(each) for x in each])


@given(shares, st.integers(0, 2**40), st.data())
def test_every_text_has_its_share_and_its_samples_are_counted(
    parts: list[float], seed: int, data: st.DataObject
) -> None:
    numbers = np.arange(2 * CYCLE + 100)
    texts, before = Dealer(parts, seed).deal(numbers)
    for text, share in enumerate(parts):
        assert before[texts == text].tolist() == list(range((texts == text).sum()))
        for cycle in (slice(0, CYCLE), slice(CYCLE, 2 * CYCLE)):
            assert abs((texts[cycle] == text).sum() - share * CYCLE) <= 1
    # whatever was asked before, and however many at once
    some = np.sort(data.draw(st.lists(st.integers(0, numbers.size - 1), min_size=1).map(np.array)))
    asked = Dealer(parts, seed)
    for _ in range(2):
        again, numbered = asked.deal(some)
        assert (again == texts[some]).all() and (numbered == before[some]).all()


@given(shares, st.integers(0, 9), st.data())
def test_until_one_text_has_no_more(parts: list[float], seed: int, data: st.DataObject) -> None:
    counts = [data.draw(st.integers(0, 2000)) for _ in parts]
    count = Dealer(parts, seed).until(counts)
    texts, before = Dealer(parts, seed).deal(np.arange(count + 1))
    assert all(before[place] < counts[texts[place]] for place in range(count))
    assert before[count] == counts[texts[count]]
