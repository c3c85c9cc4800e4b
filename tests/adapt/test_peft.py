"""Adapters of peft on attention: trained by steps, merged and saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftModel

import penstock
from tests.adapt.test_adapters import adapted
from tests.adapt.test_trainer import SAVED_AT, trained
from tests.support.adapted import (
    Batch,
    as_torchrun_starts_it,
    distance,
    grads_of,
    small,
    with_adapters,
    without_labels,
)
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow


def train_adapters(rank: int, world: int, folder: str, adapters_first: bool) -> torch.Tensor:
    """Two steps beside those of the whole model; the merged model's logits."""
    wanted, batch = with_adapters(small("mixtral")), Batch()
    if adapters_first:
        model = with_adapters(small("mixtral"))
        penstock.parallelize(model.get_base_model(), ep_size=world, plan="flowmoe")
    else:
        model = with_adapters(penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe"))
    each = batch.samples // world
    pairs = ((wanted, batch.inputs()), (model, batch.inputs(rank * each, (rank + 1) * each)))
    optimizers = [torch.optim.SGD(adapted.parameters(), lr=0.1) for adapted, _ in pairs]
    for _ in range(2):
        losses = [adapted(**given).loss for adapted, given in pairs]
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
        for loss in losses:
            loss.backward()
        found, expected = grads_of(model), grads_of(wanted)
        assert found.keys() == expected.keys() and all("lora_" in name for name in found)
        assert all(distance(grad, expected[name]) < 1e-5 for name, grad in found.items())
        penstock.clip_grad_norm_(model, 0.5)
        torch.nn.utils.clip_grad_norm_(wanted.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(ValueError, match="merge_and_unload"):
        model.get_base_model().save_pretrained(folder)
    model.merge_and_unload().save_pretrained(folder)
    with torch.no_grad():
        logits: torch.Tensor = wanted.merge_and_unload().eval()(**without_labels(batch.inputs())).logits
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("adapters_first", [False, True])
def test_adapters_on_attention_are_trained(ranks: Pools, tmp_path: Any, adapters_first: bool) -> None:
    expected = ranks(2).run(train_adapters, 2, str(tmp_path), adapters_first)[0]
    with torch.no_grad():
        read = type(small("mixtral")).from_pretrained(tmp_path).eval()
        assert distance(read(**without_labels(Batch().inputs())).logits, expected) < 1e-5


def go_on_with_adapters(rank: int, world: int, folder: str) -> tuple[list[float], list[float]]:
    """Losses after a checkpoint of adapters, as the run went on and as another goes on from there."""
    given = Batch().inputs(2 * rank, 2 * rank + 2)
    model = with_adapters(penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe"))
    optimizer = optimizer_of(model)
    step(model, optimizer, given)
    penstock.save_checkpoint(model, optimizer, folder)
    base = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    again = PeftModel.from_pretrained(base, folder, is_trainable=True)
    other = optimizer_of(again)
    penstock.load_optimizer(again, other, folder)
    pairs = (model, optimizer), (again, other)
    one, two = ([step(*pair, given) for _ in range(2)] for pair in pairs)
    return one, two


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def step(model: Any, optimizer: torch.optim.Optimizer, given: dict[str, torch.Tensor]) -> float:
    loss: torch.Tensor = model(**given).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.slow
def test_adapters_go_on_from_their_checkpoint(ranks: Pools, tmp_path: Any) -> None:
    """Where a whole model lies, it stays: adapters are saved without it."""
    whole = tmp_path / "saved" / "model.safetensors"
    small("mixtral").save_pretrained(whole.parent)
    before = whole.read_bytes()
    for went_on, found in ranks(2).run(go_on_with_adapters, 2, str(whole.parent)):
        assert found == went_on and went_on[1] < went_on[0]
    assert whole.read_bytes() == before and (whole.parent / "adapter_model.safetensors").is_file()


def train_with_trainer(rank: int, world: int, folder: str, resume: str | None) -> list[float]:
    whole = adapted(small("mixtral", initializer_range=0.1))
    model = penstock.parallelize(whole, ep_size=world, plan="flowmoe")
    with as_torchrun_starts_it(rank, world):
        return trained(model, folder, world, resume)


@pytest.mark.slow
def test_the_trainer_trains_and_resumes_adapters(ranks: Pools, tmp_path: Any) -> None:
    """Those of experts, too."""
    whole = adapted(small("mixtral", initializer_range=0.1))
    wanted = trained(whole, str(tmp_path / "plain"), 1)
    for found in ranks(2).run(train_with_trainer, 2, str(tmp_path / "ranks"), None):
        assert found == pytest.approx(wanted, rel=1e-4)
    saved = str(tmp_path / "ranks" / f"checkpoint-{SAVED_AT}")
    for found in ranks(2).run(train_with_trainer, 2, str(tmp_path / "again"), saved):
        assert found == pytest.approx(wanted, rel=1e-4)
