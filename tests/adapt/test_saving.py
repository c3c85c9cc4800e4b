"""What is saved has the names that transformers looks for, and all experts under each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.adapt.saving import check_names
from penstock.families.weights import stored_tensors
from penstock.topology import Control
from tests.support.adapted import small
from tests.support.ranks import Pools

ONE, OTHER = (f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(2))


def sharing() -> Any:
    """A model with a second layer that has a parameter of its experts from the first."""
    model = small("gpt_oss")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj
    return model


def tied(model: Any) -> Any:
    """A model that says so: what is shared is then saved once."""
    model._tied_weights_keys = {**type(model)._tied_weights_keys, OTHER: ONE}
    return model


def save_what_layers_share(rank: int, world: int, folder: str) -> None:
    del rank
    model = penstock.parallelize(sharing(), ep_size=world, plan="flowmoe")
    with pytest.raises(RuntimeError, match=r"shared tensors|rank 0 could not save"):
        model.save_pretrained(folder)
    tied(model).save_pretrained(folder)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: stored[...] for name, stored in stored_tensors(folder).items()}


@pytest.mark.slow
def test_experts_that_layers_share_are_saved_as_transformers_does(ranks: Pools, tmp_path: Path) -> None:
    """Which refuses them, unless the model says that they are shared."""
    ranks(2).run(save_what_layers_share, 2, str(tmp_path / "spread"))
    tied(sharing()).save_pretrained(tmp_path / "plain")
    found, wanted = (tensors_of(tmp_path / name) for name in ("spread", "plain"))
    assert found.keys() == wanted.keys() and ONE in found and OTHER not in found
    assert all(tensor.equal(wanted[name]) for name, tensor in found.items())


def counted(rank: int) -> list[list[int]]:
    """Parameters of spread models by their own count: all, trained ones, and all but embeddings."""
    del rank
    layouts: list[dict[str, Any]] = [{"ep_size": 2}, {"etp_size": 2}]
    return [counts_of(penstock.parallelize(frozen_in_part(), plan="flowmoe", **each)) for each in layouts]


def counts_of(model: Any) -> list[int]:
    return [model.num_parameters(), model.num_parameters(True), model.num_parameters(exclude_embeddings=True)]


def frozen_in_part() -> Any:
    """A model with a frozen weight of experts, and one that is frozen and of no experts."""
    model = small("gpt_oss")
    model.model.layers[0].mlp.experts.down_proj.requires_grad_(False)
    model.lm_head.weight.requires_grad_(False)
    return model


def test_parameters_are_counted_as_those_of_the_whole_model(ranks: Pools) -> None:
    assert ranks(2).run(counted) == [[counts_of(frozen_in_part())] * 2] * 2


def test_what_transformers_would_not_read_is_refused(tmp_path: Path) -> None:
    model = penstock.parallelize(small("mixtral"))
    with pytest.raises(ValueError, match=r"missing lm_head\.weight, .* and \d+ more; unexpected other\."):
        model.save_pretrained(tmp_path, state_dict={"other": torch.ones(1)})
    model.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"missing nothing; unexpected adapter\.bias, .*merge_and_unload"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_class_that_needs_more_than_its_configuration_is_saved_without_comparing() -> None:
    """It fails where its configuration alone would build it: after training, nothing may be lost by that."""
    model = penstock.parallelize(small("mixtral"))

    def built(config: object) -> None:
        del config
        raise TypeError("missing 1 required argument")

    with pytest.warns(UserWarning, match="names of what is saved were not compared.*missing 1 required"):
        check_names(model, built, Control(0, 1))
