"""Fingerprints of values: equal where all bits are, other ones where a number or its place differs."""

from __future__ import annotations

from itertools import count, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.mesh import Group
from penstock.runtime.fingerprints import Replicated, buffers_of, fingerprint, is_due, weight_among
from penstock.topology import Layout

CPU = torch.device("cpu")
SECOND = Layout(world_size=2, ep_size=2, rank=1)
TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def print_of(*tensors: Tensor) -> float:
    named = {str(number): tensor for number, tensor in enumerate(tensors)}
    return float(fingerprint([Replicated(Group.WORLD, named)], SECOND, CPU))


def test_the_first_steps_are_compared_soon() -> None:
    assert list(islice(filter(is_due, count()), 9)) == [1, 2, 4, 8, 16, 32, 64, 128, 192]


@pytest.mark.parametrize("dtype", TYPES)
def test_where_a_tensor_begins_in_its_memory_does_not_count(dtype: torch.dtype) -> None:
    tensor = torch.arange(300).remainder(2).to(dtype)[1:]
    assert print_of(tensor) == print_of(tensor.clone())


@given(st.integers(1, 300), st.sampled_from(TYPES), st.data())
def test_any_number_counts(size: int, dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.arange(size).remainder(2).to(dtype)
    other = tensor.clone()
    place = data.draw(st.integers(0, size - 1))
    other[place] = 1 - int(bool(tensor[place]))
    assert print_of(tensor) == print_of(tensor.clone())
    assert print_of(tensor) != print_of(other)


@pytest.mark.parametrize("size", [4, 64, 1000])
def test_the_place_of_a_number_and_of_a_tensor_count(size: int) -> None:
    first, second = torch.randn(size, 3), torch.randn(size, 3)
    assert print_of(first, second) != print_of(second, first)
    assert print_of(first) != print_of(first.flip(0))
    assert print_of(first) == print_of(first.t().contiguous().t())


def test_what_is_no_plain_tensor_is_left_out() -> None:
    sparse = torch.eye(3).to_sparse()
    assert print_of(sparse) == print_of() == 0
    assert print_of(torch.zeros(0, 3)) == 0


@given(st.sampled_from([(8, 2, 2, 2), (16, 4, 2, 2), (6, 1, 3, 1)]), st.data())
def test_fingerprints_cancel_within_groups_alone(
    sizes: tuple[int, int, int, int], data: st.DataObject
) -> None:
    """Of groups with values of their own, on every layout."""
    world, tp, ep, etp = sizes
    layouts = [
        Layout(world_size=world, rank=rank, tp_size=tp, ep_size=ep, etp_size=etp) for rank in range(world)
    ]
    axes = data.draw(st.sampled_from([Group.WORLD, Group.DATA, Group.EXPERT_DATA]))
    values = [torch.full((5,), float(each.mesh.group(each.rank, axes))) for each in layouts]

    def total() -> float:
        pairs = zip(values, layouts, strict=True)
        return sum(float(fingerprint([Replicated(axes, {"w": v})], each, CPU)) for v, each in pairs)

    assert total() == 0
    odd = data.draw(st.integers(0, world - 1))
    values[odd] = values[odd] - 1
    assert (total() == 0) is (weight_among(axes, layouts[odd]) == 0), "a rank alone may have what it likes"


def test_buffers_that_are_saved_are_compared_but_for_statistics_and_experts() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 3))
    for name, module in model.named_modules():
        module.register_buffer(f"own{name}", torch.ones(1))
    model[1].register_buffer("scratch", torch.ones(1), persistent=False)
    assert buffers_of(model, [model[2]], CPU).keys() == {"own", "1.own1"}
