"""A measured file warns on machines that it was not measured on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cost.cluster_file import mismatch
from penstock.cost.clusters import find_cluster
from tests.cost.test_clusters import HERE, MEASURED


def test_the_machine_it_was_measured_on_fits_on_any_day() -> None:
    assert mismatch(MEASURED, HERE, ranks=2, nodes=2) is None
    assert mismatch(MEASURED, replace(HERE, date="2030-01-01"), ranks=2, nodes=2) is None


@pytest.mark.parametrize("key", ["host", "processor", "device", "python", "torch", "penstock"])
def test_every_other_fact_is_named(key: str) -> None:
    text = mismatch(MEASURED, replace(HERE, **{key: "another"}), ranks=2, nodes=2)
    assert text is not None and f"{key} {getattr(HERE, key)} (here another)" in text
    assert "penstock profile" in text and "\n" not in text


@pytest.mark.parametrize(
    ("ranks", "nodes", "shown"), [(4, 2, "ranks 2 (here 4)"), (2, 1, "nodes 2 (here 1)")]
)
def test_the_layout_is_compared(ranks: int, nodes: int, shown: str) -> None:
    text = mismatch(MEASURED, HERE, ranks=ranks, nodes=nodes)
    assert text is not None and shown in text


def test_files_written_by_hand_are_never_compared() -> None:
    assert mismatch(find_cluster("netmoe-a800"), HERE, ranks=2, nodes=2) is None
