"""Calls of a scheduled model's parts, outside of its steps."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

import penstock
from penstock.adapt.scheduled import engine_of
from penstock.runtime import ScheduleMismatchError
from tests.support.adapted import DIVISIBLE, Batch, small, without_labels
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow


def ask_for_gradients(rank: int, world: int) -> list[str]:
    """What is said where gradients would stay on this rank."""
    given, said = Batch().inputs(rank, rank + 1), []
    for ep_size in (world, 1):
        model = penstock.parallelize(small("mixtral"), ep_size=ep_size, plan="flowmoe")
        with torch.no_grad():
            hidden_BLM = model.model(input_ids=given["input_ids"]).last_hidden_state
        assert not hidden_BLM.requires_grad
        with pytest.raises(ValueError) as caught:
            model.model.layers[0].mlp(hidden_BLM)
        said.append(str(caught.value))
        found = model.eval()(**given)
        assert not found.logits.requires_grad
        with pytest.raises(ValueError, match=r"evaluation mode.*model\.train\(\)"):
            found.loss.backward()
        model.train()
        one_asks_for_logits = without_labels(given) if rank else given
        with pytest.raises(ValueError, match="different losses"):
            model(**one_asks_for_logits)
    shared = penstock.parallelize(small("qwen3_moe", **DIVISIBLE), tp_size=world, plan="flowmoe")
    with pytest.raises(ValueError, match="were given different samples"):
        shared(given["input_ids"])
    with pytest.raises(
        ValueError, match=f"embeddings of a model with tp_size = {world} were called with grad"
    ):
        shared.get_input_embeddings()(Batch().inputs()["input_ids"])
    return said


def test_what_no_step_sums_is_refused(ranks: Pools) -> None:
    for said in ranks(2).run(ask_for_gradients, 2):
        assert all("outside of a training step" in each and "labels=" in each for each in said)


def go_back_in_another_order(rank: int, world: int) -> str:
    """Two steps of one shape, whose backward passes ranks ask for in different orders."""
    given = Batch().inputs(rank, rank + 1)
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    losses = [model(given["input_ids"]).logits.logsumexp(-1).mean() for _ in range(2)]
    with pytest.raises(ScheduleMismatchError) as caught:
        losses[rank].backward()
    return str(caught.value)


def test_ranks_that_go_back_in_different_orders_are_told(ranks: Pools) -> None:
    for rank, said in enumerate(ranks(2).run(go_back_in_another_order, 2)):
        assert said.startswith(f"rank {rank} begins the backward pass of step {rank + 1}")


def go_on(rank: int, world: int) -> list[str]:
    """Rank 1 goes on to other passes, while rank 0 goes back; both hear of it without waiting in vain."""
    given = Batch().inputs(rank, rank + 1)
    tokens_BL, said = given["input_ids"], []
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe", timeout_s=3600)
    for another in (
        lambda: model(tokens_BL),
        lambda: model(**given),
        lambda: model.eval()(tokens_BL),
        lambda: model.generate(tokens_BL, max_new_tokens=2),
        torch.no_grad()(lambda: model(tokens_BL)),
    ):
        loss = model.train()(tokens_BL).logits.logsumexp(-1).mean()
        with pytest.raises(ScheduleMismatchError) as caught:
            (another if rank else loss.backward)()
        said.append(str(caught.value))
    model(**given).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    return said


def test_a_rank_that_goes_on_while_others_go_back_is_told_at_once(ranks: Pools) -> None:
    others = (
        "the forward pass of step 2 of those without labels",
        "a step with labels",
        *["a pass without gradients"] * 3,
    )
    for rank, said in enumerate(ranks(2).run(go_on, 2)):
        for number, (other, text) in enumerate(zip(others, said, strict=True), 1):
            back = f"the backward pass of step {number} of those without labels"
            first, second = (other, back) if rank else (back, other)
            assert text.startswith(f"rank {rank} begins {first}, and rank {1 - rank} {second}: call"), text


def add_heads(rank: int, world: int) -> list[bool]:
    """Heads that peft has copied, in a copied model, and that replace others, are trained alike."""
    given = Batch().inputs(rank, rank + 1)
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model, alike = copy.deepcopy(model), []
    for head in (model.lm_head, torch.nn.Linear(32, 1)):
        model.critic = head
        model.critic(model.model(given["input_ids"]).last_hidden_state).logsumexp(-1).mean().backward()
        engine_of(model).stack.compare_values()
        grads = [p.grad for p in model.critic.parameters() if p.requires_grad]
        everyone = engine_of(model).stack.machinery.control.gather(grads, "gradients")
        alike += [mine.equal(first) for mine, first in zip(everyone[rank], everyone[0], strict=True)]
    return alike


def test_heads_of_every_origin(ranks: Pools) -> None:
    for alike in ranks(2).run(add_heads, 2):
        assert len(alike) == 3 and all(alike)


def test_on_one_rank_a_loss_of_ones_own_is_as_before() -> None:
    model = penstock.parallelize(small("mixtral"))
    model.model(input_ids=Batch().inputs()["input_ids"]).last_hidden_state.mean().backward()
    assert model.model.layers[0].mlp.experts.down_proj.grad is not None
    states = model.eval()(Batch().inputs()["input_ids"], output_hidden_states=True).hidden_states
    model.lm_head(states[-1]).mean().backward()
    assert model.lm_head.weight.grad is not None
