"""What a cluster file says of the machine that it was measured on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from penstock.autotune.profile.sample import memory_bytes
from penstock.topology import Control
from penstock.train.assemble import host_bytes
from tests.support.ranks import Pools, RankPool

GROUPS = Path("/sys/fs/cgroup/memory/penstock-test"), Path("/sys/fs/cgroup/penstock-test")
"""A control group of version 1, and one of version 2."""
LIMITS = "memory.limit_in_bytes", "memory.max"

QUARTER_BYTES = host_bytes() // 4 >> 20 << 20
"""Of what we have, in whole pages: a limit is rounded to them."""

CPU = torch.device("cpu")


@pytest.fixture
def quarter() -> Iterator[Path]:
    """A group in which processes have so much."""
    for folder in GROUPS:
        with suppress(OSError):
            folder.mkdir()
            try:
                limit = next(file for name in LIMITS if (file := folder / name).exists())
                limit.write_text(str(QUARTER_BYTES))
                yield folder
                return
            except StopIteration:
                continue
            finally:
                folder.rmdir()
    pytest.skip("needs root and control groups of memory that can be written")


def memory_of(rank: int, world_size: int, group: Path | None) -> int:
    if rank == world_size - 1 and group is not None:
        (group / "cgroup.procs").write_text("0")
    return memory_bytes(Control(rank, world_size), CPU)


def test_ranks_share_what_the_machine_or_its_container_allows(ranks: Pools) -> None:
    assert memory_of(0, 1, None) == host_bytes()
    assert ranks(2).run(memory_of, 2, None) == [host_bytes() // 2] * 2


@pytest.mark.slow
def test_a_plan_knows_the_least_that_a_container_gives_any_rank(quarter: Path) -> None:
    pool = RankPool(2)
    try:
        assert pool.run(memory_of, 2, quarter) == [QUARTER_BYTES // 2] * 2
    finally:
        pool.close()
