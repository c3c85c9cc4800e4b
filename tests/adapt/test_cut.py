"""Calls of a scheduled model's parts, outside of its steps."""

from __future__ import annotations

import pytest
import torch

import penstock
from tests.support.adapted import Batch, small
from tests.support.ranks import Pools


def ask_for_gradients(rank: int, world: int) -> list[str]:
    """What is said where the decoder itself is asked, with experts spread and on every rank."""
    given, said = Batch().inputs(rank, rank + 1), []
    for ep_size in (world, 1):
        model = penstock.parallelize(small("mixtral"), ep_size=ep_size, plan="flowmoe")
        with pytest.raises(ValueError) as caught:
            model.model(input_ids=given["input_ids"])
        said.append(str(caught.value))
        with torch.no_grad():
            hidden_BLM = model.model(input_ids=given["input_ids"]).last_hidden_state
        assert not hidden_BLM.requires_grad
        found = model.eval()(**given)
        assert not found.logits.requires_grad
        with pytest.raises(ValueError, match=r"evaluation mode.*model\.train\(\)"):
            found.loss.backward()
    return said


@pytest.mark.slow
def test_a_loss_of_ones_own_would_get_no_gradients(ranks: Pools) -> None:
    for said in ranks(2).run(ask_for_gradients, 2):
        assert all("outside of a training step" in each and "labels=" in each for each in said)


def test_on_one_rank_a_loss_of_ones_own_is_as_before() -> None:
    model = penstock.parallelize(small("mixtral"))
    model.model(input_ids=Batch().inputs()["input_ids"]).last_hidden_state.mean().backward()
    assert model.model.layers[0].mlp.experts.down_proj.grad is not None
