"""Models that are judged on a text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from penstock.adapt import asking
from penstock.adapt.asking import ByteWords, Opened, judge
from tests.support.adapted import small

LENGTH, VOCABULARY = 8, 256
TEXT = "The network is slow, so it works while devices compute."


@pytest.mark.parametrize(("most", "windows"), [(3, 3), (0.5, 1), (100, 6)])
def test_logits_of_few_windows_are_held_at_once(
    monkeypatch: pytest.MonkeyPatch, most: float, windows: int
) -> None:
    """As many as fit, at least one; the loss is that of all of them."""
    monkeypatch.setattr(asking, "LOGITS_AT_ONCE", int(most * LENGTH * VOCABULARY))
    monkeypatch.setattr(asking, "TOKENS_AT_ONCE", 5)
    model, seen = small("mixtral", vocab_size=VOCABULARY).eval(), []

    def note(module: Any, given: Any, named: dict[str, Any]) -> None:
        del module, given
        seen.append(len(named["input_ids"]))

    model.register_forward_pre_hook(note, with_kwargs=True)
    found = judge(Opened(model, ByteWords()), TEXT, LENGTH)
    assert max(seen) == windows
    tokens = torch.tensor(list(TEXT.encode()))
    total = 0.0
    for first in range(0, len(tokens) - 1, LENGTH):
        given, wanted = tokens[first : first + LENGTH], tokens[first + 1 : first + LENGTH + 1]
        with torch.no_grad():
            logits = model(input_ids=given[None, : len(wanted)]).logits[0].double()
        total += F.cross_entropy(logits, wanted, reduction="sum").item()
    assert found.loss == pytest.approx(total / (len(tokens) - 1), rel=1e-5)
    assert found.tokens == len(TEXT) - 1
