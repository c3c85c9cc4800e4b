"""A model that is changed where ranks share parameters: taken up part by part, or refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.runtime.test_surgery import CASE
from tests.support.joining import joined
from tests.support.parity import check_close
from tests.support.ranks import Pools
from tests.support.surgery import operated, operated_before, refused

pytestmark = pytest.mark.slow
SHARED = replace(
    CASE, mp_size=2, ep_size=1, esp_size=2, batch=4, model=replace(CASE.model, vocab_size=12), double=True
)


@pytest.mark.parametrize("name", ["float32", "assigned state", "swapped blocks", "compiled block", "hook"])
def test_what_leaves_parts_as_they_are_is_taken_up(ranks: Pools, name: str) -> None:
    results, wanted = ranks(2).run(operated, SHARED, name), operated_before(SHARED, name)
    tolerance = 1e-5 if name == "float32" else 1e-10
    assert len({result.norm for result in results}) == 1
    assert results[0].loss == pytest.approx(wanted.loss, rel=tolerance)
    assert results[0].norm == pytest.approx(wanted.norm, rel=tolerance)
    found = joined((result.gradients, result.parts) for result in results)
    assert found.keys() == wanted.gradients.keys()
    for key, gradient in found.items():
        check_close(gradient, wanted.gradients[key], tolerance, key)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("head", r"output.weight is [12, 8], and should be one of 2 parts [6, 8] of a parameter [12, 8]"),
        ("vocabulary", r"token_embedding.weight is [17, 8], and should be one of 2 parts [6, 8]"),
        ("LoRA", r"attention.qkv.weight is gone, and was one of 2 parts [12, 8] of a parameter [24, 8]"),
        ("weight norm", r"attention.out.weight is gone, and was one of 2 parts [8, 4]"),
    ],
)
def test_what_does_not_is_refused_on_all_ranks(ranks: Pools, name: str, words: str) -> None:
    for text in ranks(2).run(refused, SHARED, name):
        assert words in text and "Keep its name and shape" in text
