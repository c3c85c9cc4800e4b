"""What was learnt of samples goes into checkpoints: where they live later does not depend on a restart."""

from __future__ import annotations

from pathlib import Path

from penstock.moe.sample_moves import SampleTable
from penstock.placement import Hosting
from penstock.runtime import PipelinedStack
from penstock.train.storage.learnt import FOLLOWING, learnt
from penstock.workloads import Counts
from tests.runtime.test_guests_between_steps import checkpoints
from tests.runtime.test_sample_moves import case
from tests.support.parity import batch_of, stack_of
from tests.support.placers import Eager
from tests.support.ranks import Pools

FOUND: list[tuple[list[list[int]], list[int]]] = []


class Noting(Eager):
    """Remembers what samples were expected to want, and the homes that they got."""

    def homes(self, table: SampleTable, following: Hosting | None, moved_rows: int) -> Counts:
        found = super().homes(table, following, moved_rows)
        FOUND.append((table.expected_IE.tolist(), found.tolist()))
        return found


def homes_again(rank: int, folder: Path) -> tuple[bool, bool]:
    """Whether a run that goes on expects what it would have expected, and one that begins does not."""
    step = case(4, "sequential", placer=Noting(), prediction="conditional")
    tokens, labels = (whole[step.mine(rank)] for whole in batch_of(step))
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
    return [name for name in learns._state() if name.startswith(FOLLOWING)], not learnt(other.stack)


def test_a_run_goes_on_without_it(ranks: Pools, tmp_path: Path) -> None:
    for names, nothing in ranks(2).run(kept_without, tmp_path):
        assert len(names) == 2 and nothing
