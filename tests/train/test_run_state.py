"""What a checkpoint holds beside parameters: bounds of rows, and what was learnt of samples, as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.apportion import Counts
from penstock.checkpoint.folder import DamagedError
from penstock.placement import Replication
from penstock.routing.samples import SampleTable
from penstock.runtime import PipelinedStack
from penstock.runtime.bounds import Passes, RowBounds
from penstock.train.run_state import (
    FOLLOWING,
    DecoderNaming,
    learnt,
    read_steps,
    state_of,
    steps_of,
    take_steps,
)
from tests.runtime.features.expert_replicas.test_between_steps import checkpoints
from tests.runtime.test_bounds import bounded
from tests.support.cases import moving_case as case
from tests.support.parity import own_batch, stack_of
from tests.support.placers import Eager
from tests.support.ranks import Pools

STEP = bounded("")


def written(rank: int, differs: bool) -> tuple[bool, bool]:
    """Whether bounds that were written are used, and are those of the stack that wrote them; and nobody's
    where one rank has read another file. differs: it has."""
    before, after = stack_of(rank, STEP), stack_of(rank, STEP)
    assert isinstance(before.bounds, RowBounds) and isinstance(after.bounds, RowBounds)
    positions = sum(order.num_experts for order in before.bounds.orders)
    for most in range(40 + differs * rank):
        before.bounds.history(Passes(2, True)).add(np.arange(positions) + most)
        before.bounds.history(Passes(1, False)).add(np.arange(positions))
    _, used = take_steps(after, *read_steps(after, steps_of(before)))
    own_bounds, others = (
        {kind: history.rows_X.tolist() for kind, history in bounds.histories.items()}
        for bounds in (after.bounds, before.bounds)
    )
    return used, own_bounds == others


@pytest.mark.parametrize("differs", [False, True])
def test_bounds_are_used_again_if_all_ranks_have_the_same(ranks: Pools, differs: bool) -> None:
    assert ranks(2).run(written, differs) == [(not differs, not differs)] * 2


WANTED = {"microbatches": 1, "training": True}


@pytest.mark.parametrize(
    "bounds",
    [[[]], 3, [{**WANTED, "wanted": 4}], [{**WANTED, "training": 1, "wanted": [[1]]}],
     *([{**WANTED, "wanted": [row]}] for row in ([-1], [1.5], [1 << 60], [1, [2]]))],
)  # fmt: skip
def test_nonsense_is_damage(bounds: object) -> None:
    stack = stack_of(0, replace(STEP, world_size=1))
    with pytest.raises(DamagedError, match="nonsense"):
        read_steps(stack, {"bounds": bounds})


def test_bounds_of_other_experts_are_not_used() -> None:
    stack = stack_of(0, replace(STEP, world_size=1))
    assert read_steps(stack, {"bounds": [{**WANTED, "wanted": [[1, 2, 3]]}]}) == (None, None)
    assert read_steps(stack, None) == (None, None)


# ---- samples that move -------------------------------------------------------------------------------------


FOUND: list[tuple[list[list[int]], list[int]]] = []


class Noting(Eager):
    """Remembers what samples were expected to want, and the homes that they got."""

    def homes(self, table: SampleTable, following: Replication | None, moved_rows: int) -> Counts:
        found = super().homes(table, following, moved_rows)
        FOUND.append((table.expected_IE.tolist(), found.tolist()))
        return found


def homes_again(rank: int, folder: Path) -> tuple[bool, bool]:
    """Whether a run that goes on expects what it would have expected, and one that begins does not."""
    step = case(4, "sequential", placer=Noting(), prediction="conditional")
    tokens, labels = own_batch(rank, step)
    going, fresh, beginning = (stack_of(rank, step) for _ in range(3))

    def found(stack: PipelinedStack) -> list[tuple[list[list[int]], list[int]]]:
        FOUND.clear()
        stack(tokens, labels).backward()
        return list(FOUND)

    found(going)
    checkpoints(fresh, folder).load(checkpoints(going, folder).save(1))
    expected = found(going)
    return found(fresh) == expected, found(beginning) == expected


def test_samples_live_where_they_would_have_lived(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(4).run(homes_again, tmp_path) == [(True, False)] * 4


def kept_without(rank: int, folder: Path) -> tuple[list[str], bool]:
    """What a run keeps that learns, and whether one goes on from it that does not, and the other way."""
    steps = [case(2, "sequential", placer=Noting(), prediction=each) for each in ("conditional", "none")]
    learns, other = (checkpoints(stack_of(rank, step), folder) for step in steps)
    other.load(learns.save(1))
    learns.load(other.save(2))
    return [
        name
        for name in state_of(learns.stack, learns.optimizer, DecoderNaming(learns.stack.model))
        if name.startswith(FOLLOWING)
    ], not learnt(other.stack)


def test_a_run_goes_on_without_it(ranks: Pools, tmp_path: Path) -> None:
    for names, nothing in ranks(2).run(kept_without, tmp_path):
        assert len(names) == 2 and nothing
