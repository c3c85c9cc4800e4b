"""ARCHITECTURE.md: short, with tables that say what is there, and files that exist."""

from __future__ import annotations

import re

import pytest

from tests.architecture import (
    PAGE,
    ROOT,
    SOURCE,
    TABLE,
    TABLES,
    batch_table,
    by_hand,
    dependencies,
    files_of_a_batch,
)
from tests.support.ranks import Pools

TEXT = PAGE.read_text(encoding="utf-8")
AS_WRITTEN = {found[2]: found[0] for found in TABLE.finditer(TEXT)}


def test_what_is_written_by_hand_can_be_read_in_ten_minutes() -> None:
    assert 50 < len(by_hand(TEXT)) <= 150


@pytest.mark.parametrize("name", [name for name in TABLES if name != "batch"])
def test_tables_are_as_they_would_be_made_now(name: str) -> None:
    assert f"\n{TABLES[name]()}\n" in AS_WRITTEN[name], "run python -m tests.architecture"


@pytest.mark.slow
def test_one_batch_passes_the_files_that_are_listed(ranks: Pools) -> None:
    found = batch_table(ranks(2).run(files_of_a_batch)[0])
    assert f"\n{found}\n" in AS_WRITTEN["batch"], "run python -m tests.architecture"


def test_every_file_that_is_named_is_there() -> None:
    names = set(re.findall(r"`([\w/]+\.(?:py|md|csv))[`:]", "\n".join(by_hand(TEXT))))
    there = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")}
    assert len(names) > 30
    assert [name for name in sorted(names) if name not in there and not (ROOT / name).exists()] == []


def test_every_dependency_says_what_it_is_for() -> None:
    found = list(dependencies())
    assert len(found) > 20
    assert [package for package, _, why in found if len(why.split()) < (1 if package == "ruff" else 2)] == []
