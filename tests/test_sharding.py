"""Parts of whole parameters: cut, joined, named and marked."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import dataclass
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.mesh import Group
from penstock.sharding import Sharding, mark_shards, sharding_of, shardings_of


@dataclass(frozen=True)
class Cut:
    """A sharding and a whole tensor for it."""

    sharding: Sharding
    whole: torch.Tensor


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Along any dimension of any view that splits or joins the whole's first dimensions."""
    count, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    before = draw(st.lists(st.integers(1, 3), max_size=2))
    after = draw(st.lists(st.integers(1, 3), max_size=2))
    view = (*before, count * width, *after)
    shape = (prod(view[: len(before) + 1]), *after) if draw(st.booleans()) else view
    sharding = Sharding(
        axes=Group.TENSOR,
        shape=shape,
        view=view,
        dim=len(before),
        index=draw(st.integers(0, count - 1)),
        count=count,
    )
    whole = torch.arange(prod(shape), dtype=draw(st.sampled_from([torch.int64, torch.float32])))
    return Cut(sharding, whole.view(shape))


@given(cuts())
def test_the_parts_together_are_the_whole(cut: Cut) -> None:
    parts = [cut.sharding.part_of(cut.whole, index) for index in range(cut.sharding.count)]
    assert all(tuple(part.shape) == cut.sharding.part_shape for part in parts)
    assert torch.equal(cut.sharding.join(parts), cut.whole)
    assert torch.equal(cut.sharding.part(cut.whole), parts[cut.sharding.index])


def test_a_fused_matrix_is_cut_by_heads() -> None:
    """Queries, keys and values of 4 heads of 2 numbers: part 1 of 2 has heads 2 and 3 of all three."""
    whole_QM = torch.arange(24).unsqueeze(1).expand(24, 3)
    sharding = Sharding(axes=Group.TENSOR, shape=(24, 3), view=(3, 8, 3), dim=1, index=1, count=2)
    rows = [*range(4, 8), *range(12, 16), *range(20, 24)]
    assert sharding.part_shape == (12, 3)
    assert sharding.part(whole_QM)[:, 0].tolist() == rows


@pytest.mark.parametrize("wrong", [{"view": (3, 8, 4)}, {"count": 3}, {"index": 2}, {"index": -1}])
def test_what_cannot_be_cut_is_refused(wrong: dict[str, object]) -> None:
    fields = {"axes": Group.TENSOR, "shape": (24, 3), "view": (3, 8, 3), "dim": 1, "index": 1, "count": 2}
    with pytest.raises(AssertionError):
        Sharding(**{**fields, **wrong})  # type: ignore[arg-type]  # the fields have several types


class Half(nn.Linear):
    """A linear map of which this rank has the first half of the outputs."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.shardings = {
            "weight": Sharding.along(0, (4, 3), Group.TENSOR, 0, 2),
            "bias": Sharding.along(0, (4,), Group.TENSOR, 0, 2),
        }


def test_modules_name_their_parts_and_parameters_are_marked() -> None:
    tied = Half()
    model = nn.ModuleDict({"first": tied, "norm": nn.LayerNorm(3), "again": tied})
    assert sorted(shardings_of(model)) == ["again.bias", "again.weight", "first.bias", "first.weight"]
    assert sharding_of(tied.weight) is None, "not yet"
    mark_shards(model)
    assert sharding_of(tied.weight) == tied.shardings["weight"]
    assert sharding_of(model["norm"].weight) is None  # type: ignore[arg-type]  # a parameter
    copied = copy.deepcopy(model)
    assert copied["first"].shardings["bias"] is tied.shardings["bias"]  # type: ignore[index]  # a dictionary


def test_a_marked_parameter_can_be_saved_and_a_module_keeps_what_it_knows() -> None:
    model = Half()
    mark_shards(model)
    file = io.BytesIO()
    torch.save(model.weight, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert torch.equal(read, model.weight) and sharding_of(read) is None
    again = pickle.loads(pickle.dumps(model))
    assert again.shardings == model.shardings


def test_a_part_of_another_shape_or_name_is_refused() -> None:
    model = nn.Sequential(Half())
    mark_shards(model)
    model[0].weight = nn.Parameter(torch.zeros(3, 3))
    wanted = r"0\.weight is \[3, 3\], and should be one of 2 parts \[2, 3\] of a parameter \[4, 3\]"
    with pytest.raises(ValueError, match=wanted):
        mark_shards(model)
    del model[0].weight
    with pytest.raises(ValueError, match=r"0\.weight is gone, and was one of 2 parts"):
        mark_shards(model)


def test_experts_are_stacked_parts() -> None:
    sharding = Sharding.along(1, (3, 4), Group.SHARDS, 0, 2)
    model = nn.ParameterDict({"w_up": torch.zeros(5, 3, 2)})
    vars(model)["shardings"] = {"w_up": sharding}
    mark_shards(model)
    assert sharding_of(model["w_up"]) == sharding
