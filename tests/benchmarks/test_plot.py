"""Figures and the page: files of the right size with something on them, and every name and number."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from plotly.offline import get_plotlyjs

from benchmarks.page import write_page
from benchmarks.plot import DPI, WIDTH_IN, draw
from benchmarks.views import colours, tint, view
from tests.benchmarks.results import NINE, THREE, case, result

pytestmark = pytest.mark.slow

RATES = {"slow": result(3e8), "middle": result(7e8), "fast": result(2e9)}
MANY: dict[str, Any] = {**RATES, "nine": result(4e8, NINE), "asleep": result(4e8, THREE, virtual="asleep")}


def pixels(path: Path) -> Any:
    """[height, width, 3 or 4], from 0 to 1."""
    return imread(path)


# ---- PNG ---------------------------------------------------------------------------------------------------


def test_one_figure_for_each_run_and_two_over_all(tmp_path: Path) -> None:
    files = draw(MANY, tmp_path / "new" / "folder")
    assert set(files) == {*MANY, "rates", "prediction"}
    assert all(path == tmp_path / "new" / "folder" / f"{name}.png" for name, path in files.items())
    assert set(draw({"only": result()}, tmp_path)) == {"only", "prediction"}


def test_a_figure_has_its_size_and_the_colour_of_every_case(tmp_path: Path) -> None:
    path = draw({"run": result(4e8, NINE)}, tmp_path)["run"]
    image = pixels(path)
    assert image.shape[1] == WIDTH_IN * DPI and image.shape[0] > 80 * len(NINE)
    found = {tuple(pixel) for pixel in np.round(255 * image[::2, ::2, :3]).astype(int).reshape(-1, 3)}
    palette = colours([view(result(4e8, NINE))])
    for each in NINE:
        fill = palette[each.schedule] if each.transport == "penstock" else tint(palette[each.schedule], 0.45)
        assert tuple(int(fill[i : i + 2], 16) for i in (1, 3, 5)) in found, each.label


# ---- the page ----------------------------------------------------------------------------------------------


def figures_of(page: str) -> dict[str, Any]:
    found = re.search(r"^const figures = (\{.*\});$", page, re.MULTILINE)
    assert found is not None
    figures: dict[str, Any] = json.loads(found[1])
    return figures


def test_the_page_needs_no_network() -> None:
    page = write_page(MANY)
    library = get_plotlyjs()
    assert page.count(library) == 1
    ours = page.replace(library, "")
    assert "http:" not in ours and "https:" not in ours and "//" not in ours
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=", ours) and "@import" not in ours
    assert "default-src 'none'" in ours


def test_the_page_has_every_case_with_its_numbers() -> None:
    page = write_page(MANY, title="Title & more", subtitle="two cores")
    assert "Title &amp; more" in page and "two cores" in page
    figures = figures_of(page)
    assert set(figures) == {*MANY, "overview-rates", "overview-prediction"}
    for name, plain in MANY.items():
        assert f'id="{name}"' in page
        for each, bar in zip(view(plain).cases, figures[name]["data"], strict=True):
            assert each.title in bar["y"][0] and bar["x"] == [1e3 * each.iteration_s]
            for text in (
                f"{1e3 * each.iteration_s:,.{0 if each.iteration_s >= 0.1 else 1}f} [",
                f"{each.speedup:.3f} [",
                f"{each.efficiency:.3f}",
            ):
                assert text in bar["hovertemplate"] and text in page
    assert "virtual devices" in page


def test_a_label_cannot_end_the_script() -> None:
    evil = case("sequential", 1.0, label="</script><b>x")
    page = write_page({"run": result(4e8, (evil, *THREE[1:]))})
    assert page.count("</script>") == write_page({"run": result()}).count("</script>")
    assert "</script><b>x" not in page
