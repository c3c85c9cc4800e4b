"""What a checkpoint keeps of bounds of rows: the same bounds again, and damage where it is anything else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.runtime.bounds import Passes, RowBounds
from penstock.train.storage.bounded import BOUNDED, bound_again, read_bounds, write_bounds
from penstock.train.storage.files import DamagedError
from tests.runtime.test_bounds import bounded
from tests.support.parity import stack_of
from tests.support.ranks import Pools

STEP = bounded("")


def written(rank: int, folder: Path, differs: bool) -> tuple[bool, bool]:
    """Whether bounds that were written are used, and are those of the stack that wrote them; and nobody's
    where one rank has read another file. differs: it has."""
    before, after = stack_of(rank, STEP), stack_of(rank, STEP)
    assert isinstance(before.bounds, RowBounds) and isinstance(after.bounds, RowBounds)
    own = folder / str(rank)
    own.mkdir()
    positions = sum(order.num_experts for order in before.bounds.orders)
    for most in range(40 + differs * rank):
        before.bounds.history(Passes(2, True)).add(np.arange(positions) + most)
        before.bounds.history(Passes(1, False)).add(np.arange(positions))
    write_bounds(own, before)
    used = bound_again(after, read_bounds(own, after))
    own_bounds, others = (
        {kind: history.rows_X.tolist() for kind, history in bounds.histories.items()}
        for bounds in (after.bounds, before.bounds)
    )
    return used, own_bounds == others


@pytest.mark.parametrize("differs", [False, True])
def test_bounds_are_used_again_if_all_ranks_have_the_same(
    ranks: Pools, tmp_path: Path, differs: bool
) -> None:
    assert ranks(2).run(written, tmp_path, differs) == [(not differs, not differs)] * 2


PASSES = '{"passes": [{"microbatches": 1, "training": true, "wanted": [[%s]]}]}'


@pytest.mark.parametrize(
    "text",
    ["{}", "[", '{"passes": [[]]}', '{"passes": 3}', PASSES % "-1", PASSES % "1.5", PASSES % "9e99",
     PASSES % "1, [2]", PASSES.replace("true", "1") % "1", PASSES.replace("[[%s]]", "4")],
)  # fmt: skip
def test_nonsense_is_damage(text: str, tmp_path: Path) -> None:
    stack = stack_of(0, replace(STEP, world_size=1))
    (tmp_path / BOUNDED).write_text(text)
    with pytest.raises(DamagedError, match=BOUNDED):
        read_bounds(tmp_path, stack)


def test_bounds_of_other_experts_are_not_used(tmp_path: Path) -> None:
    stack = stack_of(0, replace(STEP, world_size=1))
    (tmp_path / BOUNDED).write_text(PASSES % "1, 2, 3")
    assert read_bounds(tmp_path, stack) is None
