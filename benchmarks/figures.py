"""The figures of one comparison, for `penstock bench --plot`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.page import write_page
from benchmarks.plot import draw
from benchmarks.views import Result


def write_figures(result: Result, folder: Path) -> list[Path]:
    """Write PNG files and a page for a browser into `folder`, made if need be; return their paths."""
    figures = draw({"comparison": result}, folder)
    page = folder / "index.html"
    page.write_text(write_page({"comparison": result}, title="penstock bench"), encoding="utf-8")
    return [*figures.values(), page]
