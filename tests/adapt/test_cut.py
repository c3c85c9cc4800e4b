"""Calls of a scheduled model's parts, outside of its steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

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


def hidden(model: Any, ids: Tensor) -> Tensor:
    """Hidden states after the decoder, by its own call."""
    found: Tensor = model.model(input_ids=ids).last_hidden_state
    return found


def noted(model: Any, ids: Tensor) -> Tensor:
    """Hidden states that the model itself returns in evaluation."""
    found: Tensor = model.eval()(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    return found


def train_heads(rank: int, world: int, adapted: bool) -> list[str]:
    """What is said where a head is trained by a loss outside of steps, in a frozen model.

    adapted: the head is a copy that peft trains, and the model is a copy, too.
    """
    ids = Batch().inputs(rank, rank + 1)["input_ids"]
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    model.requires_grad_(False)
    if adapted:
        get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
        model.model.requires_grad_(False)
        model = copy.deepcopy(model)
    else:
        model.lm_head.requires_grad_(True)
    model.critic = torch.nn.Linear(32, 1)
    own, said = torch.nn.Linear(32, 1), []
    for head in (model.lm_head, model.critic, own):
        with pytest.raises(ValueError) as caught:
            head(hidden(model.train(), ids)).mean().backward()
        said.append(str(caught.value))
    with torch.no_grad():
        given = hidden(model, ids)
        model.lm_head(given)
    for head, states in ((model.lm_head, given), (model.critic, given), (model.lm_head, noted(model, ids))):
        with pytest.raises(ValueError) as caught:
            head(states).mean().backward()
        said.append(str(caught.value))
    own(given).mean().backward()
    assert model.critic.weight.grad is None
    model.requires_grad_(True)
    with pytest.raises(ValueError) as caught:
        model.get_input_embeddings()(ids).mean().backward()
    model.train()(**Batch().inputs(rank, rank + 1)).loss.backward()
    return [*said, str(caught.value)]


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
def test_a_head_that_is_trained_outside_of_steps_is_refused(ranks: Pools, adapted: bool) -> None:
    """Its gradients would stay local, whatever its hidden states come from; steps go on."""
    for said in ranks(2).run(train_heads, 2, adapted):
        assert len(said) == 7 and all("outside of a training step" in each for each in said)
        for each, name in zip(said[3:], ("lm_head", "critic", "lm_head", "model.embed_tokens"), strict=True):
            assert each.startswith(f"{name} was called")


def test_on_one_rank_a_loss_of_ones_own_is_as_before() -> None:
    model = penstock.parallelize(small("mixtral"))
    model.model(input_ids=Batch().inputs()["input_ids"]).last_hidden_state.mean().backward()
    assert model.model.layers[0].mlp.experts.down_proj.grad is not None
    model.lm_head(noted(model, Batch().inputs()["input_ids"])).mean().backward()
    assert model.lm_head.weight.grad is not None
