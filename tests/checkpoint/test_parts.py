"""Parts of tensors: every run of numbers is cut into boxes, which together are the run and nothing else."""

from __future__ import annotations

import time
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.checkpoint.storage import Dealing, Part, State, together
from penstock.sharding import Sharding, StackedSharding, boxes_of
from penstock.topology import Control
from tests.support.ranks import Pools

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_are_the_run_in_its_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numbers = prod(shape)
    start = data.draw(st.integers(0, numbers))
    stop = data.draw(st.integers(start, numbers))
    whole = torch.arange(numbers).view(shape)
    found = [part_of(whole, *box).reshape(-1) for box in boxes_of(shape, start, stop)]
    assert torch.cat([whole.view(-1)[:0], *found]).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def part_of(whole: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...] | torch.Size) -> Tensor:
    return whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]


SHARDINGS: list[dict[str, Any]] = [
    {"dim": 0, "shape": (8, 3)},
    {"dim": 1, "shape": (3, 8)},
    {"dim": 1, "shape": (12, 5), "view": (3, 4, 5)},
    {"dim": 1, "shape": (12,), "view": (3, 4)},
    {"dim": 2, "shape": (3, 12), "view": (3, 3, 4)},
]


def cuts_of(sharding: dict[str, Any], stacked: bool) -> list[Sharding]:
    """The parts of four ranks; stacked: and those of four others, which have other experts."""
    cuts = [Sharding.along(axes=("tp",), index=index, count=4, **sharding) for index in range(4)]
    return [StackedSharding.of(cut, 3, 6, place) for place in range(2) for cut in cuts] if stacked else cuts


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("owners", [1, 3])
def test_parts_of_all_ranks_fill_the_whole(sharding: dict[str, Any], stacked: bool, owners: int) -> None:
    """Ranks that share a tensor, and others that each own a run of every part, written through the boxes."""
    cuts = cuts_of(sharding, stacked)
    shape = cuts[0].shape
    wanted, filled = torch.arange(prod(shape)).view(shape), torch.full(shape, -1)
    assert torch.equal(cuts[0].join([cut.part(wanted) for cut in cuts]), wanted)
    for cut in cuts:
        local = cut.part(wanted).clone()
        assert tuple(local.shape) == cut.part_shape
        ends = [len(local.view(-1)) * place // owners for place in range(owners + 1)]
        for begin, end in pairwise(ends):
            run = local.view(-1)[begin:end]
            part = Part.of(local, cut) if owners == 1 else Part.of_runs([(begin, run)], local, cut)
            assert part.shape == wanted.shape
            for offsets, box in part.boxes.items():
                place = part_of(filled, offsets, box.shape)
                assert (place == -1).all(), "no two boxes overlap"
                place.copy_(box)
                box.zero_()
        assert not local.any(), "boxes are views of the part"
    assert torch.equal(filled, wanted)


def dealt(rank: int) -> list[list[str]]:
    """What a rank writes of whole and of shared tensors, twice, and once more after one has changed."""
    dealing = Dealing(Control(rank, 2))
    rows = Sharding.along(0, (4, 3), ("tp",), rank, 2)
    state: State = {name: Part.of(torch.ones(6)) for name in ("a", "b")}
    state |= {"shared": Part.of(torch.ones(2, 3), rows), f"own{rank}": Part.of(torch.ones(()))}
    found = [[name for name, _ in dealing.deal(state, "dealing")] for _ in range(2)]
    del state["a"]
    return [*found, [name for name, _ in dealing.deal(state, "dealing")]]


@pytest.mark.slow
def test_every_box_is_written_by_one_rank(ranks: Pools) -> None:
    first, second = ranks(2).run(dealt)
    for one, other, whole in zip(first, second, (["a", "b"], ["a", "b"], ["b"]), strict=True):
        assert sorted(one + other) == sorted([*whole, "own0", "own1", "shared", "shared"])
        assert "shared" in one and "shared" in other


def with_a_hole(rank: int) -> str:
    rows = Sharding.along(0, (6, 3), ("tp",), rank, 3)
    try:
        Dealing(Control(rank, 2)).deal({"shared": Part.of(torch.ones(2, 3), rows)}, "dealing")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_parts_that_are_not_the_whole_are_refused(ranks: Pools) -> None:
    for said in ranks(2).run(with_a_hole):
        assert "key:shared invalid fill tensor-volume: 18 chunks-volume: 12" in said


def write_slowly(rank: int) -> None:
    control = Control(rank, 2)
    control.barrier("meeting")
    with control.waiting(0.5):
        together(control, "writing", lambda: time.sleep(1.5), rank=0)  # noqa: TID251 - files that are slow to write


def test_ranks_wait_for_files_longer_than_for_each_other(ranks: Pools) -> None:
    ranks(2).run(write_slowly)
