"""The loss on held-out text where not every batch has something to predict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.config import ConfigError
from penstock.train.measuring import evaluate
from tests.train.test_trainer import trainer


@pytest.mark.slow
@pytest.mark.usefixtures("joined")
def test_a_batch_without_a_label_does_not_count(tmp_path: Path) -> None:
    """As of documents of one token each, where they are kept apart."""
    run = trainer(tmp_path)
    (some,) = run.source.stream.held_out_batches(1)
    none = replace(some, labels_BL=torch.full_like(some.labels_BL, -100))
    expected = evaluate(run.stack, [some])
    found = evaluate(run.stack, [some, none])
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.noise is None
    with pytest.raises(ConfigError, match="no token is to be predicted in 2 batches of held-out text"):
        evaluate(run.stack, [none, none])
