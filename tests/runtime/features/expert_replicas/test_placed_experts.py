"""Experts that are not where they are by default: the same step, and the same checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.models.decoder import Block
from penstock.moe import MoELayer, build_layer
from penstock.placement import ExpertPlacement, PlacementError
from tests.support.checkpoints import CASE, check_equal, loaded_by, saved_by
from tests.support.parity import batch_of, stack_of
from tests.support.ranks import Pools


@pytest.mark.slow
@pytest.mark.parametrize("before", [False, True])
def test_a_checkpoint_of_two_ranks_fits_any_placement(ranks: Pools, tmp_path: Path, before: bool) -> None:
    spread = replace(CASE, world_size=2, ep_size=2)
    saved = ranks(2).run(saved_by, replace(spread, scattered=before), tmp_path)
    path = tmp_path / "step-00000002"
    loaded = ranks(2).run(loaded_by, replace(spread, scattered=not before), path)
    check_equal(loaded[0] | loaded[1], saved[0] | saved[1])


# ---- what is refused ---------------------------------------------------------------------------------------


def placed_otherwise(rank: int) -> None:
    """A stack whose ranks have different placements."""
    stack_of(rank, replace(CASE, world_size=2, ep_size=2, scattered=rank == 1))


def test_ranks_with_different_placements_are_refused(ranks: Pools) -> None:
    for text in ranks(2).told(PlacementError, placed_otherwise):
        assert "layer 0: rank 1 has experts placed otherwise than rank 0" in text


def test_a_layer_exchanged_for_one_placed_otherwise_is_refused() -> None:
    stack = stack_of(0, CASE)
    block = stack.parts.parts[1]
    assert isinstance(block, Block)
    block.mlp = layer(ExpertPlacement.of([[1, 0, 3, 2]]))
    with pytest.raises(PlacementError, match="layer 1 was exchanged for one with its experts placed otherwi"):
        stack(*batch_of(CASE))


def layer(placement: ExpertPlacement) -> MoELayer:
    return build_layer(CASE.model.hidden_size, CASE.moe, placement=placement)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ([[0, 1, 2]], "the placement has 3 experts, and the layer has 4"),
        ([[0, 1], [2, 3]], "the placement has 2 ranks, and the layer has 1"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(held: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        layer(ExpertPlacement.of(held))
