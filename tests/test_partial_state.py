"""A mark in the state dict of a module: it survives what states go through, and is checked when they load."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from penstock.partial_state import KEY, ShareError, mark_share, without_marks


def layer(share: str) -> nn.Module:
    """Two modules, of which the second is a share."""
    experts = nn.Linear(2, 2)
    mark_share(experts, share)
    return nn.ModuleDict({"gate": nn.Linear(2, 2), "experts": experts})


def test_a_mark_survives_what_a_state_goes_through(tmp_path: Path) -> None:
    state = layer("experts 1, 3, 6 of 8").state_dict()
    torch.save(state, tmp_path / "state.pt")
    read = torch.load(tmp_path / "state.pt", weights_only=True)
    assert type(read[f"experts.{KEY}"]) is Tensor
    changed: tuple[Callable[[Tensor], Tensor], ...] = (
        torch.clone,
        Tensor.bfloat16,
        Tensor.half,
        Tensor.float,
    )
    for change in changed:
        layer("experts 1, 3, 6 of 8").load_state_dict({name: change(each) for name, each in read.items()})
    for other in (
        state,
        copy.deepcopy(state),
        read,
        {**state, f"experts.{KEY}": state[f"experts.{KEY}"] + 1},
    ):
        with pytest.raises(ShareError):
            layer("experts 4 to 7 of 8").load_state_dict(other)


def test_a_copy_is_marked_and_checked_as_the_original_is() -> None:
    first = layer("experts 0 to 3 of 8")
    mark_share(first.get_submodule("experts"), "experts 0 to 3 of 8")  # a second time
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert other.state_dict().keys() == first.state_dict().keys()
        other.load_state_dict(first.state_dict())
        with pytest.raises(ShareError):
            other.load_state_dict(layer("experts 4 to 7 of 8").state_dict(), strict=False)


def test_what_is_no_share_is_loaded_without_a_mark() -> None:
    first = layer("experts 0 to 3 of 8")
    gate = {name: each + 1 for name, each in first.state_dict().items() if "gate" in name}
    first.load_state_dict(gate, strict=False)
    assert torch.equal(first.get_parameter("gate.weight"), gate["gate.weight"])
    whole = without_marks(first.state_dict())
    assert whole.keys() == {name for name, _ in first.named_parameters()}
    with pytest.raises(ShareError):
        first.load_state_dict(whole)
    with pytest.raises(RuntimeError, match=KEY):  # a model that is whole knows no share
        nn.ModuleDict({"gate": nn.Linear(2, 2), "experts": nn.Linear(2, 2)}).load_state_dict(
            first.state_dict()
        )
