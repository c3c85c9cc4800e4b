"""The table of features and families in the documentation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from penstock.adapt import FAMILIES
from tests.support.families_table import table

PAGE = Path(__file__).parents[2] / "docs/features.md"


def test_the_page_has_the_table_of_the_register() -> None:
    """Make it anew with `print(table(FAMILIES))`, where `penstock.adapt` is imported."""
    assert table(FAMILIES) in PAGE.read_text(encoding="utf-8")


def test_a_family_that_is_registered_appears_with_its_reasons() -> None:
    own = dataclasses.replace(FAMILIES["dbrx"], name="own", uncut="its heads are knotted")
    rows = table({**FAMILIES, "own": own}).splitlines()
    (row,) = [row for row in rows if row.startswith("| `own` |")]
    number = next(row.split(".")[0] for row in rows if row.endswith("its heads are knotted"))
    assert f"no ({number})" in row and row.count("no (") == 3
