"""A rank that computes slowly is named in a run whose plan is fixed: in its log and in its report."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from penstock.cli.report import findings
from penstock.train.run_folder import read_run
from tests.autotune.runs import RANKS, SLOW, run, slow_rank
from tests.support.ranks import Pools
from tests.support.training import Told, folder_of

SETTINGS = ("schedule.refine_after=0", "plan.drift_steps=4", "train.steps=16")


def fixed(ranks: Pools, folder: Path, after: int, *settings: str) -> Told:
    told, other = run(ranks, folder, *SETTINGS, *settings, before=partial(slow_rank, after=after))
    assert other.said == "" and len(set(told.plans)) == 1
    return told


def test_a_rank_that_is_slow_from_the_start(ranks: Pools, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "run", RANKS)
    told = fixed(ranks, folder, 0)
    assert told.said.count(f"computation on rank 1 takes {SLOW:.2f}x as long as on the median rank") == 1
    assert told.summary is not None and "rank 1" in told.summary.to_text()
    assert {each.rank: each.factor for each in told.summary.stragglers} == {1: pytest.approx(SLOW)}
    assert findings(read_run(folder / "run"))["stragglers"] == {"1": pytest.approx(SLOW)}


def test_a_rank_that_becomes_slow(ranks: Pools, tmp_path: Path) -> None:
    told = fixed(ranks, folder_of(tmp_path, "run", RANKS), 8)
    words = " ".join(told.said.split())
    assert "the step time has changed from 100.0 ms to 400.0 ms" in words
    assert f"computation on rank 1 takes {SLOW:.2f}x as long as before" in words


def test_without_a_watch_only_the_end_names_it(ranks: Pools, tmp_path: Path) -> None:
    told = fixed(ranks, folder_of(tmp_path, "run", RANKS), 0, "plan.watch=false")
    assert "as long as" not in told.said
    assert told.summary is not None and [each.rank for each in told.summary.stragglers] == [1]
