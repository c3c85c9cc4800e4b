"""Figures and the page: files of the right size with something on them, and every name and number."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from plotly.offline import get_plotlyjs

from benchmarks.page import write_page
from benchmarks.plot import DPI, WIDTH_IN, apart, draw, log_ticks
from benchmarks.views import COLOURS, MORE_COLOURS, by_rate, colours, ink, lines, tint, view
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


@pytest.mark.parametrize("count", [3, 5, 9])
def test_a_figure_has_its_size_and_the_colour_of_every_case(tmp_path: Path, count: int) -> None:
    path = draw({"run": result(4e8, NINE[:count])}, tmp_path)["run"]
    image = pixels(path)
    assert image.shape[1] == WIDTH_IN * DPI and image.shape[0] > 80 * count
    found = {tuple(pixel) for pixel in np.round(255 * image[::2, ::2, :3]).astype(int).reshape(-1, 3)}
    palette = colours([view(result(4e8, NINE))])
    for each in NINE[:count]:
        fill = palette[each.schedule] if each.transport == "penstock" else tint(palette[each.schedule], 0.45)
        assert tuple(int(fill[i : i + 2], 16) for i in (1, 3, 5)) in found, each.label


def test_longer_iterations_have_longer_bars(tmp_path: Path) -> None:
    image = np.round(255 * pixels(draw({"run": result()}, tmp_path)["run"])[..., :3]).astype(int)
    widths = []
    for name in ("sequential", "flowmoe", "penstock"):
        colour = [int(COLOURS[name][i : i + 2], 16) for i in (1, 3, 5)]
        columns = np.flatnonzero((image == colour).all(axis=-1).any(axis=0))
        widths.append(columns.max() - columns.min())
    assert widths == pytest.approx([widths[0] * each.iteration_s.median for each in THREE], rel=0.02)


def test_nothing_is_drawn_over_rates_when_there_is_one(tmp_path: Path) -> None:
    assert set(draw({"only": result()}, tmp_path)) == {"only", "prediction"}
    unknown = tuple(case(each.schedule, each.iteration_s.median, simulated_s=None) for each in THREE)
    assert set(draw({"only": result(None, unknown)}, tmp_path)) == {"only"}


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


def test_every_bar_of_a_run_has_a_place_of_its_own() -> None:
    bars = figures_of(write_page(MANY))["nine"]["data"]
    assert len({bar["y"][0] for bar in bars}) == len(NINE)


def test_a_label_cannot_end_the_script() -> None:
    evil = case("sequential", 1.0, label="</script><b>x")
    page = write_page({"run": result(4e8, (evil, *THREE[1:]))})
    assert page.count("</script>") == write_page({"run": result()}).count("</script>")
    assert "</script><b>x" not in page


def test_a_page_without_results_is_a_page() -> None:
    assert figures_of(write_page({})) == {}


# ---- what they have in common ------------------------------------------------------------------------------


def test_a_result_without_the_newer_keys_is_shown() -> None:
    plain = result()
    del plain["virtual"]
    for each in plain["cases"]:
        del each["transport"], each["label"]
    found = view(plain)
    assert not found.virtual and [each.title for each in found.cases] == ["sequential", "flowmoe", "penstock"]


def test_names_say_what_is_special() -> None:
    nine = view(result(4e8, NINE, virtual="asleep"))
    assert nine.title.endswith("(virtual devices)")
    assert nine.cases[6].title == "sequential, Gloo as shipped"
    assert view(result() | {"label": "Mine"}).title == "Mine"
    assert "the link" in view(result(3e8)).limit_name
    assert "computation" in view(result(2e9)).limit_name


def test_lines_join_the_same_case_over_rates() -> None:
    runs = by_rate([view(plain) for plain in MANY.values()])
    assert [run.inter_rate_bit_per_s for run in runs] == [3e8, 4e8, 7e8, 2e9]
    found = {identity[0]: list(line) for identity, line in lines(runs).items()}
    assert found == {each.schedule: [3e8, 4e8, 7e8, 2e9] for each in THREE}


def test_colours_differ_and_do_not_depend_on_the_run() -> None:
    palette = colours([view(result(4e8, NINE))])
    assert len(set(palette.values())) == len(palette) == 7
    assert colours([view(result())])["flowmoe"] == palette["flowmoe"]


@pytest.mark.parametrize("colour", [*COLOURS.values(), *MORE_COLOURS])
def test_text_on_a_bar_is_readable(colour: str) -> None:
    for fill in (colour, tint(colour, 0.45)):
        assert contrast(fill, ink(fill)) > 3.0, fill  # what is asked of large or bold text


def contrast(one: str, other: str) -> float:
    """Ratio of luminances, from 1 to 21."""
    lights = []
    for colour in (one, other):
        parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        lights.append(float(linear @ [0.2126, 0.7152, 0.0722]) + 0.05)
    return max(lights) / min(lights)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.floats(0.01, 0.1))
def test_labels_stand_apart_in_their_order(heights: list[float], gap: float) -> None:
    places = apart(heights, gap)
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    for lower, upper in pairwise(order):
        assert places[upper] - places[lower] >= gap - 1e-9
    if min((abs(a - b) for i, a in enumerate(heights) for b in heights[:i]), default=1.0) >= gap:
        assert places == pytest.approx(heights)


@given(st.floats(1e-3, 1e2), st.floats(1.3, 1e4))
def test_ticks_are_few_and_inside(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert all(low <= tick <= low * factor for tick in ticks)
    assert ticks == sorted(ticks) and len(ticks) <= 6


def test_the_style_of_the_caller_is_left_alone(tmp_path: Path) -> None:

    before = dict(mpl.rcParams)
    draw({"run": result()}, tmp_path)
    assert dict(mpl.rcParams) == before
