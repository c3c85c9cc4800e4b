"""Pictures of loads: what is drawn, and the colours of a heat map."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.report.loads import CELL, COLD, EVEN, HOT, LoadCourse, colours, draw_loads


@pytest.mark.parametrize("layers", [1, 20])
def test_a_picture_is_written_however_many_layers_there_are(tmp_path: Path, layers: int) -> None:
    loads = np.random.default_rng(0).integers(0, 9, (3, layers, 4))
    loads[0] = 0
    path = draw_loads(LoadCourse(tuple(range(layers)), (1, 2, 3), loads), tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_colours_go_from_blue_by_way_of_white_to_orange() -> None:
    """A quarter of the mean, the mean, four times the mean."""
    cells = colours(np.array([[1, 4, 16, 0, 0, 3, 4, 4]]))[::CELL, ::CELL]
    assert [tuple(map(int, cells[0, i])) for i in (0, 1, 2)] == [COLD, EVEN, HOT]
    assert colours(np.zeros((1, 2), dtype=np.int64)).shape == (CELL, 2 * CELL, 3)
