"""Pictures of loads: what is drawn, and the colours of a heat map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config import ConfigError
from penstock.report.loads import CELL, COLD, EVEN, HOT, NUMBERS, LoadCourse, colours, draw_loads


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


def course(steps: int) -> LoadCourse:
    drawn = np.random.default_rng(1).integers(0, 2**40, (steps, 2, 3))
    return LoadCourse((1, 4), tuple(range(5, 5 + steps)), drawn)


@pytest.mark.parametrize("steps", [1, 4])
def test_loads_are_read_as_they_were_saved(tmp_path: Path, steps: int) -> None:
    course(2).save(tmp_path)
    course(steps).save(tmp_path)
    found = LoadCourse.read(tmp_path / NUMBERS)
    assert (found.layers, found.steps) == (course(steps).layers, course(steps).steps)
    assert np.array_equal(found.loads_SYE, course(steps).loads_SYE)
    assert [each.name for each in tmp_path.iterdir()] == [NUMBERS]


@pytest.mark.parametrize(
    "arrays",
    [
        {"layers": [1], "steps": [1]},
        {"layers": [1], "steps": [1, 2], "loads": np.ones((1, 1, 3), dtype=int)},
        {"layers": [1], "steps": [1], "loads": np.ones((1, 1, 3))},
        {"layers": [1], "steps": [1], "loads": np.array([None])},
    ],
)
def test_other_arrays_are_refused_with_the_name_of_the_file(tmp_path: Path, arrays: dict[str, Any]) -> None:
    np.savez(tmp_path / NUMBERS, **arrays)
    with pytest.raises(ConfigError, match=NUMBERS):
        LoadCourse.read(tmp_path / NUMBERS)
